"""What decoding costs in forwards, and its state: the cache, what a step tells, ends in a block."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes import EOS, TableModel
from test_decode import (
    CONFIGS,
    PROMPTS,
    assert_equals_oracle,
    facts,
    networks,
    recorded,
    shapes,
    with_ends,
)

from setblock.decode import DecodeState
from setblock.generation import generate, settings_for
from setblock.masks import CLEAN, PADDING, causal_layout

__all__ = ["networks"]  # a fixture


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
