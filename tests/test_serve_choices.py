"""Several answers to one request."""

import re
from typing import Any

import openai
import pytest
from servers import QUESTIONS, chat, client_of, complete, refused, serving

from setblock import generation, running
from setblock.generation import generate
from setblock.serve import build


@pytest.mark.parametrize("mode", ["ntp", "sbd", "verified"])
def test_they_are_the_rows_of_generate(client, nano, mode):
    how: Any = {"mode": mode, "temperature": 4.0, "seed": 7}
    expected = generate(nano, [QUESTIONS[0]] * 3, chat=True, max_new_tokens=30, **how)
    answer = chat(client, QUESTIONS[0], n=3, max_tokens=30, **how)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, one in zip(answer.choices, expected, strict=True):
        assert choice.message.content == one.text
        assert choice.finish_reason == ("length" if one.finish_reason == "length" else "stop")
        assert choice.setblock["forwards"] == one.nfe or mode == "verified"  # drafts follow load
        assert choice.setblock["seed"] == 7
    assert len({one.text for one in expected}) > 1
    tokens = sum(one.num_tokens for one in expected)
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.prompt_tokens == expected[0].prompt_tokens
    assert answer.usage.total_tokens == tokens + expected[0].prompt_tokens
    assert not hasattr(answer, "setblock")


def test_of_a_plain_prompt(client, nano):
    """Each with its log-probabilities; without a seed they differ from request to request."""
    how: Any = {"n": 2, "temperature": 2.0, "max_tokens": 20, "logprobs": 1}
    answer = complete(client, QUESTIONS[1], **how)
    for choice in answer.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
    seeds = {choice.setblock["seed"] for choice in answer.choices}
    assert len(seeds) == 1
    assert {complete(client, QUESTIONS[1], **how).choices[0].setblock["seed"]} != seeds
    one = complete(client, QUESTIONS[1], **{**how, "n": 1})
    assert len(one.choices) == 1
    assert one.setblock["forwards"]


def test_a_form_is_compiled_once_for_all(client, monkeypatch):
    count, compiled = [], generation.compiled

    def counted(*given: Any) -> Any:
        count.append(given)
        return compiled(*given)

    monkeypatch.setattr(generation, "compiled", counted)
    how: Any = {"n": 4, "temperature": 1.0, "extra_body": {"regex": "[a-z]{3,9}"}}
    found = complete(client, "a", **how)
    assert all(re.fullmatch("[a-z]{3,9}", choice.text) for choice in found.choices)
    assert len({choice.text for choice in found.choices}) > 1
    assert len(count) == 1


def test_a_form_is_refused_once_for_all(client, address, monkeypatch):
    count, compiled = [], generation.compiled

    def counted(*given: Any) -> Any:
        count.append(given)
        return compiled(*given)

    monkeypatch.setattr(generation, "compiled", counted)
    given = {"prompt": "a", "n": 8, "temperature": 1.0, "regex": "("}
    error = refused(address, given, "completions")
    assert error["param"] == "regex"
    assert len(count) == 1


def test_where_one_fails_all_do(nano, monkeypatch):
    """And the others go on for nobody."""
    finish = running._finish

    def broken(state: Any, slot: int, answer: Any, *given: Any) -> Any:
        if answer.noise == 1:
            raise RuntimeError("no text")
        return finish(state, slot, answer, *given)

    monkeypatch.setattr(running, "_finish", broken)
    app = build(nano, "nano")
    with serving(app) as address, client_of(address) as client:
        with pytest.raises(openai.InternalServerError, match="no text"):
            chat(client, QUESTIONS[0], n=3, temperature=1.0, mode="ntp", max_tokens=9)
        assert chat(client, QUESTIONS[0], max_tokens=9).choices[0].message.content
