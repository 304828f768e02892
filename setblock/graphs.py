"""Forwards recorded once for each of their shapes and replayed as CUDA graphs.

A replayed forward is one launch, where a model's layers are hundreds and a device may be done with
a few query tokens before Python is. A graph reads and writes the memory that it was recorded with,
so the caches of one answer after the other take theirs from here, and what changes from forward to
forward is copied, all at once, to where the graph looks for it: tokens and places. Masks are part
of the graph.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from setblock import attention
from setblock.architectures import looks_at_positions
from setblock.cache import Memory, PrefixCache
from setblock.names import ModelError
from setblock.transfer import Host, joined, parted, to_device

# The slots that a forward looks at are rounded up to a multiple: few shapes, few graphs.
GRAIN = attention.GRAIN
# Of one memory. Further shapes run plainly: to record one takes as long as many forwards, and
# leaving out others for it could go on for ever.
MOST_GRAPHS = 64
SHARED = 4096  # tokens at least that each row of a memory has room for which others may join

Results = tuple[Tensor, ...]
Forward = Callable[..., Results]


@dataclass
class Graph:
    """given: what it reads, as `transfer.joined`; results: the tensors that it writes."""

    given: Tensor
    replay: Callable[[], None]
    results: Results


@dataclass(eq=False)
class Recorded:
    """The memory of one cache after the other, and what was recorded on it."""

    memory: Memory
    pool: Any = None  # what its graphs take their own memory from; gone with the last of them
    met: set[Any] = field(default_factory=set)  # shapes that ran once
    graphs: dict[Any, Graph] = field(default_factory=dict)


class Graphs:
    """Runs forwards behind a prompt: of each shape the first plainly, from then on replayed."""

    def __init__(self, network: Any) -> None:
        """Raises: ModelError for a network that can't be recorded."""
        if why := missing(network):
            alone = "; compile 'kernels' goes without them" if on_cuda(network) else ""
            raise ModelError(f"compile 'graphs': {why}{alone}")
        self.network = network
        self._free: list[Recorded] = []
        self._of: weakref.WeakKeyDictionary[PrefixCache, Recorded] = weakref.WeakKeyDictionary()

    def cache(self, num_layers: int, batch: int, capacity: int, room: int) -> PrefixCache:
        """A cache in memory that the last one has left, if it is large enough, or in fresh one.

        room: how many rows it may come to; where that is more, they may have SHARED tokens each.
        """
        capacity = -(-max(capacity, SHARED if room > batch else 0) // GRAIN) * GRAIN
        if not self._fitting(room, capacity):
            gc.collect()  # torch.compile leaves cycles that hold a cache
        if fitting := self._fitting(room, capacity):
            recorded = fitting[0]
            self._free.remove(recorded)
            recorded.memory.clear()
        else:
            self._free.clear()  # too small, and its graphs with it
            recorded = Recorded(Memory(room, capacity))
        cache = PrefixCache(num_layers, batch, capacity, recorded.memory, GRAIN)
        self._of[cache] = recorded
        weakref.finalize(cache, self._free.append, recorded).atexit = False
        return cache

    def _fitting(self, batch: int, capacity: int) -> list[Recorded]:
        sizes = [(one, one.memory.rows, one.memory.capacity) for one in self._free]
        return [one for one, rows, slots in sizes if rows >= batch and slots >= capacity]

    def __call__(
        self, forward: Forward, given: Sequence[Host], cache: PrefixCache, kind: Any
    ) -> Results:
        """What `forward` makes of these whole numbers on the device, behind a staged cache.

        given: on the host. kind: what forwards differ in besides shapes.
        """
        device = self.network.device
        key = kind, cache.slots.end, *(one.shape for one in given)
        recorded = self._of.get(cache)
        if recorded is None:  # made before there were graphs
            return forward(*to_device(device, *given))
        full = len(recorded.graphs) == MOST_GRAPHS
        if key not in recorded.met or (full and key not in recorded.graphs):
            recorded.met.add(key)
            return forward(*to_device(device, *given))
        if key not in recorded.graphs:
            recorded.graphs[key] = self._record(forward, given, recorded)
        graph = recorded.graphs[key]
        graph.given.copy_(joined(given, device), non_blocking=True)
        graph.replay()
        return tuple(one.clone() for one in graph.results)  # the next replay overwrites them

    def _record(self, forward: Forward, given: Sequence[Host], recorded: Recorded) -> Graph:
        """The graph of such a forward. Raises: ModelError where one of its steps can't be part."""
        flat = joined(given, self.network.device).to(self.network.device)
        parts = parted(flat, given)
        recorded.pool = recorded.pool or new_pool()
        outer = sys.exception()  # what the caller is handling has no part in it
        try:
            replay, results = record(lambda: forward(*parts), recorded.pool, flat.device)
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
        return Graph(flat, replay, results)


def missing(network: Any) -> str | None:
    """Why forwards of this network can't be recorded; None if they can."""
    if not on_cuda(network):
        return f"these are CUDA's, and the model is on {network.device}"
    if looking := looks_at_positions(network.config):  # which a graph can't
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
    function: Callable[[], Results], pool: Any, device: torch.device
) -> tuple[Callable[[], None], Results]:
    """(what runs the same kernels again, on the same memory; the tensors that they write)."""
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
            results = function()
        torch._C._cuda_clearCublasWorkspaces()
    return graph.replay, results
