"""Forwards of rows of different lengths without their padding: the tokens of all rows in one line.

A network's layers take tokens one by one, but for attention, and on a CPU each token costs. So they
get [1, tokens] instead of [batch, length]; attention alone sees rows, each over its own cache.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from setblock.masks import CLEAN, PADDING, Layout


@dataclass(frozen=True)
class Line:
    """A batch's tokens without padding, on the host: first the clean ones, then the noisy ones.

    real    [batch, length] where no padding stands
    places  [tokens] where each token stands in the rows, one row behind another
    tokens  [batch * length] which token stands there; any for padding
    """

    real: Bool[Tensor, "batch length"]
    places: Int[Tensor, " tokens"]
    tokens: Int[Tensor, " places"]

    def line(self, rows: Tensor) -> Tensor:
        """[1, tokens, ...] of [batch, length, ...]."""
        return rows.flatten(0, 1).index_select(0, self.places)[None]

    def rows(self, line: Tensor) -> Tensor:
        """[batch, heads, length, width] of [1, heads, tokens, width]; any token's for padding."""
        return line[0].index_select(1, self.tokens).unflatten(1, self.real.shape).transpose(0, 1)


def line_of(layout: Layout) -> Line | None:
    """The line of these places, which are on the host; None where no token is padding."""
    real = layout.document.numpy() != PADDING
    if real.all():
        return None
    noisy = (layout.block.numpy() != CLEAN) & real
    places = np.concatenate([np.flatnonzero(real & ~noisy), np.flatnonzero(noisy)])
    tokens = np.zeros(real.size, dtype=np.int64)
    tokens[places] = np.arange(len(places))
    return Line(*map(torch.from_numpy, (real, places, tokens)))


# What the thread's forward is of. torch.compile can look at it, unlike a context variable, and in a
# class of its own would not see that it is the thread's.
_under_way = threading.local()


@contextmanager
def in_line(line: Line) -> Iterator[None]:
    """Within, a network's forward is of this line, and attention has to part it into rows."""
    before, _under_way.line = under_way(), line
    try:
        yield
    finally:
        _under_way.line = before


def under_way() -> Line | None:
    """The line that the network's forward under way is of; None for one of rows."""
    return getattr(_under_way, "line", None)
