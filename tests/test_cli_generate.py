"""generate: the answer, its JSON and its clock, in each mode."""

import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import SHORT, api

from setblock import cli, generation, loading, roofline, running
from setblock.cli import common
from setblock.model import Model

KEYS = [
    "text", "token_ids", "num_tokens", "nfe", "prefill_forwards", "tokens_per_forward",
    "reveal_step", "wall_s", "prefill_s", "decode_s", "finish_reason", "mode", "solver",
    "block_size",
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--mode", "ntp"], {"mode": "ntp"}),
        (["--mode", "sbd"], {"mode": "sbd"}),
        (
            ["--mode", "sbd", "--solver", "fixed:2", "--block-size", "6"],
            {"mode": "sbd", "solver": "fixed:2", "block_size": 6},
        ),
        (
            ["--temperature", "1.5", "--top-p", "0.8", "--top-k", "20", "--seed", "7"],
            {"temperature": 1.5, "top_p": 0.8, "top_k": 20, "seed": 7},
        ),
        (
            ["--temperature", "1.5", "--min-p", "0.1", "--frequency-penalty", "0.5"],
            {"temperature": 1.5, "min_p": 0.1, "frequency_penalty": 0.5},
        ),
        (
            ["--repetition-penalty", "1.3", "--presence-penalty", "-0.5"],
            {"mode": "verified", "repetition_penalty": 1.3, "presence_penalty": -0.5},
        ),
        (
            ["--logit-bias", "40=5.5", "--logit-bias", "41=-100", "--min-new-tokens", "7"],
            {"logit_bias": {40: 5.5, 41: -100}, "min_new_tokens": 7},
        ),
        (
            ["--mode", "sbd", "--next-token-seed", "--fallback", "0.5"],
            {"mode": "sbd", "next_token_seed": True, "fallback": 0.5},
        ),
        (["--mode", "sbd", "--slide"], {"mode": "sbd", "slide": True, "fallback": None}),
        (["--mode", "sbd", "--no-slide", "--fallback", "3"], {"slide": False, "fallback": 3}),
        (
            ["--mode", "verified", "--branches", "3", "--seeds", "2", "--lookup", "4"],
            {"mode": "verified", "branches": 3, "seeds": 2, "lookup": 4},
        ),
        (
            ["--mode", "verified", "--draft", "solver", "--solver", "fixed:3"],
            {"mode": "verified", "draft": "solver", "solver": "fixed:3"},
        ),
        (
            ["--mode", "verified", "--block-size", "4", "--lenience", "0.01"],
            {"mode": "verified", "block_size": 4, "lenience": 0.01},
        ),
    ],
)
def test_the_command_answers_as_the_python_interface(run, trained, words, options):
    answer = run("generate", trained, "--prompt", "hello", "--json", *SHORT, *words).json
    expected = api(trained, "hello", max_new_tokens=8, **options)
    assert tuple(answer["token_ids"]) == expected.token_ids
    assert tuple(answer["reveal_step"]) == expected.reveal_step
    assert (answer["nfe"], answer["text"]) == (expected.nfe, expected.text)
    told = json.loads(json.dumps(options))  # whose names are texts
    assert {key: answer[key] for key in options} == told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["40"], "--logit-bias must be ID=BIAS, such as 42=-5, got '40'"),
        (["x=3"], "--logit-bias must be ID=BIAS, such as 42=-5, got 'x=3'"),
        (["4=nan"], "--logit-bias must be ID=BIAS, such as 42=-5, got '4=nan'"),
        (["5=1_0"], "--logit-bias must be ID=BIAS, such as 42=-5, got '5=1_0'"),
        (["5= 1"], "--logit-bias must be ID=BIAS, such as 42=-5, got '5= 1'"),
        (["9" * 5000 + "=1"], "--logit-bias must be ID=BIAS, such as 42=-5, got '999"),
        (["4=1", "4=2"], "--logit-bias may be given once for a token, got 4 twice"),
        (["4=101"], "logit_bias must be of token ids, each with a number in -100..100, got 4: 101"),
    ],
)
def test_biases_that_are_none(run, trained, given, message):
    words = [word for one in given for word in ("--logit-bias", one)]
    result = run("generate", trained, "--prompt", "hi", *words)
    assert result.code == 1
    assert message in result.err


def test_json_of_sbd(run, trained):
    words = ["--solver", "fixed:3", "--block-size", "6", "--max-new-tokens", "12"]
    answer = run("generate", trained, "--prompt", "hello", "--json", *words).json
    assert set(KEYS) <= set(answer)
    assert isinstance(answer["text"], str)
    assert all(isinstance(token, int) for token in answer["token_ids"])
    assert len(answer["token_ids"]) == len(answer["reveal_step"]) == answer["num_tokens"] == 12
    assert len(answer["entropy"]) == 12
    assert sorted(answer["reveal_step"]) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert (answer["nfe"], answer["prefill_forwards"]) == (4, 1)
    assert answer["tokens_per_forward"] == 3
    assert answer["finish_reason"] == "length"
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("sbd", "fixed:3", 6)
    assert (answer["model"], answer["prompt_tokens"]) == (str(trained), 6)
    assert (answer["temperature"], answer["top_p"], answer["top_k"]) == (0, 1, 0)


def test_json_of_ntp(run, trained):
    answer = run("generate", trained, "--prompt", "hi", "--mode", "ntp", "--json", *SHORT).json
    assert set(KEYS) <= set(answer)
    assert answer["reveal_step"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert answer["tokens_per_forward"] == 1
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("ntp", None, None)


def test_json_of_verified(run, trained):
    """The ids of mode ntp; the default draft uses no solver."""
    words = ["--prompt", "hi", "--max-new-tokens", "24", "--json"]
    answer = run("generate", trained, *words, "--mode", "verified").json
    assert set(KEYS) <= set(answer)
    assert (
        answer["token_ids"] == run("generate", trained, *words, "--mode", "ntp").json["token_ids"]
    )
    assert (answer["mode"], answer["solver"], answer["draft"]) == ("verified", None, "branches")
    whole = run("generate", trained, *words, "--mode", "verified", "--block-size", "16").json
    assert (whole["token_ids"], whole["block_size"]) == (answer["token_ids"], 16)


def test_verified_says_where_drafting_does_not_pay(run, trained, monkeypatch):
    never = roofline.Spending(1, 1, 0, 1.0, 1.0)
    monkeypatch.setattr(Model, "best_spending", lambda *words, **fixed: never)
    words = ["--prompt", "hi", "--mode", "verified", *SHORT]
    assert "drafting does not pay here" in run("generate", trained, *words).err
    assert "pay" not in run("generate", trained, *words, "--block-size", "4").err
    several = ["--task", "json", "--limit", "3", "--batch-size", "2", "--mode", "verified", *SHORT]
    told = "drafting does not pay here by arithmetic for 2 rows at once"
    assert told in run("evaluate", trained, *several).err
    assert "pay" not in run("evaluate", trained, *several, "--block-size", "4").err
    timed = [
        "--limit",
        "2",
        "--repeats",
        "1",
        "--max-new-tokens",
        "2",
        "--cached",
        "0",
        "--no-vllm",
    ]
    timed += ["--no-transformers", "--batch-size", "1", "--batch-size", "2", "--mode"]
    shown = run("benchmark", trained, *timed, "verified").err
    assert told in shown
    assert "by arithmetic: " in shown, "one row"
    assert "pay" not in run("benchmark", trained, *timed, "ntp").err


def test_verified_takes_two_forwards_a_cycle_where_that_is_quicker(run, trained, monkeypatch):
    held = []

    def pair(*words: Any, **fixed: Any) -> roofline.Spending:
        held.append(fixed["one_forward"])
        return roofline.Spending(4, 1 if held[-1] else 0, 0, 2.0, 1.0)

    monkeypatch.setattr(Model, "best_spending", pair)
    words = ["--prompt", "hi", "--mode", "verified", *SHORT]
    answer = run("generate", trained, *words, "--json").json
    assert (answer["draft"], answer["solver"], answer["block_size"]) == ("solver", "entropy:inf", 4)
    assert not any(held)
    answer = run("generate", trained, *words, "--draft", "branches", "--json").json
    assert (answer["draft"], answer["branches"]) == ("branches", 1)
    assert held[-1]


def test_seconds_leave_out_loading_and_warm_up(run, trained, monkeypatch):
    """The clock stands still but for one second in each of these three."""
    now = 0.0
    load, start, step = loading.load, common.warm_up, running.DecodeState.step

    def second(function: Callable) -> Callable:
        def timed(*words: Any, **options: Any) -> Any:
            nonlocal now
            now += 1
            return function(*words, **options)

        return timed

    monkeypatch.setattr(running.time, "perf_counter", lambda: now)
    monkeypatch.setattr(loading, "load", second(load))
    monkeypatch.setattr(cli.answering, "warm_up", second(start))
    monkeypatch.setattr(running.DecodeState, "step", second(step))
    words = ["--prompt", "hi", "--solver", "fixed:2", "--json", *SHORT]
    answer = run("generate", trained, *words).json
    assert answer["prefill_s"] == 1
    assert answer["decode_s"] == answer["nfe"] == 4
    assert answer["wall_s"] == answer["prefill_s"] + answer["decode_s"]


def test_closed_streams(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="no prompt for MODEL nano: give PROMPT"):
        cli.answering._read_prompt("nano", *[None] * 5)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OSError, match="stdout is closed"):
        common.print_json({})


def test_a_warm_up_fits_where_the_answer_fits(run, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama", settings={"trained": True}), tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 12}))
    words = ["--prompt-ids", "5,6", "--block-size", "4", "--max-new-tokens", "8"]
    assert run("generate", folder, *words).code == 0


@pytest.mark.parametrize(("mode", "room"), [("ntp", 10), ("sbd", 8)])
def test_an_answer_ends_where_the_context_does(run, checkpoint, tmp_path, mode, room):
    """Where nobody says how long it may be; in whole blocks."""
    folder = shutil.copytree(checkpoint("llama", settings={"trained": True}), tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 12}))
    words = ["--prompt-ids", "5,6", "--mode", mode, "--ignore-eos"]
    words += ["--block-size", "4"] if mode == "sbd" else []
    assert run("generate", folder, *words, "--json").json["num_tokens"] == room
    error = run("generate", folder, *words, "--max-new-tokens", "256").error
    assert f"at most {room} new ones fit behind it" in error


def test_weights_that_are_no_numbers(run, checkpoint, tmp_path):
    folder = tmp_path / "broken"
    model = loading.load(checkpoint("llama", settings={"trained": True}))
    model.network.model.norm.weight.data.fill_(float("nan"))
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    result = run("generate", folder, "--prompt", "hi", "--json", "--mode", "ntp", *SHORT)
    assert "are not numbers: look at its weights" in result.error


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "must hold an object"), ('{"setblock": "x"}', "must hold an object")],
)
def test_a_broken_generation_config(run, trained, tmp_path, content, message):
    folder = shutil.copytree(trained, tmp_path / "copy")
    (folder / "generation_config.json").write_text(content)
    assert message in run("info", folder).error
    (folder / "generation_config.json").write_text('{"setblock": null}')
    assert run("info", folder).code == 0


@pytest.mark.parametrize("options", [[], ["--json"], ["--show-steps"]])
def test_ctrl_c_leaves_the_message_a_line_of_its_own(run, trained, monkeypatch, options):
    def interrupted(*words: Any, **given: Any) -> Any:
        yield next(real(*words, **given))
        raise KeyboardInterrupt

    real = generation.stream
    monkeypatch.setattr(generation, "stream", interrupted)
    words = ["--prompt-ids", "5,6", "--max-new-tokens", "8", "--ignore-eos", *options]
    result = run("generate", trained, *words)
    assert result.code == 130
    assert result.err.endswith("error: interrupted\n")
    assert result.out.endswith("\n") == (options != ["--json"])
    assert not result.out.endswith("\n\n")
