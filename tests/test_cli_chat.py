"""`setblock chat`: the answers of a conversation, one line after the other."""

import builtins
import io
import signal
from typing import Any

import pytest
from conftest import copied
from fakes import TableModel

from setblock import prompt_cache
from setblock.generation import generate
from setblock.loading import load

FEW = ("--max-new-tokens", "12")
LINES = "ab\n\n  cd e \n/new\nf\n/exit\nnever\n"


def answers(model, system: str | None = None, **options: Any) -> list[str]:
    """What the model says to the lines, a conversation each."""
    told, found = [{"role": "system", "content": system}] if system else [], []
    for messages in (["ab", "cd e"], ["f"]):
        turns = list(told)
        for text in messages:
            turns.append({"role": "user", "content": text})
            found.append(generate(model, turns, **options)[0].text)
            turns.append({"role": "assistant", "content": found[-1]})
    return found


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--mode", "ntp"], {"mode": "ntp"}),
        (
            ["--mode", "sbd", "--solver", "fixed:2", "--block-size", "4", "--slide"],
            {"mode": "sbd", "solver": "fixed:2", "block_size": 4, "slide": True},
        ),
        (
            ["--mode", "verified", "--lookup", "4", "--lenience", "0.5"],
            {"mode": "verified", "lookup": 4, "lenience": 0.5},
        ),
        (
            [
                "--temperature",
                "1.5",
                "--top-p",
                "0.9",
                "--top-k",
                "9",
                "--min-p",
                "0.1",
                "--seed",
                "3",
            ],
            {"temperature": 1.5, "top_p": 0.9, "top_k": 9, "min_p": 0.1, "seed": 3},
        ),
        (
            [
                *("--repetition-penalty", "1.3", "--presence-penalty", "0.5"),
                *("--frequency-penalty", "0.2"),
            ],
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_answers_are_those_of_generate(run, trained, words, options):
    shown = run("chat", trained, *FEW, *words, "--no-slide" if not words else "--dtype", *(
        [] if not words else ["float32"]
    ), stdin=io.StringIO(LINES))  # fmt: skip
    assert shown.code == 0
    options |= {} if words else {"slide": False}
    assert shown.out == "".join(
        f"{text}\n" for text in answers(load(trained), **options, max_new_tokens=12)
    )
    told = shown.err.splitlines()
    assert told[2] == "a new conversation"
    assert all("per forward; first after" in line for line in (*told[:2], *told[3:]))


def test_a_system_message_comes_first(run, trained):
    machine = ["--device", "cpu", "--pack", "off", "--compile", "off", "--mask-token-id", "7"]
    shown = run("chat", trained, *FEW, "--system", "be", *machine, stdin=io.StringIO(LINES))
    model = load(trained, mask_token_id=7)
    expected = answers(model, "be", max_new_tokens=12)
    assert expected != answers(model, max_new_tokens=12)
    assert shown.out == "".join(f"{text}\n" for text in expected)


def test_what_was_encoded_is_not_again(run, trained, monkeypatch):
    filled = []
    fill = prompt_cache.PromptCache.fill

    def seen(self, state):
        fill(self, state)
        filled.extend(state.cache.restored.tolist())

    monkeypatch.setattr(prompt_cache.PromptCache, "fill", seen)
    run("chat", trained, *FEW, "--mode", "ntp", stdin=io.StringIO(LINES))
    assert filled == [0, len("<ab>"), len("<")]  # a token each; this template's answers begin anew


def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_context(run, trained, monkeypatch):
    model = load(trained)
    shown = run("chat", trained, "--mode", "ntp", stdin=io.StringIO("ab\n"))
    room = model.context_length - len("<ab><")
    assert f"{room} tokens in {room} forwards" in shown.err
    assert shown.err.endswith(", cut off at the limit\n")
    turn = [{"role": "user", "content": "ab"}]
    assert shown.out == f"{generate(model, turn, mode='ntp', max_new_tokens=room)[0].text}\n"


def test_a_message_that_does_not_fit_is_left_out(run, trained):
    long = "x" * 300
    shown = run("chat", trained, *FEW, stdin=io.StringIO(f"{long}\nab\n"))
    assert shown.code == 0
    assert "error: prompt 0 has" in shown.err
    assert "/new begins a new conversation" in shown.err
    assert shown.out == f"{answers(load(trained), max_new_tokens=12)[0]}\n"


def test_a_terminal_asks(run, trained, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["ab", "", "/new", "f"])

    def typed(cue: str) -> str:
        assert cue == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", typed)
    shown = run("chat", trained, *FEW, stdin=Terminal())
    first, _, other = answers(load(trained), max_new_tokens=12)
    assert (shown.code, shown.out) == (0, f"{first}\n{other}\n\n")
    assert shown.err.startswith("Ctrl-C ends an answer, Ctrl-D this; /new begins anew\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_line_that_is_typed_and_sigterm_all(run, trained, monkeypatch, number):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter([number, "ab", number, "/exit"])

    def typed(cue: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        signal.raise_signal(line)
        raise AssertionError("it goes on")

    monkeypatch.setattr(builtins, "input", typed)
    shown = run("chat", trained, *FEW, stdin=Terminal())
    if number == signal.SIGTERM:
        assert (shown.code, shown.out) == (143, "")
        return
    assert shown.code == 0
    assert shown.out == f"{answers(load(trained), max_new_tokens=12)[0]}\n"
    assert shown.err.count("\nCtrl-D or /exit ends this\n") == 2


def test_a_command_that_there_is_not_is_no_message(run, trained):
    shown = run("chat", trained, *FEW, stdin=io.StringIO("/quit\n/help\nab\n/\n"))
    assert shown.out == f"{answers(load(trained), max_new_tokens=12)[0]}\n"
    assert shown.err.startswith("no command /quit; there are /new, /help and /exit\n")
    assert "/new begins another conversation, /exit or Ctrl-D ends this" in shown.err
    assert shown.err.endswith("no command /; there are /new, /help and /exit\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_an_answer_and_sigterm_all(run, trained, monkeypatch, number):
    """What was said so far stays part of the conversation."""
    from setblock import generation

    asked, said, stream = [], "", generation.stream

    def interrupted(model, prompts, **options):
        nonlocal said
        asked.append(model.decode(prompts[0]))
        for count, reveal in enumerate(stream(model, prompts, **options)):
            if len(asked) == 1 and count == 3:
                signal.raise_signal(number)
            said += reveal.text if len(asked) == 1 else ""
            yield reveal

    monkeypatch.setattr(generation, "stream", interrupted)
    words = (*FEW, "--mode", "ntp", "--dtype", "float32")
    shown = run("chat", trained, *words, stdin=io.StringIO("ab\ncd\n"))
    assert said
    if number == signal.SIGTERM:
        assert (shown.code, len(asked)) == (143, 1)
        assert shown.err.endswith("error: stopped by SIGTERM\n")
        return
    assert shown.code == 0
    assert shown.err.startswith("stopped\n")
    assert shown.out.startswith(f"{said}\n")
    assert asked[1] == f"ab{said}cd"


def test_an_empty_answer_is_told(run, answering):
    model: Any = answering(TableModel.spelling("", 2))
    model.in_template = lambda turns: ""
    model.encode = lambda prompt, chat=False: [5, 6]
    shown = run("chat", "table", *FEW, stdin=io.StringIO("ab\n"))
    assert shown.out == "\n"
    assert shown.err.endswith(": nothing, so that the message is left out\n")


def test_what_is_wrong_is_told_before_the_first_message(run, checkpoint, trained, tmp_path):
    plain = checkpoint("llama", settings={"trained": True}, chat=False)
    assert run("chat", plain).error.startswith(
        f"{plain} has no chat template; only plain prompts work"
    )
    assert "evaluate, tune, speedup: --plain" in run("evaluate", plain, "--limit", "1").error
    assert run("chat", trained, "--max-new-tokens", "0").error == (
        "--max-new-tokens must be at least 1, got 0"
    )
    error = run("chat", trained, "--top-k", "4").error
    assert error == "--top-k is for sampling: give a --temperature above 0"
    error = run("chat", trained, "--mode", "ntp", "--block-size", "4").error
    assert error == "--block-size is for modes sbd and verified, got 4 in mode ntp"
    strict = copied(
        trained, tmp_path / "strict", "tokenizer_config.json",
        chat_template="{% if messages[1:] %}{{ raise_exception('none') }}{% endif %}",
    )  # fmt: skip
    (strict / "chat_template.jinja").unlink(missing_ok=True)
    assert "refuses the messages: none" in run("chat", strict, "--system", "be").error
