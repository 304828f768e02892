"""What a chat template is asked for: which roles messages have, how the text ends."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


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


def _says_something(content: str | Sequence[Mapping[str, Any]]) -> bool:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return any(text.strip() for text in texts)


def refusal(error: Exception) -> str:
    """Why a template, which is a program and may raise anything, refuses a conversation."""
    why = " ".join((str(error) or type(error).__name__).split())
    return why.partition("Final message to continue:")[0].strip()  # and all of the others
