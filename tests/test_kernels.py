"""Kernels of one layer for every layer like it, torch.compile itself left out."""

from typing import Any

import pytest
import torch
from networks import load

from setblock import kernels
from setblock.kernels import Kernels, LayerCache


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """What torch.compile was asked to compile; it runs as it is."""
    asked: list[Any] = []

    def compile(run: Any, **options: Any) -> Any:
        asked.append((run, options))
        return run

    monkeypatch.setattr(torch, "compile", compile)
    return asked


@pytest.mark.parametrize(("kind", "kinds"), [("llama", 1), ("qwen3-window", 2), ("gemma3", 2)])
def test_each_kind_of_layer_is_compiled_once(checkpoint, compiled, kind, kinds):
    network = load(checkpoint(kind)).network
    assert len(network.get_decoder().layers) == 2
    Kernels(network)
    assert len(compiled) == kinds
    codes = {run.__code__ for run, _ in compiled}
    assert len(codes) == kinds, "what was compiled is found by its code"


def test_layers_that_differ_are_of_different_kinds(checkpoint):
    first, second = load(checkpoint()).network.get_decoder().layers
    assert kernels._structure(first) == kernels._structure(second)
    second.self_attn.scaling *= 2
    assert kernels._structure(first) != kernels._structure(second)
    second.self_attn.scaling /= 2
    second.mlp.up_proj = torch.nn.Linear(*second.mlp.up_proj.weight.shape[::-1], bias=True)
    assert kernels._structure(first) != kernels._structure(second)


def test_kernels_run_where_they_are_switched_on(checkpoint, compiled, monkeypatch):
    network = load(checkpoint()).network
    seen, update = [], LayerCache.update

    def record(cache, *given):
        seen.append(cache.layer)
        return update(cache, *given)

    monkeypatch.setattr(LayerCache, "update", record)
    ids = torch.tensor([[5, 6, 7]])
    plain = network(input_ids=ids).logits
    made = Kernels(network)
    assert torch.equal(network(input_ids=ids).logits, plain)
    assert torch.equal(made.switched_on(lambda: network(input_ids=ids).logits)(), plain)
    assert len(set(map(id, seen))) == 2, "every layer has its own part of the cache"
    with pytest.raises(RuntimeError):
        made.switched_on(_fail)()
    assert not made.on


def _fail() -> Any:
    raise RuntimeError


def test_what_is_looked_at_again():
    class Guard:
        def __init__(self, name, is_global=False):
            self.name, self.is_global = name, is_global

    names = {
        "L['hidden']": True,
        "L['cache'].layer.keys": True,
        "L['forward'].__self__._modules['mlp']": False,
        "L['forward'].__self__._modules['mlp']._modules['up_proj'].gate.noisy": True,
    }
    assert kernels._kept([Guard(name) for name in names]) == list(names.values())
    assert kernels._kept([Guard("G['torch']", is_global=True)]) == [False]
