"""The time of a forward by arithmetic: whatever takes longer, computing or moving bytes.

An operation takes max(flops / peak, bytes / bandwidth), on a machine that does one after the other
the sum; a forward is its linear layers, one after another, and its attention. No launches, norms or
communication. Two sets of dimensions: `PAPER` is the printed code of arXiv:2509.04185, whose
feed-forward layer is 4096 times too wide and whose tables 3 and 4 follow from it; `machines.MODELS`
has the true ones, with their output layers.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What a machine can do: flops per second of linear layers and attention, bytes per second.

    bytes_per_value: of what layers read and write; bytes_per_cached: of keys and values.
    overlapping: whether bytes move while others are computed with.
    """

    name: str
    linear_flops: float
    attention_flops: float
    bandwidth: float
    bytes_per_weight: float = 1.0
    bytes_per_value: float = 1.0
    bytes_per_cached: float = 1.0
    overlapping: bool = True

    def seconds(
        self, moved: float | int, linear: float | int = 0, attention: float | int = 0
    ) -> float:
        """Of an operation on so many bytes with so many flops, of a linear layer or attention."""
        moving = moved / self.bandwidth
        computing = linear / self.linear_flops + attention / self.attention_flops
        return max(moving, computing) if self.overlapping else moving + computing


# As printed in the paper: FP8 linear layers, BF16 attention; its bandwidth is 10 % above the data
# sheet's 3.35e12.
PAPER_H100 = Device("h100-paper", 1978e12, 989e12, 3.35 * 1024**4)


@dataclass(frozen=True)
class Experts:
    """A mixture in every block of the network.

    active: of `count` experts, those that a token goes through.
    linears: (inputs, outputs) of the linear layers of one expert.
    """

    count: int
    active: int
    linears: tuple[tuple[int, int], ...]

    def met(self, tokens: float | int) -> float:
        """How many of them so many tokens are expected to go through.

        As if each token chose among all of them alike, independently of the others. Tokens of one
        text choose more alike, which makes it the most to expect.
        """
        return self.count * (1 - (1 - self.active / self.count) ** tokens)


@dataclass(frozen=True)
class Dimensions:
    """What of a model costs time.

    linears: (inputs, outputs) of the linear layers of one block of the network, without experts.
    output: (inputs, outputs) of the output layer, None to leave it out.
    attention: width of all query heads together; cache: of all key heads together.
    """

    layers: int
    linears: tuple[tuple[int, int], ...]
    attention: int
    cache: int
    output: tuple[int, int] | None = None
    experts: Experts | None = None


def _printed() -> Dimensions:
    hidden = 4096
    wide = hidden * 4 * hidden
    linears = ((hidden, wide), (wide, hidden), *[(hidden, 4096)] * 2, *[(hidden, 256)] * 2)
    return Dimensions(32, linears, attention=4096, cache=1024)


PAPER = _printed()


def forward_s(
    dimensions: Dimensions, device: Device, queries: float | int, batch: int = 1, cached: int = 0
) -> float:
    """Seconds of a forward of `queries` tokens in each of `batch` rows behind `cached` ones."""
    tokens = batch * queries
    block = sum(_linear_s(device, tokens, *shape) for shape in dimensions.linears)
    if (experts := dimensions.experts) is not None:
        met, through = experts.met(tokens), tokens * experts.active
        block += sum(_linear_s(device, through, *shape, met) for shape in experts.linears)
    keys = batch * cached * dimensions.cache
    moved = 2 * tokens * dimensions.attention * device.bytes_per_value
    moved += 2 * keys * device.bytes_per_cached
    flops = 4 * tokens * cached * dimensions.attention
    attention = device.seconds(moved, attention=flops)
    output = _linear_s(device, tokens, *dimensions.output) if dimensions.output else 0.0
    return dimensions.layers * (block + attention) + output


def driven_s(
    dimensions: Dimensions,
    device: Device,
    queries: float | int,
    batch: int,
    cached: int,
    dispatch_s: float | int,
) -> float:
    """`forward_s` and dispatch_s for each layer, for the Python that drives it."""
    driving = dispatch_s * dimensions.layers
    return driving + forward_s(dimensions, device, queries, batch, cached)


def _linear_s(
    device: Device, tokens: float | int, inputs: int, outputs: int, weights: float | int = 1
) -> float:
    """weights: so many of that shape, among which the tokens are divided."""
    moved = (
        weights * inputs * outputs * device.bytes_per_weight
        + tokens * (inputs + outputs) * device.bytes_per_value
    )
    return device.seconds(moved, linear=2 * tokens * inputs * outputs)


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
    """How a cycle of verified decoding spends its query tokens; see `best_spending`.

    branches: 0 is the form of two forwards: one drafts a whole block, one verifies it.
    """

    block_size: int
    branches: int
    seeds: int
    tokens_per_forward: float
    seconds_per_token: float


# Of a middling drafter, where a checkpoint does not say otherwise: how likely a drafted token is
# accepted behind accepted ones, if the draft saw the token before it.
ACCEPTANCE = 0.8
# How much more often one that did not is rejected, and how often the next token is among the first
# runners-up at a rejection: as measured with a briefly trained SmolLM2-135M.
BLIND = 1.45
HITS = {0: 0.0, 1: 0.18, 2: 0.28, 4: 0.43}
PAIR_GAIN = 1.1
# Of a layer in a forward that Python drives, whatever the number of tokens.
DISPATCH_S = 5e-4
# Likewise, of what a gated adapter adds in a layer: small products that wait for their calls.
ADDITIONS_S = 4e-4
YIELD = 1.3  # tokens of a forward that verifies copies, of SmolLM2-135M on word problems at least
MOST_WEIGHED = 64  # tokens of a block, and branches


@functools.lru_cache(maxsize=1024)
def best_spending(
    dimensions: Dimensions,
    device: Device,
    block_size: int,
    batch: int = 1,
    cached: int = 512,
    acceptance: float = ACCEPTANCE,
    branches: int | None = None,
    seeds: int | None = None,
    fixed_size: bool = False,
    one_forward: bool = False,
    pairs: bool = True,
    dispatch_s: float = DISPATCH_S,
    additions_s: float = 0.0,
) -> Spending:
    """The block length, up to `block_size`, branches and seeds with the least seconds per token.

    A forward costs what `forward_s` says and dispatch_s a layer, with masks additions_s a layer
    besides, and yields `expected_tokens`. The form of two forwards a cycle has fewer query tokens,
    and its drafts have seen the token before them; as it gives up the bound on forwards, it must be
    quicker by PAIR_GAIN. A second draft forward is not weighed: nothing here says how much better
    it would draft.
    branches, seeds, fixed_size and one_forward hold what is not to be chosen. A block of 1 says
    that drafting does not pay; that is no answer to somebody who asked for some of these.
    Without `pairs` the form of two forwards is not weighed, nor, as weighing takes time that grows
    with its cube, what is longer or has more branches than MOST_WEIGHED.
    """

    @functools.cache
    def seconds(queries: int) -> float:
        return driven_s(dimensions, device, queries, batch, cached, dispatch_s)

    additions = additions_s * dimensions.layers
    one_forward = one_forward or branches is not None or seeds is not None
    best = None if fixed_size or one_forward else Spending(1, 1, 0, 1.0, seconds(1))
    pair = None
    sizes = range(2, min(block_size, MOST_WEIGHED) + 1)
    for size in (block_size,) if fixed_size or block_size == 1 else sizes:
        if pairs and not one_forward:
            chances = (_accepted(n, size, acceptance) for n in range(size))
            tokens = 1 + sum(n * chance for n, chance in enumerate(chances))
            time = 2 * seconds(size) + additions
            if pair is None or time / tokens < pair.seconds_per_token:
                pair = Spending(size, 0, 0, tokens / 2, time / tokens)
        counts = range(1, min(size, MOST_WEIGHED) + 1)
        for count in counts if branches is None else (min(branches, size),):
            for more in HITS if seeds is None else (seeds,):
                tokens, drafted = expected_tokens(size, count, more, acceptance)
                full = seconds(size + size * count * (1 + more)) + additions
                time = drafted * full + (1 - drafted) * seconds(1 + size)
                if best is None or time / tokens < best.seconds_per_token:
                    best = Spending(size, count, more, tokens, time / tokens)
    assert best is not None
    if pair is not None and PAIR_GAIN * pair.seconds_per_token < best.seconds_per_token:
        return pair
    return best


@functools.lru_cache(maxsize=1024)
def worth(
    dimensions: Dimensions,
    device: Device,
    batch: int = 1,
    cached: int = 512,
    dispatch_s: float = DISPATCH_S,
) -> float:
    """The chance of being accepted from which on one more drafted token is worth its time.

    A forward of `batch` rows, of a token each, yields YIELD tokens a row where some drafts are
    accepted. One of two tokens each has to yield as many more as it takes longer.
    """
    one, two = (
        driven_s(dimensions, device, queries, batch, cached, dispatch_s) for queries in (1, 2)
    )
    return YIELD * (two / one - 1)


@functools.lru_cache(maxsize=65_536)
def expected_tokens(
    block_size: int, branches: int, seeds: int, acceptance: float
) -> tuple[float, float]:
    """(tokens that a forward of verified decoding yields, share of forwards with a draft).

    Long-run means over forwards without a draft, with one that did not see the token before it,
    and with one that did. What follows a forward depends on how many of its tokens are accepted:
    nothing if no branch stands behind that many, else a draft that saw the token if it was among
    the seeds, which a draft accepted to its end has none of. Branches stand behind the numbers that
    are likeliest for the draft at hand.
    """
    blind = 1 - min(BLIND * (1 - acceptance), 1.0)
    hit = max(share for count, share in HITS.items() if count <= seeds)

    def follow(rate: float) -> tuple[float, float, float]:
        """Tokens of a forward with such a draft; how likely none, and a seen one, follows."""
        chances = [_accepted(n, block_size, rate) for n in range(block_size)]
        covered = sorted(range(block_size), key=lambda n: -chances[n])[:branches]
        met = sum(chances[n] for n in covered)
        seen = hit * sum(chances[n] for n in covered if n < block_size - 1)
        return 1 + sum(n * chance for n, chance in enumerate(chances)), 1 - met, seen

    blind_tokens, blind_to_none, blind_to_seen = follow(blind)
    seen_tokens, seen_to_none, seen_to_seen = follow(acceptance)
    # The shares that stay as they are, for one forward with a blind draft. Behind a forward without
    # any draft stands a branch behind its one token, which is all it has: a blind draft is next.
    seen = blind_to_seen / (1 - seen_to_seen)
    none = blind_to_none + seen * seen_to_none
    whole = none + 1 + seen
    return (none + blind_tokens + seen * seen_tokens) / whole, 1 - none / whole


def fitted_acceptance(
    block_size: int, branches: int, seeds: int, tokens_per_forward: float
) -> float:
    """The acceptance with which `expected_tokens` comes to what was measured, in 0.001 .. 0.999."""
    low, high = 0.001, 0.999
    for _ in range(40):
        middle = (low + high) / 2
        if expected_tokens(block_size, branches, seeds, middle)[0] < tokens_per_forward:
            low = middle
        else:
            high = middle
    return low


def _accepted(count: int, block_size: int, rate: float) -> float:
    """The probability that of block_size - 1 drafted tokens the first `count` are accepted."""
    return rate**count * (1 - rate if count < block_size - 1 else 1.0)
