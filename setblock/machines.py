"""Machines and models that the roofline knows by name, and this machine, measured."""

import functools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from setblock.checkpoint import base_of
from setblock.names import BUNDLED, SMOLLM2, path_of
from setblock.roofline import PAPER, PAPER_H100, Device, Dimensions, Experts


class Sheet(NamedTuple):
    """A data sheet: dense flops per second without sparsity, bytes per second.

    fp8: None where the arithmetic units have no such type; FP8 weights are then widened.
    """

    bf16: float
    fp8: float | None
    bandwidth: float


SHEETS = {
    "h100": Sheet(989.4e12, 1978.9e12, 3.35e12),
    "h200": Sheet(989.4e12, 1978.9e12, 4.8e12),
    "a100": Sheet(312e12, None, 2.039e12),
    "l4": Sheet(121e12, 242e12, 300e9),
    "rtx-4090": Sheet(165.2e12, 330.3e12, 1.008e12),
    "mi300x": Sheet(1307.4e12, 2614.9e12, 5.3e12),
    "b200": Sheet(2250e12, 4500e12, 8e12),
}
SLOWER_FORMS = {"pcie", "nvl", "laptop", "mig"}  # of a machine whose sheet is another's
BYTES = {"fp8": 1.0, "bf16": 2.0, "int4": 0.5, "fp32": 4.0}
DEVICES = (PAPER_H100.name, *SHEETS, "cpu")


def device(name: str, weights: str | None = None, cache: str | None = None) -> Device:
    """A machine by name, with weights and cache in these types; "cpu" is this one, measured.

    int4 weights are widened to bf16 before they are multiplied. GPUs have attention in bf16.
    Default: bf16 both, fp8 for the paper's machine; fp32 for "cpu", or the one that is given.
    Raises: ValueError for an unknown name or type, and for types that a machine does not compute
    in.
    """
    usual = {PAPER_H100.name: "fp8", "cpu": weights or cache or "fp32"}.get(name, "bf16")
    weights, cache = weights or usual, cache or usual
    for what, given, allowed in (
        ("device", name, DEVICES),
        ("weights", weights, BYTES),
        ("cache", cache, BYTES),
    ):
        if given not in allowed:
            raise ValueError(f"{what} must be one of {', '.join(allowed)}, got {given!r}")
    if name == PAPER_H100.name:
        if (weights, cache) != ("fp8", "fp8"):
            raise ValueError(f"device {name} has fp8 weights and cache, got {weights} and {cache}")
        return PAPER_H100
    if name == "cpu":
        types = {"fp32": torch.float32, "bf16": torch.bfloat16}
        if weights not in types or cache != weights:
            raise ValueError(
                f"device cpu has weights and cache in bf16 or in fp32, got {weights} and {cache}"
            )
        return _measured("cpu", types[weights])
    if "fp32" in (weights, cache):
        raise ValueError(f"weights and cache in fp32 are for device cpu, got device {name!r}")
    sheet = SHEETS[name]
    linear = sheet.fp8 if weights == "fp8" and sheet.fp8 else sheet.bf16
    values = BYTES["fp8" if weights == "fp8" else "bf16"]
    return Device(name, linear, sheet.bf16, sheet.bandwidth, BYTES[weights], values, BYTES[cache])


def device_of(place: torch.device, dtype: torch.dtype) -> Device:
    """Where a model runs: a known GPU by its data sheet, a CPU as a middling one.

    Not as measured: what follows from it should be the same the next time, with as many threads.
    A GPU without a sheet, or computing in a type that the sheet does not have, is measured after
    all, once a process.
    """
    size = float(dtype.itemsize)
    if place.type == "cpu" and dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        # Its cores multiply tiles of matrices. SmolLM2-135M's forward takes half a millisecond more
        # for each further token there.
        return Device("a cpu with AMX", 5e11, 5e11, 2e10, size, size, size, overlapping=False)
    if place.type == "cpu":
        # Products of few rows wait for their weights: a forward of SmolLM2-135M in float32 takes 41
        # to 50 ms for one token, and for each other one 4 ms more on one core, 2 ms on two.
        flops = 2.6e11 / size * torch.get_num_threads()
        return Device("a middling cpu", flops, flops, 2e10, size, size, size, overlapping=False)
    if place.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        words = set(re.split(r"\W+", torch.cuda.get_device_name(place).lower()))
        for name, sheet in SHEETS.items():
            if set(name.split("-")) <= words and not words & SLOWER_FORMS:
                return Device(name, sheet.bf16, sheet.bf16, sheet.bandwidth, size, size, size)
    return _measured(str(place), dtype)


@functools.cache
def _measured(place: str, dtype: torch.dtype) -> Device:
    """By multiplying matrices (flops) and a vector with a matrix (bandwidth), a few times each."""
    size = dtype.itemsize
    square = torch.ones(1024, 1024, device=place, dtype=dtype)
    wide = torch.ones(1024, 32 * 2**20 // 1024 // size, device=place, dtype=dtype)
    flops = 2 * square.numel() * 1024 / _seconds(lambda: square @ square, place)
    bandwidth = wide.numel() * size / _seconds(lambda: square[:1] @ wide, place)
    together = torch.device(place).type != "cpu"
    return Device(place, flops, flops, bandwidth, *[float(size)] * 3, overlapping=together)


def _seconds(operation: Callable[[], Any], place: str) -> float:
    """The shortest of five times, or of as few as take a second."""
    times: list[float] = []
    while len(times) < 6 and (len(times) < 2 or sum(times) < 1):
        begin = time.perf_counter()
        operation()
        if torch.device(place).type != "cpu":
            torch.accelerator.synchronize(place)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _gated(
    layers: int,
    hidden: int,
    wide: int,
    heads: int,
    groups: int,
    head: int,
    vocab: int,
    experts: tuple[int, int, int] | None = None,
) -> Dimensions:
    """A decoder with gated feed-forward layers and grouped heads.

    wide: of the feed-forward layer that every token goes through, 0 without one.
    experts: (how many there are, how many of them a token goes through, how wide each is).
    """
    queries, keys = heads * head, groups * head
    linears = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
    linears += _feed_forward(hidden, wide) if wide else ()
    mixture = None
    if experts is not None:
        count, active, each = experts
        linears += ((hidden, count),)  # the router
        mixture = Experts(count, active, _feed_forward(hidden, each))
    return Dimensions(layers, linears, queries, keys, (hidden, vocab), mixture)


def _feed_forward(hidden: int, wide: int) -> tuple[tuple[int, int], ...]:
    return (hidden, wide), (hidden, wide), (wide, hidden)


# Of a configuration with a mixture of experts: how many there are, and to how many a token goes.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts",
)  # fmt: skip

FAULTS = (OSError, ValueError, AttributeError, TypeError, ZeroDivisionError)  # of a configuration
MODELS = {
    "llama-3.1-8b": _gated(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": _gated(80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-8b": _gated(36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-32b": _gated(64, 5120, 25600, 64, 8, 128, 151936),
    "qwen3-30b-a3b": _gated(48, 2048, 0, 32, 4, 128, 151936, (128, 8, 768)),
    "smollm2-135m": _gated(30, 576, 1536, 9, 3, 64, 49152),
    "paper": PAPER,
}


def dimensions_of(config: Any) -> Dimensions:
    """Those of a transformers configuration, its feed-forward layers taken to be gated.

    A mixture of experts is taken to be in every layer; one whose configuration does not say in
    known words how many of them a token goes through counts as a single one. Layers of different
    widths count as their mean.
    """
    hidden = config.hidden_size
    each_layer = config.per_layer_config if config.is_heterogeneous else [config]
    widths = [_widths(one) for one in each_layer]
    queries, keys = (round(sum(part) / len(widths)) for part in zip(*widths, strict=True))
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = None
    count, active = _first(config, EXPERTS), _first(config, ACTIVE)
    if count > 1 and active:
        each = _first(config, ("moe_intermediate_size",)) or wide
        experts = (count, active, each)
        if not getattr(config, "enable_moe_block", False):  # Gemma 4's stand beside its own layer
            wide = _first(config, ("shared_expert_intermediate_size",))
            wide = wide or each * _first(config, ("n_shared_experts", "num_shared_experts"))
    return _gated(
        config.num_hidden_layers,
        hidden,
        wide,
        queries,
        keys,
        1,  # both are of all heads
        config.vocab_size,
        experts,
    )


def _widths(config: Any) -> tuple[int, int]:
    """Of all query heads and of all key heads of a layer together."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The first of these fields that the configuration has, 0 without any."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def find_model(name: str) -> Dimensions:
    """A model of MODELS, a bundled one, or that of a configuration in a folder or on the hub; of an
    adapter its base's.

    Raises: ValueError if there is neither.
    """
    try:
        place = path_of(name)
        base = base_of(str(place)) if place.is_dir() and name not in MODELS else None
        source = base or name
        source = "smollm2-135m" if source == SMOLLM2 else source
        if source in MODELS:
            return MODELS[source]
        place = path_of(source)
        if not place.is_dir() and source.count("/") != 1:
            raise ValueError("a name on the hub is owner/name")
        whole: Any = AutoConfig.from_pretrained(place if place.is_dir() else source)
        config = whole.get_text_config()
        found = dimensions_of(config)
        if found.experts is None and _first(config, EXPERTS) > 1:
            raise ValueError(f"a mixture of experts must have one of {', '.join(ACTIVE)}")
        linears = (*found.linears, found.output or (1,))
        if min(found.layers, *(size for linear in linears for size in linear)) < 1:
            raise ValueError("its layers have no size")
    except (*FAULTS, StrictDataclassError) as error:
        raise ValueError(
            f"no model {name!r}: not one of {', '.join([*MODELS, *BUNDLED])}, nor a configuration "
            f"in a folder or on the hub ({' '.join(str(error).split())[:200]})"
        ) from error
    return found
