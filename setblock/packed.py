"""Linear layers on a CPU whose weights are laid out once, in the order that its kernels compute in.

torch keeps a linear layer's weights row by row, and products of one or a few tokens then run at a
part of the memory's speed. Laid out beforehand they are read in order; the products are the same
but for the order of their sums. The kernels are those of MKL for 32 bits on Intel's processors,
and oneDNN's for all else (examples/cpu_weights.py times both).
"""

import itertools
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from setblock.shared import Once, groups

# torch.compile takes no tensor of these layouts, but a number, under which the product is found.
_numbers = itertools.count()
_products: WeakValueDictionary[int, Callable[[Tensor], Tensor]] = WeakValueDictionary()

_library = torch.library.Library("setblock", "DEF")
_library.define("linear(Tensor hidden, int number, int width) -> Tensor")


def _linear(hidden: Tensor, number: int, width: int) -> Tensor:
    return _products[number](hidden)


def _shape(hidden: Tensor, number: int, width: int) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], width)


_library.impl("linear", _linear, "CPU")
torch.library.register_fake("setblock::linear", _shape)


class OneDNN:
    """Products with a weight, [width, hidden], laid out by oneDNN.

    A small one of 32 bits is there transposed as well, for a single token: torch's own product with
    that takes half to nine tenths of the time, on processors without AVX-512. On AMD's with it,
    products of large weights with one to three tokens take longer than with four to six, so that
    there are always four.
    """

    HINT = 16  # tokens that the layout is chosen for
    LARGE = 2**19  # weights that are there once, so that a model takes little more memory
    FEWEST = 4  # tokens of a product with weights of WIDE bytes or more, with AVX-512
    WIDE = 3 * 2**20

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Not at import: a torch without oneDNN has no such operations.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.HINT)
        self.bias, self.product = bias, torch.ops.mkldnn._linear_pointwise.default
        twice = weight.itemsize >= 4 and weight.numel() < self.LARGE
        self.transposed = weight.T.contiguous() if twice else None
        self.fewest = self.FEWEST if weight.nbytes >= self.WIDE and fills_up(weight.dtype) else 1

    def __call__(self, hidden: Tensor) -> Tensor:
        tokens = hidden.numel() // hidden.shape[-1]
        if 0 < tokens < self.fewest:
            four = hidden.new_zeros(self.fewest, hidden.shape[-1])
            four[:tokens] = hidden.reshape(tokens, -1)
            result = self.product(four, self.weight, self.bias, "none", [], "")
            return result[:tokens].view(*hidden.shape[:-1], -1)
        if self.transposed is not None and hidden.numel() == len(self.transposed):
            result = torch.matmul(hidden, self.transposed)
            return result if self.bias is None else result + self.bias
        return self.product(hidden, self.weight, self.bias, "none", [], "")


class MKL:
    """Products with a weight, [width, hidden], of 32 bits, laid out by MKL."""

    HINT = 256  # tokens that the layout is chosen for, which makes it no slower for one

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, self.HINT)
        self.bias, self.product = bias, torch.ops.mkl._mkl_linear.default
        self.shape = weight.new_empty(1).expand_as(weight)  # all that is read of the old weight

    def __call__(self, hidden: Tensor) -> Tensor:
        # torch takes the laid out weight if told the number of tokens that there are.
        tokens = hidden.numel() // hidden.shape[-1]
        return self.product(hidden, self.weight, self.shape, self.bias, tokens)


# Names of layers whose weights are read by others: of routers, LongCat's and Hunyuan's.
READ = ("classifier", "wg")
# Weights of a layer in 32 bits: calling these kernels costs more than smaller ones take.
SMALLEST = {MKL: 2**15, OneDNN: 2**17}


class PackedLinear(torch.nn.Module):
    """A linear layer that only decodes: it has no gradients and can't be saved."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.width = len(weight)
        weight = weight.detach()
        self.product = kind_for(weight)(weight, bias)
        self.number = next(_numbers)
        _products[self.number] = self.product

    def forward(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise RuntimeError("packed weights have no gradients: load the model with pack=False")
        if torch.compiler.is_compiling():
            return torch.ops.setblock.linear(hidden, self.number, self.width)
        return self.product(hidden)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        raise RuntimeError("packed weights can't be copied: load the model with pack=False")

    def _save_to_state_dict(self, *words: Any, **given: Any) -> None:
        raise RuntimeError("packed weights can't be saved: load the model with pack=False")


class PackedPart(torch.nn.Module):
    """One of several linear layers that read the same tokens, computed as one.

    columns: its own of that one's output.
    """

    def __init__(self, whole: torch.nn.Module, product: Once, columns: slice) -> None:
        super().__init__()
        self.whole, self.product, self.columns = whole, product, columns

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product(hidden)[..., self.columns]


def kind_for(weight: Tensor) -> type[MKL] | type[OneDNN]:
    """Whose kernels are quickest here."""
    return MKL if weight.dtype == torch.float32 and intel() else OneDNN


def fills_up(dtype: torch.dtype) -> bool:
    """Whether products of four tokens are quicker than of one here."""
    return dtype == torch.float32 and torch.cpu._is_avx512_supported() and not intel()


@cache
def intel() -> bool:
    """Whether MKL is here on a processor of its own maker's, as Linux tells."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and processor.exists()
        and "GenuineIntel" in processor.read_text(encoding="utf-8")
    )


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why weights of this type can't be packed there; None if they can."""
    if device.type != "cpu":
        return f"the model is on {device}"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "it was made for x86 processors alone"
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return "this torch is built without oneDNN, or it is switched off"
    known = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return None if known.get(dtype) else f"oneDNN has no kernels here for {dtype}"


def pack(network: torch.nn.Module) -> None:
    """Lay out the weights of plain linear layers, those of 32 bits only if they are not small;
    layers that read the same tokens are laid out as one.

    Effects: replaces the layers; a weight that another module shares, as an embedding does with the
    head, stays there besides.
    """
    # Subclasses store or compute something else.
    plain = [
        name
        for name, layer in network.named_modules()
        if type(layer) is torch.nn.Linear and name.rpartition(".")[2] not in READ
    ]
    for names in groups(plain):
        layers: list[Any] = [network.get_submodule(name) for name in names]
        alike = {(one.in_features, one.weight.dtype, one.bias is None) for one in layers}
        for parts in [names] if len(alike) == 1 else [[name] for name in names]:
            _pack(network, parts)


def _pack(network: torch.nn.Module, names: list[str]) -> None:
    layers: list[Any] = [network.get_submodule(name) for name in names]
    weight = layers[0].weight.detach()
    if len(layers) > 1:
        weight = torch.cat([one.weight.detach() for one in layers])
    # torch's own layers of 16 bits call these kernels anyway.
    if weight.itemsize >= 4 and weight.numel() < SMALLEST[kind_for(weight)]:
        return
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([one.bias.detach() for one in layers])
    whole = PackedLinear(weight, bias)
    if len(layers) == 1:
        network.set_submodule(names[0], whole)
    else:
        divide(network, names, whole)


def divide(network: torch.nn.Module, names: list[str], whole: torch.nn.Module) -> None:
    """Effects: each of these layers is its columns of what `whole` says of the same tokens."""
    product, end = Once(whole, len(names)), 0
    for name in names:
        layer: Any = network.get_submodule(name)
        columns = slice(end, end + layer.out_features)
        network.set_submodule(name, PackedPart(whole, product, columns))
        end += layer.out_features
