"""Several answers to one request: to each of its prompts, and several to each.

transformers' handlers know one; each of ours is one of theirs, and they are put together here.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from setblock.fields import MOST_CHOICES, Refused, shown

KINDS = "a text, a list of texts, a list of token ids or a list of such lists"


class Prompts(str):
    """Prompts that are not one text, where a handler looks for one."""

    def __new__(cls, each: Sequence[str | list[int]]) -> "Prompts":
        prompts = super().__new__(cls)
        prompts.each = each
        return prompts

    each: Sequence[str | list[int]]

    def named(self) -> list[tuple[str, str | list[int]]]:
        """(how a refusal names it, the prompt) of each."""
        return [(_place(index, self.each), one) for index, one in enumerate(self.each)]


def prompts_of(given: Any, vocab_size: int) -> str:
    """The field `prompt` of a request: a text, or Prompts.

    Raises: Refused for what is neither texts nor ids below vocab_size, and for too many.
    """
    if isinstance(given, str):
        return given
    if not given or type(given[0]) not in (str, list, int):
        raise Refused("prompt", f"must be {KINDS}, got {shown(given)}")
    each = [given] if type(given[0]) is int else given
    if len(each) > MOST_CHOICES:
        raise Refused("prompt", f"may be {MOST_CHOICES} prompts at most, got {len(each)}")
    for index, one in enumerate(each):
        place = _place(index, each)
        if type(one) is not type(each[0]):
            kind = "a text" if isinstance(each[0], str) else "a list of token ids"
            raise Refused(place, f"must be {kind} like those before it, got {shown(one)}")
        for id in one if isinstance(one, list) else ():
            if type(id) is not int or not 0 <= id < vocab_size:
                allowed = f"must be of token ids in 0..{vocab_size - 1}"
                raise Refused(place, f"{allowed}, got {shown(id)}")
    return Prompts(each)


def _place(index: int, each: Sequence[Any]) -> str:
    return f"prompt[{index}]" if len(each) > 1 else "prompt"


class Usage:
    """Tokens of a request's answers, of which `choices` after each other have the same prompt."""

    def __init__(self, choices: int) -> None:
        self.choices, self.counted = choices, 0
        self._prompt = self._cached = self._said = 0

    def count(self, index: int, usage: dict[str, Any]) -> None:
        """Add what one of the answers says of itself."""
        self.counted += 1
        self._said += usage["completion_tokens"]
        if index % self.choices == 0:
            self._prompt += usage["prompt_tokens"]
            self._cached += usage["prompt_tokens_details"]["cached_tokens"]

    def told(self) -> dict[str, Any]:
        """The protocol's object."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._said,
            "total_tokens": self._prompt + self._said,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def together(request_id: str, bodies: list[dict[str, Any]], choices: int) -> dict[str, Any]:
    """One response of several answers' own, each with what the engine tells of it."""
    usage, found = Usage(choices), []
    for index, body in enumerate(bodies):
        usage.count(index, body["usage"])
        found.append(_choice(body, index))
    return {**bodies[0], "id": request_id, "choices": found, "usage": usage.told()}


async def interleaved(
    request_id: str, streams: Sequence[AsyncIterator[Any]], choices: int, apart: bool | None
) -> AsyncIterator[str]:
    """One stream of several answers' own, whose last messages hold their usage; up to an error.

    apart: whether the usage of all comes in a message of its own; None: in the last one of the
    answer that ends last.
    """
    usage = Usage(choices)
    async for index, events in _merged(streams):
        for event in events.split("\n\n")[:-1]:
            chunk = json.loads(event.removeprefix("data: "))
            if "error" in chunk:
                yield f"{event}\n\n"
                return
            own, chunk["id"] = chunk.pop("usage", None), request_id
            if own is not None:
                usage.count(index, own)
            chunk["choices"] = [_choice(chunk, index)]
            chunks = [chunk]
            if own is not None and usage.counted == len(streams):
                if apart is None:
                    chunk["usage"] = usage.told()
                elif apart:
                    chunks.append({**chunk, "choices": [], "usage": usage.told()})
            yield as_events(chunks)


def as_events(chunks: Iterable[dict[str, Any]]) -> str:
    """Messages of a stream as they are sent."""
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks)


def _choice(body: dict[str, Any], index: int) -> dict[str, Any]:
    """The one choice of an answer, as one of several; `setblock` goes from there into it."""
    [choice] = body["choices"]
    told = {"setblock": body.pop("setblock")} if "setblock" in body else {}
    return {**choice, "index": index, **told}


async def _merged(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[tuple[int, str]]:
    """(number of the stream, what comes next in it) of all of them, as it comes."""
    queue: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def take(index: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for events in stream:
                queue.put_nowait((index, events))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.ensure_future(take(*one)) for one in enumerate(streams)]
    open_ones = len(tasks)
    try:
        while open_ones:
            index, events = await queue.get()
            if events is not None:
                yield index, events
                continue
            await tasks[index]  # raises what it ended by
            open_ones -= 1
    finally:
        for task in tasks:
            task.cancel()
