"""Prompts that a chat model makes up: whole users' turns, each once, the same from a seed."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import EOS, TableModel

from setblock import prompts
from setblock.loading import load
from setblock.prompts import sample_prompts


class Speaker:
    """The tokenizer of a TableModel; a user's turn begins with "b" and ends with `after`."""

    def __init__(self, template: str, after: str = "<eos>") -> None:
        self.chat_template, self.after = template, after

    def apply_chat_template(self, turns: Any, **options: Any) -> str:
        return self.chat_template.format(user=turns[0]["content"], after=self.after)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        names = text.replace("<eos>", "\1")
        return [EOS if letter == "\1" else 3 + ord(letter) - ord("a") for letter in names]


def speaking(text: str, template: str = "b{user}{after}", after: str = "<eos>") -> TableModel:
    model = TableModel.spelling(text, start=1)
    model.tokenizer = Speaker(template, after)  # type: ignore[assignment]
    return model


def rambling() -> TableModel:
    """A model that says anything, and ends at any time."""
    model = speaking("")
    random = TableModel.random(vocab_size=model.vocab_size, context_length=model.context_length)
    model.next_token, model.noisy = random.next_token / 4, random.noisy
    return model


def test_turns_are_whole_new_and_the_same_in_any_batch() -> None:
    model = rambling()
    few = list(sample_prompts(model, 9, max_tokens=24, batch_size=4, seed=1))
    assert len(set(few)) == len(few) == 9
    assert all(text == text.strip() != "" for text in few)
    assert few == list(sample_prompts(model, 12, max_tokens=24, batch_size=48, seed=1))[:9]
    for other in ({"seed": 2}, {"temperature": 0.5}, {"top_p": 0.3}):
        options: Any = {"max_tokens": 24, "batch_size": 4, "seed": 1, **other}
        assert few != list(sample_prompts(model, 9, **options))
    assert max(map(len, sample_prompts(model, 4, max_tokens=14))) < 14


def test_the_model_goes_on_from_where_the_user_begins_to_speak(monkeypatch) -> None:
    asked: list[Any] = []
    stream = prompts.stream

    def noted(model: Any, ids: Any, **options: Any) -> Any:
        asked.append((ids[0], options["stop"]))
        return stream(model, ids, **options)

    monkeypatch.setattr(prompts, "stream", noted)
    assert list(sample_prompts(speaking("hello"), 1)) == ["hello"]
    # words that end a turn instead of a special token
    assert list(sample_prompts(speaking("helloxyz", after="xyz"), 1)) == ["hello"]
    assert asked == [([4], ()), ([4], ("xyz",))]


def test_too_few_whole_and_new_ones() -> None:
    with pytest.raises(ValueError, match=r"^only 1 of 8 sampled prompts were whole and new within"):
        list(sample_prompts(speaking("hello"), 2))
    with pytest.raises(ValueError, match=r"^only 0 of 4 sampled prompts .* max_tokens=2: raise"):
        list(sample_prompts(speaking("hello"), 1, max_tokens=2))
    with pytest.raises(ValueError, match=r"^only 0 of 4 sampled"):
        list(sample_prompts(speaking(""), 1))
    for name in ("count", "max_tokens"):
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
            next(sample_prompts(speaking("hello"), **{"count": 1, name: 0}))  # pyright: ignore[reportArgumentType]


def test_templates_that_say_something_else(checkpoint) -> None:
    plain = load(checkpoint("llama", chat=False), device="cpu")
    with pytest.raises(ValueError, match="has no chat template: it can't make up a user's turn"):
        next(sample_prompts(plain, 1))
    for template in ("b", "b{user}{user}"):
        with pytest.raises(ValueError, match="does not hold what the user says once, as it is"):
            next(sample_prompts(speaking("hello", template), 1))


def prompts_in(file: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in file.read_text().split("\n") if line]


def test_the_command(run, answering, tmp_path) -> None:
    out = tmp_path / "prompts.jsonl"
    model = answering(rambling())
    words = ["--max-tokens", "24", "--batch-size", "8", "--seed", "1", "--dtype", "float32"]
    words += ["--device", "cpu", "--temperature", "1", "--top-p", "0.95", "--out", out]
    told = run("prompts", "any", *words, "--count", "4", "--json").json
    assert told == {"model": "any", "out": str(out), "prompts": 4, "seed": 1}
    assert prompts_in(out) == list(sample_prompts(model, 4, 24, 8, seed=1))
    # one that is there is gone on with, and left alone where it holds enough
    assert run("prompts", "any", *words, "--count", "3").out == f"4 prompts in {out}\n"
    assert run("prompts", "any", *words, "--count", "6").out == f"6 prompts in {out}\n"
    assert len(set(prompts_in(out))) == 6
    missing = [*words[:-1], tmp_path / "no" / "p.jsonl"]
    assert run("prompts", "any", *missing).error == f"no folder '{tmp_path / 'no'}' for --out"


def test_it_goes_on_where_it_was_stopped(run, answering, tmp_path, monkeypatch) -> None:
    sample = prompts.sample_prompts

    def stopped(*words: Any, **options: Any) -> Any:
        yield "one\u2028two"
        raise KeyboardInterrupt

    model = answering(rambling())
    out = tmp_path / "prompts.jsonl"
    words = ("prompts", "any", "--out", out, "--count", "4", "--max-tokens", "24")
    monkeypatch.setattr(prompts, "sample_prompts", stopped)
    result = run(*words)
    assert result.code == 130
    said = " ".join(result.err.split())
    assert f"interrupted: 1 of 4 prompts are in {out}; the same command goes on" in said
    out.write_text(out.read_text() + '{"prompt": "thr')  # killed while it wrote
    told: list[Any] = []

    def noted(*words: Any, **options: Any) -> Any:
        told.append(options)
        return sample(*words, **options)

    monkeypatch.setattr(prompts, "sample_prompts", noted)
    assert run(*words).code == 0
    assert prompts_in(out)[0] == "one\u2028two"
    assert len(prompts_in(out)) == 4
    [options] = told
    assert options["known"] == ["one\u2028two"]
    seed = options["seed"]
    assert prompts_in(out)[1:] == list(sample(model, 3, 24, seed=seed))
    assert seed != 0, "else what is known would be sampled again"
    known = prompts_in(out)[1]
    assert known not in list(sample(model, 3, 24, seed=seed, known=[known]))
    out.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert 'prompts.jsonl:2: not {"prompt": ...}, as this' in run(*words).error
