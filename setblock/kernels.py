"""Forwards in kernels that torch.compile makes at the first of each kind and keeps on disk."""

import os
import shutil
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

from setblock.checkpoint import any_of

MOST_KINDS = 32  # of forwards that torch.compile makes kernels for


def missing(device: torch.device) -> str | None:
    """Why kernels can't be made for this device, or None."""
    compilers = (os.environ.get("CXX", "g++"), "clang++")
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        return f"compile needs a C++ compiler: none of {any_of(compilers)} is here"
    return None


def compiled(run: MethodType) -> Callable[..., Any]:
    """The same method of the same object, in kernels of its own.

    Effects: torch.compile's limit of kinds, and what it does with floats, for the whole process.
    """
    config: Any = torch._dynamo.config
    # Beyond its limit of kinds torch.compile falls back to plain kernels without a word.
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    # Else it traces a network twice, the second time with what floats it has held fixed.
    config.specialize_float = True
    # Kernels belong to a code, and what is checked of a network does not tell two apart.
    shared: Any = run.__func__
    code, closure = shared.__code__.replace(), shared.__closure__
    own = MethodType(FunctionType(code, shared.__globals__, closure=closure), run.__self__)
    return torch.compile(own, dynamic=True, options={"guard_filter_fn": looked_at_again})


def looked_at_again(guards: Sequence[Any]) -> list[bool]:
    """Which of torch.compile's conditions a forward in its kernels checks.

    Thousands say of a model's own network that its layers are what they were, without hooks: to
    check them takes a twenty-fifth of a forward of SmolLM2. Numbers and tensors that layers hold
    beside their weights may change, as a gate does.
    """
    values = ("CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH")
    return [
        not one.name.startswith("self.network.")
        or (one.guard_type in values and not isinstance(one.value, torch.nn.Parameter))
        for one in guards
    ]
