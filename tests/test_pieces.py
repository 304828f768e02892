"""The text of an answer in pieces, for tokens of every kind, however they arrive."""

from typing import Any
from unittest.mock import patch

import pytest
from fakes import BOS, ByteModel, FallbackModel, TableModel, saying, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from setblock import pieces
from setblock.generation import generate, stream
from setblock.pieces import TextPieces

MODES = ["sbd", "ntp"]


def test_half_a_character_is_held_back():
    model = saying(tokens_of("é€😀a"), model_class=ByteModel)
    reveals = list(stream(model, [[BOS]], mode="ntp", max_new_tokens=20))
    assert [reveal.text for reveal in reveals] == ["", "é", "", "", "€", "", "", "", "😀", "a", ""]


def test_a_character_that_stays_half_is_handed_out_at_the_end():
    model = saying(tokens_of("a€"), model_class=ByteModel)
    reveals = list(stream(model, [[BOS]], mode="ntp", max_new_tokens=3))
    assert [reveal.text for reveal in reveals] == ["a", "", "\ufffd"]
    assert reveals[-1].generation is not None
    assert reveals[-1].generation.text == "a\ufffd"


@pytest.mark.parametrize("mode", [*MODES, "verified"])
def test_a_line_break_stops_before_bytes_that_are_no_text(mode):
    """Read together with the byte behind it, it is no line break any more."""
    model = saying([*FallbackModel.tokens_of("a\n"), 12, 3], model_class=FallbackModel)
    run = {"mode": mode, "stop": "\n", "max_new_tokens": 8}
    run |= {} if mode == "ntp" else {"block_size": 4}
    [answer] = generate(model, [[BOS]], **run)
    assert (answer.text, answer.finish_reason, answer.num_tokens) == ("a", "stop", 2)


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.integers(3, 2 + len(ByteModel.BYTES)), min_size=1, max_size=24)
    | st.text("aé€😀", min_size=1, max_size=8).map(tokens_of),
    stops=st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=3),
    cuts=st.sets(st.integers(1, 23)),
    settling=st.sampled_from([1, 3, 32]),
)
def test_pieces_however_the_tokens_arrive(ids, stops, cuts, settling):
    check_pieces(saying([3], model_class=ByteModel), ids, stops, cuts, settling)


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.integers(3, 3 + len(FallbackModel.BYTES)), min_size=1, max_size=24)
    | st.text("a\n€😀", min_size=1, max_size=8).map(FallbackModel.tokens_of),
    stops=st.lists(st.text("a\n€😀", min_size=1, max_size=3), max_size=3),
    cuts=st.sets(st.integers(1, 23)),
    settling=st.sampled_from([1, 3, 32]),
)
def test_pieces_of_a_tokenizer_that_falls_back_to_bytes(ids, stops, cuts, settling):
    check_pieces(saying([3], model_class=FallbackModel), ids, stops, cuts, settling)


class Pieces(TableModel):
    """A tokenizer of the library tokenizers, in the form of its decoder, and words for tokens."""

    WORDS = (
        "<s>",
        "▁",
        "▁a",
        "b",
        "bc",
        "##d",
        "▁ab",
        "ab▁c",
        "<0x0A>",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
    )

    def __init__(self, decoder: Any, words: tuple[str, ...]) -> None:
        self.library = Tokenizer(WordLevel(dict(zip(words, range(len(words)), strict=True)), "b"))
        self.library.decoder = decoder
        self.library.add_special_tokens(["<s>"])
        self.special_token_ids = frozenset([0])
        self.byte_ids = frozenset(n for n, word in enumerate(words) if word.startswith("<0x"))

    def decode(self, ids: list[int]) -> str:
        return self.library.decode(ids)


DECODERS = {
    "bytes": (
        decoders.ByteLevel(),
        ("<s>", "Ġ", "Ġa", "b", "bc", "Ċ", "Ġab", "abĠc", "â", "Ĥ", "¬"),
    ),
    "pieces": (decoders.Metaspace(), Pieces.WORDS),
    "words": (decoders.WordPiece(cleanup=False), Pieces.WORDS[:8]),
    "fallback": (
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        Pieces.WORDS,
    ),
}


@pytest.mark.parametrize("kind", DECODERS)
@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.integers(0, 11), min_size=1, max_size=24),
    stops=st.lists(st.text("abc \n€", min_size=1, max_size=3), max_size=3),
    cuts=st.sets(st.integers(1, 23)),
    settling=st.sampled_from([1, 3, 32]),
)
def test_pieces_of_every_kind_of_decoder(kind, ids, stops, cuts, settling):
    decoder, words = DECODERS[kind]
    ids = [token % len(words) for token in ids]
    check_pieces(Pieces(decoder, words), ids, stops, cuts, settling)


def check_pieces(model, ids, stops, cuts, settling) -> None:
    # Next-token decoding: the first token after which the text holds a stop text ends it.
    expected, text, stops_there = ids, model.decode(ids), False
    for count in range(1, len(ids) + 1):
        grown = model.decode(ids[:count])
        if places := [grown.find(stop) for stop in stops if stop in grown]:
            expected, text, stops_there = ids[:count], grown[: min(places)], True
            break
    found, handed_out, kept = TextPieces(model, tuple(stops)), "", []
    for count in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        with patch.object(pieces, "SETTLING", settling):
            kept, piece, stopped = found.extend(ids[:count], ended=count == len(ids))
        handed_out += piece
        assert text.startswith(handed_out), "a piece would have to be taken back"
        assert stopped == (stops_there and count >= len(expected))
        if stopped:
            break
    assert (kept, handed_out, found.text) == (expected, text, text)
