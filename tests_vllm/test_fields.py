"""The middleware alone: what reaches the application behind it."""

import asyncio
from typing import Any

import httpx
import pytest

from setblock.vllm.fields import Fields

CHAT = "/v1/chat/completions"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body that it got."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def ask(path: str, content: bytes, key: str | None = None, method: str = "POST") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=Fields(application))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize("content", [b"{", b"3", b"[]", b"\xff", b"", b'{"model": "nano"}'])
def test_what_the_server_itself_judges_passes_unchanged(content):
    for path in (CHAT, "/v1/completions", "/tokenize"):
        found = ask(path, content)
        assert (found.status_code, found.content) == (200, content)
    assert ask("/tokenize", b'{"mode": 1}').status_code == 200


def test_a_field_that_nobody_knows():
    found = ask(CHAT, b'{"model": "nano", "mode": "verified"}')
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "mode"
    assert ask(f"{CHAT}/batch", b'{"model": "nano", "mode": "verified"}').status_code == 400
    deep = ask(CHAT, b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert (deep.status_code, deep.json()["error"]["message"]) == (
        400,
        "the body is nested too deeply",
    )
    taken = (b'{"tools": []}', b'{"tools": [3]}', b'{"tool_choice": "auto"}', b'{"suffix": null}')
    for content in taken:
        assert ask(CHAT if b"tool" in content else "/v1/completions", content).status_code == 200


def test_the_key_guards_every_post(monkeypatch):
    assert ask("/invocations", b"{}").status_code == 200
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    for path in (CHAT, "/invocations", "/tokenize"):
        assert ask(path, b"{}").status_code == 401
        assert ask(path, b"{}", "wrong").status_code == 401
        assert ask(path, b"{}", "secret").status_code == 200
    assert ask("/health", b"", method="GET").status_code == 200
