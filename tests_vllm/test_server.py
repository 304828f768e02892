"""`setblock serve --engine vllm` in a process of its own, driven by OpenAI's client."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from test_engine import Request

from setblock import likelihood, nano
from setblock.generation import generate
from setblock.loading import load

HERE = Path(__file__).parent
PORT = 18765


@contextmanager
def serving(name: str, port: int, log: Path, *more: str) -> Iterator[str]:
    """The address of a server of this MODEL."""
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    env.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # serve says it
    program = [str(Path(sys.executable).with_name("setblock")), "serve", name, "--engine", "vllm"]
    words = ["--port", str(port), "--dtype", "float32"]
    words += ["--", "--enforce-eager", "--max-model-len", "512", *more]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen([*program, *words], env=env, stdout=file, stderr=file)
    place = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
            with suppress(httpx.TransportError):
                httpx.get(f"{place}/health").raise_for_status()
                break
            time.sleep(0.5)
        yield place
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving("nano", PORT, log) as place:
        yield place
        assert "Hello secret" not in log.read_text()


@pytest.fixture(scope="module")
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(
    client: openai.OpenAI, question: str, own: dict[str, Any] | None = None, **more: Any
) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    given = {"temperature": 0.0, "max_tokens": 100, **more}
    return client.chat.completions.create(
        model="nano", messages=messages, extra_body={"vllm_xargs": own or {}}, **given
    )


def metric(address: str, name: str) -> float:
    found = re.findall(rf"^{name}{{.*}} (\S+)$", httpx.get(f"{address}/metrics").text, re.M)
    return sum(map(float, found))


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
STRICT: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
QUESTIONS = [one.prompt for name in nano.FAMILIES for one in nano.problems(name, "validation", 4)]


@pytest.mark.parametrize(
    ("own", "way"),
    [
        ({"mode": "sbd"}, {"slide": True}),  # as the checkpoint says
        ({"mode": "sbd", "slide": 0}, {"slide": False}),
        ({"solver": "prefix:0.9", "slide": 1}, {"solver": "prefix:0.9", "slide": True}),
        ({"mode": "verified"}, {"mode": "verified"}),
        ({"mode": "ntp"}, {"mode": "ntp"}),
    ],
)
def test_answers_are_the_references(client, model, own, way):
    """Twenty at once; whole and as a stream."""
    reference = model("nano")
    asked = [tuple(reference.encode(one, chat=True)) for one in QUESTIONS]
    expected = [Request(ids, way, 100).reference(reference) for ids in asked]
    with ThreadPoolExecutor(20) as pool:
        whole = list(pool.map(lambda one: ask(client, one, own), QUESTIONS))

        def pieces(question: str) -> str:
            chunks = ask(client, question, own, stream=True)
            return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)

        streamed = list(pool.map(pieces, QUESTIONS))
    counts = [one.model_extra["metrics"]["speculative_decoding"] for one in whole]
    forwards = sum(one["num_spec_steps"] for one in counts)
    assert (forwards >= sum(map(len, expected))) == (own == {"mode": "ntp"})
    for answer, text, ids in zip(whole, streamed, expected, strict=True):
        ended = ids[-1] in reference.eos_token_ids
        assert (
            answer.choices[0].message.content == text == reference.decode(ids[: len(ids) - ended])
        )
        assert answer.choices[0].finish_reason == ("stop" if ended else "length")
        assert answer.usage.completion_tokens == len(ids)


def test_seeds_and_stops(client, model):
    sampled = {"temperature": 1.0, "seed": 4}
    expected = generate(model("nano"), QUESTIONS[0], chat=True, mode="ntp", **sampled)[0]
    for mode in ("ntp", "verified"):
        answer = ask(client, QUESTIONS[0], {"mode": mode}, **sampled)
        assert answer.choices[0].message.content == expected.text
    answer = ask(client, QUESTIONS[0], stop=["\n"])
    whole = ask(client, QUESTIONS[0]).choices[0].message.content
    assert answer.choices[0].message.content == whole.split("\n")[0]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("own", "more", "message"),
    [
        ({"solver": "best"}, {}, "solver must be one of entropy:GAMMA"),
        ({"block_size": 99}, {}, "block_size must lie in 1..16"),
        ({"blocks": 3}, {}, "blocks is not one of mode, solver, block_size"),
        ({"diffusion_canvas_length": 4}, {}, "diffusion_canvas_length is not one of mode"),
        ({"setblock_seed": 4}, {}, "setblock_seed is not one of mode"),
        ({"block_size": True}, {}, "block_size of vllm_xargs must be a number or a text"),
        ({"slide": True}, {}, "slide of vllm_xargs must be a number or a text"),
        ({"slide": 2}, {}, "slide must be 0 or 1, got 2"),
        (
            {"solver": "entropy:0.1"},
            {},
            "slide must be 0 on vLLM with solver entropy:0.1, which may",
        ),
        ({"solver": "fixed:1" + "0" * 40}, {}, "n must be an integer from 1 to 2147483647"),
        ({}, {"temperature": 3.0}, "temperature"),
        ({"mode": "sbd"}, {"presence_penalty": 1.0}, "presence_penalty is for modes ntp and verif"),
        ({"mode": "sbd"}, {"logit_bias": {"5": 1}}, "logit_bias is for modes ntp and verified"),
        (
            {"mode": "sbd"},
            {"response_format": {"type": "json_object"}},
            "structured_outputs are for modes ntp and verified, in which each token is chosen",
        ),
        ({}, {"tools": [WEATHER]}, 'auto" tool choice requires --enable-auto-tool-choice'),
        ({}, {"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({}, {"tools": [STRICT]}, "tools[0].function.strict must be false: not all of vLLM's par"),
        ({}, {"max_tokens": -1}, "max_tokens"),
        ({}, {"max_tokens": 10_000}, "max_tokens"),
    ],
)
def test_wrong_requests(client, own, more, message):
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        ask(client, "hi", own, **more)
    assert ask(client, "hi").choices


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "verified", "mode is not a field of this server: of set block decoding, put it"),
        ("best_of", 3, "best_of is not a field of this server"),
        ("\ud800", 1, "ud800 is not a field of this server"),
        ("use_beam_search", True, "use_beam_search is not supported by set block decoding"),
        ("logprob_token_ids", [5], "logprob_token_ids is not supported by set block decoding"),
        ("temperature", "hot", "temperature"),
        ("max_tokens", [], "max_tokens"),
        ("stop", 3, "stop"),
        ("vllm_xargs", 3, "vllm_xargs"),
        ("stream", "often", "stream"),
    ],
)
def test_fields_that_would_be_ignored_or_are_wrong(address, client, field, value, message):
    body = json.dumps({"model": "nano", "prompt": "hi", "max_tokens": 3, field: value})
    kind = {"content-type": "application/json"}
    response = httpx.post(f"{address}/v1/completions", content=body, headers=kind)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert ask(client, "hi").choices


def test_without_a_seed_texts_differ(client):
    texts = {
        ask(client, QUESTIONS[2], {"mode": mode}, temperature=2.0).choices[0].message.content
        for mode in ("sbd", "verified", "ntp")
        for _ in range(5)
    }
    assert len(texts) > 1
    for seeds in ({7}, {7, 8, 9}):
        texts = {
            ask(client, QUESTIONS[2], temperature=1.5, seed=seed).choices[0].message.content
            for seed in [*seeds, *seeds]
        }
        assert (len(texts) == 1) == (len(seeds) == 1)


@pytest.mark.parametrize("mode", ["sbd", "verified", "ntp"])
def test_log_probabilities(client, mode):
    told = {"logprobs": True, "top_logprobs": 3}
    answer = ask(client, QUESTIONS[0], {"mode": mode}, **told).choices[0]
    content = answer.logprobs.content
    assert "".join(one.token for one in content).startswith(answer.message.content)
    for one in content:
        assert one.logprob <= one.top_logprobs[0].logprob <= 0
        assert len(one.top_logprobs) == 3
    assert sum(one.logprob == one.top_logprobs[0].logprob for one in content) >= len(content) - 2
    chunks = ask(client, QUESTIONS[0], {"mode": mode}, stream=True, **told)
    parts = [one.choices[0].logprobs for one in chunks if one.choices]
    assert [one for part in parts if part for one in part.content] == content


@pytest.mark.parametrize("own", [{"mode": "sbd"}, {"mode": "verified"}])
def test_a_text_is_judged_by_its_echo(client, model, own):
    """What lm-eval asks of a server."""
    reference, text = model("nano"), "12 + 30 = 42. So the answer is 42."
    answer = client.completions.create(
        model="nano", prompt=text, echo=True, max_tokens=1, logprobs=2, temperature=0.0,
        extra_body={"vllm_xargs": own},
    )  # fmt: skip
    told = answer.choices[0].logprobs
    ids = reference.encode(text)
    judged = likelihood.next_tokens(reference, ids, 1).logprobs
    assert len(told.token_logprobs) == len(ids) + 1
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[1:-1] == pytest.approx(judged.tolist(), abs=1e-3)


def test_several_answers_and_what_they_may_say(client):
    for mode in ("sbd", "verified"):
        more: Any = {"n": 3, "temperature": 2.0}
        choices = ask(client, QUESTIONS[2], {"mode": mode}, **more).choices
        assert len({one.message.content for one in choices}) > 1
        assert [one.index for one in choices] == [0, 1, 2]
    usual, other = (
        ask(client, QUESTIONS[0], logprobs=True, **more).choices[0]
        for more in ({}, {"logit_bias": {"41": 100}, "max_tokens": 5})
    )
    assert len({one.token for one in other.logprobs.content}) == 1
    assert len({one.token for one in usual.logprobs.content}) > 5


def test_tokens_are_counted_to_the_answers_end(client):
    for own, most in (({}, 1), ({}, 5), ({"mode": "verified"}, 5), ({}, 100)):
        answer = ask(client, QUESTIONS[0], own, max_tokens=most)
        counts = answer.model_extra["metrics"]["speculative_decoding"]
        histogram = counts["acceptance_histogram"]
        committed = sum(number * count for number, count in enumerate(histogram))
        assert committed == answer.usage.completion_tokens <= most


def test_answers_of_a_given_form(client):
    """Of a mode that chooses each token knowing all before it, though the server's is another."""
    values = {"enum": ["forty-two", "forty-three"]}
    schema: Any = {
        "type": "object", "properties": {"sum": values}, "required": ["sum"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    more: Any = {"presence_penalty": 1.0}  # of white space too, which this model writes else
    told = {}
    for mode in ({"mode": "ntp"}, {}, {"mode": "verified"}):
        answer = ask(client, QUESTIONS[0], mode, response_format=form, **more)
        text = told[str(mode)] = answer.choices[0].message.content
        assert json.loads(text)["sum"] in values["enum"]
        forwards = answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"]
        tokens = answer.usage.completion_tokens
        assert forwards == tokens if mode == {"mode": "ntp"} else forwards < tokens
    assert len(set(told.values())) == 1


def test_malformed_requests(address, client):
    for content in (b"{", b"[]", b"3", b"{}"):
        response = httpx.post(
            f"{address}/v1/completions",
            content=content,
            headers={"content-type": "application/json"},
        )
        assert 400 <= response.status_code < 500
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="nano", prompt="a" * 10_000_000, max_tokens=4)
    assert ask(client, "Hello secret").choices


def test_clients_that_leave_free_their_cache(address, client):
    """A hundred requests, every tenth left in the middle: none is lost, nothing stays behind."""

    def one(number: int) -> bool:
        mode = {"mode": ("sbd", "verified", "ntp")[number % 3]}
        question = QUESTIONS[number % len(QUESTIONS)]
        if number % 10:
            return bool(ask(client, question, mode).choices[0].message.content)
        body = {
            "model": "nano", "prompt": question, "stream": True, "max_tokens": 400,
            "ignore_eos": True, "temperature": 0.0, "vllm_xargs": mode,
        }  # fmt: skip
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_text())
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(100)))
    deadline = time.time() + 30
    while metric(address, "vllm:num_requests_running") and time.time() < deadline:
        time.sleep(0.2)
    assert metric(address, "vllm:num_requests_running") == 0
    assert metric(address, "vllm:kv_cache_usage_perc") == 0
    assert metric(address, "vllm:diffusion_num_committed_tokens_total") > 0


@pytest.mark.parametrize("method", ["lora", "gated"])
def test_an_adapter_is_served_by_its_name(folder, model, method, tmp_path):
    kind = f"{method}:llama"
    name = str(folder(kind))
    ids = model(kind).encode(QUESTIONS[0], chat=True)
    expected = generate(model(kind), [ids], max_new_tokens=40)[0]
    with (
        serving(name, PORT + 1, tmp_path / "log") as place,
        openai.OpenAI(base_url=f"{place}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [one.id for one in client.models.list()] == [name]
        more = {"return_token_ids": True}
        answer = client.completions.create(
            model=name, prompt=list(ids), temperature=0, max_tokens=40, extra_body=more
        )
    assert tuple(answer.choices[0].model_extra["token_ids"]) == expected.token_ids


CALLING = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}"
    "{% if add_generation_prompt %} So: {% endif %}"
)


def test_tools(folder, tmp_path):
    """A model that has learned one call by heart, before which it says something; in a stream token
    by token, and several at a time.
    """
    place = shutil.copytree(folder("nano"), tmp_path / "calling")
    (place / "chat_template.jinja").write_text(CALLING)
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    said = f"Well.<tool_call>\n{call}\n</tool_call>"
    turns: Any = [{"role": "user", "content": f"Say {call}"}]  # which drafts can copy
    learned = load(str(place), dtype="float32")
    tokenizer: Any = learned.tokenizer
    tokenizer.chat_template = CALLING
    prompt = tokenizer.apply_chat_template(
        turns, tools=[WEATHER], tokenize=False, add_generation_prompt=True
    )
    first, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, said))
    ids = torch.tensor([[*first, *answer, min(learned.eos_token_ids)]])
    labels = ids.clone()
    labels[:, : len(first)] = -100
    learning = torch.optim.AdamW(learned.network.parameters(), lr=1e-3)
    for _ in range(60):
        learning.zero_grad()
        loss = learned.network(input_ids=ids, labels=labels).loss
        loss.backward()
        learning.step()
    assert loss < 0.01
    learned.network.save_pretrained(place)
    own = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with (
        serving(str(place), PORT + 1, tmp_path / "log", *own) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for way in ({"mode": "ntp"}, {"mode": "verified", "lookup": 8}):

            def answered(own: Any = way, **more: Any) -> Any:
                return client.chat.completions.create(
                    model=str(place), messages=turns, max_tokens=100, temperature=0,
                    extra_body={"vllm_xargs": own}, **{"tools": [WEATHER], **more},
                )  # fmt: skip

            told = answered()
            forwards = told.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"]
            assert (forwards < 0.7 * len(answer)) == (way["mode"] == "verified")
            [whole] = told.choices
            assert whole.message.tool_calls, whole
            [found] = whole.message.tool_calls
            assert (whole.message.content, whole.finish_reason) == ("Well.", "tool_calls")
            assert found.function.name == "weather"
            assert json.loads(found.function.arguments) == {"city": "Paris"}
            text, name, arguments = "", "", ""
            for chunk in answered(stream=True):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                for one in delta.tool_calls or []:
                    name += one.function.name or ""
                    arguments += one.function.arguments or ""
            assert (text, name, json.loads(arguments)) == ("Well.", "weather", {"city": "Paris"})
            for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
                [forced] = answered(tool_choice=choice).choices
                [call] = forced.message.tool_calls or []
                assert call.function.name == "weather"
                assert set(json.loads(call.function.arguments)) <= {"city"}
            plain = answered(tool_choice="none").choices[0].message
            assert not plain.tool_calls
