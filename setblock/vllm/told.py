"""How likely the tokens of blocks are, from when they are chosen to when vLLM is given them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from setblock.sampling import Sampler
from setblock.settings import MOST_LOGPROBS


class Told(NamedTuple):
    """Of tokens in places [...]: each and the likeliest in its place, with their values, both
    [..., 1 + most]; and its rank, 1 of the likeliest, [..., 1].
    """

    ids: Tensor
    values: Tensor
    rank: Tensor


def told_of(
    raw: Tensor, picked: Tensor, sampler: Sampler, tokens: Tensor, most: int, mode: str
) -> Told:
    """raw: logits. picked: those that the tokens are picked from, before the sampler sees them.
    mode: vLLM's `--logprobs-mode`: "raw" is of the former, "processed" of what the sampler makes of
    the latter; as logits, or as logarithms of probabilities.
    """
    logits = sampler.kept(picked) if mode.startswith("processed") else raw
    if mode == "processed_logits" and sampler.temperature:  # of which the largest is 0
        logits = logits + picked.amax(dim=-1, keepdim=True) / sampler.temperature
    own = tokens[..., None]
    ids = torch.cat([own, logits.topk(min(most, logits.shape[-1]), dim=-1).indices], dim=-1)
    values, rank = logits.gather(-1, ids), logits >= logits.gather(-1, own)
    if mode.endswith("logprobs"):
        values = values - logits.logsumexp(dim=-1, keepdim=True)
    return Told(ids, values, rank.sum(dim=-1, keepdim=True))


class Telling:
    """What is known of the tokens of each slot's block, and what a step tells of those it says."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.blocks = self._none(state.max_num_reqs, MOST_LOGPROBS)
        self.said = self._none(0, 0)
        self.lines = np.zeros(1, dtype=np.int64)  # of each request of the step in `said`, and all

    def _none(self, count: int, most: int) -> Told:
        place, device = (count, self.state.canvas), self.state.device
        ids, rank = (
            torch.zeros(*place, width, dtype=torch.int64, device=device) for width in (1 + most, 1)
        )
        return Told(ids, torch.zeros_like(ids, dtype=torch.float32), rank)

    def begin(self, most: np.ndarray) -> None:
        """A step. most: of how many of the likeliest each request tells; -1 if it tells nothing."""
        self.lines = np.concatenate([[0], (most >= 0).cumsum()])
        self.said = self._none(int(self.lines[-1]), int(most.max(initial=0)))

    def keep(self, slots: Tensor, told: Told, where: Tensor, begin: int = 0) -> None:
        """These are of the tokens of the slots' blocks from `begin` on, where it says so."""
        for kept, new in zip(self.blocks, told, strict=True):
            _, width, columns = new.shape
            there = slots, slice(begin, begin + width), slice(columns)
            kept[there] = torch.where(where[..., None], new, kept[there])

    def say(self, places: np.ndarray, slots: Tensor, width: int, told: Told | None = None) -> None:
        """What the requests in these places of the step may say: so many tokens of their blocks.

        told: of those behind the first, if this step has judged them.
        """
        lines = self.state.sent(self.lines[places])
        for said, kept in zip(self.said, self.blocks, strict=True):
            said[lines, :width] = kept[slots, :width, : said.shape[-1]]
        for said, new in zip(self.said, told or (), strict=told is not None):
            said[lines, 1:width, : new.shape[-1]] = new[:, : width - 1]

    def tensors(self) -> Any:
        """The step's, as vLLM takes them; None if nothing is told."""
        if not len(self.said.rank):
            return None
        from vllm.v1.outputs import LogprobsTensors  # type: ignore

        ids, values, rank = (one.flatten(0, 1) for one in self.said)
        return LogprobsTensors(ids, values, rank[:, 0], (self.lines * self.state.canvas).tolist())
