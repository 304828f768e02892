"""Linear layers laid out for MKL or oneDNN: the same products, with and without torch.compile."""

import copy
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

from setblock import adapters, generate, packed, prompt_cache, state
from setblock.gated import Addition
from setblock.loading import load
from setblock.masks import causal_layout
from setblock.names import ModelError
from setblock.packed import PackedLinear, PackedPart

_WHY = packed.missing(torch.device("cpu"), torch.float32)
pytestmark = [
    pytest.mark.skipif(_WHY is not None, reason=str(_WHY)),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
PROMPTS = [[5, 9, 30], [7, 7, 12, 40, 8]]


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(packed, "SMALLEST", dict.fromkeys(packed.SMALLEST, 0))


@pytest.fixture(params=[True, False], ids=["Intel", "other"])
def intel(request, monkeypatch):
    """Whether the processor is taken for one of Intel's."""
    if request.param and not torch.backends.mkl.is_available():
        pytest.skip("this torch is built without MKL")
    monkeypatch.setattr(packed, "intel", lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 5), (2, 300)])
def test_products_are_the_same(shape, bias, dtype, intel):
    if packed.missing(torch.device("cpu"), dtype):
        pytest.skip("no kernels for this type here")
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 33, bias=bias, dtype=dtype)
    hidden = torch.randn(*shape, 48, dtype=dtype)
    found = PackedLinear(layer.weight, layer.bias)
    kind = packed.MKL if intel and dtype == torch.float32 else packed.OneDNN
    assert type(found.product) is kind
    with torch.no_grad():
        expected, found = layer(hidden), found(hidden)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("width", "dtype", "twice"),
    [(64, torch.float32, True), (64, torch.bfloat16, False), (128, torch.float32, False)],
)
def test_small_weights_are_there_for_single_tokens_too(width, dtype, twice, monkeypatch):
    if packed.missing(torch.device("cpu"), dtype):
        pytest.skip("no kernels for this type here")
    monkeypatch.setattr(packed.OneDNN, "LARGE", 100 * 48)
    found = packed.OneDNN(torch.randn(width, 48, dtype=dtype), None)
    assert (found.transposed is not None) == twice
    if found.transposed is not None:
        monkeypatch.setattr(found, "product", None)
        found(torch.randn(1, 1, 48))
        found(torch.randn(48))
        with pytest.raises(TypeError):
            found(torch.randn(1, 2, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_few_tokens_are_filled_up_to_four_where_that_is_quicker(bias, dtype, monkeypatch):
    if packed.missing(torch.device("cpu"), dtype):
        pytest.skip("no kernels for this type here")
    monkeypatch.setattr(packed.OneDNN, "WIDE", 33 * 48 * dtype.itemsize)
    torch.manual_seed(0)
    wide = torch.nn.Linear(48, 33, bias=bias, dtype=dtype)
    small = torch.nn.Linear(48, 32, bias=bias, dtype=dtype)
    for quicker in (True, False):
        monkeypatch.setattr(packed, "fills_up", lambda _, told=quicker: told)
        for layer, fewest in ((wide, 4 if quicker else 1), (small, 1)):
            found = packed.OneDNN(layer.weight.detach(), layer.bias)
            monkeypatch.setattr(found, "transposed", None)
            counts, product = [], found.product

            def counted(hidden: Any, *given: Any, counts=counts, product=product) -> Any:
                counts.append(hidden.numel() // 48)
                return product(hidden, *given)

            monkeypatch.setattr(found, "product", counted)
            assert found(torch.zeros(2, 0, 48, dtype=dtype)).shape == (2, 0, len(layer.weight))
            counts.clear()
            for shape in ((48,), (1, 1, 48), (2, 1, 48), (1, 3, 48), (2, 2, 48), (5, 48)):
                hidden = torch.randn(*shape, dtype=dtype)
                with torch.no_grad():
                    torch.testing.assert_close(found(hidden), layer(hidden))
            assert counts == [max(count, fewest) for count in (1, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forwards_that_want_no_logits(checkpoint, monkeypatch, dtype, intel):
    """Of the first parts of a long prompt, and of what prompts begin with."""
    if packed.missing(torch.device("cpu"), getattr(torch, dtype)):
        pytest.skip("no kernels for this type here")
    monkeypatch.setattr(state, "CHUNK", 4)
    monkeypatch.setattr(prompt_cache, "ALIKE", 2)
    plain = load(checkpoint("llama"), dtype=dtype)
    model = load(checkpoint("llama"), dtype=dtype, pack=True)
    assert isinstance(model.network.lm_head, PackedLinear)
    for prompts in ([[5, 9, 30, 7, 8, 41, 6, 7]], [[5, 9, 30], [5, 9, 31]]):
        for mode in ("ntp", "verified"):
            found, expected = (
                generate(one, prompts, mode=mode, max_new_tokens=6, ignore_eos=True)
                for one in (model, plain)
            )
            for one, other in zip(found, expected, strict=True):
                assert one.num_tokens == other.num_tokens == 6
                if dtype == "float32":
                    assert one.token_ids == other.token_ids


@pytest.mark.parametrize("wide", [True, False])
def test_where_that_is_quicker(wide, intel, monkeypatch):
    """In float32, with AVX-512, on other processors than Intel's."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: wide)
    assert packed.fills_up(torch.float32) is (wide and not intel)
    assert packed.fills_up(torch.bfloat16) is False


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")
@pytest.mark.parametrize("count", [1, 2, 7, 64, packed.MKL.HINT, packed.MKL.HINT + 1, 700])
def test_mkl_takes_any_number_of_tokens(count):
    """Its layout is chosen for one number, and torch is told another: the products are right."""
    torch.manual_seed(0)
    weight, bias, hidden = torch.randn(700, 333), torch.randn(700), torch.randn(count, 333)
    exact = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
    torch.testing.assert_close(
        packed.MKL(weight, bias)(hidden), exact.float(), atol=3e-4, rtol=1e-5
    )


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_read_the_same_are_one(bias, intel):
    torch.manual_seed(0)
    network: Any = torch.nn.Module()
    widths = {"q_proj": 32, "k_proj": 8, "v_proj": 8, "o_proj": 16}
    for name, width in widths.items():
        network.add_module(name, torch.nn.Linear(16, width, bias=bias))
    hidden = torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = {name: network.get_submodule(name)(hidden) for name in widths}
        packed.pack(network)
        found = {name: network.get_submodule(name)(hidden) for name in widths}
    assert {name: type(one) for name, one in network.named_children()} == {
        **dict.fromkeys(widths, PackedPart),
        "o_proj": PackedLinear,
    }
    assert network.k_proj.whole is network.q_proj.whole
    torch.testing.assert_close(found, expected)
    assert found["q_proj"].data_ptr() + 32 * 4 == found["k_proj"].data_ptr(), "of one product"


@pytest.mark.parametrize("odd", [{"bias": False}, {"in_features": 8}, {"dtype": torch.bfloat16}])
def test_layers_that_differ_are_packed_alone(odd):
    network: Any = torch.nn.Module()
    network.q_proj = torch.nn.Linear(16, 16)
    network.v_proj = torch.nn.Linear(**{"in_features": 16, "out_features": 16, **odd})
    if packed.missing(torch.device("cpu"), network.v_proj.weight.dtype):
        pytest.skip("no kernels for this type here")
    packed.pack(network)
    assert [type(layer) for layer in network.children()] == [PackedLinear, PackedLinear]


def test_mkl_is_for_intels_processors(monkeypatch, tmp_path):
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(packed, "Path", lambda name: told)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    asked = packed.intel.__wrapped__
    assert not asked(), "not Linux"
    told.write_text("processor : 0\nvendor_id : AuthenticAMD\n")
    assert not asked()
    told.write_text("processor : 0\nvendor_id : GenuineIntel\n")
    assert asked()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not asked()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tokens_are_the_same(checkpoint, kind, intel):
    plain, laid_out = (load(checkpoint(kind), device="cpu", pack=pack) for pack in (False, True))
    assert (plain.packed, laid_out.packed) == (False, True)
    kept = [type(layer) for layer in laid_out.network.modules()]
    assert torch.nn.Linear not in kept
    assert kept.count(PackedPart) == 2 * 5, "q, k, v, gate and up of two blocks"
    assert kept.count(PackedLinear) == 2 * 4 + 1, "two for these, o and down; the head"
    for way in ({"mode": "ntp"}, {"mode": "sbd"}, {"mode": "verified", "branches": 2}):
        words = {"block_size": 4, "max_new_tokens": 12, "ignore_eos": True, **way}
        expected, found = (generate(one, PROMPTS, **words) for one in (plain, laid_out))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.nfe for one in found] == [one.nfe for one in expected]


def test_a_shared_embedding_stays(checkpoint):
    model = load(checkpoint("llama-tied"), device="cpu", pack=True)
    assert isinstance(model.network.get_output_embeddings(), PackedLinear)
    assert model.network.get_input_embeddings().weight.shape[0] == model.vocab_size


@pytest.fixture
def gated(checkpoint, tmp_path):
    """The folder of a gated adapter that does something."""
    base = load(checkpoint("llama"), device="cpu")
    folder = str(checkpoint("llama"))
    adapted = adapters.attach(base.network, folder, "gated", base.mask_token_id, rank=4, alpha=8)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
    adapted.save_pretrained(str(tmp_path))
    return tmp_path


def test_a_gated_adapter_leaves_next_tokens_alone(checkpoint, gated):
    """Both packed: the same logits to the bit at equal shapes; the adapter's own stay beside."""
    base, adapted = (load(name, device="cpu", pack=True) for name in (checkpoint("llama"), gated))
    assert adapted.gated
    layers = [type(layer) for layer in adapted.network.modules()]
    assert torch.nn.Linear not in layers
    assert layers.count(Addition) == 14, "of seven layers in each of two blocks"
    assert layers.count(PackedLinear) == [type(one) for one in base.network.modules()].count(
        PackedLinear
    )
    tokens = torch.tensor([[5, 9, 30, 11]])
    clean = causal_layout(torch.arange(4)[None])
    assert torch.equal(adapted.forward(tokens, clean), base.forward(tokens, clean))
    words = {"mode": "sbd", "block_size": 4, "max_new_tokens": 12, "ignore_eos": True}
    plain = generate(load(gated, device="cpu"), PROMPTS, **words)
    found = generate(adapted, PROMPTS, **words)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert [one.token_ids for one in found] != [
        one.token_ids for one in generate(base, PROMPTS, **words)
    ]


def test_other_kinds_of_layers_are_left_alone():
    class Own(torch.nn.Linear):
        pass

    network = torch.nn.Sequential(Own(4, 4), torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4))
    packed.pack(network)
    assert [type(layer) for layer in network] == [Own, PackedLinear, torch.nn.Embedding]


def test_small_layers_are_left_alone(monkeypatch):
    monkeypatch.setattr(packed, "SMALLEST", dict.fromkeys(packed.SMALLEST, 20))
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5))
    packed.pack(network)
    assert [type(layer) for layer in network] == [torch.nn.Linear, PackedLinear]
    if packed.missing(torch.device("cpu"), torch.bfloat16) is None:  # it calls them anyway
        half: Any = network[:1].bfloat16()
        packed.pack(half)
        assert type(half[0]) is PackedLinear


def test_weights_are_let_go():
    layer = PackedLinear(torch.randn(4, 4), None)
    number = layer.number
    assert number in packed._products
    del layer
    assert number not in packed._products


def test_old_weights_are_let_go_one_by_one(monkeypatch):
    """Or the model would be held twice when the last layer is packed."""
    network = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    old = [weakref.ref(layer.weight) for layer in network]
    held = []

    class Watched(PackedLinear):
        def __init__(self, *given: Any) -> None:
            held.append(sum(weight() is not None for weight in old))
            super().__init__(*given)

    monkeypatch.setattr(packed, "PackedLinear", Watched)
    packed.pack(network)
    assert held == [3, 2, 1]
    assert not any(weight() for weight in old)


def test_a_torch_without_onednn_imports_the_package():
    """As on a Mac: it has none of the operations."""
    code = (
        "import torch; torch.ops.mkldnn = torch.ops.mkl = object();"
        "import setblock, setblock.packed; print(setblock.load)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_packed_weights_cannot_do():
    layer = PackedLinear(torch.randn(4, 4), None)
    with pytest.raises(RuntimeError, match=r"packed weights have no gradients: .* pack=False"):
        layer(torch.ones(1, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"packed weights can't be saved: .* pack=False"):
        layer.state_dict()
    with pytest.raises(RuntimeError, match=r"packed weights can't be copied: .* pack=False"):
        copy.deepcopy(layer)


def test_where_packing_is_impossible(checkpoint, monkeypatch):
    assert packed.missing(torch.device("cuda:1"), torch.float32) == "the model is on cuda:1"
    assert "no kernels here for torch.float64" in str(
        packed.missing(torch.device("cpu"), torch.float64)
    )
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert not load(checkpoint("llama"), device="cpu", pack=None).packed
    with pytest.raises(ModelError, match="pack: it was made for x86 processors alone"):
        load(checkpoint("llama"), device="cpu", pack=True)
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "without oneDNN" in str(packed.missing(torch.device("cpu"), torch.float32))


def test_where_it_is_possible(checkpoint):
    assert load(checkpoint("llama"), device="cpu", pack=None).packed
