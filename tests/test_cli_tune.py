"""tune: the command, what it writes and what it refuses."""

import json
import os
import shutil
from dataclasses import replace
from itertools import product

import pytest
from test_tune import items, judge

from setblock import tune
from setblock.card import with_choice
from setblock.checkpoint import DRAFTING
from setblock.cli.tuning import tell
from setblock.generation import settings_for
from setblock.loading import load
from setblock.model import Model
from setblock.names import BUNDLED
from setblock.tasks import TASKS

__all__ = ["items", "judge"]  # fixtures

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


def test_command(run, checkpoint, tmp_path, judge, capsys, monkeypatch):
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
    (folder / "README.md").write_text(with_choice("", None, 1.0, "here"))
    told = run("tune", *words, "--resume")
    shown = told.out
    assert "so is dtype float32, in which the folder is loaded from now on" in told.err
    assert f"{folder}/README.md still says what `setblock speedup` chose" in " ".join(shown.split())
    before = "verified, blocks of 3, 2 branches, 1 seed, lookup 4"
    assert f"written into {folder}/generation_config.json, where it was {before}" in shown
    assert "times fewer forwards than token by token" in shown
    assert f"chosen: sbd {line['chosen']['solver']}" in shown
    was = line["before"]["acceptance"]
    assert was is None, "until then it was assumed"
    assert f"acceptance of drafted tokens: {line['acceptance']:.2f}\n" in shown
    assert load(folder).acceptance == line["acceptance"]
    assert f"--no-write: {folder} is as it was" in run("tune", *words, "--resume", "--no-write").out
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert "busy" not in run("tune", *words, "--resume", "--no-write").err, "nothing was timed"
    timed = record | {"results": [line | {"by": "clock"}]}
    out.write_text(json.dumps(timed))
    assert "machine is busy (load 99.0 on" in run("tune", *words, "--resume", "--no-write").err
    for count, told in ((1, "1 item in the end: too few to tell"), (7, "7 items"), (8, "")):
        tell(line | {"by": "clock", "confirmed_on": count})
        shown = capsys.readouterr().out
        assert ("too few" in shown) == bool(told)
        assert told in shown


def test_command_where_nothing_is_proven(run, checkpoint, tmp_path, judge):
    judge(lambda mode, number: mode == "ntp")
    folder = shutil.copytree(checkpoint("llama", settings={"trained": True}), tmp_path / "copy")
    before = (folder / "generation_config.json").read_text()
    words = ("--task", "json", "--solver", "fixed:2", "--max-new-tokens", "4")
    words += ("--block-size", "4")
    for drop in ("0.5", "0"):
        few = ("--limit", "12", "--dtype", "bfloat16", "--max-drop", drop)
        shown = run("tune", folder, *words, *few).out
        assert "chosen: ntp, 1.00 times" in shown
        assert f"nothing faster is proven to lose at most {drop} points, and no setting is" in shown
        after = (folder / "generation_config.json").read_text()
        changed = {**json.loads(after)["setblock"]}
        assert 0 < changed.pop("acceptance") < 1, "measured, so written"
        assert changed == json.loads(before)["setblock"]
    alone = ("--mode", "sbd", "--no-slide", "--no-write", "--limit", "40")
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


@pytest.mark.parametrize(
    ("mode", "expected"), [("sbd", "poor text"), ("verified", "no speed-up but from copies")]
)
def test_an_untrained_model_is_warned_of_what_is_tried(run, checkpoint, tmp_path, mode, expected):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(4)))
    words = ("--task", "prompts", "--data", data, "--max-new-tokens", "4", "--no-write")
    result = run("tune", checkpoint("llama"), *words, "--mode", mode, "--by", "forwards", "--json")
    [warning] = [line for line in result.err.splitlines() if line.startswith("warning: ")]
    assert f"; expect {expected}" in warning
    assert f" in mode {mode}" in warning


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
