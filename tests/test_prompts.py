"""Prompts that a chat model makes up: whole users' turns, each once, the same from a seed."""

import itertools
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from fakes import EOS, TableModel
from stops import STOPS

from setblock import prompts
from setblock.loading import load
from setblock.names import ModelError
from setblock.pieces import TextPieces
from setblock.prompts import Sampling, sample_prompts


class Speaker:
    """The tokenizer of a TableModel; a user's turn begins with "b" and ends with `after`."""

    added_tokens_decoder: ClassVar = {EOS: "<eos>"}

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


def texts(model: Any, count: int, batch_size: int = 16, **sampling: Any) -> list[str]:
    found = sample_prompts(model, count, Sampling(**sampling), batch_size)
    return [text for _, text in found]


def test_turns_are_whole_new_and_the_same_in_any_batch(monkeypatch) -> None:
    monkeypatch.setattr(prompts, "CHUNK", 10)
    model = rambling()
    few = texts(model, 9, batch_size=4, max_tokens=24, seed=1)
    assert len(set(few)) == len(few) == 9
    assert all(text == text.strip() != "" for text in few)
    many = texts(model, 30, batch_size=48, max_tokens=24, seed=1)
    assert few == many[:9]
    assert len(set(many)) == 30, "of several chunks, whose noise differs"
    for other in ({"seed": 2}, {"temperature": 0.5}, {"top_p": 0.3}):
        options: Any = {"max_tokens": 24, "seed": 1, **other}
        assert few != texts(model, 9, **options)
    assert max(map(len, texts(model, 4, max_tokens=14))) < 14


def test_the_model_goes_on_from_where_the_user_begins_to_speak(monkeypatch) -> None:
    asked: list[Any] = []
    finished = prompts.finished

    def noted(model: Any, ids: Any, **options: Any) -> Any:
        assert set(map(tuple, ids)) == {tuple(ids[0])}
        asked.append((ids[0], options["stop"]))
        return finished(model, ids, **options)

    monkeypatch.setattr(prompts, "finished", noted)
    assert texts(speaking("hello"), 1) == ["hello"]
    # words that end a turn instead of a special token
    assert texts(speaking("helloxyz", after="xyz"), 1) == ["hello"]
    assert asked == [([4], ()), ([4], ("xyz",))]


def test_too_few_whole_and_new_ones(monkeypatch) -> None:
    monkeypatch.setattr(prompts, "FEWEST", 8)
    with pytest.raises(ValueError, match=r"^only 1 of 3 prompts were found: of 12 samples 11 were"):
        texts(speaking("hello"), 3)
    with pytest.raises(ValueError, match=r"8 were too long\. Ask .* max_tokens=2 where"):
        texts(speaking("hello"), 1, max_tokens=2)
    with pytest.raises(ValueError, match="of 8 samples 8 were empty or no text"):
        texts(speaking(""), 1)
    halves = speaking("hello")
    monkeypatch.setattr(halves, "decode", lambda ids: "h\ufffd" * len(ids))
    with pytest.raises(ValueError, match="of 8 samples 8 were empty or no text"):
        texts(halves, 1)
    model, one = speaking("hello"), Sampling()
    wrong: Any = (
        ((model, 0, one), "count must be at least 1, got 0"),
        ((model, 1, Sampling(max_tokens=0)), "max_tokens must be at least 1, got 0"),
        ((model, 1, one, 0), "batch_size must be at least 1, got 0"),
        ((model, 1, Sampling(top_p=2.0)), "top_p must"),
        ((model, 1, Sampling(temperature=-1.0)), "temperature must"),
        ((model, 1, Sampling(seed=-1)), "seed must"),
    )
    for words, message in wrong:
        with pytest.raises(ValueError, match=message):
            next(sample_prompts(*words))


# What chat templates put around a user's turn, in the forms of known families; what is sampled
# behind it, and what the turn was.
TURNS = {
    "llama 3": ("<a>user<b>\n\n", "<c><a>assistant<b>\n\n", "Hi?<c>", "Hi?"),
    "chatml": ("<a>user\n", "<b>\n<a>assistant\n", "Be an assistant?<b>", "Be an assistant?"),
    "chatml, the end on a line": ("<a>user\n", "\n<b>\n<a>assistant\n", "Hi?\n<b>\n<a>", "Hi?"),
    "mistral": ("<a> ", " <b>", "Hi, my friend? <b> Hello", "Hi, my friend?"),
    "mistral 3": ("<a>", "<b>", "Hi?<b> Hello", "Hi?"),
    "exaone": ("[|user|]", "\n<b>", "What is 2 + 2?\n<b>It is 4.", "What is 2 + 2?"),
    "deepseek": ("<a>", "<n>think", "Hi?<n>Hello, I am", "Hi?"),  # <n>: added, but not special
    "olmo": ("|user|\n", "\n|assistant|\n", "Hi?\n|assistant|\nHello", "Hi?"),
    "vicuna": ("USER: ", " ASSISTANT:", "Hi? ASSISTANT: Hello", "Hi?"),
}


@pytest.mark.parametrize("family", TURNS)
def test_where_turns_begin_and_end(checkpoint, monkeypatch, family) -> None:
    before, after, said, turn = TURNS[family]
    model = load(checkpoint("llama"), device="cpu")
    tokenizer = model.tokenizer
    tokenizer.add_special_tokens({"extra_special_tokens": ["<a>", "<b>", "<c>"]})
    tokenizer.add_tokens(["<n>"], special_tokens=False)
    model.special_tokens = tuple(tokenizer.all_special_tokens)
    tokenizer.chat_template = f"{before}{{{{ messages[0]['content'] }}}}{after}"
    begun: list[Any] = []

    def answered(model: Any, ids: Any, stop: Any, **options: Any) -> Any:
        begun.append(ids[0])
        given = tokenizer.encode(said, add_special_tokens=False)
        pieces = TextPieces(model, stop)
        for count in range(1, len(given) + 1):
            _, _, stopped = pieces.extend(given[:count], count == len(given))
            if stopped:
                break
        words = {"token_ids": given[:count], "text": pieces.text}
        reason = "stop" if stopped else "length"
        yield 0, SimpleNamespace(**words, finish_reason=reason)

    monkeypatch.setattr(prompts, "finished", answered)
    assert [text for _, text in sample_prompts(model, 1)] == [turn]
    assert begun == [tokenizer.encode(before.rstrip(" "), add_special_tokens=False)]


def test_templates_that_say_something_else(checkpoint) -> None:
    plain = load(checkpoint("llama", chat=False), device="cpu")
    with pytest.raises(ModelError, match="has no chat template: it can't make up a user's turn"):
        next(sample_prompts(plain, 1))
    for template in ("b", "b{user}{user}"):
        with pytest.raises(ModelError, match="does not hold what the user says once, as it is"):
            next(sample_prompts(speaking("hello", template), 1))
    with pytest.raises(ModelError, match="puts nothing behind what a user says, so that no turn"):
        next(sample_prompts(speaking("hello", "b{user}"), 1))
    for template, why in (
        ("{{ raise_exception('a system\n message first') }}", "a system message first"),
        ("{% for m in %}", "Expected an expression"),
        ("{{ messages[1]['content'] }}", "has no element 1"),
    ):
        plain.tokenizer.chat_template = template
        with pytest.raises(ModelError, match=f"refuses the messages: .*{why}"):
            next(sample_prompts(plain, 1))


def prompts_in(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["prompt"] for line in lines if line]


def test_the_command(run, answering, tmp_path) -> None:
    out = tmp_path / "prompts.jsonl"
    model = answering(rambling())
    words = ["--max-tokens", "24", "--batch-size", "8", "--seed", "1", "--dtype", "float32"]
    words += ["--device", "cpu", "--temperature", "1", "--top-p", "0.95", "--out", out]
    told = run("prompts", "any", *words, "--count", "4", "--json").json
    assert told == {"model": "any", "out": str(out), "prompts": 4, "seed": 1}
    expected = texts(model, 6, 8, max_tokens=24, seed=1)
    assert prompts_in(out) == expected[:4]
    # one that is there is gone on with, and left alone where it holds enough
    before = out.read_text()
    assert (
        run("prompts", "any", *words, "--count", "3").out
        == f"4 prompts in {out}, more than the 3 asked for\n"
    )
    assert out.read_text() == before
    assert run("prompts", "any", *words, "--count", "6").out == f"6 prompts in {out}\n"
    assert prompts_in(out) == expected, "as one call would have written"
    assert out.read_text().startswith(before)
    for name, value, message in (
        ("--seed", 2, r"prompts.jsonl:1: made with seed 1, not 2: choose another file"),
        ("--temperature", 0.5, "made with temperature 1.0, not 0.5"),
        ("--top-p", 0.5, "made with top_p 0.95, not 0.5"),
        ("--count", 0, "count must be at least 1, got 0"),
    ):
        assert message in run("prompts", "any", *words, name, value).error
    fresh = [*words[:-1], tmp_path / "new" / "folder" / "p.jsonl"]
    assert run("prompts", "any", *fresh, "--count", "2").code == 0
    assert fresh[-1].is_file()


@STOPS
def test_it_goes_on_where_it_was_stopped(
    run, answering, tmp_path, monkeypatch, number, how
) -> None:
    monkeypatch.setattr(prompts, "CHUNK", 3)
    model = answering(rambling())
    out = tmp_path / "prompts.jsonl"
    words = ("prompts", "any", "--out", out, "--count", "9", "--max-tokens", "24")
    expected = texts(model, 9, max_tokens=24)
    sample = prompts.sample_prompts

    def stopped(*words: Any) -> Any:
        yield from itertools.islice(sample(*words), 4)
        signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(prompts, "sample_prompts", stopped)
        result = run(*words)
        assert result.code == 128 + number
        said = " ".join(result.err.split())
        assert f"{how}: 4 of 9 prompts are in {out}; the same command goes on" in said
    cut = '{"prompt": "thr\u00e9'.encode()[:-1]  # killed while it wrote, between two bytes of é
    out.write_bytes(out.read_bytes() + cut)
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "sample_prompts", Mock(side_effect=KeyboardInterrupt))
        result = run(*words)
        assert "interrupted: 4 of 9 prompts are in" in " ".join(result.err.split())
        assert out.read_bytes().endswith(cut), "nothing to add, nothing to cut"
    assert run(*words).code == 0
    assert prompts_in(out) == expected


def test_a_file_of_something_else_stays_as_it_is(run, answering, tmp_path) -> None:
    model = answering(rambling())
    out = tmp_path / "prompts.jsonl"
    words = ("prompts", "any", "--out", out, "--count", "3", "--max-tokens", "24")
    for content, message in (
        (b'{"my": "one line"}', "prompts.jsonl:1: not a line as this command writes it"),
        (b'{"prompt": "a"}\n', "prompts.jsonl:1: not a line as this command writes it"),
        (b"some text", "prompts.jsonl:1: not a line"),
        (b"\xff\xfe", "prompts.jsonl is no UTF-8 text"),
    ):
        out.write_bytes(content)
        assert message in run(*words).error
        assert out.read_bytes() == content
    # Whole lines stay whole, one without its line break and blank ones between them too.
    out.unlink()
    assert run(*words).code == 0
    first, *rest = out.read_text().splitlines()
    out.write_text("\n".join([first, "", *rest]))
    assert run(*words[:-3], "5", *words[-2:]).code == 0
    assert prompts_in(out) == texts(model, 5, max_tokens=24)
