"""Between host and device, several arrays a copy.

What decoding keeps of its rows lies on the host, in numpy's arrays, whose operations on a few
numbers take less time than torch's; the device has the network, the cache and logits.
A copy to the device waits for nothing. One to the host waits until the device has come that far,
and is the only thing in a step that does.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor

Host = ndarray | Tensor  # numbers of the host


def to_device(device: torch.device, *given: Host) -> tuple[Tensor, ...]:
    """These whole numbers or truth values as tensors on the device; tensors there stay.

    On a CPU they share an array's memory.
    """
    if all(isinstance(one, Tensor) and one.device == device for one in given):
        return given  # type: ignore[return-value]
    if device.type == "cpu":
        return tuple(one if isinstance(one, Tensor) else torch.from_numpy(one) for one in given)
    arrays = [np.asarray(one) for one in given]
    parts = parted(joined(arrays, device).to(device, non_blocking=True), arrays)
    return tuple(
        part.bool() if array.dtype == bool else part
        for part, array in zip(parts, arrays, strict=True)
    )


def joined(given: Sequence[Host], device: torch.device) -> Int[Tensor, " numbers"]:
    """All of these numbers of the host in one tensor, from where a copy to the device waits for
    nothing.
    """
    arrays = [np.asarray(one).ravel() for one in given]
    flat = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    return flat.pin_memory() if device.type == "cuda" else flat


def parted(flat: Int[Tensor, " numbers"], given: Sequence[Host]) -> tuple[Int[Tensor, "..."], ...]:
    """Views of what `joined` made of these, in their shapes."""
    parts = flat.split([math.prod(one.shape) for one in given])
    return tuple(part.view(one.shape) for part, one in zip(parts, given, strict=True))


def to_host(*tensors: Tensor) -> tuple[ndarray, ...]:
    """These tensors of up to 32 bits, or of whole numbers below 2^53, as arrays.

    Those of the CPU share their memory.
    """
    if tensors[0].device.type == "mps":  # which has no doubles
        tensors = tuple(tensor.cpu() for tensor in tensors)
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tuple(tensor.detach().numpy() for tensor in tensors)
    flat = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    return tuple(
        part.reshape(tensor.shape).astype(torch.empty(0, dtype=tensor.dtype).numpy().dtype)
        for part, tensor in zip(np.split(flat, ends[:-1]), tensors, strict=True)
    )
