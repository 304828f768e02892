"""Clients of a server that leave: what they asked for shall end as well."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

GONE: ContextVar[threading.Event] = ContextVar("gone")  # whether the client of this request is


class Watched:
    """An application that knows of each request by `GONE` whether its client is there."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gone, listening = threading.Event(), None
        GONE.set(gone)

        async def listen() -> Message:
            """What ends the request, whose body is there, or nothing of it is left."""
            try:
                while (message := await receive())["type"] != "http.disconnect":
                    pass
                return message
            finally:
                gone.set()

        async def heard() -> Message:
            nonlocal listening
            if listening is not None:
                return await asyncio.shield(listening)
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
            elif not message.get("more_body"):
                listening = asyncio.ensure_future(listen())
            return message

        try:
            await self.app(scope, heard, send)
        finally:
            if listening is not None:
                listening.cancel()


class Events(StreamingResponse):
    """A stream of events that calls `leave` once nobody takes them any more.

    Their source hears late that the client is gone, if it is while an event is sent.
    """

    def __init__(self, events: AsyncIterator[Any], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave()
