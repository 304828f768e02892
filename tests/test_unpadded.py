"""Rows of different lengths in one line: what a forward says is the same without the padding."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from conftest import KINDS, gated_adapter
from layouts import branches_layout, decoding_layout
from networks import load
from torch import nn

from setblock import model as models
from setblock.generation import generate
from setblock.masks import CLEAN, PADDING, Layout
from setblock.model import Model
from setblock.unpadded import in_line, line_of, under_way

TOLERANCE = 1e-5
PROMPTS = [9, 4, 6]
# A block behind two new tokens, five masks of a block whose text is known, and one new token.
START, END = torch.tensor([11, 4, 7]), torch.tensor([15, 9, 7])


def tokens_of(model: Model, layout: Layout) -> torch.Tensor:
    """Any tokens, and masks where blocks are."""
    generator = torch.Generator().manual_seed(1)
    some = torch.randint(5, 40, layout.block.shape, generator=generator)
    return torch.where(layout.block == CLEAN, some, model.mask_token_id)


def filled(model: Model) -> Any:
    """A cache with prompts of different lengths."""
    end = torch.tensor(PROMPTS)
    layout = decoding_layout(torch.arange(9).repeat(3, 1), end, end)
    cache = model.new_cache(3, 40)
    model.forward(tokens_of(model, layout), layout, cache, torch.tensor([0]))
    cache.keep(np.array(PROMPTS))
    return cache


def mixed() -> Layout:
    position = torch.tensor(PROMPTS)[:, None] + torch.arange(6)
    return decoding_layout(position, START, END)


def padded(monkeypatch) -> None:
    monkeypatch.setattr(models, "line_of", lambda layout: None)


def widths(model: Model, monkeypatch) -> list[tuple[int, ...]]:
    """[batch, length] of what each forward's first linear layer is given."""
    seen, layers = [], model.network.modules()
    first = next(layer for layer in layers if isinstance(layer, nn.Linear))
    plain = first.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(hidden.shape[:2]))
        return plain(hidden)

    monkeypatch.setattr(first, "forward", forward)
    return seen


def test_a_line_and_its_rows() -> None:
    """Clean tokens come before noisy ones, and each goes back to where it was."""
    layout = mixed()
    line = line_of(layout)
    assert line is not None
    [places] = line.line(torch.arange(18).view(3, 6))
    clean, noisy = places[:3], places[3:]
    assert clean.tolist() == [0, 1, 12]
    assert noisy.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    back = line.rows(places[None, None, :, None].float())
    assert back.shape == (3, 1, 6, 1)
    real = layout.document != PADDING
    assert torch.equal(back[:, 0, :, 0][real], torch.arange(18.0).view(3, 6)[real])


def test_without_padding_there_is_no_line() -> None:
    position, end = torch.arange(4)[None].repeat(2, 1), torch.tensor([4, 4])
    assert line_of(decoding_layout(position, end, end)) is None


def test_a_line_is_under_way_until_an_error() -> None:
    line = line_of(mixed())
    assert line is not None
    assert under_way() is None
    with suppress(RuntimeError), in_line(line):
        assert under_way() is line
        other_line = line_of(decoding_layout(torch.arange(3).repeat(2, 1), START[:2], END[1:]))
        with in_line(other_line or line):
            assert under_way() is not None
        assert under_way() is line, "the one before is under way again"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(under_way).result() is None, "another thread's forwards are others"
        raise RuntimeError
    assert under_way() is None


@pytest.mark.parametrize("some", [None, [0, 2, 5], [1]])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_keys_are_those_with_padding(checkpoint, monkeypatch, kind, some) -> None:
    model, layout = load(checkpoint(kind)), mixed()
    at = None if some is None else torch.tensor(some)
    real = layout.document != PADDING if at is None else (layout.document != PADDING)[:, at]
    found = []
    for way in (lambda: None, lambda: padded(monkeypatch)):
        way()
        cache = filled(model)
        logits = model.forward(tokens_of(model, layout), layout, cache, at)[real]
        cache.keep(np.array([2, 0, 1]))
        end = torch.from_numpy(cache.lengths + 1)
        following = decoding_layout(end[:, None] - 1, end, end)
        found.append((logits, model.forward(tokens_of(model, following), following, cache)))
    for without, with_padding in zip(*found, strict=True):
        torch.testing.assert_close(without, with_padding, rtol=0, atol=TOLERANCE)


def test_layers_get_no_padding(checkpoint, monkeypatch) -> None:
    model, layout = load(checkpoint()), mixed()
    seen = widths(model, monkeypatch)
    cache = filled(model)
    model.forward(tokens_of(model, layout), layout, cache)
    assert seen == [(1, 19), (1, 12)]
    branches = branches_layout(torch.tensor([[9], [4], [6]]), torch.tensor([[12], [8], [8]]), 4)
    model.forward(tokens_of(model, branches), branches, cache)
    assert seen[2:] == [(1, 9)]


def test_rows_stay_rows_where_nothing_is_saved(checkpoint, monkeypatch) -> None:
    """Without padding, and in networks that nobody has tried."""
    model, layout = load(checkpoint()), mixed()
    seen = widths(model, monkeypatch)
    cache = filled(model)
    position = torch.tensor(PROMPTS)[:, None]
    alike = decoding_layout(position, position[:, 0], position[:, 0] + 1)
    model.forward(tokens_of(model, alike), alike, cache)
    monkeypatch.setattr(models, "TESTED", ())
    model.forward(tokens_of(model, layout), layout, cache)
    assert seen == [(1, 19), (3, 1), (3, 6)]


def test_a_line_runs_in_kernels_if_there_are_any(checkpoint, monkeypatch) -> None:
    model, layout = load(checkpoint()), mixed()
    seen, cache, run, compiled = widths(model, monkeypatch), filled(model), model._run, []

    def kernels(*words: Any) -> Any:
        compiled.append(len(seen))
        return run(*words)

    model._compiled = kernels
    model.forward(tokens_of(model, layout), layout, cache)
    monkeypatch.setattr(models, "MOST_COMPILED", 5)  # of a row
    model.forward(tokens_of(model, layout), layout, cache)
    assert seen == [(1, 19), (1, 12), (1, 12)]
    assert compiled == [1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_gate_is_open_to_the_noisy_end_of_a_line(checkpoint, tmp_path, monkeypatch) -> None:
    gated_adapter(load(checkpoint(), pack=False), tmp_path)
    model, layout = load(tmp_path), mixed()
    told, opened = [], models.gated.opened

    def heard(network: Any, layout: Layout, there: Layout) -> Any:
        told.append(models.gated.noisy_part(layout))
        return opened(network, layout, there)

    monkeypatch.setattr(models.gated, "opened", heard)
    real = layout.document != PADDING
    own = model.forward(tokens_of(model, layout), layout, filled(model))[real]
    assert told == [(None, False), (3, True)]
    padded(monkeypatch)
    other = model.forward(tokens_of(model, layout), layout, filled(model))[real]
    torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE)
    bare = load(checkpoint()).forward(tokens_of(model, layout), layout, filled(load(checkpoint())))
    noisy = (layout.block != CLEAN)[real]
    assert not torch.allclose(own[noisy], bare[real][noisy], atol=1e-3), (
        "the adapter does something"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sbd", "solver": "entropy:1"},
        {"mode": "sbd", "solver": "entropy:1", "slide": True},
        {"mode": "verified", "branches": 2, "seeds": 1, "lookup": 5},
        {"mode": "verified", "draft": "solver", "solver": "fixed:2"},
    ],
    ids=str,
)
def test_answers_are_those_with_padding(checkpoint, monkeypatch, options: dict[str, Any]) -> None:
    model = load(checkpoint())
    prompts = [[5, 6, 7, 8, 5, 6, 7], [20, 21], [9, 10, 11, 9, 10]]
    more: dict[str, Any] = {"max_new_tokens": 20, "block_size": 4, "ignore_eos": True, **options}
    answers = generate(model, prompts, batch_size=3, **more)
    padded(monkeypatch)
    others = generate(model, prompts, batch_size=3, **more)
    assert [(one.token_ids, one.nfe) for one in answers] == [
        (one.token_ids, one.nfe) for one in others
    ]
