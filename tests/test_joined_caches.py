"""Caches whose rows join another's: keys, values and memory."""

from typing import Any

import numpy as np
import pytest
import torch

from setblock.cache import Memory, PrefixCache
from setblock.loading import load
from setblock.masks import causal_layout
from setblock.model import Model


def encoded(model: Model, cache: PrefixCache, ids: list[int]) -> None:
    """Have these behind the prefix of its one row."""
    position = int(cache.lengths[0]) + torch.arange(len(ids))[None]
    model.forward(torch.tensor([ids]), causal_layout(position), cache)
    cache.keep(np.array([len(ids)]))


def holds(model: Model, cache: PrefixCache, row: int, ids: list[int]) -> None:
    """The row's prefix is this text."""
    fresh = model.new_cache(1, 64)
    encoded(model, fresh, ids)
    found: Any = cache.saved(len(ids), row)
    expected: Any = fresh.saved(len(ids))
    for pair, other in zip(found, expected, strict=True):
        assert all(torch.allclose(*both, atol=1e-5) for both in zip(pair, other, strict=True))


@pytest.mark.parametrize("lengths", [(3, 9, 2), (9, 3, 30), (1, 1, 1)])
def test_a_cache_that_joined_holds_the_keys_of_both(checkpoint, lengths):
    model = load(checkpoint())
    texts = [list(range(5, 5 + length)) for length in lengths]
    caches = [model.new_cache(1, length + 4) for length in lengths]
    for cache, text in zip(caches, texts, strict=True):
        encoded(model, cache, text)
    whole, *others = caches
    assert whole.widen(40)
    for other in others:
        whole.join(other)
    assert whole.lengths.tolist() == list(lengths)
    for row, text in enumerate(texts):
        holds(model, whole, row, text)
    tokens = torch.full((3, 2), 7)
    position = torch.from_numpy(whole.lengths)[:, None] + torch.arange(2)
    logits = model.forward(tokens, causal_layout(position), whole)
    for row, text in enumerate(texts):
        plain = model.forward(
            torch.tensor([[*text, 7, 7]]), causal_layout(torch.arange(len(text) + 2)[None])
        )
        assert torch.allclose(logits[row], plain[0, -2:], atol=1e-4)


def test_what_others_left_in_memory_is_gone(checkpoint):
    """A NaN in a slot that nobody sees would spoil a sum: 0 * NaN."""
    model = load(checkpoint())
    whole, other = model.new_cache(2, 30), model.new_cache(1, 30)
    tokens = torch.tensor([[5, 6, 7]] * 2)
    model.forward(tokens, causal_layout(torch.arange(3).repeat(2, 1)), whole)
    whole.keep(np.array([3, 3]))
    whole.memory.fill_at_random()
    layers: Any = whole.layers
    for layer in layers:
        layer.keys[1] = layer.values[1] = torch.nan
    whole.select(np.array([0]))
    encoded(model, other, [5, 6])
    whole.join(other)
    assert all(torch.isfinite(layer.keys).all() for layer in layers)
    assert all(torch.isfinite(layer.values).all() for layer in layers)


def test_memory_that_can_not_grow_is_left_as_it_was(checkpoint, monkeypatch):
    """Where it fails in the middle, what is there goes on being there."""
    model = load(checkpoint())
    whole, other = model.new_cache(1, 30), model.new_cache(1, 30)
    encoded(model, whole, [5, 6, 7])
    encoded(model, other, [8, 9])
    with monkeypatch.context() as patch:
        scarce_of(patch, 3)
        with pytest.raises(MemoryError):
            whole.join(other)
    assert whole.lengths.tolist() == [3]
    encoded(model, whole, [10])
    whole.join(other)
    assert whole.lengths.tolist() == [4, 2]
    for row, text in enumerate(([5, 6, 7, 10], [8, 9])):
        holds(model, whole, row, text)


@pytest.mark.parametrize("longer", [5, 40])
def test_what_has_grown_in_part_grows_again(checkpoint, monkeypatch, longer):
    """Which may need less than the growth that failed."""
    monkeypatch.setattr("setblock.cache.AHEAD", 4)
    model = load(checkpoint())
    whole, other = model.new_cache(1, 200), model.new_cache(1, 200)
    encoded(model, whole, [5, 6, 7])
    encoded(model, other, [8] * longer)
    with monkeypatch.context() as patch:
        scarce_of(patch, 3)
        with pytest.raises(MemoryError):
            whole.join(other)
    text = [5, 6, 7]
    for _ in range(3):
        encoded(model, whole, [9] * 7)
        text += [9] * 7
    holds(model, whole, 0, text)


def scarce_of(patch: pytest.MonkeyPatch, most: int) -> None:
    """Memory that ends at the allocation of this number."""
    new_zeros, count = torch.Tensor.new_zeros, 0

    def scarce(tensor: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == most:
            raise MemoryError
        return new_zeros(tensor, *given, **more)

    patch.setattr(torch.Tensor, "new_zeros", scarce)


def test_room_is_made_row_by_row(checkpoint):
    model = load(checkpoint())
    memory = Memory(1, 50, fixed=False)
    cache = PrefixCache(model.network.config.num_hidden_layers, 1, 50, memory)
    encoded(model, cache, [5, 6])
    rows = [memory.rows]
    for _ in range(5):
        other = model.new_cache(1, 20)
        encoded(model, other, [7, 8, 9])
        cache.join(other)
        rows.append(memory.rows)
    assert rows == [1, 2, 4, 4, 8, 8]
