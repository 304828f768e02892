"""Forwards in kernels that torch.compile makes at the first of each kind and keeps on disk.

compiled()  on a CPU, of the whole network: to check layer by layer which kernels suit takes it as
            long as they save
layered()   on a GPU, of one layer for every layer like it, which is made sooner; a graph that is
            replayed checks nothing
training()  likewise, with gradients
"""

import ast
import inspect
import os
import shutil
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers import Cache

from setblock.names import ModelError, any_of

MOST_KINDS = 32  # of forwards that torch.compile makes kernels for
_configured = threading.local()


def missing(device: torch.device) -> str | None:
    """Why kernels can't be made for this device, or None."""
    compilers = (os.environ.get("CXX", "g++"), "clang++")
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        return f"compile needs a C++ compiler: none of {any_of(compilers)} is here"
    return None


def compiled(run: MethodType) -> Callable[..., Any]:
    """The same method of the same object, in kernels of its own.

    Effects: as `_compiled`.
    """
    return _compiled(run.__func__, looked_at_again, run.__self__)


def layered(network: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, within which forwards of the network's layers behind a cache are compiled.

    Effects: the layers' `forward` is replaced, which does what it did outside of `run`; as
    `_compiled`. Raises: ModelError for a network without a list of layers.
    """
    inside = [False]
    _replace(network, lambda layer: inside[0], looked_at_in_layers)

    def switched_on(*given: Any) -> Any:
        inside[0] = True
        try:
            return run(*given)
        finally:
            inside[0] = False

    return switched_on


@contextmanager
def training(network: Any, backend: str, mode: str | None = None) -> Iterator[None]:
    """Within, forwards of the network's layers are compiled while it is in training mode.

    backend, mode: torch.compile's. A cache must have all of its layers.
    Effects and errors: as `layered`, of which nothing is left at the end.
    """
    before = {layer: vars(layer).get("forward") for layer in _layers(network)}
    _replace(network, lambda layer: layer.training, all_but_numbers, backend, mode)
    try:
        yield
    finally:
        for layer, forward in before.items():
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _compiled(
    function: Any,
    filter: Callable[..., list[bool]],
    *owner: Any,
    backend: str = "inductor",
    mode: str | None = None,
) -> Callable[..., Any]:
    """The function, or the method of this owner, in kernels of its own.

    Effects: torch.compile's limit of kinds, and what it does with floats, in threads that run it.
    """
    # Kernels belong to a code, and what is checked of a network does not tell two apart.
    code, closure = function.__code__.replace(), function.__closure__
    own: Any = FunctionType(code, function.__globals__, closure=closure)
    if owner:
        own = MethodType(own, *owner)
    # torch.compile takes a mode or options, and a mode is options.
    options = torch._inductor.list_mode_options(mode) if mode else {}
    kernels: Any = torch.compile(
        own, dynamic=True, backend=backend, options={**options, "guard_filter_fn": filter}
    )

    def run(*given: Any) -> Any:
        _configure()
        return kernels(*given)

    return run


def _configure() -> None:
    """Effects: once for each thread, as torch.compile's configuration is a thread's own."""
    if getattr(_configured, "done", False):
        return
    config: Any = torch._dynamo.config
    # Beyond its limit of kinds torch.compile falls back to plain kernels without a word.
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    # Else it traces a network twice, the second time with what floats it has held fixed.
    config.specialize_float = True
    _configured.done = True


def looked_at_again(guards: Sequence[Any], layers: str = "self.network.") -> list[bool]:
    """Which of torch.compile's conditions a forward in its kernels checks.

    Thousands say of a model's own network that its layers are what they were, without hooks: to
    check them takes a twenty-fifth of a forward of SmolLM2. Numbers and tensors that layers hold
    beside their weights may change, as a gate does.
    """
    values = ("CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH")
    return [
        not one.name.startswith(layers)
        or (one.guard_type in values and not isinstance(one.value, torch.nn.Parameter))
        for one in guards
    ]


class _OwnLayer:
    """One layer of a cache, as that layer's attention asks a cache for it, by a number."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, keys: Any, values: Any, number: int, *rest: Any, **more: Any) -> Any:
        return self.layer.update(keys, values)


def _layers(network: Any) -> Any:
    """The list of the network's layers, in their order. Raises: ModelError."""
    count = network.config.num_hidden_layers
    for module in network.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{network.config.model_type} has no list of {count} layers to compile")


def _replace(
    network: Any,
    is_on: Callable[[Any], bool],
    filter: Callable[..., list[bool]],
    backend: str = "inductor",
    mode: str | None = None,
) -> None:
    """Effects: the layers' `forward` is compiled where that is on, asked for each of them."""
    kinds: dict[Any, Callable[..., Any]] = {}
    for number, layer in enumerate(_layers(network)):
        kind, plain = _structure(layer), layer.forward
        if isinstance(plain, partial) and plain.func is _either:  # replaced before
            plain = plain.args[1]
        if kind not in kinds:
            kinds[kind] = _compiled(_of_layer, filter, backend=backend, mode=mode)
        layer.forward = partial(_either, partial(is_on, layer), plain, kinds[kind], number)


def _either(
    on: Callable[[], bool],
    plain: Callable[..., Any],
    kernels: Callable[..., Any],
    number: int,
    *given: Any,
    **words: Any,
) -> Any:
    """A layer's forward, compiled where that is on."""
    if not on():
        return plain(*given, **words)

    def own(one: Any) -> Any:
        # Whatever a network calls it: by the layer's number kernels would differ.
        return _OwnLayer(one.layers[number]) if isinstance(one, Cache) else one

    return kernels(plain, tuple(map(own, given)), {name: own(one) for name, one in words.items()})


def _of_layer(forward: Callable[..., Any], given: tuple[Any, ...], words: dict[str, Any]) -> Any:
    return forward(*given, **words)


def looked_at_in_layers(guards: Sequence[Any]) -> list[bool]:
    """As `looked_at_again`, of a layer's forward; its number has no part in what it computes."""
    both = zip(looked_at_again(guards, "L['forward']"), all_but_numbers(guards), strict=True)
    return [one and other for one, other in both]


def all_but_numbers(guards: Sequence[Any]) -> list[bool]:
    """All of torch.compile's conditions but for the numbers of layers."""
    return ["layer_idx" not in one.name for one in guards]


def _structure(layer: torch.nn.Module) -> Any:
    """What two layers must share, besides what is looked at again, for kernels to suit both."""
    modules = tuple(
        (
            name,
            type(module),
            *map(id, module._forward_hooks.values()),
            *map(id, module._forward_pre_hooks.values()),
        )
        for name, module in layer.named_modules()
    )
    weights = tuple((name, one.shape, one.dtype) for name, one in layer.named_parameters())
    numbered = [one for one in layer.modules() if "layer_idx" in vars(one)]
    numbers = [one.layer_idx for one in numbered if _computes_with_its_number(type(one))]
    return modules, weights, tuple(numbers)


def _computes_with_its_number(kind: type) -> bool:
    """Whether such a layer does more with its number than to ask a cache for its part."""
    for one in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        try:
            source = inspect.getsource(one)
        except (OSError, TypeError):  # of a class that was made of another, which follows
            continue
        [tree] = ast.parse(textwrap.dedent(source)).body
        assert isinstance(tree, ast.ClassDef)
        methods = [part for part in tree.body if getattr(part, "name", None) != "__init__"]
        parts = [part for method in methods for part in ast.walk(method)]
        asking = [
            part
            for part in parts
            if isinstance(part, ast.Call) and getattr(part.func, "attr", None) == "update"
        ]
        asked = {id(part) for call in asking for part in ast.walk(call)}
        if any(getattr(one, "attr", None) == "layer_idx" and id(one) not in asked for one in parts):
            return True
    return False
