"""Who may see whom: one rule for training, prefill, decoding, ragged batches and packing.

Every token of a row has four numbers, held in a `Layout`:

    position   its place in the text, the one that the position embedding gets
    horizon    it sees clean tokens whose position is below this: position + 1 for a clean token,
               the first position of its block for a noisy one
    block      CLEAN for a causally encoded token, else the id of its noisy block
    document   which text it belongs to; PADDING belongs to none

A query sees a key iff both stand in the same document and
    the key is noisy and both share a block,          or
    the key is clean and key.position < query.horizon.

Padding is a document of its own that no real token stands in, so that it needs no case of its own
and no query is left without a key to see.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, no_type_check

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy import ndarray
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CLEAN = -1
PADDING = -1
MOST_SLOTS = 1024  # of a block
TILE = 128  # queries and keys of a tile of FlexAttention, its default


@dataclass(frozen=True)
class Layout:
    """The places of a batch of tokens; four integer tensors of one shape."""

    position: Int[Tensor, "batch length"]
    horizon: Int[Tensor, "batch length"]
    block: Int[Tensor, "batch length"]
    document: Int[Tensor, "batch length"]

    def __post_init__(self) -> None:
        shapes = [tuple(tensor.shape) for tensor in self.tensors()]
        if len(set(shapes)) != 1:
            raise ValueError(f"the four tensors of a Layout must share one shape, got {shapes}")

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """position, horizon, block and document."""
        return self.position, self.horizon, self.block, self.document

    def map(self, function: Callable[[Tensor], Tensor]) -> "Layout":
        """The layout whose four tensors are `function` of these."""
        return Layout(*map(function, self.tensors()))

    def cat(self, other: "Layout") -> "Layout":
        """This layout's tokens followed by those of `other`."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return Layout(*(torch.cat(pair, dim=1) for pair in pairs))


class WholeRows(NamedTuple):
    """Rows of [x ; x_hat], each of one document and its padding, with no noisy block left out.

    Padding and noise apart, the two numbers tell who sees whom: rows alike share FlexAttention's
    lists of tiles.
    """

    length: int  # of x, padding included
    block_size: int


def causal_layout(
    position: Int[Tensor, "batch length"], document: Int[Tensor, "batch length"] | None = None
) -> Layout:
    """Clean tokens at these positions: an ordinary causal language model."""
    if document is None:
        document = torch.zeros_like(position)
    return Layout(position, position + 1, torch.full_like(position, CLEAN), document)


def decoding_layout(
    position: Int[ndarray, "batch length"],
    start: Int[ndarray, " batch"],
    end: Int[ndarray, " batch"],
) -> Layout:
    """Places while decoding: clean before `start`, a noisy block in [start, end), then padding.

    On the host, as its arguments are.

    Covers prefill (start = end = prompt length), the first forward of a block (the previous block,
    clean, then the new one), later forwards, next-token decoding (start = end), and any mix of
    these in a batch.
    Source: arXiv:2509.04185 algorithms 2 and 3, figure 10.
    """
    start, end = start[:, None], end[:, None]
    padding = position >= end
    noisy = (position >= start) & ~padding
    return _of_arrays(
        position=np.where(padding, 0, position),
        horizon=np.where(padding, 1, np.where(noisy, start, position + 1)),
        block=np.where(noisy, start, CLEAN),
        document=np.where(padding, PADDING, 0),
    )


def branches_layout(
    first: Int[ndarray, "batch branches"], last: Int[ndarray, "batch branches"], size: int
) -> Layout:
    """Places of noisy blocks of `size` tokens side by side, [batch, branches * size]; on the host.

    A branch stands at [first, last), at most `size` positions, sees the clean tokens before `first`
    and itself alone; its tokens from `last` on are padding.
    """
    first = first[..., None]
    position = first + np.arange(size)
    padding = position >= last[..., None]
    flat = len(first), position.shape[1] * size
    return _of_arrays(
        position=np.where(padding, 0, position).reshape(flat),
        horizon=np.where(padding, 1, first).reshape(flat),
        block=np.where(padding, CLEAN, np.arange(first.shape[1])[:, None]).reshape(flat),
        document=np.where(padding, PADDING, 0).reshape(flat),
    )


def _of_arrays(**arrays: Int[ndarray, "batch length"]) -> Layout:
    """A layout on the host that shares these arrays' memory."""
    return Layout(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def training_layout(
    position: Int[Tensor, "batch length"],
    document: Int[Tensor, "batch length"],
    block_size: int,
    begins: Bool[Tensor, "batch length"] | None = None,
) -> Layout:
    """Places of [x ; x_hat], 2 * length tokens: the clean text, then its noisy copy in blocks.

    Blocks start anew at each document, where `position` counts from 0. A block is named by its
    first position, and the document tells equal names apart.
    begins: tokens at which a new block begins within one of the grid, which ends where it would.
    Raises: ValueError if block_size < 1.
    Source: arXiv:2509.04185 figures 8 and 9.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    block = position - position % block_size
    if begins is not None:
        index = torch.arange(position.shape[1], device=position.device)
        latest = torch.where(begins | (position == 0), index, 0).cummax(dim=1).values
        block = torch.maximum(block, position.gather(1, latest))
    noisy = Layout(position, block, block, document)
    return causal_layout(position, document).cat(noisy)


def visible(
    queries: Layout, keys: Layout, window: int | None = None
) -> Bool[Tensor, "batch 1 length cache"]:
    """True where a query sees a key, in the shape that scaled_dot_product_attention takes.

    window: width of a sliding-window layer in positions (a query sees less than `window` back),
    None for full attention.
    """
    query = [tensor[:, None, :, None] for tensor in queries.tensors()]
    key = [tensor[:, None, None, :] for tensor in keys.tensors()]
    return _sees(query, key, window)


def flex_block_mask(
    queries: Layout, keys: Layout, window: int | None = None, rows: WholeRows | None = None
) -> "BlockMask":
    """The same rule as a FlexAttention BlockMask.

    The tiles to visit are told from each tile's least and greatest numbers, without looking at any
    pair of tokens, as torch's create_block_mask does with all of them. Where a tile's tokens are
    not in order, one that holds no pair that sees may be among them: the rule is asked there, so
    that it changes no result.
    rows: what keys are, or their clean half, and queries their last tokens; then the tiles are made
    once for each length and block size, as if no row had padding, whose queries alone see less so.
    The last 128 of them are kept, each of 4 bytes for every pair of tiles, four times over.
    """
    query_tensors, key_tensors = queries.tensors(), keys.tensors()

    @no_type_check
    def mask_mod(b, h, i, j):
        query = [tensor[b, i] for tensor in query_tensors]
        return _sees(query, [tensor[b, j] for tensor in key_tensors], window)

    if rows is None:
        tiles = _listed_tiles(queries, keys, window)
    else:
        sizes = queries.position.shape[1], keys.position.shape[1]
        tiles = copy.copy(_tiles_of_whole_rows(rows, *sizes, window, queries.position.device))
    tiles.mask_mod = mask_mod
    return tiles


@lru_cache(maxsize=128)
def _tiles_of_whole_rows(
    rows: WholeRows, num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> "BlockMask":
    """The tiles of a row that one document fills, for the last queries of the first keys."""
    position = torch.arange(rows.length, device=device)[None]
    layout = training_layout(position, torch.zeros_like(position), rows.block_size)
    keys = layout.map(lambda tensor: tensor[:, :num_keys])
    queries = keys.map(lambda tensor: tensor[:, num_keys - num_queries :])
    return _listed_tiles(queries, keys, window)


def _listed_tiles(queries: Layout, keys: Layout, window: int | None) -> "BlockMask":
    """A BlockMask that lists the tiles to visit, by rows and by columns; without a rule."""
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = _visited_tiles(queries, keys, window)
    return BlockMask.from_kv_blocks(
        *_ordered(partial[:, None]),
        *_ordered(full[:, None]),
        BLOCK_SIZE=TILE,
        seq_lengths=(queries.position.shape[1], keys.position.shape[1]),
    )


def _visited_tiles(
    queries: Layout, keys: Layout, window: int | None
) -> tuple[Bool[Tensor, "batch rows columns"], Bool[Tensor, "batch rows columns"]]:
    """Tiles some of whose pairs may see, and tiles all of whose pairs do.

    A clean token is numbered by its document and position, so that a query sees the clean keys of
    one range of numbers; a noisy one by its document and block, so that equal numbers see each
    other. Padding is the last document, as it stands in a row, so that numbers rise along a row.
    """
    last = torch.maximum(queries.document.amax(), keys.document.amax()) + 1
    span = 1 + torch.maximum(
        torch.maximum(queries.horizon.amax(), keys.horizon.amax()),
        torch.maximum(queries.block.amax(), keys.block.amax()),
    )

    def first(layout: Layout) -> Tensor:
        return span * torch.where(layout.document == PADDING, last, layout.document)

    nearest = torch.zeros_like(queries.position)
    if window is not None:
        nearest = queries.position - window + 1
    begin = _Tiles(first(queries) + nearest.clamp(min=0))
    end = _Tiles(first(queries) + queries.horizon)
    clean = _Tiles(first(keys) + keys.position, keys.block == CLEAN)
    full = (begin.most[:, :, None] <= clean.least[:, None]) & (
        clean.most[:, None] < end.least[:, :, None]
    )
    full &= end.whole[:, :, None] & clean.whole[:, None]
    some = (begin.least[:, :, None] <= clean.most[:, None]) & (
        clean.least[:, None] < end.most[:, :, None]
    )
    query, key = (_Tiles(first(side) + side.block, side.block != CLEAN) for side in (queries, keys))
    some |= (query.least[:, :, None] <= key.most[:, None]) & (
        key.least[:, None] <= query.most[:, :, None]
    )
    return some & ~full, full


class _Tiles:
    """Of each tile of a row, [batch, tiles]: the least and greatest of its numbers that count.

    A tile none of whose numbers count has a least one above its greatest. whole: all of them count,
    and the tile is not cut short by the row's end.
    """

    def __init__(self, numbers: Tensor, counts: Tensor | None = None) -> None:
        counts = torch.ones_like(numbers, dtype=torch.bool) if counts is None else counts
        rest = (0, -numbers.shape[1] % TILE)
        numbers = torch.nn.functional.pad(numbers, rest).unflatten(1, (-1, TILE))
        counts = torch.nn.functional.pad(counts, rest).unflatten(1, (-1, TILE))
        self.least = numbers.masked_fill(~counts, torch.iinfo(numbers.dtype).max).amin(2)
        self.most = numbers.masked_fill(~counts, -1).amax(2)
        self.whole = counts.all(2)


def _ordered(
    tiles: Bool[Tensor, "batch 1 rows columns"],
) -> tuple[Int[Tensor, "batch 1 rows"], Int[Tensor, "batch 1 rows columns"]]:
    """How many tiles of each row are set, and their columns, followed by all others."""
    tiles = tiles.int()
    columns = torch.argsort(tiles, dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), columns.int()


# FlexAttention compiles the rule and counts the parameters of mask_mod: plain functions of tensors,
# which the runtime type check of a test run must not wrap.
@no_type_check
def _sees(query: Sequence[Tensor], key: Sequence[Tensor], window: int | None) -> Tensor:
    """The rule itself, for the four tensors of two layouts, of any broadcastable shapes."""
    query_position, horizon, query_block, query_document = query
    key_position, _, key_block, key_document = key
    seen = torch.where(key_block == CLEAN, key_position < horizon, key_block == query_block)
    seen = seen & (key_document == query_document)
    if window is not None:
        seen = seen & (query_position - key_position < window)
    return seen
