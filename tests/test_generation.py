"""Prompts in, text out: options, ends, stop texts, streams and what a result says of itself."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import transformers
from conftest import KINDS, LONGROPE, copied, save_checkpoint
from fakes import MASK, TableModel
from hypothesis import given
from hypothesis import strategies as st

from setblock import running
from setblock.generation import generate, settings_for, stream
from setblock.loading import load
from setblock.roofline import Spending
from setblock.sampling import Sampler
from setblock.settings import Settings
from setblock.solvers import EntropyBound, FixedCount, entropy


def test_seconds_are_not_those_of_the_caller(monkeypatch):
    """The clock moves by a second in each forward, and by an hour between two events."""
    now = 0.0
    step = running.DecodeState.step

    def timed(self: running.DecodeState) -> Any:
        nonlocal now
        now += 1
        return step(self)

    monkeypatch.setattr(running.time, "perf_counter", lambda: now)
    monkeypatch.setattr(running.DecodeState, "step", timed)
    ended = []
    options: Any = {"mode": "ntp", "max_new_tokens": 6, "ignore_eos": True}
    for reveal in stream(TableModel.random(), [[5, 6], [7]], **options):
        now += 3600
        if reveal.generation is not None:
            ended.append(reveal.generation)
    assert [(one.prefill_s, one.decode_s) for one in ended] == [(1, 5)] * 2


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "ntp"},
        {"mode": "sbd", "block_size": 8, "solver": "fixed:3"},
        {"mode": "sbd", "block_size": 8, "solver": "fixed:3", "slide": True},
        {"mode": "verified", "block_size": 8, "branches": 2, "lookup": 4},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_each_row_ends_where_the_context_does(monkeypatch, tmp_path, how):
    """Where nobody says how long it may be; a GPT-2 has no position behind the last."""
    small = transformers.GPT2Config(n_positions=60, n_layer=2, n_embd=32, n_head=4)
    monkeypatch.setitem(KINDS, "gpt2", small)
    model = load(save_checkpoint(tmp_path, "gpt2"))
    prompts = [[*range(3, 53)], [3, 4], [5] * 45]
    whole = how["mode"] == "sbd" and "slide" not in how
    rooms = [8, 56, 8] if whole else [10, 58, 15]
    answers = generate(model, prompts, ignore_eos=True, **how)
    assert [answer.num_tokens for answer in answers] == rooms
    assert {answer.finish_reason for answer in answers} == {"length"}
    for prompt, room, answer in zip(prompts, rooms, answers, strict=True):
        said = generate(model, [prompt], ignore_eos=True, max_new_tokens=room, **how)[0]
        assert (said.token_ids, said.nfe) == (answer.token_ids, answer.nfe)
    lacking = "a block of 8" if whole else "an answer"
    with pytest.raises(ValueError, match=f"leaves no room for {lacking} in the model's context"):
        generate(model, [*prompts, [3] * (53 if whole else 60)], **how)


# ------------------------------------------------------------------ options


def test_defaults_come_from_the_checkpoint():
    model = TableModel.random()
    expected = Settings("sbd", EntropyBound(0.1), 16, 256, Sampler(), (), False)
    assert settings_for(model) == expected
    model.defaults = {"mode": "ntp", "solver": "fixed:2", "block_size": 5}
    assert settings_for(model) == dataclasses.replace(
        expected, mode="ntp", solver=FixedCount(2), block_size=5
    )
    assert settings_for(model, mode="sbd", block_size=3, solver=None) == dataclasses.replace(
        expected, solver=FixedCount(2), block_size=3
    )


def test_copies_that_only_the_checkpoint_asks_for_are_left_out_where_they_do_not_pay():
    model = TableModel.random()
    model.drafting = {"lookup": 8}
    found = [settings_for(model, rows, mode="verified").lookup for rows in (1, 3, 4)]
    assert found == [8, 8, 0]
    assert settings_for(model, 4, mode="verified", lookup=5).lookup == 5, "asked for"
    model.drafting = {"lookup": 8, "block_size": 4}
    assert settings_for(model, 4, mode="verified").lookup == 8, "the clock chose it"


@pytest.mark.parametrize("asked", [{"lookup": 2}, {"lenience": 0.5}, {"draft": "branches"}])
def test_what_arithmetic_may_not_choose(asked, monkeypatch):
    """Copies have no form of two forwards; lenience needs drafts."""
    held = {}

    def seen(self, size, rows, **fixed):
        held.update(fixed)
        return Spending(4, 1, 0, 1.0, 1.0)

    monkeypatch.setattr(TableModel, "best_spending", seen)
    settings_for(TableModel.random(), mode="verified", **asked)
    assert held["pairs"] == ("lookup" not in asked)
    assert held["one_forward"] == ("lookup" not in asked)
    model = TableModel.random()
    model.drafting = {"lookup": 8}
    settings_for(model, 4, mode="verified")
    assert not held["pairs"], "nor where the checkpoint's copies are left out"


def test_every_option_arrives():
    solver = EntropyBound(0.3, "margin")
    run = settings_for(
        TableModel.random(), mode="ntp", solver=solver, block_size=7, max_new_tokens=9,
        temperature=0.5, top_p=0.9, top_k=4, seed=8, stop=["a", "bc"], ignore_eos=True,
    )  # fmt: skip
    sampler = Sampler(temperature=0.5, top_p=0.9, top_k=4, seed=8)
    assert run == Settings("ntp", solver, 7, 9, sampler, ("a", "bc"), True)
    assert settings_for(TableModel.random(), stop="ab").stop == ("ab",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, r"mode must be one of sbd, ntp, verified, got 'fast'"),
        ({"stop": "d\ufffd"}, "stop text .* holds U.FFFD, which stands for half a"),
        ({"solver": "entropy"}, r"solver must be one of entropy:GAMMA, .*; got 'entropy'"),
        ({"solver": "entropy:-1"}, r"solver must be .* \(gamma must be a number from 0 to inf"),
        ({"block_size": 0}, r"block_size must be an integer of at least 1, got 0"),
        ({"block_size": 1025}, r"block_size must be at most 1024, got 1025"),
        ({"block_size": 1025, "mode": "verified"}, r"block_size must be at most 1024, got 1025"),
        ({"block_size": True}, r"block_size must be an integer of at least 1, got True"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": -5}, r"max_new_tokens must be an integer of at least 1, got -5"),
        (
            {"temperature": -1.0},
            r"temperature must be 0, which is greedy, or lie in .*1e6, got -1.0",
        ),
        (
            {"temperature": math.nan},
            r"temperature must be 0, which is greedy, or lie in .*1e6, got nan",
        ),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\], got 0.0"),
        ({"top_k": -1}, r"top_k must be an integer >= 0 \(0 keeps every token\), got -1"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\*\*63\), got -1"),
        ({"stop": ""}, r"stop must be texts, none of them empty, got \('',\)"),
        ({"stop": ["a", ""]}, r"stop must be texts, none of them empty, got \('a', ''\)"),
        ({"stop": ["a", "b<eos>"]}, r"stop text 'b<eos>' holds the special token '<eos>', which "),
    ],
)
def test_options_out_of_range(options, message):
    model = TableModel.random()
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(model, "a", **options)
    # A stream refuses at once, not when it is first asked for a token.
    with pytest.raises(ValueError, match=f"^{message}"):
        stream(model, "a", **options)
    assert not model.forwards


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"solver": 0.3}, "solver must be a solver or its text, got 0.3"),
        ({"block_size": 2.0}, "block_size must be an integer of at least 1, got 2.0"),
        ({"max_new_tokens": "9"}, "max_new_tokens must be an integer of at least 1, got '9'"),
        ({"stop": 3}, r"stop must be texts, none of them empty, got 3"),
        ({"stop": (1,)}, r"stop must be texts, none of them empty, got \(1,\)"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"next_token_seed": 1}, "next_token_seed must be True or False, got 1"),
        ({"slide": 1}, "slide must be True or False, got 1"),
        (
            {"slide": True, "fallback": 1.5},
            "fallback is for whole blocks, which blocks that slide never are, got 1.5 with slide",
        ),
    ],
)
def test_settings_of_a_wrong_type(fields, message):
    # Set past the runtime type check of the test run, which would speak first.
    run = Settings("sbd", EntropyBound(0.1), 16)
    for name, value in fields.items():
        object.__setattr__(run, name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        run.__post_init__()


def test_unknown_options():
    options: dict[str, Any] = {"gama": 0.3, "n": 2}
    with pytest.raises(TypeError, match=r"^unknown options \['gama', 'n'\]; known: \['block_size'"):
        generate(TableModel.random(), "a", **options)


@pytest.mark.parametrize("batch_size", [0, -3, True])
def test_batch_size_out_of_range(batch_size):
    message = f"^batch_size must be an integer of at least 1, got {batch_size}"
    with pytest.raises(ValueError, match=message):
        generate(TableModel.random(), [[3]], batch_size=batch_size, max_new_tokens=3)


def test_a_batch_larger_than_the_input():
    model = TableModel.random()
    assert len(generate(model, [[3], [4]], batch_size=50, max_new_tokens=3)) == 2


def test_embeddings_that_change_with_the_length_end_texts_where_they_would(checkpoint, tmp_path):
    """Else keys would be of two kinds, and a row's tokens depend on how long its neighbours are."""
    folder = copied(checkpoint("llama"), tmp_path / "a", "config.json", rope_parameters=LONGROPE)
    model = load(folder)
    assert (model.context_length, model.network.config.max_position_embeddings) == (32, 256)
    few: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 24}
    with pytest.raises(ValueError, match="context of 32 tokens, beyond which its longrope embed"):
        generate(model, [[3] * 26], **few)
    with pytest.raises(ValueError, match=r"no room .* of 32 tokens, beyond which its longrope"):
        generate(model, [[3] * 33], **few)
    prompts = [[3, 9, 8], [*range(3, 11)], [*range(3, 31)]]
    few["max_new_tokens"] = 4
    several = [answer.token_ids for answer in generate(model, prompts, mode="ntp", **few)]
    drafted = generate(model, prompts, mode="verified", block_size=8, branches=8, seeds=1, **few)
    assert [answer.token_ids for answer in drafted] == several
    for prompt, ids in zip(prompts, several, strict=True):
        assert generate(model, [prompt], mode="ntp", **few)[0].token_ids == ids
    theirs = model.network.generate(
        torch.tensor(prompts[2:]), attention_mask=torch.ones(1, 28, dtype=torch.long),
        do_sample=False, max_new_tokens=4, min_new_tokens=4,
        suppress_tokens=[model.mask_token_id], pad_token_id=0,
    )  # fmt: skip
    assert tuple(theirs[0, 28:].tolist()) == several[2]


# ------------------------------------------------------------------ results


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_results_come_in_the_order_of_the_prompts(batch_size):
    model = TableModel.random(seed=2)
    lengths = [5, 1, 9, 3, 1, 7]
    prompts = [[3 + i] * length for i, length in enumerate(lengths)]
    results = generate(model, prompts, batch_size=batch_size, max_new_tokens=6, ignore_eos=True)
    assert [result.prompt_tokens for result in results] == lengths
    alone = [generate(model, [p], max_new_tokens=6, ignore_eos=True)[0] for p in prompts]
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
@pytest.mark.parametrize("stop", [(), ("a", "cc")])
def test_numbers_of_a_result(mode, stop):
    model = TableModel.random(seed=8)
    prompts = [[4], [3, 5], [7, 6, 8]]
    run = settings_for(
        model, mode=mode, solver="entropy:0.6", block_size=5, max_new_tokens=22,
        temperature=1.0, top_k=5, stop=stop,
    )  # fmt: skip
    results = generate(
        model, prompts, mode=mode, solver="entropy:0.6", block_size=5, max_new_tokens=22,
        temperature=1.0, top_k=5, stop=stop,
    )  # fmt: skip
    for prompt, result in zip(prompts, results, strict=True):
        assert result.settings == run
        assert result.num_tokens == len(result.token_ids) == len(result.reveal_step)
        assert result.num_tokens == len(result.entropy)
        assert result.nfe == max(result.reveal_step)
        assert set(result.reveal_step) <= set(range(1, result.nfe + 1))
        assert result.tokens_per_forward == result.num_tokens / result.nfe
        assert result.prefill_forwards == 1
        assert result.wall_s == result.prefill_s + result.decode_s
        assert result.prefill_s > 0
        assert result.decode_s >= 0
        assert MASK not in result.token_ids
        if mode == "ntp":
            assert result.tokens_per_forward == 1
            assert result.reveal_step == tuple(range(1, result.num_tokens + 1))
        # The model's own entropy: neither temperature nor top-k changes it.
        text = [*prompt, *result.token_ids]
        for i, nats in enumerate(result.entropy, start=len(prompt)):
            table = model.noisy[i] if mode == "sbd" else model.next_token[i - 1, text[i - 1]]
            logits = table.clone()
            logits[MASK] = -torch.inf
            assert nats == pytest.approx(float(entropy(logits[None, None])), abs=1e-6)


@given(st.sets(st.integers(0, 11), min_size=1))
def test_rows_that_leave_are_filled_up_from_the_end(going):
    slots = sorted(going)
    found = running.closed_up(slots)
    assert sorted(found) == slots
    moved = [slot for place, slot in enumerate(found) if place != slot]
    assert len(moved) == sum(slot >= len(slots) for slot in slots), "no more than must"
