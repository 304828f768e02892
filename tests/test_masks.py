"""The visibility rule against brute force over every small size, from the paper's figures."""

import importlib.util
import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import decoding_layout
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention

from setblock import masks
from setblock.masks import (
    CLEAN,
    PADDING,
    Layout,
    WholeRows,
    causal_layout,
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


def row(*numbers: int) -> Tensor:
    return torch.tensor([numbers])


def seen(queries: Layout, keys: Layout, window: int | None = None) -> list[list[bool]]:
    """Who sees whom in the first row."""
    return visible(queries, keys, window)[0, 0].tolist()


@pytest.fixture(scope="module")
def unchecked():
    """The module as a user imports it, without the runtime type check of the test run."""
    spec = importlib.util.spec_from_file_location("unchecked_masks", masks.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def picture(text: str) -> list[list[bool]]:
    return [[mark == "x" for mark in line.split()[-1]] for line in text.split("\n") if line.strip()]


def pack(lengths: tuple[int, ...], padding: int = 0) -> tuple[list[int], list[int]]:
    """Positions and documents of a row that holds documents of these lengths, then padding."""
    position = [i for length in lengths for i in range(length)]
    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    return position + [0] * padding, document + [PADDING] * padding


def training_rule(position: list[int], document: list[int], k: int) -> list[list[bool]]:
    """The table of figures 8 and 9, one case at a time; padding is left open."""
    tokens = [
        (half, p, d) for half in ("clean", "noisy") for p, d in zip(position, document, strict=True)
    ]

    def allowed(query, key) -> bool:
        (query_half, query_position, query_document), (key_half, key_position, key_document) = (
            query,
            key,
        )
        if query_document != key_document:
            return False
        match query_half, key_half:
            case "clean", "clean":
                return key_position <= query_position
            case "clean", "noisy":
                return False
            case "noisy", "noisy":
                return query_position // k == key_position // k
            case _:
                return query_position // k > key_position // k

    return [[allowed(query, key) for key in tokens] for query in tokens]


def decoding_rule(queries: list[int], keys: list[int], start: int, end: int) -> list[list[bool]]:
    """Figure 10 in absolute positions: causal before `start`, the block sees all up to `end`."""

    def allowed(query: int, key: int) -> bool:
        if query >= end or key >= end:
            return query >= end and key >= end
        return key <= query if query < start else True

    return [[allowed(query, key) for key in keys] for query in queries]


def within(rule: list[list[bool]], queries: list[int], keys: list[int], window: int):
    """The same rule where a query sees less than `window` positions back."""
    return [
        [allowed and query - key < window for allowed, key in zip(line, keys, strict=True)]
        for line, query in zip(rule, queries, strict=True)
    ]


def test_training_view_drawn_by_hand():
    """Figure 8, length 5, block size 2: x the clean text, n its noisy copy, a ragged last block."""
    layout = training_layout(row(0, 1, 2, 3, 4), row(0, 0, 0, 0, 0), block_size=2)
    assert seen(layout, layout) == picture("""
        x0 x.........
        x1 xx........
        x2 xxx.......
        x3 xxxx......
        x4 xxxxx.....
        n0 .....xx...
        n1 .....xx...
        n2 xx.....xx.
        n3 xx.....xx.
        n4 xxxx.....x
    """)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("block_size", range(1, 9))
def test_training_view_at_every_small_size(block_size, window):
    for length in range(1, 8):
        position, document = pack((length,))
        layout = training_layout(row(*position), row(*document), block_size)
        expected = training_rule(position, document, block_size)
        if window:
            expected = within(expected, position * 2, position * 2, window)
        assert seen(layout, layout, window) == expected


@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_training_view_of_packed_documents_and_padding(block_size):
    packings = [
        (lengths, padding)
        for count in (1, 2, 3)
        for lengths in product((1, 2, 3, 4), repeat=count)
        for padding in (0, 1, 3)
    ]
    for lengths, padding in packings:
        position, document = pack(lengths, padding)
        layout = training_layout(row(*position), row(*document), block_size)
        found = seen(layout, layout)
        real = [d != PADDING for d in document * 2]
        expected = training_rule(position, document, block_size)
        for i, j in product(range(len(real)), repeat=2):
            if real[i]:  # and so padding is never seen by a real token
                assert found[i][j] == expected[i][j]
            assert not (found[i][j] and real[i] != real[j])
        assert all(map(any, found))


def test_packed_documents_see_what_each_sees_alone():
    position, document = pack((4, 3))
    layout = training_layout(row(*position), row(*document), 2)
    packed = visible(layout, layout)[0, 0]
    for start, length in ((0, 4), (4, 3)):
        alone = training_layout(row(*range(length)), row(*[0] * length), 2)
        places = torch.tensor(
            [*range(start, start + length), *range(7 + start, 7 + start + length)]
        )
        assert packed[places][:, places].equal(visible(alone, alone)[0, 0])
        elsewhere = torch.ones(14, dtype=torch.bool)
        elsewhere[places] = False
        assert not packed[places][:, elsewhere].any()


def test_clean_half_is_an_ordinary_causal_model():
    position = torch.arange(6)[None]
    layout = training_layout(position, torch.zeros_like(position), 4)
    causal = causal_layout(position)
    found = visible(layout, layout)[0, 0, :6]
    assert found[:, :6].equal(visible(causal, causal)[0, 0])
    assert found[:, :6].equal(torch.ones(6, 6).tril().bool())
    assert not found[:, 6:].any()


def test_causal_layout_of_packed_documents():
    position, document = pack((2, 3), padding=1)
    layout = causal_layout(row(*position), row(*document))
    assert seen(layout, layout) == picture("""
        a0 x.....
        a1 xx....
        b0 ..x...
        b1 ..xx..
        b2 ..xxx.
        -- .....x
    """)


def test_first_forward_of_a_block_drawn_by_hand():
    """Figure 10: 2 cached tokens, the finished block at 2 and 3 causal, the new one at 4 and 5."""
    keys = decoding_layout(row(0, 1, 2, 3, 4, 5), torch.tensor([4]), torch.tensor([6]))
    queries = decoding_layout(row(2, 3, 4, 5), torch.tensor([4]), torch.tensor([6]))
    assert seen(queries, keys) == picture("""
        2 xxx...
        3 xxxx..
        4 xxxxxx
        5 xxxxxx
    """)


def stages():
    """(first query, block start, block end) of every kind of forward, at small sizes."""
    for prompt in range(1, 5):
        yield 0, prompt, prompt  # prefill
        for block_size in range(1, 4):
            yield 0, prompt, prompt + block_size  # prefill and first block in one forward
    for start, block_size in product(range(1, 6), range(1, 5)):  # blocks start anywhere
        yield start, start, start + block_size  # later forwards of a block
        for previous in range(1, start + 1):
            yield start - previous, start, start + block_size  # first forward: 2k where equal
    for cached in range(5):
        yield cached, cached + 1, cached + 1  # next-token decoding


@pytest.mark.parametrize("window", [None, 2])
def test_decoding_at_every_stage(window):
    for (first, start, end), padding in product(stages(), (0, 2)):
        queries, keys = list(range(first, end + padding)), list(range(end + padding))
        bounds = torch.tensor([start]), torch.tensor([end])
        found = seen(
            decoding_layout(row(*queries), *bounds), decoding_layout(row(*keys), *bounds), window
        )
        expected = decoding_rule(queries, keys, start, end)
        if window:
            expected = within(expected, queries, keys, window)
        assert found[: end - first] == expected[: end - first]
        for line in found[end - first :]:  # padding sees nothing but padding, and not nothing
            assert any(line)
            assert not any(line[:end])


def test_rows_at_mixed_stages_share_one_forward():
    """Each row sees what it would see alone; queries and keys are padded to one width."""
    chosen = [*stages()]
    width = max(end - first for first, _, end in chosen)
    length = max(first for first, _, _ in chosen) + width
    first, start, end = torch.tensor(chosen).T
    queries = decoding_layout(first[:, None] + torch.arange(width), start, end)
    keys = decoding_layout(torch.arange(length).expand(len(chosen), -1), start, end)
    together = visible(queries, keys)
    assert together.shape == (len(chosen), 1, width, length)
    assert together.any(-1).all()
    for index, (first_query, block_start, block_end) in enumerate(chosen):
        real = range(first_query, block_end)
        expected = decoding_rule([*real], [*range(length)], block_start, block_end)
        assert together[index, 0, : len(real)].tolist() == expected


def test_decoding_step_equals_the_same_block_inside_the_training_view():
    k, length = 3, 11
    position = torch.arange(length)[None]
    training = training_layout(position, torch.zeros_like(position), k)
    view = visible(training, training)[0, 0]
    for start in range(0, length, k):
        end = min(start + k, length)
        bounds = torch.tensor([start]), torch.tensor([end])
        keys = decoding_layout(torch.arange(end)[None], *bounds)
        queries = decoding_layout(torch.arange(start, end)[None], *bounds)
        places = [*range(start), *range(length + start, length + end)]
        assert visible(queries, keys)[0, 0].equal(view[length + start : length + end][:, places])


def test_branches_share_positions_but_not_blocks():
    """Noisy blocks over the same positions, as drafts after 1 or 2 tokens of a clean block."""
    draft = causal_layout(row(0, 1))
    horizon = row(1, 1, 2, 2)
    branches = Layout(row(1, 2, 2, 3), horizon, row(100, 100, 101, 101), torch.zeros_like(horizon))
    layout = draft.cat(branches)
    assert seen(layout, layout) == picture("""
        0  x.....
        1  xx....
        1' x.xx..
        2' x.xx..
        2" xx..xx
        3" xx..xx
    """)


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    block_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 8),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_token_sees_itself_and_padding_stays_apart(lengths, padding, block_size, window):
    position, document = pack(tuple(lengths), padding)
    layout = training_layout(row(*position), row(*document), block_size)
    found = visible(layout, layout, window)[0, 0]
    assert found.diagonal().all()
    is_padding = torch.tensor(document * 2) == PADDING
    assert not found[~is_padding][:, is_padding].any()
    assert not found[is_padding][:, ~is_padding].any()


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
        for row, real in zip(sees, queries.document != PADDING, strict=True):
            visited, full = (
                tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)[pairs]
                for tiles in listed_tiles
            )
            assert not (row & ~visited)[real].any()
            assert not (full & ~row)[real].any()
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


def test_decoding_layout_holds_clean_then_noisy_then_padding():
    layout = decoding_layout(row(4, 5, 6, 7), torch.tensor([5]), torch.tensor([7]))
    assert layout.position.tolist() == [[4, 5, 6, 0]]
    assert layout.horizon.tolist() == [[5, 5, 5, 1]]
    assert layout.block.tolist() == [[CLEAN, 5, 5, CLEAN]]
    assert layout.document.tolist() == [[0, 0, 0, PADDING]]


def test_layout_maps_and_joins():
    layout = causal_layout(row(3, 4))
    assert layout.map(lambda tensor: tensor[:, 1:]).horizon.tolist() == [[5]]
    joined = layout.cat(decoding_layout(row(5, 6), torch.tensor([5]), torch.tensor([6])))
    assert joined.position.tolist() == [[3, 4, 5, 0]]
    assert joined.horizon.tolist() == [[4, 5, 5, 1]]
    assert joined.block.tolist() == [[CLEAN, CLEAN, 5, CLEAN]]
    assert joined.document.tolist() == [[0, 0, 0, PADDING]]


def test_layout_refuses_tensors_of_different_shapes(unchecked):
    two, three = row(0, 1), row(0, 1, 2)
    message = (
        "the four tensors of a Layout must share one shape, got [(1, 2), (1, 2), (1, 2), (1, 3)]"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        unchecked.Layout(two, two, two, three)


@pytest.mark.parametrize("block_size", [0, -2])
def test_training_layout_refuses_a_block_size_below_one(block_size):
    message = f"block_size must be at least 1, got {block_size}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        training_layout(row(0, 1), row(0, 0), block_size)
