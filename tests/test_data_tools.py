"""Conversations that call tools, to train on: read from files and tables, put into templates."""

import json
from typing import Any

import pytest
from conftest import copied
from datasets import Dataset
from test_data import TALK, TEMPLATE, read, tokenizer, write
from trainings import QUICK
from trl.chat_template_utils import get_training_chat_template, qwen3_chat_template

from setblock.conversations import from_row
from setblock.data import prepare
from setblock.rows import fingerprint, load_rows, with_answers


def tool(name: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(name: str, arguments: Any) -> Any:
    return [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]


ASKED = {"role": "user", "content": "Rain?"}
TOOLS = [tool("weather", city={"type": "string"})]
WEATHER: list[Any] = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": called("weather", {"city": "Köln"})},
    {"role": "tool", "tool_call_id": "1", "content": "wet"},
    {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."},
]
CLOCK = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "So:", "tool_calls": called("clock", {"zone": None, "n": 2})},
]
ROWS: list[Any] = [
    {"messages": WEATHER, "tools": TOOLS},
    {"messages": TALK},
    {"messages": CLOCK, "tools": [tool("clock", zone={"type": "string"}, n={"type": "integer"})]},
]


def in_words(rows: list[Any]) -> list[Any]:
    """The rows with tools and arguments as JSON, and with fields that are null or empty."""
    made = json.loads(json.dumps(rows))
    for row in made:
        row["tools"] = json.dumps(row.get("tools", []))
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message.setdefault("tool_calls", [] if message["role"] == "assistant" else None)
            message.setdefault("name", None)
    return made


def filled(rows: list[Any]) -> list[Any]:
    """The rows, with a content in each message."""
    return [
        {**row, "messages": [{"content": "", **message} for message in row["messages"]]}
        for row in rows
    ]


def chats(*files: str) -> list[Any]:
    """(messages, tools) of each row that is read."""
    return [
        ([from_row(turn) for turn in row["messages"]], json.loads(row["tools"] or "null"))
        for row in read(*files)
    ]


def prepared(*files: str, template: str = qwen3_chat_template) -> list[Any]:
    return prepare(load_rows(files), tokenizer(template)).to_list()


def learned(row: Any) -> str:
    pairs = zip(row["input_ids"], row["completion_mask"], strict=True)
    return str(tokenizer().decode([token for token, on in pairs if on]))


def test_a_model_s_template_shows_tools_and_calls(tmp_path):
    """Qwen's, in the form for training: calls are learned, what the tools give is not."""
    weather, talk, clock = prepared(write(tmp_path / "rows.jsonl", ROWS))
    made = tokenizer(qwen3_chat_template)
    for row, given in ((weather, ROWS[0]), (clock, ROWS[2])):
        messages, tools = given["messages"], given["tools"]
        whole: Any = made.apply_chat_template(
            messages, tools=tools, tokenize=False, chat_template=get_training_chat_template(made)
        )
        assert row["input_ids"] == made.encode(whole, add_special_tokens=False)
        assert "# Tools" in whole
    said = learned(weather)
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in said
    assert "Yes." in said
    assert "wet" not in said
    assert "Rain?" not in said
    assert '{"zone": null, "n": 2}' in learned(clock)
    [alone] = prepared(write(tmp_path / "talk.jsonl", [{"messages": TALK}]))
    assert talk == alone


def test_the_same_from_other_forms(tmp_path):
    """Arguments and tools as JSON; a table, which fills up what some rows lack; several files."""
    expected = chats(write(tmp_path / "rows.jsonl", ROWS))
    assert expected == [(row["messages"], row.get("tools")) for row in filled(ROWS)]
    assert chats(write(tmp_path / "words.jsonl", in_words(ROWS))) == expected
    parts = [write(tmp_path / f"{n}.jsonl", [row]) for n, row in enumerate(ROWS)]
    assert chats(*parts) == expected
    assert chats(*reversed(parts)) == expected[::-1]
    Dataset.from_list(in_words(ROWS)).to_parquet(str(tmp_path / "words.parquet"))
    assert chats(str(tmp_path / "words.parquet")) == expected
    # A table knows no argument that is null from one that is missing.
    rows = json.loads(json.dumps(ROWS).replace("null", '"UTC"'))
    table = [{"messages": row["messages"], "tools": row.get("tools")} for row in rows]
    Dataset.from_list(table).to_parquet(str(tmp_path / "rows.parquet"))
    expected = chats(write(tmp_path / "utc.jsonl", rows))
    assert chats(str(tmp_path / "rows.parquet")) == expected
    assert chats(str(tmp_path / "rows.parquet"), parts[1]) == [*expected, expected[1]]


def test_a_limit_may_leave_out_the_rows_with_tools(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"messages": TALK}, ROWS[0]])
    [row] = with_answers(load_rows([file], limit=1)).remove_columns("where").to_list()
    assert row == {"prompt": TALK[:-1], "completion": TALK[-1:]}
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: tools are not supported in --decode-da"):
        with_answers(load_rows([file]))


def test_rows_without_tools_are_as_ever(tmp_path):
    plain = [{"messages": TALK}]
    empty = [{"messages": [{**turn, "name": None} for turn in TALK], "tools": []}]
    assert read(write(tmp_path / "empty.jsonl", empty)) == plain
    Dataset.from_list([{"messages": TALK, "tools": None}]).to_parquet(str(tmp_path / "a.parquet"))
    assert read(str(tmp_path / "a.parquet")) == plain
    table = [{"messages": [{**turn, "tool_calls": None} for turn in TALK], "tools": None}]
    Dataset.from_list(table).to_parquet(str(tmp_path / "b.parquet"))
    assert read(str(tmp_path / "b.parquet")) == plain
    assert read(str(tmp_path / "b.parquet"), prompts_only=True) == [{"prompt": TALK[:-1]}]
    empty, both = str(tmp_path / "empty.jsonl"), write(tmp_path / "rows.jsonl", ROWS)
    assert read(str(tmp_path / "b.parquet"), empty) == plain * 2
    assert chats(str(tmp_path / "b.parquet"), both) == [(TALK, None), *chats(both)]
    pairs = [{"prompt": "a", "completion": "b", "tools": []}]
    Dataset.from_list(pairs).to_parquet(str(tmp_path / "c.parquet"))
    assert read(str(tmp_path / "c.parquet")) == [{"prompt": "a", "completion": "b"}]
    other = [{"messages": [dict(reversed(turn.items())) for turn in TALK]}]
    assert fingerprint(load_rows([write(tmp_path / "o.jsonl", other)])).endswith("9a16f6e150fa1b91")
    assert fingerprint(load_rows([write(tmp_path / "p.jsonl", plain)])).endswith("7581746252f1e892")


def test_without_marks_a_turn_is_what_the_template_adds(tmp_path):
    template = "{% if tools %}{{ tools | tojson }}</s>{% endif %}" + TEMPLATE.replace(
        "</s>{% endfor %}",
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}</s>"
        "{% endfor %}",
    )
    weather, *_ = prepared(write(tmp_path / "rows.jsonl", ROWS), template=template)
    said = '{"name": "weather", "arguments": {"city": "Köln"}}</s>Yes.</s>'
    assert learned(weather) == said
    needs = template.replace("{% if tools %}{{ tools | tojson }}</s>{% endif %}", "{{ tools[0] }}")
    file = write(tmp_path / "weather.jsonl", ROWS[:1])
    assert learned(prepared(file, template=needs)[0]) == said


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE, r"rows\.jsonl:1: the model's chat template leaves out tools"),
        (
            "{{ tools }}" + TEMPLATE,
            r"rows\.jsonl:1: the model's chat template leaves out message 1's calls",
        ),
    ],
)
def test_templates_that_do_not_know_tools(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        prepared(write(tmp_path / "rows.jsonl", ROWS), template=template)


def assistant(**more: Any) -> Any:
    return {"messages": [ASKED, {"role": "assistant", **more}]}


NOTHING_ELSE = "nothing else but tool_calls and reasoning_content of the assistant's, "


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{**ASKED, "tool_calls": called("f", {})}]}, NOTHING_ELSE),
        ({"messages": ["hi"]}, "one is str"),
        (assistant(), "role and content must be text"),
        (assistant(content="", tool_calls=[]), "messages hold an empty message of the assistant"),
        (assistant(content="", reasoning_content="Hm."), "hold an empty message of the assistant"),
        (assistant(content="a", refusal="b"), "refusal is not supported of role assistant"),
        (assistant(content="a", reasoning_content=3), "reasoning_content must be text"),
        (assistant(tool_calls={"a": 1}), "tool_calls must be a list"),
        (assistant(tool_calls=[3]), "a call in tool_calls must be an object with a function"),
        (
            assistant(tool_calls=[{"name": "f"}]),
            "must be an object with a function that has a name",
        ),
        (
            assistant(tool_calls=called("f", "[1]")),
            "the arguments of a call of f must be an object",
        ),
        (assistant(tool_calls=called("f", "{")), "the arguments of a call of f must be an object"),
        (
            assistant(content="a") | {"tools": {"a": 1}},
            "tools must be a list of objects, or one in",
        ),
        (assistant(content="a") | {"tools": "[1"}, "tools must be a list of objects, or one in JS"),
        (assistant(content="a") | {"tools": [3]}, "tools must be a list of objects, or one in JSO"),
        (assistant(tool_calls=called("f", "[" * 100_000)), "the arguments of a call of f must be"),
        (assistant(content="a") | {"tools": "[" * 100_000}, "tools must be a list of objects, or"),
        ({"text": "a", "tools": TOOLS}, "tools are supported in rows of messages alone"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, row, message):
    file = write(tmp_path / "rows.jsonl", [{"messages": TALK} if "messages" in row else row, row])
    with pytest.raises(ValueError, match=r"rows\.jsonl:[12]: .*" + message):
        load_rows([file])


def test_where_tools_are_not_supported(tmp_path):
    file = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="not with answers of the model's own"):
        load_rows([file], prompts_only=True)
    bare = write(tmp_path / "bare.jsonl", [{"messages": WEATHER}])
    with pytest.raises(ValueError, match="both text, and nothing else"):
        load_rows([bare], prompts_only=True)


def test_the_command_trains_on_them(checkpoint, tmp_path, run):
    saved = checkpoint("qwen3", mask_token="<mask>")
    model = copied(saved, tmp_path / "qwen", "config.json", max_position_embeddings=2048)
    (model / "chat_template.jinja").write_text(qwen3_chat_template, encoding="utf-8")
    rows = write(tmp_path / "rows.jsonl", ROWS)
    words = ["train", "--model", model, "--data", rows, *QUICK.split(), "--max-length", "1024"]
    judged = ["--eval-data", rows, "--eval-strategy", "steps", "--json"]
    assert run(*words, *judged, "--output-dir", tmp_path / "out").json["steps"] == 3
    held_out = ["--decode-data", rows, "--decode-every", "1", "--output-dir", tmp_path / "b"]
    assert "rows.jsonl:1: tools are not supported in --decode-data" in run(*words, *held_out).error
