"""Log-probabilities of an answer's tokens as OpenAI's two protocols tell them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from setblock.model import Model
from setblock.results import TokenLogprob

HALF = "\ufffd"  # what bytes that are no character are read as
MOST_READ = 64  # tokens that are read together, and each has its place


class Placed(NamedTuple):
    """A token, and how many characters of the answer stand before it."""

    token: TokenLogprob
    offset: int


class Piece(str):
    """A piece of an answer's text, and its tokens."""

    def __new__(cls, text: str, tokens: Sequence[Placed]) -> "Piece":
        piece = super().__new__(cls, text)
        piece.tokens = tokens
        return piece

    tokens: Sequence[Placed]


class Told:
    """Tokens and how likely they were, in JSON."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._texts: dict[int, str] = {}
        # A first token may lose its space: a letter before it keeps it.
        self._before = model.tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._cut = len(model.decode(self._before))

    def of_chat(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        """A choice's logprobs in /v1/chat/completions."""
        content = [
            {
                **_entry(self.text(one.token_id), one.logprob),
                "top_logprobs": [_entry(self.name(token), value) for token, value in one.top],
            }
            for one, _ in tokens
        ]
        return {"content": content, "refusal": None}

    def of_completion(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        """A choice's logprobs in /v1/completions."""
        top = []
        for one, _ in tokens:
            # Of tokens with the same text, such as parts of a character, the likeliest counts.
            found: dict[str, float] = {}
            for token, value in (*one.top, (one.token_id, one.logprob)):
                found.setdefault(self.name(token), value)
            top.append(found)
        return {
            "tokens": [self.text(one.token_id) for one, _ in tokens],
            "token_logprobs": [one.logprob for one, _ in tokens],
            "top_logprobs": top if any(one.top for one, _ in tokens) else None,
            "text_offset": [offset for _, offset in tokens],
        }

    def text(self, *tokens: int) -> str:
        """What tokens add to a text; a special one nothing."""
        if len(tokens) != 1:
            return self.model.decode([*self._before, *tokens])[self._cut :]
        [token] = tokens
        if token not in self._texts:
            self._texts[token] = self.model.decode([*self._before, token])[self._cut :]
        return self._texts[token]

    def name(self, token: int) -> str:
        """Its text; of a special token its name."""
        return self.text(token) or self.model.piece(token)


class Placing:
    """The tokens of one answer as they come, each with its place in the text.

    Bytes that are read together, as those of a character are, have their places once it is known
    how they are read.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        self._opening = told.model.byte_ids | told.model.special_token_ids
        self._length = 0  # characters of all tokens but the open ones
        self._begun = False  # whether there are others
        self._open: list[TokenLogprob] = []

    def of(self, logprobs: Iterable[TokenLogprob], ended: bool) -> list[Placed]:
        """The next tokens whose places are known. ended: no others will come."""
        found = []
        for one in logprobs:
            self._open.append(one)
            if not self._is_open():
                found += self._closed()
        return found + (self._closed() if ended and self._open else [])

    def _text(self, tokens: Sequence[TokenLogprob]) -> str:
        ids = [one.token_id for one in tokens]
        return self._told.text(*ids) if self._begun else self._told.model.decode(ids)

    def _is_open(self) -> bool:
        """Whether the next token may change the text of the open ones."""
        last = self._open[-1].token_id
        if last in self._opening:
            return True
        if self._begun and HALF not in self._told.text(last):
            return False
        if len(self._open) > MOST_READ:  # to read them all at each token would take long
            return HALF in self._told.text(last)
        text = self._text(self._open)
        return not text or text.endswith(HALF)

    def _closed(self) -> list[Placed]:
        """The open tokens, of which each begins where the text changes by it."""
        tokens, self._open = self._open, []
        count, place, found = len(tokens), 0, []
        known = {0: "", count - 1: self._text(tokens[:-1]), count: self._text(tokens)}
        if count <= MOST_READ:
            known |= {n: self._text(tokens[:n]) for n in range(1, count - 1)}
        text = known[count]
        for n, one in enumerate(tokens):
            before, after = known.get(n, ""), known.get(n + 1)
            if before != after or not before.endswith(HALF):  # else it is of the same character
                place = max(place, _common(before, text))
            found.append(Placed(one, self._length + place))
        self._length, self._begun = self._length + len(text), True
        return found


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """bytes: null for a part of a character."""
    whole = None if HALF in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": whole}
