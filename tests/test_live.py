"""What the terminal shows: each token in the colour of its forward, dots where none is yet."""

import io
import re

import pytest
import torch
from fakes import LETTERS, TableModel
from rich.console import Console
from rich.text import Text

from setblock import live
from setblock.generation import generate
from setblock.scores import Sample, Score

PROMPT = "abc"
OPTIONS = {
    "ntp": {"mode": "ntp", "max_new_tokens": 12},
    "sbd": {"mode": "sbd", "solver": "fixed:2", "block_size": 6, "max_new_tokens": 12},
}


def terminal() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, force_interactive=True, color_system="standard",
        width=80, record=True, legacy_windows=False, _environ={"TERM": "xterm"},
    )  # fmt: skip


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80, record=True)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def model() -> TableModel:
    """Fluent nonsense that never ends early; where tokens are revealed jumps about."""
    made = TableModel.random(seed=3)
    made.next_token[..., 1:3] = made.noisy[..., 1:3] = -50.0  # neither EOS nor BOS
    return made


def frames(text: str) -> list[str]:
    """What a terminal shows after each redrawing, without colours."""
    shown = re.split(r"\x1b\[[0-9]*A|\x1b\[2K", re.sub(r"\x1b\[[0-9;]*m", "", text))
    shown = [re.sub(r"\x1b\[\??[0-9]*[a-zA-Z]|[\r\n]", "", one) for one in shown]
    return [one for one in shown if one]


# watch


@pytest.mark.parametrize("mode", ["ntp", "sbd"])
@pytest.mark.parametrize("make", [terminal, plain])
@pytest.mark.parametrize("animate", [True, False])
def test_the_answer_and_its_counts_are_shown(model, mode, make, animate):
    console = make()
    generation = live.watch(model, PROMPT, OPTIONS[mode], console, animate)
    (expected,) = generate(model, PROMPT, chat=True, **OPTIONS[mode])
    assert generation.token_ids == expected.token_ids
    assert generation.reveal_step == expected.reveal_step
    shown = console.export_text()
    assert generation.text in shown
    name = {"ntp": "token by token", "sbd": "set block decoding"}[mode]
    forwards = {"ntp": "12 forwards, 1.00 tokens", "sbd": "6 forwards, 2.00 tokens"}[mode]
    assert f"{name}: 12 tokens in {forwards} per forward, " in shown


def test_no_console_shows_nothing(model, capsys):
    generation = live.watch(model, PROMPT, OPTIONS["sbd"], None, animate=True)
    assert generation.num_tokens == 12
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("animate", [True, False])
def test_without_a_terminal_nothing_is_drawn_twice(model, animate):
    console = plain()
    generation = live.watch(model, PROMPT, OPTIONS["sbd"], console, animate)
    assert "\x1b" not in written(console)
    assert written(console).count(generation.text) == 1
    assert "·" not in written(console)


def test_each_forward_is_drawn_with_dots_for_what_is_not_revealed(model):
    console = terminal()
    generation = live.watch(model, PROMPT, OPTIONS["sbd"], console, animate=True)
    expected = []
    for nfe in range(1, generation.nfe + 1):
        shown = [step <= nfe for step in generation.reveal_step]
        letters = zip(generation.text, shown, strict=True)
        expected.append("".join(c if visible else "·" for c, visible in letters).rstrip("·"))
    assert any("·" in frame for frame in expected), "the solver must leave gaps for this test"
    drawn = frames(written(console))
    places = [drawn.index(frame) for frame in expected]
    assert places == sorted(places)


def test_not_animated_draws_the_end_only(model):
    console = terminal()
    generation = live.watch(model, PROMPT, OPTIONS["sbd"], console, animate=False)
    assert "·" not in written(console)
    assert frames(written(console))[0].startswith(generation.text)


def test_drafts_behind_the_end_disappear():
    """A place behind EOS may be revealed before it; the answer drawn last is the generation's."""
    model = TableModel.spelling("hello", start=1 + len(PROMPT), sharpness=5.0)
    model.noisy[14] = 40.0 * (torch.arange(model.vocab_size) == 3 + LETTERS.index("z"))
    options = {"solver": "fixed:1", "block_size": 12, "max_new_tokens": 12}
    console = terminal()
    generation = live.watch(model, PROMPT, options, console, animate=True)
    assert generation.text == "hello"
    drawn = [frame for frame in frames(written(console)) if "tokens in" not in frame]
    assert drawn[0] == "··········z"
    assert drawn[-1] == "hello"


# colours


def colours(text: Text) -> list[str]:
    """The style of each character."""
    found = [""] * len(text)
    for span in text.spans:
        found[span.start : span.end] = [str(span.style)] * (span.end - span.start)
    return found


def test_the_colour_changes_with_the_forward(model):
    (generation,) = generate(model, PROMPT, **OPTIONS["sbd"])
    text = live._answer(model, live._slots(generation))
    assert text.plain == generation.text
    expected = [live.COLORS[(step - 1) % len(live.COLORS)] for step in generation.reveal_step]
    assert colours(text) == expected
    assert len(set(expected)) == generation.nfe == 6


def test_after_the_last_colour_the_first_comes_again(model):
    (generation,) = generate(model, PROMPT, **OPTIONS["ntp"])
    shown = colours(live._answer(model, live._slots(generation)))
    count = len(live.COLORS)
    assert shown[:count] == list(live.COLORS)
    assert shown[count:] == list(live.COLORS[: 12 - count])


def test_the_terminal_gets_these_colours(model):
    console = terminal()
    generation = live.watch(model, PROMPT, OPTIONS["sbd"], console, animate=False)
    assert generation.reveal_step.count(1) == 2
    place = generation.reveal_step.index(1)
    assert f"\x1b[36m{generation.text[place]}" in written(console)  # cyan is the first forward's


def test_places_not_revealed_are_dim_dots():
    model = TableModel.random()
    token = 3 + LETTERS.index("e")
    text = live._answer(model, {0: (token, 1), 2: (token, 2)})
    assert text.plain == "e·e"
    assert colours(text) == [live.COLORS[0], "dim", live.COLORS[1]]
    assert live._answer(model, {}).plain == ""


# totals


def answer(mode: str, tokens: int, nfe: int, correct: bool | None, prompt: str = "a") -> dict:
    return {
        "mode": mode, "num_tokens": tokens, "nfe": nfe, "wall_s": 0.5, "correct": correct,
        "prompt": prompt, "token_ids": list(range(tokens)),
    }  # fmt: skip


def test_totals_are_sums_over_one_mode():
    answers = [
        answer("ntp", 10, 10, True),
        answer("sbd", 12, 3, False),
        answer("ntp", 20, 20, False, "b"),
        answer("sbd", 18, 3, None, "b"),
    ]
    assert live.total(answers, "ntp") == {
        "mode": "ntp", "answers": 2, "correct": 1, "same": None, "num_tokens": 30, "nfe": 30,
        "wall_s": 1.0, "tokens_per_forward": 1.0,
    }  # fmt: skip
    assert live.total(answers, "sbd")["tokens_per_forward"] == 5.0
    assert live.total(answers, "sbd")["correct"] == 0
    assert live.total(answers[3:], "sbd")["correct"] is None
    assert live.total(answers, "sbd")["same"] == 0
    assert live.total([*answers, answer("verified", 20, 9, None, "b")], "verified")["same"] == 1
    assert live.total(answers[3:], "sbd")["same"] is None


def test_the_table_shows_both_modes():
    answers = [answer("ntp", 30, 30, True), answer("sbd", 30, 6, False)]
    console = plain()
    console.print(live.table([live.total(answers, mode) for mode in ("ntp", "sbd")]))
    lines = console.export_text().splitlines()
    (ntp,) = [line for line in lines if "token by token" in line]
    (sbd,) = [line for line in lines if "set block decoding" in line]
    cells = [cell.strip() for cell in ntp.split("│")[2:-1]]
    assert cells == ["1 of 1", "", "30", "30", "1.00", "0.500"]
    cells = [cell.strip() for cell in sbd.split("│")[2:-1]]
    assert cells == ["0 of 1", "1 of 1", "30", "6", "5.00", "0.500"]


def test_the_table_leaves_unchecked_answers_open():
    console = plain()
    console.print(live.table([live.total([answer("ntp", 3, 3, None)], "ntp")]))
    shown = console.export_text()
    assert " of " not in shown
    assert "right" not in shown
    assert "same" not in shown


# progress


def score(*correct: bool | None) -> Score:
    return Score(
        [
            Sample(index, "k", right, "a", (1,), "eos", 1, 1, 0.0, 0.0, 0.0, 0.0)
            for index, right in enumerate(correct)
        ]
    )


def test_progress_on_a_terminal():
    console = terminal()
    with live.progress_bar(console, "[model] ntp lists", 4, live.lines(console)) as advance:
        advance(score(True))
        advance(score(True, False))
    shown = console.export_text()
    assert "[model] ntp lists  50.0% right" in shown
    assert "2/4" in shown


def test_progress_of_what_has_no_right_answer():
    console = terminal()
    with live.progress_bar(console, "ntp prompts", 4, live.lines(console)) as advance:
        advance(score(None, None, None))
    shown = console.export_text()
    assert "ntp prompts" in shown
    assert "3/4" in shown
    assert "right" not in shown


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch):
    clock = iter([0, 29, 31, 31, 60, 62, 62])  # asked at first, at each call, and after a line
    monkeypatch.setattr(live.time, "monotonic", lambda: next(clock))
    console = plain()
    say = live.lines(console)
    with live.progress_bar(console, "model", 4, say) as advance:
        for count in range(1, 3):
            advance(score(*[True] * count))
    with live.progress_bar(console, "model", 4, say) as advance:  # the seconds before it count
        for count in range(3, 5):
            advance(score(*[True] * count))
    assert written(console) == "model  100.0% right, 2 of 4\nmodel  100.0% right, 4 of 4\n"
    assert next(clock, None) is None


def test_a_spinner_elsewhere_is_a_line_now_and_then(monkeypatch):
    console = plain()
    with live.spinner(console, "rounds") as update:
        update("round 1")
        monkeypatch.setattr(live, "EVERY_S", 0)
        update("round [2]")
    assert written(console) == "round [2]\n"
    console = terminal()
    live.lines(console)("round 1")
    assert written(console) == "", "there the spinner tells"
