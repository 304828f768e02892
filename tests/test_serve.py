"""The OpenAI-compatible endpoint, driven by OpenAI's own client over a real socket."""

import asyncio
import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from servers import QUESTIONS, USER, chat, client_of, complete, refused, same, serving, streamed

from setblock.generation import generate
from setblock.loading import load
from setblock.serve import build


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "ntp"},
        {"mode": "verified", "branches": 2, "seeds": 1, "lookup": 6},
        {"mode": "verified", "draft": "solver", "solver": "entropy:inf", "block_size": 8},
        {
            **{"solver": "entropy:0.1", "block_size": 7, "slide": False},
            **{"next_token_seed": True, "fallback": 2.0},
        },
        {"solver": "prefix:0.9", "slide": True},
        {"temperature": 1.0, "seed": 5, "top_k": 40, "top_p": 0.9},
        {"mode": "verified", "temperature": 1.0, "seed": 5},
        {"mode": "verified", "lenience": 0.01},
        {"ignore_eos": True, "max_tokens": 70},
    ],
)
def test_chat_answers_as_generate(client, nano, options):
    expected = {**options, "max_new_tokens": options.get("max_tokens", 256)}
    expected.pop("max_tokens", None)
    for question in QUESTIONS:
        same(chat(client, question, **options), generate(nano, question, chat=True, **expected)[0])


def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_context(client, nano):
    """But that whole blocks end before it."""
    ids = nano.encode("zz ")
    for own in ({"mode": "ntp"}, {"mode": "verified"}, {"mode": "sbd", "slide": True}):
        answer = complete(client, "zz ", extra_body={**own, "ignore_eos": True})
        assert answer.usage.total_tokens == nano.context_length
        assert answer.choices[0].finish_reason == "length"
    whole = {"ignore_eos": True, "block_size": 16, "slide": False}
    answer = complete(client, "zz ", extra_body=whole)
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


def test_a_message_of_the_client_may_have_fields_that_are_null(client):
    """As those have that the client's library made of an answer."""
    turns: Any = [{"role": "user", "content": QUESTIONS[0]}]
    said = client.chat.completions.create(model="nano", messages=turns).choices[0].message
    follows = [
        client.chat.completions.create(
            model="nano", messages=[*turns, message, {"role": "user", "content": QUESTIONS[1]}]
        )
        for message in (said.model_dump(), {"role": "assistant", "content": said.content})
    ]
    parts = [{"type": "text", "text": QUESTIONS[0], "cache_control": None}]
    in_parts = client.chat.completions.create(
        model="nano", messages=[{"role": "user", "content": parts}]
    )
    assert in_parts.choices[0].message.content == said.content
    options: Any = {"include_usage": None}
    stream = client.chat.completions.create(
        model="nano", messages=turns, stream=True, stream_options=options
    )
    assert "".join(one.choices[0].delta.content or "" for one in stream) == said.content
    assert follows[0].choices == follows[1].choices
    assert follows[0].usage.prompt_tokens == follows[1].usage.prompt_tokens


def test_requests_of_one_name(address):
    """A client names its requests; what is told of one is never of another."""

    async def all_of_them() -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as http:
            bodies = [
                {"prompt": QUESTIONS[0], "max_tokens": 1 + n % 5, "return_token_ids": True}
                for n in range(20)
            ]
            url, named = f"{address}/v1/completions", {"X-Request-ID": "same"}
            asked = [http.post(url, json=body, headers=named) for body in bodies]
            return [one.json() for one in await asyncio.gather(*asked)]

    answers = asyncio.run(all_of_them())
    assert [len(one["setblock"]["token_ids"]) for one in answers] == [1, 2, 3, 4, 5] * 4
    assert len({one["id"] for one in answers}) == 20


@pytest.mark.parametrize("ticks", [1, 2])
def test_a_client_that_leaves_at_once(app, nano, monkeypatch, ticks):
    """While the stream's first event is sent, its source does not hear of it; nothing collects."""
    forwards: list[int] = []
    forward = nano.forward
    monkeypatch.setattr(nano, "forward", lambda *a, **k: (forwards.append(1), forward(*a, **k))[1])
    engine = app.router.routes[0].endpoint.__closure__[0].cell_contents.generation_state.engine
    body = {"messages": [USER], "stream": True, "mode": "ntp", "ignore_eos": True}
    sent = json.dumps({**body, "max_tokens": 800}).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"",
        "root_path": "", "scheme": "http", "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1),
    }  # fmt: skip
    messages = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        for _ in range(ticks):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    async def ask() -> None:
        await app(scope, receive, send)
        await engine.async_submit(lambda: None)  # waits for the answer under way

    gc.disable()
    try:
        asyncio.run(ask())
    finally:
        gc.enable()
    assert len(forwards) < 400
    assert engine.done == {}


def test_the_model_goes_on_with_a_last_message_of_its_own(client, nano):
    (whole,) = generate(nano, QUESTIONS[0], chat=True, mode="ntp")
    begin = nano.decode(list(whole.token_ids[: len(whole.token_ids) // 2]))
    begun = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": begin},
    ]
    answer = client.chat.completions.create(
        model="nano", messages=begun, extra_body={"mode": "ntp"}
    )
    assert begin
    assert begin + answer.choices[0].message.content == whole.text
    assert answer.usage.prompt_tokens == whole.prompt_tokens + len(whole.token_ids) // 2


def test_a_conversation_that_goes_on_is_encoded_from_there_on(client, nano):
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[1]}]
    known = 0
    for stream in (False, True, False):
        given: Any = {"model": "nano", "messages": messages, "max_tokens": 40}
        [expected] = generate(nano, [messages], max_new_tokens=40)
        if stream:
            pieces, answer = streamed(client.chat.completions.create(stream=True, **given))
            text = "".join(pieces)
        else:
            answer = client.chat.completions.create(**given)
            text = answer.choices[0].message.content
        assert (text, answer.usage.prompt_tokens) == (expected.text, expected.prompt_tokens)
        assert known <= answer.usage.prompt_tokens_details.cached_tokens < expected.prompt_tokens
        known = expected.prompt_tokens
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More?"}]


@pytest.mark.parametrize("mode", ["sbd", "ntp", "verified"])
def test_streams_say_the_same_in_order(client, mode):
    for question in QUESTIONS:
        whole = chat(client, question, mode=mode)
        options: Any = {"include_usage": True}
        *chunks, last = chat(client, question, mode=mode, stream=True, stream_options=options)
        assert last.choices == []
        assert last.usage == whole.usage
        pieces, last = streamed(chunks)
        assert "".join(pieces) == whole.choices[0].message.content
        assert sum(map(bool, pieces)) > 1, "all text came at once"
        assert last.choices[0].finish_reason == whole.choices[0].finish_reason
        assert last.usage is None
        told = {name: last.setblock[name] for name in ("token_ids", "forwards", "mode")}
        assert told == {name: whole.setblock[name] for name in told}
        plain, _ = streamed(complete(client, question, max_tokens=30, stream=True))
        assert "".join(plain) == complete(client, question, max_tokens=30).choices[0].text


@pytest.mark.parametrize("usage", [True, False, None])
def test_a_stream_says_its_usage_unless_told_not_to(address, usage):
    for path, asked in (
        ("completions", {"prompt": QUESTIONS[0]}),
        ("chat/completions", {"messages": [{"role": "user", "content": QUESTIONS[0]}]}),
    ):
        options = {} if usage is None else {"stream_options": {"include_usage": usage}}
        body = {**asked, "stream": True, "max_tokens": 5, **options}
        lines = httpx.post(f"{address}/v1/{path}", json=body, timeout=60).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        if usage:
            own = chunks.pop()
            assert own.pop("usage")["completion_tokens"] == 5
            assert {**own, "choices": chunks[-1]["choices"]}.items() <= chunks[-1].items()
            assert own["choices"] == []
        told = [one["usage"]["completion_tokens"] for one in chunks if one.get("usage")]
        assert told == ([5] if usage is None else [])
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert [one["setblock"]["mode"] for one in chunks if "setblock" in one] == ["sbd"]
        assert not {"usage", "apart"} & chunks[-1]["setblock"].keys()


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


def test_the_one_model(client, nano):
    assert client.models.retrieve("nano") == client.models.list().data[0]
    assert client.models.retrieve("nano").max_model_len == nano.context_length
    with pytest.raises(openai.NotFoundError, match="model must be 'nano', got 'other'"):
        client.models.retrieve("other")


def test_penalties_of_a_request(client, nano):
    """Blocks have none: they are verified."""
    options: Any = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    expected = generate(nano, QUESTIONS[0], chat=True, max_new_tokens=40, mode="ntp", **options)
    found = chat(client, QUESTIONS[0], max_tokens=40, **options)
    assert found.setblock["mode"] == "verified"
    assert found.setblock["token_ids"] == list(expected[0].token_ids)


def test_biases_of_a_request(client, nano):
    how: Any = {"logit_bias": {40: 5.5, 41: -100}, "min_new_tokens": 70}
    expected = generate(nano, QUESTIONS[0], chat=True, max_new_tokens=80, mode="ntp", **how)
    named: Any = {"logit_bias": {"40": 5.5, "41": -100}, "min_tokens": 70}
    found = chat(client, QUESTIONS[0], max_tokens=80, **named)
    assert found.setblock["mode"] == "verified"
    assert found.setblock["token_ids"] == list(expected[0].token_ids)
    assert found.usage.completion_tokens > 70


def test_values_that_ask_for_nothing_are_taken(client):
    extra = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "user": "me"}
    extra |= {"safety_identifier": "x", "prompt_cache_key": "y", "modalities": ["text"]}
    extra |= {"verbosity": "medium", "metadata": {"run": "1"}, "top_p": None, "min_tokens": 0}
    extra |= {"response_format": {"type": "text"}, "logprobs": False}
    assert chat(client, "hi", **extra).choices


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "function"])
def test_a_name_does_no_harm_where_a_template_tells_none(client, role):
    turns: Any = [{"role": role, "content": "hi"}, {"role": "user", "content": QUESTIONS[0]}]
    plain, named = (
        client.chat.completions.create(model="nano", messages=messages, max_tokens=9)
        for messages in (turns, [{**turns[0], "name": "Ann"}, turns[1]])
    )
    assert named.choices == plain.choices


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

    def timed(question: str, mode: str) -> tuple[Any, float]:
        begin = time.perf_counter()
        return chat(client, question, mode=mode), time.perf_counter() - begin

    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(timed, questions, modes)
        for (answer, seconds), one in zip(answers, expected, strict=True):
            told = answer.setblock
            assert min(told["prefill_s"], told["decode_s"]) > 0
            assert told["prefill_s"] + told["decode_s"] < seconds
            if one.settings.mode == "verified":  # which drafts less beside others
                assert answer.setblock["token_ids"] == list(one.token_ids)
            else:
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
    before = forwards
    for path in ("completions", "chat/completions"):
        words = {"messages": [USER]} if path.startswith("chat") else {"prompt": "2 + 2"}
        for more in ({}, {"n": 3, "temperature": 1.0}):
            given = {**body, **words, **more, "stream": False}
            if "messages" in words:
                del given["prompt"]
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/{path}", json=given, timeout=0.3)
    assert chat(client, "hi").choices
    assert forwards - before < 1000, "the answers went on for nobody"
    engine = app.router.routes[0].endpoint.__closure__[0].cell_contents.generation_state.engine
    assert engine.done == {}


@pytest.mark.parametrize("place", ["nano.forward", "engine.checked", "nano.tokenizer.__call__"])
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
        elif place == "engine.checked":
            patch.setattr("setblock.engine.checked", broken)
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
