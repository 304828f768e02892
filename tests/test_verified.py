"""Verified decoding: the tokens of next-token decoding, always, in fewer forwards."""

import copy
import math
from typing import Any

import pytest
import reference
import torch
from fakes import EOS, MASK, TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import PROMPTS, SLOW, SOLVERS, networks, prompts, with_ends
from torch.nn.functional import one_hot

from setblock import adapters
from setblock.branches import BranchDrafts
from setblock.generation import generate, settings_for
from setblock.loading import load
from setblock.masks import CLEAN, causal_layout
from setblock.model import Model
from setblock.results import Generation

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


def test_solver_drafts_cost_their_forwards_and_one() -> None:
    """Blocks of 8: the last final token and 7 masks, revealed two at a time in four forwards."""
    model = TableModel.spelling("the quick brown fox jumps over the lazy dog", start=4)
    options = {"mode": "verified", "draft": "solver", "solver": "fixed:2", "block_size": 8}
    [result] = generate(model, [[5, 6, 7, 8]], **options, max_new_tokens=33)  # type: ignore[arg-type]
    assert result.num_tokens == 33
    assert result.nfe == 1 + (32 // 8) * (4 + 1)


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
