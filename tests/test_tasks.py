"""Benchmark tasks: rows read as they are, prompts, and answers of every kind judged."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from setblock.tasks import TASKS, DataRows, Item, code_of, load_items, read_rows

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\nSo $1,205.\n#### 1,205"},
    "svamp": {"ID": "c-1", "Body": "Dave has 3", "Question": "How many?", "Answer": 5.0},
    "math": {
        "problem": "What is $1/2 + 1/4$?",
        "solution": "It is $\\boxed{\\frac{3}{4}}$.",
        "idx": 7,
    },
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "import math\n\ndef area(r):\n    '''Of a disc.'''\n",
        "canonical_solution": "    return math.pi * r * r\n",
        "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-4\n",
        "entry_point": "area",
    },
    "mbpp": {
        "task_id": 601,
        "text": "Write a function to double a number.",
        "code": "def double(x):\r\n    return 2 * x",
        "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
        "test_setup_code": "",
    },
    "answers": {"prompt": "How many?", "completion": "2 + 3 = 5, so 5."},
    "prompts": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
}


def item(name: str) -> Item:
    return TASKS[name].read(ROWS[name], 1)


def right(name: str, text: str) -> bool:
    check = TASKS[name].check
    assert check is not None
    return check(item(name), text)


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"prompts"}))
def test_the_worked_answer_is_right_and_nothing_is_wrong(name) -> None:
    assert right(name, item(name).answer)
    for text in ("", "\n\n", "I do not know.", item(name).prompt[:5], "#### ", "\\boxed{}", "```"):
        assert not right(name, text)


def test_every_task_has_a_row_here() -> None:
    assert set(ROWS) == set(TASKS)


def test_answers_are_final_numbers_or_whole_texts() -> None:
    check: Any = TASKS["answers"].check
    form = {"prompt": [{"role": "user", "content": "Hi"}]}
    said = {"completion": [{"role": "assistant", "content": " yes\n"}]}
    text = TASKS["answers"].read(form | said, 1)
    assert (text.prompt, text.answer) == ("Hi", " yes\n")
    assert check(text, "yes")
    assert not check(text, "yes, 5")
    assert right("answers", "It is five: 5.0")
    assert right("answers", "The answer is 5. It took 3 steps.")
    for worked, good, bad in (
        (
            "5 < 3, so the answer is no",
            "Compare 3, 5: the answer is no.",
            "5 < 3: the answer is yes",
        ),
        ("1, 2: the answer is no", "**no**", "no, 5"),
        ("#### Paris", "The answer is Paris.", "#### Rome"),
        ("In words. Answer: it is", "it is", "Answer: it is not"),
        ("The answer is as follows:\n5", "5", "The answer is as follows:\n6"),
        ("So the answer is:\n7 apples", "7", "8"),
        ("#### 5\nI hope this answer is helpful!", "#### 5", "helpful"),
        ("So x = \\boxed{42}. This answer is correct.", "#### 42", "correct"),
        ("#### 5 (the answer is in dollars)", "5", "#### 6 (the answer is in dollars)"),
        ("The answer is: yes", "Answer: **Yes**.", "Answer: no"),
        ("2 + 2 = 4, so \\boxed{no}", "The answer is no.", "2 + 2 = 4, so \\boxed{yes}"),
        ("**Answer**: Paris", "paris\u00a0", "#### Rome"),
        ("The answer is (B), the 2nd", "2", "1"),
        ("...", "...", ""),
    ):
        found = TASKS["answers"].read({"prompt": "a", "completion": worked}, 1)
        assert check(found, worked)
        assert check(found, good)
        assert not check(found, bad)
    for text in ("The answer is" + " " * 9000 + "\nseven", "answer: " * 9000 + "\nx"):
        TASKS["answers"].read({"prompt": "a", "completion": text}, 1)  # in less than years
    kept = {"prompt": "not asked", "messages": said_by("a", "5")}
    assert TASKS["answers"].read(kept, 1).prompt == "a"
    for wrong in (
        {"completion": ""},
        {"completion": [{"role": "assistant"}]},
        {},
        {"completion": 5},
    ):
        with pytest.raises(ValueError, match="not of task answers"):
            load_items(TASKS["answers"], DataRows("x", "", (form | wrong,)))


def said_by(*texts: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_of_a_chat_the_last_answer_is_asked_for() -> None:
    task = TASKS["answers"]
    system = {"role": "system", "content": "Be brief."}
    turns = said_by("2 + 3?", "5", "And twice that?", "10")
    whole = task.read({"messages": [system, *turns]}, 4)
    parted = task.read({"prompt": [system, *turns[:-1]], "completion": turns[-1:]}, 4)
    for one in (whole, parted):
        assert (one.key, one.prompt, one.answer, one.target) == ("4", "And twice that?", "10", 10)
        assert task.prompt(one, (), True) == [system, *turns[:-1]]
        for examples, chat in (((), False), ((one,), True)):
            with pytest.raises(ValueError, match=r"need chat turns and no examples: leave out"):
                task.prompt(item("answers") if examples else one, examples, chat)
    assert task.prompt(task.read({"messages": turns[:2]}, 1), (), False) == "2 + 3?"
    for wrong, message in (
        ({"messages": turns[:3]}, "messages must be user's and assistant's, got assistant's"),
        ({"messages": turns[:1]}, "messages must be a text or a list of messages, 2 or more, got"),
        ({"messages": [turns[0], turns[0]]}, "messages must be user's and assistant's, got user's"),
        ({"prompt": turns[:1], "completion": turns[:1]}, "user's and assistant's, got user's"),
        ({"prompt": [system], "completion": "5"}, "user's and assistant's, got system's"),
        ({"prompt": ["a"], "completion": "5"}, "messages of role and content, texts that are not"),
        ({"prompt": "a", "completion": "\ud800"}, "surrogates not allowed"),
        ("a", "a row must be an object, got 'a'"),
        ({"prompt": [], "completion": "5"}, "prompt must be a text or a list of messages, 1 or mo"),
        ({"prompt": "a", "completion": turns}, "completion must be .* messages, 1, got"),
        (
            {"messages": [*said_by("a"), {"role": "assistant", "content": " "}]},
            "that are not empty",
        ),
    ):
        with pytest.raises(ValueError, match=f"x, row 1: not of task answers: .*{message}"):
            load_items(task, DataRows("x", "", (wrong,)))


@pytest.mark.parametrize("name", ["answers", "prompts"])
@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [*said_by("a"), {"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [*said_by("a"), {"role": "tool", "content": "b"}, *said_by("c")]},
    ],
)
def test_conversations_with_tools_are_refused(name, more) -> None:
    rows = DataRows("x", "", ({"messages": said_by("a"), **more},))
    with pytest.raises(ValueError, match=r"x, row 1: not of task .*: conversations with tools are"):
        load_items(TASKS[name], rows)


def test_rows_of_a_prompt_file_have_no_right_answer() -> None:
    assert TASKS["prompts"].check is None
    assert item("prompts").prompt == "Write."


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Write."}, "Write."),
        (
            {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}]},
            "Hi",
        ),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n\n1, 2"),
        ({"instruction": "Write.", "input": ""}, "Write."),
        ({"prompt": [{"role": "user", "content": "Hi"}]}, "Hi"),
        ({"instruction": None, "messages": None, "prompt": "Write."}, "Write."),
    ],
)
def test_prompts_of_other_forms(row, prompt) -> None:
    assert TASKS["prompts"].read(row, 3) == Item("3", prompt, "", None)


def test_numbers_are_compared_by_value() -> None:
    assert right("gsm8k", "#### 1205.00")
    assert right("gsm8k", "It makes $1205")
    assert not right("gsm8k", "#### 205")
    assert not right("gsm8k", "#### 12055")
    assert right("svamp", "#### 5.0")
    assert item("svamp").prompt == "Dave has 3, How many?"
    assert item("gsm8k").answer == "2 + 3 = 5\nSo $1,205.\n#### 1,205"


@pytest.mark.parametrize(
    "text",
    [
        "$\\frac{6}{8}$",
        "0.75",
        "so \\boxed{3/4}",
        "\\boxed{0.75}",
        "First \\boxed{3}. Then \\boxed{\\frac{3}{4}}.",
    ],
)
def test_expressions_are_compared_by_value(text) -> None:
    assert right("math", text)


@pytest.mark.parametrize("text", ["\\boxed{\\frac{3}{5}}", "\\boxed{", "{" * 500, "$x$"])
def test_wrong_and_broken_expressions(text) -> None:
    assert not right("math", text)


AREA = "def area(r):\n    return math.pi * r * r"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{AREA}\n```",
        f"Sure!\n```python\nimport math\n{AREA}\n```\nIt squares r.",
        f"```\nprint('no')\n```\nor\n```py\n{AREA}\n```",
        f"```python\n{AREA}",  # cut off
        AREA,
        "    return math.pi * r ** 2\n",
        "    return math.pi * r * r\ndef check(candidate):\n    raise SystemExit",
    ],
)
def test_functions_in_any_wrapping(text) -> None:
    assert right("humaneval", text)


@pytest.mark.parametrize(
    "text",
    [
        "    return 3",
        "def volume(r):\n    return 3.14159",
        "    pass\nimport sys\nsys.exit(0)",
        "    while True: pass",
        f"```python\n{AREA.replace('*', '+')}\n```",
    ],
)
def test_wrong_functions(text) -> None:
    assert not right("humaneval", text)


def test_programs_and_their_asserts() -> None:
    assert right("mbpp", "```python\ndef double(x):\n    return x + x\n```")
    assert right("mbpp", "def double(x): return x + x")
    assert not right("mbpp", "def double(x): return x + 2")
    setup = TASKS["mbpp"].read(ROWS["mbpp"] | {"test_setup_code": "two = 2"}, 1)
    check = TASKS["mbpp"].check
    assert check is not None
    assert check(setup, "def double(x): return two * x")
    made = TASKS["mbpp"].read(ROWS["mbpp"] | {"test_setup_code": "two = Two()"}, 1)
    assert check(
        made, "class Two(int):\n    def __new__(cls): return 2\ndef double(x): return two * x"
    )


def test_code_of_an_answer() -> None:
    assert code_of("x = 1") == "x = 1"
    assert code_of("```\na\n```\n```\nb\n```") == "a\n"
    assert code_of("```\na\n```\n```\ndef f(): pass\n```", "f") == "def f(): pass\n"


# Prompts


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", TASKS)
def test_prompts_with_examples(name, chat) -> None:
    task = TASKS[name]
    if name == "answers" and not chat:
        with pytest.raises(ValueError, match=r"^task answers: .* where an answer ends: leave out"):
            task.prompt(item(name), [item(name)], chat)
        return
    texts: Any = [task.prompt(item(name), [item(name)] * count, chat) for count in (0, 2)]
    alone, two = texts
    assert item(name).prompt in alone
    assert "{" not in alone.replace("\\boxed{}", "")
    assert two.endswith("\n\n" + alone)
    assert two.count(item(name).prompt) == 3
    assert two.count(item(name).answer) >= 2


# Files


def test_files_of_every_kind(tmp_path) -> None:
    rows = [ROWS["gsm8k"], ROWS["gsm8k"] | {"question": "What?"}]
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    expected = [TASKS["gsm8k"].read(row, number) for number, row in enumerate(rows, start=1)]
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        assert load_items(TASKS["gsm8k"], read_rows(tmp_path / name)) == expected
        assert load_items(TASKS["gsm8k"], read_rows(tmp_path / name), limit=1) == expected[:1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gsm8k", "", "no rows"),
        ("gsm8k", "{broken", "neither JSON nor JSONL"),
        ("gsm8k", '{"a": 1}\n\n{"a":', r"neither JSON nor JSONL \(line 3, column 6: Expecting"),
        ("gsm8k", '{"question": "q"}', "row 1: not of task gsm8k: no field 'answer'"),
        ("gsm8k", '{"question": "q", "answer": "none"}', "row 1: .* holds no number"),
        ("svamp", json.dumps(ROWS["svamp"] | {"Answer": "x"}), "row 1: .* 'x' is no number"),
        ("math", json.dumps(ROWS["math"] | {"solution": "4"}), "row 1: .* has no .boxed answer"),
        ("prompts", '{"question_id": 1, "turns": []}', "row 1: not of task prompts"),
        ("prompts", '{"question_id": 1, "turns": "Hi"}', "turns must be a list, got 'Hi'"),
        ("prompts", '{"text": "Hi"}', "no field turns, messages, prompt or instruction"),
        ("prompts", '{"prompt": ""}', "prompt must hold a user's text that is not empty, got ''"),
        ("prompts", '{"prompt": [{"role": "user"}]}', "prompt must hold a user's text that is"),
        ("prompts", '{"messages": [{"role": "system"}]}', "messages must hold a user's text"),
        ("prompts", '{"messages": [null]}', "messages must hold a user's text"),
        ("prompts", '{"messages": []}', "messages must hold a user's text that is not empty, got"),
        ("prompts", '{"instruction": 5}', "instruction must hold a user's text that is not empty"),
        ("prompts", '"Hi"', "row 1: not of task prompts"),
        ("gsm8k", '{"question": null, "answer": "#### 1"}', "row 1: not of task gsm8k"),
        ("svamp", '{"Body": 5, "Question": "q", "Answer": 1}', "row 1: not of task svamp"),
        ("svamp", '{"Body": "b", "Question": "q", "Answer": "NaN"}', "'NaN' is no number"),
        (
            "mbpp",
            '{"task_id": 1, "text": "t", "code": "c", "test_list": "assert 1"}',
            "test_list must be a list of texts, got 'assert 1'",
        ),
        ("gsm8k", "[" * 100_000, "neither JSON nor JSONL"),
        (
            "humaneval",
            json.dumps(ROWS["humaneval"] | {"entry_point": "f("}),
            "entry_point must be a function's name, got 'f\\('",
        ),
        (
            "mbpp",
            '{"task_id": 1, "text": "t", "code": "c", "test_list": []}',
            r"test_list must be a list of texts, got \[\]",
        ),
        (
            "mbpp",
            json.dumps(ROWS["mbpp"] | {"test_setup_code": 5}),
            "test_setup_code must be a text, got 5",
        ),
        ("math", json.dumps(ROWS["math"] | {"solution": "\\boxed{"}), "has no .boxed answer"),
        ("gsm8k", json.dumps({"question": "\ud800", "answer": "#### 1"}), "row 1: not of task"),
        ("mbpp", "[1, 2]", "row 1: not of task mbpp"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name, content, message) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_items(TASKS[name], read_rows(file))


def test_a_hub_dataset(monkeypatch):
    asked = []

    def load_dataset(*words, split):
        asked.append((*words, split))
        return [ROWS["gsm8k"]]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows = read_rows("openai/gsm8k:main", "train")
    assert asked == [("openai/gsm8k", "main", "train")]
    assert rows.name == "openai/gsm8k:main"
    assert load_items(TASKS["gsm8k"], rows)[0].target == 1205
    assert read_rows("owner/other").sha256 == rows.sha256
    assert asked[1] == ("owner/other", "test")


def test_a_hub_dataset_that_can_not_be_had():
    with pytest.raises(ValueError, match="can't read data 'nobody/nothing': "):
        read_rows("nobody/nothing")
    with pytest.raises(OSError, match="No such file"):
        read_rows("nobody/nothing.jsonl")


def test_a_parquet_file(tmp_path):
    file = tmp_path / "rows.parquet"
    Dataset.from_list([ROWS["gsm8k"]]).to_parquet(str(file))
    rows = read_rows(file)
    assert (rows.name, rows.sha256) == (file.name, hashlib.sha256(file.read_bytes()).hexdigest())
    assert load_items(TASKS["gsm8k"], rows)[0].target == 1205
    file.write_text("no table")
    with pytest.raises(ValueError, match=r"can't read data '.*rows\.parquet': "):
        read_rows(file)


def test_rows_with_odd_breaks_and_a_mark(tmp_path):
    """U+2028 and U+0085 are no ends of lines in JSONL; a byte order mark is none of its text."""
    row = json.dumps({**ROWS["gsm8k"], "question": "a\u2028b\u0085c"}, ensure_ascii=False)
    file = tmp_path / "rows.jsonl"
    file.write_text(row + "\n", encoding="utf-8-sig")
    assert load_items(TASKS["gsm8k"], read_rows(file))[0].prompt == "a\u2028b\u0085c"
    file.write_text("[]")
    with pytest.raises(ValueError, match="no rows"):
        load_items(TASKS["gsm8k"], read_rows(file))
