"""From logits to a token: greedy, or sampled with noise fixed by seed, row and position.

The order of operations is fixed for every mode: the mask token is out already (its logit is -inf),
divide by the temperature, apply top-k, top-p and min-p, add Gumbel noise, take the argmax. The
noise of a position is drawn once and for all from a counter-based generator keyed by (seed, row,
position), so the sampled text does not depend on batch size, batch slot or the order in which
positions are revealed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from setblock.transfer import to_device


@dataclass(frozen=True)
class Sampler:
    """How a token is picked: temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep all.

    min_p: the least probability of a token, as a share of the likeliest one's. Source:
        arXiv:2407.01082.
    """

    temperature: float | int = 0.0
    top_p: float | int = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float | int = 0.0

    def __post_init__(self) -> None:
        t, p, k, seed = self.temperature, self.top_p, self.top_k, self.seed
        if not _is(t, float, int) or not (t == 0 or 1e-45 <= t <= 1e6):  # as float32 has them
            raise ValueError(
                f"temperature must be 0, which is greedy, or lie in 1e-45..1e6, got {t!r}"
            )
        if not _is(p, float, int) or not 0 < p <= 1:
            raise ValueError(f"top_p must be a number in (0, 1], got {p!r}")
        if not _is(self.min_p, float, int) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be a number in 0..1 (0 is off), got {self.min_p!r}")
        if not _is(k, int) or k < 0:
            raise ValueError(f"top_k must be an integer >= 0 (0 keeps every token), got {k!r}")
        if not _is(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an integer in [0, 2**63), got {seed!r}")

    @property
    def seedless(self) -> "Sampler":
        """The same for all that pick alike, given a seed for each row."""
        return replace(self, seed=0) if self.temperature else Sampler()

    def pick(
        self,
        logits: Float[Tensor, "batch block vocab"],
        rows: Int[Tensor, " batch"],
        position: Int[Tensor, "batch block"],
        seeds: Int[Tensor, " batch"] | None = None,
        ids: Int[Tensor, "batch block vocab"] | None = None,
    ) -> Int[Tensor, "batch block"]:
        """The token of each slot; ties go to the smaller id.

        logits: on any device, where the result will be; rows, position, seeds: there, or on the
            host.
        rows: index of each row in the user's input, not its slot in the batch.
        position: absolute positions in the text, the prompt counted.
        seeds: one for each row, instead of `seed`.
        ids: ascending, of the tokens that the logits are of; None for the whole vocabulary.
        """
        # Not argmax, which takes three times as long on a CPU, in bfloat16 five times.
        best = self.perturbed(logits, rows, position, seeds, ids).max(dim=-1).indices
        return best if ids is None else ids.gather(-1, best[..., None])[..., 0]

    def perturbed(
        self,
        logits: Float[Tensor, "batch block vocab"],
        rows: Int[Tensor, " batch"],
        position: Int[Tensor, "batch block"],
        seeds: Int[Tensor, " batch"] | None = None,
        ids: Int[Tensor, "batch block vocab"] | None = None,
        truncate: bool = True,
    ) -> Float[Tensor, "batch block vocab"]:
        """What `pick` takes the argmax of: the logits, with the noise of their places if any.

        truncate: leave out what top_k, top_p and min_p leave out.
        """
        if self.temperature == 0:
            return logits
        seeds = torch.full_like(rows, self.seed) if seeds is None else seeds
        rows, position, seeds = to_device(logits.device, rows, position, seeds)
        if ids is None:
            ids = torch.arange(logits.shape[-1], device=logits.device)
        return self.kept(logits, truncate) + gumbel(seeds, rows, position, ids)

    def kept(
        self, logits: Float[Tensor, "batch block vocab"], truncate: bool = True
    ) -> Float[Tensor, "batch block vocab"]:
        """What noise is added to: the logits by the temperature, the largest 0, with -inf for what
        is left out; greedy ones as they are.
        """
        if self.temperature == 0:
            return logits
        # The largest becomes 0 first, which no temperature, however small, makes overflow.
        never = logits == -torch.inf  # nor is it said where others are no numbers
        logits = logits.float() - logits.float().amax(dim=-1, keepdim=True)
        kept = (logits / self.temperature).masked_fill_(never, -torch.inf)
        if truncate:
            kept = keep_likeliest(kept, self.top_k, self.top_p)
            if self.min_p:  # the largest is 0
                kept = kept.masked_fill(kept < math.log(self.min_p), -torch.inf)
        return kept


@dataclass(frozen=True, eq=False)
class Samplers:
    """As a Sampler, for rows of several.

    kinds: each sampler with the places of its rows, which are all places together.
    """

    kinds: tuple[tuple[Sampler, Int[ndarray, " _"]], ...]

    def pick(
        self,
        logits: Float[Tensor, "batch block vocab"],
        rows: Int[Tensor, " batch"],
        position: Int[Tensor, "batch block"],
        seeds: Int[Tensor, " batch"] | None = None,
        ids: Int[Tensor, "batch block vocab"] | None = None,
    ) -> Int[Tensor, "batch block"]:
        return self._each(Sampler.pick, logits, rows, position, seeds, ids)

    def perturbed(
        self,
        logits: Float[Tensor, "batch block vocab"],
        rows: Int[Tensor, " batch"],
        position: Int[Tensor, "batch block"],
        seeds: Int[Tensor, " batch"] | None = None,
        ids: Int[Tensor, "batch block vocab"] | None = None,
        truncate: bool = True,
    ) -> Float[Tensor, "batch block vocab"]:
        """In float32, whatever the logits are in."""

        def scores(one: Sampler, *given: Any) -> Tensor:
            return one.perturbed(*given, truncate=truncate).float()

        return self._each(scores, logits, rows, position, seeds, ids)

    def _each(self, made: Callable[..., Tensor], logits: Tensor, *given: Tensor | None) -> Tensor:
        """What each sampler makes of its rows, in their places."""
        everything = [one if one is None else to_device(logits.device, one)[0] for one in given]
        places = to_device(logits.device, *(places for _, places in self.kinds))
        parts = [
            made(sampler, logits[here], *(one if one is None else one[here] for one in everything))
            for (sampler, _), here in zip(self.kinds, places, strict=True)
        ]
        return torch.cat(parts)[torch.cat(places).argsort()]


def of_rows(samplers: Sequence[Sampler]) -> Sampler | Samplers:
    """One for all of these rows. Seeds are not told apart."""
    kinds: dict[Sampler, list[int]] = {}
    for place, sampler in enumerate(samplers):
        kinds.setdefault(sampler, []).append(place)
    if len(kinds) < 2:
        return next(iter(kinds), Sampler())
    return Samplers(tuple((one, np.array(places)) for one, places in kinds.items()))


def penalised(
    logits: Float[Tensor, "batch places vocab"],
    text: Int[Tensor, "batch length"],
    prompt_end: Int[Tensor, " batch"],
    start: Int[Tensor, " batch"],
    drafts: Int[Tensor, "batch drafted"],
    penalties: Float[Tensor, "batch 3"],
) -> Float[Tensor, "batch places vocab"]:
    """Next-token logits of the places from each text's `start` on, less what the penalties of
    `settings.PENALTIES` take from tokens before a place.

    text: the answer's begin at prompt_end, and from start on there may be any.
    drafts: the tokens of all places but the last.
    """
    place = torch.arange(text.shape[1], device=logits.device)
    final = place < start[:, None]
    answered = final & (place >= prompt_end[:, None])
    none = torch.zeros(len(logits), 1, logits.shape[-1], device=logits.device)
    met = none.scatter_add(2, text[:, None], final[:, None].float())
    said = none.scatter_add(2, text[:, None], answered[:, None].float())
    if drafts.shape[1]:
        more = none.repeat(1, logits.shape[1], 1)
        more[:, 1:].scatter_(2, drafts[..., None], 1)
        more = more.cumsum(dim=1)
        met, said = met + more, said + more
    repetition, presence, frequency = penalties[:, :, None, None].unbind(dim=1)
    logits = logits.float()
    milder = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(met > 0, milder, logits)
    return logits - frequency * said - presence * (said > 0)


def without_ends(
    logits: Float[Tensor, "batch places vocab"],
    ends: Int[Tensor, " ends"],
    early: Bool[Tensor, "batch places"],
) -> Float[Tensor, "batch places vocab"]:
    """-inf for these tokens in places that are too early for them, unless nothing else is left."""
    barred = torch.where(early[..., None], -torch.inf, logits[..., ends])
    longer = logits.index_copy(-1, ends, barred)
    stuck = longer.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.where(stuck, logits, longer)


def gumbel(
    seeds: Int[Tensor, " batch"],
    rows: Int[Tensor, " batch"],
    position: Int[Tensor, "batch block"],
    ids: Int[Tensor, "*places vocab"],
) -> Float[Tensor, "batch block vocab"]:
    """Standard Gumbel noise in float32, fixed by seed, row, position and token.

    ids: the tokens, the same in all places or those of each.
    The bits are the same on every machine; the logarithms round as each machine has them.
    """
    key = _mixed(_mixed(_mixed(seeds) + rows)[:, None] + position)
    bits = _mixed(key[..., None] + (ids + 1) * GOLDEN)
    # 53 bits in (0, 1), precise near 0, where the large values of the noise come from.
    uniform = (bits >> 11).bitwise_and_((1 << 53) - 1).float().add_(0.5).mul_(2.0**-53)
    exponential = uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the odd number nearest to 2^64 / golden ratio, signed


def _mixed(value: Tensor) -> Tensor:
    """SplitMix64's finalizer: a permutation of 64-bit numbers that looks random. Source: Steele,
    Lea and Flood, Fast splittable pseudorandom number generators (2014).
    """
    value = _folded(value, 30).mul_(0xBF58476D1CE4E5B9 - 2**64)
    value = _folded(value, 27).mul_(0x94D049BB133111EB - 2**64)
    return _folded(value, 31)


def _folded(value: Tensor, shift: int) -> Tensor:
    return (value >> shift).bitwise_and_((1 << 64 - shift) - 1).bitwise_xor_(value)  # unsigned


def keep_likeliest(
    logits: Float[Tensor, "batch block vocab"], top_k: int, top_p: float | int
) -> Float[Tensor, "batch block vocab"]:
    """The logits, -inf outside the top_k likeliest tokens and the smallest set of mass top_p.

    The likeliest token always stays; among equal probabilities the smaller id stays.
    """
    if top_k == 0 and top_p == 1:
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = logits.gather(-1, order)
    if top_k:
        ranked[..., top_k:] = float("-inf")
    if top_p < 1:
        probability = ranked.softmax(dim=-1)
        mass_before = probability.cumsum(dim=-1) - probability
        mass_before[..., 0] = 0
        ranked = ranked.masked_fill(mass_before >= top_p, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ranked)


def _is(value: object, *kinds: type) -> bool:
    """Whether the value is of one of these types; True and False are no numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)
