import gc
import json
import shutil
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import KINDS
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import decoding_layout
from networks import load, token_id, uncached

from setblock import cache, loading, masks, packed
from setblock.architectures import attention_mask
from setblock.cache import Memory, PrefixCache
from setblock.generation import generate
from setblock.masks import CLEAN, PADDING, Layout, causal_layout
from setblock.model import Model
from setblock.names import ModelError

TOLERANCE = 1e-5
DENSE = [kind for kind in KINDS if kind != "mixtral"]


def random_text(model: Model, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def run(model: Model, cache, rows: list[tuple[list[int], int, int]]) -> list[torch.Tensor]:
    """One cached forward of (text, start, end) rows; per row its logits from the cache's end on."""
    cached = cache.lengths.tolist()
    num_queries = max(end - length for (_, _, end), length in zip(rows, cached, strict=True))
    tokens = torch.full((len(rows), num_queries), model.pad_token_id)
    for row, ((text, _, end), length) in enumerate(zip(rows, cached, strict=True)):
        tokens[row, : end - length] = torch.tensor(text[length:end])
    position = torch.from_numpy(cache.lengths[:, None] + np.arange(num_queries))
    start, end = (torch.tensor([row[i] for row in rows]) for i in (1, 2))
    logits = model.forward(tokens, decoding_layout(position, start, end), cache)
    return [logits[i, : end[i] - cached[i]] for i in range(len(rows))]


def memories(cache) -> list[torch.Tensor]:
    return [memory for layer in cache.layers for memory in (layer.keys, layer.values)]


def check_against_uncached(model: Model, cache, rows) -> None:
    cached = cache.lengths.tolist()
    for got, (text, start, end), length in zip(run(model, cache, rows), rows, cached, strict=True):
        want = uncached(model, text, start, end)[length:]
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_causal_forward_equals_stock_transformers(checkpoint, kind):
    model = load(checkpoint(kind))
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype="float32")
    tokens = torch.tensor([random_text(model, 13), random_text(model, 13, seed=1)])
    got = model.forward(tokens, causal_layout(torch.arange(13).expand(2, -1)))
    with torch.no_grad():
        want = stock(tokens).logits
    assert (got[..., model.mask_token_id] == -torch.inf).all()
    # The mask token is a new row of the embedding, which the stock network lacks.
    torch.testing.assert_close(got[..., : want.shape[-1]], want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_uncached_for_rows_of_one_length(checkpoint, kind):
    model, k = load(checkpoint(kind)), 4
    texts = [random_text(model, 24, seed) for seed in (1, 2)]
    cache = model.new_cache(2, 32)
    check_against_uncached(model, cache, [(text, 9, 9) for text in texts])  # prefill
    cache.keep(np.array([9, 9]))
    for _ in range(2):  # later forwards of a block
        check_against_uncached(model, cache, [(text, 9, 9 + k) for text in texts])
    fused = [(text, 9 + k, 9 + 2 * k) for text in texts]  # previous block, then the next
    check_against_uncached(model, cache, fused)
    cache.keep(np.array([k, k]))
    check_against_uncached(model, cache, [(text, 14, 14) for text in texts])  # one next token
    cache.keep(np.array([1, 1]))
    assert cache.lengths.tolist() == [14, 14]


@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_uncached_for_rows_at_different_stages(checkpoint, kind):
    model, k = load(checkpoint(kind)), 4
    a, b, c = (random_text(model, 30, seed) for seed in (1, 2, 3))
    cache = model.new_cache(3, 40)
    check_against_uncached(model, cache, [(a, 5, 5), (b, 9, 9), (c, 12, 12)])
    cache.keep(np.array([5, 9, 12]))
    # row 0 the fused forward of a block, row 1 a later one, row 2 a single next token
    check_against_uncached(model, cache, [(a, 9, 9 + k), (b, 9, 9 + k), (c, 13, 13)])
    cache.keep(np.array([k, 0, 1]))
    check_against_uncached(model, cache, [(a, 9, 9 + k), (b, 9 + k, 9 + 2 * k), (c, 16, 16)])
    cache.keep(np.array([0, k, 2]))  # row 2: two of its three clean tokens
    cache.select(np.array([2, 0]))
    assert cache.lengths.tolist() == [15, 9]
    check_against_uncached(model, cache, [(c, 15, 15 + k), (a, 9 + k, 9 + 2 * k)])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_at_picks_the_same_logits(checkpoint, kind):
    model = load(checkpoint(kind))
    tokens = torch.tensor([random_text(model, 8), random_text(model, 8, seed=1)])
    layout = causal_layout(torch.arange(8).expand(2, -1))
    picked = torch.tensor([1, 5, 7])
    got = model.forward(tokens, layout, logits_at=picked)
    torch.testing.assert_close(
        got, model.forward(tokens, layout)[:, picked], rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("kind", DENSE)  # experts see batches whose shapes depend on the tokens
def test_next_token_logits_do_not_depend_on_noisy_tokens(checkpoint, kind):
    model = load(checkpoint(kind))
    text, other = random_text(model, 12), random_text(model, 12, seed=1)
    changed = text[:8] + other[8:]
    assert torch.equal(uncached(model, text, 8, 12)[:8], uncached(model, changed, 8, 12)[:8])
    assert not torch.equal(uncached(model, text, 8, 12)[8], uncached(model, changed, 8, 12)[8])


@pytest.mark.parametrize("kind", DENSE)
def test_a_noisy_block_sees_no_later_clean_token(checkpoint, kind):
    model = load(checkpoint(kind))
    position = torch.tensor(
        [[0, 1, 2, 3, 4, 5, 2, 3]]
    )  # six clean tokens, a noisy block at 2 and 3
    noisy = torch.arange(8)[None] >= 6
    layout = Layout(
        position,
        torch.where(noisy, 2, position + 1),
        torch.where(noisy, 2, CLEAN),
        torch.zeros_like(position),
    )
    tokens = torch.tensor([random_text(model, 8)])
    before = model.forward(tokens, layout)
    later, earlier = tokens.clone(), tokens.clone()
    later[0, 2:6] += 1
    earlier[0, 1] += 1
    assert torch.equal(before[:, 6:], model.forward(later, layout)[:, 6:])
    assert not torch.equal(before[:, 6:], model.forward(earlier, layout)[:, 6:])


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma3"])
def test_only_kept_clean_tokens_persist_in_the_cache(checkpoint, kind):
    model = load(checkpoint(kind))
    texts = [random_text(model, 20, seed) for seed in (1, 2)]
    cache = model.new_cache(2, 32)

    def prefix(row: int, length: int) -> list[torch.Tensor]:
        return [memory[row, :, :length].clone() for memory in memories(cache)]

    run(model, cache, [(texts[0], 6, 6), (texts[1], 9, 9)])
    cache.keep(np.array([6, 9]))
    before = prefix(0, 6) + prefix(1, 9)
    for shift in range(3):
        noisy = [text[:9] + random_text(model, 11, seed=shift) for text in texts]
        run(model, cache, [(noisy[0], 6, 10), (noisy[1], 9, 13)])
    after = prefix(0, 6) + prefix(1, 9)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

    # What the cache holds in the end is what a causal forward alone would have put there.
    run(model, cache, [(texts[0], 10, 14), (texts[1], 13, 17)])
    cache.keep(np.array([4, 4]))
    decoded = prefix(0, 10)
    cache = model.new_cache(1, 32)
    run(model, cache, [(texts[0], 10, 10)])
    for old, new in zip(decoded, prefix(0, 10), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=TOLERANCE)


def test_memory_grows_with_the_text(checkpoint, monkeypatch):
    """Not the whole of what an answer may take is allocated, and what is there stays."""
    model = load(checkpoint())
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    prompts = [[5, 6, 7], [8], [9] * 6]
    ways: list[dict[str, Any]] = [{"mode": "ntp"}, {"block_size": 4}]
    expected = [generate(model, prompts, **options, **way) for way in ways]
    monkeypatch.setattr(cache, "AHEAD", 5)
    rooms, grow = [], cache.Memory.grow

    def growing(memory, needed, rows):
        grow(memory, needed, rows)
        rooms.append(memory.room)

    monkeypatch.setattr(cache.Memory, "grow", growing)
    found = [generate(model, prompts, **options, **way) for way in ways]
    assert [[one.token_ids for one in way] for way in found] == [
        [one.token_ids for one in way] for way in expected
    ]
    assert 11 <= rooms[0] < 40
    assert len(rooms) > 4
    held = model.new_cache(2, 50)
    position = torch.arange(7).expand(2, -1)
    model.forward(torch.full((2, 7), 5), causal_layout(position), held)
    assert memories(held)[0].shape[2] == 12
    before = [memory[:, :, :7].clone() for memory in memories(held)]
    held.keep(np.array([7, 7]))
    model.forward(torch.full((2, 9), 5), causal_layout(position[:, :1] + 7 + torch.arange(9)), held)
    assert memories(held)[0].shape[2] == 24  # twice as much
    assert all(map(torch.equal, before, [memory[:, :, :7] for memory in memories(held)]))


def test_memory_nobody_wrote_is_zero(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(1, 16)
    run(model, cache, [(random_text(model, 5), 5, 5)])
    assert all((memory[:, :, 5:] == 0).all() for memory in memories(cache))


def test_cache_refuses_what_does_not_fit(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(1, 10)
    run(model, cache, [(random_text(model, 8), 8, 8)])
    cache.keep(np.array([8]))
    with pytest.raises(ValueError, match=r"prefix of 8 tokens and 4 query tokens exceed .* 10"):
        run(model, cache, [(random_text(model, 12), 8, 12)])


def test_keep_refuses_noisy_padding_and_misplaced_tokens(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(2, 32)
    with pytest.raises(AssertionError, match="before any"):
        cache.keep(np.array([1, 1]))
    texts = [random_text(model, 20, seed) for seed in (1, 2)]
    run(model, cache, [(texts[0], 5, 7), (texts[1], 4, 4)])
    with pytest.raises(AssertionError, match=r"\[6, 4\] query tokens, of which only \[5, 4\]"):
        cache.keep(np.array([6, 4]))
    with pytest.raises(AssertionError, match=r"\[5, 5\] query tokens, of which only \[5, 4\]"):
        cache.keep(np.array([5, 5]))
    cache.keep(np.array([5, 4]))
    with pytest.raises(AssertionError, match="twice"):
        cache.keep(np.array([0, 0]))
    tokens = torch.tensor([texts[0][:2], texts[1][:2]])
    model.forward(tokens, causal_layout(torch.tensor([[5, 6], [5, 6]])), cache)  # row 1 is at 4
    with pytest.raises(AssertionError, match=r"only \[2, 0\]"):
        cache.keep(np.array([2, 2]))


def test_keys_layout_places_prefix_queries_and_padding(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(2, 32)
    run(model, cache, [(random_text(model, 3), 3, 3), (random_text(model, 1), 1, 1)])
    cache.keep(np.array([3, 1]))
    position = torch.from_numpy(cache.lengths[:, None] + np.arange(2))
    start, end = torch.tensor([3, 2]), torch.tensor([5, 2])  # a block of 2; one clean token
    queries = decoding_layout(position, start, end)
    cache.stage(queries)
    cache.locate(torch.from_numpy(cache.lengths), 2)
    keys = cache.keys_layout(queries)
    assert keys.position.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert keys.block.tolist() == [[CLEAN, CLEAN, CLEAN, 3, 3], [CLEAN] * 5]
    assert keys.horizon.tolist() == [[1, 2, 3, 3, 3], [1, 2, 1, 1, 1]]
    assert keys.document.tolist() == [[0] * 5, [0, 0, PADDING, PADDING, PADDING]]


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3
    ),
    branches=st.integers(0, 2),
    window=st.none() | st.integers(1, 8),
    grain=st.sampled_from([1, 8]),
    gap=st.sampled_from([0, 0, 11]),
)
def test_what_is_visible_behind_a_cache_is_the_rule_over_all_of_its_keys(
    rows, branches, window, grain, gap
):
    """Rows of a prefix, maybe a gap, clean tokens and noisy ones, and branches."""
    cached, clean, noisy = (np.array(column) for column in zip(*rows, strict=True))
    clean = np.maximum(clean, noisy == 0)  # no row without a token
    cache = PrefixCache(1, len(rows), 40, Memory(len(rows), 40), grain)
    cache.lengths = cached
    begin = cached + gap
    start, end = begin + clean, begin + clean + noisy
    position = begin[:, None] + np.arange(int((clean + noisy).max()))
    queries = masks.decoding_layout(position, start, end)
    if branches:
        # The second begins before the last clean tokens, some of them in the cache.
        first = np.maximum(start[:, None] - 4 * np.arange(branches), 0)
        last = first + np.arange(2, 2 - branches, -1)  # its last token is padding
        queries = queries.cat(masks.branches_layout(first, last, 2))
    cache.stage(queries)
    cache.locate(torch.from_numpy(cached), queries.position.shape[1])
    found = cache.visible(queries, window)
    expected = masks.visible(queries, cache.keys_layout(queries), window)
    assert found.shape == expected.shape
    real = (queries.document != PADDING)[:, None, :, None]
    assert torch.equal(found & real, expected & real)
    assert found.any(dim=-1).all(), "a query without a key has no attention"


def test_a_model_without_its_network_keeps_no_weight(checkpoint):
    model = load(checkpoint())
    weight = weakref.ref(model.network.get_input_embeddings().weight)
    assert model.device == torch.device("cpu")
    model.network = None
    gc.collect()
    assert weight() is None


def test_select_right_after_a_forward(checkpoint):
    model = load(checkpoint())
    a, b = random_text(model, 12, seed=1), random_text(model, 12, seed=2)
    cache = model.new_cache(2, 32)
    run(model, cache, [(a, 4, 4), (b, 6, 6)])
    cache.select(np.array([1]))
    cache.keep(np.array([6]))
    check_against_uncached(model, cache, [(b, 6, 9)])


def test_a_mask_per_layer_type_only_where_layers_differ(checkpoint):
    layout = causal_layout(torch.arange(6)[None])
    for kind in KINDS:
        mask = attention_mask(load(checkpoint(kind)).network, layout, layout)
        if kind in ("gemma3", "qwen2-window", "qwen3-window"):
            assert set(mask) == {"full_attention", "sliding_attention"}
            assert mask["full_attention"][0, 0, 5].all()
            mask = mask["sliding_attention"]
        assert mask.shape == (1, 1, 6, 6)
        assert mask.dtype == torch.bool
        windowed = kind == "gemma3" or kind.endswith("window")
        assert mask[0, 0, 5].tolist() == [not windowed] * 2 + [True] * 4


def test_attention_backends(checkpoint):
    layout = causal_layout(torch.arange(6)[None])
    network = load(checkpoint("qwen3-window")).network
    for backend in ("eager", "flash_attention_2", "paged|sdpa"):
        network.config._attn_implementation = backend
        with pytest.raises(ModelError, match="misreads our masks; use flex_attention, sdpa, s"):
            attention_mask(network, layout, layout)
    network.config._attn_implementation = "flex_attention"
    masks = attention_mask(network, layout, layout)
    assert {type(mask).__name__ for mask in masks.values()} == {"BlockMask"}


def test_forward_refuses_a_switch_to_eager(checkpoint):
    model = load(checkpoint())
    model.network.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="eager"):
        uncached(model, random_text(model, 4), 4, 4)


def test_text(checkpoint):
    model = load(checkpoint())
    text = "naïve  text\n"
    assert model.encode(text)[0] == model.bos_token_id
    assert model.decode(model.encode(text)) == text
    assert model.decode([*model.encode("a"), *model.eos_token_ids, model.mask_token_id]) == "a"
    assert model.decode([]) == ""
    assert model.encode("") == [model.bos_token_id]
    chat = model.encode("a", chat=True)
    assert (chat[0], chat[-1]) == (token_id("<user>"), token_id("<model>"))
    assert len(chat) == 4
    assert model.context_length == 256


def test_ids_past_the_tokenizer_decode_to_nothing(checkpoint):
    model = load(checkpoint(free_rows=5))
    assert model.decode([*model.encode("a"), model.mask_token_id, model.vocab_size - 1]) == "a"


def test_what_a_model_prints_as(checkpoint, monkeypatch):
    monkeypatch.setattr(packed, "SMALLEST", dict.fromkeys(packed.SMALLEST, 0))
    model = load(checkpoint("llama"))
    millions = sum(weight.numel() for weight in model.network.parameters()) / 1e6
    said = f"LlamaForCausalLM, {millions:.1f} million parameters, float32 on cpu, mode 'ntp'"
    assert repr(model) == f"<setblock.Model {str(checkpoint('llama'))!r}: {said}>"
    if packed.missing(model.device, model.dtype) is None:
        model.pack()  # takes weights out of the network's own
        assert said in repr(model)


def test_text_refusals(checkpoint):
    model = load(checkpoint(bos=False, chat=False))
    assert model.bos_token_id is None
    with pytest.raises(ModelError, match="an empty prompt needs a BOS token"):
        model.encode("")
    with pytest.raises(ModelError, match="no chat template"):
        model.encode("a", chat=True)


def test_end_tokens_come_from_generation_config_and_tokenizer(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(), tmp_path / "copy")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [3, 4]}))
    model = load(folder)
    assert model.eos_token_ids == {3, 4, token_id("</s>")}


def test_padding_id_where_there_is_no_padding_token(checkpoint):
    model = load(checkpoint(pad_token=None))
    assert 0 <= model.pad_token_id < model.vocab_size


def test_table_model_obeys_the_same_rules_as_a_model(checkpoint):
    fake, real = TableModel.random(), load(checkpoint())
    public = {name for name in vars(real) if not name.startswith("_")} - {"network", "tokenizer"}
    assert public <= set(vars(fake))
    text = [number % 9 + 3 for number in range(20)]
    model: Any
    for model in (fake, real):
        cache = model.new_cache(2, 32)
        check_against_uncached(model, cache, [(text, 5, 5), (text, 7, 7)])
        cache.keep(np.array([5, 7]))
        check_against_uncached(model, cache, [(text, 5, 9), (text, 8, 8)])
        cache.keep(np.array([0, 1]))
        cache.select(np.array([1]))
        check_against_uncached(model, cache, [(text, 8, 12)])
        with pytest.raises(AssertionError):
            cache.keep(np.array([1]))
        with pytest.raises(ValueError, match="capacity"):
            model.forward(torch.ones(1, 30).long(), causal_layout(torch.arange(8, 38)[None]), cache)
    assert fake.forwards[0] == (2, 7)
    assert fake.decode(fake.encode("a bc.")) == "a bc."


def test_table_model_spells():
    fake = TableModel.spelling("hello", start=2)
    logits = uncached(fake, [2, 3, 0, 0, 0, 0, 0, 0], 2, 8)
    assert fake.decode(logits[2:].argmax(dim=1).tolist()) == "hello"
    assert fake.decode(uncached(fake, [2, 3], 2, 2)[-1:].argmax(dim=1).tolist()) == "h"


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
def test_least_bytes_are_weights_and_a_cache(checkpoint, kind, monkeypatch):
    """By arithmetic what the tensors take, shared ones once; packing changes nothing."""
    model = loading.load(checkpoint(kind), device="cpu")
    weights = {weight.data_ptr(): weight.nbytes for weight in model.network.parameters()}
    cache = model.new_cache(2, 7)
    tokens = torch.tensor([[5, 6], [7, 8]])
    model.forward(tokens, causal_layout(torch.arange(2).expand(2, -1)), cache)
    layers: list[Any] = cache.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert model.least_bytes(2 * 7) == sum(weights.values()) + held
    monkeypatch.setattr(packed, "SMALLEST", dict.fromkeys(packed.SMALLEST, 0))
    laid_out = loading.load(checkpoint(kind), device="cpu", pack=None)
    assert laid_out.least_bytes(14) == model.least_bytes(14)


def test_a_piece_of_each_kind(checkpoint):
    """A text, the name of a special token, and the number of one that nobody knows."""
    model = load(checkpoint("llama", free_rows=4))
    [end] = model.eos_token_ids
    last = model.vocab_size - 1
    [letter] = model.encode("a")[-1:]
    assert model.piece(letter) == "a"
    assert model.piece(end) == model.tokenizer.convert_ids_to_tokens(end)
    assert model.piece(last) == f"<token {last}>"
