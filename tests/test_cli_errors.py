"""What goes wrong: one line on stderr, exit code not 0, nothing lost; and every option is typed."""

import errno
import gc
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from conftest import SHORT, api, copied
from fakes import TableModel
from safetensors import SafetensorError
from stops import STOPS

from setblock import cli, running

# Errors: one line on stderr, exit code not 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-ids", "1,x"], "--prompt-ids must be numbers such as 1,2,3, got '1,x'"),
        (["--prompt-ids", ""], "--prompt-ids must be numbers"),
        (["--prompt-ids", "1,99999"], "holds a token id outside 0.."),
        (["--prompt-ids", "-1"], "holds a token id outside 0.."),
        (
            ["--prompt-ids", "1", "--chat"],
            "--chat is for texts: --prompt-ids 1 are used as they are",
        ),
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids exclude each other"),
        (["--prompt", "a" * 300], "leaves no room for an answer in the model's context of 256"),
        (["--prompt", "a\udcff"], "the prompt is not UTF-8: byte 0xff behind 1 char"),
        (["--prompt-file", "nowhere"], "--prompt-file nowhere can't be read: No such file or dir"),
        (["--prompt-file", "/"], "Is a directory"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--prompt", "a", "--block-size", "0"], "block_size must be"),
        (["--prompt", "a", "--solver", "best"], "solver must be one of entropy:GAMMA, "),
        (
            ["--prompt", "a", "--solver", "fixed:0"],
            "n must be an integer from 1 to 2147483647, got 0",
        ),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be 0, which is greedy"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "0"], "top_p must be"),
        (["--prompt", "a", "--temperature", "1", "--top-k", "-1"], "top_k must be"),
        (["--prompt", "a", "--temperature", "1", "--seed", "-1"], "seed must"),
        (["--prompt", "a", "--top-p", "0.9"], "--top-p is for sampling: give a --temperature"),
        (["--prompt", "a", "--top-k", "3"], "--top-k is for sampling: give a --temperature"),
        (["--prompt", "a", "--min-p", "0.1"], "--min-p is for sampling: give a --temperature"),
        (["--prompt", "a", "--seed", "3"], "--seed is for sampling: give a --temperature"),
        (
            ["--prompt", "a", "--json-schema", "{}"],
            "{} can't be read: No such file or directory: w",
        ),
        (["--prompt", "a", "--grammar", "none.lark"], "--grammar none.lark can't be read: No such"),
        (["--messages", "none.json"], "--messages none.json can't be read: No such file"),
        (["--prompt", "a", "--stop", ""], "stop must"),
        (["--prompt", "a", "--mask-token-id", "99999"], "mask token 99999"),
        (["--prompt", "a", "--device", "toaster"], "device 'toaster' can't be used"),
        (["--prompt", "a", "--mode", "fast"], "Invalid value for '--mode'"),
        (["--prompt", "a", "--dtype", "int8"], "Invalid value for '--dtype'"),
        (["--prompt", "a", "--max-new-tokens", "x"], "parse string as an integer, got 'x'"),
        (["--prompt", "a", "--temperature", "hot"], "string as a number, got 'hot'"),
        (["--promt", "a"], "No such option: --promt"),
        (["-5 + 3?"], "No such option: -5; what begins with a dash and is no option goes last, a"),
        (
            ["--prompt", "a", "--mode", "ntp", "--solver", "fixed:2"],
            "--solver is for modes sbd and verified, got fixed:2 in mode ntp",
        ),
        (
            ["--prompt", "a", "--mode", "ntp", "--block-size", "4"],
            "--block-size is for modes sbd and verified, got 4 in mode ntp",
        ),
        (
            ["--prompt", "a", "--mode", "ntp", "--no-slide"],
            "--no-slide is for mode sbd, and the mode is ntp",
        ),
        (["--prompt", "a", "--fallback", "inf"], "fallback must be a finite entropy of at least 0"),
        (
            ["--prompt", "a", "--mode", "verified", "--seeds", "100000000"],
            "at most 8192 tokens",
        ),
        (["--prompt", "a", "--mode", "ntp", "--seeds", "1"], "seeds is for mode verified, got 1 i"),
        (["--prompt", "a", "--mode", "sbd", "--lookup", "4"], "lookup is for mode verified, got 4"),
        (
            ["--prompt", "a", "--mode", "verified", "--lookup", "-1"],
            "lookup must be an integer of at least 0, got -1",
        ),
        (
            ["--prompt", "a", "--mode", "verified", "--draft", "solver", "--lookup", "2"],
            "lookup is for draft 'branches', got 2 with draft 'solver'",
        ),
        (
            ["--prompt", "a", "--mode", "verified", "--lookup", "9000"],
            "at most 8192 tokens",
        ),
        (["--prompt", "a", "--mode", "sbd", "--lenience", "0.5"], "lenience is for mode verified"),
        (
            ["--prompt", "a", "--mode", "verified", "--lenience", "0"],
            "lenience must be a number in (0, 1], where 1 is lossless, got 0",
        ),
        (
            ["--prompt", "a", "--mode", "verified", "--block-size", "1", "--lenience", "0.5"],
            "lenience is for a model's own drafts, of which blocks of one token have none, got 0.5",
        ),
        (["--prompt", "a", "--mode", "sbd", "--draft", "solver"], "draft is for mode verified"),
        (["--prompt", "a", "--mode", "verified", "--draft", "x"], "Invalid value for '--draft'"),
        (
            ["--prompt", "a", "--mode", "verified", "--solver", "fixed:2"],
            "solver is for mode 'sbd'",
        ),
    ],
)
def test_wrong_words_of_generate(run, trained, words, message):
    short = [] if "--max-new-tokens" in words else SHORT
    result = run("generate", trained, *words, *short)
    assert message in result.error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "poetry"], "task must be one of nano, arithmetic, word, json, code, lists, g"),
        (["--task", "gsm8k"], "task gsm8k needs its rows: --data FILE"),
        (["--split", "all"], "split must be one of train, validation, test, got 'all'"),
        (["--split", "train", "--held-out"], "never part of the split 'train'"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--mode", "ntp", "--solver", "fixed:2"], "--solver is for mode sbd"),
        (["--mode", "verified", "--solver", "fixed:2"], "verified with --draft solver"),
        (["--mode", "ntp", "--next-token-seed"], "--next-token-seed is for mode sbd"),
        (["--mode", "ntp", "--slide"], "--slide is for mode sbd, and the mode is ntp"),
        (["--mode", "sbd", "--branches", "2"], "--branches is for mode verified, and the mode"),
        (["--mode", "verified", "--branches", "0"], "branches must be an integer of at least 1"),
        (["--limit", "1", "--block-size", "-1"], "block_size must be"),
        (["--limit", "1", "--max-new-tokens", "0"], "max_new_tokens must be"),
    ],
)
def test_wrong_words_of_evaluate(run, trained, words, message):
    assert message in run("evaluate", trained, *words).error


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "[/b]", ":smile:", ""])
@pytest.mark.parametrize("command", ["generate", "info", "evaluate"])
def test_an_unknown_model(run, name, command):
    words = ["--prompt", "hi"] if command == "generate" else []
    words = ["--limit", "1"] if command == "evaluate" else words
    assert repr(name) in run(command, name, *words).error


def test_a_broken_checkpoint(run, trained, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(trained, folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    assert "can't load" in run("info", folder).error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "Missing argument 'MODEL'."),
        (["evaluate"], "Missing argument 'MODEL...'."),
        (["zzz"], "No such command 'zzz'."),
        (["info", "nano", "twin"], "Got unexpected extra argument(s) (twin)"),
    ],
)
def test_usage_errors(run, words, message):
    result = run(*words)
    assert (result.code, result.error) == (2, message)


def test_no_command_shows_the_commands(run):
    result = run()
    assert result.code == 2
    assert "generate" in result.out
    assert result.err == "error: a command is missing\n"


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["generate", "-h"], ["evaluate", "--help"]])
def test_help(run, words):
    result = run(*words)
    assert (result.code, result.err) == (0, "")
    assert "Usage: setblock" in result.out


def test_help_is_as_wide_as_the_terminal(run, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 70)
    shown = run("tune", "--help").out
    lines = [line.strip() for line in shown.partition("Arguments")[0].splitlines()]
    paragraph = lines[
        lines.index("Verified decoding needs no proof: its text is that of token by") :
    ]
    assert all(len(line) > 50 for line in paragraph[: paragraph.index("") - 1])


def test_help_has_its_options_in_parts(run):
    shown = run("generate", "--help").out
    parts = ["Options", "Decoding", "Decoding in mode sbd", "Decoding in mode verified", "Sampling"]
    options = ["--chat", "--solver", "--fallback", "--branches", "--temperature"]
    for part, option in zip(parts, options, strict=True):
        begin = shown.index(f"─ {part} ─")
        assert option in shown[begin : shown.index("╰", begin)]


# Errors: disk and interrupts


@pytest.mark.usefixtures("short_demo")
@pytest.mark.parametrize("command", ["generate", "demo", "evaluate"])
@pytest.mark.parametrize("as_json", [True, False])
@STOPS
def test_a_signal_while_decoding(run, trained, monkeypatch, command, as_json, number, how):
    again = number == signal.SIGTERM
    words = {
        "generate": [trained, "--prompt", "hi", *SHORT],
        "demo": ["--model", trained, "--seed", "1"],
        "evaluate": [trained, "--task", "lists", *SHORT],
    }[command]

    def interrupted(self: running.DecodeState) -> None:
        try:
            signal.raise_signal(number)
        finally:
            if again:  # as launchers do
                signal.raise_signal(number)

    before = signal.getsignal(number)

    for commands in (cli.answering, cli.showing, cli.measuring):
        monkeypatch.setattr(commands, "warm_up", lambda model, mode: None)
    monkeypatch.setattr(running.DecodeState, "step", interrupted)
    result = run(command, *words, *["--json"] * as_json)
    lost = ": nothing is kept without --out FILE" if command == "evaluate" else ""
    assert (result.code, result.err) == (128 + number, f"error: {how}{lost}\n")
    assert signal.getsignal(number) == before
    assert not as_json or result.out == ""


def full_disk(*words: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(run, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", full_disk)
    words = ["--task", "lists", "--limit", "1", "--json", *SHORT]
    file = tmp_path / "record.json"
    result = run("evaluate", trained, *words, "--out", file)
    assert (result.code, result.error) == (1, f"No space left on device: '{file}'")


def test_a_disk_too_full_for_weights(run, trained, tmp_path, monkeypatch):
    def full(*words: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    result = run("export", trained, tmp_path / "out")
    assert result.code == 1
    assert result.error.startswith("weights can't be read or written: I/O error: No space left")


def test_a_file_where_a_folder_is_to_be(run, trained, tmp_path):
    (tmp_path / "here").write_text("")
    words = ["--task", "lists", "--limit", "1", *SHORT]
    error = run("evaluate", trained, *words, "--out", tmp_path / "here" / "record.json").error
    assert error == f"'{tmp_path}/here' is a file, not a folder"


@pytest.mark.parametrize("place", ["/proc/record.json", "/dev/null/record.json"])
def test_a_place_that_can_not_be_written(run, trained, place):
    words = ["--task", "lists", "--limit", "1", *SHORT]
    error = run("evaluate", trained, *words, "--out", place).error
    assert place.rsplit("/", 1)[0] in error


needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


@needs_full_device
@pytest.mark.parametrize("as_json", [True, False])
def test_stdout_on_a_full_disk(run, trained, monkeypatch, as_json):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = run("generate", trained, "--prompt", "hi", *SHORT, *["--json"] * as_json)
        assert (result.code, result.error) == (1, "No space left on device")
        assert sys.stdout is not full, "the interpreter would try again at exit"
        sys.stdout.close()
        with pytest.raises(OSError, match="No space left"):  # what is still to be written
            full.close()


def test_what_an_encoding_lacks_is_told_as_escapes(run, answering, monkeypatch):
    model = answering(TableModel.spelling("ab", len("<h")))
    monkeypatch.setattr(model, "decode", lambda ids: "é" * sum(token > 2 for token in ids))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run("generate", "table", "--prompt", "h", *SHORT).code == 0
    sys.stdout.flush()
    assert raw.getvalue().startswith(rb"\xe9\xe9" + b"\n")


# In a process of its own


def setblock_process(*words: object, **options: Any) -> subprocess.Popen:
    program = [str(Path(sys.executable).with_name("setblock")), *map(str, words)]
    return subprocess.Popen(program, text=True, stderr=subprocess.PIPE, **options)


def test_stdout_holds_one_json_object_and_nothing_else(untrained):
    process = setblock_process(
        "generate", untrained, "--json", *SHORT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, err = process.communicate("hello", timeout=300)
    assert process.returncode == 0
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert err.startswith(f"{untrained} was never trained for set block decoding: token by token")
    assert err.count("\n") == 1
    assert tuple(answer["token_ids"]) == api(untrained, "hello", max_new_tokens=8).token_ids


@needs_full_device
def test_no_complaint_of_the_interpreter_about_a_full_disk():
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = setblock_process("--help", stdout=full)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (1, "error: No space left on device\n")


def test_the_hub_s_tries_are_not_told():
    """Its library sets its own level when it is imported."""
    program = (
        "from setblock.cli.common import starting; starting('nano')\n"
        "from huggingface_hub.utils import logging; print(logging.get_verbosity())"
    )
    for given, level in (({}, logging.ERROR), ({"HF_HUB_VERBOSITY": "info"}, logging.INFO)):
        own = {name: value for name, value in os.environ.items() if name != "HF_HUB_VERBOSITY"}
        told = subprocess.run(
            [sys.executable, "-c", program], env=own | given, capture_output=True, text=True
        )
        assert told.stdout == f"{level}\n", told.stderr


def test_ctrl_c_in_the_middle_of_an_answer(checkpoint, tmp_path):
    """The context is so long that only the signal can end it in time."""
    folder = tmp_path / "long"
    copied(checkpoint("llama"), folder, "config.json", max_position_embeddings=200_000)
    words = ["--prompt", "hi", "--mode", "ntp", "--ignore-eos", "--max-new-tokens", "100000"]
    process = setblock_process(
        "generate",
        folder,
        *words,
        "--show-steps",
        stdout=subprocess.PIPE,
        # A shell starts its background jobs with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forward 1: ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err == "error: interrupted\n"
    assert all(line.startswith("forward ") for line in out.splitlines()[:-1])


@pytest.mark.parametrize("loaded", [False, True])
def test_what_is_left_at_the_end_is_searched_for_tritons_sake_alone(monkeypatch, loaded):
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", ModuleType("libtriton"))
    cli._leave_at_once()
    assert frozen == [True] * (not loaded)


# All options


def test_version(run):
    assert run("--version").out.strip() == version("setblock")


def test_a_folder_is_no_record(run, trained, tmp_path):
    error = run("evaluate", trained, "--limit", "1", "--out", tmp_path).error
    assert error == f"{tmp_path} is a folder: name a file"


# Which test files type the options of a command.
FILES = {
    "generate": "test_cli_prompts.py test_cli_generate.py test_cli_stream.py test_cli_info.py "
    "test_grammar_asked.py test_logprobs.py",
    "chat": "test_cli_chat.py",
    "info": "test_cli_info.py",
    "demo": "test_cli_demo.py",
    "evaluate": "test_cli_evaluate.py test_cli_profile.py",
    "benchmark": "test_cli_benchmark.py test_cli_profile.py",
    "profile": "test_cli_profile.py",
    "train": "test_cli_training.py test_answers.py test_finetune.py test_stopped_runs.py",
    "merge": "test_finetune.py",
    "prompts": "test_prompts.py",
    "roofline": "test_cli_planning.py",
    "plan": "test_plan.py",
    "tune": "test_cli_tune.py",
    "speedup": "test_speedup.py",
    "report": "test_report.py",
    "export": "test_export.py",
    "serve": "test_serve.py test_serve_command.py",
}


def test_every_option_is_typed():
    app: Any = typer.main.get_command(cli.app)
    assert FILES.keys() == app.commands.keys()
    assert [option for one in app.params for option in one.opts] == ["--version", "--import"]
    for name, command in app.commands.items():
        folder, names = Path(__file__).parent, FILES[name].split()
        typed = "".join((folder / one).read_text() for one in names)
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                if option.startswith("-"):
                    assert f'"{option}"' in typed, f"{FILES[name]}: no {option} of {name}"


def test_flags_are_shown_without_a_value(run):
    for command in (["generate"], ["serve"], ["train"], []):
        told = run(*command, "--help").out
        assert "--help" in told
        assert "<bool>" not in told
