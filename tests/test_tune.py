"""Picking a setting: the bound on what it may lose, the rounds, the choice."""

import json
import random
import shutil
from dataclasses import replace
from itertools import groupby, pairwise, product

import pytest
import torch

from setblock import generation, nano, tune
from setblock.checkpoint import BUNDLED, DRAFTING
from setblock.cli.tuning import tell
from setblock.evaluate import Form
from setblock.generation import settings_for
from setblock.loading import load
from setblock.model import Model
from setblock.roofline import ACCEPTANCE, fitted_acceptance
from setblock.scores import drop_bounds
from setblock.tasks import TASKS, Item
from setblock.tune import SPEEDS, Target, Tried, _rank, items_needed, words

FEW = {"max_new_tokens": 6}
VERIFIED = Tried(modes=["verified"])
SOME = ("fixed:2", "fixed:3", "entropy:inf", "confidence:0.9", "prefix:0.5", "fixed:1")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint("llama", settings={"trained": True, "block_size": 4}), dtype="float32")


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


def test_rank_of_settings():
    """What rounding changed is no loss to rank by; what a solver changed is."""
    target = Target(0.01, 0.9, "clock")
    slow, fast = {"speed": 1.2, "drop": 0.0}, {"speed": 2.0, "drop": 0.5}
    assert _rank(fast | {"rounding": True}, target) < _rank(slow | {"rounding": False}, target)
    assert _rank(slow | {"rounding": False}, target) < _rank(fast | {"rounding": False}, target)


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
        model, items * 3, Tried(solvers=["fixed:2"], block_sizes=[4]),
        on_sample=lambda run, one: kept.setdefault(run, []).append(one),
    )  # fmt: skip
    assert line["confirmed_on"] == 20
    keys = [[one.key for one in sorted(kept[half], key=lambda one: one.index)] for half in (0, 1)]
    assert not set(keys[0]) & set(keys[1])
    order = [problem.key for problem in items]
    assert keys[1] != [key for key in order if key in keys[1]]


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


def test_verified_settings_to_try(model):
    """One branch, all, and the arithmetic's for each size; the six that it says are quickest.

    With lookup; the first three without; and lookup alone.
    """
    every = VERIFIED.verified(model, 1)
    assert len({tuple(one.items()) for one in every}) == len(every)
    tried, rest = every[: tune.MOST_VERIFIED], every[tune.MOST_VERIFIED :]
    assert {one["lookup"] for one in tried} == {tune.LOOKUP}
    assert rest[:-1] == [one | {"lookup": 0} for one in tried[: tune.WITHOUT_LOOKUP]]
    alone = {"block_size": 1, "branches": 1, "seeds": 0, "lookup": tune.LOOKUP}
    assert rest[-1] == {"mode": "verified", **alone}
    assert {one["block_size"] for one in tried} == {2, 3, 4}, "up to the checkpoint's"
    more = Tried(block_sizes=[8]).verified(model, 1)
    assert {(one["branches"], one["seeds"]) for one in more} >= {(1, 0), (8, 0)}
    spent = [
        model.best_spending(
            one["block_size"], 1, fixed_size=True, branches=one["branches"], seeds=one["seeds"]
        ).seconds_per_token
        for one in tried
    ]
    assert spent == sorted(spent)
    assert Tried(["sbd"]).verified(model, 1) == []
    assert Tried(block_sizes=[1]).verified(model, 1) == []
    wide = Tried(["verified"], block_sizes=[200])
    wide.check(model)
    assert {one["branches"] for one in wide.verified(model, 1)} == {1}, "200 would be too many"
    twice = Tried(["sbd"], ["fixed:2", "fixed:2"], [4, 4])
    assert [one["slide"] for one in twice.with_solvers(model)] == [False, True]


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        (Tried(["ntp"]), "mode must be one of sbd, verified to be tuned, got ntp"),
        (Tried(block_sizes=[4, 0]), "block_size must be an integer of at least 1, got 0"),
        (Tried(["verified"], block_sizes=[1]), "blocks of one token leave nothing to try"),
        (Tried(solvers=["best"]), "solver must be one of"),
    ],
)
def test_bad_settings_to_try(model, tried, message):
    with pytest.raises(ValueError, match=message):
        tried.check(model)


def test_what_is_tried_follows_from_the_longest_block(model):
    """The checkpoint's, or that of a run that goes on."""
    longer = Tried(longest=8)
    assert {one["block_size"] for one in longer.with_solvers(model)} == {8}
    assert longer.drafting(model, 1)["block_size"] <= longer.up_to(model) == 8
    assert Tried().up_to(model) == 4
    assert Tried(block_sizes=[2, 6]).up_to(model) == 6


def test_words():
    nothing: dict = dict.fromkeys(tune.NAMES)
    assert words(nothing | {"mode": "ntp", "block_size": 4}) == "ntp"
    sbd = {"mode": "sbd", "solver": "fixed:2", "block_size": 4}
    assert words(nothing | sbd) == words(sbd) == "sbd fixed:2, blocks of 4"
    assert words(sbd | {"slide": True}) == "sbd fixed:2, blocks of 4 that slide"
    drafted = {"mode": "verified", "solver": "fixed:2", "block_size": 3}
    assert words(drafted) == "verified, blocks of 3"
    assert words(drafted | {"branches": 1, "seeds": 0}) == "verified, blocks of 3, 1 branch"
    assert (
        words(drafted | {"branches": 2, "seeds": 1}) == "verified, blocks of 3, 2 branches, 1 seed"
    )
    copied = drafted | {"branches": 1, "lookup": 8}
    assert words(copied) == "verified, blocks of 3, 1 branch, lookup 8"
    assert words(copied | {"block_size": 1}) == "verified, lookup 8 alone"
    assert words(sbd | {"lookup": 8}) == "sbd fixed:2, blocks of 4", (
        "where the checkpoint has it for verified"
    )


def test_items_needed():
    """Between equal settings the bound is z^2 / (n + z^2)."""
    target = Target(0.005, 0.95, "clock")
    need = items_needed(target)
    assert need is not None
    assert 800 < need < 1000
    confidence = 1 - 0.05 / tune.FINALISTS
    assert drop_bounds(0, 0, need, confidence)[1] <= 0.005
    assert drop_bounds(0, 0, need - 1, confidence)[1] > 0.005
    assert items_needed(replace(target, max_drop=0.0)) is None


# The command

OPTIONS = (
    *("--limit", "12", "--max-drop", "40", "--confidence", "0.8", "--by", "forwards"),
    *("--solver", "fixed:2", "--solver", "entropy:inf", "--block-size", "4", "--block-size", "8"),
    *("--batch-size", "4", "--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu"),
)


def test_blocks_that_slide_are_tried_and_written(run, checkpoint, tmp_path, judge):
    judge(lambda mode, number: True)
    folder = shutil.copytree(checkpoint("llama", settings={"trained": True}), tmp_path / "copy")
    words = ("tune", folder, "--task", "json", "--mode", "sbd", *OPTIONS, "--json")
    both = run(*words, "--no-write").json["rounds"][0]["settings"]
    told = {(one["solver"], one["block_size"], one["slide"]) for one in both}
    assert told == set(product(("fixed:2", "entropy:inf"), (4, 8), (False, True)))
    for word, slides in (("--slide", True), ("--no-slide", False)):
        record = run(*words, word).json
        assert {one["slide"] for one in record["rounds"][0]["settings"]} == {slides}
        assert record["results"][0]["chosen"]["slide"] is slides
        assert load(folder).slides is slides, "written, or taken away again"
    assert "--slide is for mode sbd" in run("tune", folder, "--mode", "verified", "--slide").error


def test_command(run, checkpoint, tmp_path, judge, capsys):
    judge(lambda mode, number: True)
    drafting = {"block_size": 3, "branches": 2, "seeds": 1, "lookup": 4}
    settings = {"trained": True, "mode": "verified", "verified": drafting}
    folder = shutil.copytree(checkpoint("llama", settings=settings), tmp_path / "copy")
    out = tmp_path / "tuned.json"
    words = (folder, "--task", "json", *OPTIONS, "--out", out, "--mask-token-id", "7", "--write")
    record = run("tune", *words, "--json").json
    line = record["results"][0]
    assert line["chosen"]["mode"] == "sbd"
    assert record["rounds"][0]["items"] == 6
    defaults = load(folder).defaults
    assert defaults["solver"] == line["chosen"]["solver"]
    assert defaults["block_size"] == line["chosen"]["block_size"]
    assert load(folder).drafting == drafting, "for whoever asks for mode verified"
    assert json.loads(out.read_text()) == record
    assert "is there already" in run("tune", *words).error
    assert record["request"]["longest"] == 16
    assert load(folder).defaults["block_size"] != 16, "written since, and of no matter for this run"
    shown = run("tune", *words, "--resume").out
    before = "verified, blocks of 3, 2 branches, 1 seed, lookup 4"
    assert f"written into {folder}/generation_config.json, where it was {before}" in shown
    assert "times fewer forwards than token by token" in shown
    assert f"chosen: sbd {line['chosen']['solver']}" in shown
    was = line["before"]["acceptance"]
    assert was is None, "until then it was assumed"
    assert f"acceptance of drafted tokens: {line['acceptance']:.2f}\n" in shown
    assert load(folder).acceptance == line["acceptance"]
    assert f"--no-write: {folder} is as it was" in run("tune", *words, "--resume", "--no-write").out
    for count, told in ((1, "1 item in the end: too few to tell"), (7, "7 items"), (8, "")):
        tell(line | {"by": "clock", "confirmed_on": count})
        shown = capsys.readouterr().out
        assert ("too few" in shown) == bool(told)
        assert told in shown


def test_command_where_nothing_is_proven(run, checkpoint, tmp_path, judge):
    judge(lambda mode, number: mode == "ntp")
    folder = shutil.copytree(checkpoint("llama", settings={"trained": True}), tmp_path / "copy")
    before = (folder / "generation_config.json").read_text()
    words = ("--task", "json", "--limit", "40", "--solver", "fixed:2", "--max-new-tokens", "4")
    for drop in ("0.5", "0"):
        shown = run("tune", folder, *words, "--dtype", "bfloat16", "--max-drop", drop).out
        assert "chosen: ntp, 1.00 times" in shown
        assert f"nothing faster is proven to lose at most {drop} points, and no setting is" in shown
        after = (folder / "generation_config.json").read_text()
        changed = {**json.loads(after)["setblock"]}
        assert 0 < changed.pop("acceptance") < 1, "measured, so written"
        assert changed == json.loads(before)["setblock"]
    alone = ("--mode", "sbd", "--block-size", "4", "--no-slide", "--no-write")
    shown = run("tune", folder, *words, *alone).out  # one, which shares its error with no other
    assert "needs 539 confirming items, here were 20" in " ".join(shown.split())


def test_command_on_a_benchmark(run, checkpoint, tmp_path, monkeypatch):
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--task", "gsm8k", "--data", data, "--plain", "--solver", "fixed:2")
    folder = checkpoint("llama", settings={"trained": True})
    right = replace(TASKS["gsm8k"], check=lambda item, text: True)
    monkeypatch.setitem(TASKS, "gsm8k", right)
    record = run("tune", folder, *words, "--max-new-tokens", "4", "--no-write", "--json").json
    assert record["request"]["data"] == "rows.jsonl"
    assert record["results"][0]["confirmed_on"] == 2


def test_command_on_prompts(run, tmp_path, items, monkeypatch):
    """Nothing lost, nothing judged: what is drafted goes into the checkpoint, and is used."""
    folder = shutil.copytree(BUNDLED["nano"], tmp_path / "copy")
    before = load(folder).defaults
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": one.prompt}) + "\n" for one in items[:6]))
    words = ("--task", "prompts", "--data", data, "--max-new-tokens", "12", "--pack", "off")
    compiled: list[str] = []
    monkeypatch.setattr(Model, "compile", lambda model, how: compiled.append(how))
    words += ("--compile", "kernels")
    shown = run("tune", folder, *words, "--mode", "verified", "--by", "forwards").out
    assert "same" in shown
    assert "0, exact" in shown
    assert "too few to tell" not in shown, "forwards have no noise"
    assert compiled == ["kernels"]
    tuned = load(folder)
    assert tuned.defaults == before | {"mode": "verified"}, "for whoever asks for mode sbd"
    assert f"chosen: {tune.words({'mode': 'verified', **tuned.drafting})}, " in shown
    used = settings_for(tuned, 7)
    drafted = {name: getattr(used, name) for name in DRAFTING}
    assert (used.mode, drafted) == ("verified", tuned.drafting)
    sbd = settings_for(tuned, mode="sbd")
    assert (sbd.block_size, sbd.branches, sbd.seeds) == (16, None, 0)
    assert settings_for(tuned, branches=5).branches == 5
    assert settings_for(tuned, block_size=9).block_size == 9
    solver = settings_for(tuned, draft="solver", solver="fixed:2")
    assert (solver.block_size, solver.branches) == (16, None)
    assert run("info", folder, "--json").json["verified"] == tuned.drafting
    again = run("tune", folder, *words, "--mode", "verified", "--by", "forwards", "--json").json
    assert again["request"]["longest"] == 16, "a choice does not narrow the next one"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nano",), "'nano' is no checkpoint folder that the choice could be written into"),
        (("nano", "--no-write", "--limit", "0"), "--limit must be at least 1, got 0"),
        (("nano", "--no-write", "--batch-size", "0"), "--batch-size must be at least 1, got 0"),
        (("nano", "--no-write", "--plain"), "--plain and --split are for benchmark tasks"),
        (("nano", "--no-write", "--split", "test"), "--plain and --split are for benchmark tasks"),
        (("nano", "--no-write", "--task", "gsm8k"), "task gsm8k needs its rows"),
        (("nano", "--no-write", "--task", "json", "--limit", "1"), "needs at least 2 items"),
        (("nano", "--no-write", "--data", "x"), "--data is for one --task of gsm8k"),
        (("nano", "--no-write", "--mode", "ntp"), "mode must be one of sbd, verified to be tuned"),
        (
            ("nano", "--no-write", "--mode", "verified", "--solver", "fixed:2"),
            "--solver is for mode sbd, and the mode is",
        ),
        (("nano", "--no-write", "--solver", "best"), "solver must be one of"),
        (("nano", "--no-write", "--resume"), "resume: no record to go on with"),
        (("nano", "--no-write", "--max-drop", "-1"), "--max-drop must lie in 0..100 points"),
    ],
)
def test_wrong_words(run, words, message):
    assert message in run("tune", *words).error
