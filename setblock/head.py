"""The output layer at the labels alone, a chunk at a time: a step never holds all of its logits.

While `scoring()` is on, a network's head returns what a loss needs of each label instead of logits.
The head stays inside the network's own forward, where sharding and autocast expect it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

# Settings by which an architecture changes its logits after the head; 1 or None where it does not.
SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class Scores(NamedTuple):
    """What a loss needs of each label, in the order of View.labels[View.supervised]."""

    nats: Float[Tensor, " labels"]  # -log p of the label
    right: Bool[Tensor, " labels"]  # whether the label is the likeliest token
    divergence: Float[Tensor, " labels"]  # KL(teacher, student) in nats; 0 without a teacher


@dataclass(frozen=True)
class Targets:
    """Which of the head's inputs have a label, flat over batch and kept columns.

    teachers: the input whose distribution each label's shall match, -1 for none; None for none at
    all.
    """

    inputs: Int[Tensor, " labels"]
    labels: Int[Tensor, " labels"]
    teachers: Int[Tensor, " labels"] | None = None


def check_head(config: PretrainedConfig) -> None:
    """Raises: ValueError for an architecture whose logits are not simply its head's output."""
    for name in SCALES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{config.model_type} sets {name}={getattr(config, name)}, which changes the "
                "logits after the head; training supports networks without it"
            )


@contextmanager
def scoring(network: Any, targets: Targets, chunk_size: int) -> Iterator[None]:
    """Lets `network` return [labels, 3] for logits: `Scores(*logits.unbind(dim=1))`.

    chunk_size: labels whose logits exist at a time; more than one chunk are computed once more in
    the backward pass instead of being kept.
    """
    head: Any = network.get_output_embeddings()
    logits_of, before = head.forward, vars(head).get("forward")

    def forward(hidden: Tensor) -> Tensor:
        return _score(logits_of, hidden.flatten(0, 1), targets, chunk_size)

    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def _score(logits_of: Any, hidden: Tensor, targets: Targets, chunk_size: int) -> Tensor:
    def chunk(inputs: Tensor, labels: Tensor, teachers: Tensor | None) -> Tensor:
        logits = logits_of(hidden[inputs]).float()
        nats = cross_entropy(logits, labels, reduction="none")
        divergence = torch.zeros_like(nats)
        if teachers is not None and (taught := teachers >= 0).any():
            with torch.no_grad():
                teacher = logits_of(hidden[teachers[taught]]).float().log_softmax(dim=-1)
            student = logits[taught].log_softmax(dim=-1)
            divergence[taught] = (teacher.exp() * (teacher - student)).sum(dim=-1)
        return torch.stack([nats, (logits.argmax(dim=-1) == labels).float(), divergence], dim=1)

    num_labels = len(targets.labels)
    parts = []
    for first in range(0, max(num_labels, 1), chunk_size):
        part = slice(first, first + chunk_size)
        teachers = None if targets.teachers is None else targets.teachers[part]
        arguments = targets.inputs[part], targets.labels[part], teachers
        if num_labels > chunk_size:
            parts.append(checkpoint(chunk, *arguments, use_reentrant=False))
        else:
            parts.append(chunk(*arguments))
    return torch.cat(parts)
