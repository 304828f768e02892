"""Rows -> what the trainer takes: conversations in the model's chat template, turns told apart.

Only completions and assistant turns have a loss.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError
from trl.chat_template_utils import get_training_chat_template

from setblock.conversations import check_roles, from_row
from setblock.rows import talks

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def prepare(rows: Dataset, tokenizer: Any, chat: bool = False) -> Dataset:
    """Rows of load_rows as the trainer takes them: conversations tokenised, turns told apart.

    chat: put prompt and completion strings into the tokenizer's chat template.
    Raises: ValueError without a chat template, and naming the row for one that fails or that
    rewrites earlier turns.
    """
    places = rows["where"]
    rows = rows.remove_columns("where")
    first = rows[0]
    if chat and isinstance(first.get("prompt"), str):
        rows = rows.map(_as_turns, desc="Chat turns")
        first = rows[0]
    if not talks(rows):
        if chat:
            raise ValueError("--chat needs rows of prompt and completion, or of messages")
        return rows
    if tokenizer.chat_template is None:
        what, way = "messages need", "give the data as prompt and completion texts"
        if chat:
            what, way = "prompts go into", "leave out --chat (with speedup, give --plain)"
        raise ValueError(
            f"{what} a chat template, and the model's tokenizer has none: {way}, or train a model "
            "with a template"
        )
    if "messages" not in first:
        # trl renders the prompt alone and knows where the completion begins; it would not say
        # which row its template refuses.
        for where, row in zip(places, rows, strict=True):
            turns: Any = row
            if turns["prompt"] and turns["prompt"][-1]["role"] == "assistant":
                raise ValueError(
                    f"{where}: the prompt's last message is the assistant's: what it begins with "
                    "belongs into the completion"
                )
            _render(tokenizer, turns["prompt"] + turns.get("completion", []), where)
        return rows
    return rows.map(
        lambda row, index: conversation(
            tokenizer,
            [from_row(turn) for turn in row["messages"]],
            places[index],
            json.loads(row.get("tools") or "null"),
        ),
        with_indices=True,
        remove_columns=rows.column_names,
        desc="Tokenizing conversations",
    )


def conversation(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    where: str = "a conversation",
    tools: list[Any] | None = None,
) -> dict[str, list[int]]:
    """Token ids of a conversation, and a mask that is 1 on what the assistant says.

    The template's own marks say what that is, or those of the form of it that trl knows for
    training. Without any, a turn is what the template adds to the conversation so far, with the
    assistant's cue.
    Raises: ValueError that begins with `where`, if the template refuses the conversation, leaves
    out its tools or calls, or renders an earlier turn otherwise once later ones follow, so that
    turns can't be told apart.
    """
    _check_tools(tokenizer, messages, where, tools)
    given: dict[str, Any] = {"tools": tools} if tools else {}
    if (template := _marked_template(tokenizer)) is not None:
        marked = _render(
            tokenizer,
            messages,
            where,
            tokenize=True,
            **given,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        if 1 not in marked["assistant_masks"]:
            raise ValueError(f"{where}: no assistant turn to learn from")
        return {"input_ids": marked["input_ids"], "completion_mask": marked["assistant_masks"]}
    text, ids, mask = "", [], []
    whole = _render(tokenizer, messages, where, **given)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        cue = _render(tokenizer, messages[:number], where, add_generation_prompt=True, **given)
        said = _render(tokenizer, messages[: number + 1], where, **given)
        if not (cue.startswith(text) and said.startswith(cue) and whole.startswith(said)):
            raise ValueError(
                f"{where}: the chat template renders turn {number} otherwise once more turns "
                "follow; give such data as prompt and completion"
            )
        for longer, learned in ((cue, 0), (said, 1)):
            # What follows depends on what was before, in tokenizers that mark the start of a text.
            tokens = tokenizer.encode(longer, add_special_tokens=False)
            if tokens[: len(ids)] != ids:  # a token across the border: a turn begins a new one
                tokens = ids + tokenizer.encode(longer[len(text) :], add_special_tokens=False)
            mask += [learned] * (len(tokens) - len(ids))
            ids, text = tokens, longer
    if not any(mask):
        raise ValueError(f"{where}: no assistant turn to learn from")
    return {"input_ids": ids, "completion_mask": mask}


def _check_tools(
    tokenizer: Any, messages: list[dict[str, Any]], where: str, tools: list[Any] | None
) -> None:
    """Raises: ValueError if the chat template renders the same without tools, or without a call."""
    if not tools and not any(message.get("tool_calls") for message in messages):
        return
    given: dict[str, Any] = {"tools": tools} if tools else {}
    whole = _render(tokenizer, messages, where, **given)

    def same(others: list[dict[str, Any]], **given: Any) -> bool:
        try:
            return _render(tokenizer, others, where, **given) == whole
        except ValueError:  # a template may want tools, or the call that a result belongs to
            return False

    if tools and same(messages):
        raise ValueError(f"{where}: the model's chat template leaves out tools")
    for number, message in enumerate(messages):
        if not message.get("tool_calls"):
            continue
        silent = {name: value for name, value in message.items() if name != "tool_calls"}
        if same([*messages[:number], silent, *messages[number + 1 :]], **given):
            raise ValueError(
                f"{where}: the model's chat template leaves out message {number}'s calls"
            )


def _marked_template(tokenizer: Any) -> str | None:
    """The chat template with {% generation %} marks: its own, or trl's of the same model."""
    if GENERATION.search(tokenizer.chat_template):
        return tokenizer.chat_template
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # a template that trl does not know
        return None


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], where: str, tokenize: bool = False, **more: Any
) -> Any:
    """The conversation in the tokenizer's chat template, whose errors name the place."""
    try:
        check_roles(tokenizer.chat_template, messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, **more)
    except (TemplateError, ValueError, TypeError) as error:
        raise ValueError(f"{where}: the chat template refuses it: {error}") from error


def _as_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    roles = {"prompt": "user", "completion": "assistant"}
    return {name: [{"role": roles[name], "content": text}] for name, text in row.items()}
