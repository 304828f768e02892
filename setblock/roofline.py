"""The time of a forward by arithmetic: whatever takes longer, computing or moving bytes.

An operation takes max(flops / peak, bytes / bandwidth); a forward is its linear layers, one after
another, and its attention. No launches, norms or communication. Two sets of dimensions: `PAPER` is
the printed code of arXiv:2509.04185, whose feed-forward layer is 4096 times too wide and whose
tables 3 and 4 follow from it; `dimensions_of` is the true model's, with its output layer.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """What a machine can do: flops per second of linear layers and attention, bytes per second."""

    name: str
    linear_flops: float
    attention_flops: float
    bandwidth: float
    bytes_per_weight: float = 1.0
    bytes_per_value: float = 1.0  # of activations and of the cache


# As printed in the paper: FP8 linear layers, BF16 attention; its bandwidth is 10 % above the data
# sheet's 3.35e12.
PAPER_H100 = Device("H100, as in the paper", 1978e12, 989e12, 3.35 * 1024**4)
DEVICES = {
    "H100": Device("H100", 1978e12, 989e12, 3.35e12),
    "H200": Device("H200", 1978e12, 989e12, 4.8e12),
}


def device_of(device: torch.device, dtype: torch.dtype) -> Device:
    """A known GPU by its data sheet, anything else as measured now, once."""
    size = torch.empty(0, dtype=dtype).element_size()
    if device.type == "cuda":
        found = torch.cuda.get_device_name(device)
        for name, known in DEVICES.items():
            if name in found:  # sheets say FP8 for linear layers; wider types run at BF16's rate
                flops = known.linear_flops if size == 1 else known.attention_flops
                return replace(
                    known, linear_flops=flops, bytes_per_weight=size, bytes_per_value=size
                )
    return _measured(str(device), dtype)


@functools.cache
def _measured(device: str, dtype: torch.dtype) -> Device:
    """By multiplying matrices (flops) and a vector with a matrix (bandwidth), a few times each."""
    size = torch.empty(0, dtype=dtype).element_size()
    square = torch.ones(1024, 1024, device=device, dtype=dtype)
    wide = torch.ones(1024, 32 * 2**20 // 1024 // size, device=device, dtype=dtype)
    flops = 2 * square.numel() * 1024 / _seconds(lambda: square @ square, device)
    bandwidth = wide.numel() * size / _seconds(lambda: square[:1] @ wide, device)
    return Device(device, flops, flops, bandwidth, size, size)


def _seconds(operation: Callable[[], Any], device: str) -> float:
    """The shortest of five times."""
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        operation()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


@dataclass(frozen=True)
class Dimensions:
    """What of a model costs time.

    linears: (inputs, outputs) of the linear layers of one block of the network.
    output: (inputs, outputs) of the output layer, None to leave it out.
    attention: width of all query heads together; cache: of all key heads together.
    """

    layers: int
    linears: tuple[tuple[int, int], ...]
    attention: int
    cache: int
    output: tuple[int, int] | None = None


def _printed() -> Dimensions:
    hidden = 4096
    wide = hidden * 4 * hidden
    linears = ((hidden, wide), (wide, hidden), *[(hidden, 4096)] * 2, *[(hidden, 256)] * 2)
    return Dimensions(32, linears, attention=4096, cache=1024)


PAPER = _printed()
LLAMA_8B = Dimensions(
    32,
    (
        *((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)),
        *((4096, 14336), (4096, 14336), (14336, 4096)),
    ),
    attention=4096,
    cache=1024,
    output=(4096, 128256),
)


def dimensions_of(config: Any) -> Dimensions:
    """Those of a transformers configuration, its feed-forward layers taken to be gated."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    linears = (
        *((hidden, heads * head), (hidden, keys), (hidden, keys), (heads * head, hidden)),
        *((hidden, wide), (hidden, wide), (wide, hidden)),
    )
    return Dimensions(
        config.num_hidden_layers, linears, heads * head, keys, (hidden, config.vocab_size)
    )


def forward_s(
    dimensions: Dimensions, device: Device, queries: int, batch: int = 1, cached: int = 0
) -> float:
    """Seconds of a forward of `queries` tokens in each of `batch` rows behind `cached` ones."""
    tokens = batch * queries
    block = sum(_linear_s(device, tokens, *shape) for shape in dimensions.linears)
    keys = batch * cached * dimensions.cache
    moved = (2 * tokens * dimensions.attention + 2 * keys) * device.bytes_per_value
    flops = 4 * tokens * cached * dimensions.attention
    attention = max(moved / device.bandwidth, flops / device.attention_flops)
    output = _linear_s(device, tokens, *dimensions.output) if dimensions.output else 0.0
    return dimensions.layers * (block + attention) + output


def _linear_s(device: Device, tokens: int, inputs: int, outputs: int) -> float:
    moved = (
        inputs * outputs * device.bytes_per_weight
        + tokens * (inputs + outputs) * device.bytes_per_value
    )
    return max(moved / device.bandwidth, 2 * tokens * inputs * outputs / device.linear_flops)


def speedup(
    dimensions: Dimensions,
    device: Device,
    block_size: int,
    forwards: float | int,
    batch: int = 1,
    cached: int = 0,
) -> float:
    """Of set block decoding over next-token decoding, with `forwards` forwards a block.

    Source: arXiv:2509.04185 section 4: k * time(1) / (time(2k) + (l - 1) * time(k)).
    """

    def seconds(queries: int) -> float:
        return forward_s(dimensions, device, queries, batch, cached)

    blocks = seconds(2 * block_size) + (forwards - 1) * seconds(block_size)
    return block_size * seconds(1) / blocks


@dataclass(frozen=True)
class Spending:
    """How a cycle of verified decoding spends its query tokens; see `best_spending`."""

    block_size: int
    branches: int
    seeds: int
    tokens_per_forward: float
    seconds_per_token: float


ACCEPTANCE = 0.8  # of a drafted token behind accepted ones; a middling drafter
SEEDS = (1, 2, 4)
NEARLY_FREE = 1.02


def best_spending(
    dimensions: Dimensions,
    device: Device,
    block_size: int,
    batch: int = 1,
    cached: int = 512,
    acceptance: float = ACCEPTANCE,
) -> Spending:
    """The block length, up to `block_size`, and branches with the least seconds per token.

    Each drafted token is taken to be accepted with probability `acceptance` if those before it
    were. Of the lengths that may be accepted the likeliest get a branch; the others leave the next
    cycle without a draft, which then yields one token. Seeds come on top: as many as make that
    forward at most 2 % longer.
    """

    def seconds(queries: int) -> float:
        return forward_s(dimensions, device, queries, batch, cached)

    best = Spending(1, 1, 0, 1.0, seconds(1))
    for size in range(2, block_size + 1):
        stops = [acceptance**count * (1 - acceptance) for count in range(size - 1)]
        stops = sorted([*stops, acceptance ** (size - 1)], reverse=True)
        yields = sum(acceptance**count for count in range(size))
        for branches in range(1, size + 1):
            missed = 1 - sum(stops[:branches])
            # One cycle with a draft, and with probability `missed` one without.
            tokens = yields + missed
            time = seconds(size * (1 + branches)) + missed * seconds(1 + size)
            if time / tokens < best.seconds_per_token:
                best = Spending(size, branches, 0, tokens / (1 + missed), time / tokens)
    if best.block_size == 1:
        return best
    queries = best.block_size * (1 + best.branches)
    for seeds in SEEDS:
        more = queries + best.block_size * best.branches * seeds
        if seconds(more) <= NEARLY_FREE * seconds(queries):
            best = replace(best, seeds=seeds)
    return best
