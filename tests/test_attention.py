"""Attention where heads share keys: transformers' own result, without its copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import in_full
from torch._subclasses import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from setblock import attention
from setblock.loading import load


def tensors(batch, length, seen, heads=6, shared=2, width=8) -> Any:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(batch, length, heads, width, generator=generator).transpose(1, 2)
    memory = torch.randn(2, batch, shared, seen + 3, width, generator=generator)
    mask = torch.rand(batch, 1, length, seen, generator=generator) < 0.6
    mask[..., 0] = True
    return query, memory[0, :, :, :seen], memory[1, :, :, :seen], mask


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 16])
@torch.no_grad()
def test_attention_is_transformers_own(batch, length):
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, key, value, mask = tensors(batch, length, 40)
    for scaling in (None, 0.3):
        expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
        found, _ = attention.attend(module, query, key, value, mask, scaling=scaling)
        assert torch.allclose(found, expected, atol=1e-6)
        whole = attention.folded(query, key, value, mask, scaling).transpose(1, 2)
        assert torch.allclose(whole, expected, atol=1e-6)
    every = torch.ones(batch, 1, 1, 40, dtype=torch.bool) if length == 1 else None
    for one in (None, every):  # one token sees all, several see causally
        expected, _ = sdpa_attention_forward(module, query, key, value, None)
        assert torch.allclose(
            attention.attend(module, query, key, value, one)[0], expected, atol=1e-6
        )


@pytest.mark.parametrize("most", [attention.MOST_SCORES, 1, 4 * 3 * 6 * 40])
@pytest.mark.parametrize("length", [1, 2, 16])
@torch.no_grad()
def test_scores_with_caps_and_sinks_are_transformers_own(monkeypatch, length, most):
    """At once and a part of the queries after another; by a mask, by its biases, and causally."""
    monkeypatch.setattr(attention, "MOST_SCORES", most)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True, training=False)
    module.sinks = torch.linspace(-2, 2, 6)
    query, key, value, mask = tensors(3, length, 40)
    causal = torch.ones(1, 1, length, 40, dtype=torch.bool).tril()
    bias = attention.bias_of(mask, 6, 2, torch.float32)
    ways: Any = (
        (gpt_oss.eager_attention_forward, {"s_aux": module.sinks}),
        (gemma2.eager_attention_forward, {"softcap": 1.5}),
    )
    for own, more in ways:
        for told, seen in ((mask, mask), (bias, mask), (None, causal)):
            if seen is causal and length == 1:
                seen = torch.ones_like(seen)
            added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            expected, _ = own(module, query, key, value, added, scaling=0.3, **more)
            found, _ = attention.attend(module, query, key, value, told, scaling=0.3, **more)
            assert torch.allclose(found, expected, atol=1e-6)
            plain, _ = attention.attend(module, query, key, value, told, scaling=0.3)
            assert not torch.allclose(plain, expected, atol=1e-3)


def test_dropout_acts_on_scores_that_are_written_out():
    """The share of a value that is left, on average."""
    query, key, value, mask = tensors(1, 2, 4)
    given = query, key, torch.ones_like(value), mask, None, 1.5, None
    torch.manual_seed(0)
    found = torch.stack([attention.scored(*given, dropout=0.5) for _ in range(300)])
    assert (found.std(dim=0) > 0.1).all()
    assert torch.allclose(found.mean(dim=0), torch.ones_like(found[0]), atol=0.2)


@pytest.mark.parametrize(("seen", "count"), [(64, 2), (128, 4), (96, 3), (128, 16)])
@pytest.mark.parametrize("length", [1, 2, 16])
@torch.no_grad()
def test_a_cache_in_pieces_says_the_same(monkeypatch, length, seen, count):
    monkeypatch.setattr(attention, "efficient", in_full)
    query, key, value, mask = tensors(1, length, seen)
    mask[..., seen // 2 :] = False  # whole pieces of which nothing is seen
    for scaling in (None, 0.3):
        expected = attention.folded(query, key, value, mask, scaling)
        found = attention.in_pieces(query, key, value, mask, scaling, count)
        assert torch.allclose(found, expected, atol=1e-6)


def test_what_is_cut_into_pieces():
    """Long caches, in as many slots as those of graphs."""
    for seen, count in ((512, 1), (1024, 8), (1536, 8), (1152, 1), (4096, 16), (33280, 16)):
        assert attention.num_pieces(8, 64, seen) == count
    for queries, count in ((4, 16), (128, 16), (129, 8), (256, 8), (512, 4), (1088, 1)):
        assert attention.num_pieces(8, queries, 8704) == count


def test_what_can_be_cut(monkeypatch):
    """One row on a GPU, where the kernel is allowed and there for the numbers."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: True)

    def tried(*, place="cuda", rows=1, width=64, kinds=(torch.bfloat16,) * 3) -> bool:
        shapes = [(rows, heads, 5, width) for heads in (4, 2, 2)]
        with FakeTensorMode():
            given = [
                torch.empty(s, dtype=k, device=place) for s, k in zip(shapes, kinds, strict=True)
            ]
            return attention.can_be_cut(*given)

    assert tried()
    assert tried(kinds=(torch.float32,) * 3)
    assert not tried(place="cpu")
    assert not tried(rows=2)
    assert not tried(width=12)
    assert not tried(kinds=(torch.float32, torch.bfloat16, torch.bfloat16))
    with monkeypatch.context() as within:
        within.setattr(torch, "is_autocast_enabled", lambda place: place == "cuda")
        assert not tried()
    monkeypatch.setattr(torch.backends.cuda, "mem_efficient_sdp_enabled", lambda: False)
    assert not tried()
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: False)
    assert not tried()
    assert tried(kinds=(torch.float16,) * 3)


@torch.no_grad()
def test_a_compiler_sees_what_is_cut_as_one_graph(monkeypatch):
    """What is asked of the GPU is no part of it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: True)
    monkeypatch.setattr(attention, "efficient", in_full)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, key, value, mask = tensors(1, 1, 1024)
    expected, _ = attention.attend(module, query, key, value, mask)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        if attention.kernel_is_there(bfloat16=True):
            count = attention.num_pieces(2, 3, key.shape[2])
            return attention.in_pieces(query, key, value, mask, None, count).transpose(1, 2)
        return None

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    assert torch.allclose(compiled(query, key, value, mask), expected, atol=1e-6)


@torch.no_grad()
def test_numbers_that_are_none_stay_so_in_pieces(monkeypatch):
    monkeypatch.setattr(attention, "efficient", in_full)
    query, key, value, mask = tensors(1, 2, 64)
    mask[:] = True
    key[0, 0, 40] = torch.nan
    found = attention.in_pieces(query, key, value, mask, None, 4)
    assert found[0, :3].isnan().all(), "the heads of that key"
    assert not found[0, 3:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 5])
@torch.no_grad()
def test_what_is_unseen_has_no_part_whatever_the_numbers(monkeypatch, length, dtype):
    """To the bit: of large scores and of whole pieces that are unseen, too."""
    monkeypatch.setattr(attention, "efficient", in_full)
    query, key, value, mask = tensors(1, length, 64)
    mask[..., 32:] = False
    query, key, value = (one.to(dtype) for one in (100 * query, key, value))
    found = attention.in_pieces(query, key, value, mask, None, 4)
    other = attention.bias_of(mask, 6, 2, dtype)
    assert other.isfinite().all()
    assert found.isfinite().all()
    value[:, :, 32:] = 7.0
    value = torch.where(mask.any(dim=2)[..., None].expand_as(value), value, 9.0)
    assert torch.equal(attention.in_pieces(query, key, value, mask, None, 4), found)


@torch.no_grad()
def test_values_may_have_another_width(monkeypatch):
    monkeypatch.setattr(attention, "efficient", in_full)
    query, key, value, mask = tensors(1, 4, 64)
    value = value[..., :4]
    expected = attention.folded(query, key, value, mask, None)
    found = attention.in_pieces(query, key, value, mask, None, 4)
    assert torch.allclose(found, expected, atol=1e-6)


@torch.no_grad()
def test_a_bias_for_heads_that_a_layer_does_not_have(monkeypatch):
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    query, key, value, mask = tensors(1, 4, 20, heads=2)
    bias = attention.bias_of(mask, 6, 2, torch.float32)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask)
    assert torch.allclose(attention.attend(module, query, key, value, bias)[0], expected, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 16])
@torch.no_grad()
def test_a_bias_is_its_mask(monkeypatch, batch, length):
    """Made once, it says in every layer what the mask would; pieces take either."""
    monkeypatch.setattr(attention, "efficient", in_full)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, key, value, mask = tensors(batch, length, 64)
    bias = attention.bias_of(mask, 6, 2, torch.float32)
    assert bias.shape == (batch, 1, 3 * length if length > 1 else 1, 64)
    expected, _ = attention.attend(module, query, key, value, mask)
    found, _ = attention.attend(module, query, key, value, bias)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(bias[:, :, :length] == 0, mask)
    if batch == 1:
        monkeypatch.setattr(attention, "can_be_cut", lambda *_: True)
        monkeypatch.setattr(attention, "num_pieces", lambda *_: 4)
        found, _ = attention.attend(module, query, key, value, bias)
        assert torch.allclose(found, expected, atol=1e-6)


def test_the_kernel_is_torchs():
    """In the order in which it takes them."""
    schema = str(torch.ops.aten._scaled_dot_product_efficient_attention.default._schema)
    given = schema.partition("(")[2].partition("dropout_p")[0]
    assert given.split(", ")[:5] == [
        "Tensor query", "Tensor key", "Tensor value", "Tensor? attn_bias", "bool compute_log_sumexp"
    ]  # fmt: skip


@torch.no_grad()
def test_attention_cuts_where_it_says(monkeypatch):
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    monkeypatch.setattr(attention, "efficient", in_full)
    monkeypatch.setattr(attention, "can_be_cut", lambda *_: True)
    monkeypatch.setattr(attention, "num_pieces", lambda *_: 4)
    monkeypatch.setattr(attention, "folded", None)
    for length in (1, 16):
        query, key, value, mask = tensors(1, length, 64)
        expected, _ = sdpa_attention_forward(module, query, key, value, mask)
        query = query.requires_grad_(length > 1)  # several tokens of a CPU take another kernel
        with torch.set_grad_enabled(length > 1):
            found, _ = attention.attend(module, query, key, value, mask)
        assert torch.allclose(found, expected, atol=1e-6)


def test_no_copy_of_keys_is_made(monkeypatch):
    seen = []

    def record(query, key, *rest, **more):
        seen.append(key.shape)
        return torch.zeros(*query.shape[:-1], key.shape[-1])

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, key, value, mask = tensors(1, 16, 40)
    with torch.no_grad():
        attention.attend(module, query, key, value, mask)
        sdpa_attention_forward(module, query, key, value, mask)
    assert [shape[1] for shape in seen] == [2, 6]


def test_training_has_the_same_gradients():
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, key, value, mask = tensors(2, 16, 40)
    gradients = []
    functions: Any = (sdpa_attention_forward, attention.attend)
    for function in functions:
        leaves = [one.clone().requires_grad_(True) for one in (query, key, value)]
        (function(module, *leaves, mask)[0] ** 2).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_dropout_is_left_to_transformers(monkeypatch):
    told = []

    def record(module, query, *rest, **more):
        told.append(more["dropout"])
        return query, None

    monkeypatch.setattr(attention, "sdpa_attention_forward", record)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, key, value, mask = tensors(1, 16, 40)
    attention.attend(module, query, key, value, mask, dropout=0.1)
    assert told == [0.1]


def test_a_loaded_model_has_it(checkpoint):
    assert load(checkpoint("llama")).network.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("length", [1, 5])
@torch.no_grad()
def test_pieces_of_a_bias_are_no_copies(monkeypatch, length):
    """Made once for all layers, it is not made again in any of them."""
    query, key, value, mask = tensors(1, length, 64)
    bias = attention.bias_of(mask, 6, 2, torch.float32)
    seen: list[Any] = []

    def efficient(query: Any, key: Any, value: Any, bias: Any, scaling: Any) -> Any:
        seen.append(bias)
        return in_full(query, key, value, bias, scaling)

    monkeypatch.setattr(attention, "efficient", efficient)
    attention.in_pieces(query, key, value, bias, None, 4)
    assert seen[0].data_ptr() == bias.data_ptr()
    assert (seen[0].shape, seen[0].stride(3)) == ((4, 2, 3 * length, 16), 1)
