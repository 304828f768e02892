"""Forwards recorded once for each of their shapes and replayed as CUDA graphs.

A replayed forward is one launch, where a model's layers are hundreds and a device may be done with
a few query tokens before Python is. A graph reads and writes the memory that it was recorded with,
so the caches of one answer after the other take theirs from here, and what changes from forward to
forward is copied to where the graph looks for it.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from setblock.cache import Memory, PrefixCache
from setblock.checkpoint import ModelError

GRAIN = 512  # the slots that a forward looks at are rounded up to so many: few shapes, few graphs
# Of one memory. Further shapes run plainly: to record one takes as long as many forwards, and
# leaving out others for it could go on for ever.
MOST_GRAPHS = 64
# Kinds of rotary embedding that look at the values of positions, which a graph can't.
LOOKING = ("dynamic", "longrope")


@dataclass
class Graph:
    """inputs: the tensors that it reads; result: the one that it writes."""

    inputs: list[Tensor | None]
    replay: Callable[[], None]
    result: Tensor


@dataclass(eq=False)
class Recorded:
    """The memory of one cache after the other, and what was recorded on it."""

    memory: Memory
    pool: Any = None  # what its graphs take their own memory from; gone with the last of them
    met: set[Any] = field(default_factory=set)  # shapes that ran once
    graphs: dict[Any, Graph] = field(default_factory=dict)


class Graphs:
    """Runs forwards behind a prompt: the first of each shape plainly, from the second on replayed.

    run: `Model._run`, or the same compiled.
    """

    def __init__(self, network: Any, run: Callable[..., Tensor]) -> None:
        """Raises: ModelError for a network that can't be recorded."""
        if why := missing(network):
            alone = "; compile 'kernels' goes without them" if on_cuda(network) else ""
            raise ModelError(f"graphs: {why}{alone}")
        self.network, self.run = network, run
        self._free: list[Recorded] = []
        self._of: weakref.WeakKeyDictionary[PrefixCache, Recorded] = weakref.WeakKeyDictionary()

    def cache(self, num_layers: int, batch: int, capacity: int) -> PrefixCache:
        """A cache in memory that the last one has left, if it is large enough, or in fresh one."""
        capacity = -(-capacity // GRAIN) * GRAIN
        if not self._fitting(batch, capacity):
            gc.collect()  # torch.compile leaves cycles that hold a cache
        if fitting := self._fitting(batch, capacity):
            recorded = fitting[0]
            self._free.remove(recorded)
            recorded.memory.clear()
        else:
            self._free.clear()  # too small, and its graphs with it
            recorded = Recorded(Memory(batch, capacity))
        cache = PrefixCache(num_layers, batch, capacity, recorded.memory, GRAIN)
        self._of[cache] = recorded
        weakref.finalize(cache, self._free.append, recorded).atexit = False
        return cache

    def _fitting(self, batch: int, capacity: int) -> list[Recorded]:
        sizes = [(one, one.memory.rows, one.memory.capacity) for one in self._free]
        return [one for one, rows, slots in sizes if rows >= batch and slots >= capacity]

    def __call__(
        self,
        tokens: Tensor,
        position: Tensor,
        mask: Any,
        cache: PrefixCache,
        logits_at: Tensor | None,
        told: dict[str, Any],
    ) -> Tensor:
        """As `Model._run`."""
        gate: Any = getattr(self.network, "setblock_gate", None)
        masks = mask if isinstance(mask, dict) else {"": mask}
        noisy = None if gate is None else gate.noisy
        given = [tokens, position, cache.slots.index, logits_at, noisy, *masks.values()]
        whole = gate is not None and gate.whole
        key = (whole, *(None if one is None else one.shape for one in given))
        recorded = self._of.get(cache)
        if recorded is None:  # made before there were graphs
            return self.run(tokens, position, mask, cache, logits_at, told)
        full = len(recorded.graphs) == MOST_GRAPHS
        if key not in recorded.met or (full and key not in recorded.graphs):
            recorded.met.add(key)
            return self.run(tokens, position, mask, cache, logits_at, told)
        if key not in recorded.graphs:
            recorded.graphs[key] = self._record(given, list(masks), cache, told)
        graph = recorded.graphs[key]
        for place, value in zip(graph.inputs, given, strict=True):
            if place is not None and value is not None:
                place.copy_(value)
        graph.replay()
        return graph.result.clone()  # the next replay overwrites it

    def _record(
        self, given: list[Tensor | None], kinds: list[str], cache: PrefixCache, told: dict[str, Any]
    ) -> Graph:
        """The graph of such a forward. Raises: ModelError where one of its steps can't be part."""
        gate: Any = getattr(self.network, "setblock_gate", None)
        inputs = [None if one is None else one.clone() for one in given]
        tokens, position, index, logits_at, noisy, *masks = inputs
        mask = masks[0] if kinds == [""] else dict(zip(kinds, masks, strict=True))

        def forward() -> Tensor:
            return self.run(tokens, position, mask, cache, logits_at, told)

        cache.slots.index, before = index, cache.slots.index
        if gate is not None:
            gate.noisy = noisy
        recorded = self._of[cache]
        recorded.pool = recorded.pool or new_pool()
        outer = sys.exception()  # what the caller is handling has no part in it
        try:
            replay, result = record(forward, recorded.pool, self.network.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Ending a recording that has failed fails too, and hides why.
            why: BaseException = error
            while why.__context__ not in (None, outer):
                why = why.__context__
            first = str(why).partition("\n")[0]
            raise ModelError(
                f"graphs: a forward of {self.network.config.model_type} can't be recorded: {first}"
            ) from error
        finally:
            cache.slots.index = before
        return Graph(inputs, replay, result)


def missing(network: Any) -> str | None:
    """Why forwards of this network can't be recorded; None if they can."""
    rotary = getattr(network.config, "rope_parameters", None) or {}
    kinds = [rotary, *(one for one in rotary.values() if isinstance(one, dict))]
    looking = {one.get("rope_type") for one in kinds} & set(LOOKING)
    if not on_cuda(network):
        return f"they are CUDA's, and the model is on {network.device}"
    if looking:
        return f"rotary embeddings of type {', '.join(sorted(looking))} look at each position"
    if network.config._attn_implementation == "flex_attention":
        return "a BlockMask is made anew in every forward; use sdpa"
    if hasattr(network, "peft_config") and getattr(network, "setblock_gate", None) is None:
        return "peft's own layers can't be recorded: load the adapter by setblock.load"
    return None


def on_cuda(network: Any) -> bool:
    """Whether the network's device has graphs."""
    return network.device.type == "cuda"


def new_pool() -> Any:
    """What graphs take memory from."""
    return torch.cuda.graph_pool_handle()


@functools.cache
def beside(device: torch.device) -> Any:
    """The stream on which a forward runs once before it is recorded."""
    return torch.cuda.Stream(device)


def record(
    function: Callable[[], Tensor], pool: Any, device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    """(what runs the same kernels again, on the same memory; the tensor that they write)."""
    with torch.cuda.device(device):
        # Once beside: what libraries and torch.compile make at a first call can't be recorded.
        stream = beside(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps what it works in for each stream: none of a pool's may be left to others, and
        # none of theirs be part of a graph.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, pool=pool):
            result = function()
        torch._C._cuda_clearCublasWorkspaces()
    return graph.replay, result
