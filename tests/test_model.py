import json
import re
import shutil
from typing import Any

import pytest
import torch
import transformers
from conftest import KINDS, make_tokenizer, save_checkpoint
from fakes import TableModel
from gguf import GGUFWriter, TokenType

from setblock import model as subject
from setblock.masks import CLEAN, PADDING, Layout, causal_layout, decoding_layout
from setblock.model import Model, ModelError, attention_mask, write_settings

TOLERANCE = 1e-5
DENSE = [kind for kind in KINDS if kind != "mixtral"]


def load(name, device: str | None = "cpu", **options) -> Model:
    """Load on the CPU, where the laws hold to the last bits, accelerator or not."""
    return subject.load(name, device=device, **options)


def random_text(model: Model, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def uncached(model: Model, text: list[int], start: int, end: int) -> torch.Tensor:
    """Logits [end, vocab] of one row: `text` up to `end`, noisy from `start` on."""
    layout = decoding_layout(torch.arange(end)[None], torch.tensor([start]), torch.tensor([end]))
    return model.forward(torch.tensor([text[:end]]), layout)[0]


def run(model: Model, cache, rows: list[tuple[list[int], int, int]]) -> list[torch.Tensor]:
    """One cached forward of (text, start, end) rows; per row its logits from the cache's end on."""
    cached = cache.lengths.tolist()
    num_queries = max(end - length for (_, _, end), length in zip(rows, cached, strict=True))
    tokens = torch.full((len(rows), num_queries), model.pad_token_id)
    for row, ((text, _, end), length) in enumerate(zip(rows, cached, strict=True)):
        tokens[row, : end - length] = torch.tensor(text[length:end])
    position = cache.lengths[:, None] + torch.arange(num_queries)
    start, end = (torch.tensor([row[i] for row in rows]) for i in (1, 2))
    logits = model.forward(tokens, decoding_layout(position, start, end), cache)
    return [logits[i, : end[i] - cached[i]] for i in range(len(rows))]


def memories(cache) -> list[torch.Tensor]:
    return [memory for layer in cache.layers for memory in (layer.keys, layer.values)]


def embeddings(network: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return network.get_input_embeddings().weight, network.get_output_embeddings().weight


def token_id(name: str, **options) -> int:
    tokenizer: Any = make_tokenizer(**options)
    return tokenizer.convert_tokens_to_ids(name)


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
    cache.keep(torch.tensor([9, 9]))
    for _ in range(2):  # later forwards of a block
        check_against_uncached(model, cache, [(text, 9, 9 + k) for text in texts])
    fused = [(text, 9 + k, 9 + 2 * k) for text in texts]  # previous block, then the next
    check_against_uncached(model, cache, fused)
    cache.keep(torch.tensor([k, k]))
    check_against_uncached(model, cache, [(text, 14, 14) for text in texts])  # one next token
    cache.keep(torch.tensor([1, 1]))
    assert cache.lengths.tolist() == [14, 14]


@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_uncached_for_rows_at_different_stages(checkpoint, kind):
    model, k = load(checkpoint(kind)), 4
    a, b, c = (random_text(model, 30, seed) for seed in (1, 2, 3))
    cache = model.new_cache(3, 40)
    check_against_uncached(model, cache, [(a, 5, 5), (b, 9, 9), (c, 12, 12)])
    cache.keep(torch.tensor([5, 9, 12]))
    # row 0 the fused forward of a block, row 1 a later one, row 2 a single next token
    check_against_uncached(model, cache, [(a, 9, 9 + k), (b, 9, 9 + k), (c, 13, 13)])
    cache.keep(torch.tensor([k, 0, 1]))
    check_against_uncached(model, cache, [(a, 9, 9 + k), (b, 9 + k, 9 + 2 * k), (c, 16, 16)])
    cache.keep(torch.tensor([0, k, 2]))  # row 2: two of its three clean tokens
    cache.select(torch.tensor([2, 0]))
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
    cache.keep(torch.tensor([6, 9]))
    before = prefix(0, 6) + prefix(1, 9)
    for shift in range(3):
        noisy = [text[:9] + random_text(model, 11, seed=shift) for text in texts]
        run(model, cache, [(noisy[0], 6, 10), (noisy[1], 9, 13)])
    after = prefix(0, 6) + prefix(1, 9)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

    # What the cache holds in the end is what a causal forward alone would have put there.
    run(model, cache, [(texts[0], 10, 14), (texts[1], 13, 17)])
    cache.keep(torch.tensor([4, 4]))
    decoded = prefix(0, 10)
    cache = model.new_cache(1, 32)
    run(model, cache, [(texts[0], 10, 10)])
    for old, new in zip(decoded, prefix(0, 10), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=TOLERANCE)


def test_memory_nobody_wrote_is_zero(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(1, 16)
    run(model, cache, [(random_text(model, 5), 5, 5)])
    assert all((memory[:, :, 5:] == 0).all() for memory in memories(cache))


def test_cache_refuses_what_does_not_fit(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(1, 10)
    run(model, cache, [(random_text(model, 8), 8, 8)])
    cache.keep(torch.tensor([8]))
    with pytest.raises(ValueError, match=r"prefix of 8 tokens and 4 query tokens exceed .* 10"):
        run(model, cache, [(random_text(model, 12), 8, 12)])


def test_keep_refuses_noisy_padding_and_misplaced_tokens(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(2, 32)
    with pytest.raises(AssertionError, match="before any"):
        cache.keep(torch.tensor([1, 1]))
    texts = [random_text(model, 20, seed) for seed in (1, 2)]
    run(model, cache, [(texts[0], 5, 7), (texts[1], 4, 4)])
    with pytest.raises(AssertionError, match=r"\[6, 4\] query tokens, of which only \[5, 4\]"):
        cache.keep(torch.tensor([6, 4]))
    with pytest.raises(AssertionError, match=r"\[5, 5\] query tokens, of which only \[5, 4\]"):
        cache.keep(torch.tensor([5, 5]))
    cache.keep(torch.tensor([5, 4]))
    with pytest.raises(AssertionError, match="twice"):
        cache.keep(torch.tensor([0, 0]))
    tokens = torch.tensor([texts[0][:2], texts[1][:2]])
    model.forward(tokens, causal_layout(torch.tensor([[5, 6], [5, 6]])), cache)  # row 1 is at 4
    with pytest.raises(AssertionError, match=r"only \[2, 0\]"):
        cache.keep(torch.tensor([2, 2]))


def test_keys_layout_places_prefix_queries_and_padding(checkpoint):
    model = load(checkpoint())
    cache = model.new_cache(2, 32)
    run(model, cache, [(random_text(model, 3), 3, 3), (random_text(model, 1), 1, 1)])
    cache.keep(torch.tensor([3, 1]))
    position = cache.lengths[:, None] + torch.arange(2)
    start, end = torch.tensor([3, 2]), torch.tensor([5, 2])  # a block of 2; one clean token
    keys = cache.keys_layout(decoding_layout(position, start, end))
    assert keys.position.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert keys.block.tolist() == [[CLEAN, CLEAN, CLEAN, 3, 3], [CLEAN] * 5]
    assert keys.horizon.tolist() == [[1, 2, 3, 3, 3], [1, 2, 1, 1, 1]]
    assert keys.document.tolist() == [[0] * 5, [0, 0, PADDING, PADDING, PADDING]]


def test_select_right_after_a_forward(checkpoint):
    model = load(checkpoint())
    a, b = random_text(model, 12, seed=1), random_text(model, 12, seed=2)
    cache = model.new_cache(2, 32)
    run(model, cache, [(a, 4, 4), (b, 6, 6)])
    cache.select(torch.tensor([1]))
    cache.keep(torch.tensor([6]))
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
        with pytest.raises(ModelError, match=r"misreads our masks; use flex_attention, sdpa"):
            attention_mask(network, layout, layout)
    network.config._attn_implementation = "flex_attention"
    masks = attention_mask(network, layout, layout)
    assert {type(mask).__name__ for mask in masks.values()} == {"BlockMask"}


def test_forward_refuses_a_switch_to_eager(checkpoint):
    model = load(checkpoint())
    model.network.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="eager"):
        uncached(model, random_text(model, 4), 4, 4)


# Mask token


def mask_of(folder, **options) -> tuple[int, str]:
    model = load(folder, **options)
    assert (
        model.forward(torch.tensor([[1]]), causal_layout(torch.tensor([[0]])))[
            0, 0, model.mask_token_id
        ]
        == -torch.inf
    )
    return model.mask_token_id, model.mask_token_source


def test_mask_token_order(checkpoint):
    everything = {
        "settings": {"mask_token_id": 8},
        "mask_token": "<mask>",
        "specials": ("<|reserved_special_token_0|>",),
        "free_rows": 5,
    }
    names: dict[str, Any] = {"mask_token": "<mask>", "specials": everything["specials"]}
    assert mask_of(checkpoint(**everything), mask_token_id=7) == (7, "given explicitly")
    assert mask_of(checkpoint(**everything)) == (8, "the checkpoint's own setting")
    del everything["settings"]
    expected = token_id("<mask>", **names)
    assert mask_of(checkpoint(**everything)) == (expected, "the tokenizer's <mask>")
    del everything["mask_token"]
    reserved = "<|reserved_special_token_0|>"
    expected = token_id(reserved, **names)
    assert mask_of(checkpoint(**everything)) == (expected, f"the reserved token {reserved}")
    del everything["specials"]
    free = len(make_tokenizer())
    expected = (free, "the embedding's first row that has no token")
    assert mask_of(checkpoint(**everything)) == expected
    assert load(checkpoint(**everything)).vocab_size == free + 5
    del everything["free_rows"]
    assert mask_of(checkpoint(**everything)) == (free, "a new token <|mask|>")


@pytest.mark.parametrize(
    ("specials", "expected"),
    [
        (("<repo_name>", "<reponame>", "<filename>", "<gh_stars>"), "<gh_stars>"),  # SmolLM2
        (("<reponame>", "<filename>", "<gh_stars>"), "<|mask|>"),  # StarCoder: trained on it
        (("<unused0>", "<unused1>"), "<unused0>"),  # Gemma
    ],
)
def test_reserved_tokens_of_known_tokenizers(checkpoint, specials, expected):
    found, source = mask_of(checkpoint(specials=specials))
    assert expected in source
    new = len(make_tokenizer(specials=specials))
    assert found == (new if expected == "<|mask|>" else token_id(expected, specials=specials))


def test_a_reserved_token_in_use_is_passed_over(tmp_path):
    token = "<|reserved_special_token_0|>"
    folder = save_checkpoint(tmp_path / "padding", specials=(token,), pad_token=token)
    assert load(folder).mask_token_source == "a new token <|mask|>"
    folder = save_checkpoint(tmp_path / "chat", specials=(token,))
    assert load(folder).mask_token_source == f"the reserved token {token}"
    (folder / "chat_template.jinja").write_text(token)
    assert load(folder).mask_token_source == "a new token <|mask|>"


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma3"])
def test_an_added_mask_token_starts_at_the_mean_and_is_found_again(checkpoint, tmp_path, kind):
    model, before = load(checkpoint(kind)), len(make_tokenizer())
    assert model.mask_token_id == before
    assert model.vocab_size == before + 1
    embedding, head = embeddings(model.network)
    for weight in (embedding, head):
        torch.testing.assert_close(weight[-1], weight[:-1].mean(dim=0))
    assert (embedding.data_ptr() == head.data_ptr()) == (kind != "llama")
    model.network.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert mask_of(tmp_path) == (before, "the tokenizer's <|mask|>")


@pytest.mark.parametrize("token", ["<s>", "</s>", "<pad>"])
def test_a_mask_token_with_another_role_is_refused(checkpoint, token):
    wrong = token_id(token)
    with pytest.raises(ModelError, match=rf"mask token {wrong} \(given explicitly\) is also an"):
        load(checkpoint(), mask_token_id=wrong)
    with pytest.raises(ModelError, match=r"\(the checkpoint's own setting\) is also an"):
        load(checkpoint(settings={"mask_token_id": wrong}))


@pytest.mark.parametrize("wrong", [-1, 261, 10_000])
def test_a_mask_token_outside_the_embedding_is_refused(checkpoint, wrong):
    with pytest.raises(ModelError, match=f"mask token {wrong} .* not among the 261 embeddings"):
        load(checkpoint(), mask_token_id=wrong)


# The checkpoint's own settings


def test_settings_survive_a_file_that_transformers_reads_without_them(checkpoint):
    settings = {"mask_token_id": 7, "trained": True, "block_size": 8, "solver": "fixed:2"}
    folder = checkpoint(settings=settings)
    file = json.loads((folder / "generation_config.json").read_text())
    assert file["_from_model_config"] is True
    # transformers drops the unknown key of such a file, so we read the file ourselves.
    stock = transformers.GenerationConfig.from_pretrained(folder)
    assert "setblock" not in stock.to_dict()
    model = load(folder)
    assert model.trained
    assert model.defaults == {"mode": "sbd", "solver": "fixed:2", "block_size": 8}


def test_transformers_keeps_settings_without_the_flag(checkpoint, tmp_path):
    settings = {"mask_token_id": 7}
    folder = shutil.copytree(checkpoint(settings=settings), tmp_path / "copy")
    file = folder / "generation_config.json"
    entries = json.loads(file.read_text())
    del entries["_from_model_config"]
    file.write_text(json.dumps(entries))
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    network.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert saved["setblock"] == settings
    assert load(folder).mask_token_id == 7


def test_defaults_without_settings(checkpoint):
    model = load(checkpoint())
    assert not model.trained
    assert model.defaults == {"mode": "sbd", "solver": "entropy:0.1", "block_size": 16}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"blocksize": 8},
            "'blocksize' is not one of acceptance, block_size, .*mask_token_id, mode, solver",
        ),
        ({"block_size": 0}, "block_size must be a int of at least 1, got 0"),
        ({"block_size": "8"}, "block_size must be a int of at least 1, got '8'"),
        ({"acceptance": 1.0}, "acceptance must be a float between 0 and 1, got 1.0"),
        ({"acceptance": 1}, "acceptance must be a float between 0 and 1, got 1"),
        ({"trained": 1}, "trained must be a bool, got 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(checkpoint, settings, message):
    with pytest.raises(ModelError, match=message):
        load(checkpoint(settings=settings))


def test_settings_written_to_a_checkpoint_are_found(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(), tmp_path / "copy")
    write_settings(folder, mask_token_id=7, trained=True)
    write_settings(folder, block_size=4, dtype="float16", device="cpu")
    model = load(folder, device=None)
    assert (model.mask_token_id, model.trained, model.defaults["block_size"]) == (7, True, 4)
    assert (model.dtype, model.device.type) == (torch.float16, "cpu")
    assert load(folder, dtype="float32").dtype == torch.float32
    assert load(folder).eos_token_ids == {token_id("</s>")}  # the file's other keys stay
    with pytest.raises(ModelError, match="'blocksize' is not one of"):
        write_settings(folder, blocksize=4)
    write_settings(folder, device="abacus")
    with pytest.raises(ModelError, match="device 'abacus' can't be used"):
        load(folder, device=None)


def test_device_and_dtype_without_settings(checkpoint):
    model = load(checkpoint(), device=None)
    if torch.cuda.is_available():
        assert (model.device.type, model.dtype) == ("cuda", torch.bfloat16)
    else:
        assert (model.device.type, model.dtype) == ("cpu", torch.float32)


# Text


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


# Loading


def test_dtypes(checkpoint):
    assert load(checkpoint()).dtype == torch.float32
    assert load(checkpoint(), dtype="bfloat16").dtype == torch.bfloat16
    assert load(checkpoint(), dtype=torch.float16).dtype == torch.float16
    half = load(checkpoint(), dtype="bfloat16")
    assert (
        half.forward(torch.tensor([[1]]), causal_layout(torch.tensor([[0]]))).dtype == torch.float32
    )


def test_the_checkpoints_own_dtype(checkpoint, tmp_path):
    model = load(checkpoint(), dtype="bfloat16")
    model.network.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of auto, bfloat16, float16, float32"),
        ({"device": "abacus"}, "device 'abacus' can't be used"),
    ],
)
def test_options_are_checked(checkpoint, options, message):
    with pytest.raises(ModelError, match=message):
        load(checkpoint(), **options)


@pytest.mark.parametrize("name", ["", "nanoo", "/no/such/folder", "./none", "none.gguf", "a/b/c"])
def test_names_that_name_nothing(name):
    with pytest.raises(ModelError, match="it is not a checkpoint folder, a GGUF"):
        load(name)


def test_a_hub_name_that_can_not_be_had():
    with pytest.raises(ModelError, match="can't load 'nobody/nothing': ") as caught:
        load("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_incomplete_and_broken_folders(checkpoint, tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)
    folder = shutil.copytree(checkpoint(), tmp_path / "copy")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(ModelError, match="can't load"):
        load(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"can't load .*safetensors"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json or"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="can't load"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't load"):
        load(folder)
    with pytest.raises(ModelError, match="no model"):
        load(folder / "config.json")


def test_a_checkpoint_that_lacks_weights(checkpoint, tmp_path):
    model = load(checkpoint())
    state = model.network.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.network.save_pretrained(tmp_path, state_dict=state)
    model.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks 1 weights, among them 'model\.layers\.1\.mlp"):
        load(tmp_path)


def refused(tmp_path, config: transformers.PretrainedConfig) -> str:
    config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "t5 is an encoder-decoder"),
        (transformers.ViTConfig(), "vit has no causal language model class"),
        (transformers.Gemma3Config(), "gemma3 is multimodal"),
        (transformers.MambaConfig(), "mamba has no attention"),
        (transformers.BloomConfig(), "bloom .*"),
        (transformers.Gemma2Config(), "gemma2 sets attn_logit_softcapping"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional"),
        (transformers.BertConfig(architectures=["BertForMaskedLM"]), "is here a BertForMaskedLM"),
        (transformers.Llama4TextConfig(), "llama4_text sets attention_chunk_size"),
        (transformers.Qwen3NextConfig(), "qwen3_next has no attention"),
        (
            transformers.Qwen3Config(num_hidden_layers=1, layer_types=["chunked_attention"]),
            "qwen3 has layers of type chunked_attention; only full_attention, sliding_attention",
        ),
        (transformers.Cohere2Config(), "cohere2 mixes full and sliding-window layers"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_architectures_that_can_not_run_are_refused(tmp_path, config, message):
    assert re.search(message, refused(tmp_path, config))


# GGUF


def write_gguf(path, network, tokenizer, tied: bool) -> None:
    """Write a Llama network the way llama.cpp's converter does."""
    config, state = network.config, network.state_dict()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab", "abc"]
    special = set(tokenizer.all_special_tokens)
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)

    def swap_halves(weight, heads):  # GGUF interleaves the two halves of a rotary head
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{a}": f"blk.{layer}.{b}" for a, b in parts.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, short in names.items():
        weight = state[f"{name}.weight"].float()
        if (projection := name.rpartition(".")[2]) in heads:
            weight = swap_halves(weight, heads[projection])
        if name != "lm_head" or not tied:
            writer.add_tensor(f"{short}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "head_in_file"), [("llama", True), ("llama-tied", True), ("llama-tied", False)]
)
def test_gguf_round_trip(checkpoint, tmp_path, kind, head_in_file):
    original = load(checkpoint(kind, free_rows=2))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original.network, original.tokenizer, tied=not head_in_file)
    model = load(path)
    text = "some text"
    assert model.encode(text)[-len(text) :] == original.encode(text)[-len(text) :]
    assert model.decode(model.encode(text)) == text
    # transformers 5.16 names the BOS token as the tokenizer's EOS token too; 5.23 does not.
    assert model.eos_token_ids >= original.eos_token_ids
    assert model.encode("a", chat=True) == original.encode("a", chat=True)
    ids = original.encode(text)
    size = len(
        original.tokenizer
    )  # the rows after it hold no token in one, "ab" and "abc" in the other
    want, got = (uncached(m, ids, 7, 10)[:, :size] for m in (original, model))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    embedding, head = embeddings(model.network)
    assert (embedding is head) == (kind == "llama-tied")

    # Not flagged as quantized: it can be cast, saved and loaded again.
    model.network.bfloat16().save_pretrained(tmp_path / "saved")
    model.tokenizer.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved", dtype="auto").dtype == torch.bfloat16
    assert load(path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "wrong.gguf"
    path.write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(ModelError, match=r"can't load .*wrong\.gguf"):
        load(path)


# The fake


def test_table_model_obeys_the_same_rules_as_a_model(checkpoint):
    fake, real = TableModel.random(), load(checkpoint())
    public = {name for name in vars(real) if not name.startswith("_")} - {"network", "tokenizer"}
    assert public <= set(vars(fake))
    text = [number % 9 + 3 for number in range(20)]
    model: Any
    for model in (fake, real):
        cache = model.new_cache(2, 32)
        check_against_uncached(model, cache, [(text, 5, 5), (text, 7, 7)])
        cache.keep(torch.tensor([5, 7]))
        check_against_uncached(model, cache, [(text, 5, 9), (text, 8, 8)])
        cache.keep(torch.tensor([0, 1]))
        cache.select(torch.tensor([1]))
        check_against_uncached(model, cache, [(text, 8, 12)])
        with pytest.raises(AssertionError):
            cache.keep(torch.tensor([1]))
        with pytest.raises(ValueError, match="capacity"):
            model.forward(torch.ones(1, 30).long(), causal_layout(torch.arange(8, 38)[None]), cache)
    assert fake.forwards[0] == (2, 7)
    assert fake.decode(fake.encode("a bc.")) == "a bc."


def test_table_model_spells():
    fake = TableModel.spelling("hello", start=2)
    logits = uncached(fake, [2, 3, 0, 0, 0, 0, 0, 0], 2, 8)
    assert fake.decode(logits[2:].argmax(dim=1).tolist()) == "hello"
    assert fake.decode(uncached(fake, [2, 3], 2, 2)[-1:].argmax(dim=1).tolist()) == "h"
