"""A server of this process, its clients, and what they say."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import uvicorn

from setblock.nano import problems
from setblock.results import Generation

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


def chat(client, question: str, **more: Any) -> Any:
    """The client's answer; what it has no argument for goes into the body."""
    usual = {"max_tokens", "temperature", "seed", "stop", "top_p", "stream", "stream_options"}
    given = {name: more.pop(name) for name in usual & set(more)}
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model="nano", messages=messages, extra_body={"return_token_ids": True, **more}, **given
    )


def complete(client, prompt: Any, **more: Any) -> Any:
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


def wait_for(url: str, process: subprocess.Popen) -> None:
    """Until the server answers there."""
    while process.poll() is None:
        with suppress(httpx.TransportError):
            httpx.get(url)
            return
        time.sleep(0.2)
    raise AssertionError(f"the server ended with exit code {process.returncode}")
