"""Tools in a chat, by OpenAI's own client: shown to the model, called by it, answered to it."""

import copy
import json
from typing import Any

import openai
import pytest
import torch
from conftest import copied
from servers import client_of, refused, serving

from setblock.calls import Hearing
from setblock.loading import load
from setblock.masks import CLEAN
from setblock.serve import build

# As Qwen's, whose response template transformers knows.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Of today.", "parameters": PLACE},
}
TOOLS = [TOOL]
ASKED: Any = [{"role": "user", "content": "Rain in Köln?"}]
PARIS, KOELN = ({"name": "weather", "arguments": {"city": city}} for city in ("Paris", "Köln"))


def call(function: Any) -> str:
    text = function if isinstance(function, str) else json.dumps(function, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


class Speaker:
    """A model on a server that answers every chat with one text, whatever the mode."""

    def __init__(self, model: Any, client: openai.OpenAI, address: str) -> None:
        self.model, self.client, self.address = model, client, address
        self.target = torch.zeros(model.context_length + 1, dtype=torch.long)
        forward = model.forward

        def spelling(tokens, layout, cache=None, logits_at=None):
            logits = forward(tokens, layout, cache, logits_at)
            places = layout.position + (layout.block == CLEAN)
            if logits_at is not None:
                places = places[:, logits_at]
            return 20 * torch.nn.functional.one_hot(self.target[places], logits.shape[-1]).float()

        model.forward = spelling

    def prompt(self, messages: Any, **given: Any) -> str:
        template = self.model.tokenizer.apply_chat_template
        return template(messages, tokenize=False, **{"add_generation_prompt": True, **given})

    def say(self, text: str, messages: Any = ASKED, tools: Any = TOOLS, **how: Any) -> None:
        """It answers this conversation so, and then ends."""
        encode = self.model.tokenizer.encode
        start = len(encode(self.prompt(messages, tools=tools, **how), add_special_tokens=False))
        ids = encode(f"{text}<|im_end|>", add_special_tokens=False)
        self.target[start : start + len(ids)] = torch.tensor(ids)

    def asked(self, messages: Any = ASKED, **given: Any) -> Any:
        usual = {"tools": TOOLS, "max_tokens": 200} | given
        own = {name: usual.pop(name) for name in ("mode", "block_size") if name in usual}
        return self.client.chat.completions.create(
            model="qwen", messages=messages, extra_body=own, **usual
        )

    def answered(self, messages: Any = ASKED, **given: Any) -> Any:
        """(text, thoughts, calls, why it ended), which a stream tells too."""
        [choice] = self.asked(messages, **given).choices
        calls = choice.message.tool_calls or []
        assert len({one.id for one in calls}) == len(calls)
        found = [(one.function.name, json.loads(one.function.arguments)) for one in calls]
        thoughts = getattr(choice.message, "reasoning_content", None) or ""
        told = (choice.message.content, thoughts, found, choice.finish_reason)
        assert parts(self.asked(messages, **given, stream=True)) == told
        return told


@pytest.fixture(scope="module")
def speaker(checkpoint, tmp_path_factory):
    saved = checkpoint("qwen3", bos=False, specials=("<|im_start|>", "<|im_end|>"))
    folder = tmp_path_factory.mktemp("speaker") / "qwen"
    model = load(copied(saved, folder, "config.json", max_position_embeddings=2048))
    model.tokenizer.chat_template = TEMPLATE
    model.eos_token_ids |= {*model.tokenizer("<|im_end|>")["input_ids"]}
    with serving(build(model, "qwen")) as address, client_of(address) as client:
        yield Speaker(model, client, address)


def parts(chunks: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """(text, thoughts, calls, why it ended) of a stream."""
    text, thoughts, calls, reason = "", "", [], ""
    for chunk in chunks:
        [choice] = chunk.choices
        text += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        for one in choice.delta.tool_calls or []:
            assert one.index == len(calls)
            calls.append((one.function.name, json.loads(one.function.arguments)))
        reason = choice.finish_reason or reason
    return text, thoughts, calls, reason


MODES: Any = [
    {"mode": "ntp"},
    {"mode": "verified", "block_size": 8},
    {"mode": "sbd", "block_size": 32},
]
BAD = (
    '{"name": "weather", "argum', '{"name": "weather"}', "[1]", "{}", "bad", "",
    '{"name": "", "arguments": {}}', '{"name": 3, "arguments": {}}',
    '{"name": "weather", "arguments": "Paris"}', '{"name": "weather", "arguments": [1]}',
    '{"name": "weather", "arguments": {"city": NaN}}', r'{"name": "\ud800", "arguments": {}}',
)  # fmt: skip
P, K = call(PARIS), call(KOELN)


@pytest.mark.parametrize("mode", MODES)
def test_calls_in_every_mode(speaker, mode):
    said = f"<think>Hm.</think>See.\n{P}\nAnd\n{call('bad')}"
    speaker.say(said)
    calls = [("weather", PARIS["arguments"])]
    told = speaker.answered(**mode)
    assert told == (f"See.\nAnd\n{call('bad')}", "Hm.", calls, "tool_calls")
    assert speaker.asked(**mode).setblock["mode"] == mode["mode"]


@pytest.mark.parametrize(
    ("said", "text", "thoughts", "calls"),
    [
        ("It rains.", "It rains.", "", []),
        ("", "", "", []),
        (" \n It rains. \n", "It rains.", "", []),
        (K, "", "", [KOELN]),
        (f"Let me see.\n{K}\n{P}", "Let me see.", "", [KOELN, PARIS]),
        (f"See.\n{P}\nAnd then\n{K}\nDone.", "See.\nAnd then\nDone.", "", [PARIS, KOELN]),
        (f"<think>Hm.</think>{P}", "", "Hm.", [PARIS]),
        ("<think>\nHm.\n\nYes.\n</think>\n\nIt rains.", "It rains.", "Hm.\n\nYes.", []),
        ("<think>A</think>x<think>B</think>y", "xy", "AB", []),
        (f"<think>{P}</think>ok", "ok", P, []),
        ("<think>Hm, no", "", "Hm, no", []),
        (P.removesuffix("\n</tool_call>"), "", "", [PARIS]),
        (f"<think>think</think>{call('bad')}", call("bad"), "think", []),
        (f"{P}{call('bad')}", call("bad"), "", [PARIS]),
        (f"{call('bad')}{P} so {call('[')}", f"{call('bad')} so {call('[')}", "", [PARIS]),
        ("a <tool_ca b </tool_call> </think>", "a <tool_ca b </tool_call> </think>", "", []),
        ("a \n<tool_c", "a \n<tool_c", "", []),
        ("a <user> b", "a  b", "", []),
        (f"Ünï \U0001f327 {K}", "Ünï \U0001f327", "", [KOELN]),
        (
            "<tool_call>\n[1]\n</tool_call>\n" * 3,
            ("<tool_call>\n[1]\n</tool_call>\n" * 3)[:-1],
            "",
            [],
        ),
    ],
)
def test_calls_of_an_answer(speaker, said, text, thoughts, calls):
    """The same in a stream."""
    mode = {"mode": "sbd", "block_size": 32}
    speaker.say(said)
    named = [(one["name"], one["arguments"]) for one in calls]
    reason = "tool_calls" if calls else "stop"
    assert speaker.answered(**mode) == (text, thoughts, named, reason)
    answer = speaker.asked(**mode)
    tokens = speaker.model.tokenizer.encode(said, add_special_tokens=False)
    assert answer.usage.completion_tokens == len(tokens) + 1, "and its end"


def test_what_the_tools_gave_goes_to_the_model(speaker):
    """In the words of the chat template, which has arguments as objects, as the client has them."""
    speaker.say(f"<think>Hm.</think>{call(KOELN)}")
    said = speaker.asked().choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "wet"}
    more = {"role": "user", "content": "So?"}
    turns = [*ASKED, said.model_dump(), result, more]
    told: Any = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    told["tool_calls"] = [{"id": "1", "type": "function", "function": KOELN}]
    seen = [*ASKED, told, result, more]
    speaker.say("Take an umbrella.", seen)
    answer = speaker.asked(turns)
    assert answer.choices[0].message.content == "Take an umbrella."
    assert '<tool_call>{"name": "weather", "arguments": {"city": "K' in speaker.prompt(seen)
    ids = speaker.model.tokenizer.encode(
        speaker.prompt(seen, tools=TOOLS), add_special_tokens=False
    )
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("bad", BAD)
def test_a_call_that_can_not_be_read_stays_text(speaker, bad, caplog):
    """As the model wrote it, and nothing else of the answer; no log tells what."""
    speaker.say(f"{P} and {call(bad)} so {K}")
    calls = [("weather", one["arguments"]) for one in (PARIS, KOELN)]
    told = speaker.answered(max_tokens=400)
    assert told == (f"and {call(bad)} so", "", calls, "tool_calls")
    assert "a call of a tool stays text" in caplog.text
    assert (bad or "tool_call>") not in caplog.text


def test_a_call_cut_by_the_limit_stays_text(speaker):
    speaker.say(f"{P}\n{K}")
    length = len(P) + 30
    told = speaker.answered(max_tokens=length)
    paris = ("weather", PARIS["arguments"])
    assert told == (f"\n{K}"[:30].strip(), "", [paris], "tool_calls")
    speaker.say(K)
    assert speaker.answered(max_tokens=30) == (K[:30], "", [], "length")


def test_stop_texts(speaker):
    """Before a call, and within one; the end of the answer is none of it."""
    speaker.say(f"Well. Observation: {K}")
    assert speaker.answered(stop=["Observation:"]) == ("Well.", "", [], "stop")
    speaker.say(K)
    assert speaker.answered(stop=["</tool_call>"])[2] == [("weather", KOELN["arguments"])]
    speaker.say("It rains.")
    for stop in ("|", ">", "im_end"):
        assert speaker.answered(stop=[stop]) == ("It rains.", "", [], "stop")


def test_without_tools_the_text_is_as_it_was_said(speaker):
    said = f"<think>Hm.</think>{K}"
    for given in ({"tools": []}, {"tools": openai.omit}, {"tool_choice": "none"}):
        speaker.say(said, tools=None)
        assert speaker.answered(**given) == (said, "", [], "stop")
    speaker.say(said)
    assert speaker.answered(tool_choice="auto")[2]


def test_a_message_that_is_gone_on_with(speaker):
    """What it says already is not told again, but tells what follows."""

    def goes_on(begun: str, said: str) -> Any:
        turns = [*ASKED, {"role": "assistant", "content": begun}]
        more = {"add_generation_prompt": False, "continue_final_message": True}
        speaker.say(said, turns, **more)
        return speaker.answered(turns)

    paris = ("weather", PARIS["arguments"])
    assert goes_on("It is", " raining.") == ("raining.", "", [], "stop")
    assert goes_on("<think>Well", f", no.</think>{P}") == ("", ", no.", [paris], "tool_calls")
    assert goes_on(P, "Well.") == ("Well.", "", [], "stop")
    assert goes_on(P[:40], P[40:]) == ("", "", [paris], "tool_calls")
    # What might have become a mark.
    assert goes_on("Is 1 <", " 2?") == ("2?", "", [], "stop")
    assert goes_on("see <tool", "box.") == ("box.", "", [], "stop")
    assert goes_on("Is 1 <", "") == ("", "", [], "stop")
    assert goes_on("<think>a <", " 2</think>ok") == ("ok", "2", [], "stop")
    assert goes_on("<think>a </thi", "nk>ok") == ("ok", "", [], "stop")
    assert goes_on("So <tool_c", P.removeprefix("<tool_c")) == ("", "", [paris], "tool_calls")
    body = {"messages": [*ASKED, {"role": "assistant", "content": call("bad")}], "tools": TOOLS}
    error = refused(speaker.address, body, "chat/completions")
    assert error["message"] == "messages end with a call of a tool that can't be read"


def test_what_is_null_in_tools_and_calls_is_not_there(speaker):
    """Nor what asks for nothing."""
    plain = {"name": "weather", "parameters": PLACE}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": KOELN}]}
    result = {"role": "tool", "content": "wet", "tool_call_id": "1"}
    more = {"description": None, "strict": False}
    named = {"name": "weather", "arguments": json.dumps(KOELN["arguments"])}
    told = [{"index": 0, "id": "1", "type": None, "function": named}]
    speaker.say("So.", [*ASKED, turn, result], [{"type": "function", "function": plain}])
    counts = {
        speaker.asked(
            [*ASKED, {**turn, "tool_calls": calls}, result], tools=[tool]
        ).usage.prompt_tokens
        for calls in ([{"id": "1", "function": named}], told)
        for tool in ({"type": "function", "function": plain}, {"function": {**plain, **more}})
    }
    assert len(counts) == 1


def test_a_response_template_of_the_tokenizer_s_own(speaker, monkeypatch):
    """Goes before what transformers knows; special tokens may be its marks."""
    function = {"name": "{name}", "arguments": "{content}"}
    fields = {
        "tool_calls": {
            "open_pattern": r"<user>(?P<name>\w+)",
            "close": "<model>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": function},
        },
        "content": {"close": ["<|im_end|>"], "content": "text"},
    }
    own: dict[str, Any] = {"defaults": {"role": "assistant"}, "fields": fields}
    monkeypatch.setattr(speaker.model.tokenizer, "response_template", own, raising=False)
    body = {"messages": ASKED, "tools": TOOLS}
    wrong = refused(speaker.address, body, "chat/completions")["message"]
    assert wrong.startswith("tools can't be used, as the tokenizer's response_template is wrong: ")
    own["start_anchor"] = "<|im_start|>assistant\n"
    bonn = ("weather", {"city": "Bonn"})
    speaker.say('Well. <user>weather{"city": "Bonn"}<model>')
    for defaults in ({"role": "assistant"}, {"tool_calls": []}):
        own["defaults"] = defaults
        assert speaker.answered() == ("Well.", "", [bonn], "tool_calls")
    speaker.say('Well. <user>weather{"city": <model><|im_start|>')
    assert speaker.answered()[0] == 'Well. <user>weather{"city": <model>', "as the model wrote it"
    fields["tool_calls"] |= {"open": "<user>", "content": "json", "repeats": False}
    del fields["tool_calls"]["open_pattern"], fields["tool_calls"]["transform"]
    calls = json.dumps([{"function": one} for one in (PARIS, KOELN)])
    speaker.say(f"<user>{calls}<model>")
    assert [arguments for _, arguments in speaker.answered()[2]] == [
        PARIS["arguments"], KOELN["arguments"]
    ]  # fmt: skip


def answers_by(speaker, monkeypatch, said: str, **changes: Any) -> Any:
    """With these changes to how Qwen's template marks calls."""
    own = copy.deepcopy(Hearing(speaker.model, lambda *a, **k: None, []).response_template)
    calls = own["fields"]["tool_calls"]
    own["fields"]["tool_calls"] = {k: v for k, v in (calls | changes).items() if v is not None}
    monkeypatch.setattr(speaker.model.tokenizer, "response_template", own, raising=False)
    speaker.say(said)
    return speaker.answered()


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        (f"{call('bad')}xy z", f"{call('bad')}xy z", []),
        (f"{call('[1]')}\n\nxy z", f"{call('[1]')}\n\nxy z", []),
        (f"{call('[1]')}{P}", call("[1]"), [("weather", PARIS["arguments"])]),
        (f"{P}xy", "xy", [("weather", PARIS["arguments"])]),
    ],
)
def test_marks_that_are_known_a_character_later(speaker, monkeypatch, said, text, calls):
    changes = {"close": None, "close_pattern": r"\s*</tool_call>"}
    told = answers_by(speaker, monkeypatch, said, **changes)
    assert told == (text, "", calls, "tool_calls" if calls else "stop")


def test_special_tokens_within_a_call(speaker, monkeypatch):
    """As marks of texts, and in patterns that do not spell them out."""
    args = {"unquoted_keys": True, "string_delims": [["<model>", "<model>"]]}
    changes = {"open_pattern": r"<u[rs]er>", "close": "</tool_call>", "content_args": args}
    said = "<user>{name:<model>weather<model>,arguments:{city:<model>Bonn<model>}}</tool_call>"
    told = answers_by(speaker, monkeypatch, said, **changes)
    assert told == ("", "", [("weather", {"city": "Bonn"})], "tool_calls")


def test_a_call_without_its_end_is_told_if_all_of_it_is_there(speaker, monkeypatch):
    """Which only JSON can say."""
    function = {"name": "{name}", "arguments": "{content}"}
    changes = {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close": None,
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        "transform": {"type": "function", "function": function},
    }
    said = "<tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>"
    assert answers_by(speaker, monkeypatch, said, **changes) == (said, "", [], "stop")
    told = answers_by(speaker, monkeypatch, f"{said}</function></tool_call>", **changes)
    assert told == ("", "", [("weather", PARIS["arguments"])], "tool_calls")


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


def test_the_text_part_of_a_larger_network(speaker, monkeypatch):
    monkeypatch.setattr(speaker.model.network.config, "model_type", "gemma4_text")
    hearing = Hearing(speaker.model, lambda *a, **k: None, [])
    assert "call:" in hearing.response_template["fields"]["tool_calls"]["open_pattern"]


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
    ({"tool_choice": "required"}, "tool_choice is not supported, only 'none' or 'auto'; got 'req"),
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
