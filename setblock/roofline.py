"""The time of a forward by arithmetic: whatever takes longer, computing or moving bytes.

An operation takes max(flops / peak, bytes / bandwidth); a forward is its linear layers, one after
another, and its attention. No launches, norms or communication. Two sets of dimensions: `PAPER` is
the printed code of arXiv:2509.04185, whose feed-forward layer is 4096 times too wide and whose
tables 3 and 4 follow from it; `machines.MODELS` has the true ones, with their output layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """What a machine can do: flops per second of linear layers and attention, bytes per second.

    bytes_per_value: of what layers read and write; bytes_per_cached: of keys and values.
    """

    name: str
    linear_flops: float
    attention_flops: float
    bandwidth: float
    bytes_per_weight: float = 1.0
    bytes_per_value: float = 1.0
    bytes_per_cached: float = 1.0


# As printed in the paper: FP8 linear layers, BF16 attention; its bandwidth is 10 % above the data
# sheet's 3.35e12.
PAPER_H100 = Device("h100-paper", 1978e12, 989e12, 3.35 * 1024**4)


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


def forward_s(
    dimensions: Dimensions, device: Device, queries: int, batch: int = 1, cached: int = 0
) -> float:
    """Seconds of a forward of `queries` tokens in each of `batch` rows behind `cached` ones."""
    tokens = batch * queries
    block = sum(_linear_s(device, tokens, *shape) for shape in dimensions.linears)
    keys = batch * cached * dimensions.cache
    moved = 2 * tokens * dimensions.attention * device.bytes_per_value
    moved += 2 * keys * device.bytes_per_cached
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


def expected_tokens(block_size: int, branches: int, acceptance: float) -> float:
    """Tokens that a forward of verified decoding yields in the mean; see `best_spending`.

    A cycle with a draft is followed, with the probability that no branch was met, by one without.
    """
    missed = _missed(block_size, branches, acceptance)
    drafted = sum(acceptance**count for count in range(block_size))
    return (drafted + missed) / (1 + missed)


def _missed(block_size: int, branches: int, acceptance: float) -> float:
    """The probability that the accepted length is not among the likeliest `branches`."""
    stops = [acceptance**count * (1 - acceptance) for count in range(block_size - 1)]
    return 1 - sum(sorted([*stops, acceptance ** (block_size - 1)], reverse=True)[:branches])


def tables(
    dimensions: Dimensions,
    device: Device,
    batches: Sequence[int],
    cached: Sequence[int],
    block_sizes: Sequence[int],
    nfe_speedups: Sequence[int],
) -> dict[str, list[dict[str, float | int]]]:
    """Tables 3 and 4 of the paper for any model and machine, one entry a cell.

    table3: how much longer a forward of block_size tokens takes than one of 1. table4: the
    wall-clock speed-up of blocks that take nfe_speedup times fewer forwards than tokens, for block
    sizes of at least 8.
    """
    slower, faster = [], []
    for batch in batches:
        for kv in cached:
            one = forward_s(dimensions, device, 1, batch, kv)
            for size in block_sizes:
                cell = {"batch": batch, "kv": kv, "block_size": size}
                ratio = forward_s(dimensions, device, size, batch, kv) / one
                slower.append(cell | {"value": ratio})
                for fewer in nfe_speedups if size >= 8 else ():
                    gain = speedup(dimensions, device, size, size / fewer, batch, kv)
                    faster.append(cell | {"nfe_speedup": fewer, "value": gain})
    return {"table3": slower, "table4": faster}


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
        for branches in range(1, size + 1):
            missed = _missed(size, branches, acceptance)
            tokens = expected_tokens(size, branches, acceptance)
            time = seconds(size * (1 + branches)) + missed * seconds(1 + size)
            per_token = time / (1 + missed) / tokens
            if per_token < best.seconds_per_token:
                best = Spending(size, branches, 0, tokens, per_token)
    if best.block_size == 1:
        return best
    queries = best.block_size * (1 + best.branches)
    for seeds in SEEDS:
        more = queries + best.block_size * best.branches * seeds
        if seconds(more) <= NEARLY_FREE * seconds(queries):
            best = replace(best, seeds=seeds)
    return best
