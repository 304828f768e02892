"""Keys and values of texts that were decoded before, for the next prompt that begins like one."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from numpy import ndarray

from setblock.decode import Rows

MOST_TOKENS = 16_384


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

    For one call at a time, and a network whose weights stay as they are.
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

    @contextmanager
    def lent(self, state: Rows) -> Iterator[None]:
        """Meanwhile the state decodes its one row, behind what is known of its prompt. What it has
        encoded then is kept, also of an answer that nobody takes to its end, unless there was an
        error.

        Raises: ValueError if the texts are of another model.
        """
        network = state.model.network
        if self._network is not None and self._network() is not network:
            raise ValueError(
                "prompt_cache holds texts of another model: clear() it, or make one for each model"
            )
        self._network = weakref.ref(network)
        self._fill(state)
        try:
            yield
        except (GeneratorExit, KeyboardInterrupt):  # what the cache says it holds is whole
            self._keep(state)
            raise
        self._keep(state)

    def _fill(self, state: Rows) -> None:
        """Put what is known of the prompt into the state's cache, which is empty; not its last
        token, whose logits are wanted.
        """
        prompt = state.tokens[0, : int(state.prompt_end[0])]
        best = max(reversed(self._texts), key=lambda text: text.common(prompt), default=None)
        count = min(best.common(prompt), len(prompt) - 1) if best else 0
        if best and count:
            state.cache.restore(best.saved, count)
            self._use(best)

    def _keep(self, state: Rows) -> None:
        """Have the text that the state's cache holds among the texts."""
        count = min(int(state.cache.lengths[0]), self.most_tokens)
        tokens = state.tokens[0, :count].copy()
        same = next((text for text in self._texts if text.common(tokens) == count), None)
        if same is not None:
            self._use(same)
            return
        # The new text begins with some of the others, maybe.
        self._texts = [text for text in self._texts if text.common(tokens) < len(text.tokens)]
        while self.num_tokens + count > self.most_tokens:
            del self._texts[0]
        self._texts.append(Text(tokens, state.cache.saved(count)))

    def _use(self, text: Text) -> None:
        self._texts.remove(text)
        self._texts.append(text)
