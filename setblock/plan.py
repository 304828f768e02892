"""What to run where, by arithmetic: block size, mode and batch that pay; models quick enough.

Every forward costs what `roofline.forward_s` says and a fixed time for each layer, for the Python
that drives it. What it yields is an assumption, or was measured: `tokens_per_forward` for mode
"sbd", the `acceptance` of drafted tokens for mode "verified".
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from setblock.checkpoint import checked_settings, read_settings
from setblock.machines import MODELS
from setblock.names import path_of
from setblock.roofline import (
    DISPATCH_S,
    Device,
    Dimensions,
    best_spending,
    driven_s,
    forward_s,
)

LARGEST_BATCH = 1024


def acceptance_of(name: str) -> float | None:
    """Of drafted tokens, as a MODEL on this machine says it of itself; None where none does."""
    place = path_of(name)
    return checked_settings(read_settings(str(place))).get("acceptance") if place.is_dir() else None


@dataclass(frozen=True)
class Assumptions:
    """What the arithmetic takes as given.

    tokens_per_forward: of mode "sbd", for each block size to choose from. acceptance: see
    roofline.ACCEPTANCE. cached: tokens in each row's cache.
    dispatch_s: seconds of a layer in a forward, whatever its tokens; 0 is the bare roofline.
    """

    tokens_per_forward: dict[int, float]
    acceptance: float
    cached: int
    dispatch_s: float = DISPATCH_S


def choices(
    dimensions: Dimensions,
    device: Device,
    batch: int,
    given: Assumptions,
) -> list[dict[str, Any]]:
    """One line a mode, the quickest first: its settings, milliseconds per token, and speed-up.

    branches: 0 is verified decoding with a forward that drafts and one that verifies.
    ms_per_token: of one row. speedup: against mode "ntp" at the same batch.
    """

    def seconds(queries: int) -> float:
        return driven_s(dimensions, device, queries, batch, given.cached, given.dispatch_s)

    def block(size: int) -> float:
        """Seconds a token: the first forward of a block encodes the block before it as well."""
        forwards = size / given.tokens_per_forward[size]
        return (seconds(2 * size) + (forwards - 1) * seconds(size)) / size

    size = min(given.tokens_per_forward, key=block)
    spent = best_spending(
        dimensions,
        device,
        max(given.tokens_per_forward),
        batch,
        given.cached,
        given.acceptance,
        dispatch_s=given.dispatch_s,
    )
    lines: list[dict[str, Any]] = [
        _line("ntp", seconds(1), 1.0),
        _line("sbd", block(size), given.tokens_per_forward[size], size),
        _line(
            "verified",
            spent.seconds_per_token,
            spent.tokens_per_forward,
            spent.block_size,
            spent.branches,
            spent.seeds,
        ),
    ]
    for line in lines:
        line |= {"batch": batch, "speedup": seconds(1) * 1000 / line["ms_per_token"]}
    return sorted(lines, key=lambda line: line["ms_per_token"])


def _line(
    mode: str,
    seconds_per_token: float,
    tokens_per_forward: float,
    block_size: int | None = None,
    branches: int | None = None,
    seeds: int | None = None,
) -> dict[str, Any]:
    return {
        "mode": mode,
        "block_size": block_size,
        "branches": branches,
        "seeds": seeds,
        "tokens_per_forward": tokens_per_forward,
        "ms_per_token": 1000 * seconds_per_token,
    }


def paying_batches(
    dimensions: Dimensions, device: Device, given: Assumptions
) -> dict[str, tuple[int, int] | None]:
    """For modes "sbd" and "verified" the smallest and largest batch, by powers of two, that they
    speed up; None where they speed up none. LARGEST_BATCH may mean more.

    The smallest is 1 but for mixtures of experts: few tokens go through few experts, so that each
    further one brings weights of its own to be read.
    """
    found: dict[str, tuple[int, int] | None] = {"sbd": None, "verified": None}
    batch = 1
    while batch <= LARGEST_BATCH:
        for line in choices(dimensions, device, batch, given):
            if line["mode"] in found and line["speedup"] > 1:
                first, _ = found[line["mode"]] or (batch, batch)
                found[line["mode"]] = first, batch
        batch *= 2
    return found


def right_size(
    device: Device, batch: int, given: Assumptions, target_ms: float
) -> list[dict[str, Any]]:
    """Every known model and mode with its milliseconds per token, and whether it meets the target.

    That the model fits into the device's memory is not looked at.
    """
    lines = []
    for name, dimensions in MODELS.items():
        if name == "paper":  # its feed-forward layer is a misprint
            continue
        for line in choices(dimensions, device, batch, given):
            lines.append({"model": name, **line, "meets": line["ms_per_token"] <= target_ms})
    return sorted(lines, key=lambda line: line["ms_per_token"])


def measured_dispatch_s(
    dimensions: Dimensions, device: Device, forwards: Sequence[dict[str, Any]]
) -> float:
    """Seconds of a layer by themselves, from the timed forwards of one token; 0 if there is none.

    The median over the places of what the roofline does not account for.
    """
    rest = [
        (line["seconds"] - forward_s(dimensions, device, 1, line["batch_size"], line["cached"]))
        / dimensions.layers
        for line in forwards
        if line["queries"] == 1
    ]
    return max(statistics.median(rest), 0.0) if rest else 0.0


def beside_measured(
    dimensions: Dimensions, device: Device, forwards: Sequence[dict[str, Any]], dispatch_s: float
) -> list[dict[str, Any]]:
    """The forwards of a record of `setblock benchmark` with what the arithmetic says of each.

    ratio, predicted_ratio: to the forward of one token behind the same cache.
    """

    def seconds(queries: int, line: dict[str, Any]) -> float:
        place = line["batch_size"], line["cached"]
        return driven_s(dimensions, device, queries, *place, dispatch_s)

    return [
        {
            **line,
            "predicted_seconds": seconds(line["queries"], line),
            "predicted_ratio": seconds(line["queries"], line) / seconds(1, line),
        }
        for line in forwards
    ]


def describe(given: Assumptions, device: Device) -> dict[str, Any]:
    """The assumptions and the machine as JSON values."""
    return {"assumptions": asdict(given), "device": asdict(device)}
