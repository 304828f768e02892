"""Answers that have to call a tool: tool_choice required, or the name of a function."""

from typing import Any

import pytest
from servers import refused
from speakers import ASKED, PARIS, TEMPLATE, call

from setblock import forced

NUMBER = {"type": "integer", "minimum": 1, "maximum": 9}
SUM = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": SUM, "strict": True}}
CITY: Any = {"properties": {"city": {"enum": ["Bonn", "Ulm"]}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": 'Uhr "🕰"'}}
MODES: Any = [{}, {"mode": "ntp"}, {"mode": "verified", "block_size": 8}]
WRITTEN = "{{ call.function | tojson }}"


def choice(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def called(speaker: Any, tools: Any, which: Any, **more: Any) -> tuple[str, Any]:
    """(name, arguments) of the one call that the answer is."""
    given = {"max_tokens": 400, "parallel_tool_calls": False, **more}
    told = speaker.answered(tools=tools, tool_choice=which, **given)
    text, thoughts, [(name, arguments)], reason = told
    assert (text, thoughts, reason) == ("", "", "tool_calls")
    return name, arguments


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("said", ["It rains.", f"<think>No.</think>{call(PARIS)}"])
def test_an_answer_that_has_to_call(speaker, mode, said):
    """Whatever the model would rather say."""
    tools = [WEATHER, ADD, NOW]
    speaker.say(said, tools=tools)
    name, arguments = called(speaker, tools, "required", **mode)
    assert name in ("weather", "add", NOW["function"]["name"])
    name, arguments = called(speaker, tools, choice("weather"), **mode)
    assert (name, list(arguments)) == ("weather", ["city"])
    assert arguments["city"] in ("Bonn", "Ulm")
    name, arguments = called(speaker, tools, choice("add"), **mode)
    assert (name, list(arguments)) == ("add", ["a", "b"])
    assert set(arguments.values()) <= set(range(1, 10))
    name = NOW["function"]["name"]
    assert called(speaker, tools, choice(name), **mode) == (name, {})


def test_what_the_model_would_call_anyway(speaker):
    """In all the freedom that a tool's parameters leave it; and cut off by the limit."""
    for more in ({}, {"unit": "K"}):
        place = {**PARIS["arguments"], **more}
        open_ended = {"properties": {"city": {"type": "string"}}, "additionalProperties": True}
        tools = [{"type": "function", "function": {"name": "weather", "parameters": open_ended}}]
        text = call({"name": "weather", "arguments": place}).replace("\n", "")
        speaker.say(text, tools=tools)
        assert called(speaker, tools, "required") == ("weather", place)
    speaker.say(call(PARIS).replace("\n", ""), tools=tools)
    told = speaker.answered(tools=tools, tool_choice="required", max_tokens=30)
    assert told == (call(PARIS).replace("\n", "")[:30], "", [], "length")


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": ["object", "null"], "title": "F", "properties": {"a": {"const": 1}}},
        {"required": ["a"]},
        {"const": {"a": 1}},
        {"$ref": "#/$defs/f", "$defs": {"f": {"properties": {"a": {"const": 1}}}}},
        {"additionalProperties": {"const": 1}, "minProperties": 1, "maxProperties": 2},
    ],
)
def test_parameters_that_name_all_or_not(speaker, parameters):
    """Where the schema says no more than what there is, there is no more."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    speaker.say(call({"name": "f", "arguments": {"a": 1, "b": 1}}).replace("\n", ""), tools=tools)
    closed = parameters.keys() <= forced.PLAIN and "required" not in parameters
    given = called(speaker, tools, "required", max_tokens=900)[1]
    assert given == ({"a": 1} if "properties" in parameters else {}) or not closed
    if {"required", "minProperties", "const"} & parameters.keys():
        assert given.keys() & {"a", "b"}


def test_a_template_that_leaves_thoughts_empty(speaker, monkeypatch):
    """As Qwen 3's does in the last turn: the call comes behind them."""
    empty = TEMPLATE.replace("{{ message.content }}", "<think></think>\n{{ message.content }}")
    monkeypatch.setattr(speaker.model.tokenizer, "chat_template", empty)
    speaker.say("It rains.", tools=[ADD])
    assert called(speaker, [ADD], "required")[0] == "add"


def test_marks_that_are_tokens(speaker, monkeypatch):
    """Each is said as the one token."""
    tokenizer = speaker.model.tokenizer
    function = {"name": "{name}", "arguments": "{content}"}
    calls = {"repeats": True, "content": "json"}
    calls |= {"open_pattern": r"<user>(?P<name>\w+)", "close": "<model>"}
    calls |= {"transform": {"type": "function", "function": function}}
    fields: Any = {"tool_calls": calls, "content": {"close": ["<|im_end|>"], "content": "text"}}
    own = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    monkeypatch.setattr(tokenizer, "response_template", own, raising=False)
    form = "<user>{{ call.function.name }}{{ call.function.arguments | tojson }}<model>"
    template = TEMPLATE.replace(f"<tool_call>{WRITTEN}</tool_call>", form)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    speaker.say("It rains.", tools=[WEATHER, ADD])
    assert called(speaker, [WEATHER, ADD], choice("add"))[0] == "add"
    first, last = (tokenizer.convert_tokens_to_ids(name) for name in ("<user>", "<model>"))
    assert forced._lark(speaker.model, '<user>"a\n<model>') == f'<[{first}]> "\\"a\\n" <[{last}]>'


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            TEMPLATE.replace(WRITTEN, "{{ 1 / 0 }}"),
            "which refuses a call of 'add' here: division by zero",
        ),
        (TEMPLATE.replace(WRITTEN, "<a>0</a>"), "which does not write the arguments of a call"),
        (
            TEMPLATE.replace(WRITTEN, f"{WRITTEN}{WRITTEN}"),
            "which does not write the arguments of a ca",
        ),
        (
            TEMPLATE.replace("<tool_call>", "<call>"),
            "which writes a call of 'add' as the response_template",
        ),
        (f"{TEMPLATE} ", "in which a call of 'add' can't be the answer to this conversati"),
    ],
)
def test_templates_that_do_not_show_it(speaker, monkeypatch, template, why):
    monkeypatch.setattr(speaker.model.tokenizer, "chat_template", template)
    body = {"messages": ASKED, "tools": [ADD], "tool_choice": "required"}
    error = refused(speaker.address, body, "chat/completions")
    assert error["param"] == "tool_choice"
    assert error["message"].startswith(
        f"tool_choice must be auto or none with this chat template, {why}"
    )


def test_no_call_goes_on_with_a_message(speaker):
    turns = [*ASKED, {"role": "assistant", "content": "It is"}]
    body = {"messages": turns, "tools": [ADD], "tool_choice": choice("add")}
    error = refused(speaker.address, body, "chat/completions")
    assert error["message"].startswith(
        "tool_choice must be auto or none where a message of the assistant is gone on with, got {"
    )
