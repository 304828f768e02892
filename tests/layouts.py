"""Places while decoding, of tensors: what most tests make them from."""

from torch import Tensor

from setblock import masks
from setblock.masks import Layout


def decoding_layout(position: Tensor, start: Tensor, end: Tensor) -> Layout:
    return masks.decoding_layout(position.numpy(), start.numpy(), end.numpy())


def branches_layout(first: Tensor, last: Tensor, size: int) -> Layout:
    return masks.branches_layout(first.numpy(), last.numpy(), size)
