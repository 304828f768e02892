"""The text of an answer, token by token: nothing that is handed out is ever taken back."""

from setblock.model import Model

SETTLING = 32  # tokens after which a text is decoded from a later place on


class TextPieces:
    """The committed text of one row, handed out in pieces that are never taken back."""

    def __init__(self, model: Model, stop: tuple[str, ...]) -> None:
        self.model, self.stop = model, stop
        self.text = ""  # all that was handed out
        self._num_ids = 0
        self._opening = model.byte_ids | model.special_token_ids
        # The text of the first `_settled` ids, which those behind them don't change. To decode
        # more, begin at the place settled before: a first token may lose its space.
        self._before, self._settled, self._settled_text = 0, 0, ""

    def extend(self, ids: list[int], ended: bool) -> tuple[list[int], str, bool]:
        """(ids up to the stop text, newly committed text, whether a stop text was met).

        What could still become a stop text or half of a character is held back until `ended`.
        """
        places, full = [], ""
        # After each token, as next-token decoding: what one says may be another text with the next.
        for count in range(self._num_ids + 1, len(ids) + 1) if self.stop else ():
            looked_at = max(len(self._settled_text) - max(map(len, self.stop)), 0)
            full = self._text_of(ids, count)
            found = [full.find(stop, looked_at) for stop in self.stop]
            if places := [place for place in found if place >= 0]:
                ids, full = ids[:count], full[: min(places)]
                break
        stopped = bool(places)
        if not stopped and ended:
            full = self.model.decode(ids)
        elif not stopped:
            full = self._text_of(ids, len(ids) - self._open_end(ids))
            full = full[: len(full) - _held_back(full, self.stop)]
        self._num_ids = len(ids)
        piece = full[len(self.text) :]
        self.text = self.text + piece
        return ids, piece, stopped

    def _text_of(self, ids: list[int], count: int) -> str:
        """The text of ids[:count], of which only what is not settled yet is decoded."""
        known = self.model.decode(ids[self._before : self._settled])
        text = self.model.decode(ids[self._before : count])
        whole = self._settled_text + text[len(known) :]
        if (
            count - self._settled >= SETTLING
            and len(text) > len(known)
            and not text.endswith("\ufffd")  # half of a character
            and not self._open_end(ids[count - 1 : count])
        ):
            self._before, self._settled, self._settled_text = self._settled, count, whole
        return whole

    def _open_end(self, ids: list[int]) -> int:
        """Tokens at the end that stand for one byte each: such are read together, those too between
        which a special token is left out, and until another one comes even a line break may turn
        out to be none.
        """
        count = 0
        while count < len(ids) and ids[-1 - count] in self._opening:
            count += 1
        return count


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of `text` that a later token may change or turn into a stop text."""
    kept = text.rstrip("\ufffd")
    longest = max(
        (n for stop in stops for n in range(1, len(stop)) if kept.endswith(stop[:n])), default=0
    )
    return len(text) - len(kept) + longest
