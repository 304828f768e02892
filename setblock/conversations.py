"""What a chat template is asked for: which roles and fields messages have, how the text ends."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What a message may hold besides role and content.
MORE_OF_ROLE = {
    **dict.fromkeys(("system", "developer", "user", "function"), ("name",)),
    "assistant": ("tool_calls", "reasoning_content", "name"),
    "tool": ("tool_call_id", "name"),
}


def check_roles(template: Any, turns: Sequence[Mapping[str, Any]]) -> None:
    """Raises: ValueError for a role that is none of ROLES and that the template does not name.

    Many templates take any role, and a misspelt one would be text that no model has seen.
    """
    texts = template.values() if isinstance(template, Mapping) else [str(template)]
    for number, turn in enumerate(turns):
        role = turn["role"]
        # As in: {% if message['role'] == 'ipython' %}
        named = re.compile(rf"role\b[^%}}]{{0,80}}['\"]{re.escape(role)}['\"]")
        if role not in ROLES and not any(map(named.search, texts)):
            raise ValueError(
                f"message {number} has the role {role!r}, which is none of {', '.join(ROLES)}, nor "
                "one that the chat template names"
            )


def prepared(
    template: Any, turns: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the messages, the other arguments of `apply_chat_template`) for a model to speak next.

    The text ends with the model's cue, or open behind a last message of its own, for the model to
    go on with; one that says nothing is left out.
    Raises: ValueError as check_roles.
    """
    check_roles(template, turns)
    messages = [dict(turn) for turn in turns]
    own = bool(messages) and messages[-1]["role"] == "assistant"
    if own and not _says_something(messages[-1]["content"]):
        messages, own = messages[:-1], False
    return messages, {"add_generation_prompt": not own, "continue_final_message": own}


BOTH = {"role", "content"}


def to_row(message: Any) -> dict[str, str]:
    """A message for a column of one schema: role, content and "more", the rest as JSON, if any.

    Arguments of calls, which may be text in JSON, become objects, as chat templates want them.
    Raises: ValueError for what is no message.
    """
    given = {name: value for name, value in dict(message).items() if value is not None}
    if given.get("tool_calls") == []:
        del given["tool_calls"]
    turn = {name: given.pop(name) for name in dict(message) if name in given and name in BOTH}
    if calls := given.get("tool_calls"):
        turn.setdefault("content", "")
    if not (turn.keys() == BOTH and all(isinstance(text, str) for text in turn.values())):
        raise ValueError("role and content must be text")
    if unknown := given.keys() - MORE_OF_ROLE.get(turn["role"], ()):
        raise ValueError(f"{min(unknown)} is not supported of role {turn['role']}")
    if wrong := [name for name in given if name != "tool_calls" and type(given[name]) is not str]:
        raise ValueError(f"{wrong[0]} must be text")
    if calls is not None:
        if not isinstance(calls, list):
            raise ValueError("tool_calls must be a list")
        given["tool_calls"] = [_with_arguments(call) for call in calls]
    return turn | ({"more": json.dumps(given, ensure_ascii=False)} if given else {})


def from_row(turn: Mapping[str, str]) -> dict[str, Any]:
    """The message that to_row made this of."""
    more = json.loads(turn.get("more") or "{}")
    return {"role": turn["role"], "content": turn["content"], **more}


def arguments_of(given: Any) -> dict[str, Any] | None:
    """The object that a call's arguments are, or that they are the JSON of; None for others."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) else None


def _with_arguments(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("a call in tool_calls must be an object with a function that has a name")
    if (arguments := arguments_of(function.get("arguments"))) is None:
        raise ValueError(
            f"the arguments of a call of {function['name']} must be an object, or one in JSON"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _says_something(content: str | Sequence[Mapping[str, Any]]) -> bool:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return any(text.strip() for text in texts)


def refusal(error: Exception) -> str:
    """Why a template, which is a program and may raise anything, refuses a conversation."""
    why = " ".join((str(error) or type(error).__name__).split())
    return why.partition("Final message to continue:")[0].strip()  # and all of the others
