"""Block masks of FlexAttention: the dense rule in tiles, no more of them than are seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import decoding_layout
from test_masks import pack, row
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention

from setblock.masks import (
    PADDING,
    Layout,
    WholeRows,
    flex_block_mask,
    training_layout,
    visible,
)
from setblock.objective import (
    IGNORE,
    document_places,
    draw_batch_noise,
    drop_idle_blocks,
    noisy_view,
)


def examples() -> list[tuple[Layout, Layout]]:
    """(queries, keys) of a packed training batch and of a decoding batch at mixed stages."""
    packings = (pack((5, 3, 4)), pack((2, 7), padding=3))
    position, document = (torch.tensor(column) for column in zip(*packings, strict=True))
    training = training_layout(position, document, 4)
    start, end = torch.tensor([4, 6, 5]), torch.tensor([8, 6, 9])
    queries = decoding_layout(torch.tensor([[0], [5], [5]]) + torch.arange(8), start, end)
    keys = decoding_layout(torch.arange(13).expand(3, -1), start, end)
    return [(training, training), (queries, keys)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("example", [0, 1])
def test_block_mask_is_the_dense_mask(example, window):
    queries, keys = examples()[example]
    (batch, num_queries), num_keys = queries.position.shape, keys.position.shape[1]
    block_mask = flex_block_mask(queries, keys, window)
    assert block_mask.shape == (batch, 1, num_queries, num_keys)
    dense = create_mask(block_mask.mask_mod, batch, 1, num_queries, num_keys, device="cpu")
    assert dense.equal(visible(queries, keys, window))


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    padding=st.integers(0, 150),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 150),
)
@settings(deadline=None, derandomize=True, max_examples=25)
def test_block_mask_visits_every_tile_that_torch_visits(lengths, padding, block_size, window):
    """And calls no tile full that is not, so that the rule decides wherever it has to."""
    position, document = pack(tuple(lengths), padding)
    layout = training_layout(row(*position), row(*document), block_size)
    found = flex_block_mask(layout, layout, window)
    size = layout.position.shape[1]
    expected = create_block_mask(found.mask_mod, 1, None, size, size, device="cpu")
    assert found.shape == expected.shape
    visited, full = tiles_of(found)
    needed, all_full = tiles_of(expected)
    assert not (needed & ~visited).any()
    assert not (full & ~all_full).any()
    if len(lengths) == 1 and not padding and window is None:
        assert visited.equal(needed)
        assert full.equal(all_full)


def parts_of(layout: Layout) -> list[tuple[Layout, Layout]]:
    """(queries, keys) of a view: all of it, its clean half, its noisy half over all of it."""
    length = layout.position.shape[1] // 2
    clean, noisy = (
        layout.map(lambda tensor, part=part: tensor[:, part])
        for part in (slice(length), slice(length, None))
    )
    return [(layout, layout), (clean, clean), (noisy, layout)]


@given(
    length=st.integers(1, 400),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 150),
    lacks=st.lists(st.integers(0, 399), min_size=1, max_size=3),
)
@settings(deadline=None, derandomize=True, max_examples=25)
def test_rows_of_one_length_and_block_size_share_their_tiles(length, block_size, window, lacks):
    """Rows that end in padding too: each pair that a real query sees lies in a tile that is listed,
    and a tile that is called full holds no pair that it does not see.
    """
    lengths = torch.tensor([[max(1, length - lack)] for lack in lacks])
    position, document = document_places(lengths, length)
    ragged = training_layout(position, document, block_size)
    index = torch.arange(length)[None]
    exact = training_layout(index, torch.zeros_like(index), block_size)
    rows = WholeRows(length, block_size)
    for (queries, keys), (whole_queries, whole_keys) in zip(
        parts_of(ragged), parts_of(exact), strict=True
    ):
        found = flex_block_mask(queries, keys, window, rows)
        again = flex_block_mask(whole_queries, whole_keys, window, rows)
        assert found.kv_indices is again.kv_indices
        assert found.q_indices is again.q_indices
        own = flex_block_mask(whole_queries, whole_keys, window)
        listed_tiles = tiles_of(found)
        for tiles, expected in zip(listed_tiles, tiles_of(own), strict=True):
            assert tiles.equal(expected)
        sees = visible(queries, keys, window)[:, 0]
        pairs = slice(sees.shape[1]), slice(sees.shape[2])
        for one, real in zip(sees, queries.document != PADDING, strict=True):
            visited, full = (
                tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)[pairs]
                for tiles in listed_tiles
            )
            assert not (one & ~visited)[real].any()
            assert not (full & ~one)[real].any()
        dense = create_mask(found.mask_mod, len(lacks), 1, *sees.shape[1:], device="cpu")
        assert dense[:, 0].equal(sees)


def test_other_lengths_block_sizes_and_windows_have_tiles_of_their_own():
    def kept(length: int, block_size: int, window: int | None = None) -> Tensor:
        index = torch.arange(length)[None]
        layout = training_layout(index, torch.zeros_like(index), block_size)
        return flex_block_mask(layout, layout, window, WholeRows(length, block_size)).kv_indices

    assert kept(300, 8) is kept(300, 8)
    others = [kept(300, 9), kept(301, 8), kept(300, 8, 50)]
    assert all(other is not kept(300, 8) for other in others)


def tiles_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """[rows, columns]: tiles that are visited, and those for which the rule is not asked.

    Both ways round, which must say the same: by rows, as the forward pass reads them, and by
    columns, as the backward pass does.
    """
    found = []
    for side in ("kv", "q"):
        partial, full = (
            listed(
                getattr(mask, f"{kind}{side}_num_blocks"), getattr(mask, f"{kind}{side}_indices")
            )
            for kind in ("", "full_")
        )
        assert not (partial & full).any()
        found.append((partial | full, full))
    by_rows, by_columns = found
    assert all(rows.equal(columns.T) for rows, columns in zip(by_rows, by_columns, strict=True))
    return by_rows


def listed(counts: Tensor, columns: Tensor) -> Tensor:
    """[rows, columns] bool from the counts and indices of a BlockMask's first row of a batch."""
    chosen = torch.zeros(columns.shape[2:], dtype=torch.bool)
    for line, count, indices in zip(chosen, counts[0, 0], columns[0, 0], strict=True):
        line[indices[:count].long()] = True
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_block_mask_of_packed_rows_visits_few_tiles_too_many(seed):
    """A training row as it is computed: documents, padding, and blocks without a mask cut out."""
    lengths = torch.randint(60, 250, (1, 8), generator=torch.Generator().manual_seed(seed))
    position, document = document_places(lengths, 2048)
    tokens = torch.arange(2048)[None]
    masked = draw_batch_noise(seed, 0, [[*range(8)]], lengths.tolist(), 2048)
    labels = tokens.masked_fill(document == PADDING, IGNORE)
    view = noisy_view(tokens, labels, position, document, masked, 8, mask_token_id=0)
    layout = drop_idle_blocks(view).layout
    visited, _ = tiles_of(flex_block_mask(layout, layout))
    seen = visible(layout, layout)[0, 0]
    rest = -len(seen) % 128
    tiles = torch.nn.functional.pad(seen, (0, rest, 0, rest)).view(len(visited), 128, -1, 128)
    needed = tiles.any(3).any(1)
    assert not (needed & ~visited).any()
    assert visited.sum() <= 1.1 * needed.sum()


def test_block_mask_skips_blocks_that_nobody_sees():
    """128 by 128 tiles: of [x ; x_hat] at twice 256 tokens, x sees no noisy tile."""
    position = torch.arange(256)[None]
    layout = training_layout(position, torch.zeros_like(position), 16)
    tiles = flex_block_mask(layout, layout).to_dense()[0, 0]
    expected = visible(layout, layout)[0, 0].view(4, 128, 4, 128).any(3).any(1)
    assert tiles.bool().equal(expected)
    assert not tiles[:2, 2:].any()


# Eager FlexAttention, which is what a CPU runs, says that it is slow.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("example", [0, 1])
def test_flex_attention_equals_dense_attention(example, window):
    queries, keys = examples()[example]
    draw = torch.Generator().manual_seed(0)
    (batch, num_queries), num_keys = queries.position.shape, keys.position.shape[1]
    query = torch.randn(batch, 2, num_queries, 8, generator=draw)
    key, value = torch.randn(2, batch, 2, num_keys, 8, generator=draw)
    block_mask = flex_block_mask(queries, keys, window)
    found = flex_attention(query, key, value, block_mask=block_mask)
    assert isinstance(found, Tensor)
    mask = visible(queries, keys, window)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert not expected.isnan().any()
    torch.testing.assert_close(found, expected)
