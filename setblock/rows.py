"""Rows of files or of the hub to train on, with errors that say where.

Rows are {"text"}, {"prompt", "completion"} or {"messages"}, the last with "tools" if they call any;
prompt and completion may be lists of messages too.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from huggingface_hub import constants

from setblock.conversations import to_row

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".parquet")
SURROGATE = re.compile("[\ud800-\udfff]")  # json.loads lets a lone one pass
Formats = tuple[tuple[str, ...], ...]
FORMATS: Formats = (("prompt", "completion"), ("messages",), ("text",))
PROMPTS: Formats = (("prompt",), ("messages",))


def load_rows(
    names: Sequence[str],
    split: str = "train",
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    limit: int | None = None,
    prompts_only: bool = False,
    own: str | None = None,
) -> Dataset:
    """The rows of these files or hub datasets, one after the other, in one of FORMATS.

    Of several that fit it is the first. A column more, "where", names the file and line of each, or
    the dataset and row. Where any row calls tools, there is a column "tools", of JSON or "", and
    messages are as `conversations.to_row` makes them, which `prepare` takes back.

    A hub dataset's configuration follows a colon: openai/gsm8k:main.
    prompt_field, completion_field: names that those two columns have in the data.
    limit: the first rows only.
    prompts_only: rows of a prompt, or else of messages, whatever other columns they have but tools.
    They come as prompts; of messages an answer that comes last is left out.
    own: the one of the names whose columns have the usual names in any case.
    Raises: ValueError naming file and line, or the dataset, for what can't be read or has no rows.
    """
    parts = []
    formats = PROMPTS if prompts_only else FORMATS
    given = {prompt_field: "prompt", completion_field: "completion"}
    for name in names:
        renamed = {} if name == own else given
        path = Path(os.path.expanduser(name))  # where nobody is at home it stays
        if path.suffix in SUFFIXES and not path.is_file():
            raise ValueError(f"no file {name!r}")
        if path.suffix in (".jsonl", ".json"):
            read: list[dict[str, Any]] = []
            places: Any = []
            for where, row in _json_rows(path):
                places.append(where)
                row = _checked(row, where, renamed, formats)
                read.append(_asked(row, where) if prompts_only else row)
                if _kind(read[-1]) != _kind(read[0]):
                    raise ValueError(
                        f"{where}: a row of {_kind(read[-1])} in a file that began with "
                        f"{_kind(read[0])}"
                    )
            if not read:
                raise ValueError(f"{name} holds no rows")
            if any(map(_calls, read)):
                read = [_filled(row) for row in read]
            parts.append(Dataset.from_list(read).add_column("where", places))
            continue
        try:
            if path.suffix == ".parquet":
                dataset: Any = Dataset.from_parquet(str(path))
            elif path.exists():
                raise ValueError(f"not one of {', '.join(SUFFIXES)}")
            else:
                if not constants.HF_HUB_OFFLINE:
                    log.warning("no file %s here: asking the Hugging Face hub for it", name)
                dataset = load_dataset(*name.split(":", 1), split=split)
        except Exception as error:  # every reader and the hub raise classes of their own
            sought = "" if path.exists() else "there is no such file here, and from the hub: "
            why = " ".join(str(error).split())
            raise ValueError(f"can't read data {name!r}: {sought}{why}") from error
        if not len(dataset):
            raise ValueError(f"{name} holds no rows")
        old = {new: name for name, new in renamed.items() if name in dataset.column_names}
        columns = [
            old.get(column, column) for column in _format(dataset[0], name, renamed, formats)
        ]
        columns += ["tools"] if "tools" in dataset.column_names else []
        dataset = dataset.select_columns(columns)
        dataset = dataset.rename_columns({c: renamed[c] for c in columns if c in renamed})
        places = [f"{name}: row {number}" for number in range(len(dataset))]
        called = changed = False
        for where, row in zip(places, dataset, strict=True):
            checked = _checked(_sparse(row), where, {}, formats)
            called |= _calls(checked)
            changed |= checked.get("messages") != row.get("messages")  # by nulls left out
        if called or changed:
            dataset = _chats(dataset, places, formats, called)
        elif "tools" in columns:
            dataset = dataset.remove_columns("tools")
        if prompts_only and not isinstance(dataset[0].get("prompt"), str):
            dataset = _chats_asked(dataset, places)
        parts.append(dataset.add_column("where", places))
    kinds = {_kind({k: v for k, v in part[0].items() if k != "where"}) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"data of different formats: {'; '.join(sorted(kinds))}")
    if any("tools" in part.column_names for part in parts):
        parts = [
            part if "tools" in part.column_names else part.map(_filled, desc="Chats without tools")
            for part in parts
        ]
    rows = concatenate_datasets(parts)
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def fingerprint(rows: Dataset) -> str:
    """Tells rows of load_rows from others, wherever they stand."""
    digest = hashlib.sha256()
    for row in rows.remove_columns("where"):
        digest.update(json.dumps(row).encode() + b"\n")
    return f"{len(rows)} rows, sha256 {digest.hexdigest()[:16]}"


def with_answers(rows: Dataset) -> Dataset:
    """Rows of load_rows as prompts and completions; of messages the last is the completion.

    Raises: ValueError for texts, and naming the row for messages that end with no answer.
    """
    if "prompt" in rows.column_names:
        return rows
    if "messages" not in rows.column_names:
        raise ValueError(f"{rows[0]['where']}: a text holds no prompt to be answered")

    def parted(row: Mapping[str, Any]) -> dict[str, Any]:
        if row.get("tools") or any(turn.get("more") for turn in row["messages"]):
            raise ValueError(f"{row['where']}: tools are not supported in --decode-data")
        turns = [{name: turn[name] for name in ("role", "content")} for turn in row["messages"]]
        *asked, said = turns
        if not asked or said["role"] != "assistant":
            raise ValueError(f"{row['where']}: messages must end with the assistant's answer")
        return {"prompt": asked, "completion": [said]}

    columns = [name for name in rows.column_names if name != "where"]
    return rows.map(parted, remove_columns=columns, desc="Chat prompts")


def talks(rows: Dataset) -> bool:
    """Whether these rows of load_rows are turns, which go through the chat template in any case."""
    first = rows[0]
    return "messages" in first or isinstance(first.get("prompt"), list)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line or row, value) of a JSONL file or a JSON list."""
    try:
        content = path.read_bytes()
        try:
            text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(f"line {line} is not in UTF-8: {error}") from error
        if path.suffix == ".json":
            values = json.loads(text)
            if not isinstance(values, list):
                raise ValueError("not a list of rows")
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(values))
            return
    except ValueError as error:  # JSON and UTF-8
        raise ValueError(f"{path}: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):  # JSON texts hold other breaks
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error


def _format(row: Any, where: str, renamed: dict[str, str], formats: Formats) -> tuple[str, ...]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be an object, got {type(row).__name__}")
    names = {renamed.get(name, name) for name in row}
    for columns in formats:
        if names >= set(columns):
            return columns
    wanted = " or ".join(" and ".join(columns) for columns in formats)
    found = ", ".join(row)
    if formats == PROMPTS:
        hint = " (--prompt-field names another column)"
    elif "conversations" in names:
        hint = " (conversations: as messages, each of role and content)"
    elif "prompt" in names and (named := _missing(row, renamed)):
        hint = f" (no column {named!r})"
    elif "prompt" in names:
        hint = " (prompts alone: --answers model)"
    else:
        hint = " (--prompt-field and --completion-field name other columns)"
    raise ValueError(f"{where}: a row needs {wanted}; this one has {found or 'nothing'}{hint}")


def _missing(row: Mapping[str, Any], renamed: dict[str, str]) -> str | None:
    """A column that --prompt-field or --completion-field names and the row has not."""
    usual = {"prompt", "completion"}
    return next((name for name in renamed if name not in row and name not in usual), None)


def _asked(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What is asked in a row of PROMPTS; of messages all but an answer that comes last."""
    [turns] = row.values()
    if not isinstance(turns, str):
        turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
        if not turns:
            raise ValueError(f"{where}: messages ask nothing: there is an answer alone")
    return {"prompt": turns}


def _chats_asked(dataset: Dataset, places: list[str]) -> Dataset:
    """`_asked` of each row."""

    def asked(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        return _asked(row, places[number])

    return dataset.map(
        asked,
        with_indices=True,
        remove_columns=dataset.column_names,
        desc="Chat prompts",
    )


def _kind(row: dict[str, Any]) -> str:
    return " and ".join(
        f"{name} ({'messages' if isinstance(value, list) else 'text'})"
        for name, value in row.items()
        if name != "tools"
    )


def _calls(row: Mapping[str, Any]) -> bool:
    """Whether a row that was checked has tools, or messages more than role and content."""
    messages = row.get("messages", [])
    return "tools" in row or any("more" in message for message in messages)


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of messages with all that any of its kind has."""
    messages = [{"more": "", **message} for message in row["messages"]]
    return {**row, "messages": messages, "tools": row.get("tools", "")}


def _chats(dataset: Dataset, places: list[str], formats: Formats, called: bool) -> Dataset:
    """The rows as they are checked, without what is null. called: `_filled`."""

    def row_of(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        checked = _checked(_sparse(row), places[number], {}, formats)
        return _filled(checked) if called else checked

    text = Value("string")
    turn = {"role": text, "content": text} | ({"more": text} if called else {})
    features = Features({"messages": [turn]} | ({"tools": text} if called else {}))
    old = dataset.column_names
    return dataset.map(
        row_of, with_indices=True, remove_columns=old, features=features, desc="Chats"
    )


def _sparse(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a table, its messages and tools without fields that other rows have."""
    chat = ("messages", "tools")
    return {name: _without_nulls(one) if name in chat else one for name, one in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _checked(row: Any, where: str, renamed: dict[str, str], formats: Formats) -> dict[str, Any]:
    """The row's columns of its format; refuses empty answers and messages without role."""
    columns = _format(row, where, renamed, formats)
    tools = row.get("tools")
    if tools and (formats == PROMPTS or columns != ("messages",)):
        raise ValueError(
            f"{where}: tools are supported in rows of messages alone, and not with answers of the "
            "model's own"
        )
    old = {new: name for name, new in renamed.items() if name in row}
    row = {name: row[old.get(name, name)] for name in columns}
    if columns == ("messages",) and formats != PROMPTS and isinstance(row["messages"], list):
        row["messages"] = [_turn(message, where) for message in row["messages"]]
        if tools and (given := _tools(tools, where)):
            row["tools"] = given
    for name, value in row.items():
        if name == "messages" and isinstance(value, list) and formats != PROMPTS:
            for message in value:
                said = message["content"].strip() or message["role"] != "assistant"
                if not said and "tool_calls" not in json.loads(message.get("more", "{}")):
                    raise ValueError(f"{where}: {name} hold an empty message of the assistant's")
        elif isinstance(value, list) and name != "text":
            for message in value:
                known = isinstance(message, dict) and {"role", "content"} == message.keys()
                if not (known and all(isinstance(text, str) for text in message.values())):
                    raise ValueError(
                        f"{where}: {name} must be messages of role and content, both text, and "
                        "nothing else"
                    )
        elif not isinstance(value, str) or name == "messages":
            kinds = {"messages": "a list of messages", "text": "text"}
            kind = kinds.get(name, "text, or a list of messages")
            raise ValueError(f"{where}: {name} must be {kind}, got {type(value).__name__}")
        if SURROGATE.search(json.dumps(value, ensure_ascii=False)):
            raise ValueError(f"{where}: {name} holds half of a surrogate pair, which is no text")
        said = value.strip() if name == "completion" and isinstance(value, str) else value
        if not said and (name != "prompt" or isinstance(value, list)):
            raise ValueError(f"{where}: {name} is empty")
        if name == "completion" and isinstance(value, list):
            roles = [message["role"] for message in value]
            if roles != ["assistant"]:
                raise ValueError(
                    f"{where}: a completion must be one assistant message, got {roles}; give "
                    "several turns as messages"
                )
            if not value[0]["content"].strip():
                raise ValueError(f"{where}: completion is empty")
    if len({isinstance(row.get(name), list) for name in columns}) > 1:
        raise ValueError(f"{where}: prompt and completion must both be texts or both messages")
    return row


def _turn(message: Any, where: str) -> dict[str, str]:
    try:
        if not isinstance(message, dict):
            raise ValueError(f"one is {type(message).__name__}")
        return to_row(message)
    except ValueError as error:
        raise ValueError(
            f"{where}: messages must be messages of role and content, both text, and nothing else "
            "but tool_calls and reasoning_content of the assistant's, tool_call_id and name of a "
            f"tool's: {error}"
        ) from None


def _tools(tools: Any, where: str) -> str:
    """A row's tools, which may be JSON already."""
    try:
        given = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError):
        given = None
    if not (isinstance(given, list) and all(isinstance(tool, dict) for tool in given)):
        raise ValueError(f"{where}: tools must be a list of objects, or one in JSON")
    return json.dumps(given, ensure_ascii=False) if given else ""
