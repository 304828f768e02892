"""The `setblock` command: what it prints where, what it answers in JSON, how it fails."""

import errno
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes import TableModel

import setblock
from setblock import cli, evaluate, generation, loading, nano, records, roofline
from setblock.cli import common
from setblock.model import Model

SHORT = ["--max-new-tokens", "8"]
KEYS = [
    "text", "token_ids", "num_tokens", "nfe", "prefill_forwards", "tokens_per_forward",
    "reveal_step", "wall_s", "prefill_s", "decode_s", "finish_reason", "mode", "solver",
    "block_size",
]  # fmt: skip


@dataclass
class Result:
    """What one call of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The object on stdout, which must hold nothing else."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        assert self.out.endswith("}\n")
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The message of a call that failed in one line and printed no result."""
        assert self.code != 0
        assert self.out == ""
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        return self.err.removeprefix("error: ").strip()


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch, capsys) -> Run:
    """run("generate", folder, ...): the command's main() with these words, in this process."""

    def call(*words: object, stdin: io.StringIO | None = None) -> Result:
        monkeypatch.setattr(sys, "argv", ["setblock", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", stdin or io.StringIO())
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = error.code
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def untrained(checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture
def trained(checkpoint) -> Path:
    """A checkpoint that says it was trained, so that stderr stays empty of warnings."""
    return checkpoint("llama", settings={"trained": True})


@pytest.fixture
def answering(monkeypatch) -> Callable[[TableModel], TableModel]:
    """answering(model): every name loads this model, which has room for an answer."""

    def use(model: TableModel) -> TableModel:
        model.context_length = 1024
        monkeypatch.setattr(loading, "load", lambda name, **options: model)
        return model

    return use


@pytest.fixture
def short_demo(monkeypatch) -> None:
    """`demo` has no option for it: four tokens are enough of a random model's answers."""
    original = setblock.stream

    def short(*words: Any, **options: Any) -> Any:
        return original(*words, **options | {"max_new_tokens": 4})

    monkeypatch.setattr("setblock.live.stream", short)


def copied(checkpoint: Path, folder: Path, file: str, **changes: Any) -> Path:
    """A copy of a checkpoint with changes in one of its JSON files."""
    shutil.copytree(checkpoint, folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes))
    return folder


def api(folder: Path, prompt: Any, chat: bool = False, **options: Any) -> generation.Generation:
    """What the Python interface answers."""
    return setblock.generate(setblock.load(folder), [prompt], chat=chat, **options)[0]


# generate: prompts


def test_a_prompt_is_the_same_from_every_source(run, trained, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n")
    answers = [
        run("generate", trained, "--prompt", "Grüße\n", "--json", *SHORT),
        run("generate", trained, "--prompt-file", file, "--json", *SHORT),
        run("generate", trained, "--json", *SHORT, stdin=io.StringIO("Grüße\n")),
    ]
    first, *others = [answer.json["token_ids"] for answer in answers]
    assert others == [first, first]
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


def test_an_empty_prompt_is_the_bos_token(run, trained):
    assert run("generate", trained, "--prompt", "", "--json", *SHORT).json["prompt_tokens"] == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_no_prompt(run, trained):
    result = run("generate", trained, stdin=Terminal("never read"))
    assert result.error == "no prompt: give --prompt, --prompt-file, --prompt-ids or stdin"


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
        (
            ["--mode", "verified", "--branches", "3", "--seeds", "2"],
            {"mode": "verified", "branches": 3, "seeds": 2},
        ),
        (
            ["--mode", "verified", "--draft", "solver", "--solver", "fixed:3"],
            {"mode": "verified", "draft": "solver", "solver": "fixed:3"},
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
    with pytest.raises(ValueError, match="no prompt: give --prompt"):
        cli.answering._read_prompt(None, None, None)
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
    assert result.err.endswith(" s (eos)\n")


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
def test_an_untrained_model_warns_once_and_goes_on(run, untrained, command):
    words = {
        "generate": [untrained, "--prompt", "hi", *SHORT],
        "demo": ["--model", untrained, "--prompt", "hi"],
        "evaluate": [untrained, "--task", "lists", "--limit", "1", *SHORT],
    }[command]
    result = run(command, *words, "--json")
    assert isinstance(result.json, dict)
    assert result.err.startswith(f"warning: {untrained} was never trained for set block decoding")
    assert result.err.count("\n") == 1


def test_no_warning_where_it_does_not_matter(run, untrained, trained):
    words = ["--prompt", "hi", "--json", *SHORT]
    assert run("generate", untrained, "--mode", "ntp", *words).err == ""
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
        "--device", "cpu", "--mask-token-id", "9",
    ]  # fmt: skip
    answer = run("generate", *words, *options).json
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("sbd", "prefix:0.5", 4)
    assert (answer["dtype"], answer["mask_token_id"]) == ("float32", 9)


def test_other_defaults_are_those_that_help_states(run, trained):
    answer = run("generate", trained, "--prompt", "hi", "--json", *SHORT).json
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("sbd", "entropy:0.1", 16)
    shown = " ".join(run("generate", "--help").out.replace("│", " ").split())
    for words in (
        "Default: the checkpoint's, else sbd.",
        "Default: the checkpoint's, else entropy:0.1.",
        "Default: the checkpoint's, else 16;",
        "Default: the checkpoint's, else float32 on a CPU and bfloat16 elsewhere.",
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
        "acceptance": 0.9,
    }  # fmt: skip
    assert result.err == ""
    if as_json:
        assert {name: result.json[name] for name in facts} == facts
        assert result.json["parameters"] > 10_000
        return
    rows = [line.split(None, 1) for line in result.out.splitlines()]
    shown = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert {name: shown[name] for name in facts} == {k: str(v) for k, v in facts.items()}


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
    for mode in ("token by token (ntp)", "set block decoding (sbd)"):
        assert mode in result.out


def test_demo_in_json(run, answering):
    answering(TableModel.spelling("some answer", start=3))
    words = ["--prompt", "hi", "--solver", "fixed:4", "--block-size", "4", "--json"]
    answer = run("demo", *words).json
    assert [one["mode"] for one in answer["answers"]] == ["ntp", "sbd"]
    assert [one["nfe"] for one in answer["answers"]] == [12, 3]
    assert [one["mode"] for one in answer["totals"]] == ["ntp", "sbd"]
    assert all(one["correct"] is None for one in answer["answers"] + answer["totals"])


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


def test_demo_of_chosen_modes(run, answering):
    answering(TableModel.spelling("some answer", start=3))
    words = ["--prompt", "hi", "--block-size", "4", "--mode", "verified", "--mode", "ntp"]
    answer = run("demo", *words, "--json").json
    assert [one["mode"] for one in answer["totals"]] == ["verified", "ntp"]
    assert [one["text"] for one in answer["answers"]] == ["some answer"] * 2
    assert run("demo", *words, "--solver", "fixed:4").error.startswith("--solver is for mode sbd")


def test_demo_needs_a_chat_template(run, checkpoint):
    folder = checkpoint("llama", chat=False, settings={"trained": True})
    result = run("demo", "--model", folder, "--prompt", "hi", "--json")
    assert result.error.endswith("has no chat template; only plain prompts work")


# evaluate


def test_evaluate_every_option(run, trained, tmp_path):
    path = tmp_path / "new" / "record.json"
    words = [
        "--task", "lists", "--task", "json", "--split", "validation", "--held-out", "--limit", "2",
        "--batch-size", "2", "--mode", "sbd", "--mode", "ntp", "--solver", "fixed:2", "--solver",
        "fixed:4", "--block-size", "4", "--max-new-tokens", "8", "--mask-token-id", "9", "--dtype",
        "float32", "--device", "cpu", "--out", path,
    ]  # fmt: skip
    result = run("evaluate", trained, *words, "--json")
    record = result.json
    assert record == json.loads(path.read_text())
    assert record["command"].startswith("setblock evaluate ")
    lines = record["results"]
    settings = [("ntp", None), ("sbd", "fixed:2"), ("sbd", "fixed:4")]
    expected = [(*one, task) for one in settings for task in ("lists", "json")]
    assert [(one["mode"], one["solver"], one["task"]) for one in lines] == expected
    for one in lines:
        assert (one["split"], one["held_out"]) == ("validation", True)
        assert (one["n"], one["batch_size"], one["dtype"]) == (2, 2, "float32")
        assert (one["settings"]["block_size"], one["settings"]["max_new_tokens"]) == (4, 8)
    assert {one["tokens_per_forward"] for one in lines if one["mode"] == "ntp"} == {1}
    assert all(one["peak_bytes"] > 1e6 and one["logprob_nats"] < 0 for one in lines)
    compared = [(one["second"]["solver"], one["task"]) for one in record["comparisons"]]
    assert compared == [one[1:] for one in expected[2:]]
    assert {one["first"]["mode"] for one in record["comparisons"]} == {"ntp"}
    samples = path.with_suffix(".samples.jsonl").read_text().splitlines()
    assert [json.loads(one)["run"] for one in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert result.err == ""
    again = run("evaluate", trained, *words)
    assert again.error == f"{path} is there already: go on with --resume, or name another file"
    assert run("evaluate", trained, *words, "--resume", "--json").json == record


def test_evaluate_in_verified_mode(run, trained):
    words = ["--task", "lists", "--limit", "2", "--max-new-tokens", "8", "--json"]
    modes = ["--mode", "ntp", "--mode", "verified", "--mode", "sbd"]
    options = ["--branches", "2", "--seeds", "1", "--next-token-seed", "--fallback", "3"]
    lines = run("evaluate", trained, *words, *modes, *options).json["results"]
    assert [(one["mode"], one["solver"]) for one in lines] == [
        ("ntp", None), ("sbd", "entropy:0.1"), ("verified", None)
    ]  # fmt: skip
    sbd, verified = (one["settings"] for one in lines[1:])
    assert (sbd["next_token_seed"], sbd["fallback"]) == (True, 3)
    assert (verified["branches"], verified["seeds"]) == (2, 1)
    drafted = ["--mode", "verified", "--draft", "solver", "--solver", "fixed:2"]
    [line] = run("evaluate", trained, *words, *drafted).json["results"]
    assert (line["mode"], line["solver"]) == ("verified", "fixed:2")
    assert line["settings"]["draft"] == "solver"


def test_evaluate_a_benchmark_task(run, trained, tmp_path):
    data, examples = tmp_path / "test.jsonl", tmp_path / "train.jsonl"
    row = {"question": "2 + 3?", "answer": "#### 5"}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    examples.write_text(json.dumps(row) + "\n")
    words = ["--task", "gsm8k", "--data", data, "--limit", "2", "--mode", "ntp", *SHORT]
    [line] = run("evaluate", trained, *words, "--json").json["results"]
    assert (line["task"], line["n"], line["chat"], line["shots"]) == ("gsm8k", 2, True, 0)
    few = ["--plain", "--shots", "1", "--shots-data", examples, "--json"]
    [line] = run("evaluate", trained, *words, *few).json["results"]
    assert (line["chat"], line["shots"]) == (False, 1)
    assert line["settings"]["stop"] == ["\nQuestion:", "\n\n\n"]
    for wrong, message in (
        (["--task", "svamp"], "--data is for one --task of gsm8k, svamp"),
        (["--shots", "1"], "--shots and --shots-data need each other; got 1 and None"),
        (["--shots", "2", "--shots-data", examples], f"--shots 2: {examples} has 1 rows"),
        (["--held-out"], "--split and --held-out are for the nano tasks"),
    ):
        assert message in run("evaluate", trained, *words, *wrong).error
    assert "--plain are for benchmark tasks" in run("evaluate", trained, "--plain").error
    assert "--data is for one --task" in run("evaluate", trained, "--data", data).error
    assert "No such file" in run("evaluate", trained, *words[:2], "--data", "none.jsonl").error


def test_evaluate_shows_a_table(run, trained, checkpoint):
    """All five families, by default token by token and by blocks, of both models."""
    other = checkpoint("qwen3", settings={"trained": True})
    words = ["--limit", "1", "--max-new-tokens", "2"]
    result = run("evaluate", trained, other, *words, "--task", "nano")
    rows = [line.split("│") for line in result.out.splitlines() if line.startswith("│")]
    tasks = [row[1].strip() for row in rows if row[1].strip()]
    assert tasks == [*nano.FAMILIES] * (4 + 3)  # the lines, and three of each against the first
    assert result.out.count("McNemar") == 1
    assert result.err == ""


def test_an_interrupt_keeps_the_lines_before_it(run, trained, tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    original = evaluate.run

    def interrupted(model: Any, family: str, *words: Any, **options: Any) -> Any:
        if family == "json":
            raise KeyboardInterrupt
        return original(model, family, *words, **options)

    monkeypatch.setattr(evaluate, "run", interrupted)
    words = ["--task", "lists", "--task", "json", "--limit", "1", "--mode", "ntp", *SHORT]
    result = run("evaluate", trained, *words, "--out", path)
    assert (result.code, result.error) == (130, "interrupted")
    assert [line["task"] for line in json.loads(path.read_text())["results"]] == ["lists"]


def test_a_stopped_evaluation_goes_on(run, trained, tmp_path, monkeypatch):
    """Killed after any answer, it ends with the record of one that was never stopped."""
    words = ["--task", "lists", "--task", "json", "--limit", "3", "--batch-size", "2", *SHORT]
    whole = run("evaluate", trained, *words, "--out", tmp_path / "whole.json", "--json").json
    add, count = records.Journal.add, 0

    def killed(self: records.Journal, number: int, sample: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise KeyboardInterrupt
        add(self, number, sample)

    monkeypatch.setattr(records.Journal, "add", killed)
    path = tmp_path / "stopped.json"
    more: list[str] = []
    while (result := run("evaluate", trained, *words, "--out", path, *more)).code:
        assert result.error == "interrupted"
        more = ["--resume"]
    assert count == 12 + 5
    stopped = json.loads(path.read_text())
    for one, other in zip(whole["results"], stopped["results"], strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"wall_s", "peak_bytes"}:
            close = name in ("entropy_nats", "logprob_nats")  # rows shared other batches
            assert one[name] == (pytest.approx(other[name]) if close else other[name]), name
    other = run("evaluate", trained, *words, "--limit", "2", "--out", path, "--resume")
    assert 'made by another request: {"limit": 3}, now {"limit": 2}' in other.error
    assert "no record to go on with" in run("evaluate", trained, *words, "--resume").error


def test_evaluate_perplexity(run, trained, checkpoint, tmp_path):
    data, plain = tmp_path / "texts.jsonl", tmp_path / "plain.txt"
    data.write_text("".join(json.dumps({"text": f"text {n} " * n}) + "\n" for n in range(1, 5)))
    plain.write_text("one text, and more of it")
    words = ["--task", "perplexity", "--limit", "3", "--out", tmp_path / "record.json"]
    other = checkpoint("qwen3", settings={"trained": True})
    lines = run("evaluate", trained, other, *words, "--data", data, "--json").json["results"]
    assert [line["model"] for line in lines] == [str(trained), str(other)]
    for line in lines:
        assert (line["n"], line["mode"], line["settings"]["window"]) == (3, "ntp", 256)
        assert line["interval"][0] < line["score"] < line["interval"][1]
    assert run("evaluate", trained, other, *words, "--data", data, "--resume").code == 0
    words = words[:2]
    [line] = run("evaluate", trained, *words, "--data", plain, "--window", "9", "--json").json[
        "results"
    ]
    assert (line["n"], line["interval"], line["settings"]["window"]) == (1, None, 9)
    assert (
        f"{line['score']:.3f}"
        in run(*("evaluate", trained, *words, "--data", plain, "--window", "9")).out
    )
    for content, message in (
        ("{", r":1: not JSON"),
        ('{"text": "a"}\n[]', ":2: a row needs a text, named text"),
        ('{"text": ""}', "no text of at least two tokens"),
    ):
        data.write_text(content)
        assert message in run("evaluate", trained, *words, "--data", data).error
    for wrong, message in (
        (["--mode", "ntp"], "--mode: perplexity reads text and decodes none"),
        (["--shots", "1"], "--shots: perplexity reads"),
        (["--data", plain, "--window", "1"], "window must lie in 2..256, got 1"),
        ([], "task perplexity needs its text: --data FILE"),
    ):
        assert message in run("evaluate", trained, *words, *wrong).error
    assert "--window is for --task perp" in run("evaluate", trained, "--window", "4").error


def test_bad_values_are_refused_before_the_first_problem(run, trained, monkeypatch):
    monkeypatch.setattr(evaluate, "run", lambda *words, **options: pytest.fail("ran"))
    result = run("evaluate", trained, "--solver", "fixed:2", "--solver", "entropy:-1")
    assert "got 'entropy:-1'" in result.error


# benchmark


def test_benchmark_every_option(run, trained, tmp_path):
    path = tmp_path / "record.json"
    words = [
        "--limit", "2", "--batch-size", "1", "--batch-size", "2", "--prompt-length", "8",
        "--prompt-length", "20", "--max-new-tokens", "4", "--repeats", "1", "--cached", "16",
        "--solver", "fixed:2", "--block-size", "4", "--mask-token-id", "9", "--dtype", "float32",
        "--device", "cpu",
    ]  # fmt: skip
    record = run("benchmark", trained, *words, "--out", path, "--json").json
    assert record == json.loads(path.read_text())
    cells = [(one["prompt_tokens"], one["batch_size"]) for one in record["results"]]
    assert cells == [(n, b) for n in (8, 20) for b in (1, 2) for _ in range(5 if b == 1 else 4)]
    for line in record["results"]:
        assert line["tokens"] == 2 * 4
        assert line["identical_share"] == 1 or line["contender"] == "sbd"
        assert line["tokens_per_forward"] == {"ntp": 1, "sbd": 2}.get(
            line["contender"], line["tokens_per_forward"]
        )
    assert [(one["batch_size"], one["cached"], one["queries"]) for one in record["forwards"]] == [
        (b, 16, q) for b in (1, 2) for q in (1, 4, 8)
    ]
    assert "is there already" in run("benchmark", trained, *words, "--out", path).error
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    few = ["--task", "gsm8k", "--data", data, "--repeats", "1", "--max-new-tokens", "2"]
    result = run("benchmark", trained, *few)
    assert "transformers-lookup" in result.out
    assert "against one token" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--prompt-length", "-1"], "--prompt-length must be at least 1, got -1"),
        (["--cached", "-1"], "--cached must be at least 0, got -1"),
        (["--task", "gsm8k"], "--task and --data need each other; got gsm8k and None"),
        (["--task", "x", "--data", "y"], "--task must be one of gsm8k, svamp"),
        (["--prompt-length", "400"], "exceeds the model's context of 256 tokens"),
        (["--solver", "best"], "solver must be one of entropy:GAMMA"),
    ],
)
def test_wrong_words_of_benchmark(run, trained, words, message):
    assert message in run("benchmark", trained, *words).error


# Errors: one line on stderr, exit code not 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-ids", "1,x"], "--prompt-ids must be numbers such as 1,2,3, got '1,x'"),
        (["--prompt-ids", ""], "--prompt-ids must be numbers"),
        (["--prompt-ids", "1,99999"], "holds a token id outside 0.."),
        (["--prompt-ids", "-1"], "holds a token id outside 0.."),
        (["--prompt-ids", "1", "--chat"], "token ids are used as they are"),
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids exclude each other"),
        (["--prompt", "a" * 300], "exceeds the model's context of 256 tokens"),
        (["--prompt", "a\udcff"], "surrogates not allowed"),
        (["--prompt-file", "no-such-file"], "No such file or directory: 'no-such-file'"),
        (["--prompt-file", "/"], "Is a directory"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--prompt", "a", "--block-size", "0"], "block_size must be"),
        (["--prompt", "a", "--solver", "best"], "solver must be one of entropy:GAMMA, "),
        (["--prompt", "a", "--solver", "fixed:0"], "n must be an integer of at least 1, got 0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be a finite number >= 0"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be"),
        (["--prompt", "a", "--top-k", "-1"], "top_k must be"),
        (["--prompt", "a", "--seed", "-1"], "seed must"),
        (["--prompt", "a", "--stop", ""], "stop must"),
        (["--prompt", "a", "--mask-token-id", "99999"], "mask token 99999"),
        (["--prompt", "a", "--device", "toaster"], "device 'toaster' can't be used"),
        (["--prompt", "a", "--mode", "fast"], "Invalid value for '--mode'"),
        (["--prompt", "a", "--dtype", "int8"], "Invalid value for '--dtype'"),
        (["--prompt", "a", "--max-new-tokens", "x"], "Invalid value for '--max-new-tokens'"),
        (["--promt", "a"], "No such option: --promt"),
        (
            ["--prompt", "a", "--mode", "ntp", "--solver", "fixed:2"],
            "--solver has no say in mode n",
        ),
        (
            ["--prompt", "a", "--mode", "ntp", "--block-size", "4"],
            "--block-size has no say in mode",
        ),
        (["--prompt", "a", "--fallback", "inf"], "fallback must be a finite entropy of at least 0"),
        (["--prompt", "a", "--mode", "ntp", "--seeds", "1"], "seeds is for mode verified, got 1 i"),
        (["--prompt", "a", "--mode", "sbd", "--draft", "solver"], "draft is for mode verified"),
        (["--prompt", "a", "--mode", "verified", "--draft", "x"], "Invalid value for '--draft'"),
        (["--prompt", "a", "--mode", "verified", "--solver", "fixed:2"], "solver is for draft 's"),
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
        (["--mode", "sbd", "--branches", "2"], "--branches is for mode verified, which --mode l"),
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
        (["learn"], "No such command 'learn'."),
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


# Errors: disk and interrupts


@pytest.mark.usefixtures("short_demo")
@pytest.mark.parametrize("command", ["generate", "demo", "evaluate"])
@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_while_decoding(run, trained, monkeypatch, command, as_json):
    words = {
        "generate": [trained, "--prompt", "hi", *SHORT],
        "demo": ["--model", trained, "--seed", "1"],
        "evaluate": [trained, "--task", "lists", *SHORT],
    }[command]

    def interrupted(self: generation.DecodeState) -> None:
        raise KeyboardInterrupt

    for commands in (cli.answering, cli.measuring):
        monkeypatch.setattr(commands, "warm_up", lambda model, mode: None)
    monkeypatch.setattr(generation.DecodeState, "step", interrupted)
    result = run(command, *words, *["--json"] * as_json)
    assert (result.code, result.err) == (130, "error: interrupted\n")
    assert not as_json or result.out == ""


def full_disk(*words: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(run, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", full_disk)
    words = ["--task", "lists", "--limit", "1", "--json", *SHORT]
    result = run("evaluate", trained, *words, "--out", tmp_path / "record.json")
    assert (result.code, result.error) == (1, "[Errno 28] No space left on device")


@pytest.mark.parametrize("place", ["/proc/record.json", "/dev/null/record.json"])
def test_a_place_that_can_not_be_written(run, trained, place):
    words = ["--task", "lists", "--limit", "1", *SHORT]
    error = run("evaluate", trained, *words, "--out", place).error
    assert error.startswith("[Errno ")
    assert place.rsplit("/", 1)[0] in error


needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


@needs_full_device
@pytest.mark.parametrize("as_json", [True, False])
def test_stdout_on_a_full_disk(run, trained, monkeypatch, as_json):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = run("generate", trained, "--prompt", "hi", *SHORT, *["--json"] * as_json)
        assert (result.code, result.error) == (1, "[Errno 28] No space left on device")
        assert sys.stdout is not full, "the interpreter would try again at exit"
        sys.stdout.close()
        with pytest.raises(OSError, match="No space left"):  # what is still to be written
            full.close()


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
    assert err.startswith("warning: ")
    assert err.count("\n") == 1
    assert tuple(answer["token_ids"]) == api(untrained, "hello", max_new_tokens=8).token_ids


@needs_full_device
def test_no_complaint_of_the_interpreter_about_a_full_disk():
    with open("/dev/full", "w") as full:
        process = setblock_process("--help", stdout=full)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (1, "error: [Errno 28] No space left on device\n")


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


# roofline


def test_roofline_of_the_paper(run):
    answer = run("roofline", "--paper", "--json").json
    assert answer["model"] == "paper"
    assert {cell["kv"] for cell in answer["table3"]} == {2**n for n in range(4, 23)}
    assert {cell["batch"] for cell in answer["table4"]} == {1, 4, 8, 16}
    for table, place, value in (
        ("table3", {"batch": 16, "kv": 16, "block_size": 64}, 3.799),
        ("table4", {"batch": 8, "kv": 16, "block_size": 32, "nfe_speedup": 8}, 6.294),
    ):
        [cell] = [cell for cell in answer[table] if place.items() <= cell.items()]
        assert cell["value"] == pytest.approx(value, abs=1e-3)


def test_roofline_of_another_model_and_machine(run):
    words = ["roofline", "qwen3-8b", "--device", "l4", "--weights", "int4", "--cache", "fp8"]
    words += ["--batch", "2", "--kv", "100", "--block-size", "16", "--nfe-speedup", "3"]
    answer = run(*words, "--json").json
    assert (answer["model"], answer["device"]["name"]) == ("qwen3-8b", "l4")
    assert answer["device"]["bytes_per_weight"] == 0.5
    assert (len(answer["table3"]), len(answer["table4"])) == (1, 1)
    shown = run(*words).out
    assert f"{answer['table4'][0]['value']:.3f}" in shown
    assert "qwen3-8b on l4" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "toaster"], "device must be one of"),
        (["--weights", "fp1"], "weights must be one of"),
        (["--batch", "0"], "--batch must be at least 1, got [0]"),
        (["--kv", "-1"], "--kv must be at least 1, got [-1]"),
        (["nowhere"], "no model 'nowhere'"),
        (["--paper", "--device", "l4"], "--paper has its own model and machine; leave out --dev"),
        (["qwen3-8b", "--paper", "--cache", "fp8"], "leave out MODEL and --cache"),
    ],
)
def test_wrong_words_of_roofline(run, words, message):
    assert message in run("roofline", *words).error


# All options


def test_every_option_is_typed_in_this_file():
    """`train` and `merge` are typed in tests/test_finetune.py."""
    typed = Path(__file__).read_text()
    app: Any = typer.main.get_command(cli.app)
    commands = {"generate", "info", "demo", "evaluate", "roofline", "benchmark", "train", "merge"}
    assert commands == set(app.commands)
    for name, command in app.commands.items():
        if name in ("train", "merge"):
            continue
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                if option.startswith("-"):
                    assert f'"{option}"' in typed, f"no test types {option} of {name}"
