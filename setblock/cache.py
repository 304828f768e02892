"""Keys and values of clean tokens while decoding: PrefixCache, on transformers' cache interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy import ndarray
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from setblock.masks import CLEAN, PADDING, Layout, visible
from setblock.transfer import to_device
from setblock.unpadded import Line

# What a network's forward calls its cache: transformers has a new name for it since 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__annotations__ else "past_key_values"


AHEAD = 1024  # slots that memory grows by at least: most answers are shorter


class Memory:
    """Room for the keys and values of so many rows; a cache has it for itself while it lives.

    Each layer's is allocated at its first forward, which tells the shapes.
    fixed: stays where it is, and as large.
    room: slots of a row that are allocated, or will be; all of `capacity` where it is fixed.
    """

    def __init__(self, rows: int, capacity: int, fixed: bool = True) -> None:
        self.rows, self.capacity, self.fixed = rows, capacity, fixed
        self.room = capacity if fixed else 0
        self._layers: dict[int, list[Tensor]] = {}
        self._numbers: Tensor | None = None

    def numbers(self, count: int, device: torch.device) -> Int[Tensor, " count"]:
        """0 to count - 1: a part of one tensor, which graphs may look at while the memory lives."""
        if self._numbers is None:
            self._numbers = torch.arange(max(self.rows, self.capacity), device=device)
        return self._numbers[:count]

    def of(self, layer: int, key_states: Tensor, value_states: Tensor) -> list[Tensor]:
        """Keys and values of a layer, [rows, heads, room, width] each."""
        if layer not in self._layers:
            # Zeros, not empty memory: slots nobody sees get weight 0, and 0 * NaN is NaN.
            self._layers[layer] = [
                states.new_zeros(self.rows, states.shape[1], self.room, states.shape[3])
                for states in (key_states, value_states)
            ]
        return self._layers[layer]

    def grow(self, needed: int, rows: int = 1) -> None:
        """Make room for so many slots and rows, and some more. Copies what is there, a layer at a
        time.
        """
        room, count = self.room, self.rows
        if needed > room:
            room = min(max(needed + AHEAD, 2 * room), self.capacity)
        if rows > count:
            count = max(rows, 2 * count)
        for tensors in self._layers.values():
            for number, old in enumerate(tensors):
                # A growth that failed in the middle may have left it larger.
                size = max(count, len(old)), old.shape[1], max(room, old.shape[2]), old.shape[3]
                tensors[number] = old.new_zeros(size)
                tensors[number][: len(old), :, : old.shape[2]] = old
        self.room, self.rows = room, count

    def widen(self, capacity: int) -> None:
        """From now on `grow` may go so far."""
        self.capacity, self._numbers = max(capacity, self.capacity), None

    def fill_at_random(self) -> None:
        """Effects: random keys and values wherever a forward has made room; to measure with, as
        zeros take less power to compute with.
        """
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor.normal_()

    def clear(self) -> None:
        """Zeros again, before another cache gets it."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor.zero_()


@dataclass
class _Slots:
    """Where a forward writes; shared by a cache and its layers, so that neither holds the other."""

    capacity: int
    grain: int  # `end` is a multiple of it
    longest: int = 0  # of the prefixes
    end: int = 0  # the last slot that any row writes lies before it
    alike: bool = True  # every row writes at `longest`
    index: Tensor | None = None  # [batch, length], where rows write that are not alike
    row: Tensor | None = None  # [batch, 1], the number of each row, beside `index`
    line: Line | None = None  # what writes, if it is no rows; the two above are [tokens] then


class _PrefixLayer(CacheLayerMixin):
    """One layer's keys and values, in memory that its first forward allocates."""

    # False for sliding-window layers too: nothing is evicted, the mask holds the window.
    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, slots: _Slots, memory: Memory, number: int) -> None:
        super().__init__()
        self.slots, self.memory, self.number = slots, memory, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._look(self.memory.of(self.number, key_states, value_states), len(key_states))
        self.is_initialized = True

    def _look(self, whole: list[Tensor], rows: int) -> None:
        self.keys, self.values = (tensor[:rows] for tensor in whole)

    def grown(self) -> None:
        """Look at the memory where it is now."""
        if self.is_initialized:
            rows = len(self.keys)
            self._look(self.memory.of(self.number, self.keys, self.values), rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Views of the slots up to the last one written. Writes in place; the only writer."""
        slots = self.slots
        if not self.is_initialized:
            rows = len(key_states) if slots.line is None else len(slots.line.real)
            pair = key_states, value_states
            self.lazy_initialization(*(states.expand(rows, -1, -1, -1) for states in pair))
        start, end, index = slots.longest, slots.end, slots.index
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            if index is None:
                memory[:, :, start:end] = states
            else:
                states = states.transpose(1, 2)
                memory[slots.row, :, index] = states if slots.line is None else states[0]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def join(self, other: "_PrefixLayer", longest: int) -> None:
        """Have another's rows behind these, of each the first `longest` slots."""
        if not other.is_initialized:
            return
        rows = len(self.keys)
        pair = self.memory.of(self.number, other.keys, other.values)
        self._look(pair, rows + len(other.keys))
        for memory, states in ((self.keys, other.keys), (self.values, other.values)):
            memory[rows:, :, :longest] = states[:, :, :longest]
            memory[rows:, :, longest:] = 0  # what other rows have left there may be NaN

    def select(self, places: Tensor, rows: Tensor, count: int) -> None:
        """Put these rows in these places, and keep the first `count` places."""
        if not self.is_initialized:
            return
        for memory in (self.keys, self.values):
            memory[places] = memory[rows]
        self.keys, self.values = self.keys[:count], self.values[:count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots.longest

    def get_max_length(self) -> int:
        return self.slots.capacity


class PrefixCache(Cache):
    """Keys and values of clean tokens; row b's prefix is slots 0..lengths[b]-1, by position.

    lengths  [batch], on the host
    A forward writes its query tokens to slots lengths[b]+i. They are scratch, overwritten by the
    next forward, unless keep() makes the first of them part of the prefix.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        memory: Memory | None = None,
        grain: int = 1,
    ) -> None:
        """memory: of at least as many rows and slots; None for its own, which grows.

        grain: forwards look at a multiple of so many slots, of which `memory` holds one.
        """
        self.memory = memory = memory or Memory(batch, capacity, fixed=False)
        self.slots = _Slots(memory.capacity, grain)
        self.lengths: Int[ndarray, " batch"] = np.zeros(batch, dtype=np.int64)
        self.there = torch.from_numpy(self.lengths)  # on the device, since the first `locate`
        self.keepable: Int[ndarray, " batch"] | None = None
        # Tokens of each prefix that no forward of this cache has encoded.
        self.restored = np.zeros_like(self.lengths)
        self._own = [_PrefixLayer(self.slots, memory, i) for i in range(num_layers)]
        super().__init__(layers=list(self._own))

    def stage(self, queries: Layout) -> None:
        """Say what the next forward writes; on the device `locate` says where.

        queries: on the host.
        Raises: ValueError if it does not fit.
        """
        position = queries.position.numpy()
        batch, num_queries = position.shape
        slots = self.slots
        assert batch == len(self.lengths), f"{batch} rows, but the cache has {len(self.lengths)}"
        slots.longest = int(self.lengths.max())
        needed = slots.longest + num_queries
        slots.end = -(-needed // slots.grain) * slots.grain
        if slots.end > slots.capacity:
            raise ValueError(
                f"a prefix of {slots.longest} tokens and {num_queries} query tokens exceed the "
                f"cache's capacity of {slots.capacity}"
            )
        if slots.end > self.memory.room:
            self._grow(slots.end)
        slots.alike = slots.grain == 1 and bool((self.lengths == slots.longest).all())
        # Only a run of clean tokens that starts in its own place can extend the prefix.
        fit = position == self.lengths[:, None] + np.arange(num_queries)
        fit &= (queries.block.numpy() == CLEAN) & (queries.document.numpy() != PADDING)
        self.keepable = fit.cumprod(axis=1).sum(axis=1)

    def locate(
        self, lengths: Int[Tensor, " batch"], num_queries: int, line: Line | None = None
    ) -> None:
        """Say where the staged forward of so many tokens a row writes.

        lengths: the cache's own, on the device; a graph looks at them anew in each replay.
        line: those tokens, if they come in a line.
        """
        self.there, slots = lengths, self.slots
        slots.line = line
        slots.row = self.memory.numbers(len(lengths), lengths.device)[:, None]
        if line is not None:
            [slots.index] = line.line(self._places(num_queries))
            [slots.row] = line.line(slots.row.expand(-1, num_queries))
        else:
            slots.index = None if slots.alike else self._places(num_queries)

    def _places(self, num_queries: int) -> Int[Tensor, "batch length"]:
        """Slots that the next forward's query tokens are written to; on the device."""
        following = self.memory.numbers(num_queries, self.there.device)
        return self.there[:, None] + following

    def keep(self, counts: Int[ndarray, " batch"]) -> None:
        """Make the first counts[b] query tokens of the last forward part of row b's prefix.

        Asserts that they were clean and continued the prefix; once per forward.
        """
        assert self.keepable is not None, "keep() twice after one forward, or before any"
        assert ((counts >= 0) & (counts <= self.keepable)).all(), (
            f"asked to keep {counts.tolist()} query tokens, of which only "
            f"{self.keepable.tolist()} are clean and in place"
        )
        self.lengths = self.lengths + counts
        self.keepable = None

    def forget(self, counts: Int[ndarray, " batch"]) -> None:
        """Take the last counts[b] tokens of row b's prefix out of it."""
        self.lengths = self.lengths - counts
        assert (self.lengths >= 0).all(), f"a prefix has no {counts.tolist()} tokens to forget"

    def _grow(self, needed: int, rows: int = 1) -> None:
        try:
            self.memory.grow(needed, rows)
        finally:  # what has grown by then is where its old place is no more
            for layer in self._own:
                layer.grown()

    def widen(self, capacity: int) -> bool:
        """Let rows come to hold so many tokens; whether they may."""
        if not self.memory.fixed:
            self.memory.widen(capacity)
            self.slots.capacity = self.memory.capacity
        return capacity <= self.memory.capacity

    def has_room_for(self, rows: int, capacity: int) -> bool:
        """Whether so many more rows, with up to so many tokens each, can join."""
        memory, rows = self.memory, len(self.lengths) + rows
        return not memory.fixed or (rows <= memory.rows and capacity <= memory.capacity)

    def join(self, other: "PrefixCache") -> None:
        """Have another cache's rows behind its own, copied."""
        longest, rows = int(other.lengths.max()), len(self.lengths) + len(other.lengths)
        assert self.has_room_for(len(other.lengths), longest), "no room for these rows"
        self.widen(longest)
        if longest > self.memory.room or rows > self.memory.rows:
            self._grow(longest, rows)
        for own, theirs in zip(self._own, other._own, strict=True):
            own.join(theirs, longest)
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.restored = np.concatenate([self.restored, other.restored])
        self.keepable = None

    def saved(self, count: int, row: int = 0) -> list[tuple[Tensor, Tensor] | None] | None:
        """Keys and values of the first `count` tokens of a row's prefix, copied, of each layer that
        has any: [heads, count, width]. None if some are no numbers, as behind an overflow.
        """
        assert count <= self.lengths[row], f"a prefix of {self.lengths[row]} tokens has no {count}"
        saved = [
            (layer.keys[row, :, :count].clone(), layer.values[row, :, :count].clone())
            if layer.is_initialized
            else None
            for layer in self._own
        ]
        # What is no number in one layer is none in all that come behind it.
        last = next(pair for pair in reversed(saved) if pair is not None)
        return saved if all(bool(states.isfinite().all()) for states in last) else None

    def restore(self, saved: Sequence[tuple[Tensor, Tensor] | None], count: int) -> None:
        """Begin every row with the first `count` tokens that a cache has saved of one."""
        assert not self.lengths.any(), "restore() is for an empty cache"
        rows = len(self.lengths)
        if count > self.memory.room:
            self._grow(count)
        for layer, pair in zip(self._own, saved, strict=True):
            if pair is not None:
                layer.lazy_initialization(*(states.expand(rows, -1, -1, -1) for states in pair))
                layer.keys[:, :, :count] = pair[0][:, :count]
                layer.values[:, :, :count] = pair[1][:, :count]
        self.lengths = np.full_like(self.lengths, count)
        self.restored = self.lengths.copy()

    def select(self, rows: Int[ndarray, " rows"]) -> None:
        """Keep only these rows, in this order, each once, at the front of the memory.

        Copies those that move.
        """
        self.lengths, self.restored = self.lengths[rows], self.restored[rows]
        self.keepable = None if self.keepable is None else self.keepable[rows]
        [moved] = (rows != np.arange(len(rows))).nonzero()
        places, sources = to_device(self.there.device, moved, rows[moved])
        for layer in self._own:
            layer.select(places, sources, len(rows))

    def visible(self, queries: Layout, window: int | None) -> Bool[Tensor, "batch 1 length cache"]:
        """What masks.visible says of these queries and of `keys_layout`, without its work; once
        they are located.

        A prefix is clean and in order: all that a query can see of it ends in one place. Padding
        may see something else, as nobody sees what becomes of it. Other queries are of the
        prefix's text, document 0.
        queries: on the device.
        """
        there = self.there[:, None]
        slot = self.memory.numbers(self.slots.end, there.device)
        end = torch.minimum(queries.horizon, there)
        seen = slot < end[:, None, :, None]
        if window is not None:
            seen &= slot > (queries.position - window)[:, None, :, None]
        if queries.position.shape[1] == 1:  # sees itself
            return seen | (slot == there)[:, None, None]
        own = visible(queries, queries, window)
        place = self._places(own.shape[3])[:, None, None]
        return seen.scatter_(3, place.expand_as(own), own)

    def keys_layout(self, queries: Layout) -> Layout:
        """Places of all slots that a forward looks at: prefix, then queries, then padding.

        queries: on the device.
        """
        num_queries = queries.position.shape[1]
        slot = self.memory.numbers(self.slots.end, self.there.device)
        query = slot - self.there[:, None]
        prefix, padding = query < 0, query >= num_queries
        at = queries.map(lambda tensor: tensor.gather(1, query.clamp(0, num_queries - 1)))
        return Layout(
            position=torch.where(prefix, slot, at.position.masked_fill(padding, 0)),
            horizon=torch.where(prefix, slot + 1, at.horizon.masked_fill(padding, 1)),
            block=at.block.masked_fill(prefix | padding, CLEAN),
            document=at.document.masked_fill(prefix, 0).masked_fill(padding, PADDING),
        )
