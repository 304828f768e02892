"""Layers that read the same tokens: what can be computed for all of them in one is.

transformers' classes call such layers one after the other, with one and the same tensor.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

# By the names that transformers' classes give them.
READ_THE_SAME = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def groups(names: Iterable[str]) -> list[list[str]]:
    """Names of a network's layers, those together that read the same tokens."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        owner, _, last = name.removesuffix(".base").rpartition(".")  # a gated layer's own
        same = next((some for some in READ_THE_SAME if last in some), (last,))
        found.setdefault((owner, *same), []).append(name)
    return list(found.values())


class Once:
    """A function of a tensor, computed once for so many calls in a row with one tensor.

    All of them get the same result; who writes into it, writes into a part that nobody else reads.
    """

    def __init__(self, function: Callable[..., Tensor], calls: int) -> None:
        self.function, self.calls = function, calls
        # (tensor, what was computed of it, how many calls are still to come)
        self.kept: tuple[Tensor, Tensor, int] | None = None

    def __call__(self, tokens: Tensor, *more: Any) -> Tensor:
        """more: what the function takes besides, the same in each of these calls."""
        kept = self.kept
        if kept is not None and kept[0] is tokens:
            _, result, left = kept
        else:
            result, left = self.function(tokens, *more), self.calls
        self.kept = (tokens, result, left - 1) if left > 1 else None
        return result
