"""generate: text as it grows, the steps behind it, and where it ends."""

import json
from pathlib import Path

import pytest
from conftest import SHORT, api, copied
from fakes import TableModel


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
