"""The commands that answer prompts: generate, demo and info."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import api, copied
from fakes import TableModel

from setblock import cli, generation, loading, nano, roofline
from setblock.adapters import attach
from setblock.checkpoint import write_settings
from setblock.cli import answering as answering_commands
from setblock.cli import common
from setblock.model import Model

SHORT = ["--max-new-tokens", "8"]
KEYS = [
    "text", "token_ids", "num_tokens", "nfe", "prefill_forwards", "tokens_per_forward",
    "reveal_step", "wall_s", "prefill_s", "decode_s", "finish_reason", "mode", "solver",
    "block_size",
]  # fmt: skip


# generate: prompts


def test_a_prompt_is_the_same_from_every_source(run, trained, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n")
    answers = [
        run("generate", trained, "Grüße\n", "--json", *SHORT),
        run("generate", trained, "--prompt", "Grüße\n", "--json", *SHORT),
        run("generate", trained, "--prompt-file", file, "--json", *SHORT),
        run("generate", trained, "--json", *SHORT, stdin=io.StringIO("Grüße\n")),
    ]
    first, *others = [answer.json["token_ids"] for answer in answers]
    assert others == [first, first, first]
    assert tuple(first) == api(trained, "Grüße\n", max_new_tokens=8).token_ids


def test_prompt_ids_are_used_as_they_are(run, trained):
    """No BOS, no template."""
    answer = run("generate", trained, "--prompt-ids", "72, 105,72", "--json", *SHORT).json
    assert answer["prompt_tokens"] == 3
    assert tuple(answer["token_ids"]) == api(trained, [72, 105, 72], max_new_tokens=8).token_ids
    text = run("generate", trained, "--prompt", "abc", "--json", *SHORT).json
    assert text["prompt_tokens"] == 4


def test_chat_uses_the_template(run, trained):
    answer = run("generate", trained, "--prompt", "abc", "--chat", "--json", *SHORT).json
    assert answer["prompt_tokens"] == len("abc") + 3  # <user>, </s>, <model>
    assert tuple(answer["token_ids"]) == api(trained, "abc", True, max_new_tokens=8).token_ids


def test_messages_go_through_the_template(run, trained, tmp_path):
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Grüße"},
    ]
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(talk, ensure_ascii=False), encoding="utf-8")
    answer = run("generate", trained, "--messages", file, "--json", *SHORT).json
    assert tuple(answer["token_ids"]) == api(trained, talk, max_new_tokens=8).token_ids
    request = io.StringIO(json.dumps({"model": "m", "messages": talk}))
    again = run("generate", trained, "--messages", "-", "--json", *SHORT, stdin=request).json
    assert again["token_ids"] == answer["token_ids"]
    for content, error in (
        ('[{"role":', "is not one JSON list: "),
        ('{"role": "user", "content": "a"}', "must hold one JSON list of messages"),
        ("[]", "must hold one JSON list of messages"),
        ('[{"role": "user"}]', "message 0 must have a role and a content"),
    ):
        file.write_text(content)
        assert error in run("generate", trained, "--messages", file).error
    file.write_text(json.dumps(talk))
    given = run("generate", trained, "--messages", file, "--chat").error
    assert given == f"--chat is for texts: --messages {file} goes through the template"
    both = run("generate", trained, "abc", "--messages", file).error
    assert both == "give one prompt: PROMPT and --messages exclude each other"


def test_an_empty_prompt_is_the_bos_token(run, trained, tmp_path):
    assert run("generate", trained, "--prompt", "", "--json", *SHORT).json["prompt_tokens"] == 1
    for nothing in ("", "\n"):
        result = run("generate", trained, stdin=io.StringIO(nothing))
        assert result.error == (
            f"no prompt for MODEL {trained}: stdin is empty (--prompt '' is an empty prompt)"
        )
        (tmp_path / "p.txt").write_text(nothing)
        result = run("generate", trained, "--prompt-file", tmp_path / "p.txt")
        assert (
            result.error == f"no prompt: {tmp_path}/p.txt is empty (--prompt '' is an empty prompt)"
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_empty_answer_of_a_chat_model_says_what_to_try(run, trained, monkeypatch):
    """It ends at once where it was asked for more text, not for an answer."""
    monkeypatch.setattr(Model, "decode", lambda model, ids: "")
    hint = f"the answer is empty: {trained} knows chat turns, and --chat makes the prompt one"
    assert hint in run("generate", trained, "hi", *SHORT).err
    assert "the answer is empty" not in run("generate", trained, "--prompt-ids", "5", *SHORT).err
    assert "the answer is empty" not in run("generate", trained, "hi", "--chat", *SHORT).err


def test_a_turn_that_ends_at_once_is_told(run, answering):
    answering(TableModel.spelling("", start=2))
    words = ("generate", "any", "--prompt", "h", "--chat")
    assert "the answer is empty: table ended its turn at once" in run(*words).err
    assert "is empty" not in run(*words, "--json").err


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


def test_a_terminal_is_no_prompt(run, trained):
    result = run("generate", trained, stdin=Terminal("never read"))
    assert result.error == (
        f"no prompt for MODEL {trained}: give PROMPT, --prompt-file, --messages, --prompt-ids or "
        "stdin"
    )


# generate: the answer


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
    assert {key: answer[key] for key in options} == options


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
    load, start, step = loading.load, common.warm_up, generation.DecodeState.step

    def second(function: Callable) -> Callable:
        def timed(*words: Any, **options: Any) -> Any:
            nonlocal now
            now += 1
            return function(*words, **options)

        return timed

    monkeypatch.setattr(generation.time, "perf_counter", lambda: now)
    monkeypatch.setattr(loading, "load", second(load))
    monkeypatch.setattr(cli.answering, "warm_up", second(start))
    monkeypatch.setattr(generation.DecodeState, "step", second(step))
    words = ["--prompt", "hi", "--solver", "fixed:2", "--json", *SHORT]
    answer = run("generate", trained, *words).json
    assert answer["prefill_s"] == 1
    assert answer["decode_s"] == answer["nfe"] == 4
    assert answer["wall_s"] == answer["prefill_s"] + answer["decode_s"]


def test_a_line_break_at_the_end_is_no_part_of_the_prompt(run, trained, tmp_path):
    wanted = run("generate", trained, "--prompt", "hi\n there", "--json", *SHORT).json["token_ids"]
    for end in ("", "\n", "\r\n"):
        file = tmp_path / "prompt.txt"
        file.write_bytes(f"hi\n there{end}".encode())
        words = ["--prompt-file", file, "--json", *SHORT]
        assert run("generate", trained, *words).json["token_ids"] == wanted
        typed = io.StringIO(f"hi\n there{end}", newline="")
        assert run("generate", trained, "--json", *SHORT, stdin=typed).json["token_ids"] == wanted
    file.write_bytes(b"\xff")
    assert f"--prompt-file {file} is not UTF-8" in run("generate", trained, *words).error


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


def test_the_text_comes_as_it_grows(run, answering):
    answering(TableModel.spelling("many words. and more", start=3))
    result = run("generate", "any", "--prompt", "hi", "--block-size", "4")
    assert result.code == 0
    assert result.out == "many words. and more\n"
    assert result.err.startswith("21 tokens, 6 forwards, 3.50 tokens per forward, ")
    assert result.err.endswith(" s for the prompt (eos)\n")


def test_the_text_is_not_touched(run, answering, monkeypatch):
    """What a terminal library takes for markup, an emoji, a tab or a control character."""
    model = answering(TableModel.spelling("abcde", start=3))
    texts = dict(zip("abcde", ["[bold]", ":smile:", "\tx", "\x0b", "[/]\n"], strict=True))
    spelled = model.decode
    monkeypatch.setattr(model, "decode", lambda ids: "".join(texts[c] for c in spelled(ids)))
    assert run("generate", "any", "--prompt", "hi").out == "".join(texts.values()) + "\n"


def test_show_steps(run, answering):
    answering(TableModel.spelling("abcd", start=3))
    words = ["--prompt", "hi", "--solver", "fixed:2", "--block-size", "4", "--show-steps"]
    result = run("generate", "any", *words, "--max-new-tokens", "4")
    assert result.out == "forward 1: 0:'a', 1:'b'\nforward 2: 2:'c', 3:'d'\nabcd\n"
    answer = run("generate", "any", *words, "--max-new-tokens", "4", "--json").json
    assert answer["steps"] == [
        {"nfe": 1, "drafts": [[0, 3], [1, 4]]},
        {"nfe": 2, "drafts": [[2, 5], [3, 6]]},
    ]


def test_steps_past_the_end(run, answering):
    answering(TableModel.spelling("abcd", start=3))
    words = ["--prompt", "hi", "--solver", "fixed:4", "--block-size", "4", "--show-steps"]
    result = run("generate", "any", *words, "--stop", "b")
    assert result.out == "forward 1: 0:'a', 1:'b', 2:'c', 3:'d'\na\n"
    past = "places from 2 on lie past the answer's end and are no part of it\n"
    assert f"{past}2 tokens, 1 forward, " in result.err
    whole = run("generate", "any", *words, "--max-new-tokens", "4")
    assert whole.err.startswith("4 tokens, 1 forward, ")


def test_no_steps_unless_asked(run, trained):
    assert "steps" not in run("generate", trained, "--prompt", "hi", "--json", *SHORT).json


# generate: where it ends


def test_a_stop_text_ends_the_answer(run, answering):
    answering(TableModel.spelling("one. two. three.", start=3))
    for words in (["--stop", "two"], ["--stop", "three", "--stop", "two", "--stop", "zzz"]):
        answer = run("generate", "any", "--prompt", "hi", "--json", *words).json
        assert answer["text"] == "one. "
        assert answer["finish_reason"] == "stop"
        assert answer["stop"] == words[1::2]


@pytest.fixture
def ending(checkpoint, tmp_path) -> tuple[Path, list[int]]:
    """A checkpoint whose EOS is a token of its own greedy answer to "hello"; that answer, free."""
    free = api(checkpoint("llama"), "hello", mode="ntp", max_new_tokens=8).token_ids
    place = next(n for n, token in enumerate(free) if n > 1 and token not in free[:n])
    changes = {"eos_token_id": free[place], "setblock": {"trained": True}}
    folder = tmp_path / "ending"
    copied(checkpoint("llama"), folder, "generation_config.json", **changes)
    return folder, list(free)


def test_eos_ends_the_answer_and_is_part_of_it(run, ending):
    folder, free = ending
    words = ["--prompt", "hello", "--mode", "ntp", "--json", *SHORT]
    answer = run("generate", folder, *words).json
    assert answer["finish_reason"] == "eos"
    assert 2 < answer["num_tokens"] < 8
    assert answer["token_ids"] == free[: answer["num_tokens"]]
    assert (
        answer["token_ids"][-1]
        == json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    )


def test_ignore_eos_goes_on_and_allows_it(run, ending):
    folder, free = ending
    words = ["--prompt", "hello", "--mode", "ntp", "--json", *SHORT]
    answer = run("generate", folder, *words, "--ignore-eos").json
    assert answer["token_ids"] == free
    assert answer["finish_reason"] == "length"


def test_ignore_eos_in_sbd(run, answering):
    answering(TableModel.spelling("abc", start=3))
    words = ["--prompt", "hi", "--json", *SHORT]
    assert run("generate", "any", *words).json["token_ids"] == [3, 4, 5, 1]
    assert run("generate", "any", *words, "--ignore-eos").json["token_ids"] == [3, 4, 5] + 5 * [1]


# Models and their defaults


@pytest.mark.parametrize("command", ["generate", "demo", "evaluate"])
@pytest.mark.usefixtures("short_demo")
def test_an_untrained_model_warns_once_and_goes_on(run, untrained, command, caplog):
    words = {
        "generate": [untrained, "--prompt", "hi", "--mode", "sbd", *SHORT],
        "demo": ["--model", untrained, "--prompt", "hi"],
        "evaluate": [untrained, "--task", "lists", "--limit", "1", *SHORT],
    }[command]
    result = run(command, *words, "--json")
    assert isinstance(result.json, dict)
    assert result.err.startswith(f"warning: {untrained} was never trained for set block decoding")
    assert result.err.count("\n") == 1
    assert not caplog.messages, "which Python is told"


def test_an_untrained_model_decodes_token_by_token_by_default(run, untrained):
    words = [untrained, "--prompt", "hi", "--json", *SHORT]
    told = run("generate", *words)
    assert told.json["mode"] == "ntp"
    assert told.json["token_ids"] == run("generate", *words, "--mode", "ntp").json["token_ids"]
    assert told.err.startswith(f"{untrained} was never trained for set block decoding: token by to")
    assert told.err.count("\n") == 1
    answer = api(untrained, "hi", max_new_tokens=8)
    assert list(answer.token_ids) == told.json["token_ids"]


def test_no_warning_where_it_does_not_matter(run, untrained, trained):
    words = ["--prompt", "hi", "--json", *SHORT]
    assert run("generate", untrained, "--mode", "ntp", *words).err == ""
    copies = ["--mode", "verified", "--block-size", "1", "--lookup", "4"]
    assert run("generate", untrained, *copies, *words).err == ""
    assert run("generate", trained, *words).err == ""
    words = ["--task", "lists", "--limit", "1", "--mode", "ntp", "--json", *SHORT]
    assert run("evaluate", untrained, *words).err == ""


def test_defaults_come_from_the_checkpoint(run, checkpoint):
    settings = {
        "mode": "ntp", "solver": "fixed:2", "block_size": 5, "dtype": "bfloat16", "device": "cpu",
        "trained": True, "mask_token_id": 7,
    }  # fmt: skip
    folder = checkpoint("llama", settings=settings)
    words = [folder, "--prompt", "hi", "--json", *SHORT]
    answer = run("generate", *words).json
    assert (answer["mode"], answer["dtype"], answer["device"]) == ("ntp", "bfloat16", "cpu")
    assert answer["mask_token_id"] == 7
    answer = run("generate", *words, "--mode", "sbd").json
    assert (answer["solver"], answer["block_size"]) == ("fixed:2", 5)
    options = [
        "--mode", "sbd", "--solver", "prefix:0.5", "--block-size", "4", "--dtype", "float32",
        "--device", "cpu", "--mask-token-id", "9", "--compile", "off", "--pack", "off",
    ]  # fmt: skip
    answer = run("generate", *words, *options).json
    assert answer["packed"] is False
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("sbd", "prefix:0.5", 4)
    assert (answer["dtype"], answer["mask_token_id"]) == ("float32", 9)
    assert run("generate", *words, "--dtype", "float16").json["dtype"] == "float16"


def test_other_defaults_are_those_that_help_states(run, trained):
    answer = run("generate", trained, "--prompt", "hi", "--json", *SHORT).json
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("sbd", "entropy:0.1", 16)
    shown = " ".join(run("generate", "--help").out.replace("│", " ").split())
    for words in (
        "Default: the checkpoint's, else sbd, or ntp where a model was never trained for blocks.",
        "Default: the checkpoint's, else entropy:0.1.",
        "Default: the checkpoint's, else 16.",
        "Default: the checkpoint's, else float32 on a CPU and bfloat16 elsewhere, float16 on GPUs",
        "Default: the checkpoint's, else cuda if there is one.",
    ):
        assert words in shown
    assert (answer["dtype"], answer["device"]) in (("float32", "cpu"), ("bfloat16", "cuda:0"))


@pytest.mark.parametrize("as_json", [True, False])
def test_info(run, checkpoint, as_json):
    settings = {"solver": "fixed:2", "trained": True, "acceptance": 0.9}
    folder = checkpoint("qwen3", settings=settings)
    options = ["--dtype", "bfloat16", "--device", "cpu", "--mask-token-id", "8"]
    result = run("info", folder, *options, *["--json"] * as_json)
    facts = {
        "architecture": "Qwen3ForCausalLM", "layers": 2, "context_length": 256,
        "dtype": "bfloat16", "device": "cpu", "mask_token_id": 8,
        "mask_token_source": "given explicitly", "eos_token_ids": [257], "sbd_trained": True,
        "default_mode": "sbd", "default_solver": "fixed:2", "default_block_size": 16,
        "base": None, "adapter": None, "acceptance": 0.9, "acceptance_source": "the checkpoint's",
    }  # fmt: skip
    assert result.err == ""
    if as_json:
        assert {name: result.json[name] for name in facts} == facts
        assert result.json["parameters"] > 10_000
        return
    rows = [line.split(None, 1) for line in result.out.splitlines()]
    shown = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert {name: shown[name] for name in facts if name in shown} == {
        name: {"acceptance": "0.90"}.get(name, str(value))
        for name, value in facts.items()
        if value is not None
    }
    assert "base" not in shown
    assert shown["verified"] == "chosen by arithmetic; setblock tune measures"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
@pytest.mark.parametrize("method", ["lora", "gated"])
def test_info_tells_what_an_adapter_is_on(run, checkpoint, tmp_path, method):
    base, adapter = str(checkpoint("llama")), tmp_path / method
    bare = loading.load(base, mask_token_id=8)
    attach(bare.network, base, method, 8, rank=2, alpha=4).save_pretrained(adapter)
    facts = run("info", adapter, "--mask-token-id", "8", "--json").json
    assert (facts["base"], facts["adapter"]) == (base, method)
    assert facts["acceptance_source"] == "assumed"
    # Its settings say that it was trained, as those of `setblock train` do.
    write_settings(adapter, trained=True, mask_token_id=8)
    told = run("generate", adapter, "--prompt", "hi", "--mode", "sbd", "--json", *SHORT).err
    unfit = f"warning: {adapter} is a gated adapter, made to draft: in mode sbd nothing corrects"
    assert told.startswith(unfit) == (method == "gated")
    assert (
        run("generate", adapter, "--prompt", "hi", "--mode", "verified", "--json", *SHORT).err == ""
    )


def test_info_loses_no_part_of_a_long_name(run, checkpoint, tmp_path):
    folder = tmp_path / ("[long]" * 20)
    folder.symlink_to(checkpoint("llama"))
    result = run("info", folder)
    assert str(folder) in "".join(line[20:].strip() for line in result.out.splitlines())


# demo


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
    monkeypatch.setitem(answering_commands.QUESTIONS, "mine", ["hi", "go"])
    folder = checkpoint("llama", settings={"trained": True, "mode": own})
    monkeypatch.setattr(loading, "place_of", lambda name: folder)
    answer = run("demo", "--model", "mine", "--json").json
    assert [total["mode"] for total in answer["totals"]] == shown
    assert [one["prompt"] for one in answer["answers"]] == ["hi", "hi", "go", "go"]
    assert all(one["correct"] is None for one in answer["answers"])


def test_demo_needs_a_chat_template(run, checkpoint):
    folder = checkpoint("llama", chat=False, settings={"trained": True})
    result = run("demo", "--model", folder, "--prompt", "hi", "--json")
    assert result.error.endswith("has no chat template; only plain prompts work")


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
