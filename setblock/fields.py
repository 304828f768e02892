"""What a request to transformers' server may hold; anything else is refused by name."""

import json
import reprlib
import threading
from dataclasses import dataclass, field
from typing import Any

from setblock.conversations import MORE_OF_ROLE, arguments_of
from setblock.settings import PENALTIES

# Fields of a request that are options of `setblock.generate` as they are, and their values.
OPTIONS = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "fallback", "lenience"), "a number"),
    **dict.fromkeys(PENALTIES, "a number"),
    **dict.fromkeys(("top_k", "seed", "block_size", "branches", "seeds", "lookup"), "an integer"),
    **dict.fromkeys(("mode", "solver", "draft", "regex", "grammar"), "a text"),
    **dict.fromkeys(("slide", "next_token_seed", "ignore_eos"), "true or false"),
    "stop": "a text or a list of texts",
}
# Other fields of both protocols that are taken.
TAKEN = {
    "model": "a text",
    "stream": "true or false",
    "stream_options": "an object",
    "response_format": "an object",
    "return_token_ids": "true or false",
    "max_tokens": "an integer",
    "max_completion_tokens": "an integer",
    "min_tokens": "an integer",
    "logit_bias": "an object",
    "n": "an integer",
    # What changes no answer.
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "a text"),
    "metadata": "an object",
}
KINDS: dict[str, tuple[type, ...]] = {
    "a number": (int, float),
    "an integer": (int,),
    "a text": (str,),
    "true or false": (bool,),
    "a text or a list of texts": (str, list),
    "a text or a list": (str, list),
    "an object": (dict,),
    "a text or an object": (str, dict),
    "a list of messages": (list,),
    "a list of tools": (list,),
}
# Fields that are taken with a value that asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none", "auto"), "store": (False,),
    "service_tier": ("auto", "default"), "parallel_tool_calls": (True, False),
    "modalities": (["text"],), "verbosity": ("medium",),
}  # fmt: skip
TEXTS_OF_MESSAGE = {"reasoning_content", "tool_call_id", "name"}
# Fields of the one protocol, which users of the other give by mistake.
ELSEWHERE = {
    "prompt": "/v1/completions",
    "messages": "/v1/chat/completions",
    "chat_template_kwargs": "/v1/chat/completions",
    "top_logprobs": "/v1/chat/completions",
}
LARGEST = 2**63  # integers are below it, as seeds are
# What may still become a stop text is looked for at every length of every one of them.
MOST_STOPS, LONGEST_STOP = 16, 1_000
MOST_CHOICES = 256  # answers to one request

NO_SUCH_MODEL, TOO_LONG = "model_not_found", "context_length_exceeded"  # the protocol's words

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 100
shown = SHORT.repr


class Refused(Exception):
    """A request that can't be answered: why, the field if it is one, the HTTP status, and the
    protocol's word for it, if it has one.
    """

    def __init__(
        self, field: str | None, why: str, status: int = 400, code: str | None = None
    ) -> None:
        if field and not (field.isprintable() and len(field) <= 100):
            field = shown(field)
        super().__init__(f"{field} {why}" if field else why)
        self.field, self.status, self.code = field, status, code


@dataclass
class Asked:
    """What one request asks for, and the names of its fields. The handlers read max_new_tokens once
    an answer is there: an answer as long as that ended for its length.

    choices: answers to each prompt. row: of the sampling noise of this one. place: of its prompt
    among several, such as [2]. usage: whether a stream says it, in a chunk of its own; None: in the
    last one of the answer.
    settled: what the engine has made of it, for all answers to a prompt, or its refusal.
    """

    options: dict[str, Any]
    limit: int | None
    return_token_ids: bool
    fields: frozenset[str]
    choices: int = 1
    row: int = 0
    place: str = ""
    usage: bool | None = None
    settled: list[Any] = field(default_factory=list)
    max_new_tokens: int | None = None
    left: threading.Event = field(default_factory=threading.Event)  # nobody waits for it any more

    @property
    def prompt(self) -> str:
        """The field with the prompt, and its place there."""
        return f"prompt{self.place}" if "prompt" in self.fields else "messages"

    @property
    def limited_by(self) -> str:
        """The field with the limit."""
        return "max_completion_tokens" if "max_completion_tokens" in self.fields else "max_tokens"


def check(body: dict[str, Any], own: dict[str, str]) -> None:
    """Raises Refused unless all fields are known, of their type, and of a size that can be read.

    own: the kinds of the fields that the protocol at hand has besides.
    """
    kinds = {**OPTIONS, **TAKEN, **own}
    for name, value in body.items():
        if name in kinds:
            _check_value(name, value, kinds[name])
        elif name in ELSEWHERE:
            raise Refused(name, f"is for {ELSEWHERE[name]}")
        elif name not in NEUTRAL:
            raise Refused(name, "is not supported")
        elif not any(_same(value, one) for one in NEUTRAL[name]):
            allowed = " or ".join(map(repr, NEUTRAL[name]))
            raise Refused(name, f"is not supported, only {allowed}; got {shown(value)}")
    _check_stop(body.get("stop", []))
    _check_stream_options(body)
    if not 1 <= (choices := body.get("n", 1)) <= MOST_CHOICES:
        raise Refused("n", f"must be in 1..{MOST_CHOICES}, got {shown(choices)}")


def json_schema_of(form: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON Schema that a response_format asks for; None for any text.

    Raises: Refused.
    """
    place, kinds = "response_format", ("text", "json_object", "json_schema")
    more = {"json_schema"} if (kind := form.get("type")) == "json_schema" else set()
    if kind not in kinds:
        raise Refused(f"{place}.type", f"must be one of {', '.join(kinds)}, got {shown(kind)}")
    form = _checked_object(place, form, {"type", *more}, {})
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    place = f"{place}.json_schema"
    known = {"name", "description", "schema", "strict"}
    told = _checked_object(place, form.get("json_schema"), known, {})
    for name, own in (("name", "a text"), ("description", "a text"), ("strict", "true or false")):
        if name in told and type(told[name]) not in KINDS[own]:
            raise Refused(f"{place}.{name}", f"must be {own}, got {shown(told[name])}")
    if not isinstance(schema := told.get("schema"), dict):
        raise Refused(f"{place}.schema", f"must be an object, got {shown(schema)}")
    return schema


def biases_of(given: dict[str, Any]) -> dict[int, Any]:
    """What is added to the logits of tokens, whose ids are texts in JSON.

    Raises: Refused for what is no id.
    """
    if wrong := [one for one in given if not is_id(one)]:
        raise Refused("logit_bias", f"must be of token ids, got {shown(wrong[0])}")
    return {int(token): bias for token, bias in given.items()}


def is_id(text: str) -> bool:
    """Whether it is the one way to write a token's id."""
    return text.isascii() and text.isdecimal() and len(text) < 19 and str(int(text)) == text


def without_nulls(given: Any) -> Any:
    """An object without the fields that are null, which are as if they were not there."""
    if not isinstance(given, dict):
        return given
    return {name: value for name, value in given.items() if value is not None}


def check_message(place: str, message: Any) -> None:
    """Raises Refused for what is no message of a role and a text, or of calls of tools.

    Effects: leaves fields that are null out of the calls.
    """
    if not isinstance(message, dict):
        raise Refused(place, "must be an object with role and content")
    if not isinstance(role := message.get("role"), str):
        raise Refused(f"{place}.role", "must be a text")
    more = MORE_OF_ROLE.get(role, ())
    if unknown := set(message) - {"role", "content", *more}:
        allowed = ", ".join(("role", "content", *more))
        raise Refused(f"{place}.{min(unknown)}", f"is not supported, only {allowed}")
    for name in set(message) & TEXTS_OF_MESSAGE:
        if not isinstance(message[name], str):
            raise Refused(f"{place}.{name}", f"must be a text, got {shown(message[name])}")
    if "tool_calls" in message:
        calls, here = message["tool_calls"], f"{place}.tool_calls"
        if not isinstance(calls, list):
            raise Refused(here, f"must be a list of calls, got {shown(calls)}")
        checked = [_checked_call(f"{here}[{index}]", call) for index, call in enumerate(calls)]
        message["tool_calls"] = checked
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        raise Refused(f"{place}.content", "must be a text or a list of parts of type text")
    for index, part in enumerate(content):
        if unknown := set(part) - {"type", "text"}:
            name = f"{place}.content[{index}].{min(unknown)}"
            raise Refused(name, "is not supported, only type and text")


def _checked_call(place: str, call: Any) -> dict[str, Any]:
    """A call of a message, without what is null and its place in a stream."""
    call = _checked_object(place, call, {"id", "type", "function", "index"}, {"type": "function"})
    call.pop("index", None)
    here = f"{place}.function"
    function = _checked_object(here, call.get("function"), {"name", "arguments"}, {})
    texts = {f"{place}.id": call.get("id", "")}
    texts |= {f"{here}.{name}": function.get(name) for name in ("name", "arguments")}
    for where, value in texts.items():
        if not isinstance(value, str):
            raise Refused(where, f"must be a text, got {shown(value)}")
    given = arguments_of(function["arguments"])
    try:
        as_json(given).encode()
    except (UnicodeEncodeError, RecursionError):  # half of a character, which JSON may spell
        given = None
    if given is None:
        got = shown(function["arguments"])
        raise Refused(f"{here}.arguments", f"must be the JSON of an object, got {got}")
    return {**call, "function": function}


def checked_tools(tools: list[Any], strict: bool) -> list[dict[str, Any]]:
    """The tools as a chat template takes them, without what is null or asks for nothing.

    strict: whether arguments will be of the parameters' schema, which a tool may ask for then.
    Raises: Refused for what are no functions, each with a name and its parameters' schema.
    """
    return [_checked_tool(f"tools[{index}]", tool, strict) for index, tool in enumerate(tools)]


def forced_tools(choice: Any, tools: list[Any]) -> dict[str, dict[str, Any]]:
    """Those of the tools of which an answer has to call one, by their places; none where the model
    decides.

    choice: a request's tool_choice. Raises: Refused.
    """
    if choice in ("none", "auto"):
        return {}
    if not tools:
        raise Refused("tool_choice", f"must be auto or none without tools, got {shown(choice)}")
    if choice == "required":
        return {f"tools[{index}]": tool for index, tool in enumerate(tools)}
    if not isinstance(choice, dict):
        allowed = "auto, none, required or an object that names a function"
        raise Refused("tool_choice", f"must be {allowed}, got {shown(choice)}")
    if (kind := choice.get("type", "function")) != "function":
        raise Refused("tool_choice.type", f"is not supported, only 'function'; got {shown(kind)}")
    known, only = {"type", "function"}, {"type": "function"}
    choice = _checked_object("tool_choice", choice, known, only)
    function = _checked_object("tool_choice.function", choice.get("function"), {"name"}, {})
    names = [tool["function"]["name"] for tool in tools]
    if (name := function.get("name")) not in names:
        allowed = f"must be the name of a tool ({', '.join(names)})"
        raise Refused("tool_choice.function.name", f"{allowed}, got {shown(name)}")
    index = names.index(name)
    return {f"tools[{index}]": tools[index]}


def _checked_tool(place: str, tool: Any, strict: bool) -> dict[str, Any]:
    tool = _checked_object(place, tool, {"type", "function"}, {"type": "function"})
    place, known = f"{place}.function", {"name", "description", "parameters", "strict"}
    only = {} if strict else {"strict": False}
    function = _checked_object(place, tool.get("function"), known, only)
    if type(told := function.pop("strict", False)) is not bool:
        raise Refused(f"{place}.strict", f"must be true or false, got {shown(told)}")
    if not (isinstance(name := function.get("name"), str) and name):
        raise Refused(f"{place}.name", f"must be a text, got {shown(name)}")
    for name, kind in (("description", "a text"), ("parameters", "an object")):
        if name in function and type(function[name]) not in KINDS[kind]:
            raise Refused(f"{place}.{name}", f"must be {kind}, got {shown(function[name])}")
    properties = function.get("parameters", {}).get("properties", {})
    if not isinstance(properties, dict):
        where = f"{place}.parameters.properties"
        raise Refused(where, f"must be an object, got {shown(properties)}")
    for name, schema in properties.items():
        for union in ("anyOf", "oneOf"):
            found = schema.get(union, []) if isinstance(schema, dict) else []
            if not isinstance(found, list):
                where = f"{place}.parameters.properties.{name}.{union}"
                raise Refused(where, f"must be a list of schemas, got {shown(found)}")
    return {"type": "function", "function": function}


def _checked_object(
    place: str, value: Any, known: set[str], only: dict[str, Any]
) -> dict[str, Any]:
    """The object without fields that are null.

    Raises: Refused for what is none, has other fields than the known, or one of `only` with another
    value.
    """
    if not isinstance(value, dict):
        raise Refused(place, f"must be an object, got {shown(value)}")
    value = without_nulls(value)
    if unknown := set(value) - known:
        allowed = ", ".join(sorted(known))
        raise Refused(f"{place}.{min(unknown)}", f"is not supported, only {allowed}")
    for name, allowed in only.items():
        if not _same(value.get(name, allowed), allowed):
            got = shown(value[name])
            raise Refused(f"{place}.{name}", f"is not supported, only {allowed!r}; got {got}")
    return value


def as_json(value: Any) -> str:
    """As a template would see it: not escaped."""
    return json.dumps(value, ensure_ascii=False)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _check_value(name: str, value: Any, kind: str) -> None:
    """Type, size, and whether its texts are texts."""
    if type(value) not in KINDS[kind]:
        raise Refused(name, f"must be {kind}, got {shown(value)}")
    short = name in OPTIONS and name != "grammar"  # which has a limit of its own
    if short and isinstance(value, str) and len(value) > LONGEST_STOP:
        raise Refused(
            name, f"must be {kind} of at most {LONGEST_STOP} characters, got {len(value)}"
        )
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise Refused(name, f"must be {kind} below 2**63, got {shown(value)}")
    try:
        as_json(value).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Refused(name, f"must be Unicode text, got the lone surrogate {half!r}") from None
    except RecursionError:
        raise Refused(name, f"must be {kind}, got one that is nested too deeply") from None


def _check_stop(stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    longest = max((len(text) for text in stops if isinstance(text, str)), default=0)
    if len(stops) > MOST_STOPS or longest > LONGEST_STOP:
        got = f"{len(stops)} texts" if len(stops) > MOST_STOPS else f"one of {longest} characters"
        raise Refused(
            "stop",
            f"may be {MOST_STOPS} texts of at most {LONGEST_STOP} characters each, got {got}",
        )


def _check_stream_options(body: dict[str, Any]) -> None:
    options = body.get("stream_options", {})
    if unknown := set(options) - {"include_usage"}:
        raise Refused("stream_options", f"may hold include_usage, got {shown(min(unknown))}")
    if type(usage := options.get("include_usage", False)) is not bool:
        raise Refused("stream_options.include_usage", f"must be true or false, got {shown(usage)}")
    if "stream_options" in body and not body.get("stream"):
        raise Refused("stream_options", f"is for stream true, got {shown(options)} without it")
