"""Branches and seeds of verified decoding: which is taken, what each sees, what it costs."""

from typing import Any

import pytest
import torch
from fakes import TableModel
from layouts import branches_layout
from test_decode import PROMPTS, networks, recorded
from test_verified import assert_lossless, pair

from setblock.branches import BranchDrafts
from setblock.generation import generate, settings_for
from setblock.masks import CLEAN, PADDING, Layout, visible

__all__ = ["networks"]  # a fixture


class Seeing(TableModel):
    """Blocks that see their first token predict the text; others put it second."""

    def forward(self, tokens, layout, cache=None, logits_at=None):
        right = super().forward(tokens, layout, cache)
        noisy = layout.block != CLEAN
        first = noisy & (layout.position == layout.horizon)
        seen = torch.stack(
            [
                torch.isin(blocks, blocks[start & (row != self.mask_token_id)])
                for row, blocks, start in zip(tokens, layout.block, first, strict=True)
            ]
        )
        wrong = right.roll(1, dims=-1)
        wrong[..., self.mask_token_id] = -torch.inf
        logits = torch.where((noisy & ~seen)[..., None], 2 * wrong + right, right)
        return logits if logits_at is None else logits[:, logits_at]


def test_a_branch_that_saw_the_new_token_is_taken_before_one_that_did_not() -> None:
    """A blind draft fails at once, the seed behind it is right: one token, then a whole block."""
    text = "the quick brown fox jumps over the lazy dog and runs away"
    model = Seeing.spelling(text, start=4)
    options = {"mode": "verified", "block_size": 8, "branches": 8, "max_new_tokens": 37}
    [blind] = generate(model, [[5, 6, 7, 8]], **options, seeds=0)  # type: ignore[arg-type]
    assert blind.nfe == 37
    [seeded] = generate(model, [[5, 6, 7, 8]], **options, seeds=1)  # type: ignore[arg-type]
    assert seeded.token_ids == blind.token_ids
    assert seeded.nfe == 1 + 4 * 2, "after the prompt's forward 1 + 8 tokens, four times"


@pytest.mark.parametrize("seeds", [1, 30])
@pytest.mark.parametrize("top_k", [1, 3])
def test_seeds_beyond_what_sampling_keeps_and_beyond_the_vocabulary(seeds, top_k) -> None:
    model = TableModel.random(1)
    options: dict[str, Any] = {"temperature": 0.7, "top_k": top_k, "max_new_tokens": 25}
    drafted = {"block_size": 5, "branches": 5, "seeds": seeds}
    assert_lossless(*pair(model, [[4, 5], [6]], None, **options, **drafted), one_forward=True)


def test_no_branch_behind_an_end_or_at_the_limit() -> None:
    model = TableModel.spelling("ab", start=2)
    run = settings_for(model, mode="verified", block_size=6, branches=6, max_new_tokens=30)
    state = BranchDrafts(model, [[5, 6]], [0], run)
    state.step()
    assert state.length[0] == 2, "b and the end"
    accepted, _, used = state._plan()
    assert sorted(accepted[used].tolist()) == [0, 1]
    run = settings_for(model, mode="verified", block_size=60, branches=60, max_new_tokens=3)
    state = BranchDrafts(model, [[5, 6]], [0], run)
    cache: Any = state.cache
    assert cache.capacity <= 2 + 3 + 3 + 3 * (1 + 3), "no block is longer than the answer may be"
    state.step()
    accepted, _, used = state._plan()
    assert accepted[used].tolist() == [0]


@pytest.mark.parametrize("seeds", [0, 1])
def test_a_model_whose_drafts_are_always_right(seeds) -> None:
    """k tokens a forward, after the prompt's own, which yields one."""
    model = TableModel.spelling("the quick brown fox jumps over the lazy dog" * 2, start=4)
    [result] = generate(
        model, [[5, 6, 7, 8]], mode="verified", block_size=8, seeds=seeds, max_new_tokens=65
    )
    assert result.num_tokens == 65
    assert result.nfe == 1 + 64 // 8
    assert result.tokens_per_forward == 65 / 9


def test_a_model_whose_drafts_are_always_wrong() -> None:
    """One token a forward, like next-token decoding: a wrong draft costs no forward."""
    model = TableModel.spelling("the quick brown fox", start=4)
    model.noisy = model.noisy.roll(1, dims=1)
    exact, drafted = pair(model, [[5, 6, 7, 8]], None, block_size=8, max_new_tokens=19)
    assert drafted[0].token_ids == exact[0].token_ids
    assert drafted[0].nfe == exact[0].nfe == 19


@pytest.mark.parametrize(
    ("branches", "seeds", "expected"),
    [(8, 0, 8 + 8 * 8), (3, 0, 8 + 3 * 8), (3, 2, 8 + 3 * 3 * 8), (1, 0, 8 + 8)],
)
def test_query_tokens_of_a_cycle(networks, branches, seeds, expected) -> None:
    """The draft with the last final token, then the branches; a full draft has no seed behind."""
    watched, layouts = recorded(networks["llama", 0])
    options = {"block_size": 8, "branches": branches, "seeds": seeds, "ignore_eos": True}
    generate(watched, [PROMPTS[1]], mode="verified", max_new_tokens=40, **options)  # type: ignore[arg-type]
    assert layouts[0].position.shape[1] == len(PROMPTS[1]) + 8, "one branch behind the prompt"
    most = max(layout.position.shape[1] for layout in layouts)
    assert most == expected


def test_no_branch_sees_another_and_each_sees_the_accepted_draft_alone() -> None:
    first = torch.tensor([[4, 6], [9, 9]])
    last = torch.tensor([[7, 8], [12, 9]])
    layout = branches_layout(first, last, 3)
    assert layout.position.tolist() == [[4, 5, 6, 6, 7, 0], [9, 10, 11, 0, 0, 0]]
    assert layout.block.tolist() == [[0, 0, 0, 1, 1, CLEAN], [0, 0, 0, CLEAN, CLEAN, CLEAN]]
    assert layout.document.tolist() == [[0, 0, 0, 0, 0, PADDING], [0, 0, 0] + [PADDING] * 3]
    position = torch.arange(8)[None].expand(2, -1)
    text = Layout(position, position + 1, torch.full_like(position, CLEAN), position * 0)
    seen = visible(layout, text.cat(layout))[:, 0]
    for row, branch in ((0, 0), (0, 1), (1, 0)):
        begin = int(first[row, branch])
        for slot in range(3 * branch, 3 * branch + 3):
            if layout.document[row, slot] == PADDING:
                continue
            assert seen[row, slot, :8].tolist() == [place < begin for place in range(8)]
            own = [int(block) == branch for block in layout.block[row]]
            assert seen[row, slot, 8:].tolist() == own


def test_seeded_branches_guess_the_token_behind_a_rejected_draft() -> None:
    """Drafts whose second choice is always right: with one seed every forward's branch saw it."""
    model = TableModel.spelling("the quick brown fox jumps over the lazy dog", start=4)
    right = model.noisy.clone()
    model.noisy = right + 2 * right.roll(1, dims=1)  # the wrong letter first, the right one second
    state = BranchDrafts(
        model, [[5, 6, 7, 8]], [0], settings_for(model, mode="verified", block_size=6, seeds=1)
    )
    state.step()
    assert state.runners[0, :, 0].tolist() == right[5:10].argmax(dim=-1).tolist()
    accepted, seeds, used = state._plan()
    pairs = {(int(a), int(s)) for a, s, u in zip(accepted[0], seeds[0], used[0], strict=True) if u}
    for count in range(5):
        assert (count, model.mask_token_id) in pairs
        assert (count, int(state.runners[0, count, 0])) in pairs
    assert (5, model.mask_token_id) in pairs
    assert len(pairs) == 11
