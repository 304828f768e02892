"""The bundled models: their size, their defaults, and that they still solve their tasks."""

from pathlib import Path

import pytest

import setblock
from setblock import nano

FOLDERS = Path(setblock.__file__).parent / "demo"
NUM_PROBLEMS = 12


@pytest.fixture(scope="module")
def model() -> "setblock.Model":
    return setblock.load("nano")


@pytest.mark.parametrize("name", ["nano", "nano-twin"])
def test_checkpoint_is_small_and_loads(name: str) -> None:
    assert (FOLDERS / name / "model.safetensors").stat().st_size <= 8e6
    loaded = setblock.load(name)
    assert loaded.trained == (name == "nano")
    assert loaded.defaults["mode"] == ("sbd" if name == "nano" else "ntp")


def test_card_is_part_of_the_package() -> None:
    card = (FOLDERS / "CARD.md").read_text()
    for word in ("Data", "Recipe", "Scores", "commit"):
        assert word in card


@pytest.mark.parametrize("family", nano.FAMILIES)
def test_answers_are_worked_and_long_enough(model: "setblock.Model", family: str) -> None:
    lengths = [
        len(model.tokenizer.encode(problem.answer))
        for problem in nano.problems(family, "test", 200)
    ]
    assert 30 <= sum(lengths) / len(lengths) <= 150
    assert min(lengths) >= 25


@pytest.mark.parametrize(("mode", "floor"), [("ntp", 0.85), ("sbd", 0.8)])
def test_model_solves_problems(model: "setblock.Model", mode: str, floor: float) -> None:
    """Floors below the measured scores: a broken mask or cache brings them near zero."""
    problems = [
        problem
        for family in nano.FAMILIES
        for problem in nano.problems(family, "test", NUM_PROBLEMS)
    ]
    answers = setblock.generate(
        model, [problem.prompt for problem in problems], chat=True, mode=mode
    )
    right = sum(nano.check(p, a.text) for p, a in zip(problems, answers, strict=True))
    assert right >= floor * len(problems)
    tokens, nfe = sum(a.num_tokens for a in answers), sum(a.nfe for a in answers)
    assert (tokens == nfe) if mode == "ntp" else (tokens > 4 * nfe)


def test_verified_answers_are_those_of_next_token_decoding(model: "setblock.Model") -> None:
    prompts = [nano.problems(family, "test", 2)[-1].prompt for family in nano.FAMILIES]
    exact = setblock.generate(model, prompts, chat=True, mode="ntp")
    verified = setblock.generate(model, prompts, chat=True, mode="verified")
    assert [one.token_ids for one in verified] == [one.token_ids for one in exact]
    assert sum(one.num_tokens for one in verified) > 3 * sum(one.nfe for one in verified)


def test_small_talk_is_plain_words(model: "setblock.Model") -> None:
    [answer] = setblock.generate(model, "Who are you?", chat=True)
    assert "nano" in answer.text
    assert answer.finish_reason == "eos"
