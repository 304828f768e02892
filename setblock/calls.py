"""Tools in a chat: what a request says of them, and which of them an answer calls.

How a model writes its calls and thoughts is its tokenizer's response_template, or the one that
transformers knows for its architecture; transformers' parser reads an answer by it.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.cli.serving.utils import get_response_template, response_events_to_chunks
from transformers.utils.chat_parsing.response_templates import load_response_template

from setblock.fields import Refused
from setblock.model import Model

logger = logging.getLogger(__name__)


def templated(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: one text, arguments of calls as objects."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content)
    turn = {**message, "content": content}
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [
            {**call, "function": {**given, "arguments": json.loads(given["arguments"])}}
            for call in calls
            for given in [call["function"]]
        ]
    return turn


class Hearing:
    """What transformers' handlers ask of a tokenizer about one answer that may call tools.

    model: decodes special tokens too, as a response template may go by them.
    said: the answer's text, up to a stop text, once it is there.
    """

    def __init__(self, model: Model, prompt: Any) -> None:
        """prompt: what makes the ids of a conversation.

        Raises: Refused where nothing tells how the model writes calls.
        """
        self.model, self.apply_chat_template = model.telling_special_tokens(), prompt
        self.said = ""
        network: Any = model.network
        found = get_response_template(model.tokenizer, network)
        if not found or "tool_calls" not in found.get("fields", {}):
            raise Refused(
                "tools",
                f"can't be used with a model of type {network.config.model_type}, of which nothing "
                "tells how it writes calls: its tokenizer_config.json has no response_template "
                "with a field tool_calls, and transformers knows none",
            )
        try:
            load_response_template(found)
        except ValueError as error:
            why = f"can't be used, as the tokenizer's response_template is wrong: {error}"
            raise Refused("tools", why) from None
        self.response_template: dict[str, Any] = found

    def decode(self, ids: Sequence[int]) -> str:
        """The prompt's text, of which its last turn may be the beginning of the answer."""
        return self.model.decode(list(ids))

    def parse_response(self, ids: Any, template: Any, **given: Any) -> dict[str, Any]:
        """The answer's text, thoughts and calls; all of it is text where a call can't be read."""
        try:
            found: Any = self.model.tokenizer.parse_response(self.said, template, **given)
            for call in found.get("tool_calls") or []:
                _check_call(call)
        except (ValueError, TypeError, KeyError) as error:
            _tell(error)
            return {"content": self.plain(self.said)}
        return found

    def plain(self, text: str) -> str:
        """Without special tokens."""
        for token in self.model.special_tokens:
            text = text.replace(token, "")
        return text


class Listener:
    """A streamed answer in its parts, as they come: text, thoughts, and calls once they are whole.

    From a call on that can't be read all is text, as the model wrote it.
    """

    def __init__(self, parser: Any, hearing: Hearing) -> None:
        """parser: transformers' ResponseParser, which knows the prompt."""
        self.parser, self.hearing = parser, hearing
        self.said, self.told = "", 0  # all of the answer; how much of it has been handed out
        self.begin = response_events_to_chunks(parser.initial_events)

    def hear(self, piece: str, ended: bool) -> list[Any]:
        """What can be told now that the answer went on with this piece, or ended behind it."""
        begin, self.begin = self.begin, []
        self.said += piece
        if self.parser is not None:
            try:
                events = self.parser.feed(piece)
                if ended:
                    events += self.parser.finalize()[1]
                for event in events:
                    if event["type"] == "region_close" and event["field"] == "tool_calls":
                        _check_call(event["value"])
                parts = response_events_to_chunks(events)
            except (ValueError, TypeError, KeyError) as error:
                _tell(error)
                self.parser = None
            else:
                self._follow(events)
                return begin + parts
        rest = self.hearing.plain(self.said[self.told :])
        self.told = len(self.said)
        return begin + [rest] * bool(rest)

    def _follow(self, events: list[dict[str, Any]]) -> None:
        """Finds the end of what these events told, in the text that was said."""
        place = self.told
        for event in events:
            if event["type"] == "region_chunk":
                found = self.said.find(event["text"], place)
                place = place if found < 0 else found + len(event["text"])
                if not event.get("dirty"):
                    self.told = place
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                self.told = place


def _check_call(call: Any) -> None:
    """Raises: TypeError, KeyError for what has no name or no arguments."""
    function = call["function"]
    if not isinstance(function["name"], str):
        raise TypeError(f"a call's name must be text, got {function['name']!r}")
    if not isinstance(function["arguments"], (dict, str)):
        raise TypeError(f"a call's arguments must be an object, got {function['arguments']!r}")


def _tell(error: Exception) -> None:
    logger.warning("a call of a tool can't be read and stays text: %r", error)
