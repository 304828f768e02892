"""CUDA graphs on a CPU: what was recorded runs again, on the same tensors, and nothing else."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They wait for the device: their result is the host's, or has a shape that values decide.
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"),
    *("unique_consecutive", "unique_dim", "bincount", "repeat_interleave.Tensor"),
}


class Tape(TorchDispatchMode):
    """Every operation, with the tensors that it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.removesuffix(".default")
        # An index of truth values becomes a nonzero().
        indices = args[1] if name.startswith("index") and isinstance(args[1], list) else ()
        if name in WAITING or any(one is not None and one.dtype == torch.bool for one in indices):
            raise RuntimeError("operation not permitted when stream is capturing")
        found = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        for func, args, kwargs, found in self.done:
            for old, new in zip(
                tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                # A view, or what was written in place, has changed already.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(function: Callable[[], tuple[torch.Tensor, ...]]):
    tape = Tape()
    with tape:
        results = function()
    return tape.replay, results
