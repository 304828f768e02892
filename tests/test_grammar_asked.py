"""Answers of a given form, as the command and the server are asked for them."""

import io
import json
from typing import Any

import pytest
import regex
from conftest import SHORT
from test_grammar import PERSON, SUM, SUMS

from setblock import reading as module

# the command


def test_the_command(run, tmp_path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(PERSON))
    words = ("generate", "nano", "--prompt", "Who?", "--chat", "--json")
    found = run(*words, "--json-schema", file).json
    assert list(json.loads(found["text"])) == ["name", "age", "tags"]
    assert (found["mode"], found["json_schema"], found["regex"]) == ("verified", PERSON, None)
    again = run(*words, "--json-schema", "-", stdin=io.StringIO(json.dumps(PERSON))).json
    assert again["token_ids"] == found["token_ids"]
    found = run(*words, "--regex", "[0-9]{3}", "--mode", "ntp").json
    assert regex.fullmatch("[0-9]{3}", found["text"])
    assert (found["mode"], found["json_schema"], found["regex"]) == ("ntp", None, "[0-9]{3}")
    plain = run(*words, *SHORT).json
    assert (plain["json_schema"], plain["regex"], plain["grammar"]) == (None, None, None)
    file = tmp_path / "sums.lark"
    file.write_text(SUMS)
    found = run(*words, "--grammar", file).json
    assert (found["mode"], found["grammar"]) == ("verified", SUMS)
    assert regex.fullmatch(SUM, found["text"], partial=found["finish_reason"] == "length")
    assert run(*words, "--grammar", "-", stdin=io.StringIO(SUMS)).json["text"] == found["text"]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"[1]", "must hold a JSON Schema"),
        (b'{"items":' * 5000, "is not JSON"),
        (None, ""),
    ],
)
def test_a_schema_that_is_none(run, tmp_path, told, message) -> None:
    file = tmp_path / "schema.json"
    if told is not None:
        file.write_bytes(told)
    error = run("generate", "nano", "a", "--json-schema", file).error
    assert str(file) in error
    assert message in error


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (b"\xff", "--grammar {file} is not UTF-8"),
        (b"", "grammar can't be used: Empty grammar"),
        (b"\xef\xbb\xbfstart: a", 'grammar can\'t be used: unknown name: "a"'),
        (None, "{file}"),
    ],
)
def test_a_grammar_that_is_none(run, tmp_path, told, message) -> None:
    file = tmp_path / "answers.lark"
    if told is not None:
        file.write_bytes(told)
    assert message.format(file=file) in run("generate", "nano", "a", "--grammar", file).error


def test_stdin_is_one_thing(run) -> None:
    words = ("generate", "nano", "None", *SHORT, "--grammar", "-", "--json")
    assert run(*words, stdin=io.StringIO('start: "a"')).json["text"] == "a"
    for words in (
        ("--grammar", "-"),
        ("--json-schema", "-"),
        ("--grammar", "-", "--messages", "-"),
    ):
        error = run("generate", "nano", *words, stdin=io.StringIO("start: a")).error
        assert f"{words[0]} - leaves no stdin for the prompt: give PROMPT or a file" in error


# the server


def asked(client, **fields: Any) -> Any:
    own = {
        name: fields.pop(name) for name in ("mode", "regex", "grammar", "solver") if name in fields
    }
    messages = [{"role": "user", "content": "Who?"}]
    given = {"model": "nano", "messages": messages, "max_tokens": 100, **fields}
    return client.chat.completions.create(**given, extra_body=own)


@pytest.mark.parametrize("mode", ["ntp", "verified", None])
def test_the_server_follows_a_schema(client, mode) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    more = {} if mode is None else {"mode": mode}
    whole = asked(client, response_format=form, **more)
    text = whole.choices[0].message.content
    assert list(json.loads(text)) == ["name", "age", "tags"]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.setblock["mode"] == (mode or "verified")
    form["json_schema"] |= {"strict": True, "description": None}
    pieces = asked(client, response_format=form, stream=True, **more)
    assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == text


def test_the_server_says_which_form_is_too_much(client, monkeypatch) -> None:
    """Some are known to be only on the way."""
    import openai

    monkeypatch.setattr(module, "LIMITS", {"max_items_in_row": 50})
    form = {"type": "object", "properties": {f"key{n}": {} for n in range(99)}}
    asks: Any = {"type": "json_schema", "json_schema": {"name": "large", "schema": form}}
    with pytest.raises(openai.BadRequestError, match="can't be followed") as caught:
        asked(client, response_format=asks)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.APIError, match="response_format can't be followed") as caught:
        list(asked(client, response_format=asks, stream=True))
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "response_format")
    assert asked(client, regex="[0-9]").choices[0].message.content.isdecimal()


def test_the_server_s_other_formats(client) -> None:
    found = asked(client, response_format={"type": "json_object"}).choices[0]
    assert found.message.content.startswith("{")
    assert found.finish_reason == "length" or type(json.loads(found.message.content)) is dict
    found = asked(client, regex="(red|green)", response_format={"type": "text"}).choices[0]
    assert found.message.content in ("red", "green")
    found = asked(client, grammar=f"{SUMS}// {'long ' * 1000}").choices[0]
    assert regex.fullmatch(SUM, found.message.content, partial=found.finish_reason == "length")
    given: Any = {"model": "nano", "prompt": "Who?", "max_tokens": 9}
    found = client.completions.create(**given, extra_body={"regex": "[0-9]{4}"}).choices[0]
    assert regex.fullmatch("[0-9]{4}", found.text)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "must be one of text, json_",
        ),
        (
            {"response_format": {}},
            "response_format.type",
            "must be one of text, json_object, json_",
        ),
        ({"response_format": {"type": "text", "a": 1}}, "response_format.a", "is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "must be an object, got None",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
            "response_format.json_schema.name",
            "must be a text, got 1",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "foo"}},
                }
            },
            "response_format",
            "can't be used: Invalid type: foo",
        ),
        (
            {"response_format": {"type": "json_object"}, "mode": "sbd"},
            "response_format",
            "in mode sbd",
        ),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "response_format",
            "exclude each other",
        ),
        ({"regex": "a(b"}, "regex", "unclosed group"),
        ({"grammar": "start: a"}, "grammar", "unknown name"),
        (
            {"regex": "a", "solver": "fixed:2"},
            "solver",
            "is for mode sbd, in which regex can't be used",
        ),
    ],
)
def test_what_the_server_refuses(client, fields, param, message) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=message) as caught:
        asked(client, **fields)
    assert caught.value.param == param
