"""Keys and values of texts that were decoded before, for the next prompt that begins like one."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from setblock.model import Model
from setblock.state import CHUNK, Rows, put

MOST_TOKENS = 16_384
ALIKE = 128  # tokens that prompts begin with alike, from which on they are encoded once


@dataclass(frozen=True, eq=False)
class Text:
    """tokens: those that `saved` holds the keys and values of, see `PrefixCache.saved`."""

    tokens: Int[ndarray, " length"]
    saved: Any

    def common(self, tokens: Int[ndarray, " other"]) -> int:
        """How many tokens both begin with."""
        count = min(len(self.tokens), len(tokens))
        [other] = (self.tokens[:count] != tokens[:count]).nonzero()
        return int(other[0]) if len(other) else count


class PromptCache:
    """What prompts and answers of one model leave for later prompts: of a conversation that goes on
    only what is new has to be encoded.

    For one thread at a time, and a network whose weights stay as they are.
    most_tokens: of all texts that are kept, together; those that were used longest ago go first.
    The first of a text that is longer are kept.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        """Raises: ValueError for less than one token."""
        if type(most_tokens) is not int or most_tokens < 1:
            raise ValueError(f"most_tokens must be an integer of at least 1, got {most_tokens!r}")
        self.most_tokens = most_tokens
        self._texts: list[Text] = []  # the one that was used longest ago first
        self._network: weakref.ref[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the texts that are kept."""
        return sum(len(text.tokens) for text in self._texts)

    def clear(self) -> None:
        """Keep nothing, and take any model from now on."""
        self._texts, self._network = [], None

    def fill(self, state: Rows) -> None:
        """Put what is known of the prompt into the cache of a state of one row, which is empty; not
        its last token, whose logits are wanted.

        Raises: ValueError if the texts are of another model.
        """
        network = state.model.network
        if self._network is not None and self._network() is not network:
            raise ValueError(
                "prompt_cache holds texts of another model: clear() it, or make one for each model"
            )
        self._network = weakref.ref(network)
        prompt = state.tokens[0, : int(state.prompt_end[0])]
        best = max(reversed(self._texts), key=lambda text: text.common(prompt), default=None)
        count = min(best.common(prompt), len(prompt) - 1) if best else 0
        if best and count:
            state.cache.restore(best.saved, count)
            state.cached[0] = count
            self._use(best)

    def keep(self, state: Rows, slot: int) -> None:
        """Have the text that the state's cache holds of this batch slot among the texts."""
        count = min(int(state.cache.lengths[slot]), self.most_tokens)
        tokens = state.tokens[slot, :count].copy()
        if not count:
            return
        same = next((text for text in self._texts if text.common(tokens) == count), None)
        if same is not None:
            self._use(same)
            return
        saved = state.cache.saved(count, slot)
        if saved is None:  # it would be every other text's too
            return
        # The new text begins with some of the others, maybe.
        self._texts = [text for text in self._texts if text.common(tokens) < len(text.tokens)]
        while self.num_tokens + count > self.most_tokens:
            del self._texts[0]
        self._texts.append(Text(tokens, saved))

    def _use(self, text: Text) -> None:
        self._texts.remove(text)
        self._texts.append(text)


class Beginning:
    """What all of some prompts begin with, encoded once, if that is ALIKE tokens or more; not the
    last token of any, whose logits are wanted.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.tokens: list[int] = []
        if len(prompts) > 1:
            first, last = min(prompts, key=list), max(prompts, key=list)  # all others lie between
            most = min(map(len, prompts)) - 1
            pairs = enumerate(zip(first[:most], last[:most], strict=True))
            count = next((place for place, (one, other) in pairs if one != other), most)
            self.tokens = list(first[:count]) if count >= ALIKE else []
        self._saved: Any = None
        self._forwards = 0

    def fill(self, state: Rows) -> None:
        """Put it into a state's cache, which is empty; its first forwards, of one row, count for
        all prompts.
        """
        count = len(self.tokens)
        if not count:
            return
        self._saved = self._saved or self._encoded(state.model)
        if self._saved is None:  # no numbers, as each finds out for itself
            self.tokens = []
            return
        state.cache.restore(self._saved, count)
        state.prefill_forwards = state.prefill_forwards + self._forwards

    def _encoded(self, model: Model) -> Any:
        count = len(self.tokens)
        cache = model.new_cache(1, count, room=0)
        for first in range(0, count, CHUNK):
            tokens = np.array([self.tokens[first : first + CHUNK]])
            put(model, cache, tokens, np.array([tokens.shape[1]]))
            self._forwards += 1
        return cache.saved(count)
