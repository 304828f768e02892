"""The output layer at the labels alone, a chunk at a time: a step never holds all of its logits.

While `scoring()` is on, a network's head returns what a loss needs of each label instead of logits.
The head stays inside the network's own forward, where sharding and autocast expect it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from setblock.adapters import unwrapped
from setblock.chain import Chain, candidates_of
from setblock.logits import after_head, left_alone


class LabelScores(NamedTuple):
    """What a loss needs of each label, in the order of View.labels[View.supervised]."""

    nats: Float[Tensor, " labels"]  # -log p of the label
    right: Bool[Tensor, " labels"]  # whether the label is the likeliest token
    divergence: Float[Tensor, " labels"]  # KL(teacher, student) in nats; 0 without a teacher
    # Of a chain: whether the label is among what it scores; its nats there and whether it is right.
    chain_known: Bool[Tensor, " labels"]
    chain_nats: Float[Tensor, " labels"]
    chain_right: Bool[Tensor, " labels"]


@dataclass(frozen=True)
class Targets:
    """Which of the head's inputs have a label, flat over batch and kept columns.

    teachers: the input whose distribution each label's shall match, -1 for none; None for none at
    all. before: the token before each label, -1 for none; for a chain.
    """

    inputs: Int[Tensor, " labels"]
    labels: Int[Tensor, " labels"]
    teachers: Int[Tensor, " labels"] | None = None
    before: Int[Tensor, " labels"] | None = None

    def part(self, which: slice) -> "Targets":
        """Those labels alone."""
        parts = (self.inputs, self.labels, self.teachers, self.before)
        return Targets(*(None if one is None else one[which] for one in parts))  # type: ignore[arg-type]


@contextmanager
def scoring(
    network: Any, targets: Targets, chunk_size: int, chain: Chain | None = None
) -> Iterator[Callable[[Tensor], LabelScores]]:
    """Yields what makes LabelScores of the logits that `network` returns within.

    chunk_size: labels whose logits exist at a time; more than one chunk are computed once more in
    the backward pass instead of being kept. chain: one that learns from `targets.before`; its
    gradients end in it.
    """
    head: Any = network.get_output_embeddings()
    said_by, before = head.forward, vars(head).get("forward")
    changed = after_head(network.config)

    def logits_of(hidden: Tensor) -> Tensor:
        return changed(said_by(hidden))

    def forward(hidden: Tensor) -> Tensor:
        embedding = unwrapped(network.get_input_embeddings())
        return _score(logits_of, hidden.flatten(0, 1), targets, chunk_size, chain, embedding)

    head.forward = forward
    try:
        with left_alone(network):
            yield _parted
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def _parted(scores: Float[Tensor, "labels 6"]) -> LabelScores:
    """As a network's logits, these have to be one tensor."""
    nats, right, divergence, known, chain_nats, chain_right = scores.unbind(dim=1)
    flags = (flag.detach() > 0 for flag in (right, known, chain_right))
    right, known, chain_right = flags
    return LabelScores(nats, right, divergence, known, chain_nats, chain_right)


def _score(
    logits_of: Any,
    hidden: Tensor,
    targets: Targets,
    chunk_size: int,
    chain: Chain | None,
    embedding: Any,
) -> Tensor:
    def chunk(of: Targets) -> Tensor:
        labels, teachers = of.labels, of.teachers
        logits = logits_of(hidden[of.inputs]).float()
        nats = cross_entropy(logits, labels, reduction="none")
        divergence = torch.zeros_like(nats)
        if teachers is not None and (taught := teachers >= 0).any():
            with torch.no_grad():
                teacher = logits_of(hidden[teachers[taught]]).float().log_softmax(dim=-1)
            student = logits[taught].log_softmax(dim=-1)
            divergence[taught] = (teacher.exp() * (teacher - student)).sum(dim=-1)
        right = (logits.argmax(dim=-1) == labels).float()
        chained = (torch.zeros_like(nats),) * 3
        if chain is not None and of.before is not None:
            chained = _chained(chain, embedding, logits.detach(), hidden[of.inputs].detach(), of)
        return torch.stack([nats, right, divergence, *chained], dim=1)

    num_labels = len(targets.labels)
    parts = []
    for first in range(0, max(num_labels, 1), chunk_size):
        part = targets.part(slice(first, first + chunk_size))
        if num_labels > chunk_size:
            parts.append(checkpoint(chunk, part, use_reentrant=False))
        else:
            parts.append(chunk(part))
    return torch.cat(parts)


def _chained(
    chain: Chain, embedding: Any, logits: Tensor, hidden: Tensor, targets: Targets
) -> tuple[Tensor, Tensor, Tensor]:
    """(known or not, nats, right or not) of the labels by a chain, among the candidates."""
    assert targets.before is not None
    with torch.no_grad():
        values, ids = candidates_of(logits)
        kind = chain.slot.weight.dtype  # float32, beside a base that may have less
        before = embedding(targets.before.clamp(min=0)).to(kind)
        candidates = embedding(ids).to(kind)
    scores = values + chain(chain.context(hidden.to(kind)), before, candidates)
    same = ids == targets.labels[:, None]
    known = same.any(dim=1) & (targets.before >= 0)
    place = same.int().argmax(dim=1)
    nats = torch.where(known, cross_entropy(scores, place, reduction="none"), 0.0)
    return known.float(), nats, (known & (scores.argmax(dim=1) == place)).float()
