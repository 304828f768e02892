"""The OpenAI-compatible endpoint, driven by OpenAI's own client over a real socket."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from setblock.export import export
from setblock.generation import Generation, generate
from setblock.loading import load
from setblock.nano import problems
from setblock.serve import build

USER = {"role": "user", "content": "hi"}
QUESTIONS = tuple(problems(name, "validation", 1)[0].prompt for name in ("arithmetic", "json"))


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address at which the application answers meanwhile."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def nano():
    return load("nano")


@pytest.fixture(scope="module")
def app(nano):
    return build(nano, "nano")


@pytest.fixture(scope="module")
def address(app) -> Iterator[str]:
    with serving(app) as place:
        yield place


@pytest.fixture(scope="module")
def client(address) -> Iterator[openai.OpenAI]:
    with client_of(address) as made:
        yield made


def chat(client, question: str, **more: Any) -> Any:
    """The client's answer; what it has no argument for goes into the body."""
    usual = {"max_tokens", "temperature", "seed", "stop", "top_p", "stream", "stream_options"}
    given = {name: more.pop(name) for name in usual & set(more)}
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model="nano", messages=messages, extra_body={"return_token_ids": True, **more}, **given
    )


def complete(client, prompt: str, **more: Any) -> Any:
    body = {"return_token_ids": True, **more.pop("extra_body", {})}
    return client.completions.create(model="nano", prompt=prompt, extra_body=body, **more)


def streamed(chunks: Any) -> tuple[list[str], Any]:
    """The pieces of text, and the last message."""
    chunks = list(chunks)
    pieces = [
        (one.choices[0].delta.content or "")
        if one.object.startswith("chat")
        else one.choices[0].text
        for one in chunks
    ]
    return pieces, chunks[-1]


def same(answer: Any, expected: Generation) -> None:
    """Text, ids, ending, usage and forwards are those of `setblock.generate`."""
    choice = answer.choices[0]
    text = choice.message.content if answer.object == "chat.completion" else choice.text
    reason = "length" if expected.finish_reason == "length" else "stop"
    assert (text, choice.finish_reason) == (expected.text, reason)
    assert answer.setblock["token_ids"] == list(expected.token_ids)
    assert answer.setblock["forwards"] == expected.nfe
    assert answer.setblock["tokens_per_forward"] == expected.tokens_per_forward
    assert answer.setblock["mode"] == expected.settings.mode
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == expected.num_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "ntp"},
        {"mode": "verified", "branches": 2, "seeds": 1},
        {"mode": "verified", "draft": "solver", "solver": "entropy:inf", "block_size": 8},
        {"solver": "entropy:0.1", "block_size": 7, "next_token_seed": True, "fallback": 2.0},
        {"temperature": 1.0, "seed": 5, "top_k": 40, "top_p": 0.9},
        {"mode": "verified", "temperature": 1.0, "seed": 5},
        {"ignore_eos": True, "max_tokens": 70},
    ],
)
def test_chat_answers_as_generate(client, nano, options):
    expected = {**options, "max_new_tokens": options.get("max_tokens", 256)}
    expected.pop("max_tokens", None)
    for question in QUESTIONS:
        same(chat(client, question, **options), generate(nano, question, chat=True, **expected)[0])


def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_context(client, nano):
    """Of all modes but "sbd", which has whole blocks."""
    ids = nano.encode("zz ")
    for mode in ("ntp", "verified"):
        answer = complete(client, "zz ", extra_body={"mode": mode, "ignore_eos": True})
        assert answer.usage.total_tokens == nano.context_length
        assert answer.choices[0].finish_reason == "length"
    answer = complete(client, "zz ", extra_body={"ignore_eos": True, "block_size": 16})
    assert answer.usage.completion_tokens == (nano.context_length - len(ids)) // 16 * 16


def test_plain_prompts(client, nano):
    for question in QUESTIONS:
        expected = generate(nano, f"{question}\n", max_new_tokens=60)[0]
        same(complete(client, f"{question}\n", max_tokens=60), expected)


def test_conversations_and_parts(client, nano):
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": QUESTIONS[0]}]},
    ]
    answer = client.chat.completions.create(model="nano", messages=turns)
    turns[-1]["content"] = QUESTIONS[0]
    text = nano.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = nano.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer.choices[0].message.content == generate(nano, [ids])[0].text
    assert answer.usage.prompt_tokens == len(ids)
    extra = {"chat_template_kwargs": {"add_generation_prompt": True}}
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        client.chat.completions.create(model="nano", messages=turns, extra_body=extra)


@pytest.mark.parametrize("mode", ["sbd", "ntp", "verified"])
def test_streams_say_the_same_in_order(client, mode):
    for question in QUESTIONS:
        whole = chat(client, question, mode=mode)
        options: Any = {"include_usage": True}
        pieces, last = streamed(
            chat(client, question, mode=mode, stream=True, stream_options=options)
        )
        assert "".join(pieces) == whole.choices[0].message.content
        assert sum(map(bool, pieces)) > 1, "all text came at once"
        assert last.choices[0].finish_reason == whole.choices[0].finish_reason
        assert last.usage == whole.usage
        told = {name: last.setblock[name] for name in ("token_ids", "forwards", "mode")}
        assert told == {name: whole.setblock[name] for name in told}
        plain, _ = streamed(complete(client, question, max_tokens=30, stream=True))
        assert "".join(plain) == complete(client, question, max_tokens=30).choices[0].text


def test_a_stream_ends_as_the_protocol_says(address):
    body = {"prompt": "2 + 2", "stream": True, "max_tokens": 5}
    lines = httpx.post(f"{address}/v1/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("stream", [True, False])
def test_stop_texts_and_ends(client, nano, stream):
    whole = generate(nano, QUESTIONS[0], chat=True)[0]
    assert whole.finish_reason == "eos"
    cases = [
        ({"stop": ["carry"]}, whole.text[: whole.text.index("carry")], "stop"),
        ({"stop": "\n"}, whole.text.split("\n")[0], "stop"),
        ({"max_tokens": whole.num_tokens}, whole.text, "stop"),  # the end is the last that fits
        ({"max_tokens": 5}, nano.decode(list(whole.token_ids[:5])), "length"),
    ]
    for options, text, reason in cases:
        answer = chat(client, QUESTIONS[0], stream=stream, **options)
        if stream:
            pieces, answer = streamed(answer)
            assert "".join(pieces) == text
        else:
            assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == reason


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n is not supported, only 1; got 2"),
    ({"n": True}, "n is not supported, only 1; got True"),
    ({"best_of": 3}, "best_of is not"),
    ({"presence_penalty": 0.5}, "presence_penalty is not"),
    ({"frequency_penalty": -1}, "frequency_penalty is not"),
    ({"logit_bias": {"5": 1}}, "logit_bias is not"),
    ({"logprobs": 1}, "logprobs is not"),
    ({"user": "me"}, "user is not supported"),
    ({"foo": 1}, "foo is not supported"),
    ({"generation_config": "{}"}, "generation_config is not supported"),
    ({"stream": "yes"}, "stream must be true or false, got 'yes'"),
    ({"stream_options": {"x": 1}}, "stream_options may hold include_usage, got 'x'"),
    (
        {"stream_options": {"include_usage": 1}},
        "stream_options.include_usage must be true or false, got 1",
    ),
    ({"stream_options": {"include_usage": None}}, "must be true or false, got None"),
    ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer"),
    ({"max_tokens": True}, "max_tokens must be an integer"),
    ({"max_tokens": 10**6}, "tokens; with max_tokens=1000000"),
    ({"max_tokens": 10**400}, "max_tokens must be an integer below 2**63, got 10000"),
    ({"temperature": 10**400}, "temperature must be a number below 2**63, got 10000"),
    ({"top_p": -(10**400)}, "top_p must be a number below 2**63, got -1000"),
    ({"fallback": 10**400}, "fallback must be a number below 2**63, got 10000"),
    ({"top_k": 10**400}, "top_k must be an integer below 2**63, got 10000"),
    ({"seed": 2**63}, "seed must be an integer below 2**63, got 9223372036854775808"),
    ({"n": 10**400}, "n is not supported, only 1; got 10000"),
    ({"temperature": -1}, "temperature must be"),
    ({"temperature": "hot"}, "temperature must be"),
    ({"top_p": 2}, "top_p must be"),
    ({"seed": "a"}, "seed must be"),
    ({"seed": -1}, "seed must be"),
    ({"stop": 5}, "stop must be"),
    ({"stop": [""]}, "stop must be"),
    ({"stop": ["<|end|>"]}, "stop text '<|end|>' holds the special token"),
    (
        {"stop": ["a"] * 17},
        "stop may be 16 texts of at most 1000 characters each, got 17 texts",
    ),
    ({"stop": ["a", "b" * 1001]}, "of at most 1000 characters each, got one of 1001 characters"),
    ({"stop": "\ud800"}, r"stop must be Unicode text, got the lone surrogate '\ud800'"),
    ({"model": "\udc00"}, r"model must be Unicode text, got the lone surrogate '\udc00'"),
    ({"\ud800": "x"}, r"'\ud800' is not supported"),
    ({"a\nb": "x"}, r"'a\nb' is not supported"),
    ({"x" * 10**6: "x"}, "xxx' is not supported"),
    ({"mode": "fast"}, "mode must be"),
    ({"solver": "best"}, "solver must be one of entropy:GAMMA"),
    ({"solver": 3}, "solver"),
    ({"block_size": 0}, "block_size must be"),
    ({"branches": 2}, "branches is for mode verified"),
    ({"ignore_eos": "no"}, "ignore_eos must be"),
]


def refused(address: str, body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    """The error of a request that is refused before anything is decoded."""
    kind = {"content-type": "application/json"}
    # Its own json= would not send half a character.
    content = json.dumps(body)
    response = httpx.post(f"{address}/v1/{path}", content=content, headers=kind, timeout=60)
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    assert len(error["message"]) < 500
    return error


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[repr(fields)[:60] for fields, _ in BAD])
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_supported_is_named(address, fields, message, stream):
    body = {"prompt": "2 + 2", "stream": stream, **fields}
    turn = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}
    for prompt, given, path in (
        ("prompt", body, "completions"), ("messages", turn, "chat/completions"),
    ):  # fmt: skip
        error = refused(address, given, path)
        assert message in error["message"]
        assert error["message"].startswith(error["param"])
        [field] = fields
        # Where it is the prompt that is too long with this field, the prompt is named.
        named = {field, repr(field), prompt}
        assert error["param"].split(".")[0] in named or len(field) > 100


def test_what_only_a_stream_has(address):
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    for given in (body, {**body, "stream": False}):
        error = refused(address, given)
        assert error["message"] == (
            "stream_options is for stream true, got {'include_usage': True} without it"
        )


def test_one_limit_under_two_names(address, client, nano):
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    body = {"messages": messages, "max_tokens": 5, "max_completion_tokens": 6}
    error = refused(address, body, "chat/completions")
    assert error["message"] == (
        "max_completion_tokens must be max_tokens=5 where both are given, got 6"
    )
    answer = client.chat.completions.create(
        model="nano", messages=messages, max_tokens=5, max_completion_tokens=5
    )
    assert answer.usage.completion_tokens == 5
    body = {"messages": messages, "max_completion_tokens": 10**6}
    message = refused(address, body, "chat/completions")["message"]
    assert "with max_completion_tokens=1000000" in message


def test_a_prompt_that_leaves_no_room(address, nano):
    """What is missing is said, and nothing of a limit that was not asked for."""
    text = "12345 " * 400
    given, context = len(nano.encode(text)), nano.context_length
    for mode, room in (("sbd", "a block of 16"), ("ntp", "a token"), ("verified", "a token")):
        error = refused(address, {"prompt": text, "mode": mode})
        assert error["message"] == (
            f"prompt must leave room for {room} in the model's context of {context} tokens, "
            f"got {given} tokens"
        )
        assert error["param"] == "prompt"
    # A block does not fit, tokens do.
    text = nano.decode(nano.encode("1 2 3 4 " * 300)[: context - 10])
    assert context - 16 < len(nano.encode(text)) < context
    assert "room for a block of 16" in refused(address, {"prompt": text})["message"]
    body = {"messages": [{"role": "user", "content": text * 2}]}
    assert refused(address, body, "chat/completions")["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": ["a"]}, "prompt must be a text, got ['a']"),
        ("completions", {}, "prompt must be a text, and is missing"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("completions", {"prompt": "a", "echo": True}, "echo is not supported"),
        ("completions", {"prompt": "a", "max_completion_tokens": 3}, "only max_tokens"),
        ("completions", {"prompt": "a", "model": "other"}, "model must be 'nano', got 'other'"),
        ("completions", {"prompt": "a", "model": 3}, "model must be a text, got 3"),
        ("completions", {"prompt": "<|mask|>"}, "holds the mask token"),
        (
            "completions",
            {"prompt": "12345 " * 400, "max_tokens": 1},
            "tokens; with max_tokens=1 (16 in whole blocks of 16) it exceeds the model's context",
        ),
        (
            "completions",
            {"prompt": "a" * 10_000_000},
            "prompt must fit into the model's context of 1024 tokens, so have at most",
        ),
        (
            "completions",
            {"prompt": "\ud800 hi"},
            r"prompt must be Unicode text, got the lone surrogate '\ud800'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "hi \udfff"}]},
            r"messages must be Unicode text, got the lone surrogate '\udfff'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", "\ud800": 1}]},
            r"messages must be Unicode text, got the lone surrogate '\ud800'",
        ),
        (
            "chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"x": {"\ud800": 1}}},
            r"chat_template_kwargs must be Unicode text, got the lone surrogate '\ud800'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "x" * 10_000_000, "content": "a"}]},
            "messages must fit into the model's context of 1024 tokens, so have at most",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "u", "content": [{"type": "text", "text": "a" * 999}] * 99}]},
            "messages must fit into the model's context",
        ),
        (
            "chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"x": ["a" * 10_000_000]}},
            "chat_template_kwargs must fit into the model's context",
        ),
        (
            "chat/completions",
            {"messages": [USER] * 1025},
            "messages must be at most 1024, the tokens of the context, got 1025",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages[0].content[0].b is not supported, only type and text",
        ),
        ("chat/completions", {}, "messages must be a list"),
        ("chat/completions", {"messages": []}, "messages must be a list"),
        ("chat/completions", {"messages": ["a"]}, "messages[0] must be an object"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role must be"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content must be"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content must be a text or a list of parts of type text",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
            "messages[0].tool_calls is not supported",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
            "tools is not supported",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 3},
            "chat_template_kwargs must be an object",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}},
            "response_format is not supported",
        ),
    ],
)
def test_wrong_bodies(address, path, body, message):
    assert message in refused(address, body, path)["message"]


NO_VARIABLES = (
    "chat_template", "continue_final_message", "documents", "return_assistant_tokens_mask",
    "tokenize", "tools", "conversation", "add_generation_prompt", "return_dict", "return_tensors",
    "padding", "max_length", "tokenizer_kwargs", "sanitize_control_tokens", "self", "messages",
    "conversations", "load_audio_from_video",
)  # fmt: skip


@pytest.mark.parametrize("name", NO_VARIABLES)
def test_only_variables_of_the_template_can_be_given(address, name):
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, name: "a"}}
    error = refused(address, body, "chat/completions")
    assert error["message"] == (
        f"chat_template_kwargs may not hold {name}: only variables of the chat template are allowed"
    )
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("depth", [100, 800, 900, 960, 990, 2000])
def test_what_is_nested_deeply(address, depth):
    """Is taken or refused, at whatever depth Python gives up."""
    value = "[" * depth + "]" * depth
    content = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
    content += f'"chat_template_kwargs": {{"x": {value}}}}}'
    kind = {"content-type": "application/json"}
    response = httpx.post(f"{address}/v1/chat/completions", content=content, headers=kind)
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"", b"3", b'{"a": }'])
def test_what_is_no_json_object(address, content):
    response = httpx.post(
        f"{address}/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert "the body is not a JSON object" in response.json()["error"]["message"]


def test_values_that_ask_for_nothing_are_taken(client):
    extra = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "user": None}
    extra |= {"response_format": {"type": "text"}, "logprobs": False}
    assert chat(client, "hi", **extra).choices


def test_routes(address, client):
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert [one.id for one in client.models.list()] == ["nano"]
    for path in ("reset", "load_model", "v1/responses", "v1/audio/transcriptions", "v1/systemone"):
        assert httpx.post(f"{address}/{path}", json={"model": "nano"}).status_code == 404


def test_many_at_once(client, nano):
    """Each gets its own answer, whatever the others ask for."""
    questions = [f"What is {a} + 85?" for a in range(30, 42)]
    modes = ["sbd", "ntp", "verified"] * 4
    expected = [
        generate(nano, one, chat=True, mode=mode)[0]
        for one, mode in zip(questions, modes, strict=True)
    ]
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda q, mode: chat(client, q, mode=mode), questions, modes)
        for answer, one in zip(answers, expected, strict=True):
            same(answer, one)


def test_clients_that_leave_hold_nothing(address, app, client, nano, monkeypatch):
    """An answer that nobody reads any more ends; nothing of it stays behind."""
    forwards = 0
    forward = nano.forward

    def counted(*args: Any, **given: Any) -> Any:
        nonlocal forwards
        forwards += 1
        time.sleep(0.01)  # so that the client leaves in the middle
        return forward(*args, **given)

    monkeypatch.setattr(nano, "forward", counted)
    body = {"prompt": "2 + 2", "stream": True, "mode": "ntp", "ignore_eos": True, "max_tokens": 800}
    for _ in range(3):
        with httpx.stream("POST", f"{address}/v1/completions", json=body) as response:
            next(response.iter_text())
    assert chat(client, "hi").choices
    assert forwards < 2000, "the answers went on without a reader"
    engine = app.router.routes[0].endpoint.__closure__[0].cell_contents.generation_state.engine
    assert engine.done == {}


@pytest.mark.parametrize("place", ["nano.forward", "serve.stream", "nano.tokenizer.__call__"])
@pytest.mark.parametrize("error", [RuntimeError('out of "memory"'), MemoryError(), StopIteration()])
def test_an_answer_that_fails_is_an_error_to_its_client(
    address, client, nano, monkeypatch, place, error
):
    """In its first forward, or before it; the next one is answered."""

    def broken(*args: Any, **given: Any) -> Any:
        raise error

    message = 'out of "memory"' if str(error) else type(error).__name__
    if isinstance(error, StopIteration):
        message = "StopIteration"
    path, body = f"{address}/v1/chat/completions", {"messages": [USER]}
    with monkeypatch.context() as patch:
        if place == "nano.forward":
            patch.setattr(nano, "forward", broken)
        elif place == "serve.stream":
            patch.setattr("setblock.serve.stream", broken)
        else:
            patch.setattr(type(nano.tokenizer), "__call__", broken)
        response = httpx.post(path, json=body)
        assert response.status_code == 500
        told = response.json()["error"]
        assert message in told["message"]
        assert (told["type"], told["param"]) == ("server_error", None)
        with pytest.raises(openai.APIError) as raised:
            list(chat(client, "hi", stream=True))
        assert message in str(raised.value)
        if place == "nano.forward":
            lines = httpx.post(path, json={**body, "stream": True}).text.split("\n\n")
            assert json.loads(lines[-3].removeprefix("data: "))["error"]["type"] == "server_error"
            assert lines[-2:] == ["data: [DONE]", ""], "an answer's end came behind an error"
    assert chat(client, "hi").choices


def test_sampling_without_a_seed_draws_one(client, nano):
    """Each request its own, which its answer tells: with that, it is the same again."""
    given: Any = {"temperature": 1.5, "max_tokens": 24}
    answers = [chat(client, "hi", **given) for _ in range(4)]
    texts = [one.choices[0].message.content for one in answers]
    assert len({one.setblock["seed"] for one in answers}) == 4
    assert len(set(texts)) > 1
    again = [chat(client, "hi", **given, seed=one.setblock["seed"]) for one in answers]
    assert [one.choices[0].message.content for one in again] == texts
    assert "seed" not in chat(client, "hi", max_tokens=4).setblock


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_other_architectures_answer_as_generate(checkpoint, kind):
    """Several prompts at once, in every mode."""
    model = load(checkpoint(kind, settings={"trained": True, "solver": "fixed:3"}), device="cpu")
    prompts = ["two and two", "a bird", "x", "once upon a time", "0123456789"]
    modes = ("ntp", "sbd", "verified")
    cases = [(prompt, mode, talk) for prompt in prompts for mode in modes for talk in (True, False)]
    options: Any = {"max_new_tokens": 40}
    expected = [
        generate(model, prompt, mode=mode, chat=talk, **options)[0].text
        for prompt, mode, talk in cases
    ]
    with serving(build(model, "nano")) as place, client_of(place) as client:

        def answer(case: tuple[str, str, bool]) -> str:
            prompt, mode, talk = case
            if talk:
                answer = chat(client, prompt, mode=mode, max_tokens=40)
                return answer.choices[0].message.content
            given = {"max_tokens": 40, "extra_body": {"mode": mode}}
            return complete(client, prompt, **given).choices[0].text

        with ThreadPoolExecutor(len(cases)) as pool:
            assert list(pool.map(answer, cases)) == expected
    texts = dict(zip(cases, expected, strict=True))
    assert len(set(expected)) > len(prompts)
    for prompt, mode, talk in cases:
        if mode == "verified":
            assert texts[prompt, mode, talk] == texts[prompt, "ntp", talk]


def test_a_model_without_a_chat_template(checkpoint):
    model = load(checkpoint("llama", chat=False))
    with serving(build(model, "plain")) as place:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert "need a chat template" in refused(place, body, "chat/completions")["message"]
        options: Any = {"max_new_tokens": 20, "solver": "fixed:3"}
        expected = generate(model, "hi", **options)[0].text
        body = {"model": "plain", "prompt": "hi", "max_tokens": 20}
        given: Any = {**body, "extra_body": {"solver": "fixed:3"}}
        with client_of(place) as client:
            assert client.completions.create(**given).choices[0].text == expected
            pieces, _ = streamed(client.completions.create(**given, stream=True))
        assert "".join(pieces) == expected


def test_a_template_that_refuses_a_role(checkpoint):
    model = load(checkpoint("llama"))
    model.tokenizer.chat_template = "{{ raise_exception('only users speak') }}"
    with serving(build(model, "strict")) as place:
        body = {"messages": [{"role": "robot", "content": "hi"}]}
        error = refused(place, body, "chat/completions")
        assert error["message"] == "messages do not fit the chat template: only users speak"
        assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 + messages[0]['content'] }}", "unsupported operand type(s) for +: 'int' and 'str'"),
        ("{{ {}[messages[0]['content']].x }}", "'dict object' has no attribute 'hi'"),
        ("{{ raise_exception('only\n  users\nspeak') }}", "only users speak"),
        ("{{ messages | map('nothing') | list }}", "No filter named 'nothing'"),
    ],
)
def test_whatever_a_template_raises_is_refused(checkpoint, template, message):
    model = load(checkpoint("llama"))
    model.tokenizer.chat_template = template
    with serving(build(model, "strict")) as place:
        error = refused(place, {"messages": [USER]}, "chat/completions")
    assert error["message"].startswith("messages do not fit the chat template: ")
    assert message in error["message"]
    assert error["param"] == "messages"


def test_variables_of_a_template(checkpoint):
    model = load(checkpoint("llama"))
    model.tokenizer.chat_template = (
        "{{ greeting }}{% for i in range(times or 1) %}{{ messages[0].content }}{% endfor %}"
    )
    body: Any = {"messages": [USER], "max_tokens": 4}
    with serving(build(model, "nano")) as place:
        with client_of(place) as client:
            given = {"greeting": "Good day, ", "times": 2}
            answer = chat(client, "you", max_tokens=8, chat_template_kwargs=given)
        ids = model.tokenizer("Good day, youyou", add_special_tokens=False)["input_ids"]
        assert answer.setblock["token_ids"] == list(
            generate(model, [ids], max_new_tokens=8)[0].token_ids
        )
        body["chat_template_kwargs"] = {"times": 99_999}
        error = refused(place, body, "chat/completions")
        assert error["message"].startswith("messages must fit into the model's context of 256")


def test_an_exported_checkpoint_behind_stock_transformers_serve(nano, tmp_path):
    """`transformers serve` itself, which runs the checkpoint's own code."""
    folder = str(tmp_path / "exported")
    export(nano, tmp_path / "exported")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [str(Path(sys.executable).with_name("transformers")), "serve", folder]
    words = ["--trust-remote-code", "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen(
        [*program, *words, "--host", "127.0.0.1", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        with client_of(f"http://127.0.0.1:{port}") as client:
            for question in QUESTIONS:
                given: Any = {"model": folder, "messages": [{"role": "user", "content": question}]}
                given["max_tokens"] = 256  # its own default of 1,024 is all of the model's context
                expected = generate(nano, question, chat=True)[0].text
                answer = client.chat.completions.create(**given)
                assert answer.choices[0].message.content == expected
                pieces, _ = streamed(client.chat.completions.create(**given, stream=True))
                assert "".join(pieces) == expected
    finally:
        process.kill()
        process.wait()


def wait_for(url: str, process: subprocess.Popen) -> None:
    """Until the server answers there."""
    while process.poll() is None:
        with suppress(httpx.TransportError):
            httpx.get(url)
            return
        time.sleep(0.2)
    raise AssertionError(f"the server ended with exit code {process.returncode}")


def test_the_load_example(address, tmp_path):
    """Every mode is asked; a share of the clients leave, and none of the others is lost."""
    script = Path(__file__).parent.parent / "examples" / "serve_load.py"
    words = ["--url", f"{address}/v1", "--model", "nano", "--mode", "ntp", "--mode", "verified"]
    words += ["--concurrency", "2", "--requests", "6", "--repeats", "1", "--leave-every", "3"]
    words += ["--transformers", "--out", str(tmp_path / "load.json")]
    words += ["--server-pid", str(os.getpid())]
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, check=False,
        env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "per forward" in done.stdout
    lines = json.loads((tmp_path / "load.json").read_text())["results"]
    assert [(one["mode"], one["concurrency"]) for one in lines] == [("ntp", 2), ("verified", 2)]
    for line in lines:
        assert (line["requests"], line["left"], line["lost"]) == (6, 2, 0)
        assert line["tokens"] > 40
        assert line["after"]["rss_bytes"] > 1e6
        assert line["after_each_round"] == [line["after"]]
        assert line["first_text_s"][0] <= line["first_text_s"][1]
    assert lines[0]["throughput_ratio"] == 1
    assert lines[0]["tokens"] == lines[1]["tokens"], "verified says what ntp says"


# The command


def test_the_command_serves_until_it_is_told_to_stop(trained):
    words = ["--host", "127.0.0.1", "--port", "0", "--mode", "sbd", "--solver", "fixed:2"]
    words += ["--block-size", "4", "--dtype", "float32", "--device", "cpu", "--json"]
    program = [str(Path(sys.executable).with_name("setblock")), "serve", str(trained), *words]
    process = subprocess.Popen(
        program, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["solver"] == "fixed:2"
        with client_of(told["url"].removesuffix("/v1")) as client:
            answer: Any = client.completions.create(
                model=str(trained), prompt="hi secret", max_tokens=8,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
        expected = generate(
            load(trained), "hi secret", solver="fixed:2", block_size=4, max_new_tokens=8
        )[0]
        assert answer.setblock["token_ids"] == list(expected.token_ids)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "")
    assert "secret" not in err


SLOW = """
import time
from setblock.model import Model
forward = Model.forward
def slow(*given, **more):
    time.sleep(0.2)
    return forward(*given, **more)
Model.forward = slow
from setblock.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_answers_under_way(number):
    """One is streamed, others wait for their turn; each would take minutes."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "serve", "nano", "--port", "0", "--device", "cpu", "--json"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"] + "/completions"
        body: Any = {"prompt": "2 + 2", "mode": "ntp", "ignore_eos": True, "max_tokens": 900}
        begun = threading.Event()

        def streamed_text() -> str:
            text = ""
            with httpx.stream("POST", url, json={**body, "stream": True}, timeout=30) as response:
                for piece in response.iter_text():
                    text += piece
                    begun.set()
            return text

        with ThreadPoolExecutor(2) as pool:
            streaming = pool.submit(streamed_text)
            assert begun.wait(60)
            waiting = pool.submit(httpx.post, url, json=body, timeout=30)
            time.sleep(0.5)
            start = time.perf_counter()
            process.send_signal(number)
            process.communicate(timeout=20)
            assert time.perf_counter() - start < 4
            assert '"message": "the server is shutting down"' in streaming.result()
            answer = waiting.result()
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the server is shutting down"
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if number == signal.SIGINT else -number)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "was never trained for set block decoding"),
        (["--allow-untrained", "--solver", "best"], "solver must be one of"),
        (["--allow-untrained", "--mask-token-id", "99999"], "mask token 99999"),
        (["--host", "no.such.host.example"], "can't listen on no.such.host.example:0"),
        (["--api-key", "secret"], "--api-key is for engine vllm"),
        (["--adaptive"], "--adaptive is for engine vllm"),
        (["--fused"], "--fused is for engine vllm"),
        (["--", "--tensor-parallel-size", "2"], "--tensor-parallel-size 2 is for engine vllm"),
        (["--engine", "vllm", "--device", "cpu"], "--device is for engine transformers"),
        (["--engine", "vllm", "--json"], "--json is for engine transformers"),
        (["--engine", "fast"], "Invalid value for '--engine'"),
    ],
)
def test_refused_before_it_listens(run, untrained, words, message):
    assert message in run("serve", untrained, "--port", "0", *words).error


def test_a_port_that_is_taken(run, trained):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = run("serve", trained, "--port", port).error
    assert error == f"can't listen on 127.0.0.1:{port}: Address already in use"
