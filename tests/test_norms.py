"""Norms as torch's own kernel: the same numbers, and only where they are."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import RMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from setblock import generate, norms
from setblock.loading import load
from setblock.masks import causal_layout


def network_of(*layers: torch.nn.Module) -> Any:
    return torch.nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})


def scaled(layer: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A norm whose weights are some numbers."""
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.weight, mean=1.0, std=0.3)
    return layer.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_norms_are_torchs_own(kind, dtype):
    layer = scaled(kind(48, eps=1e-3), dtype)
    network = network_of(layer)
    norms.join(network)
    assert type(network["0"]) is RMSNorm
    assert network["0"].weight is layer.weight
    assert list(network.state_dict()) == ["0.weight"]
    hidden = torch.randn(2, 5, 48).to(dtype) * torch.tensor([1.0, 0.01]).view(2, 1, 1).to(dtype)
    near = 0 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(network["0"](hidden), layer(hidden), rtol=near, atol=near)


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states, gate):  # type: ignore[override]
        return super().forward(hidden_states) * gate


class Half(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).half()


def hooked() -> Any:
    layer = LlamaRMSNorm(8)
    layer.register_forward_hook(lambda *given: None)
    return layer


def of_another_type() -> Any:
    return LlamaRMSNorm(8).double()


def of_another_library() -> Any:
    layer = LlamaRMSNorm(8)
    layer.forward = layer.forward  # on the instance, as liger-kernel puts its own
    return layer


class Wide(LlamaRMSNorm):
    def forward(self, hidden_states):
        _, _, length, _ = hidden_states.shape
        return super().forward(hidden_states) / length


def without_weights() -> Any:
    return LlamaRMSNorm(8).to("meta")


def more_weights() -> Any:
    layer = LlamaRMSNorm(8)
    layer.bias = torch.nn.Parameter(torch.zeros(8))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: kind(8) for kind in (GemmaRMSNorm, Doubled, Gated, Half, Wide)),
        *(hooked, of_another_type, of_another_library, without_weights, more_weights),
        *(lambda: torch.nn.LayerNorm(8), lambda: RMSNorm(8)),
    ],
)
def test_other_norms_are_left_alone(make):
    layer = make()
    network = network_of(layer)
    norms.join(network)
    assert network["0"] is layer


def test_a_norm_of_another_type_than_the_rest_is_left_alone():
    first, other = LlamaRMSNorm(8).bfloat16(), LlamaRMSNorm(8)
    network = network_of(first, other)
    norms.join(network)
    assert type(network["0"]) is RMSNorm
    assert network["1"] is other


def test_a_norm_without_epsilon_is_left_alone():
    layer = LlamaRMSNorm(8)
    del layer.variance_epsilon
    network = network_of(layer)
    norms.join(network)
    assert network["0"] is layer


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_graphs_have_them_and_tokens_are_the_same(checkpoint, kind, simulated_graphs):
    plain = load(checkpoint(kind), device="cpu")
    replayed = load(checkpoint(kind), device="cpu", compile="graphs")
    names = [type(one).__name__ for one in replayed.network.modules()]
    assert not [name for name in names if name.endswith("RMSNorm") and name != "RMSNorm"]
    assert names.count("RMSNorm") >= 5, "two of each of two blocks, and the last"
    for way in ({"mode": "ntp"}, {"mode": "sbd"}, {"mode": "verified", "branches": 2}):
        words = {"block_size": 4, "max_new_tokens": 24, "ignore_eos": True, **way}
        expected, found = (generate(one, [[5, 9, 30]], **words) for one in (plain, replayed))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_logits_are_the_same_to_the_bit_in_float32(checkpoint):
    model = load(checkpoint("llama"), device="cpu")
    joined = copy.deepcopy(model.network)
    norms.join(joined)
    tokens, clean = torch.tensor([[5, 9, 30, 11]]), causal_layout(torch.arange(4)[None])
    expected = model.forward(tokens, clean)
    model.network = joined
    assert torch.equal(model.forward(tokens, clean), expected)
