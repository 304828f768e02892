"""Products of a few tokens by Triton's kernel, interpreted here, and layers that use it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from setblock import packed
from setblock.generation import generate
from setblock.loading import load

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not for this system")

# Whether Triton interprets is decided when it is imported: a process of its own.
INTERPRETED = """
import torch
from setblock import skinny

torch.manual_seed(0)
for tokens in ((1,), (1, 1), (2, 3), (1, 16), (17,), (4, 8)):
    for width, depth in ((48, 256), (33, 300), (7, 8)):
        for has_bias in (False, True):
            for dtype, near in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
                hidden = torch.randn(*tokens, 2 * depth, dtype=dtype)[..., ::2]
                weight, bias = torch.randn(width, depth, dtype=dtype), None
                if has_bias:
                    bias = torch.randn(width, dtype=dtype)
                found = skinny.linear(hidden, weight, bias)
                exact = torch.nn.functional.linear(
                    hidden.double(), weight.double(), None if bias is None else bias.double()
                )
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), exact, rtol=0, atol=near)
print("all are near")
"""


def test_products_are_right_for_any_few_tokens():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stdout == "all are near\n", done.stderr[-2000:]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Layers are packed as a GPU's; by the tokens that the kernel was asked for."""
    from setblock import skinny

    asked: list[int] = []

    def product(hidden: Any, weight: Any, bias: Any) -> Any:
        asked.append(hidden.numel() // hidden.shape[-1])
        return linear(hidden, weight, bias)

    monkeypatch.setattr(skinny, "linear", product)
    monkeypatch.setattr(packed, "kind_for", lambda device, dtype: packed.Skinny)
    monkeypatch.setattr(packed, "SMALLEST", {packed.Skinny: 0})
    return asked


def test_only_few_tokens_are_the_kernels(on_a_gpu):
    layer = torch.nn.Linear(8, 4)
    few = packed.PackedLinear(layer.weight, layer.bias)
    with torch.no_grad():
        for tokens in (1, 32, 33, 100):
            hidden = torch.randn(1, tokens, 8)
            assert torch.equal(few(hidden), layer(hidden))
    assert on_a_gpu == [1, 32]


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_tokens_are_the_same(checkpoint, kind, on_a_gpu):
    plain, laid_out = (load(checkpoint(kind), device="cpu") for _ in range(2))
    packed.pack(laid_out.network)
    for way in ({"mode": "ntp"}, {"mode": "sbd"}, {"mode": "verified", "branches": 2}):
        words = {"block_size": 4, "max_new_tokens": 12, "ignore_eos": True, **way}
        expected, found = (generate(one, [[5, 9, 30]], **words) for one in (plain, laid_out))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert on_a_gpu
    assert max(on_a_gpu) <= 32


def test_a_tied_head_is_no_copy(checkpoint, on_a_gpu):
    model = load(checkpoint("llama-tied"), device="cpu")
    packed.pack(model.network)
    head: Any = model.network.get_output_embeddings()
    assert head.product.weight.data_ptr() == model.network.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "change", "why"),
    [
        (torch.bfloat16, {}, None),
        (torch.float16, {}, None),
        (torch.float32, {}, "made for 16 bits, not for torch.float32"),
        (torch.bfloat16, {"capability": (7, 5)}, "from compute capability 8.0 on"),
        (torch.bfloat16, {"hip": "6.2"}, "made for NVIDIA's GPUs"),
        (torch.bfloat16, {"triton": None}, "needs the package triton"),
    ],
)
def test_what_a_gpu_must_be(monkeypatch, dtype, change, why):
    told = {"capability": (9, 0), "hip": None, "triton": SimpleNamespace(), **change}
    monkeypatch.setattr(packed, "find_spec", lambda name: told["triton"])
    monkeypatch.setattr(torch.version, "hip", told["hip"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: told["capability"])
    found = packed.missing(torch.device("cuda"), dtype)
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert why in found
    assert packed.kind_for(torch.device("cuda"), dtype) is packed.Skinny
