"""What a chat template is asked for: which roles messages have, and how the text ends."""

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


def without_blank(turns: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The conversation without a last message of the assistant's that says nothing."""
    if not turns or turns[-1]["role"] != "assistant":
        return turns
    content = turns[-1]["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return turns if any(text.strip() for text in texts) else turns[:-1]


def ending_of(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How a chat template is to end: with the model's cue, or open behind a last turn of its own,
    for the model to go on with. The arguments of `apply_chat_template`.
    """
    own = bool(turns) and turns[-1]["role"] == "assistant"
    return {"add_generation_prompt": not own, "continue_final_message": own}
