"""Between host and device, several arrays a copy.

What decoding keeps of its rows lies on the host, in numpy's arrays, whose operations on a few
numbers take less time than torch's; the device has the network, the cache and logits.
A copy to the device waits for nothing. One to the host waits until the device has come that far,
and is the only thing in a step that does.
"""

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor


def to_device(device: torch.device, *given: ndarray | Tensor) -> tuple[Tensor, ...]:
    """These whole numbers or truth values as tensors on the device; tensors there stay.

    On a CPU they share an array's memory.
    """
    if all(isinstance(one, Tensor) and one.device == device for one in given):
        return given  # type: ignore[return-value]
    if device.type == "cpu":
        return tuple(one if isinstance(one, Tensor) else torch.from_numpy(one) for one in given)
    arrays = [np.asarray(one) for one in given]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))
    if device.type == "cuda":  # else the copy would wait for what the device does
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return tuple(
        part.view(array.shape).bool() if array.dtype == bool else part.view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    )


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
