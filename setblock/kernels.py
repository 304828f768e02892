"""Kernels that torch.compile makes of one layer and runs for every layer like it.

Compiled whole, a network is traced and lowered layer by layer, for minutes, though one layer is as
the other. Here each kind of layer is compiled once, and the others of its kind bring their weights.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


class LayerCache:
    """One layer's part of a cache, in the form in which layers ask for theirs by number."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(
        self, keys: Tensor, values: Tensor, number: int, *rest: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        return self.layer.update(keys, values)


class Kernels:
    """A network whose layers run in compiled kernels inside `switched_on(...)`, else as they were.

    Effects: the layers' `forward` is replaced.
    """

    def __init__(self, network: Any) -> None:
        self.on = False
        kinds: dict[Any, Callable[..., Any]] = {}
        for number, layer in enumerate(network.get_decoder().layers):
            kind = _structure(layer)
            if kind not in kinds:
                call = lambda forward, hidden, cache, rest, given: forward(  # noqa: E731
                    hidden, *rest, past_key_values=cache, **given
                )
                # A code object of its own: what was compiled is found by it.
                own = FunctionType(call.__code__.replace(co_name=f"layer_{len(kinds)}"), globals())
                options: Any = {"guard_filter_fn": _kept}
                kinds[kind] = torch.compile(own, dynamic=True, options=options)
            layer.forward = partial(self._forward, layer.forward, kinds[kind], number)

    def switched_on(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`run`, whose forwards of the network are compiled."""

        def compiled(*given: Any) -> Tensor:
            self.on = True
            try:
                return run(*given)
            finally:
                self.on = False

        return compiled

    def _forward(
        self, plain: Callable[..., Any], kernels: Callable[..., Any], number: int, hidden: Tensor,
        *rest: Any, past_key_values: Any = None, **given: Any,
    ) -> Any:  # fmt: skip
        if not self.on or past_key_values is None:
            return plain(hidden, *rest, past_key_values=past_key_values, **given)
        cache = LayerCache(past_key_values.layers[number])
        return kernels(plain, hidden, cache, rest, given)


def _kept(guards: Any) -> list[bool]:
    """What is looked at before kernels are run again: what a forward brings with it.

    Not the layer, of which there are as many as of its kind, but whether its gate is open.
    """
    return [
        not guard.is_global and (not guard.name.startswith("L['forward']") or ".gate" in guard.name)
        for guard in guards
    ]


def _structure(layer: torch.nn.Module) -> Any:
    """What two layers must share for the kernels of one to be the other's."""
    plain = (bool, int, float, str, type(None))
    modules = tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, plain) and key != "layer_idx"
            ),
        )
        for name, module in layer.named_modules()
    )
    weights = tuple((name, one.shape, one.dtype) for name, one in layer.named_parameters())
    return modules, weights
