"""Log-probabilities over HTTP, in the form of each protocol."""

import math
from typing import Any

import pytest
from servers import QUESTIONS, chat, complete, refused, streamed

from setblock.generation import generate
from setblock.loading import load
from setblock.logprobs import Told
from setblock.results import TokenLogprob


@pytest.mark.parametrize("mode", ["ntp", "sbd", "verified"])
def test_of_a_chat(client, nano, mode):
    expected = generate(nano, QUESTIONS[0], chat=True, mode=mode, max_new_tokens=40, logprobs=3)[0]
    assert expected.logprobs is not None
    how: Any = {"mode": mode, "max_tokens": 40, "logprobs": True, "top_logprobs": 3}
    choice = chat(client, QUESTIONS[0], **how).choices[0]
    ended = expected.finish_reason == "eos"
    assert len(choice.logprobs.content) == expected.num_tokens - ended
    for told, one in zip(choice.logprobs.content, expected.logprobs, strict=False):
        assert told.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert told.bytes == list(told.token.encode())
        assert [each.token for each in told.top_logprobs] == [nano.piece(id) for id, _ in one.top]
    text = "".join(told.token for told in choice.logprobs.content)
    assert text == choice.message.content
    pieces = [
        chunk.choices[0]
        for chunk in chat(client, QUESTIONS[0], stream=True, **how)
        if chunk.choices and chunk.choices[0].logprobs
    ]
    for piece in pieces:
        assert "".join(told.token for told in piece.logprobs.content) == piece.delta.content
    found = [told for piece in pieces for told in piece.logprobs.content]
    assert [told.token for told in found] == [told.token for told in choice.logprobs.content]
    assert math.isclose(found[-1].logprob, choice.logprobs.content[-1].logprob, abs_tol=1e-4)


def test_of_the_tokens_alone(client):
    choice = chat(client, QUESTIONS[0], max_tokens=8, logprobs=True).choices[0]
    assert all(told.top_logprobs == [] for told in choice.logprobs.content)
    assert chat(client, QUESTIONS[0], max_tokens=8).choices[0].logprobs is None


@pytest.mark.parametrize("count", [0, 2])
def test_of_a_completion(client, count):
    how: Any = {"max_tokens": 30, "logprobs": count, "extra_body": {"mode": "verified"}}
    choice = complete(client, QUESTIONS[1], **how).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    starts = [len("".join(told.tokens[:n])) for n in range(len(told.tokens))]
    assert told.text_offset == starts
    if not count:
        assert told.top_logprobs is None
    else:
        for token, value, top in zip(
            told.tokens, told.token_logprobs, told.top_logprobs, strict=True
        ):
            assert top[token] == value
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert len(top) == count
    pieces = [
        chunk.choices[0].logprobs
        for chunk in complete(client, QUESTIONS[1], stream=True, **how)
        if chunk.choices and chunk.choices[0].logprobs
    ]
    assert len(pieces) > 1
    assert [token for piece in pieces for token in piece.tokens] == told.tokens
    assert [place for piece in pieces for place in piece.text_offset] == told.text_offset


def test_a_text_that_is_held_back_has_them_once_it_is_told(client):
    """Where it may become a stop text; what one cuts off has none in a stream."""
    whole = chat(client, QUESTIONS[0], logprobs=True, mode="ntp").choices[0]
    tokens = [told.token for told in whole.logprobs.content]
    stop = "".join(tokens[8:10])
    chunks = list(
        chat(client, QUESTIONS[0], logprobs=True, mode="ntp", stop=[stop, "zzz"], stream=True)
    )
    pieces, _ = streamed(chunks)
    assert "".join(pieces) == whole.message.content.partition(stop)[0]
    told = [
        one.token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert told == tokens[: len(told)]
    assert 7 <= len(told) <= 10


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"logprobs": 3}, "logprobs must be true or false, got 3"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be in 0..20"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs is for logprobs true, got 2 without"),
    ("completions", {"logprobs": 21}, "logprobs must be an integer in 0..20, got 21"),
    ("completions", {"logprobs": True}, "logprobs must be an integer, got True"),
    ("completions", {"top_logprobs": 2}, "top_logprobs is for /v1/chat/completions"),
]


@pytest.mark.parametrize(("path", "fields", "message"), BAD)
@pytest.mark.parametrize("stream", [True, False])
def test_refused(address, path, fields, message, stream):
    turn = {"role": "user", "content": "a"}
    prompt = {"prompt": "a"} if path == "completions" else {"messages": [turn]}
    error = refused(address, {**prompt, "stream": stream, **fields}, path)
    assert message in error["message"]
    assert error["param"] == message.split()[0]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_parts_of_characters(checkpoint, kind):
    """A token for each byte: a part of a character has no bytes of its own, and one text."""
    model = load(checkpoint(kind))
    ids = model.encode("aé")[-3:]
    told = Told(model)
    found = told.of_chat([TokenLogprob(id, -1.0, ((id, -1.0),)) for id in ids])["content"]
    assert [one["token"] for one in found] == ["a", "\ufffd", "\ufffd"]
    assert [one["bytes"] for one in found] == [[97], None, None]
    two = told.of_completion([TokenLogprob(ids[1], -2.0, ((ids[2], -1.0), (ids[1], -2.0)))], 5)
    assert two == {
        "tokens": ["\ufffd"], "token_logprobs": [-2.0], "top_logprobs": [{"\ufffd": -1.0}],
        "text_offset": [5],
    }  # fmt: skip
    [end] = model.eos_token_ids
    assert told.text(end) == model.tokenizer.convert_ids_to_tokens(end)
