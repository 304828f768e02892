"""Log-probabilities of an answer's tokens as OpenAI's two protocols tell them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from setblock.model import Model
from setblock.results import TokenLogprob


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
    """The tokens of one answer as they come, each with its place in the text."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._length = 0  # characters of all tokens but those of `_parts`
        self._parts: list[int] = []  # that are not a whole character yet

    def of(self, logprobs: Iterable[TokenLogprob]) -> list[Placed]:
        """The next tokens."""
        found = []
        for one in logprobs:
            whole = self._told.text(*self._parts).rstrip("\ufffd") if self._parts else ""
            found.append(Placed(one, self._length + len(whole)))
            self._parts.append(one.token_id)
            text = self._told.text(*self._parts)
            if not text.endswith("\ufffd"):
                self._length, self._parts = self._length + len(text), []
        return found


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """bytes: null for a part of a character."""
    whole = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": whole}
