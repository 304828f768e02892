"""Training data: formats, conversations, and errors that name the place."""

import json
import re

import pytest
from conftest import make_tokenizer

from setblock.data import conversation, prepare
from setblock.rows import fingerprint, load_rows

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]
# An assistant's turn is marked, unlike in the tests' default template.
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<model>' }}"
    "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE):
    made = make_tokenizer()
    made.chat_template = template
    return made


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(*files, **more):
    return load_rows(files, **more).remove_columns("where").to_list()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "a"}, {"text": "b"}],
        [{"prompt": "a", "completion": "b"}],
        [{"prompt": "", "completion": "b"}],
        [{"messages": TALK}],
        [{"prompt": TALK[:1], "completion": TALK[1:2]}],
    ],
    ids=["text", "pairs", "empty-prompt", "messages", "message-pairs"],
)
def test_formats_and_files(tmp_path, suffix, rows):
    from datasets import Dataset

    file = tmp_path / f"rows.{suffix}"
    more = [{**row, "id": number} for number, row in enumerate(rows)]
    if suffix == "parquet":
        Dataset.from_list(more).to_parquet(str(file))
    else:
        file.write_text(json.dumps(more) if suffix == "json" else "\n".join(map(json.dumps, more)))
    assert read(str(file)) == rows
    assert read(str(file), str(file), limit=1) == rows[:1]
    [where, *_] = load_rows([str(file)])["where"]
    assert where == f"{file}:1" if suffix == "jsonl" else f"{file}: row 0"


def test_line_breaks_inside_of_texts(tmp_path):
    rows = [{"text": "a\u2028b"}, {"text": "c\u0085d\x0ce"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert read(str(file)) == rows


def test_configuration_of_a_hub_dataset(monkeypatch):
    from datasets import Dataset

    asked = []

    def load_dataset(*words, split):
        asked.append((*words, split))
        return Dataset.from_list([{"question": "a", "answer": "b"}])

    monkeypatch.setattr("setblock.rows.load_dataset", load_dataset)
    rows = load_rows(["openai/gsm8k:main"], "test", "question", "answer")
    assert asked == [("openai/gsm8k", "main", "test")]
    place = "openai/gsm8k:main: row 0"
    assert rows.to_list() == [{"prompt": "a", "completion": "b", "where": place}]


def test_a_fingerprint_is_of_the_rows_alone(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "\N{GRINNING FACE}"}]
    first = fingerprint(load_rows([write(tmp_path / "r.jsonl", rows)]))
    assert re.fullmatch("2 rows, sha256 [0-9a-f]{16}", first)
    parts = [write(tmp_path / f"{n}.jsonl", [row]) for n, row in enumerate(rows)]
    assert fingerprint(load_rows(parts)) == first
    assert fingerprint(load_rows(parts[::-1])) != first
    assert fingerprint(load_rows(parts[:1])) == fingerprint(load_rows(parts, limit=1)) != first


def test_columns_of_other_names(tmp_path):
    file = write(tmp_path / "r.jsonl", [{"question": "a", "answer": "b", "text": "c"}])
    rows = read(file, prompt_field="question", completion_field="answer")
    assert rows == [{"prompt": "a", "completion": "b"}]
    file = write(tmp_path / "r.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(ValueError, match=r"this one has question, answer \(no column 'answr'\)$"):
        read(file, prompt_field="question", completion_field="answr")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no rows"),
        ('{"text": "a"}\n{"text": ', r":2: not JSON"),
        ('{"text": "a"}\n\n{"question": "a"}\n', r":3: a row needs prompt and completion or mess"),
        ("[1]\n", r":1: a row must be an object, got list"),
        ('{"text": ""}\n', r":1: text is empty"),
        ('{"prompt": "a", "completion": ""}\n', r":1: completion is empty"),
        ('{"prompt": "a", "completion": " \\n"}\n', r":1: completion is empty"),
        (
            '{"prompt": [{"role": "user", "content": "a"}], '
            '"completion": [{"role": "assistant", "content": " "}]}\n',
            r":1: completion is empty",
        ),
        ('{"text": "a"}\n{"text": "\\ud800 x"}\n', r":2: text holds half of a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": "\\udc00"}]}',
            ":1: messages holds half of a su",
        ),
        ('{"text": 3}\n', r":1: text must be text, got int"),
        ('{"messages": "hi"}\n', r":1: messages must be a list of messages, got str"),
        (
            '{"prompt": [], "completion": [{"role": "assistant", "content": "b"}]}',
            ":1: prompt is e",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "completion": '
            '[{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}',
            r":1: a completion must be one assistant message, got \['assistant', 'user'\]",
        ),
        (
            '{"prompt": "a", "completion": "b", "tools": [{}]}',
            ":1: tools are supported in rows of messages alone, and not with answers of the",
        ),
        (
            '{"messages": [{"content": "a"}]}\n',
            r":1: messages must be messages of role and content",
        ),
        ('{"messages": []}\n', r":1: messages is empty"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content":""}]}',
            r":1: messages hold an empty message of the assistant's",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}\n',
            ":1: prompt and completion must both be texts or both messages",
        ),
        (
            '{"conversations": [{"from": "human", "value": "a"}]}\n',
            r":1: .* this one has conversations \(conversations: as messages, each of role and",
        ),
        ('{"messages": [{"role": "user", "content": null}]}\n', r":1: .* both text, and nothing"),
        (
            '{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}\n',
            r":1: .* both text, and nothing else",
        ),
        (
            '{"text": "a"}\n{"prompt": "p", "completion": "c"}\n',
            r":2: a row of prompt \(text\) and completion \(text\) in a file that began with text",
        ),
        (
            '{"prompt": "p", "completion": "c"}\n{"prompt": [{"role": "user", "content": "a"}], '
            '"completion": [{"role": "assistant", "content": "b"}]}\n',
            r":2: a row of prompt \(messages\)",
        ),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_rows([str(tmp_path / "rows.jsonl")])


def test_other_bad_data(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="not a list of rows"):
        load_rows([str(tmp_path / "a.json")])
    (tmp_path / "b.parquet").write_text("nothing")
    with pytest.raises(ValueError, match="can't read data"):
        load_rows([str(tmp_path / "b.parquet")])
    with pytest.raises(ValueError, match=r"not one of \.jsonl"):
        load_rows([str(tmp_path)])
    first = write(tmp_path / "c.jsonl", [{"text": "a"}])
    second = write(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ValueError, match="data of different formats"):
        load_rows([first, second])
    talk = {"prompt": TALK[:1], "completion": TALK[1:2]}
    with pytest.raises(ValueError, match=r"different formats: .*messages.*; .*\(text\)"):
        load_rows([second, write(tmp_path / "f.jsonl", [talk])])
    (tmp_path / "g.jsonl").write_text('{"text": "a"}', encoding="utf-8-sig")
    assert read(str(tmp_path / "g.jsonl")) == [{"text": "a"}]
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "e.jsonl").write_bytes(mark + b'{"text": "a"}\n\xff')
        with pytest.raises(ValueError, match=r"e\.jsonl: line 2 is not in UTF-8: "):
            load_rows([str(tmp_path / "e.jsonl")])
    for end in (b"\r\n", b"\r"):
        (tmp_path / "h.jsonl").write_bytes(end.join([b'{"text": "a"}', b'{"text": "b"}']))
        assert read(str(tmp_path / "h.jsonl")) == [{"text": "a"}, {"text": "b"}]


def test_only_the_assistant_is_learned_from():
    made = tokenizer()
    row = conversation(made, TALK)
    whole = made.apply_chat_template(TALK, tokenize=False)
    assert row["input_ids"] == made.encode(str(whole), add_special_tokens=False)
    pairs = zip(row["input_ids"], row["completion_mask"], strict=True)
    assert made.decode([token for token, learned in pairs if learned]) == "yes?</s>4</s>"


def test_marked_templates_say_what_is_learned():
    marked = TEMPLATE.replace(
        "{{ m['content'] }}</s>",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
        "{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}",
    )
    # not to be told from the turns alone, but from the marks
    row = conversation(tokenizer("{{ messages | length }}" + marked), TALK)
    pairs = list(zip(row["input_ids"], row["completion_mask"], strict=True))
    assert tokenizer().decode([token for token, on in pairs if on]) == "yes?</s>4</s>"
    with pytest.raises(ValueError, match="a file:3: no assistant turn"):
        conversation(tokenizer(marked), TALK[:1], "a file:3")


def test_templates_that_trl_knows_are_marked_by_it():
    from trl.chat_template_utils import qwen3_chat_template

    row = conversation(tokenizer(qwen3_chat_template), TALK)
    pairs = list(zip(row["input_ids"], row["completion_mask"], strict=True))
    learned = tokenizer().decode([token for token, on in pairs if on])
    assert "yes?" in learned
    assert "4" in learned
    assert "2+2" not in learned


def test_templates_that_rewrite_the_past_are_refused():
    counting = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(ValueError, match="a file:7: the chat template renders turn"):
        conversation(tokenizer(counting), TALK, "a file:7")
    with pytest.raises(ValueError, match="a file:3: no assistant turn"):
        conversation(tokenizer(), TALK[:1], "a file:3")


@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_conversations_that_the_template_refuses_are_named_by_line(tmp_path, kind):
    picky = tokenizer(
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{% endfor %}" + TEMPLATE
    )
    talk = [{"role": "system", "content": "be brief"}, *TALK[:2]]
    rows = {
        "messages": [{"messages": TALK}, {"messages": talk}],
        "pairs": [{"prompt": some[:-1], "completion": some[-1:]} for some in (TALK, talk)],
    }
    file = write(tmp_path / "rows.jsonl", rows[kind])
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the chat template refuses it: no system"):
        prepare(load_rows([file]), picky)


@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_a_misspelt_role_is_refused(tmp_path, kind):
    """Many templates take any, and an answer would have no loss."""
    talk = [TALK[0], {**TALK[1], "role": "Assistant"}, *TALK[:2]]
    rows = {
        "messages": [{"messages": TALK}, {"messages": talk}],
        "pairs": [{"prompt": some[:-1], "completion": some[-1:]} for some in (TALK, talk)],
    }
    data = load_rows([write(tmp_path / "rows.jsonl", rows[kind])])
    said = r"rows\.jsonl:2: message 1 has the role 'Assistant', which is none of system, .* names"
    with pytest.raises(ValueError, match=said):
        prepare(data, tokenizer())
    prepare(data, tokenizer("{% if messages[0]['role'] == 'Assistant' %}{% endif %}" + TEMPLATE))


def test_a_prompt_that_ends_with_the_assistant_s_message(tmp_path):
    row = {"prompt": TALK[:2], "completion": [{"role": "assistant", "content": "more"}]}
    data = load_rows([write(tmp_path / "rows.jsonl", [row])])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the prompt's last message is the assis"):
        prepare(data, tokenizer())


class Marking:
    """A tokenizer that puts 0 before the first word of a text, as some do."""

    chat_template = "unmarked"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0] * bool(text) + [ord(letter) for letter in text]

    def apply_chat_template(self, turns, tokenize, add_generation_prompt=False):
        text = "".join(f"<{turn['role'][0]}>{turn['content']}" for turn in turns)
        return text + "<a>" * add_generation_prompt


def test_turns_are_encoded_behind_what_was_before_them():
    row = conversation(Marking(), TALK)
    assert row["input_ids"].count(0) == 1, "the start of the text, and of no turn"
    learned = [t for t, on in zip(row["input_ids"], row["completion_mask"], strict=True) if on]
    assert "".join(map(chr, learned)) == "yes?4"


def test_preparation(tmp_path):
    pairs = load_rows([write(tmp_path / "a.jsonl", [{"prompt": "2+2", "completion": "4"}])])
    assert prepare(pairs, tokenizer()).to_list() == [{"prompt": "2+2", "completion": "4"}]
    [row] = prepare(pairs, tokenizer(), chat=True).to_list()
    assert row == {
        "prompt": [{"role": "user", "content": "2+2"}],
        "completion": [{"role": "assistant", "content": "4"}],
    }
    talks = load_rows([write(tmp_path / "b.jsonl", [{"messages": TALK}])])
    assert prepare(talks, tokenizer()).to_list() == [conversation(tokenizer(), TALK)]
    with pytest.raises(ValueError, match="messages need a chat template"):
        prepare(talks, tokenizer(None))
    text = load_rows([write(tmp_path / "c.jsonl", [{"text": "a"}])])
    with pytest.raises(ValueError, match="--chat needs rows of prompt and completion"):
        prepare(text, tokenizer(), chat=True)
