"""demo: both ways side by side."""

import os

import pytest
import torch
from conftest import SHORT
from fakes import TableModel

from setblock import names, nano
from setblock.cli import showing


def test_a_busy_machine_is_named_beside_its_seconds(run, trained, short_demo, monkeypatch):
    words = ("demo", "--model", trained, "--prompt", "hi", "--no-live")
    assert run(*words).err == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert "this machine is busy (load 99.0 on" in run(*words).err
    assert "busy" not in run(*words, "--json").err
    words = ("evaluate", trained, "--task", "lists", "--limit", "1", "--mode", "ntp", *SHORT)
    assert "this machine is busy (load 99.0 on" in run(*words).err
    assert "busy" not in run(*words, "--json").err
    words = ("generate", trained, "--prompt", "hi", *SHORT)
    assert "busy" not in run(*words).err, "it was quick"
    monkeypatch.setattr("setblock.cli.answering.SLOW_S", 0.0)
    assert "this machine is busy (load 99.0 on" in run(*words).err
    assert "busy" not in run(*words, "--json").err


@pytest.mark.parametrize(
    ("few", "told", "threads"), [(10**9, None, [1]), (10, None, []), (10**9, "4", [])]
)
def test_a_small_model_runs_on_one_thread_unless_told_otherwise(
    run, answering, monkeypatch, few, told, threads
):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(showing, "FEW", few)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    answering(TableModel.spelling("some answer", start=3))
    assert run("demo", "--prompt", "hi", "--solver", "fixed:4", "--json").code == 0
    assert asked == threads


@pytest.mark.parametrize("live", ["--live", "--no-live"])
def test_demo_shows_both_ways(run, answering, live):
    answering(TableModel.spelling("some answer", start=3))
    words = ["--model", "any", "--prompt", "hi", "--prompt", "go", "--solver", "fixed:4"]
    result = run("demo", *words, "--block-size", "4", live)
    assert result.code == 0
    assert result.err == ""
    assert result.out.count("some answer") == 4
    assert result.out.count("token by token: 12 tokens in 12 forwards, 1.00 tokens per") == 2
    assert result.out.count("set block decoding: 12 tokens in 3 forwards, 4.00 tokens per") == 2
    assert "1 of 2" in result.out
    assert result.out.count("token by token") == result.out.count("set block decoding") == 3


def test_demo_in_json(run, answering):
    answering(TableModel.spelling("some answer", start=3))
    words = ["--prompt", "hi", "--solver", "fixed:4", "--block-size", "4", "--json"]
    answer = run("demo", *words).json
    assert [one["mode"] for one in answer["answers"]] == ["ntp", "sbd"]
    assert [one["nfe"] for one in answer["answers"]] == [12, 3]
    assert not answer["answers"][1]["slide"]
    sliding = run("demo", *words, "--slide").json["answers"]
    assert [one["slide"] for one in sliding] == [False, True]
    assert [one["slide"] for one in run("demo", *words, "--no-slide").json["answers"]] == [
        False
    ] * 2
    assert [one["mode"] for one in answer["totals"]] == ["ntp", "sbd"]
    assert all(one["correct"] is None for one in answer["answers"] + answer["totals"])
    assert {"commit", "command", "machine", "date", "versions"} <= set(answer)


@pytest.mark.usefixtures("short_demo")
def test_demo_checks_its_own_problems(run, checkpoint, monkeypatch):
    """One of each family; other ones for another seed."""
    right: list[str] = []
    seen: list[str] = []

    def check(problem: nano.Problem, text: str) -> bool:
        seen.append(problem.family)
        return problem.family in right

    monkeypatch.setattr(nano, "check", check)
    folder = checkpoint("llama", settings={"trained": True})
    right.append("json")
    first = run("demo", "--model", folder, "--json").json
    assert seen == [family for family in nano.FAMILIES for _ in range(2)]
    assert [total["correct"] for total in first["totals"]] == [1, 1]
    other = run("demo", "--model", folder, "--json", "--seed", "1").json
    prompts = [[one["prompt"] for one in answer["answers"]] for answer in (first, other)]
    assert len(set(prompts[0])) == 5
    assert not set(prompts[0]) & set(prompts[1])
    shown = run("demo", "--model", folder, "--no-live").out
    assert (shown.count("  right, "), shown.count("  wrong, ")) == (2, 8)


def test_demo_of_chosen_modes(run, answering):
    answering(TableModel.spelling("some answer", start=3))
    words = ["--prompt", "hi", "--block-size", "4", "--mode", "verified", "--mode", "ntp"]
    answer = run("demo", *words, "--json").json
    assert [one["mode"] for one in answer["totals"]] == ["verified", "ntp"]
    assert [one["text"] for one in answer["answers"]] == ["some answer"] * 2
    assert [one["same"] for one in answer["totals"]] == [1, None]
    assert run("demo", *words, "--solver", "fixed:4").error.startswith("--solver is for mode sbd")
    assert run("demo", *words, "--no-slide").error.startswith("--no-slide is for mode sbd, and")
    idle = run("demo", "--prompt", "hi", "--mode", "ntp", "--block-size", "4").error
    assert idle == "--block-size is for modes sbd and verified, got 4 in mode ntp"


@pytest.mark.usefixtures("short_demo")
@pytest.mark.parametrize(
    ("own", "shown"), [("verified", ["ntp", "verified"]), ("ntp", ["ntp", "sbd"])]
)
def test_demo_shows_the_mode_of_the_model(run, checkpoint, own, shown, monkeypatch):
    monkeypatch.setitem(showing.QUESTIONS, "mine", ["hi", "go"])
    folder = checkpoint("llama", settings={"trained": True, "mode": own})
    monkeypatch.setitem(names.BUNDLED, "mine", folder)
    answer = run("demo", "--model", "mine", "--json").json
    assert [total["mode"] for total in answer["totals"]] == shown
    assert [one["prompt"] for one in answer["answers"]] == ["hi", "hi", "go", "go"]
    assert all(one["correct"] is None for one in answer["answers"])


def test_demo_needs_a_chat_template(run, checkpoint):
    folder = checkpoint("llama", chat=False, settings={"trained": True})
    result = run("demo", "--model", folder, "--prompt", "hi", "--json")
    assert "has no chat template; only plain prompts work" in result.error
