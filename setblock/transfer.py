"""Between host and device, several tensors a copy.

What decoding keeps of its rows lies on the host; the device has the network, the cache and logits.
A copy to the device waits for nothing. One to the host waits until the device has come that far,
and is the only thing in a step that does.
"""

import torch
from torch import Tensor


def to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """These tensors of whole numbers or truth values on the device; those that are there stay."""
    if all(tensor.device == device for tensor in tensors):
        return tensors
    flat = torch.cat([tensor.flatten().long() for tensor in tensors])
    if device.type == "cuda":  # else the copy would wait for what the device does
        flat = flat.pin_memory()
    return _parted(flat.to(device, non_blocking=True), tensors)


def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """These tensors of up to 32 bits, or of whole numbers below 2^53, on the host."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors
    if tensors[0].device.type == "mps":  # which has no doubles
        return tuple(tensor.cpu() for tensor in tensors)
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    return _parted(flat.cpu(), tensors)


def _parted(flat: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The parts of a line of numbers, in the shapes and types of these tensors."""
    parts = flat.split([tensor.numel() for tensor in like])
    return tuple(
        part.reshape(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, like, strict=True)
    )
