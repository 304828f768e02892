"""Benchmark tasks: rows of a file -> prompts, and whether an answer is right.

A task's `version` counts changes of its prompts and of its check, and stands in every record. The
rows are those of the public files: GSM8K, SVAMP, MATH, HumanEval, MBPP, and the prompts of MT-bench
and Spec-Bench, which have no right answer and serve to measure speed; or prompts and completions as
for training.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Any

from setblock.endings import answers_alike, final_answer, final_number, last_box
from setblock.execution import passes


@dataclass(frozen=True)
class Item:
    """A question with its worked answer, which serves as an example, and what a check compares.

    before: (role, content) of the messages of a chat before the question.
    """

    key: str
    prompt: str
    answer: str
    target: Any
    before: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Task:
    """How rows become questions, how a question is put, and when an answer is right.

    read: (row, its number) -> Item; raises KeyError for a row of another form.
    chat, plain: the user's turn, and the text that the answer continues, of "{prompt}".
    check: None where there is no right answer.
    stop: texts that end an answer in plain form, where a model goes on with the next question.
    """

    name: str
    version: int
    read: Callable[[Mapping[str, Any], int], Item]
    chat: str
    plain: str
    check: Callable[[Item, str], bool] | None
    stop: tuple[str, ...] = ()

    def prompt(
        self, item: Item, examples: Sequence[Item], chat: bool
    ) -> str | list[dict[str, str]]:
        """The text of a question behind solved examples; as messages where some come before it.

        Raises: ValueError for such messages without chat, or as an example, and for examples in
            plain text where no `stop` ends an answer.
        """
        if any(one.before for one in (*examples, *([] if chat else [item]))):
            raise ValueError(
                f"task {self.name}: rows of several messages need chat turns and no examples: "
                "leave out --plain and --shots, or give rows of texts"
            )
        form = self.chat if chat else self.plain
        solved = [f"{form.format(prompt=one.prompt)}\n{one.answer}\n\n" for one in examples]
        if solved and not chat and self.check and not self.stop:
            raise ValueError(
                f"task {self.name}: behind examples in plain text nothing says where an answer "
                "ends: leave out --plain or --shots"
            )
        text = "".join(solved) + form.format(prompt=item.prompt)
        if not item.before:
            return text
        turns = (*item.before, ("user", text))
        return [{"role": role, "content": content} for role, content in turns]


SUFFIXES = (".json", ".jsonl", ".gz", ".txt", ".parquet")  # never a hub name's


@dataclass(frozen=True)
class DataRows:
    """The rows of a file or a hub dataset, not looked at yet.

    sha256: of the file's bytes, or of the rows as JSON.
    """

    name: str
    sha256: str
    rows: tuple[Any, ...]


def read_rows(data: str | Path, split: str = "test") -> DataRows:
    """A JSON, JSONL, gzipped JSONL or Parquet file, or a hub dataset, owner/name[:config].

    split: of a hub dataset.
    Raises: ValueError for what can't be read; OSError for a file that is not there.
    """
    path = Path(data)
    if not path.exists() and str(data).count("/") == 1 and path.suffix not in SUFFIXES:
        return _hub_rows(str(data), split)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if path.suffix == ".parquet":
        return DataRows(
            path.name,
            digest,
            _loaded(str(data), lambda datasets: datasets.Dataset.from_parquet(str(path))),
        )
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:  # not splitlines: a text may hold other breaks
            rows = [
                _row(line, number)
                for number, line in enumerate(text.split("\n"), 1)
                if line.strip()
            ]
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise ValueError(f"{path}: neither JSON nor JSONL ({error})") from error
    return DataRows(path.name, digest, tuple(rows))


def _row(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error


def _hub_rows(name: str, split: str) -> DataRows:
    words = name.split(":", 1)
    rows = _loaded(name, lambda datasets: datasets.load_dataset(*words, split=split))
    content = json.dumps(rows, sort_keys=True, default=str)
    return DataRows(name, hashlib.sha256(content.encode()).hexdigest(), rows)


def _loaded(name: str, read: Callable[[Any], Iterable[Any]]) -> tuple[Any, ...]:
    """The rows that `read` gets from the library datasets."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name} is read by the library datasets: make setup in the checkout, or "
            "pip install '.[eval]'"
        ) from error
    try:
        return tuple(read(datasets))
    except Exception as error:  # every reader and the hub raise classes of their own
        raise ValueError(f"can't read data {name!r}: {' '.join(str(error).split())}") from error


def load_items(task: Task, data: DataRows, limit: int | None = None) -> list[Item]:
    """The items of the rows.

    Raises: ValueError naming source and row for a row that is not of the task's form.
    """
    items = []
    for number, row in enumerate(data.rows[:limit], start=1):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"a row must be an object, got {row!r}")
            item = task.read(row, number)
            if not isinstance(item.prompt, str) or not item.prompt.strip():
                raise ValueError(f"the question must be a text, got {item.prompt!r}")
            for text in (item.prompt, item.answer, *(text for _, text in item.before)):
                text.encode()  # half of a surrogate pair is no text
            items.append(item)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            wrong = f"no field {error}" if isinstance(error, KeyError) else str(error)
            place = f"{data.name}, row {number}"
            raise ValueError(f"{place}: not of task {task.name}: {wrong}") from error
    if not items:
        raise ValueError(f"{data.name}: no rows")
    return items


# Answers in numbers and words


def _answers(row: Mapping[str, Any], number: int) -> Item:
    """A row of training data: prompt and completion, texts or messages, or messages alone.

    What a chat's last message answers is the question; the messages before it stay before it.
    """
    _check_no_tools(row)
    if row.get("messages") is not None and row.get("completion") is None:
        *asked, said = _messages(row["messages"], "messages", 2)
    else:
        asked = _messages(row["prompt"], "prompt", 1)
        [said] = _messages(row["completion"], "completion", 1, 1, "assistant")
    *before, (role, question) = asked
    for found, wanted in ((role, "user"), (said[0], "assistant")):
        if found != wanted:
            raise ValueError(f"the last messages must be user's and assistant's, got {found}'s")
    return Item(str(number), question, said[1], final_answer(said[1]), tuple(before))


def _messages(
    value: Any, name: str, least: int, most: int | None = None, role: str = "user"
) -> list[tuple[str, str]]:
    """(role, content) of each message; a text is one of this role."""
    turns = [{"role": role, "content": value}] if isinstance(value, str) else value
    count = f"{least} or more" if most is None else str(most)
    if not isinstance(turns, list) or not least <= len(turns) <= (most or len(turns)):
        raise ValueError(f"{name} must be a text or a list of messages, {count}, got {value!r}")
    found = []
    for turn in turns:
        parts = (turn.get("role"), turn.get("content")) if isinstance(turn, Mapping) else ()
        if not (parts and all(isinstance(text, str) and text.strip() for text in parts)):
            raise ValueError(
                f"{name} must hold messages of role and content, texts that are not empty, got "
                f"{turn!r}"
            )
        found.append(parts)
    return found


def _check_no_tools(row: Mapping[str, Any]) -> None:
    """Raises: ValueError for a row whose prompt or answer would be another one without them."""
    lists = (row.get(name) for name in ("messages", "prompt", "completion"))
    turns = [turn for turns in lists if isinstance(turns, list) for turn in turns]
    called = (
        turn.get("tool_calls") or turn.get("role") == "tool"
        for turn in turns
        if isinstance(turn, Mapping)
    )
    if row.get("tools") not in (None, "", "[]", []) or any(called):
        raise ValueError("conversations with tools are not supported")


def _same_answer(item: Item, text: str) -> bool:
    return answers_alike(text, item.target)


def _same_number(item: Item, text: str) -> bool:
    return final_number(text) == item.target


def _gsm8k(row: Mapping[str, Any], number: int) -> Item:
    target = final_number(row["answer"])
    if target is None:
        raise ValueError("the answer holds no number")
    answer = re.sub(r"<<[^<>]*>>", "", row["answer"])  # a calculator's notes
    return Item(str(number), row["question"], answer, target)


def _svamp(row: Mapping[str, Any], number: int) -> Item:
    body = row["Body"].strip()
    question = body + (" " if body.endswith((".", "?", "!", ",")) else ", ") + row["Question"]
    try:
        target = Decimal(str(row["Answer"]))
        if not target.is_finite():
            raise InvalidOperation
    except InvalidOperation:
        raise ValueError(f"the answer {row['Answer']!r} is no number") from None
    shown = target.to_integral_value() if target == target.to_integral_value() else target
    return Item(str(row.get("ID", number)), question, f"#### {shown}", Fraction(target))


def _math(row: Mapping[str, Any], number: int) -> Item:
    if (boxed := last_box(row["solution"])) is None:
        raise ValueError("the solution has no \\boxed answer")
    target = f"\\boxed{{{boxed}}}"
    return Item(str(row.get("idx", number)), row["problem"], row["solution"], target)


def _same_expression(item: Item, text: str) -> bool:
    """By math-verify, which parses LaTeX and compares values."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError(
            "task math needs math-verify: pip install '.[eval]' in the checkout"
        ) from error
    if (boxed := last_box(text)) is not None:
        text = f"\\boxed{{{boxed}}}"  # of several, which it would take together
    return bool(verify(parse(item.target), parse(text)))


# Programs


def code_of(text: str, name: str | None = None) -> str:
    """The program in an answer: the fenced block that defines `name`, else the first, else all."""
    blocks = re.findall(r"```[^\n`]*\n(.*?)(?:```|\Z)", text, flags=re.DOTALL)
    named = [block for block in blocks if name and re.search(rf"\bdef {name}\b", block)]
    return (named or blocks or [text])[0]


def _humaneval(row: Mapping[str, Any], number: int) -> Item:
    target = {name: row[name] for name in ("prompt", "test", "entry_point")}
    if not str(target["entry_point"]).isidentifier():
        raise ValueError(f"entry_point must be a function's name, got {target['entry_point']!r}")
    return Item(str(row["task_id"]), row["prompt"], row["canonical_solution"], target)


def _runs(item: Item, text: str) -> bool:
    """Whether the tests pass; the answer is the whole function, or the rest of the prompt's."""
    prompt, name = item.target["prompt"], item.target["entry_point"]
    code = code_of(text, name)
    whole = re.search(rf"^def {name}\b", code, flags=re.MULTILINE)
    # What the prompt defines beside the function, such as imports, counts for whole ones too.
    program = prompt.partition(f"def {name}")[0] + code if whole else prompt + code
    return passes(program, f"{item.target['test']}\ncheck({name})")


def _mbpp(row: Mapping[str, Any], number: int) -> Item:
    if not isinstance(row["test_list"], list) or not row["test_list"]:
        raise ValueError(f"test_list must be a list of texts, got {row['test_list']!r}")
    if not isinstance(row.get("test_setup_code", ""), str):
        raise ValueError(f"test_setup_code must be a text, got {row['test_setup_code']!r}")
    tests = "\n".join(row["test_list"])
    target = {"setup": row.get("test_setup_code", ""), "tests": tests}
    prompt = f"{row['text']}\nIt must pass these tests:\n{tests}"
    return Item(str(row["task_id"]), prompt, f"```python\n{row['code']}\n```", target)


def _passes_asserts(item: Item, text: str) -> bool:
    # The setup of some tasks makes objects of a class that the answer has to define.
    return passes(code_of(text), item.target["setup"] + "\n" + item.target["tests"])


PROMPT_FIELDS = ("turns", "messages", "prompt", "instruction")


def _prompts(row: Mapping[str, Any], number: int) -> Item:
    """A prompt: the first of `turns` or `messages`, `prompt`, or `instruction` with its `input`."""
    _check_no_tools(row)
    given = [name for name in PROMPT_FIELDS if row.get(name) is not None]
    if not given:
        raise ValueError(f"no field {', '.join(PROMPT_FIELDS[:-1])} or {PROMPT_FIELDS[-1]}")
    name = given[0]
    value = text = row[name]
    if name in ("turns", "messages") or isinstance(value, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {value!r}")
        said = (
            [one for one in value if isinstance(one, str)]
            if name == "turns"
            else [
                one.get("content")
                for one in value
                if isinstance(one, Mapping) and one.get("role") == "user"
            ]
        )
        text = said[0] if said else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} must hold a user's text that is not empty, got {value!r}")
    if name == "instruction" and (more := row.get("input")):
        text = f"{text}\n\n{more}"
    return Item(str(row.get("question_id", number)), text, "", None)


NUMBER = "{prompt}\n\nSolve it step by step. Write the final number in a last line behind ####."
QUESTION = ("\nQuestion:", "\n\n\n")
TASKS = {
    task.name: task
    for task in (
        Task(
            *("gsm8k", 6, _gsm8k, NUMBER, "Question: {prompt}\nAnswer:"),
            check=_same_number,
            stop=QUESTION,
        ),
        Task(
            *("svamp", 6, _svamp, NUMBER, "Question: {prompt}\nAnswer:"),
            check=_same_number,
            stop=QUESTION,
        ),
        Task(
            *("math", 4, _math),
            chat="{prompt}\n\nSolve it step by step. Put the final answer into \\boxed{{}}.",
            plain="Problem: {prompt}\nSolution:",
            check=_same_expression,
            stop=("\nProblem:",),
        ),
        Task(
            *("humaneval", 1, _humaneval),
            chat="Complete this Python function. Answer with the whole function in a code block."
            "\n\n```python\n{prompt}```",
            plain="{prompt}",
            check=_runs,
            stop=("\nclass ", "\ndef ", "\nif ", "\nprint(", "\n#"),
        ),
        Task(
            *("mbpp", 2, _mbpp),
            chat="{prompt}\n\nAnswer with the Python code in a code block.",
            plain="Task: {prompt}\nCode:",
            check=_passes_asserts,
            stop=("\nTask:",),
        ),
        Task("answers", 4, _answers, "{prompt}", "{prompt}", check=_same_answer),
        Task("prompts", 1, _prompts, "{prompt}", "{prompt}", check=None),
    )
}
