"""Tools in a chat: what a request says of them, and which of them an answer calls.

How a model writes its calls and thoughts is its tokenizer's response_template, or the one that
transformers knows for its architecture; transformers' parser reads an answer by it.
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import regex
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    get_response_template,
    response_events_to_chunks,
)
from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from setblock.conversations import arguments_of
from setblock.fields import Refused
from setblock.forced import PROBE, grammar_of_calls
from setblock.model import Model

logger = logging.getLogger(__name__)

# Names of a template's field for thoughts, of which this one is the protocol's.
THOUGHTS = "reasoning_content"
# Contents of a call that are whole or can't be read; others may miss what was cut off.
WHOLE = ("json", "python-call-list")
UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)


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
    """What transformers' handlers take for the tokenizer of a request that has tools.

    model: decodes those special tokens too that are marks of the response template.
    listener: of the answer, once the conversation is known. form: what it has to look like, as
    options of `setblock.generate`, where it has to call a tool.
    """

    def __init__(
        self,
        model: Model,
        template: Callable[..., Any],
        tools: list[Any],
        forced: Mapping[str, Any],
        rendered: Callable[..., str],
    ) -> None:
        """template: makes the ids of a conversation. forced: the tools of which the answer has to
        call one, if any, by their places in the request; rendered: then, the text of a
        conversation, and whether more is to come.

        Raises: Refused where nothing tells how the model writes calls.
        """
        self.template, self.tools = template, tools
        self.forced, self.rendered = forced, rendered
        self.form: dict[str, str] = {}
        self.parts: list[Any] = []  # of an answer that is no stream
        network: Any = model.network
        # The text part of a network that sees as well writes calls as that does.
        kind = network.config.model_type.removesuffix("_text")
        known = SimpleNamespace(config=SimpleNamespace(model_type=kind))
        found = get_response_template(model.tokenizer, known)  # type: ignore[arg-type]
        if found is None:
            raise Refused(
                "tools",
                f"can't be used with a model of type {kind}, of which nothing tells how it writes "
                "calls: its tokenizer_config.json has no response_template, and transformers "
                "knows none",
            )
        found = copy.deepcopy(found)  # its defaults may be added to
        try:
            self.spec = load_response_template(found)
            fields = self.spec.fields
            if missing := {"tool_calls", "content"} - fields.keys():
                raise ValueError(f"it has no field {min(missing)}")
            marks = [*_texts(found["fields"])]
            patterns = [regex.compile(one) for name, one in marks if name.endswith("pattern")]
        except (*UNREADABLE, AttributeError, regex.error) as error:
            why = f"can't be used, as the tokenizer's response_template is wrong: {error}"
            raise Refused("tools", why) from None
        self.response_template: dict[str, Any] = found
        self.model = model.telling(
            token
            for token in model.special_tokens
            if any(token in one or re.escape(token) in one for _, one in marks)
            or any(one.fullmatch(token, partial=True) for one in patterns)
        )

    def apply_chat_template(self, conversation: Sequence[Any], **given: Any) -> Any:
        """The ids of the conversation. Raises: Refused."""
        encoded = self.template(conversation, **given)
        prompt = str(self.model.tokenizer.decode(encoded["input_ids"][0].tolist()))
        self.prompt = prompt
        if not self.spec.start_anchor_re.search(prompt):
            raise Refused(
                "tools",
                "can't be used with this chat template, in which no answer begins as the "
                "response_template says (start_anchor)",
            )
        try:
            self.listener = self._listening(prompt)
        except UNREADABLE:
            raise Refused("messages", "end with a call of a tool that can't be read") from None
        if self.forced:

            def answered(message: dict[str, Any]) -> str:
                return self.rendered([*conversation, message], False, **given)

            def reads(answer: str, name: str) -> bool:
                ids = self.model.tokenizer.encode(answer, add_special_tokens=False)
                parts = self._listening(prompt).hear(self.model.decode(ids), ended=True)
                return parts == [ToolCall(name, json.dumps(PROBE))]

            asked = self.rendered(conversation, True, **given)
            grammar = grammar_of_calls(self.model, self.forced, asked, answered, reads)
            self.form = {"grammar": grammar}
        return encoded

    def another(self) -> "Hearing":
        """What another answer to the same request goes by."""
        other = copy.copy(self)
        other.parts, other.listener = [], self._listening(self.prompt)
        return other

    def _listening(self, prompt: str) -> "Listener":
        return Listener(ResponseParser(self.spec, prompt, tools=self.tools))

    def decode(self, ids: Any) -> str:
        """Nothing: to the parsers that the handlers make, and that are not used."""
        return ""

    def parse_response(self, ids: Any, template: Any, **given: Any) -> dict[str, Any]:
        """The answer's text, thoughts and calls."""
        parts = self.parts
        thoughts = "".join(part for part in parts if isinstance(part, ReasoningText))
        text = "".join(part for part in parts if type(part) is str)
        calls = [
            {"function": {"name": part.name, "arguments": part.arguments}}
            for part in parts
            if isinstance(part, ToolCall)
        ]
        # Of transformers below 5.24 the field is "thinking".
        return {"content": text, "tool_calls": calls} | dict.fromkeys(
            (THOUGHTS, "thinking"), thoughts or None
        )


class Listener:
    """An answer in its parts, as they come: text, thoughts, and calls once they are whole.

    What should be a call and can't be read is text, as the model wrote it. White space at either
    end of text and thoughts is left out.
    """

    def __init__(self, parser: ResponseParser) -> None:
        """parser: of this answer, with its prompt read."""
        self.parser = parser
        self.before = len(parser._buffer)  # characters of the prompt in what it counts
        self.said, self.told = "", 0  # all of the answer; how much of it has been handed out
        self.calling = self.warned = False
        # White space that waits for more of its kind; None before the first.
        self.waiting: dict[type, str | None] = {str: None, ReasoningText: None}

    def hear(self, piece: str, ended: bool) -> list[Any]:
        """What can be told now that the answer went on with this piece, or ended behind it."""
        parts: list[Any] = []
        for character in piece:  # so that what can't be read spoils no more than itself
            self.said += character
            parts += self._read(lambda character=character: self.parser.feed(character))
        if ended and self._cut_off():
            parts.append(self.said[self.told :])
        elif ended:
            parts += self._read(lambda: self.parser.finalize()[1], ended=True)
        return [one for part in parts for one in self._trimmed(part)]

    def _cut_off(self) -> bool:
        """Whether the answer ends in a call that may miss something, without a sign of it."""
        parser, field = self.parser, self.parser._spec.fields["tool_calls"]
        if parser._current != field.name or field.close_re is None or field.content in WHOLE:
            return False
        return field.close_re.search(parser._buffer, parser._pos) is None

    def _read(self, go_on: Callable[[], list[dict[str, Any]]], ended: bool = False) -> list[Any]:
        """The parts of the parser's next events."""
        parts: list[Any] = []
        held = self.before - self.parser._pos  # characters of the prompt, as a mark may begin there
        try:
            for event in go_on():
                if event["type"] == "region_chunk" and held > 0:
                    event = {**event, "text": event["text"][held:]}
                if event["type"] == "region_chunk" or event["field"] != self.parser._implicit_name:
                    held = 0  # told now, or a mark
                calls = event["field"] == "tool_calls"
                if calls and event["type"] == "region_close":
                    found = event["value"]
                    parts += map(_call, found if isinstance(found, list) else [found])
                elif not calls and event["type"] == "region_chunk":
                    parts += response_events_to_chunks([event])
                self.calling = calls and event["type"] != "region_close"
        except UNREADABLE as error:
            if not self.warned:  # but not of what it says, which is the answer
                logger.warning("a call of a tool stays text (%s)", type(error).__name__)
            # A mark may be known for one a character later, which is yet to be told then.
            read = max(self.told, self.parser._pos - self.before)
            end = len(self.said) if ended else read
            parts = [self.said[self.told : end]]
            self.told, self.calling, self.warned = end, False, True
            self.parser._reset_to_implicit()
        if not self.calling:
            self.told = max(self.told, self.parser._pos - self.before)
        return parts

    def _trimmed(self, part: Any) -> list[Any]:
        """The part, if it is one to tell, with the white space that now is no more at an end."""
        if not isinstance(part, str):
            return [part]
        kind = ReasoningText if isinstance(part, ReasoningText) else str
        waiting = self.waiting[kind]
        text = part.lstrip() if waiting is None else waiting + part
        told = text.rstrip()
        if told or waiting is not None:
            self.waiting[kind] = text[len(told) :]
        return [kind(told)] if told else []


def _texts(found: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(the field that it is in, text) of all that a response template goes by."""
    if isinstance(found, str):
        yield name, found
    named = found.items() if isinstance(found, Mapping) else ()
    listed = [(name, one) for one in found] if isinstance(found, list) else named
    for own, one in listed:
        yield from _texts(one, own)


def _call(found: Any) -> ToolCall:
    """Raises: one of UNREADABLE for what has no name, or no arguments that a client could read."""
    function = found["function"]
    name, arguments = function["name"], function["arguments"]
    given = arguments_of(arguments)
    if given is None or not (isinstance(name, str) and name):
        raise TypeError("no name, or arguments that are no object")
    text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    f"{name}{text}".encode()  # no half of a character
    return ToolCall(name, text)
