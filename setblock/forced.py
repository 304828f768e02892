"""Answers that have to call a tool: a grammar of the one call that they are.

How a model writes a call is what its chat template makes of one.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from setblock.conversations import refusal
from setblock.fields import Refused, shown
from setblock.grammar import check_schema
from setblock.model import Model
from setblock.reading import LONGEST_FORM, spaced

# A call of these arguments is shown to the chat template, and looked for in what it makes of it.
PROBE = {"setblock": 0}
WRITTEN = re.compile(r'\{\s*"setblock"\s*:\s*0\s*\}')
# Of a schema with no other keywords the properties that it names are all there are.
PLAIN = {
    "type",
    "properties",
    "required",
    "title",
    "description",
    "$defs",
    "definitions",
    "$schema",
}
# Some templates want an id of just this kind.
ID = "call00000"


def grammar_of_calls(
    model: Model,
    tools: Mapping[str, dict[str, Any]],
    prompt: str,
    answered: Callable[[dict[str, Any]], str],
    reads: Callable[[str, str], bool],
) -> str:
    """In llguidance's Lark, an answer that is one call of one of these tools, with arguments of its
    parameters' schema; of a PLAIN one, with none that it does not name.

    tools: by their places in the request. prompt: the conversation up to where the model speaks.
    answered: the text of it with this message behind it. reads: whether an answer is read as a call
    of this name with arguments PROBE.
    Raises: Refused where the chat template does not show how the model writes calls, or for a
    schema that can't be followed.
    """
    rules = []
    for number, (place, tool) in enumerate(tools.items()):
        function = tool["function"]
        name = function["name"]
        before, after = _around(model, name, prompt, answered)
        if not reads(f"{before}{json.dumps(PROBE)}{after}", name):
            raise _refused(f"which writes a call of {name!r} as the response_template reads none")
        schema = _schema(f"{place}.function.parameters", function.get("parameters", {}))
        rules += [
            f"call{number}: {_lark(model, before)} arguments{number} {_lark(model, after)}",
            f"arguments{number}: %json {json.dumps(schema, ensure_ascii=False)}",
        ]
    calls = " | ".join(f"call{number}" for number in range(len(tools)))
    grammar = "\n".join([f"start: {calls}", *rules])
    if len(grammar) > LONGEST_FORM:
        most = f"must have at most some {LONGEST_FORM:,} characters, where one has to be called"
        raise Refused("tools", f"{most}, got {len(grammar):,}")
    return grammar


def _schema(place: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """That of a call's arguments. Raises: Refused for one that llguidance can't follow."""
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise Refused(f"{place}.type", f"must be 'object', got {shown(kinds)}")
    schema = {**parameters, "type": "object"}
    named, needed = schema.get("properties", {}), schema.get("required", [])
    if schema.keys() <= PLAIN and isinstance(needed, list) and set(map(str, needed)) <= set(named):
        schema["additionalProperties"] = False
    try:
        schema = spaced(schema)
        check_schema(schema)
    except (ValueError, RecursionError) as error:
        raise Refused(place, f"can't be used: {error}") from None
    return schema


def _around(
    model: Model, name: str, prompt: str, answered: Callable[[dict[str, Any]], str]
) -> tuple[str, str]:
    """What the chat template writes before and behind the arguments of a call, its end left out."""
    call = {"id": ID, "type": "function", "function": {"name": name, "arguments": PROBE}}
    try:
        text = answered({"role": "assistant", "content": "", "tool_calls": [call]})
    except Exception as error:  # a template is a program, and may raise anything
        raise _refused(f"which refuses a call of {name!r} here: {refusal(error)}") from None
    if not text.startswith(prompt):
        raise _refused(f"in which a call of {name!r} can't be the answer to this conversation")
    ends = model.tokenizer.convert_ids_to_tokens(sorted(model.eos_token_ids))
    answer = text[len(prompt) :]
    answer = answer[: min((answer.index(end) for end in ends if end in answer), default=None)]
    found = WRITTEN.findall(answer)
    if len(found) != 1:
        raise _refused(f"which does not write the arguments of a call of {name!r} as JSON")
    before, _, after = answer.partition(found[0])
    return before, after


def _lark(model: Model, text: str) -> str:
    """A literal, with tokens that the tokenizer knows as a whole by their ids."""
    added = {str(token): id for id, token in model.tokenizer.added_tokens_decoder.items()}
    if not added:
        return json.dumps(text)
    longest_first = sorted(map(re.escape, added), key=len, reverse=True)
    parts = re.split(f"({'|'.join(longest_first)})", text)
    return " ".join(f"<[{added[p]}]>" if p in added else json.dumps(p) for p in parts if p) or '""'


def _refused(why: str) -> Refused:
    return Refused("tool_choice", f"must be auto or none with this chat template, {why}")
