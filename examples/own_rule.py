"""A solver of your own, for every command: MaskGIT's cosine schedule over confidences.

    setblock --import examples/own_rule.py evaluate nano --task json --no-slide \\
        --solver cosine:4 --solver fixed:4 --solver entropy:0.1

Source of the schedule: arXiv:2202.04200.
"""

import math
from dataclasses import dataclass

import torch

from setblock.solvers import register


@dataclass(frozen=True)
class Cosine:
    """Few positions first, more and more later: a block is revealed in n forwards at most."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")

    def __str__(self) -> str:
        return f"cosine:{self.n}"

    def reveal(self, predictions, masked):
        """The most confident ones, so many that the schedule's share of the block stays masked."""
        slots = masked.shape[1]
        time = (predictions.step + 1).clamp(max=self.n) / self.n
        stay = (slots * torch.cos(time * math.pi / 2)).floor().long()
        count = (masked.sum(1) - stay).clamp(min=1)
        doubt = (1 - predictions.confidence).masked_fill(~masked, torch.inf)
        order = doubt.argsort(dim=1, stable=True)
        return masked & (order.argsort(dim=1) < count[:, None])


register("cosine", Cosine, int, "N")
