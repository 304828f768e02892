"""Decoding against the oracle in reference.py, token for token, and what each forward costs."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import reference
import torch
import transformers
from conftest import SIZES, make_tokenizer
from fakes import EOS, MASK, TableModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from setblock import decode
from setblock.decode import DecodeState
from setblock.generation import Generation, generate, settings_for
from setblock.masks import CLEAN, PADDING, Layout, causal_layout
from setblock.model import Model
from setblock.solvers import FORMS

# Each solver both timid and bold.
SOLVERS = [
    *(f"{name}:{gamma}" for name in ("entropy", "confidence-bound", "margin-bound")
      for gamma in (0.0, 0.3, 2.5)),
    "entropy:inf", "entropy-threshold:0.2", "entropy-threshold:1.2", "confidence:0.3",
    "confidence:0.8", "factor:0.4", "factor:2.0", "fixed:1", "fixed:3", "prefix:0.2", "prefix:0.9",
]  # fmt: skip
CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
PROMPTS = [[5], [7, 3, 9, 4, 6, 8, 3, 3], [4, 10, 5]]
# Derandomized: a threshold can fall between the last bits of a cached and an uncached forward, and
# what is found by chance here would fail somebody else's change.
SLOW: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="session")
def networks() -> dict[tuple[str, int], Model]:
    """Random float32 networks, weights so large that entropies vary from 0.01 to 3 nats."""
    made = {}
    for kind, config_class in CONFIGS.items():
        for seed in range(3):
            tokenizer = make_tokenizer()
            config = config_class(**{**SIZES, "initializer_range": 1.0})
            config.vocab_size = len(tokenizer) + 1
            torch.manual_seed(seed)
            network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            made[kind, seed] = Model(network, tokenizer, name=f"{kind} {seed}")
    return made


def with_ends(model: Model, every: int) -> Model:
    """The model with each `every`-th token an EOS; none if it has fewer tokens."""
    changed = copy.copy(model)
    ends = frozenset(range(every - 1, model.vocab_size, every))
    changed.eos_token_ids = ends - {model.mask_token_id}
    return changed


def recorded(model: Model) -> tuple[Model, list[Layout]]:
    """The model, and a list that grows by the layout of each of its forwards."""
    watched, layouts = copy.copy(model), []

    def forward(tokens, layout, cache=None, logits_at=None):
        layouts.append(layout)
        return model.forward(tokens, layout, cache, logits_at)

    watched.forward = forward  # type: ignore[method-assign]
    return watched, layouts


def shapes(layouts: Sequence[Layout]) -> list[tuple[int, ...]]:
    return [tuple(layout.position.shape) for layout in layouts]


def facts(generation: Generation) -> tuple[list[int], int, list[int]]:
    return list(generation.token_ids), generation.nfe, list(generation.reveal_step)


def assert_equals_oracle(model: Model, prompts: list[list[int]], **options) -> list[Generation]:
    """Alone, in chunks of two and all at once: always what the oracle says."""
    run = settings_for(model, **options)
    expected = [reference.decode(model, prompt, run, row) for row, prompt in enumerate(prompts)]
    results = []
    for batch_size in sorted({1, 2, len(prompts)}):
        results = generate(model, prompts, batch_size=batch_size, **options)
        assert [facts(result) for result in results] == expected, (
            f"{batch_size=}, {options}: not what the oracle says"
        )
    return results


@st.composite
def options(draw, max_new_tokens: int):
    """Any options but stop texts."""
    chosen: dict[str, Any] = {
        "mode": draw(st.sampled_from(["sbd", "sbd", "sbd", "ntp"])),
        "solver": draw(st.sampled_from(SOLVERS)),
        "block_size": draw(st.integers(1, 20)),
        "max_new_tokens": draw(st.integers(1, max_new_tokens)),
        "ignore_eos": draw(st.booleans()),
    }
    if chosen["mode"] == "sbd":
        chosen["next_token_seed"] = draw(st.booleans())
        chosen["slide"] = draw(st.booleans())
        if not chosen["slide"]:
            chosen["fallback"] = draw(st.sampled_from([None, None, 0.0, 0.4, 1.0]))
    if draw(st.booleans()):
        chosen["temperature"] = draw(st.sampled_from([0.3, 1.0, 1.5]))
        chosen["top_k"] = draw(st.sampled_from([0, 3]))
        chosen["top_p"] = draw(st.sampled_from([1.0, 0.8]))
        chosen["seed"] = draw(st.integers(0, 2**62))
    return chosen


def prompts(tokens: Sequence[int], max_rows: int):
    prompt = st.lists(st.sampled_from(tokens), min_size=1, max_size=9)
    return st.lists(prompt, min_size=1, max_size=max_rows)


# ------------------------------------------------------------------ equal to the oracle


@settings(**SLOW, max_examples=35)
@given(
    seed=st.integers(0, 5),
    prompts=prompts(range(2, 12), max_rows=4),
    options=options(max_new_tokens=35),
    stop=st.lists(st.text("abcd", min_size=1, max_size=2), max_size=2),
)
def test_tables_decode_as_the_oracle_says(seed, prompts, options, stop):
    model = TableModel.random(seed)
    results = assert_equals_oracle(model, prompts, stop=stop, **options)
    assert not any(MASK in result.token_ids for result in results)


@settings(**SLOW, max_examples=12)
@given(
    kind=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 2),
    every=st.sampled_from([4, 15, 300]),
    prompts=prompts(range(0, 256), max_rows=3),
    options=options(max_new_tokens=20),
)
def test_networks_decode_as_the_oracle_says(networks, kind, seed, every, prompts, options):
    assert_equals_oracle(with_ends(networks[kind, seed], every), prompts, **options)


@settings(**SLOW, max_examples=25)
@given(
    seed=st.integers(0, 5),
    prompts=prompts(range(2, 12), max_rows=4),
    options=options(max_new_tokens=12),
)
def test_prompts_in_chunks(seed, prompts, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "CHUNK", 2)
        results = assert_equals_oracle(TableModel.random(seed), prompts, **options)
    expected = [1 + max(-(-(len(prompt) - 2) // 2), 0) for prompt in prompts]
    # All rows of a batch take part in its longest prompt's.
    assert [one.prefill_forwards for one in results] == [max(expected)] * len(prompts)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("mode", decode.MODES)
def test_a_networks_prompts_in_chunks(networks, kind, mode, monkeypatch):
    model = with_ends(networks[kind, 0], every=300)
    texts = [list(range(3, 3 + count)) for count in (1, 7, 30, 41)]
    whole = generate(model, texts, mode=mode, max_new_tokens=20)
    monkeypatch.setattr(decode, "CHUNK", 8)
    watched, layouts = recorded(model)
    chunks = generate(watched, texts, mode=mode, max_new_tokens=20)
    assert [facts(one) for one in chunks] == [facts(one) for one in whole]
    widths = [layout.position.shape[1] for layout in layouts]
    assert widths[:5] == [8, 8, 8, 8, 1]


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_with_a_limit_that_no_block_ends_at(solver):
    assert {text.partition(":")[0] for text in SOLVERS} == set(FORMS)
    model = TableModel.random(seed=1)
    results = assert_equals_oracle(
        model, PROMPTS, solver=solver, block_size=16, max_new_tokens=43, ignore_eos=True
    )
    assert [result.num_tokens for result in results] == [43, 43, 43]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}])
def test_a_network_with_a_limit_that_no_block_ends_at(networks, kind, sampling):
    model = with_ends(networks[kind, 1], every=300)
    options = {"mode": "sbd", "solver": "entropy:1.2", "block_size": 16, "max_new_tokens": 43}
    results = assert_equals_oracle(model, PROMPTS, **options, **sampling)
    assert [result.num_tokens for result in results] == [43, 43, 43]
    assert all(result.nfe < 43 for result in results), "nothing was revealed together"


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
def test_a_network_stops_inside_a_block(networks, mode):
    model = with_ends(networks["llama", 0], every=300)
    run: dict[str, Any] = {
        "mode": mode,
        "solver": "entropy:1.2",
        "block_size": 12,
        "max_new_tokens": 30,
    }
    free = generate(model, PROMPTS, **run)
    # A character of the second block, which no byte of another character can be part of.
    texts = [model.decode([token]) for token in free[0].token_ids[13:22]]
    stop = next(text for text in texts if text.isascii() and text)
    results = assert_equals_oracle(model, PROMPTS, stop=stop, **run)
    assert results[0].finish_reason == "stop"
    assert results[0].token_ids == free[0].token_ids[: results[0].num_tokens]


def test_a_block_larger_than_the_limit():
    model = TableModel.random(seed=2)
    for limit in (1, 2, 5):
        assert_equals_oracle(
            model, PROMPTS, solver="entropy:0.3", block_size=20, max_new_tokens=limit
        )


def test_next_token_decoding_is_transformers_own(networks):
    model = networks["qwen3", 2]
    for prompt in PROMPTS:
        expected = model.network.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=20,
            suppress_tokens=[model.mask_token_id],
            eos_token_id=None,
            pad_token_id=model.pad_token_id,
        )
        (result,) = generate(model, [prompt], mode="ntp", max_new_tokens=20, ignore_eos=True)
        assert list(result.token_ids) == expected[0, len(prompt) :].tolist()


# ------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("solver", ["entropy:0", "confidence-bound:0", "margin-bound:0", "fixed:1"])
def test_gamma_0_reveals_one_token_per_forward(solver):
    model = TableModel.random(seed=3)
    for result in generate(model, PROMPTS, solver=solver, max_new_tokens=43, ignore_eos=True):
        assert result.nfe == result.num_tokens == 43
        assert sorted(result.reveal_step) == list(range(1, 44))


@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_forwards_of_one_row(networks, block_size):
    """The prompt's, then as many per block as reveal steps; no other."""
    model, layouts = recorded(with_ends(networks["llama", 2], every=300))
    (result,) = generate(
        model,
        [PROMPTS[1]],
        mode="sbd",
        solver="entropy:1.2",
        block_size=block_size,
        max_new_tokens=23,
    )
    expected = [len(PROMPTS[1])]
    for first in range(0, 23, block_size):
        num_steps = len(set(result.reveal_step[first : first + block_size]))
        # The first forward of a later block also encodes the block before it.
        expected.append(2 * block_size if first else block_size)
        expected += [block_size] * (num_steps - 1)
    assert shapes(layouts) == [(1, queries) for queries in expected]
    assert len(layouts) == result.nfe + 1
    assert result.nfe == max(result.reveal_step)
    blocks = [
        (layout.block[0] != CLEAN).long().sum().item()
        for layout in layouts  # no padding in a batch of one, and every block whole
    ]
    assert blocks == [0] + [block_size] * result.nfe
    assert not any((layout.document == PADDING).any() for layout in layouts)


def test_forwards_of_next_token_decoding(networks):
    model, layouts = recorded(with_ends(networks["llama", 2], every=300))
    (result,) = generate(model, [PROMPTS[1]], mode="ntp", max_new_tokens=9)
    assert shapes(layouts) == [(1, len(PROMPTS[1]))] + [(1, 1)] * 8
    assert len(layouts) == result.nfe == result.num_tokens == 9
    assert result.tokens_per_forward == 1


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
@pytest.mark.parametrize("solver", ["entropy:0.5", "fixed:2", "confidence:0.8"])
def test_rows_that_have_finished_cost_nothing(mode, solver):
    model = TableModel.random(seed=4)
    rows = [[3 + i % 9] * (1 + i % 4) for i in range(8)]
    results = generate(
        model, rows, mode=mode, solver=solver, block_size=6, max_new_tokens=29, temperature=4.0,
        seed=3,
    )  # fmt: skip
    lengths = [result.nfe for result in results]
    assert len(set(lengths)) > 2, "the rows end together: nothing is tested"
    # The prompt's forward counts in next-token decoding only, where it yields a token.
    last = [nfe - (mode == "ntp") for nfe in lengths]
    alive = [sum(i <= end for end in last) for i in range(max(last) + 1)]
    assert [batch for batch, _ in model.forwards] == alive


def test_rows_of_a_batch_stand_at_different_stages():
    """Else the tests above would test less than they say."""
    model, layouts = recorded(TableModel.random(seed=0))
    generate(model, PROMPTS, solver="entropy:0.5", block_size=4, max_new_tokens=30, ignore_eos=True)
    clean = [((layout.block == CLEAN) & (layout.document != PADDING)).any(1) for layout in layouts]
    assert any(rows.any() and not rows.all() for rows in clean)
    starts = [layout.block.amax(dim=1) for layout in layouts]
    assert any(len(set((start - 1).tolist())) == len(PROMPTS) for start in starts)


# ------------------------------------------------------------------ ends inside a block


def table_of_blocks(answer: Sequence[int], sharpness: Sequence[float], start: int) -> TableModel:
    """A model whose noisy slot `start + i` predicts answer[i], the surer the sharper."""
    noisy = torch.zeros(128, 12)
    for i, (token, sharp) in enumerate(zip(answer, sharpness, strict=True)):
        noisy[start + i, token] = sharp
    return TableModel(torch.zeros(128, 12, 12), noisy)


def test_eos_inside_a_block():
    """What stands before it is filled, what stands after it is dropped and costs no forward."""
    answer = [4, 5, 6, EOS, 7, 8, 9, 10]
    # Revealed in the order EOS, 7, 6, 5, 4: the last three after EOS, and 8, 9, 10 never.
    model = table_of_blocks(answer, [2, 3, 4, 9, 8, 1, 1, 1], start=2)
    run: dict[str, Any] = {"solver": "fixed:1", "block_size": 8, "max_new_tokens": 30}
    (result,) = assert_equals_oracle(model, [[3, 3]], **run)
    assert result.token_ids == (4, 5, 6, EOS)
    assert result.reveal_step == (4, 3, 2, 1)
    assert result.nfe == 4
    assert result.finish_reason == "eos"
    (past,) = assert_equals_oracle(model, [[3, 3]], ignore_eos=True, **run)
    assert past.token_ids[:8] == tuple(answer)
    assert past.num_tokens == 30


def test_a_second_eos_before_the_first():
    model = table_of_blocks([4, EOS, 6, EOS, 7], [1, 2, 8, 9, 3], start=1)
    (result,) = assert_equals_oracle(
        model, [[3]], solver="fixed:2", block_size=5, max_new_tokens=20
    )
    assert result.token_ids == (4, EOS)
    assert result.reveal_step == (2, 2)


def test_tokens_after_eos_that_came_first_are_cut():
    model = table_of_blocks([4, EOS, 6, 7], [1, 2, 8, 9], start=1)
    (result,) = assert_equals_oracle(
        model, [[3]], solver="fixed:2", block_size=4, max_new_tokens=20
    )
    assert result.token_ids == (4, EOS)
    assert result.reveal_step == (2, 2), "6 and 7 came in the first forward"
    assert result.nfe == 2


@pytest.mark.parametrize("limit", [1, 3, 5, 6])
def test_no_forward_is_spent_past_the_limit(limit):
    # The slots past the limit are the surest: none may be revealed in place of one that counts.
    model = table_of_blocks([4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6], start=1)
    (result,) = assert_equals_oracle(
        model, [[3]], solver="fixed:1", block_size=6, max_new_tokens=limit
    )
    assert result.token_ids == (4, 5, 6, 7, 8, 9)[:limit]
    assert result.nfe == limit
    assert model.forwards[-1][1] == 6, "the block stays whole"


# ------------------------------------------------------------------ state


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("mode", ["sbd", "ntp"])
def test_only_causally_encoded_tokens_enter_the_cache(networks, kind, mode):
    """After each step its keys and values are those of a plain causal forward, in float64."""
    model = copy.copy(networks[kind, 0])
    model.network = copy.deepcopy(model.network).double()
    run = settings_for(
        model, mode=mode, solver="entropy:1.2", block_size=5, max_new_tokens=12, ignore_eos=True
    )
    state = DecodeState(model, PROMPTS, range(3), run)
    num_cached = []
    while True:
        before = state.start.tolist()
        state.step()
        # In the cache: all tokens that were final before this forward, none of its block.
        assert state.cache.lengths.tolist() == before
        num_cached += before
        for slot, length in enumerate(before):
            plain = model.new_cache(1, length)
            layout = causal_layout(torch.arange(length)[None])
            text = torch.from_numpy(state.tokens[slot : slot + 1, :length])
            model.forward(text, layout, plain)
            for ours, theirs in zip(state.cache.layers, plain.layers, strict=True):
                for name in ("keys", "values"):
                    held = getattr(ours, name)[slot, :, :length]
                    expected = getattr(theirs, name)[0, :, :length]
                    torch.testing.assert_close(held, expected, rtol=0, atol=1e-10)
        going = [slot for slot in range(len(before)) if not state.committed(slot)[1]]
        if not going:
            break
        state.select(going)
    assert min(num_cached) == 1
    assert max(num_cached) >= len(PROMPTS[1]) + 10


def test_step_says_what_it_revealed():
    model = TableModel.random(seed=5)
    run = settings_for(model, solver="fixed:3", block_size=8, max_new_tokens=8, ignore_eos=True)
    state = DecodeState(model, PROMPTS, [4, 2, 7], run)
    assert not state.step().any(), "the prompt's forward carries no masks"
    assert state.nfe.tolist() == [0, 0, 0]
    before = state.tokens.copy()
    for count in (3, 3, 2):
        revealed = state.step()
        assert revealed.sum(axis=1).tolist() == [count] * 3
        assert np.array_equal(revealed, state.tokens != before)
        before = state.tokens.copy()
    assert all(state.committed(slot)[1] for slot in range(3))
    assert state.nfe.tolist() == [3, 3, 3]


def test_committed_ends_at_the_first_gap():
    model = table_of_blocks([4, 5, 6, 7], [9, 1, 8, 2], start=1)
    run = settings_for(model, solver="fixed:2", block_size=4, max_new_tokens=4)
    state = DecodeState(model, [[3]], [0], run)
    seen = []
    for _ in range(3):
        state.step()
        seen.append(state.committed(0))
    assert seen == [([], False), ([4], False), ([4, 5, 6, 7], True)]
    assert state.committed(0, 1) == ([5, 6, 7], True)
    assert state.committed(0, 3) == ([7], True)


def test_select_keeps_everything_of_the_rows_it_keeps():
    model = TableModel.random(seed=6)
    run = settings_for(
        model, solver="entropy:0.5", block_size=4, max_new_tokens=40, ignore_eos=True
    )
    whole, part = (DecodeState(model, PROMPTS, [0, 1, 2], run) for _ in range(2))
    for _ in range(3):
        whole.step()
        part.step()
    part.select([2, 0])
    for _ in range(3):
        assert np.array_equal(whole.step()[[2, 0]], part.step())
    for name in ("tokens", "start", "prompt_end", "limit", "rows", "nfe", "revealed_at", "entropy"):
        assert np.array_equal(getattr(whole, name)[[2, 0]], getattr(part, name)), name


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_token_is_never_generated(networks, mode, temperature):
    """However much the network wants it, and without a trace in the entropies."""
    model = with_ends(networks["llama", 1], every=300)
    run: dict[str, Any] = {
        "mode": mode,
        "temperature": temperature,
        "solver": "entropy:1",
        "max_new_tokens": 18,
    }
    expected = generate(model, PROMPTS, **run)

    def prefer_mask(module, inputs, logits):
        logits[..., model.mask_token_id] = 1e4
        return logits

    head: Any = model.network.get_output_embeddings()
    hook = head.register_forward_hook(prefer_mask)
    try:
        results = generate(model, PROMPTS, **run)
    finally:
        hook.remove()
    for result, same in zip(results, expected, strict=True):
        assert model.mask_token_id not in result.token_ids
        assert facts(result) == facts(same)
        assert result.entropy == same.entropy
