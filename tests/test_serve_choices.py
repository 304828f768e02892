"""Several answers to one request: to each of its prompts, and several to each."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from servers import QUESTIONS, chat, client_of, complete, refused, serving

from setblock import generation, running
from setblock.choices import as_events, interleaved
from setblock.generation import generate
from setblock.serve import build


@pytest.fixture
def second_fails(monkeypatch) -> None:
    """Of each request, the second answer, at its end."""
    finish = running._finish

    def broken(state: Any, slot: int, answer: Any, *given: Any) -> Any:
        if answer.noise == 1:
            raise RuntimeError("no text")
        return finish(state, slot, answer, *given)

    monkeypatch.setattr(running, "_finish", broken)


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


SEVERAL: Any = ["What is 47 + 85?", "What is 12 + 9?", "Calculate 6 x 7."]


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_of_several_prompts(client, nano, as_ids, choices):
    """In their order, as of `generate`, and each prompt counts once."""
    how: Any = {"temperature": 3.0, "seed": 5}
    rows = [prompt for prompt in SEVERAL for _ in range(choices)]
    expected = generate(nano, rows, max_new_tokens=20, mode="ntp", **how)
    prompts = [nano.encode(prompt) for prompt in SEVERAL] if as_ids else SEVERAL
    given = {**how, "max_tokens": 20, "extra_body": {"mode": "ntp"}}
    answer = complete(client, prompts, n=choices, **given)
    assert [choice.index for choice in answer.choices] == list(range(len(rows)))
    for choice, one in zip(answer.choices, expected, strict=True):
        assert choice.text == one.text
        assert choice.setblock["token_ids"] == list(one.token_ids)
    assert len({choice.text for choice in answer.choices}) == len(rows)
    prompted = sum(one.prompt_tokens for one in expected) // choices
    said = sum(one.num_tokens for one in expected)
    told = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert told == (prompted, said, prompted + said)
    assert answer.usage.prompt_tokens_details.cached_tokens <= prompted


@pytest.mark.parametrize("single", ["ids", "list of a text", "list of ids"])
def test_of_one_prompt_in_other_words(client, nano, single):
    """The answer is that of the text, `setblock` and all."""
    ids = nano.encode(SEVERAL[0])
    prompt = {"ids": ids, "list of a text": [SEVERAL[0]], "list of ids": [ids]}[single]
    answer, plain = (complete(client, one, max_tokens=20) for one in (prompt, SEVERAL[0]))
    assert answer.choices[0].text == plain.choices[0].text
    assert answer.setblock["token_ids"] == plain.setblock["token_ids"]


@pytest.mark.parametrize("usage", [True, False, None])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_in_a_stream(address, path, usage, logprobs):
    """All of a whole response is in it, each choice's own under its index."""
    how: Any = {"n": 2, "temperature": 2.0, "seed": 3, "max_tokens": 20, "return_token_ids": True}
    of_chat = path.startswith("chat")
    asked = {"messages": [{"role": "user", "content": SEVERAL[0]}]} if of_chat else {}
    body = {**how, **(asked or {"prompt": SEVERAL})}
    if logprobs:
        body["logprobs"] = True if of_chat else 1
    whole = httpx.post(f"{address}/v1/{path}", json=body, timeout=60).json()
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    streamed = {**body, **options, "stream": True}
    lines = httpx.post(f"{address}/v1/{path}", json=streamed, timeout=60).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    told = [chunk.get("usage") for chunk in chunks if chunk.get("usage")]
    if usage is False:
        assert told == []
    else:
        counted = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        assert [{name: one[name] for name in counted} for one in told] == [counted]
        assert chunks[-1]["usage"]
    if usage:
        assert chunks.pop()["choices"] == []
    assert "setblock" not in chunks[-1]
    for choice in whole["choices"]:
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        pieces = [(one["delta"].get("content") if of_chat else one["text"]) or "" for one in own]
        assert "".join(pieces) == (choice["message"]["content"] if of_chat else choice["text"])
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert all(one["finish_reason"] is None for one in own[:-1]), "there, as it is OpenAI's"
        assert own[-1]["setblock"]["token_ids"] == choice["setblock"]["token_ids"]
        assert not any("setblock" in one for one in own[:-1])
        if logprobs:
            place = "content" if of_chat else "token_logprobs"
            parts = [one["logprobs"][place] for one in own if one.get("logprobs")]
            assert sum(map(len, parts)) == len(choice["logprobs"][place])
    assert len(whole["choices"]) == (2 if of_chat else 6)
    assert {one["choices"][0]["index"] for one in chunks} == set(range(len(whole["choices"])))


def test_pieces_come_as_they_are_there():
    """In one stream, whichever answer they are of; what is left open ends with it."""
    ended: list[str] = []

    async def answer(name: str, pauses: list[asyncio.Event]) -> AsyncIterator[str]:
        try:
            for number, pause in enumerate(pauses):
                await pause.wait()
                choice = {"index": 0, "text": f"{name}{number}"}
                yield as_events([{"id": name, "choices": [choice]}])
        finally:
            ended.append(name)

    async def heard() -> list[Any]:
        a, b = ([asyncio.Event() for _ in range(3)] for _ in range(2))
        found = []
        stream: Any = interleaved("id", [answer("a", a), answer("b", b)], 1, None)
        for pause in (b[0], a[0], a[1], b[1]):
            pause.set()
            found.append(json.loads((await anext(stream)).removeprefix("data: ")))
        await stream.aclose()
        await asyncio.sleep(0)
        return found

    found = asyncio.run(heard())
    choices = [one["choices"][0] for one in found]
    told = [(one["index"], one["text"]) for one in choices]
    assert told == [(1, "b0"), (0, "a0"), (0, "a1"), (1, "b1")]
    assert {one["id"] for one in found} == {"id"}
    assert sorted(ended) == ["a", "b"]


def test_a_request_of_many_answers_leaves_room_for_others(nano):
    """One of a second request begins before the first one's last."""
    app = build(nano, "nano", most=2)
    many = {"prompt": ["2 + 2"] * 12, "max_tokens": 40, "ignore_eos": True, "mode": "ntp"}
    order: list[str] = []

    def ask(address: str, name: str, body: dict[str, Any]) -> None:
        httpx.post(f"{address}/v1/completions", json=body, timeout=60)
        order.append(name)

    with serving(app) as address, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, address, "many", many)
        route: Any = app.router.routes[0]
        engine = route.endpoint.__closure__[0].cell_contents.generation_state.engine
        while not engine._jobs:
            time.sleep(0.01)
        pool.submit(ask, address, "one", {**many, "prompt": "1 + 1"}).result()
        first.result()
    assert order == ["one", "many"]


def test_a_stream_of_which_one_fails_ends(nano, second_fails):
    """With an error, and then nothing."""
    app = build(nano, "nano")
    body = {"prompt": SEVERAL, "max_tokens": 9, "stream": True, "mode": "ntp"}
    with serving(app) as address, client_of(address) as client:
        said = httpx.post(f"{address}/v1/completions", json=body, timeout=60).text.split("\n\n")
        assert json.loads(said[-3].removeprefix("data: "))["error"]["message"] == "no text"
        assert said[-2:] == ["data: [DONE]", ""]
        assert complete(client, "2 + 2", max_tokens=9).choices[0].text
    route: Any = app.router.routes[0]
    engine = route.endpoint.__closure__[0].cell_contents.generation_state.engine
    assert engine.done == {}


def test_prompts_that_can_not_be_encoded_are_named(address, nano, monkeypatch):
    encode = nano.encode

    def broken(text: str) -> Any:
        if text == "b":
            raise ValueError("not this one")
        return encode(text)

    monkeypatch.setattr(nano, "encode", broken)
    error = refused(address, {"prompt": ["a", "b"]}, "completions")
    assert (error["message"], error["param"]) == ("prompt[1] is refused: not this one", "prompt[1]")
    error = refused(address, {"prompt": "b"}, "completions")
    assert (error["message"], error["param"]) == ("prompt is refused: not this one", "prompt")


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


def test_where_one_fails_all_do(nano, second_fails):
    """And the others go on for nobody."""
    app = build(nano, "nano")
    with serving(app) as address, client_of(address) as client:
        with pytest.raises(openai.InternalServerError, match="no text"):
            chat(client, QUESTIONS[0], n=3, temperature=1.0, mode="ntp", max_tokens=9)
        assert chat(client, QUESTIONS[0], max_tokens=9).choices[0].message.content
