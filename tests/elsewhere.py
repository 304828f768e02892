"""A device without a device: tensors that lie on the CPU and say that they don't.

Under `elsewhere()` they meet a tensor of the host only where a real device would allow it, and
every wait of the host for them is counted. What decoding does around the network's own forward can
be tried in this way where there is no GPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from setblock import machines
from setblock.model import Model

DEVICE, CPU = torch.device("cuda:0"), torch.device("cpu")
# What has to know values, or how many there are of them.
WAITS = (
    *("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__", "numpy"),
    *("nonzero", "cpu", "unique", "masked_select", "equal", "repeat_interleave"),
)
DEVICE_OF: Any = Tensor.device.__get__  # type: ignore[attr-defined]


class Elsewhere(Tensor):
    """A tensor of the other device, as all of a network's parameters are."""

    def __array__(self, dtype: Any = None) -> Any:
        raise TypeError(
            "a tensor of the device is no array: to_host() waits for it, and is counted"
        )


def is_there(value: object) -> bool:
    return isinstance(value, (Elsewhere, Parameter))


def there(value: Any) -> Any:
    return tree_map(lambda one: one.as_subclass(Elsewhere) if type(one) is Tensor else one, value)


def here(value: Any) -> Any:
    return tree_map(
        lambda one: one.as_subclass(Tensor) if isinstance(one, Elsewhere) else one, value
    )


@dataclass
class Count:
    """What the host waited for, by name, and the network's forwards."""

    waits: Counter[str] = field(default_factory=Counter)
    forwards: int = 0


class _Mode(TorchFunctionMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        given = tree_leaves((args, kwargs))
        tensors = [one for one in given if isinstance(one, Tensor)]
        off = any(map(is_there, tensors))
        mixed = off and any(isinstance(one, np.ndarray) for one in given)
        assert not mixed, f"{name} of a tensor of the device and an array"
        if func == DEVICE_OF:
            return DEVICE if off else func(*args)
        with torch._C.DisableTorchFunction():
            return self._call(func, name, args, kwargs, tensors, off)

    def _call(
        self, func: Any, name: str, args: tuple, kwargs: dict, tensors: list[Tensor], off: bool
    ) -> Any:
        devices = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
        target = devices[0] if devices else None
        if target is None and off and name != "cpu":
            target = DEVICE
        if name not in ("to", "cpu", "__get__"):
            wide = [one for one in tensors if not is_there(one) and one.dim()]
            assert not (off and wide), f"{name} of tensors of two devices"
        if name == "pin_memory":
            return args[0]
        indices = args[1] if name in ("__getitem__", "__setitem__") else ()
        masks = any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in tree_leaves(indices)
        )
        leaves = name == "to" and target is not None and target.type == "cpu"
        if off and (name in WAITS or leaves or masks):
            self.count.waits[name] += 1
        at_home = tree_map(
            lambda one: torch.device("cpu") if isinstance(one, torch.device) else one,
            (here(args), here(kwargs)),
        )
        result = func(*at_home[0], **at_home[1])
        return there(result) if target == DEVICE else result


def _keep(cache: Any, moved: Any) -> None:
    """Effects: the cache's memory is here, or there."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys, layer.values = moved((layer.keys, layer.values))


@contextmanager
def elsewhere(model: Model, monkeypatch: Any) -> Iterator[Count]:
    """Within, the model's network is on another device."""
    count, run, device_of = Count(), model._run, machines.device_of

    def beyond(tokens: Any, position: Any, mask: Any, cache: Any, at: Any, told: Any) -> Any:
        given = (tokens, position, mask, at)
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        tensors += [one for one in (cache.slots.index, cache.slots.row) if one is not None]
        assert all(map(is_there, tensors)), "the network was given a tensor of the host"
        count.forwards += 1
        with torch._C.DisableTorchFunction():
            slots, gate = cache.slots, getattr(model.network, "setblock_gate", None)
            slots.index, slots.row = here((slots.index, slots.row))
            _keep(cache, here)
            if gate is not None:
                gate.noisy = here(gate.noisy)
            tokens, position, mask, at = here(given)
            # A CPU's own kernel takes the mask that the bias was made of.
            mask = tree_map(lambda bias: bias[:, :, : tokens.shape[1]] == 0, mask)
            results = run(tokens, position, mask, cache, at, told)
            _keep(cache, there)
            return there(results)

    with monkeypatch.context() as patch:
        patch.setattr(model, "_run", beyond)
        patch.setattr(Model, "device", DEVICE)
        # What arithmetic thinks of it: the CPU.
        patch.setattr(machines, "device_of", lambda _, dtype: device_of(CPU, dtype))
        with _Mode(count):
            yield count
