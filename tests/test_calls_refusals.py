"""What a request with tools is refused for, and in which words."""

from typing import Any

import pytest
from servers import refused, serving
from speakers import ASKED, TOOL, TOOLS

from setblock.loading import load
from setblock.serve import build

CONTENT: Any = {"close": "</s>", "content": "text"}
BAD_PATTERN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": CONTENT,
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": "("},
        },
    },
}


@pytest.mark.parametrize(
    "own", [[], "x", {"fields": None}, {"fields": {}}, {"fields": {"content": {}}}, BAD_PATTERN]
)
def test_wrong_response_templates(speaker, monkeypatch, own):
    monkeypatch.setattr(speaker.model.tokenizer, "response_template", own, raising=False)
    error = refused(speaker.address, {"messages": ASKED, "tools": TOOLS}, "chat/completions")
    assert error["message"].startswith("tools can't be used, as the tokenizer's response_template")


@pytest.mark.parametrize(
    ("template", "field", "message"),
    [
        (
            "{% if tools %}{{ 1 / 0 }}{% endif %}",
            "tools",
            "tools do not fit the chat template: div",
        ),
        ("{{ 1 / 0 }}", "messages", "messages do not fit the chat template: division by zero"),
        (
            "{{ tools | length }}{{ messages[0].content }}",
            "tools",
            "tools can't be used with this chat template, in which no answer begins as the",
        ),
    ],
)
def test_templates_that_do_not_fit(speaker, monkeypatch, template, field, message):
    monkeypatch.setattr(speaker.model.tokenizer, "chat_template", template)
    error = refused(speaker.address, {"messages": ASKED, "tools": TOOLS}, "chat/completions")
    assert error["message"].startswith(message)
    assert error["param"] == field


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools must be a list of tools, got {}"),
    ({"tools": ["weather"]}, "tools[0] must be an object, got 'weather'"),
    ({"tools": ["weather"], "tool_choice": "none"}, "tools[0] must be an object, got 'weather'"),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"properties": []}}}]},
        "tools[0].function.parameters.properties must be an object, got []",
    ),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"anyOf": 3}}}}}]},
        "tools[0].function.parameters.properties.a.anyOf must be a list of schemas, got 3",
    ),
    ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name must be a text, got ''"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type is not supported, only 'function'; got 'c"),
    ({"tools": [{"type": "function"}]}, "tools[0].function must be an object"),
    ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x is not supported, only function, type"),
    ({"tools": [{"function": {}}]}, "tools[0].function.name must be a text"),
    (
        {"tools": [{"function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters must be an object, got []",
    ),
    (
        {"tools": [{"function": {"name": "f", "description": 3}}]},
        "tools[0].function.description must be a text, got 3",
    ),
    (
        {"tools": [{"function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict is not supported, only False; got True",
    ),
    ({"tool_choice": "required"}, "tool_choice must be auto or none without tools, got 'required'"),
    ({"tool_choice": 3}, "tool_choice must be a text or an object, got 3"),
    (
        {"tools": TOOLS, "tool_choice": "any"},
        "tool_choice must be auto, none, required or an object that names a function, got 'any'",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type is not supported, only 'fu"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice.function must be an object, got None"),
    (
        {"tools": TOOLS, "tool_choice": {"function": {"name": "f"}}},
        "tool_choice.function.name must be the name of a tool (weather), got 'f'",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "mode": "sbd"},
        "tool_choice must be auto or none in mode sbd, in which no answer has a form, got 'req",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True},
        "tool_choice can't be used with ignore_eos",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "regex": "a"},
        "regex can't be used with tools, which an answer may call",
    ),
    (
        {"tools": [{"function": {"name": "f", "strict": 3}}], "tool_choice": "required"},
        "tools[0].function.strict must be true or false, got 3",
    ),
    (
        {
            "tools": [{"function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        'tools[0].function.parameters can\'t be used: Unimplemented keys: ["not"]',
    ),
    (
        {
            "tools": [
                {"function": {"name": "f"}},
                {"function": {"name": "g", "parameters": {"type": ["array", "string"]}}},
            ],
            "tool_choice": {"function": {"name": "g"}},
        },
        "tools[1].function.parameters.type must be 'object', got ['array', 'string']",
    ),
    (
        {
            "tools": [
                {
                    "function": {
                        "name": "f",
                        "parameters": {"required": ["a"], "properties": {"a": False}},
                    }
                }
            ],
            "tool_choice": "required",
        },
        "tools[0].function.parameters can't be used: Unsatisfiable schema: required property 'a'",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        "tool_choice.type is not supported, only 'function'; got 'allowed_tools'",
    ),
    (
        {
            "tools": [{"function": {"name": "f", "parameters": {"x-guidance": 3}}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters can't be used: x-guidance must be an object, got 3",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls must be true with tools"),
]
FUNCTION = {"name": "f", "arguments": "{}"}
BAD_TURNS: list[tuple[dict[str, Any], str]] = [
    ({"tool_calls": 3}, "tool_calls must be a list of calls, got 3"),
    ({"tool_calls": [{"id": 3, "function": FUNCTION}]}, "tool_calls[0].id must be a text, got 3"),
    (
        {"tool_calls": [{"function": {**FUNCTION, "arguments": r'{"a": "\ud800"}'}}]},
        "tool_calls[0].function.arguments must be the JSON of an object, got ",
    ),
    ({"tool_calls": [3]}, "tool_calls[0] must be an object"),
    ({"tool_calls": [{"type": "x"}]}, "tool_calls[0].type is not supported, only 'function'; got"),
    ({"tool_calls": [{"id": "1"}]}, "tool_calls[0].function must be an object"),
    ({"tool_calls": [{"function": {}}]}, "tool_calls[0].function.name must be a text"),
    (
        {"tool_calls": [{"function": {**FUNCTION, "arguments": {}}}]},
        "tool_calls[0].function.arguments must be a text",
    ),
    (
        {"tool_calls": [{"function": {**FUNCTION, "arguments": "[1]"}}]},
        "tool_calls[0].function.arguments must be the JSON of an object",
    ),
    (
        {"tool_calls": [{"function": {**FUNCTION, "arguments": "{"}}]},
        "tool_calls[0].function.arguments must be the JSON of an object",
    ),
    ({"reasoning_content": 3}, "reasoning_content must be a text"),
    ({"tool_calls": []}, "content must be a text or a list of parts of type text"),
    ({"refusal": "no"}, "refusal is not supported, only role, content, tool_calls, reasoning_con"),
    ({"tool_call_id": "1"}, "tool_call_id is not supported, only role, content, tool_calls, r"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_wrong_tools(speaker, body, message):
    error = refused(speaker.address, {"messages": ASKED, **body}, "chat/completions")
    assert error["message"].startswith(message)


@pytest.mark.parametrize(("turn", "message"), BAD_TURNS)
def test_wrong_calls(speaker, turn, message):
    messages = [*ASKED, {"role": "assistant", **turn}, *ASKED]
    error = refused(speaker.address, {"messages": messages}, "chat/completions")
    assert error["message"].startswith(f"messages[1].{message}")


def test_a_call_must_be_answered(speaker):
    turn = {"role": "assistant", "tool_calls": [{"id": "1", "function": FUNCTION}]}
    error = refused(speaker.address, {"messages": [*ASKED, turn]}, "chat/completions")
    assert error["message"] == (
        "messages[1].tool_calls must be followed by messages of role tool, with what the tools gave"
    )


def test_tools_that_do_not_fit(speaker):
    tool = {**TOOL, "function": {**TOOL["function"], "description": "a" * 10_000_000}}
    error = refused(speaker.address, {"messages": ASKED, "tools": [tool]}, "chat/completions")
    assert "tools must fit into the model's context" in error["message"]


def test_models_that_do_not_know_tools(checkpoint):
    model = load(checkpoint("llama"))
    body = {"messages": ASKED, "tools": TOOLS}
    with serving(build(model, "llama")) as place:
        error = refused(place, body, "chat/completions")
        assert error["message"].startswith("tools can't be used with a model of type llama, of ")
        assert "response_template" in error["message"]
    model = load(checkpoint("qwen3"))
    with serving(build(model, "qwen")) as place:
        error = refused(place, body, "chat/completions")
        assert error["message"] == "tools are left out by the model's chat template"
        assert error["param"] == "tools"
