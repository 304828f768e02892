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

from setblock import masks
from setblock.masks import (
    CLEAN,
    PADDING,
    Layout,
    causal_layout,
    training_layout,
    visible,
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
