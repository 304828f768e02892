"""Picking a setting: the bound on what it may lose, the rounds, the choice."""

import random
from dataclasses import replace
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from setblock import evaluate, generation, nano, running, tune
from setblock.evaluate import Form
from setblock.loading import load
from setblock.roofline import ACCEPTANCE, fitted_acceptance
from setblock.tasks import TASKS, Item
from setblock.tune import SPEEDS, Target, Tried

FEW: dict[str, Any] = {"max_new_tokens": 6}
VERIFIED = Tried(modes=["verified"])
SOME = ("fixed:2", "fixed:3", "entropy:inf", "confidence:0.9", "prefix:0.5", "fixed:1")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint("llama", settings={"trained": True, "block_size": 4}), dtype="float32")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """What arithmetic chooses depends on them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.fixture
def items():
    return nano.problems("json", "validation", 40)


@pytest.fixture
def judge(monkeypatch):
    """judge(right): whether an answer is right is what right(mode, number of the item) says."""

    def use(right):
        problems = nano.problems("json", "validation", 40)
        numbers = {problem.key: number for number, problem in enumerate(problems)}
        mode = ""
        settings_for = generation.settings_for

        def seen(model, *rows, **options):
            nonlocal mode
            settings = settings_for(model, *rows, **options)
            mode = settings.mode if settings.mode != "sbd" else str(settings.solver)
            return settings

        monkeypatch.setattr(generation, "settings_for", seen)
        monkeypatch.setattr(nano, "check", lambda one, text: right(mode, numbers[one.key]))

    return use


def tuned(model, items, tried=None, target=None, **more):
    rounds = []
    tried = tried or Tried(solvers=SOME, block_sizes=[4], slides=[False])
    line = tune.tune(
        model, items, tried, target or Target(0.005, 0.9, "forwards"), 8,
        on_round=rounds.append, **FEW, **more,
    )  # fmt: skip
    return line, rounds


def test_rounds_halve_the_settings_and_double_the_items(model, items, judge):
    judge(lambda mode, number: True)
    line, rounds = tuned(model, items)
    assert [one["items"] for one in rounds] == [8, 16]
    assert [len(one["settings"]) for one in rounds] == [12, 6], (
        "six solvers; 3 branches, copies or not"
    )
    for one, after in pairwise(rounds):
        assert sum(setting["kept"] for setting in one["settings"]) == len(after["settings"])
    assert (line["picked_on"], line["confirmed_on"]) == (16, 20)
    assert len(line["finalists"]) == tune.FINALISTS
    assert {setting["n"] for setting in line["finalists"]} == {20}


def test_the_fastest_proven_setting_is_chosen(model, items, judge):
    """With a generous bound 20 items prove it; the speed is that of tokens per forward."""
    judge(lambda mode, number: True)
    line, _ = tuned(model, items, target=Target(0.4, 0.9, "forwards"))
    assert line["chosen"]["solver"] == "entropy:inf"
    assert line["chosen"]["proven"]
    assert line["chosen"]["speed"] == max(one["speed"] for one in line["finalists"])
    assert line["chosen"]["speed"] == pytest.approx(line["chosen"]["tokens_per_forward"])


def test_a_setting_that_loses_is_left_out(model, items, judge):
    """The fastest one is always wrong: the next one is taken."""
    judge(lambda mode, number: mode != "entropy:inf")
    line, rounds = tuned(model, items, target=Target(0.4, 0.9, "forwards"))
    [lost] = [one for one in rounds[0]["settings"] if one["solver"] == "entropy:inf"]
    assert lost["drop"] == 1
    assert not lost["kept"]
    assert line["chosen"]["solver"] in ("fixed:2", "fixed:3")  # both two forwards for four slots


def test_a_loss_that_only_shows_on_the_confirming_items(model, items, judge):
    """What picked is no proof."""
    drawn = list(range(40))
    random.Random(0).shuffle(drawn)
    judge(lambda mode, number: mode == "ntp" or number in drawn[::2])
    line, _ = tuned(model, items, target=Target(0.4, 0.9, "forwards"))
    assert all(one["drop"] == 1 for one in line["finalists"])
    nothing = dict.fromkeys(tune.NAMES)
    assert line["chosen"] == nothing | {"mode": "ntp", "speed": 1.0, "drop": 0.0}


def test_verified_decoding_needs_no_proof_in_float32(model, items, judge):
    judge(lambda mode, number: mode in ("ntp", "verified"))
    tight = Target(0.0, 0.99, "forwards")
    line, _ = tuned(model, items, VERIFIED, tight)
    for one in line["finalists"]:
        assert one["identical_share"] == 1
        assert one["drop_bounds"][1] > 0
        assert one["lossless"]
        assert one["proven"]
    with_solver, _ = tuned(model, items, Tried(["sbd"], ["fixed:2"]), tight)
    assert not with_solver["finalists"][0]["proven"]
    assert line["chosen"]["mode"] in ("verified", "ntp")  # a random drafter may save nothing


def test_rounding_is_no_loss(model, items, judge):
    """In bfloat16 texts of verified decoding differ; only right answers lost count against it."""
    half = load(model.name, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    tight = Target(0.0, 0.99, "forwards")
    judge(lambda mode, number: True)
    line, _ = tuned(half, items, VERIFIED, tight)
    for one in line["finalists"]:
        assert (one["lossless"], one["proven"], one["rounding"]) == (False, False, True)
    if any(one["speed"] > 1 for one in line["finalists"]):
        assert line["chosen"]["mode"] == "verified"
    judge(lambda mode, number: mode == "ntp")
    line, _ = tuned(half, items, VERIFIED, tight)
    assert not any(one["rounding"] for one in line["finalists"]), "far more than rounding takes"
    assert line["chosen"]["mode"] == "ntp"
    form = Form(TASKS["prompts"], chat=False)
    asked = [Item(str(n), f"question {n}", "", None) for n in range(12)]
    line, _ = tuned(half, asked, VERIFIED, tight, form=form)
    assert all(one["rounding"] for one in line["finalists"]), "no right answers to lose"


def test_acceptance_is_measured_before_verified_decoding_is_tried(model, items, judge):
    """How much to draft follows from it; without verified decoding there is nothing to measure."""
    judge(lambda mode, number: True)
    model.acceptance = 0.6
    assert tuned(model, items, Tried(["sbd"], SOME[:1], [4]))[0]["acceptance"] is None
    assert model.acceptance == 0.6, "as it was"
    model.acceptance = ACCEPTANCE
    kept: dict[int, list] = {}
    used = generation.settings_for(model, 8, mode="verified", draft="branches")
    line, _ = tuned(
        model, items, VERIFIED, on_sample=lambda run, one: kept.setdefault(run, []).append(one)
    )
    measured = kept[2]  # run 1, the picking half
    rate = sum(len(one.token_ids) for one in measured) / sum(one.nfe for one in measured)
    assert used.branches is not None
    fitted = fitted_acceptance(used.block_size, used.branches, used.seeds, rate)
    assert line["acceptance"] == model.acceptance == fitted != ACCEPTANCE


def test_each_setting_is_warmed_up_once(model, items, judge):
    """The baseline, the measuring of acceptance, and all that is tried, before they are timed."""
    judge(lambda mode, number: True)
    warmed: list[dict] = []
    _, rounds = tuned(model, items, warm_up=warmed.append)
    told = [{name: one.get(name) for name in tune.NAMES} for one in warmed]
    shown = [{name: one[name] for name in tune.NAMES} for one in rounds[0]["settings"]]
    assert [one["mode"] for one in told[:2]] == ["ntp", "verified"]
    assert told[2:] == shown
    assert all(one["max_new_tokens"] == 6 for one in warmed)


def test_settings_answer_in_turns(model, items, judge):
    """A batch each, so that a machine that slows down slows all of them alike."""
    judge(lambda mode, number: True)
    order: list[int] = []
    tuned(
        model, items, Tried(["sbd"], SOME[:3], [4], slides=[False]),
        on_sample=lambda run, sample: order.append(run // 2),
    )  # fmt: skip
    turns = [order[first : first + 8] for first in range(0, 4 * 8, 8)]
    assert [set(turn) for turn in turns] == [{0}, {2}, {3}, {4}], "the baseline, then the others"
    confirming = order[4 * 8 :]
    assert [len(list(some)) for _, some in groupby(confirming)] == [8] * 8 + [4] * 4


def test_a_batch_is_decoded_once_and_all_of_its_time_counts(model, monkeypatch):
    """Of prompts of any length. A second is a forward."""
    monkeypatch.setattr(nano, "check", lambda one, text: True)
    items = [*nano.problems("json", "validation", 16), *nano.problems("lists", "validation", 16)]
    seconds, rows, forward, start = 0, 0, type(model).forward, running._start

    def timed(*given, **more):
        nonlocal seconds
        seconds += 1
        return forward(*given, **more)

    def counted(answers, room):
        nonlocal rows
        rows += len(answers)
        return start(answers, room)

    monkeypatch.setattr(type(model), "forward", timed)
    monkeypatch.setattr(running, "_start", counted)
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(perf_counter=lambda: seconds))
    kept: dict[int, list] = {}
    for size, told in ((3, [9, 16]), (8, [8, 16]), (16, [16, 16])):
        kept.clear()
        rows = 0
        line = tune.tune(
            model, items, Tried(["sbd"], ["fixed:2"], [4], slides=[False]),
            Target(0.4, 0.9, "clock"), size, **FEW,
            on_sample=lambda run, one: kept.setdefault(run, []).append(one),
        )  # fmt: skip
        assert [line["picked_on"], line["confirmed_on"]] == told
        assert {run: len(some) for run, some in kept.items()} == {
            run: told[run % 2] for run in (0, 1, 4, 5)
        }
        assert rows == 2 * sum(told)
        keys = {one.key: number for number, one in enumerate(items)}
        baseline = sorted(kept[1], key=lambda one: one.index)
        asked = [items[keys[one.key]] for one in baseline]
        alone = [
            evaluate.evaluate(model, asked[first : first + size], size, mode="ntp", **FEW).wall_s
            for first in range(0, len(asked), size)
        ]
        assert sum(one.wall_s for one in baseline) == sum(alone)


def test_verified_answers_that_differ_while_picking_prove_nothing(model, items, judge):
    """A text that can't differ and did is a sign that something is wrong."""
    judge(lambda mode, number: True)
    kept: dict[int, list] = {}
    only = Tried(["verified"], block_sizes=[2])
    tight = Target(0.0, 0.99, "forwards")
    line, rounds = tuned(
        model, items, only, tight, on_sample=lambda run, one: kept.setdefault(run, []).append(one)
    )
    final, first = line["finalists"][0], rounds[0]["settings"]
    same = [all(one[name] == final[name] for name in tune.NAMES) for one in first]
    run = 2 * (2 + same.index(True))  # of the picking half
    ids = kept[run][0].token_ids
    kept[run][0] = replace(kept[run][0], token_ids=(*ids[:-1], ids[-1] + 1))
    line, _ = tuned(model, items, only, tight, known=lambda run: kept.get(run, []))
    assert {one["identical_share"] for one in line["finalists"]} == {1}
    assert [one["proven"] for one in line["finalists"]].count(False) == 1


def test_answers_of_a_stopped_run_are_not_decoded_again(model, items, judge):
    judge(lambda mode, number: True)
    kept: dict[int, list] = {}

    def keep(run, sample):
        kept.setdefault(run, []).append(sample)

    whole, rounds = tuned(model, items, on_sample=keep)
    assert sorted(len(some) for some in kept.values()) == [8] * 7 + [16] * 7 + [20] * 4
    some = {number: list(samples) for number, samples in kept.items() if number % 3}
    before = {number: len(samples) for number, samples in kept.items()}
    again, more = tuned(model, items, known=lambda run: some.get(run, []), on_sample=keep)
    assert (again, more) == (whole, rounds)
    for number, samples in kept.items():
        assert len(samples) == before[number] * (1 if number % 3 else 2)


def test_by_clock(model, items, judge):
    """Seconds per token, of the same items; here as an earlier run left them."""
    judge(lambda mode, number: True)
    kept: dict[int, list] = {}
    two = Tried(["sbd"], SOME[:2], [4], slides=[False])
    tuned(model, items, two, on_sample=lambda run, one: kept.setdefault(run, []).append(one))

    def timed(run):
        each = 2.0 if run // 2 == 0 else 0.5
        return [replace(one, wall_s=each * len(one.token_ids)) for one in kept.get(run, [])]

    line, _ = tuned(model, items, two, Target(0.4, 0.9, "clock"), known=timed)
    assert [one["speed"] for one in line["finalists"]] == pytest.approx([4.0] * 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_drop": -0.1}, "max_drop must lie in"),
        ({"max_drop": 1.0}, "max_drop must lie in"),
        ({"confidence": 1.0}, "confidence must lie in"),
        ({"by": "luck"}, "by must be one of clock, forwards, got 'luck'"),
    ],
)
def test_bad_targets(fields, message):
    good = {"max_drop": 0.01, "confidence": 0.9, "by": SPEEDS[0]}
    with pytest.raises(ValueError, match=message):
        Target(**good | fields)


def test_items_come_once_and_by_lot(model, items, judge):
    """The same prompt twice proves nothing more; neighbours do not stay together."""
    judge(lambda mode, number: True)
    kept: dict[int, list] = {}
    line, _ = tuned(
        model, [replace(one) for one in items * 3], Tried(solvers=["fixed:2"], block_sizes=[4]),
        on_sample=lambda run, one: kept.setdefault(run, []).append(one),
    )  # fmt: skip
    assert line["confirmed_on"] == 20
    keys = [[one.key for one in sorted(kept[half], key=lambda one: one.index)] for half in (0, 1)]
    assert not set(keys[0]) & set(keys[1])
    order = [problem.key for problem in items]
    assert keys[1] != [key for key in order if key in keys[1]]


def test_what_is_asked_is_the_whole_prompt(model):
    """The same question behind other messages is another item."""
    form = Form(TASKS["prompts"])
    asked = [Item(str(n), "And?", "", None, (("user", str(n % 6)),)) for n in range(12)]
    tried = Tried(solvers=["fixed:4"], block_sizes=[4])
    line, _ = tuned(model, asked, tried, form=form)
    assert (line["picked_on"], line["confirmed_on"]) == (3, 3)


def test_a_baseline_that_is_rarely_right_is_looked_at_longer(model, items, judge):
    """Nothing right among the first items: the other picking items are asked as well."""
    order: list[int] = []
    judge(lambda mode, number: order.append(number) is None and len(set(order)) > 12)
    line, _ = tuned(model, items)
    assert line["picked_on"] >= 8


def test_a_baseline_that_is_never_right(model, items, judge):
    """It has nothing to lose; verified decoding is not judged by right answers."""
    judge(lambda mode, number: False)
    with pytest.raises(ValueError, match="token by token gets none of 20 items right"):
        tuned(model, items)
    assert all(one["proven"] for one in tuned(model, items, VERIFIED)[0]["finalists"])
    half = load(model.name, dtype="bfloat16")
    assert all(one["rounding"] for one in tuned(half, items, VERIFIED)[0]["finalists"])


def test_a_prompt_that_does_not_fit_is_told_before_any_forward(model, monkeypatch):
    form = Form(TASKS["prompts"], chat=False)
    asked = [Item(str(n), "question" * (40 if n == 7 else 1) + str(n), "", None) for n in range(12)]
    monkeypatch.setattr(model, "forward", None)
    with pytest.raises(ValueError, match=r"^prompt 7 has 322 tokens and leaves no room"):
        tuned(model, asked, form=form)


def test_items_without_right_answers(model):
    """Right is what token by token says."""
    form = Form(TASKS["prompts"], chat=False)
    asked = [Item(str(n), f"question {n}", "", None) for n in range(12)]
    line, rounds = tuned(model, asked, Tried(solvers=["fixed:4"], block_sizes=[4]), form=form)
    assert not line["judged"]
    assert rounds[0]["settings"][0]["drop"] == 1 - rounds[0]["settings"][0]["identical_share"] > 0
    exact = [one for one in line["finalists"] if one["mode"] == "verified"]
    assert len(exact) >= 2
    assert {(one["score"], one["drop"], one["proven"]) for one in exact} == {(1, 0, True)}
