"""Answers that have to call a tool: a grammar of the one call that they are.

How a model writes a call is what its chat template makes of one.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from setblock.conversations import refusal
from setblock.fields import Refused
from setblock.grammar import spaced
from setblock.model import Model

# A call of these arguments is shown to the chat template, and looked for in what it makes of it.
PROBE = {"setblock": 0}
WRITTEN = re.compile(r'\{\s*"setblock"\s*:\s*0\s*\}')
# Keywords of a schema that may have properties somewhere else.
ELSEWHERE = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
# Some templates want an id of just this kind.
ID = "call00000"


def grammar_of_calls(
    model: Model,
    tools: Sequence[dict[str, Any]],
    prompt: str,
    answered: Callable[[dict[str, Any]], str],
    reads: Callable[[str, str], bool],
) -> str:
    """In llguidance's Lark, an answer that is one call of one of these tools, with arguments of its
    parameters' schema; none that this does not name, unless it says that there may be more.

    prompt: the conversation up to where the model speaks. answered: the text of it with this
    message behind it. reads: whether an answer is read as a call of this name with arguments PROBE.
    Raises: Refused where the chat template does not show how the model writes calls.
    """
    rules = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        before, after = _around(model, function["name"], prompt, answered)
        if not reads(f"{before}{json.dumps(PROBE)}{after}", function["name"]):
            raise _refused("which the model's response_template does not read as it writes them")
        schema = {**function.get("parameters", {}), "type": "object"}
        if schema.keys().isdisjoint(ELSEWHERE):
            schema.setdefault("additionalProperties", False)
        try:
            schema = spaced(schema)
        except ValueError as error:
            raise Refused("tools", f"can't be used: {error}") from None
        rules += [
            f"call{number}: {_lark(model, before)} arguments{number} {_lark(model, after)}",
            f"arguments{number}: %json {json.dumps(schema)}",
        ]
    calls = " | ".join(f"call{number}" for number in range(len(tools)))
    return "\n".join([f"start: {calls}", *rules])


def _around(
    model: Model, name: str, prompt: str, answered: Callable[[dict[str, Any]], str]
) -> tuple[str, str]:
    """What the chat template writes before and behind the arguments of a call, its end left out."""
    call = {"id": ID, "type": "function", "function": {"name": name, "arguments": PROBE}}
    try:
        text = answered({"role": "assistant", "content": "", "tool_calls": [call]})
    except Exception as error:  # a template is a program, and may raise anything
        raise _refused(f"which refuses a call behind this conversation: {refusal(error)}") from None
    if not text.startswith(prompt):
        raise _refused("in which no call can be the answer to this conversation")
    ends = model.tokenizer.convert_ids_to_tokens(sorted(model.eos_token_ids))
    answer = text[len(prompt) :]
    answer = answer[: min((answer.index(end) for end in ends if end in answer), default=None)]
    found = WRITTEN.findall(answer)
    if len(found) != 1:
        raise _refused("which does not write a call's arguments as JSON")
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
