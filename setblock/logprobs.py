"""Log-probabilities of an answer's tokens as OpenAI's two protocols tell them."""

from collections.abc import Sequence
from typing import Any

from setblock.model import Model
from setblock.results import Generation, TokenLogprob


class Piece(str):
    """A piece of an answer's text, and its tokens' log-probabilities.

    offset: characters of the text before it.
    """

    def __new__(cls, text: str, logprobs: Sequence[TokenLogprob], offset: int) -> "Piece":
        piece = super().__new__(cls, text)
        piece.logprobs, piece.offset = logprobs, offset
        return piece

    logprobs: Sequence[TokenLogprob]
    offset: int


def of_text(
    logprobs: Sequence[TokenLogprob], generation: Generation | None
) -> Sequence[TokenLogprob]:
    """Without the end token, which is no part of a text. generation: None before the end."""
    ended = generation is not None and generation.finish_reason == "eos"
    return logprobs[:-1] if ended else logprobs


class Told:
    """Tokens and how likely they were, in JSON."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._texts: dict[int, str] = {}
        # A first token may lose its space: a letter before it keeps it.
        self._before = model.tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._cut = len(model.decode(self._before))

    def of_chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """A choice's logprobs in /v1/chat/completions."""
        content = [
            {
                **self._of(one.token_id, one.logprob),
                "top_logprobs": [self._of(*pair) for pair in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def of_completion(self, logprobs: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
        """A choice's logprobs in /v1/completions. offset: characters of the text before them."""
        tokens, offsets, top = [], [], []
        for one in logprobs:
            tokens.append(self.text(one.token_id))
            offsets.append(offset)
            offset += len(tokens[-1])
            # Of tokens with the same text, such as parts of a character, the likeliest counts.
            found: dict[str, float] = {}
            for token, value in (*one.top, (one.token_id, one.logprob)):
                found.setdefault(self.text(token), value)
            top.append(found)
        asked = any(one.top for one in logprobs)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": top if asked else None,
            "text_offset": offsets,
        }

    def text(self, token: int) -> str:
        """As it stands within a text; the name of a special token."""
        if token not in self._texts:
            text = self.model.decode([*self._before, token])[self._cut :]
            self._texts[token] = text or self.model.piece(token)
        return self._texts[token]

    def _of(self, token: int, logprob: float) -> dict[str, Any]:
        """bytes: null for a part of a character."""
        text = self.text(token)
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": whole}
