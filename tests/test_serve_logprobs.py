"""Log-probabilities over HTTP, in the form of each protocol."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from servers import QUESTIONS, chat, complete, refused, streamed
from test_pieces import DECODERS, Pieces

from setblock.generation import generate
from setblock.loading import load
from setblock.logprobs import Placed, Placing, Told
from setblock.results import TokenLogprob


@pytest.mark.parametrize("mode", ["ntp", "sbd", "verified"])
def test_of_a_chat(client, nano, mode):
    expected = generate(nano, QUESTIONS[0], chat=True, mode=mode, max_new_tokens=40, logprobs=3)[0]
    assert expected.logprobs is not None
    how: Any = {"mode": mode, "max_tokens": 40, "logprobs": True, "top_logprobs": 3}
    choice = chat(client, QUESTIONS[0], **how).choices[0]
    ended = expected.finish_reason == "eos"  # by a token without text
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


def told_in(chunks: Any, name: str) -> list[Any]:
    """What all pieces of a stream tell of their tokens."""
    found = (chunk.choices[0].logprobs for chunk in chunks if chunk.choices)
    return [one for logprobs in found if logprobs for one in getattr(logprobs, name)]


@pytest.mark.parametrize("mode", ["ntp", "sbd", "verified"])
@pytest.mark.parametrize("never", [(), ("zzz", '": "lé')])
def test_a_stop_text_has_none(client, mode, never):
    """Nor has what is cut off; a token that is cut has its whole text. Streams tell the same."""
    whole = chat(client, QUESTIONS[0], logprobs=True, mode=mode).choices[0]
    tokens = [told.token for told in whole.logprobs.content]
    for stop in ("".join(tokens[8:10]), tokens[9][-1:]):
        how: Any = {"logprobs": True, "mode": mode, "stop": [stop, *never]}
        choice = chat(client, QUESTIONS[0], **how).choices[0]
        found = [told.token for told in choice.logprobs.content]
        assert "".join(found).startswith(choice.message.content)
        assert not "".join(found[:-1]).startswith(choice.message.content)
        chunks = list(chat(client, QUESTIONS[0], stream=True, **how))
        assert [told.token for told in told_in(chunks, "content")] == found
        assert "".join(streamed(chunks)[0]) == choice.message.content


PIECES: list[dict[str, Any]] = [
    {"stop": ['": "lé', "zzz"]},
    {"regex": "(é|🙂|日本|a){4,9}"},
    {"ignore_eos": True},
]


@pytest.mark.parametrize("mode", ["ntp", "sbd", "verified"])
@pytest.mark.parametrize("more", PIECES)
def test_places_are_those_of_the_text(client, mode, more):
    """Of parts of characters too, and behind special tokens; streams tell the same."""
    if "regex" in more and mode == "sbd":
        mode = None
    own = {name: value for name, value in {**more, "mode": mode}.items() if value is not None}
    how: Any = {"max_tokens": 40, "logprobs": 1, "stop": own.pop("stop", None), "extra_body": own}
    choice = complete(client, QUESTIONS[1], **how).choices[0]
    told = choice.logprobs
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset : offset + len(token)] == token
    if "regex" not in more:
        assert "".join(told.tokens) == choice.text
    else:
        assert told.text_offset == sorted(told.text_offset)
        assert len(set(told.text_offset)) == len(choice.text)
    chunks = list(complete(client, QUESTIONS[1], stream=True, **how))
    assert told_in(chunks, "tokens") == told.tokens
    assert told_in(chunks, "text_offset") == told.text_offset


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


def byte_ids(model: Any, text: bytes) -> list[int]:
    """A token for each byte, of a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return model.tokenizer.convert_tokens_to_ids([letters[byte] for byte in text])


def places(model: Any, ids: list[int], cut: int) -> list[int]:
    """Of each token's beginning, if they come so many at a time."""
    placing, found = Placing(Told(model)), []
    tokens = [TokenLogprob(id, -1.0, ()) for id in ids]
    for first in range(0, len(ids), cut):
        found += placing.of(tokens[first : first + cut], first + cut >= len(ids))
    assert [one.token_id for one, _ in found] == ids
    return [offset for _, offset in found]


@pytest.mark.parametrize("cut", [1, 3, 500])
def test_places_of_bytes_that_are_no_character(nano, cut):
    """Each is a U+FFFD of the text, but for the parts of a character that was begun."""
    for text, expected in (
        (b"a\xffb c", [0, 1, 2, 3, 4]),
        (b"\xc3abc", [0, 1, 2, 3]),
        (b"\xe2\x82ab", [0, 0, 1, 2]),
        (b"a\xf0\x9fb\xc3\xa9", [0, 1, 1, 2, 3, 3]),
        (b"\xff\xff\xffab", [0, 1, 2, 3, 4]),
        ("a\ufffdb".encode(), [0, 1, 1, 1, 2]),
        ("🙂日b".encode(), [0, 0, 0, 0, 1, 1, 1, 2]),
    ):
        assert places(nano, byte_ids(nano, text), cut) == expected
    long = byte_ids(nano, b"a" + b"\xff" * 200 + b"bc")
    assert places(nano, long, cut)[-2:] == [201, 202]


@pytest.mark.parametrize("cut", [1, 3, 500])
def test_places_where_a_first_space_is_lost(nano, cut):
    """And bytes beside each other are read together, as in Llama 2."""
    model: Any = Pieces(*DECODERS["fallback"])
    id_of = model.library.token_to_id
    model.tokenizer = SimpleNamespace(encode=lambda *_, **__: [id_of("b")])
    for words, text, expected in (
        ("▁a b ▁a", "ab a", [0, 1, 2]),
        ("▁ ▁a b", " ab", [0, 0, 2]),
        ("b <0xE2> <0x82> <0xAC> b", "b€b", [0, 1, 1, 1, 2]),
        ("b <0xE2> <0x82> b ▁a", "b\ufffd\ufffdb a", [0, 1, 2, 3, 4]),
        ("<s> ▁a b", "ab", [0, 0, 1]),
    ):
        ids = [id_of(word) for word in words.split()]
        assert model.decode(ids) == text
        assert places(model, ids, cut) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_parts_of_characters(checkpoint, kind):
    """A token for each byte: a part of a character has no bytes of its own, and one text."""
    model = load(checkpoint(kind))
    ids = model.encode("aé")[-3:]
    told = Told(model)
    tokens = [TokenLogprob(id, -1.0, ((id, -1.0),)) for id in [*ids, ids[0]]]
    placed = Placing(told).of(tokens, True)
    assert [offset for _, offset in placed] == [0, 1, 1, 2]
    found = told.of_chat(placed[:3])["content"]
    assert [one["token"] for one in found] == ["a", "\ufffd", "\ufffd"]
    assert [one["bytes"] for one in found] == [[97], None, None]
    part = TokenLogprob(ids[1], -2.0, ((ids[2], -1.0), (ids[1], -2.0)))
    two = told.of_completion([Placed(part, 5)])
    assert two == {
        "tokens": ["\ufffd"], "token_logprobs": [-2.0], "top_logprobs": [{"\ufffd": -1.0}],
        "text_offset": [5],
    }  # fmt: skip
    [end] = model.eos_token_ids
    assert (told.text(end), told.name(end)) == ("", model.tokenizer.convert_ids_to_tokens(end))
