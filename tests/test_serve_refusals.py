"""What the OpenAI-compatible endpoint refuses, and how it says so."""

from inspect import signature
from typing import Any

import httpx
import pytest
from servers import QUESTIONS, USER, refused, serving
from transformers import PreTrainedTokenizerBase

from setblock.loading import load
from setblock.serve import build

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be in 1..256, got 0"),
    ({"n": 257}, "n must be in 1..256, got 257"),
    ({"n": True}, "n must be an integer, got True"),
    ({"best_of": 3}, "best_of is not"),
    ({"presence_penalty": "low"}, "presence_penalty must be a number, got 'low'"),
    ({"frequency_penalty": True}, "frequency_penalty must be a number, got True"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number in 0.01..100, got 0"),
    ({"min_p": 2}, "min_p must be a number in 0..1"),
    ({"logit_bias": {"a": 1}}, "logit_bias must be of token ids, got 'a'"),
    ({"logit_bias": {"5": 101}}, "logit_bias must be of token ids, each with a number in -100..10"),
    ({"logit_bias": {"99999": 1}}, "logit_bias must be of token ids below 1024, the vocabulary of"),
    ({"logit_bias": [5]}, "logit_bias must be an object"),
    ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
    ({"user": 5}, "user must be a text, got 5"),
    ({"metadata": "me"}, "metadata must be an object, got 'me'"),
    (
        {"service_tier": "flex"},
        "service_tier is not supported, only 'auto' or 'default'; got 'flex'",
    ),
    ({"foo": 1}, "foo is not supported"),
    ({"generation_config": "{}"}, "generation_config is not supported"),
    ({"stream": "yes"}, "stream must be true or false, got 'yes'"),
    ({"stream_options": {"x": 1}}, "stream_options may hold include_usage, got 'x'"),
    (
        {"stream_options": {"include_usage": 1}},
        "stream_options.include_usage must be true or false, got 1",
    ),
    ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer"),
    ({"max_tokens": True}, "max_tokens must be an integer"),
    ({"max_tokens": 10**6}, "tokens; with max_tokens=1000000"),
    ({"max_tokens": 10**400}, "max_tokens must be an integer below 2**63, got 10000"),
    ({"temperature": 10**400}, "temperature must be a number below 2**63, got 10000"),
    ({"top_p": -(10**400)}, "top_p must be a number below 2**63, got -1000"),
    ({"fallback": 10**400}, "fallback must be a number below 2**63, got 10000"),
    ({"top_k": 10**400}, "top_k must be an integer below 2**63, got 10000"),
    ({"seed": 2**63}, "seed must be an integer below 2**63, got 9223372036854775808"),
    ({"n": 10**400}, "n must be an integer below 2**63, got 10000"),
    ({"temperature": -1}, "temperature must be"),
    ({"temperature": "hot"}, "temperature must be"),
    ({"top_p": 2}, "top_p must be"),
    ({"seed": "a"}, "seed must be"),
    ({"seed": -1}, "seed must be"),
    ({"stop": 5}, "stop must be"),
    ({"stop": [""]}, "stop must be"),
    ({"stop": ["<|end|>"]}, "stop text '<|end|>' holds the special token"),
    (
        {"stop": ["a"] * 17},
        "stop may be 16 texts of at most 1000 characters each, got 17 texts",
    ),
    ({"stop": ["a", "b" * 1001]}, "of at most 1000 characters each, got one of 1001 characters"),
    ({"stop": "\ud800"}, r"stop must be Unicode text, got the lone surrogate '\ud800'"),
    ({"model": "\udc00"}, r"model must be Unicode text, got the lone surrogate '\udc00'"),
    ({"\ud800": "x"}, r"'\ud800' is not supported"),
    ({"a\nb": "x"}, r"'a\nb' is not supported"),
    ({"x" * 10**6: "x"}, "xxx' is not supported"),
    ({"mode": "fast"}, "mode must be"),
    ({"solver": "best"}, "solver must be one of entropy:GAMMA"),
    ({"solver": 3}, "solver"),
    ({"block_size": 0}, "block_size must be"),
    ({"block_size": 10**9}, "block_size must be at most 1024, got 1000000000"),
    ({"solver": "x" * 1001}, "solver must be a text of at most 1000 characters, got 1001"),
    ({"branches": 2}, "branches is for mode verified"),
    ({"ignore_eos": "no"}, "ignore_eos must be"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[repr(fields)[:60] for fields, _ in BAD])
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_supported_is_named(address, fields, message, stream):
    body = {"prompt": "2 + 2", "stream": stream, **fields}
    turn = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}
    for prompt, given, path in (
        ("prompt", body, "completions"), ("messages", turn, "chat/completions"),
    ):  # fmt: skip
        error = refused(address, given, path)
        assert message in error["message"]
        assert error["message"].startswith(error["param"])
        [field] = fields
        # Where it is the prompt that is too long with this field, the prompt is named.
        named = {field, repr(field), prompt}
        assert error["param"].split(".")[0] in named or len(field) > 100


KINDS = "prompt must be a text, a list of texts, a list of token ids or a list of such lists, got "


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], KINDS),
        (
            [1.5],
            KINDS,
        ),
        ([True, 5], KINDS),
        ([None, "a"], KINDS),
        (
            [{"a": 1}],
            KINDS,
        ),
        ([5, True], "prompt must be of token ids in 0..1023, got True"),
        ([5, 1024], "prompt must be of token ids in 0..1023, got 1024"),
        ([5, -1], "prompt must be of token ids in 0..1023, got -1"),
        ([10**400], "prompt must be of token ids in 0..1023, got 10000"),
        ([5, [5]], "prompt must be of token ids in 0..1023, got [5]"),
        ([[None]], "prompt must be of token ids in 0..1023, got None"),
        ([[5], [6, "a"]], "prompt[1] must be of token ids in 0..1023, got 'a'"),
        (["a", [5]], "prompt[1] must be a text like those before it, got [5]"),
        ([[5], "a"], "prompt[1] must be a list of token ids like those before it, got 'a'"),
        (["a"] * 257, "prompt may be 256 prompts at most, got 257"),
        (["a", "\ud800"], r"prompt must be Unicode text, got the lone surrogate '\ud800'"),
        ([[5], []], "prompt[1] is empty"),
        ([[]], "prompt is empty"),
        (["a" * 10**6], "prompt must fit into the model's context of 1024 tokens"),
        ([[5] * 1024], "prompt has 1024 tokens"),
        (["2 + 2", "a" * 10**6], "prompt[1] must fit into the model's context of 1024 tokens"),
        ([[5], [5] * 1024], "prompt[1] has 1024 tokens"),
        (["2 + 2", "1 2 " * 600], "prompt[1] "),
    ],
)
def test_prompts_that_can_not_be_answered(address, prompt, message, stream):
    error = refused(address, {"prompt": prompt, "stream": stream, "max_tokens": 4})
    assert error["message"].startswith(message)
    assert error["param"] == message.split(" ", 1)[0]
    assert "prompt 0" not in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_has_so_many_answers_at_most(address, stream):
    body = {"prompt": ["a"] * 100, "n": 3, "stream": stream}
    error = refused(address, body)
    assert error["message"] == "n must be in 1..2 with 100 prompts, got 3"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"5": 1}, "mode": "sbd"}, "logit_bias is for modes ntp and verified"),
        ({"min_tokens": 2, "mode": "sbd"}, "min_tokens is for modes ntp and verified"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most 8, the new tokens that"),
        ({"min_tokens": 10**6}, "min_tokens must be at most "),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias must be of token ids, got '9999"),
        ({"logit_bias": {"5": 1, "005": -100}}, "logit_bias must be of token ids, got '005'"),
    ],
)
def test_biases_that_have_no_place(address, fields, message):
    error = refused(address, {"prompt": "a", **fields})
    assert error["message"].startswith(message)
    assert error["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other"}, "model_not_found"),
        ({"prompt": "x" * 10**6}, "context_length_exceeded"),
        ({"prompt": "a", "n": 0}, None),
    ],
)
def test_errors_that_the_protocol_has_a_word_for(address, fields, code):
    assert refused(address, {"prompt": "a", **fields})["code"] == code


def test_what_only_a_stream_has(address):
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    for given in (body, {**body, "stream": False}):
        error = refused(address, given)
        assert error["message"] == (
            "stream_options is for stream true, got {'include_usage': True} without it"
        )


def test_one_limit_under_two_names(address, client, nano):
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    body = {"messages": messages, "max_tokens": 5, "max_completion_tokens": 6}
    error = refused(address, body, "chat/completions")
    assert error["message"] == (
        "max_completion_tokens must be max_tokens=5 where both are given, got 6"
    )
    answer = client.chat.completions.create(
        model="nano", messages=messages, max_tokens=5, max_completion_tokens=5
    )
    assert answer.usage.completion_tokens == 5
    body = {"messages": messages, "max_completion_tokens": 10**6}
    error = refused(address, body, "chat/completions")
    message = error["message"]
    assert error["code"] == "context_length_exceeded"
    assert "messages have 13 tokens; with max_completion_tokens=1000000" in message


def test_a_prompt_that_leaves_no_room(address, nano):
    """What is missing is said, and nothing of a limit that was not asked for."""
    text = "12345 " * 400
    given, context = len(nano.encode(text)), nano.context_length
    whole: dict[str, Any] = {"mode": "sbd", "slide": False}
    for own, room in (
        (whole, "a block of 16"),
        ({"mode": "sbd", "slide": True}, "a token"),
        ({"mode": "ntp"}, "a token"),
        ({"mode": "verified"}, "a token"),
    ):
        error = refused(address, {"prompt": text, **own})
        assert error["message"] == (
            f"prompt must leave room for {room} in the model's context of {context} tokens, "
            f"got {given} tokens"
        )
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    # A block does not fit, tokens do.
    text = nano.decode(nano.encode("1 2 3 4 " * 300)[: context - 10])
    assert context - 16 < len(nano.encode(text)) < context
    assert "room for a block of 16" in refused(address, {"prompt": text, **whole})["message"]
    body = {"messages": [{"role": "user", "content": text * 2}]}
    assert refused(address, body, "chat/completions")["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": 5}, "prompt must be a text or a list, got 5"),
        ("completions", {}, "prompt must be a text or a list of them, and is missing"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("completions", {"messages": []}, "messages is for /v1/chat/completions"),
        ("chat/completions", {"prompt": "a"}, "prompt is for /v1/completions"),
        ("completions", {"prompt": "a", "echo": True}, "echo is not supported"),
        ("completions", {"prompt": "a", "max_completion_tokens": 3}, "only max_tokens"),
        ("completions", {"prompt": "a", "model": "other"}, "model must be 'nano', got 'other'"),
        ("completions", {"prompt": "a", "model": 3}, "model must be a text, got 3"),
        ("completions", {"prompt": "<|mask|>"}, "what is yet to be generated: leave it out"),
        (
            "completions",
            {"prompt": "12345 " * 400, "max_tokens": 1},
            "leaves no room for an answer in the model's context of 1024 tokens",
        ),
        (
            "completions",
            {"prompt": "a" * 10_000_000},
            "prompt must fit into the model's context of 1024 tokens, so have at most",
        ),
        (
            "completions",
            {"prompt": "\ud800 hi"},
            r"prompt must be Unicode text, got the lone surrogate '\ud800'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "hi \udfff"}]},
            r"messages must be Unicode text, got the lone surrogate '\udfff'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", "\ud800": 1}]},
            r"messages must be Unicode text, got the lone surrogate '\ud800'",
        ),
        (
            "chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"x": {"\ud800": 1}}},
            r"chat_template_kwargs must be Unicode text, got the lone surrogate '\ud800'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "x" * 10_000_000, "content": "a"}]},
            "messages must fit into the model's context of 1024 tokens, so have at most",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "u", "content": [{"type": "text", "text": "a" * 999}] * 99}]},
            "messages must fit into the model's context",
        ),
        (
            "chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"x": ["a" * 10_000_000]}},
            "chat_template_kwargs must fit into the model's context",
        ),
        (
            "chat/completions",
            {"messages": [USER] * 1025},
            "messages must be at most 1024, the tokens of the context, got 1025",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages[0].content[0].b is not supported, only type and text",
        ),
        ("chat/completions", {}, "messages must be a list"),
        ("chat/completions", {"messages": []}, "messages must be a list"),
        ("chat/completions", {"messages": ["a"]}, "messages[0] must be an object"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role must be"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content must be"),
        (
            "chat/completions",
            {"messages": [{"role": "bogus", "content": "a"}]},
            "messages are refused: message 0 has the role 'bogus', which is none of system, ",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content must be a text or a list of parts of type text",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
            "messages[0].tool_calls is not supported",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
            "tools[0].function must be an object",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 3},
            "chat_template_kwargs must be an object",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}},
            "response_format.type must be one of text, json_object, json_schema, got 'json'",
        ),
    ],
)
def test_wrong_bodies(address, path, body, message):
    said = refused(address, body, path)["message"]
    assert message in said
    assert "mask_token_id" not in said, "a client can't choose it"


# Of the tokenizer's method, of which newer versions of transformers have more.
NEWER = {"sanitize_control_tokens"} & set(
    signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)
NO_VARIABLES = (
    "chat_template", "continue_final_message", "documents", "return_assistant_tokens_mask",
    "tokenize", "tools", "conversation", "add_generation_prompt", "return_dict", "return_tensors",
    "padding", "max_length", "tokenizer_kwargs", *NEWER, "self", "messages",
    "conversations", "load_audio_from_video",
)  # fmt: skip


@pytest.mark.parametrize("name", NO_VARIABLES)
def test_only_variables_of_the_template_can_be_given(address, name):
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, name: "a"}}
    error = refused(address, body, "chat/completions")
    assert error["message"] == (
        f"chat_template_kwargs may not hold {name}: only variables of the chat template are allowed"
    )
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("depth", [100, 800, 900, 960, 990, 2000])
def test_what_is_nested_deeply(address, depth):
    """Is taken or refused, at whatever depth Python gives up."""
    value = "[" * depth + "]" * depth
    schema = f'{{"type": "json_schema", "json_schema": {{"schema": {{"x": {value}}}}}}}'
    kind = {"content-type": "application/json"}
    for field in (f'"chat_template_kwargs": {{"x": {value}}}', f'"response_format": {schema}'):
        content = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, {field}}}'
        response = httpx.post(f"{address}/v1/chat/completions", content=content, headers=kind)
        assert response.status_code in (200, 400)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"", b"3", b'{"a": }'])
def test_what_is_no_json_object(address, content):
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    response = httpx.post(f"{address}/v1/completions", content=content, headers=kind)
    assert response.status_code == 400
    assert "the body is not a JSON object" in response.json()["error"]["message"]


def test_a_body_that_is_not_said_to_be_json(address):
    kind = {"content-type": "application/x-www-form-urlencoded"}  # as curl does by itself
    response = httpx.post(f"{address}/v1/completions", content='{"prompt": "a"}', headers=kind)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "Content-Type must be application/json for a body of JSON, got "
        "'application/x-www-form-urlencoded'"
    )


def test_a_template_that_refuses_a_role(checkpoint):
    model = load(checkpoint("llama"))
    model.tokenizer.chat_template = "{{ raise_exception('only users speak') }}"
    with serving(build(model, "strict")) as place:
        body = {"messages": [{"role": "tool", "content": "hi"}]}
        error = refused(place, body, "chat/completions")
        assert error["message"] == "messages do not fit the chat template: only users speak"
        assert error["param"] == "messages"


def test_a_template_is_told_who_speaks(checkpoint):
    model = load(checkpoint("llama"))
    model.tokenizer.chat_template = "{{ raise_exception('no ' + messages[0]['name']) }}"
    with serving(build(model, "strict")) as place:
        body = {"messages": [{"role": "user", "name": "Ann", "content": "hi"}]}
        error = refused(place, body, "chat/completions")
        assert error["message"] == "messages do not fit the chat template: no Ann"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 + messages[0]['content'] }}", "unsupported operand type(s) for +: 'int' and 'str'"),
        ("{{ {}[messages[0]['content']].x }}", "'dict object' has no attribute 'hi'"),
        ("{{ raise_exception('only\n  users\nspeak') }}", "only users speak"),
        ("{{ messages | map('nothing') | list }}", "No filter named 'nothing'"),
    ],
)
def test_whatever_a_template_raises_is_refused(checkpoint, template, message):
    model = load(checkpoint("llama"))
    model.tokenizer.chat_template = template
    with serving(build(model, "strict")) as place:
        error = refused(place, {"messages": [USER]}, "chat/completions")
    assert error["message"].startswith("messages do not fit the chat template: ")
    assert message in error["message"]
    assert error["param"] == "messages"
