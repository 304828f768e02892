"""Prompts decoded together that begin alike: what they have in common is encoded once."""

from typing import Any

import numpy as np
import pytest
from conftest import gated_adapter
from fakes import TableModel
from test_graphs import WAYS

from setblock import prompt_cache
from setblock.generation import generate
from setblock.loading import load
from setblock.prompt_cache import ALIKE, PromptCache
from setblock.state import CHUNK

COMMON = [5, 9, 30, 7, 41, 8]
PROMPTS = [[*COMMON, 2], [*COMMON, *[40, 41, 42] * 5], COMMON, [*COMMON, 8, 8], COMMON]
SHORT: dict[str, Any] = {"block_size": 4, "max_new_tokens": 14, "temperature": 1.0}


def both(model: Any, prompts: list[list[int]], monkeypatch: Any, **how: Any) -> Any:
    """What is said without it, and with it."""
    plain = generate(model, prompts, **how)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_cache, "ALIKE", 4)
        return plain, generate(model, prompts, **how)


def same(plain: Any, found: Any, prefill_forwards: int = 2) -> None:
    for one, other in zip(plain, found, strict=True):
        assert other.token_ids == one.token_ids
        assert (other.nfe, other.reveal_step) == (one.nfe, one.reveal_step)
        assert np.allclose(other.entropy, one.entropy, atol=1e-4)
        assert (one.prefill_forwards, other.prefill_forwards) == (1, prefill_forwards)
        assert other.cached_tokens == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-window"])
def test_answers_are_the_same(checkpoint, monkeypatch, kind, way):
    same(*both(load(checkpoint(kind)), PROMPTS, monkeypatch, **SHORT, **WAYS[way]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_those_of_a_gated_adapter(checkpoint, tmp_path, monkeypatch):
    gated_adapter(load(checkpoint()), tmp_path, chain_width=8)
    model = load(tmp_path)
    for way in ("sliding", "verified"):
        same(*both(model, PROMPTS, monkeypatch, **SHORT, **WAYS[way]))


@pytest.mark.parametrize("way", ["ntp", "sbd", "verified"])
def test_those_of_graphs(checkpoint, simulated_graphs, monkeypatch, way):
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    for _ in range(2):
        _, found = both(model, PROMPTS, monkeypatch, **SHORT, **WAYS[way])
        same(generate(plain, PROMPTS, **SHORT, **WAYS[way]), found)
    assert simulated_graphs


def test_what_is_encoded():
    """One row's forwards of what all have, but the last token of any; then of what is left."""
    text = np.random.default_rng(0).integers(3, 8, CHUNK + 300).tolist()
    model = TableModel.random(context_length=4000, vocab_size=8)

    def forwards(*prompts: list[int], **more: Any) -> list[tuple[int, int]]:
        model.forwards.clear()
        [one, *_] = generate(model, [*prompts], mode="ntp", max_new_tokens=1, **more)
        assert one.prefill_forwards == len(model.forwards)
        return model.forwards

    one, other = [*text, 3, 4], [*text, 4, 5, 6]
    assert forwards(one, other) == [(1, CHUNK), (1, 300), (2, 3)]
    assert forwards(one, one) == [(1, CHUNK), (1, 301), (2, 1)]
    assert forwards(one[:ALIKE], other[: ALIKE + 1]) == [(2, ALIKE + 1)]
    assert forwards(one[: ALIKE + 1], other[: ALIKE + 2]) == [(1, ALIKE), (2, 2)]
    assert forwards(one[:200]) == [(1, 200)]
    assert forwards(one[:200], prompt_cache=PromptCache()) == [(1, 200)]
    assert forwards([7, *one[:200]], [6, *one[:200]]) == [(2, 201)]
