"""Whether the client of a request is there, as an application knows it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from setblock.leaving import GONE, Watched

END = {"type": "http.disconnect"}


def part(more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x", "more_body": more}


def ask(app: Callable[..., Any], messages: list[Any]) -> int:
    """How many messages are left unread by the application, which gets these; then none comes."""

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        message = messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    async def send(message: Any) -> None: ...

    async def run() -> None:
        await asyncio.wait_for(Watched(app)({"type": "http"}, receive, send), 5)

    asyncio.run(run())
    return len(messages)


def test_a_client_that_leaves_is_gone_for_all_who_ask():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert [await receive(), await receive()] == [part(True), part(False)]
        assert not GONE.get().is_set()
        assert await asyncio.gather(receive(), receive()) == [END, END]
        assert GONE.get().is_set()
        assert await receive() == END

    assert ask(app, [part(True), part(False), END]) == 0


def test_it_is_known_without_asking():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.01)
        assert GONE.get().is_set()

    assert ask(app, [part(False), END]) == 0


def test_a_client_that_leaves_in_its_body():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert [await receive(), await receive()] == [part(True), END]
        assert GONE.get().is_set()

    assert ask(app, [part(True), END]) == 0


def test_a_body_is_read_as_the_application_asks_for_it():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.01)

    assert ask(app, [part(True)] * 9 + [part(False)]) == 9


@pytest.mark.parametrize("before", [[], [part(False)]])
def test_an_error_is_the_application_s(before):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in before:
            assert await receive() == message
        with pytest.raises(OSError, match="reset"):
            await receive()

    assert ask(app, [*before, OSError("reset")]) == 0
