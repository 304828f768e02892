"""A view of training -> the score of every label of it, by one forward of the network."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from setblock.adapters import chain_of, half, has_halves, is_gated, told
from setblock.architectures import attention_mask
from setblock.cache import CACHE
from setblock.head import LabelScores, Targets, scoring
from setblock.masks import Layout
from setblock.objective import View


def label_scores(
    view: View,
    teachers: Int[Tensor, "batch length"] | None,
    network: Any,
    wrapped: torch.nn.Module,
    chunk_size: int,
) -> LabelScores:
    """The score of every label of the view, in the order of `view.labels[view.supervised]`.

    teachers: View.teachers(), whose distribution each label's is compared with; None for none.
    wrapped: `network`, in whatever it is wrapped in for several ranks. chunk_size: labels whose
    logits exist at a time.
    With a gated adapter the view has labels in its noisy half alone (View.masked_only()); a chain
    beside it is scored with them.
    Raises: ValueError for a gated adapter in layers that FSDP recomputes.
    """
    gated, modules = is_gated(network), list(wrapped.modules())
    if gated and any(isinstance(module, CheckpointWrapper) for module in modules):
        raise ValueError(
            "a gated adapter does not know its tokens again when FSDP recomputes a layer: set "
            "fsdp_activation_checkpointing to false"
        )
    targets, columns = _targets(view, teachers)
    chain = chain_of(network)
    if chain is not None:
        targets = replace(targets, before=view.before()[view.supervised])
    # A layer that runs again in the backward pass would write to the cache again.
    recomputing = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    with ExitStack() as stack:
        if gated and teachers is None and not recomputing:
            columns = columns - view.num_clean
            inputs = _noisy_half(view, network, wrapped)
            if has_halves(network):
                stack.enter_context(half(network, noisy=True))
        else:
            inputs = {
                "input_ids": view.tokens,
                "position_ids": view.layout.position,
                "attention_mask": _mask(view, network, view.layout, view.layout),
                "use_cache": False,
                **told(network, view.layout),
            }
        scores_of = stack.enter_context(scoring(network, targets, chunk_size, chain))
        return scores_of(wrapped(**inputs, logits_to_keep=columns).logits)


def _targets(
    view: View, teachers: Int[Tensor, "batch length"] | None
) -> tuple[Targets, Int[Tensor, " columns"]]:
    """(labels and teachers among the head's inputs, the view's columns that are those inputs)."""
    supervised = view.supervised
    needed = supervised if teachers is None else _with_teachers(supervised, teachers)
    # Columns that any row needs: indices are what every supported transformers takes here.
    columns = needed.any(dim=0).nonzero()[:, 0]
    place = torch.zeros(supervised.shape[1], dtype=torch.long, device=supervised.device)
    place[columns] = torch.arange(len(columns), device=place.device)
    row, column = supervised.nonzero(as_tuple=True)
    own = None
    if teachers is not None:
        own = teachers[supervised]
        own = torch.where(own < 0, -1, row * len(columns) + place[own.clamp(min=0)])
    return Targets(row * len(columns) + place[column], view.labels[supervised], own), columns


def _with_teachers(
    supervised: Bool[Tensor, "batch length"], teachers: Int[Tensor, "batch length"]
) -> Bool[Tensor, "batch length"]:
    row, column = (teachers >= 0).nonzero(as_tuple=True)
    needed = supervised.clone()
    needed[row, teachers[row, column]] = True
    return needed


def _noisy_half(view: View, network: Any, wrapped: torch.nn.Module) -> dict[str, Any]:
    """Inputs for the noisy half, over the clean half's keys and values.

    Those come from frozen weights: no gradient, no head, and nothing kept for the backward pass of
    two thirds of the work that the whole view would be.
    """
    first, layout = view.num_clean, view.layout
    clean, noisy = (
        layout.map(lambda tensor, part=part: tensor[:, part])
        for part in (slice(first), slice(first, None))
    )
    halves = has_halves(network)
    # Without a config: no layer drops what our masks still need.
    cache = Cache(layers=[DynamicLayer() for _ in range(network.config.num_hidden_layers)])
    with torch.no_grad(), half(network, noisy=False) if halves else nullcontext():
        wrapped(
            input_ids=view.tokens[:, :first],
            position_ids=clean.position,
            attention_mask=_mask(view, network, clean, clean),
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: cache},
            **told(network, clean),
        )
    return {
        "input_ids": view.tokens[:, first:],
        "position_ids": noisy.position,
        "attention_mask": _mask(view, network, noisy, layout),
        CACHE: cache,
        "use_cache": True,
        **told(network, noisy),
    }


def _mask(view: View, network: Any, queries: Layout, keys: Layout) -> Any:
    return attention_mask(network, queries, keys, rows=view.rows)
