"""Tools in a chat, by OpenAI's own client: shown to the model, called by it, answered to it."""

import copy
import json
from typing import Any

import openai
import pytest
from servers import refused
from speakers import ASKED, KOELN, PARIS, PLACE, TOOLS, call, parts

from setblock.calls import Hearing

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


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_of_several_answers(speaker, choice):
    """Each has its own, by ids that no other call has."""
    mode = {"mode": "ntp", "n": 3, "tool_choice": choice}
    speaker.say(f"<think>Hm.</think>See.\n{K}" if choice == "auto" else K.replace("\n", ""))
    choices = speaker.asked(**mode).choices
    found = [call for choice in choices for call in choice.message.tool_calls]
    assert [one.function.name for one in found] == ["weather"] * 3
    assert [json.loads(one.function.arguments) for one in found] == [KOELN["arguments"]] * 3
    assert len({one.id for one in found}) == 3
    texts = {(one.message.content, one.finish_reason, one.index) for one in choices}
    text = "See." if choice == "auto" else ""
    assert texts == {(text, "tool_calls", index) for index in range(3)}
    chunks = list(speaker.asked(**mode, stream=True))
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        thoughts = "Hm." if choice == "auto" else ""
        calls = [("weather", KOELN["arguments"])]
        assert parts(own) == (text, thoughts, calls, "tool_calls")


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
    own = copy.deepcopy(Hearing(speaker.model, str, [], {}, str).response_template)
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


def test_the_text_part_of_a_larger_network(speaker, monkeypatch):
    monkeypatch.setattr(speaker.model.network.config, "model_type", "gemma4_text")
    hearing = Hearing(speaker.model, str, [], {}, str)
    assert "call:" in hearing.response_template["fields"]["tool_calls"]["open_pattern"]
