"""Which masked positions to reveal now, chosen from what the model predicts at each of them.

A solver is a value with one method, `reveal(predictions, masked)`. Every solver reveals at least
one position of a row that still holds a mask, and none of a row that holds no mask; equal scores go
to the smaller position. Predictions are the model's own: no temperature, and logits of -inf in the
mask token's column, since that token is never generated.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from setblock.transfer import to_device

Logits = Float[Tensor, "batch block vocab"]
Score = Float[Tensor, "batch block"]
Positions = Bool[Tensor, "batch block"]
Number = float | int
Order = Literal["entropy", "confidence", "margin"]


class Predictions:
    """What a model predicts at each position of a block; each score is computed once."""

    def __init__(
        self,
        logits: Logits,
        places: Int[ndarray, "batch block"] | None = None,
        steps: Int[ndarray, " batch"] | None = None,
    ) -> None:
        """places, steps: what `place` and `step` are, on the host; None outside a decoding run."""
        self.logits, self._places, self._steps = logits, places, steps

    @cached_property
    def probability(self) -> Logits:
        """Of each token, in float32."""
        return probability_of(self.logits)

    @cached_property
    def entropy(self) -> Score:
        """Of each prediction, in nats."""
        return entropy_of(self.probability)

    @cached_property
    def confidence(self) -> Score:
        """The largest probability of each prediction."""
        return self.probability.amax(-1)

    @cached_property
    def margin(self) -> Score:
        """The largest probability of each prediction, minus the second largest."""
        first, second = self.probability.topk(2).values.unbind(-1)
        return first - second

    @cached_property
    def place(self) -> Int[Tensor, "batch block"]:
        """Of each position in the row's answer, whose first token has place 0."""
        return self._told("place", self._places)

    @cached_property
    def step(self) -> Int[Tensor, " batch"]:
        """How many forwards each row's block had before this one; a block that slides is a new one
        in every forward.
        """
        return self._told("step", self._steps)

    def _told(self, name: str, value: ndarray | None) -> Tensor:
        if value is None:
            raise ValueError(f"predictions outside a decoding run have no {name}")
        [told] = to_device(self.logits.device, value)
        return told.clone()  # on a CPU it is the state's own memory


class Certain(Predictions):
    """Predictions whose scores leave no doubt at some positions; logits and probabilities are the
    model's.
    """

    def __init__(self, predictions: Predictions, certain: Positions) -> None:
        super().__init__(predictions.logits, predictions._places, predictions._steps)
        self.before, self.certain = predictions, certain

    @cached_property
    def entropy(self) -> Score:
        return self.before.entropy.masked_fill(self.certain, 0)

    @cached_property
    def confidence(self) -> Score:
        return self.before.confidence.masked_fill(self.certain, 1)

    @cached_property
    def margin(self) -> Score:
        return self.before.margin.masked_fill(self.certain, 1)


@runtime_checkable
class Solver(Protocol):
    """A rule that picks the positions to reveal; `str` gives the text that `parse` reads."""

    def reveal(self, predictions: Predictions, masked: Positions) -> Positions:
        """The masked positions to reveal now: of each row with one, one at least.

        predictions: logits [batch, slots, vocab], probability, entropy in nats, confidence, margin
        and place of every slot, step [batch] of every row. masked: [batch, slots], like the result.
        """
        ...


def revealed_by(solver: Solver, predictions: Predictions, masked: Positions) -> Positions:
    """What a rule reveals, whoever wrote it; it may change `masked` in place.

    Raises: TypeError for what is no boolean tensor like `masked`.
    """
    found: object = solver.reveal(predictions, masked.clone())
    if isinstance(found, Tensor) and found.dtype == torch.bool and found.shape == masked.shape:
        return found
    got = type(found).__name__
    if isinstance(found, Tensor):
        got = f"{list(found.shape)} of {found.dtype}"
    raise TypeError(
        f"solver {solver} must reveal a boolean tensor of shape {list(masked.shape)}, got {got}"
    )


def check_revealed(
    solver: Solver,
    revealed: Bool[ndarray, "batch slots"],
    masked: Bool[ndarray, "batch slots"],
    final: Bool[ndarray, "batch slots"] | None = None,
) -> None:
    """What a rule must keep to, whoever wrote it.

    final: slots that are revealed in any case.
    Raises: ValueError if it reveals what is not masked, or nothing of a row.
    """
    if (revealed & ~masked).any():
        raise ValueError(f"solver {solver} reveals positions that are not masked")
    going = revealed if final is None else revealed | final
    if (masked.any(axis=1) & ~going.any(axis=1)).any():
        raise ValueError(f"solver {solver} reveals none of a row's masked positions, but must one")


@dataclass(frozen=True)
class EntropyBound:
    """Reveals the longest run whose entropies, the largest left out, sum to at most gamma.

    gamma: nats; 0 reveals exactly one position, also when entropies are 0; inf reveals all.
    order: what the run is sorted by: lowest entropy, highest confidence (largest probability), or
        highest margin (largest probability minus the second largest).
    Source: arXiv:2509.04185 eq. 8 (entropy), eq. 18; arXiv:2505.24857 algorithm 1 (any order).
    """

    gamma: Number
    order: Order = "entropy"

    def __post_init__(self) -> None:
        _validate("gamma", self.gamma)
        if self.order not in get_args(Order):
            raise ValueError(f"order must be one of {get_args(Order)}, got {self.order!r}")

    def __str__(self) -> str:
        name = "entropy" if self.order == "entropy" else f"{self.order}-bound"
        return f"{name}:{float(self.gamma)}"

    def reveal(self, predictions: Predictions, masked: Positions) -> Positions:
        score = None
        if self.order == "confidence":
            score = -predictions.confidence
        elif self.order == "margin":
            score = -predictions.margin
        return entropy_prefix(predictions.entropy, masked, self.gamma, score)


@dataclass(frozen=True)
class EntropyThreshold:
    """Reveals every position whose entropy is below tau (nats), else the single lowest.

    A common simplification of the entropy bound, and a different rule: it bounds no sum.
    """

    tau: Number

    def __post_init__(self) -> None:
        _validate("tau", self.tau)

    def __str__(self) -> str:
        return f"entropy-threshold:{float(self.tau)}"

    def reveal(self, predictions: Predictions, masked: Positions) -> Positions:
        nats = predictions.entropy
        return masked & ((nats < self.tau) | (_ranks(nats, masked) == 0))


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Reveals every position whose largest probability is above tau, else the single highest.

    Source: Fast-dLLM (arXiv:2505.22618), parallel decoding with a threshold.
    """

    tau: Number

    def __post_init__(self) -> None:
        _validate("tau", self.tau, high=1)

    def __str__(self) -> str:
        return f"confidence:{float(self.tau)}"

    def reveal(self, predictions: Predictions, masked: Positions) -> Positions:
        sure = predictions.confidence
        return masked & ((sure > self.tau) | (_ranks(-sure, masked) == 0))


@dataclass(frozen=True)
class Factor:
    """Reveals the n most confident positions for the largest n with (n + 1)(1 - c_n) < f.

    c_n is the n-th highest confidence.
    Source: Fast-dLLM (arXiv:2505.22618), parallel decoding with a factor. arXiv:2509.04185 prints
    (n + 1) c_n < f, which is a slip.
    """

    f: Number

    def __post_init__(self) -> None:
        _validate("f", self.f)

    def __str__(self) -> str:
        return f"factor:{float(self.f)}"

    def reveal(self, predictions: Predictions, masked: Positions) -> Positions:
        sure = predictions.confidence
        rank = _ranks(-sure, masked)
        # With n = rank + 1. Both factors grow along the order, so the positions that pass are
        # exactly those up to the largest n.
        return masked & (((rank + 2) * (1 - sure) < self.f) | (rank == 0))


@dataclass(frozen=True)
class FixedCount:
    """Reveals the n most confident positions, or all that are left if fewer. Source: LLaDA."""

    n: int

    def __post_init__(self) -> None:
        whole = isinstance(self.n, int) and not isinstance(self.n, bool)
        if not whole or not 1 <= self.n < 2**31:
            raise ValueError(f"n must be an integer from 1 to {2**31 - 1}, got {self.n!r}")

    def __str__(self) -> str:
        return f"fixed:{self.n}"

    def reveal(self, predictions: Predictions, masked: Positions) -> Positions:
        return masked & (_ranks(-predictions.confidence, masked) < self.n)


@dataclass(frozen=True)
class ConfidentPrefix:
    """Reveals masked positions left to right until confidence falls below tau. Source: SDLM."""

    tau: Number

    def __post_init__(self) -> None:
        _validate("tau", self.tau, high=1)

    def __str__(self) -> str:
        return f"prefix:{float(self.tau)}"

    def reveal(self, predictions: Predictions, masked: Positions) -> Positions:
        unsure = masked & (predictions.confidence < self.tau)
        leftmost = masked.cumsum(1) == 1
        return masked & ((unsure.cumsum(1) == 0) | leftmost)


# Name -> how to make it, the type of its parameter, and what the parameter is called in messages.
FORMS: dict[str, tuple[Callable[..., Solver], type[int] | type[float], str]] = {
    "entropy": (EntropyBound, float, "GAMMA"),
    "confidence-bound": (partial(EntropyBound, order="confidence"), float, "GAMMA"),
    "margin-bound": (partial(EntropyBound, order="margin"), float, "GAMMA"),
    "entropy-threshold": (EntropyThreshold, float, "TAU"),
    "confidence": (ConfidenceThreshold, float, "TAU"),
    "factor": (Factor, float, "F"),
    "fixed": (FixedCount, int, "N"),
    "prefix": (ConfidentPrefix, float, "TAU"),
}
BUILT_IN = frozenset(FORMS)  # `register` adds others to FORMS


def register(
    name: str, make: Callable[..., Solver], kind: type[int] | type[float] = float, field: str = "X"
) -> None:
    """Have `parse`, and with it the command line, know a rule of one's own as "name:FIELD".

    make: gives the rule of a number of this kind; its `str` must be such a text.
    Raises: ValueError for a name that is taken, or that can't stand before a colon.
    """
    if name in FORMS:
        raise ValueError(f"there is a solver {name!r} already, choose another name")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(
            f"a solver's name must be lower-case letters, digits and dashes, got {name!r}"
        )
    FORMS[name] = make, kind, field


def parse(text: str) -> Solver:
    """The solver that this text names, such as "entropy:0.35".

    Raises: ValueError, listing every accepted form, if the text is none of them.
    """
    name, _, number = text.partition(":")
    forms = ", ".join(f"{form}:{field}" for form, (_, _, field) in FORMS.items())
    if name not in FORMS:
        raise ValueError(f"solver must be one of {forms}; got {text!r}")
    make, kind, field = FORMS[name]
    try:
        if (value := _number(kind, number)) is None:
            whole = "a whole number" if kind is int else "a number"
            raise ValueError(f"{field} must be {whole}, got {number!r}")
        solver = make(value)
        said, _, told = str(solver).partition(":")
        if said != name or _number(kind, told) != value:
            raise ValueError(f"its __str__ must be '{name}:{value}', got {str(solver)!r}")
    except ValueError as error:
        raise ValueError(f"solver must be one of {forms}; got {text!r} ({error})") from error
    return solver


def _number(kind: type[int] | type[float], text: str) -> Number | None:
    try:
        return kind(text)
    except ValueError:
        return None


def entropy(logits: Logits) -> Score:
    """Entropy of each prediction in nats, from the float32 softmax."""
    return Predictions(logits).entropy


def probability_of(logits: Logits) -> Logits:
    """The float32 softmax."""
    return logits.float().softmax(-1)


def entropy_of(probability: Logits) -> Score:
    """-sum p log p in nats.

    Rather than logsumexp - sum p * logit: that form cancels to 0 too early, and is NaN at -inf.
    """
    # torch.special.entr says the same, three times as slowly on a CPU.
    nats = probability.clamp(min=torch.finfo(torch.float32).tiny).log_().mul_(probability)
    return (0 - nats.sum(-1)).clamp(min=0)


def entropy_prefix(
    entropy: Score, masked: Positions, gamma: Number, score: Score | None = None
) -> Positions:
    """The longest run whose entropies, the largest left out, sum to at most gamma: reveal these.

    The run goes by ascending score, by default the entropy itself. It holds at least one position,
    and exactly one if gamma is 0.
    Units: entropy and gamma in nats.
    Raises: ValueError if gamma is negative or not a number.
    Source: arXiv:2509.04185 eq. 8; arXiv:2505.24857 algorithm 1. Ties go to the smaller position,
    which the papers leave open.
    """
    _validate("gamma", gamma)
    rank = _ranks(entropy if score is None else score, masked)
    if gamma == 0:
        return masked & (rank == 0)
    ordered = torch.zeros_like(entropy).scatter(1, rank, entropy.masked_fill(~masked, 0))
    # cumsum(H) - cummax(H) without the subtraction: each entropy H adds min(H, largest before it),
    # be it the new largest or not. Nothing cancels, and a run of zeros sums to exactly 0.
    largest_before = torch.nn.functional.pad(ordered.cummax(1).values[:, :-1], (1, 0))
    excess = torch.minimum(ordered, largest_before).cumsum(1)
    count = (excess <= gamma).sum(1, keepdim=True).clamp(min=1)
    return masked & (rank < count)


def _ranks(score: Score, masked: Positions) -> Int[Tensor, "batch block"]:
    """Each position's place in ascending order of score, masked ones first, ties by position."""
    # Two stable sorts, the second by `masked` alone: no score, NaN included, can put a revealed
    # position before a masked one, so rank 0 is a mask wherever one is left and decoding ends.
    order = score.argsort(dim=1, stable=True)
    order = order.gather(1, (~masked).gather(1, order).argsort(dim=1, stable=True))
    return order.argsort(dim=1)


def _validate(field: str, value: object, high: Number = math.inf) -> None:
    """Refuses what is not a number in [0, high], NaN included."""
    if isinstance(value, bool) or not isinstance(value, Number) or not 0 <= value <= high:
        raise ValueError(f"{field} must be a number from 0 to {high}, got {value!r}")
