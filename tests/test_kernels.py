"""Kernels of one layer for every layer like it, torch.compile itself left out."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from setblock import kernels, load
from setblock.cache import CACHE, PrefixCache
from setblock.names import ModelError


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """What torch.compile was asked to compile; it runs as it is."""
    asked: list[Any] = []

    def compile(run: Any, **options: Any) -> Any:
        asked.append(run)
        return run

    monkeypatch.setattr(torch, "compile", compile)
    return asked


@pytest.fixture
def seen(monkeypatch) -> list[int]:
    """The layers of caches that compiled forwards wrote to."""
    written: list[int] = []
    update = kernels._OwnLayer.update

    def told(own: Any, *given: Any, **words: Any) -> Any:
        written.append(own.layer.number)
        return update(own, *given, **words)

    monkeypatch.setattr(kernels._OwnLayer, "update", told)
    return written


def forward(network: Any) -> torch.Tensor:
    cache = PrefixCache(network.config.num_hidden_layers, 1, 8)
    cache.slots.longest, cache.slots.end = 0, 3
    cache.memory.room = 8
    ids = torch.tensor([[5, 6, 7]])
    return network(input_ids=ids, position_ids=ids - 5, **{CACHE: cache}).logits


def test_layers_that_differ_get_kernels_of_their_own(checkpoint, compiled):
    network = load(checkpoint()).network
    first, second = network.get_decoder().layers
    assert kernels._structure(first) == kernels._structure(second)
    narrow = torch.nn.Linear(*second.mlp.up_proj.weight.shape[::-1], bias=True)
    second.mlp.up_proj = narrow
    assert kernels._structure(first) != kernels._structure(second)
    second.mlp.up_proj = type("Other", (torch.nn.Linear,), {})(
        narrow.in_features, narrow.out_features, bias=False
    )
    assert kernels._structure(first) != kernels._structure(second)
    kernels.layered(network, print)
    assert len({id(run.__code__) for run in compiled}) == len(compiled) == 2


class Asking:
    def limit(self) -> int:
        return torch._dynamo.config.recompile_limit


@pytest.mark.usefixtures("compiled")
def test_a_thread_that_runs_them_knows_their_limit():
    """torch.compile's configuration is each thread's own, and a server decodes in another."""
    with ThreadPoolExecutor(1) as other:
        assert other.submit(kernels.compiled(Asking().limit)).result() == kernels.MOST_KINDS


def test_they_run_where_they_are_switched_on(checkpoint, compiled, seen):
    network = load(checkpoint()).network
    expected = forward(network)
    fails = [False]

    def run(network: Any) -> torch.Tensor:
        found = forward(network)
        if fails[0]:
            raise KeyError("of the network's")
        return found

    switched_on = kernels.layered(network, run)
    assert len(compiled) == 1, "the layers are alike"
    assert torch.equal(forward(network), expected)
    assert not seen
    assert torch.equal(switched_on(network), expected)
    assert seen == [0, 1], "each layer writes to its own"
    fails[0] = True
    with pytest.raises(KeyError):
        switched_on(network)
    assert torch.equal(forward(network), expected)
    assert len(seen) == 4, "off again"


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoXConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=4),
        transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4),
        transformers.FalconConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=4),
    ],
    ids=["gpt_neox", "gpt2", "falcon"],
)
def test_whatever_a_network_calls_its_cache_and_layers(compiled, seen, config):
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    expected = forward(network)
    assert torch.equal(kernels.layered(network, forward)(network), expected)
    assert seen == [0, 1, 2]


def test_they_are_for_training(checkpoint, compiled, seen):
    """Evaluation, and decoding on the way, are left alone."""
    network = load(checkpoint()).network
    expected = forward(network)
    with kernels.training(network, "inductor"):
        assert torch.equal(forward(network), expected)
        assert not seen
        network.train()
        assert torch.equal(forward(network), expected)
        assert len(seen) == 2
    forward(network)
    assert len(seen) == 2, "nothing of it is left"
    pickle.dumps(network)


def test_what_is_replaced_anew_is_not_replaced_twice(checkpoint, compiled):
    network = load(checkpoint()).network
    expected = forward(network)
    first = kernels.layered(network, forward)
    with kernels.training(network.train(), "inductor"):
        assert torch.equal(forward(network), expected)
        second = kernels.layered(network, forward)
        assert torch.equal(second(network), expected)
    assert torch.equal(first(network), expected)
    assert torch.equal(kernels.layered(network, forward)(network), expected)


def test_a_layer_with_a_hook_has_kernels_of_its_own(checkpoint, compiled):
    network = load(checkpoint()).network
    for put in ("register_forward_hook", "register_forward_pre_hook"):
        layers = network.get_decoder().layers
        hook = getattr(layers[1].mlp, put)(lambda *given: None)
        assert kernels._structure(layers[0]) != kernels._structure(layers[1])
        hook.remove()
        assert kernels._structure(layers[0]) == kernels._structure(layers[1])


class Told(torch.nn.Module):
    """A layer that tells a cache its number."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.scale = 1 / (self.layer_idx + 1)

    def forward(self, hidden: Any, cache: Any) -> Any:
        return cache.update(
            hidden,
            hidden,
            self.layer_idx,
        )


class Used(Told):
    def forward(self, hidden: Any, cache: Any) -> Any:
        return super().forward(hidden / (self.layer_idx + 1), cache)


def test_a_layer_that_computes_with_its_number_has_kernels_of_its_own():
    kinds = {kind: [kernels._structure(kind(number)) for number in (0, 1)] for kind in (Told, Used)}
    assert kinds[Told][0] == kinds[Told][1]
    assert kinds[Used][0] != kinds[Used][1]
    made = type("Made", (Used,), {})  # as a library that shards makes them
    assert kernels._structure(made(0)) != kernels._structure(made(1))
    for kind in (LlamaAttention, Qwen3Attention, Gemma3Attention, GPTNeoXAttention):
        assert not kernels._computes_with_its_number(kind)


def test_a_network_without_a_list_of_layers(checkpoint):
    network = load(checkpoint()).network
    network.config.num_hidden_layers = 5
    with pytest.raises(ModelError, match="llama has no list of 5 layers to compile"):
        kernels.layered(network, print)


def test_a_mode_is_options(checkpoint, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda run, **options: told.append(options) or run)
    network = load(checkpoint()).network
    for words in (("inductor", "max-autotune-no-cudagraphs"), ("aot_eager",)):
        with kernels.training(network, *words):
            pass
    assert [one["backend"] for one in told] == ["inductor", "aot_eager"]
    assert told[0]["options"]["max_autotune"]
    assert set(told[1]["options"]) == {"guard_filter_fn"}


def test_what_is_looked_at_again():
    """All that a forward brings, and of a layer what numbers it computes with."""
    value = SimpleNamespace
    kept = {
        "L['given'][0]": ("SHAPE_ENV", None),
        "L['own'].layer.keys": ("TENSOR_MATCH", None),
        "L['forward'].__self__.mlp.scale": ("CONSTANT_MATCH", 2.0),
        "L['forward'].__self__.up_proj.gate.noisy": ("TENSOR_MATCH", torch.ones(1)),
    }
    left_out = {
        "L['forward'].__self__.mlp": ("TYPE_MATCH", None),
        "L['forward'].__self__.layer_idx": ("EQUALS_MATCH", 1),
        "L['forward'].__self__.weight": ("TENSOR_MATCH", torch.nn.Parameter(torch.ones(1))),
    }
    guards = [
        value(name=name, guard_type=kind, value=held)
        for name, (kind, held) in (kept | left_out).items()
    ]
    assert kernels.looked_at_in_layers(guards) == [True] * len(kept) + [False] * len(left_out)
