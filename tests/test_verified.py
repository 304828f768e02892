"""Verified decoding: the tokens of next-token decoding, always, in fewer forwards."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from fakes import EOS, MASK, TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import branches_layout
from test_decode import PROMPTS, SLOW, SOLVERS, networks, prompts, recorded, with_ends
from torch.nn.functional import one_hot

from setblock import adapters
from setblock.decode import DecodeState
from setblock.generation import Generation, generate, settings_for
from setblock.loading import load
from setblock.masks import CLEAN, PADDING, Layout, causal_layout, visible
from setblock.model import Model
from setblock.verified import MOST_MATCHED, WORTH, BranchDrafts, looked_up

__all__ = ["networks"]  # a fixture


def pair(model: Model, texts: list[list[int]], batch_size: int | None, **options: Any):
    """(next-token, verified) generations of the same prompts and options."""
    own = {"draft", "branches", "seeds", "lookup", "solver", "block_size"}
    plain = {name: value for name, value in options.items() if name not in own}
    exact = generate(model, texts, mode="ntp", **plain)
    drafted = generate(model, texts, mode="verified", batch_size=batch_size, **options)
    return exact, drafted


def assert_lossless(exact: list[Generation], drafted: list[Generation], one_forward: bool) -> None:
    for one, other in zip(exact, drafted, strict=True):
        assert other.token_ids == one.token_ids
        assert other.text == one.text
        assert other.finish_reason == one.finish_reason
        assert other.entropy == pytest.approx(one.entropy, abs=1e-4)
        steps = other.reveal_step
        assert list(steps) == sorted(steps)
        assert steps[-1] == other.nfe, "no forward after the last token"
        if one_forward:
            assert other.nfe <= one.nfe
            assert set(steps) == set(range(1, other.nfe + 1)), "each forward yields a token"


@st.composite
def options(draw, max_new_tokens: int):
    """Any options of mode "verified"."""
    chosen: dict[str, Any] = {
        "block_size": draw(st.integers(1, 17)),
        "max_new_tokens": draw(st.integers(1, max_new_tokens)),
        "ignore_eos": draw(st.booleans()),
        "draft": draw(st.sampled_from(["branches", "branches", "solver"])),
    }
    if chosen["draft"] == "solver":
        chosen["solver"] = draw(st.sampled_from(SOLVERS))
    else:
        chosen["branches"] = draw(st.sampled_from([None, 1, 2, 5, 40]))
        chosen["seeds"] = draw(st.sampled_from([0, 1, 3]))
        chosen["lookup"] = draw(st.sampled_from([0, 0, 1, 4, 30]))
    if draw(st.booleans()):
        chosen["temperature"] = draw(st.sampled_from([0.3, 1.0, 1.5]))
        chosen["top_k"] = draw(st.sampled_from([0, 3]))
        chosen["top_p"] = draw(st.sampled_from([1.0, 0.8]))
        chosen["seed"] = draw(st.integers(0, 2**62))
    return chosen


@given(data=st.data())
@settings(max_examples=40, **SLOW)
def test_random_networks_say_what_next_token_decoding_says(networks, data) -> None:
    kind = data.draw(st.sampled_from(["llama", "qwen3"]))
    model = networks[kind, data.draw(st.integers(0, 2))]
    model = with_ends(model, data.draw(st.sampled_from([4, 9, 1000])))
    texts = data.draw(prompts(range(3, 12), 4))
    chosen = data.draw(options(40))
    likely = [model.decode([token]) for token in range(3, 12)]
    chosen["stop"] = data.draw(st.sampled_from([(), (likely[2],), (likely[0] + likely[1], "e")]))
    batch_size = data.draw(st.sampled_from([None, 1, 2]))
    assert_lossless(*pair(model, texts, batch_size, **chosen), chosen["draft"] == "branches")


@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=90, **SLOW)
def test_random_tables_say_what_next_token_decoding_says(data, seed) -> None:
    """Without a network there are no last bits: also with stop texts, and many more cases."""
    model = TableModel.random(seed)
    texts = data.draw(prompts(range(3, 12), 4))
    chosen = data.draw(options(60))
    chosen["stop"] = data.draw(st.sampled_from([(), ("ab",), ("c", "dd")]))
    batch_size = data.draw(st.sampled_from([None, 1, 2]))
    exact, drafted = pair(model, texts, batch_size, **chosen)
    assert_lossless(exact, drafted, chosen["draft"] == "branches")
    if batch_size == 1 and chosen["draft"] == "solver":
        before = len(model.forwards)
        again = generate(model, texts, mode="verified", batch_size=1, **chosen)
        ran = len(model.forwards) - before
        assert sum(one.nfe for one in again) == ran, "draft forwards and one, for each cycle"


@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=60, **SLOW)
def test_lenience_keeps_what_is_nearly_as_likely_and_no_other(networks, data, seed) -> None:
    model = data.draw(st.sampled_from([TableModel.random(seed), networks["llama", seed % 3]]))
    model = with_ends(model, 4)
    texts = data.draw(prompts(range(3, 12), 3))
    lenience = data.draw(st.sampled_from([0.9, 0.5, 0.1, 1e-9]))
    chosen = data.draw(options(30)) | {"mode": "verified", "lenience": lenience}
    chosen["block_size"] = max(chosen["block_size"], 2)
    lenient = generate(model, texts, **chosen)
    alone = generate(model, texts, batch_size=1, **chosen)
    assert [one.token_ids for one in alone] == [one.token_ids for one in lenient]
    for row, (text, one) in enumerate(zip(texts, lenient, strict=True)):
        said = reference.regrets(model, text, list(one.token_ids), one.settings, row)
        for token, (exact, regret) in zip(one.token_ids, said, strict=True):
            assert regret <= -math.log(lenience) + 1e-4
            if {token, exact} & model.eos_token_ids and not chosen["ignore_eos"]:
                assert token == exact, "where the text ends lenience has no say"


def test_lenience_by_its_bound() -> None:
    """Every draft is the second likeliest token, half as likely as the likeliest."""
    likely = torch.full((100, 12), -9.0)
    likely[:, 5], likely[:, 6] = math.log(2), 0.0
    likely[:, MASK] = -torch.inf
    drafts = likely.clone()
    drafts[:, 6] = 9.0
    model = TableModel(likely[:, None].repeat(1, 12, 1), drafts)
    common: dict[str, Any] = {"mode": "verified", "block_size": 4, "max_new_tokens": 13}
    ways: list[dict[str, Any]] = [{"branches": 1}, {"draft": "solver", "solver": "fixed:3"}]
    for how in ways:
        [strict] = generate(model, [[7, 8]], **common, **how, lenience=0.51)
        assert set(strict.token_ids) == {5}
        [lenient] = generate(model, [[7, 8]], **common, **how, lenience=0.49)
        assert set(lenient.token_ids) == {5, 6}
        assert lenient.token_ids.count(6) > lenient.token_ids.count(5)
        assert lenient.nfe < strict.nfe
    # Copies are verified to the token: here what followed 8 before was a 6.
    state = BranchDrafts(model, [[8, 6, 8]], [0], settings_for(model, **common, lenience=0.1))
    state.draft[:, :2], state.length[:] = 6, 2
    logits, places = likely[None, :3], state._places(3)
    assert state._said(logits, places)[0].tolist() == [[6, 6, 5]]
    state.copied[:] = True
    assert state._said(logits, places)[0].tolist() == [[5, 5, 5]]


def drafting(model: Model, text: list[int], errors: float) -> Model:
    """The model, but its noisy slots know the text; a share of them says something else."""
    watched, generator = copy.copy(model), torch.Generator().manual_seed(3)
    known = torch.tensor(text)

    def forward(tokens, layout, cache=None, logits_at=None):
        logits = model.forward(tokens, layout, cache)
        right = known[layout.position.clamp(max=len(text) - 1)]
        wrong = torch.rand(right.shape, generator=generator) < errors
        said = torch.where(wrong, (right + 1) % 9 + 3, right)
        vocab = logits.shape[-1]
        guess = 9 * one_hot(said, vocab).float() + 4 * one_hot(right, vocab).float()
        guess[..., model.mask_token_id] = -torch.inf
        logits = torch.where((layout.block == CLEAN)[..., None], logits, guess)
        return logits if logits_at is None else logits[:, logits_at]

    watched.forward = forward  # type: ignore[method-assign]
    return watched


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma3", "qwen3-window"])
@pytest.mark.parametrize(
    "draft",
    [
        {"draft": "branches", "branches": 9, "seeds": 1},
        {"draft": "branches", "branches": 2, "seeds": 0},
        {"draft": "branches", "branches": 2, "seeds": 1, "lookup": 12},
        {"draft": "solver", "solver": "fixed:4"},
    ],
)
def test_drafts_that_are_mostly_accepted(checkpoint, kind, draft) -> None:
    """Several tokens a forward, rows at different lengths; in networks with windows too."""
    model = load(checkpoint(kind, mask_token="<mask>"))
    common: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    for errors in (0.05, 0.2):
        [exact] = generate(model, [PROMPTS[1]], mode="ntp", **common)
        knowing = drafting(model, [*PROMPTS[1], *exact.token_ids], errors)
        three = generate(
            knowing, [PROMPTS[1]] * 3, mode="verified", block_size=9, **draft, **common
        )
        assert [one.token_ids for one in three] == [exact.token_ids] * 3
        assert all(one.nfe < exact.nfe * 0.8 for one in three)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_the_text_of_a_gated_adapter_is_the_base_models(checkpoint) -> None:
    base = load(checkpoint("llama-tied", mask_token="<mask>"))
    network = load(checkpoint("llama-tied", mask_token="<mask>")).network
    gated = adapters.attach(network, "base", "gated", base.mask_token_id, rank=4, alpha=8)
    with torch.no_grad():
        for weight in gated.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
    model = Model(gated, base.tokenizer, "gated", mask_token_id=base.mask_token_id)
    assert model.gated
    texts, common = [[5, 6, 7], [8], [9, 10]], {"max_new_tokens": 30, "ignore_eos": True}
    exact = generate(base, texts, mode="ntp", **common)  # type: ignore[arg-type]
    for draft in ({"draft": "branches", "seeds": 1}, {"draft": "solver", "solver": "fixed:3"}):
        own = generate(model, texts, mode="verified", block_size=6, **draft, **common)  # type: ignore[arg-type]
        assert [one.token_ids for one in own] == [one.token_ids for one in exact]


def test_accepted_tokens_leave_the_keys_of_a_causal_forward(checkpoint) -> None:
    model = load(checkpoint("llama", mask_token="<mask>"))
    [exact] = generate(model, [PROMPTS[1]], mode="ntp", max_new_tokens=30, ignore_eos=True)
    knowing = drafting(model, [*PROMPTS[1], *exact.token_ids], 0.2)
    run = settings_for(
        model,
        mode="verified",
        block_size=6,
        branches=6,
        seeds=1,
        max_new_tokens=30,
        ignore_eos=True,
    )
    state = BranchDrafts(knowing, [PROMPTS[1]], [0], run)
    accepted = set()
    while not state.committed(0)[1]:
        before = int(state.start[0])
        state.step()
        accepted.add(int(state.start[0]) - before)
        length = int(state.cache.lengths[0])
        text = torch.from_numpy(state.tokens[:, :length])
        plain = model.new_cache(1, length)
        model.forward(text, causal_layout(torch.arange(length)[None]), plain)
        for ours, theirs in zip(state.cache.layers, plain.layers, strict=True):
            for name in ("keys", "values"):
                held, expected = getattr(ours, name)[:, :, :length], getattr(theirs, name)
                torch.testing.assert_close(held, expected, rtol=0, atol=1e-5)
    assert len(accepted) > 2


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


def test_solver_drafts_cost_their_forwards_and_one() -> None:
    """Blocks of 8: the last final token and 7 masks, revealed two at a time in four forwards."""
    model = TableModel.spelling("the quick brown fox jumps over the lazy dog", start=4)
    options = {"mode": "verified", "draft": "solver", "solver": "fixed:2", "block_size": 8}
    [result] = generate(model, [[5, 6, 7, 8]], **options, max_new_tokens=33)  # type: ignore[arg-type]
    assert result.num_tokens == 33
    assert result.nfe == 1 + (32 // 8) * (4 + 1)


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


def test_the_cache_holds_final_tokens_alone() -> None:
    model = TableModel.random(3)
    run = settings_for(model, mode="verified", block_size=5, max_new_tokens=30, ignore_eos=True)
    state = BranchDrafts(model, [[4, 5], [6, 7, 8]], [0, 1], run)
    for _ in range(12):
        state.step()
        for slot, held in enumerate(state.cache.tokens):  # type: ignore[attr-defined]
            start = int(state.start[slot])
            assert held == state.tokens[slot, : start - 1].tolist()
        if (state.start >= state.limit).any():
            break


def test_an_end_in_the_prompts_own_forward() -> None:
    model = TableModel.spelling("", start=2)
    [result] = generate(model, [[5, 6]], mode="verified", block_size=4, max_new_tokens=9)
    assert result.token_ids == (EOS,)
    assert (result.nfe, result.finish_reason) == (1, "eos")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "verified", "draft": "tree"}, "draft must be one of branches, solver, got 'tr"),
        ({"mode": "verified", "branches": 0}, "branches must be an integer of at least 1, got 0"),
        ({"mode": "verified", "seeds": -1}, "seeds must be an integer of at least 0, got -1"),
        ({"mode": "verified", "seeds": True}, "seeds must be an integer of at least 0, got True"),
        ({"mode": "sbd", "seeds": 1}, "seeds is for mode verified, got 1 in mode sbd"),
        ({"mode": "ntp", "branches": 2}, "branches is for mode verified, got 2 in mode ntp"),
        ({"mode": "verified", "fallback": 1.0}, "fallback is for mode sbd, got 1.0 in mode ver"),
        ({"mode": "ntp", "next_token_seed": True}, "next_token_seed is for mode sbd, got True"),
        (
            {"mode": "sbd", "fallback": -1.0},
            "fallback must be a finite entropy of at least 0, got -1",
        ),
        (
            {"mode": "sbd", "fallback": float("nan")},
            "fallback must be a finite entropy of at least 0",
        ),
        (
            {"mode": "verified", "draft": "solver", "branches": 2},
            "branches is for draft 'branches', got 2 with draft 'solver'",
        ),
    ],
)
def test_wrong_options(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        settings_for(TableModel.random(), **wrong)


# ------------------------------------------------------------------ helpers of mode "sbd"


def test_a_next_token_seed_is_the_next_token(networks) -> None:
    """The first token of every block is what next-token decoding says after the text before it."""
    model = with_ends(networks["qwen3", 1], 1000)
    options = {"mode": "sbd", "solver": "fixed:3", "block_size": 4, "max_new_tokens": 18}
    for result, prompt in zip(
        generate(model, PROMPTS, **options, next_token_seed=True),  # type: ignore[arg-type]
        PROMPTS,
        strict=True,
    ):
        for first in range(0, 18, 4):
            text = [*prompt, *result.token_ids[:first]]
            [exact] = generate(model, [text], mode="ntp", max_new_tokens=1)
            assert result.token_ids[first] == exact.token_ids[0]
        # The prompt's forward yields one, the next 3; then 3, the exact one among them, and 1.
        assert result.nfe == 1 + 1 + 2 + 2 + 2 + 1


def test_a_next_token_seed_of_blocks_of_one_token_is_next_token_decoding(networks) -> None:
    model = with_ends(networks["llama", 2], 7)
    exact = generate(model, PROMPTS, mode="ntp", max_new_tokens=11)
    seeded = generate(
        model, PROMPTS, mode="sbd", block_size=1, next_token_seed=True, max_new_tokens=11
    )
    assert [one.token_ids for one in seeded] == [one.token_ids for one in exact]
    assert [one.nfe for one in seeded] == [one.nfe for one in exact]


@pytest.mark.parametrize("solver", ["fixed:1", "entropy:0", "prefix:1.0"])
@pytest.mark.parametrize("block_size", [1, 5])
def test_of_blocks_that_slide_and_reveal_no_more_each_token_is_the_next(
    networks, solver, block_size
) -> None:
    """In as many forwards as next-token decoding takes: the solver is content with that token."""
    model = with_ends(networks["llama", 2], 7)
    exact = generate(model, PROMPTS, mode="ntp", max_new_tokens=11)
    options: dict[str, Any] = {"block_size": block_size, "max_new_tokens": 11, "solver": solver}
    for batch_size in (1, 3):
        slid = generate(model, PROMPTS, mode="sbd", slide=True, batch_size=batch_size, **options)
        assert [one.token_ids for one in slid] == [one.token_ids for one in exact]
        assert [one.nfe for one in slid] == [one.nfe for one in exact]


@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=60, **SLOW)
def test_blocks_that_slide_take_no_more_forwards_than_tokens(data, seed) -> None:
    """And yield a token without a gap in each, the next-token one."""
    options = {
        "block_size": data.draw(st.integers(1, 9)),
        "solver": data.draw(st.sampled_from(SOLVERS)),
        "max_new_tokens": data.draw(st.integers(1, 40)),
        "ignore_eos": True,
    }
    model, texts = TableModel.random(seed), data.draw(prompts(range(3, 12), 3))
    for text, result in zip(
        texts, generate(model, texts, mode="sbd", slide=True, **options), strict=True
    ):
        assert result.nfe <= result.num_tokens
        steps = list(result.reveal_step)
        for forward in range(1, result.nfe + 1):
            # What a forward begins with: the first token that none before it revealed.
            first = next(place for place, step in enumerate(steps) if step >= forward)
            if steps[first] == forward:
                [exact] = generate(
                    model, [[*text, *result.token_ids[:first]]], mode="ntp", max_new_tokens=1
                )
                assert result.token_ids[first] == exact.token_ids[0]


def test_a_checkpoint_may_say_that_its_blocks_slide(checkpoint) -> None:
    model = load(checkpoint("llama", settings={"slide": True, "trained": True}))
    assert settings_for(model).slide
    assert not settings_for(model, slide=False, fallback=1.0).slide
    assert not settings_for(model, mode="ntp").slide
    assert not settings_for(model, mode="verified").slide
    assert model.settings["slide"] is True
    with pytest.raises(ValueError, match=r"slide unless slide is False \(--no-slide\); got 1\.0"):
        settings_for(model, fallback=1.0)
    plain = load(checkpoint("llama"))
    assert settings_for(plain, slide=False).mode == "ntp", "asks for nothing"
    with pytest.raises(ValueError, match="setblock setting slide must be bool, got 1"):
        load(checkpoint("llama", settings={"slide": 1}))


@pytest.mark.parametrize("seed_first", [False, True])
def test_a_block_that_collapses_at_once_is_decoded_token_by_token(networks, seed_first) -> None:
    """A bound below every entropy: next-token decoding, and one forward more for each block."""
    model = with_ends(networks["llama", 1], 9)
    exact = generate(model, PROMPTS, mode="ntp", max_new_tokens=21)
    options = {"block_size": 6, "fallback": 0.0, "next_token_seed": seed_first}
    fallen = generate(model, PROMPTS, mode="sbd", max_new_tokens=21, **options)  # type: ignore[arg-type]
    for one, other in zip(exact, fallen, strict=True):
        assert other.token_ids == one.token_ids
        blocks = -(-other.num_tokens // 6)
        wasted = 1 if seed_first else blocks
        assert other.nfe <= one.nfe + wasted


@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=100, **SLOW)
def test_a_fallback_costs_one_forward_a_block_at_most(data, seed) -> None:
    model = TableModel.random(seed)
    size = data.draw(st.integers(1, 9))
    options = {
        "mode": "sbd",
        "block_size": size,
        "solver": data.draw(st.sampled_from(SOLVERS)),
        "fallback": data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0, 10.0])),
        "next_token_seed": data.draw(st.booleans()),
        "max_new_tokens": data.draw(st.integers(1, 40)),
        "ignore_eos": True,
    }
    for result in generate(model, data.draw(prompts(range(3, 12), 3)), **options):
        assert result.nfe <= result.num_tokens + -(-result.num_tokens // size)


def test_tokens_revealed_before_a_collapse_stay() -> None:
    """Slots 0 and 2 are sure, the rest are not: the rest comes from the next-token half."""
    model = TableModel.spelling("abcdefgh", start=2)
    flat = [3, 5, 6, 7]  # positions of slots 1, 3, 4, 5
    model.noisy[flat] = 0.0
    model.noisy[4] = model.noisy[4].roll(1)  # slot 2 is sure of the wrong letter
    state = DecodeState(
        model,
        [[4, 4]],
        [0],
        settings_for(model, mode="sbd", block_size=6, solver="confidence:0.9", fallback=0.5),
    )
    state.step()  # the prompt
    state.step()
    assert state.by_token_until[0] == 0
    state.step()  # nothing but unsure slots: falls back, reveals nothing
    assert state.by_token_until[0] == 8
    for _ in range(4):
        state.step()
    assert model.decode(state.committed(0)[0]) == "abddef"
    assert state.nfe[0] == 6, "one forward more than six tokens, one less for the pair revealed"


@given(
    texts=st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=60), min_size=1, max_size=4),
    count=st.integers(1, 20),
)
def test_what_is_looked_up_is_what_the_slow_way_finds(texts, count) -> None:
    width = max(map(len, texts)) + 7
    tokens = np.array([[*text, *[0] * (width - len(text))] for text in texts])
    copied, run = looked_up(tokens, np.array([len(text) for text in texts]), count)
    for text, ours, length in zip(texts, copied.tolist(), run.tolist(), strict=True):
        expected, matched = reference.looked_up(text, count, MOST_MATCHED)
        assert length == matched
        if matched:
            assert ours == expected


def test_a_text_that_repeats_itself_is_copied_in_as_many_forwards_as_the_slow_way_takes() -> None:
    """Blocks of one token: there are no other drafts."""
    text = "a fox saw a fox who saw a dog. a fox saw a fox who saw a dog who saw a fox."
    model = TableModel.spelling(text, start=2)
    count, lookup = len(text), 8
    for prompt in ([5, 6], [7, 8]):
        [exact] = generate(model, [prompt], mode="ntp", max_new_tokens=count)
        [copied] = generate(
            model, [prompt], mode="verified", block_size=1, lookup=lookup, max_new_tokens=count
        )
        assert copied.token_ids == exact.token_ids
        whole = [*prompt, *exact.token_ids]
        known, forwards = len(prompt) + 1, 1
        while known < len(whole):
            draft, run = reference.looked_up(whole[:known], lookup, MOST_MATCHED)
            chance, accepted = 1.0, 0
            for offset, token in enumerate(draft[: len(whole) - known - 1] if run else []):
                chance *= (run + offset) / (run + offset + 2)
                if chance < WORTH or token != whole[known + offset]:
                    break
                accepted += 1
            known, forwards = known + accepted + 1, forwards + 1
        assert copied.nfe == forwards
        assert forwards < 0.6 * exact.nfe


def test_a_sure_draft_is_not_given_up_for_a_copy_that_promises_less() -> None:
    """The model knows a text that never repeats; its letters' last places would say otherwise."""
    text = "abacadaeafagahaiajakal"
    model = TableModel.spelling(text, start=2)
    options: dict[str, Any] = {"mode": "verified", "block_size": 6, "branches": 6}
    options["max_new_tokens"] = len(text)
    [own] = generate(model, [[20, 21]], **options)
    [both] = generate(model, [[20, 21]], **options, lookup=8)
    assert both.token_ids == own.token_ids
    assert both.nfe == own.nfe


def test_a_branch_behind_fewer_tokens_than_were_accepted_still_drafts() -> None:
    """One branch, behind the prompt alone once: of its block the slots further on are of use."""
    text = "the quick brown fox jumps over a lazy dog"
    model = TableModel.spelling(text, start=2)
    run = settings_for(model, mode="verified", block_size=6, branches=1, max_new_tokens=len(text))
    state = BranchDrafts(model, [[5, 6]], [0], run)
    state.step()
    state.confidence[:, 2:] = 0.0  # so the branch comes to stand behind two drafted tokens
    state.step()
    assert int(state.start[0]) == 2 + 1 + 6, "all five drafted tokens and the next"
    assert int(state.length[0]) == 5 - 3, "the branch predicted three of them as well"
    drafted = state.draft[0, :2].tolist()
    assert model.decode(drafted) == text[7:9]


def test_no_branch_behind_a_sure_copy() -> None:
    """Of a model that drafts nothing well: branches until three letters stood before, none then."""
    model = TableModel.spelling("abcdefgh" * 5, start=2)
    model.noisy[:] = 0.0
    model.noisy[:, model.mask_token_id] = -torch.inf
    run = settings_for(
        model, mode="verified", block_size=4, branches=4, lookup=5, max_new_tokens=40
    )
    state = BranchDrafts(model, [[20, 21]], [0], run)
    seen = []
    while not state.committed(0)[1]:
        sure = bool(state.sure[0])
        assert bool(state._plan()[2].any()) is not sure
        seen.append((int(state.start[0]) - 2, sure))
        state.step()
    # The second a is the ninth letter; behind the eleventh, c, three have stood before.
    assert seen[:12] == [(n, n >= 11) for n in range(10)] + seen[10:12]
    assert all(sure for start, sure in seen if start >= 11)
    assert not any(sure for start, sure in seen if start < 11)
    assert max(start for start, _ in seen) > 30
