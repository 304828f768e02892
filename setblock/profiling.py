"""Where the time of decoding goes: shares of a run by what was done, from torch's profiler.

An operation belongs to the innermost of these that it runs in:

    head       the output layer, from hidden states to logits
    solver     entropies, reveal rules, and the choice of tokens
    cache      keys and values written, read and kept
    attention  scaled_dot_product_attention or FlexAttention
    linears    the other linear layers
    compiled   kernels of torch.compile's own, and what a CUDA graph replays: whatever they fuse
    other      every other operation: norms, rotations, activations, masks, bookkeeping

and what is left of the wall clock, when no operation ran, is Python and what launches operations.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function

from setblock import attention, branches, cache, sampling, solvers
from setblock.contenders import now
from setblock.generation import generate
from setblock.model import Model
from setblock.results import Generation

KINDS = ("head", "solver", "cache", "attention", "linears", "compiled", "other")
COMPILED = "## Call CompiledFxGraph"  # so the profiler calls a run of torch.compile's kernels
REST = "python"
OPERATIONS = {
    "attention": ("scaled_dot_product", "flex_attention"),
    "linears": (
        "aten::linear",
        "aten::addmm",
        "aten::mm",
        "aten::bmm",
        "mkl::",
        "mkldnn::",
        "setblock::linear",
    ),
}
# Ours, by the place where they are looked up.
FUNCTIONS = (
    (attention, "scored", "attention"),
    (cache._PrefixLayer, "update", "cache"),
    (cache.PrefixCache, "stage", "cache"),
    (cache.PrefixCache, "locate", "cache"),
    (cache.PrefixCache, "keep", "cache"),
    (cache.PrefixCache, "select", "cache"),
    (sampling.Sampler, "perturbed", "solver"),
    (sampling.Sampler, "pick", "solver"),
    (solvers, "probability_of", "solver"),
    (solvers, "entropy_of", "solver"),
    (branches.BranchDrafts, "_plan", "solver"),
    (branches.BranchDrafts, "_redraft", "solver"),
)


def profiled(
    model: Model, prompts: Sequence[Sequence[int]], repeats: int, **options: Any
) -> dict[str, Any]:
    """Shares of answering these prompts, each alone, over all rounds; the first prompt warms up.

    shares: of the wall clock while watched, by KINDS and REST; they sum to 1. On a CUDA device
    those of KINDS are the time in which it computed, `python` that in which it did not.
    wall_s: of a round without being watched, the median. overhead: how many times longer a watched
    one takes; the finer the operations, the more.
    options: of `generate`.
    """
    plain, watched = [], []
    spent: dict[str, float] = {kind: 0.0 for kind in KINDS}
    answers: list[Generation] = []
    generate(model, prompts[:1], **options)
    for _ in range(repeats):
        begin = now(model)
        for prompt in prompts:
            generate(model, [prompt], **options)
        plain.append(now(model) - begin)
        seconds, found, answers = _watched(model, prompts, options)
        watched.append(seconds)
        for kind in KINDS:
            spent[kind] += found[kind]
    shares = {kind: spent[kind] / sum(watched) for kind in KINDS}
    return {
        "n": len(prompts),
        "tokens": (tokens := sum(one.num_tokens for one in answers)),
        "nfe": (nfe := sum(one.nfe for one in answers)),
        "tokens_per_forward": tokens / nfe,
        "wall_s": statistics.median(plain),
        "overhead": sum(watched) / sum(plain),
        "shares": shares | {REST: 1 - sum(shares.values())},
    }


def _watched(
    model: Model, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> tuple[float, dict[str, float], list[Generation]]:
    """(seconds, seconds by kind, answers) of one round."""
    cuda = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    events: list[Any] = []
    answers: list[Generation] = []
    wall_s = 0.0
    for prompt in prompts:
        with _marked(model), profile(activities=activities, acc_events=True) as record:
            begin = now(model)
            answers += generate(model, [prompt], **options)
            wall_s += now(model) - begin
        events += record.events() or ()
    return wall_s, _seconds_by_kind(events, cuda), answers


def _seconds_by_kind(events: Sequence[Any], cuda: bool) -> dict[str, float]:
    """Of the profiler's events, on a CUDA device of the time in which that computed."""
    spent: dict[str, float] = {kind: 0.0 for kind in KINDS}
    device_s = 0.0
    for event in events:
        if event.device_type.name != "CPU":
            device_s += 0 if event.is_user_annotation else event.self_device_time_total / 1e6
            continue
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        if event.name.startswith(("aten::", "mkl::", "mkldnn::", "setblock::", "flex")):
            spent[_kind_of(event)] += micros / 1e6
        elif event.name.startswith(COMPILED) and not cuda:
            spent["compiled"] += micros / 1e6
    if cuda:  # kernels that no operation has launched, so compiled ones or those of a graph
        spent["compiled"] = max(device_s - sum(spent.values()), 0.0)
    return spent


def _kind_of(event: Any) -> str:
    """Of an operation: that of the innermost mark or operation around it that has one."""
    while event is not None:
        if event.name in KINDS:
            return event.name
        for kind, names in OPERATIONS.items():
            # A matrix product may belong to what is around it.
            if any(name in event.name for name in names):
                around = _kind_of(event.cpu_parent)
                return kind if around == "other" else around
        event = event.cpu_parent
    return "other"


@contextmanager
def _marked(model: Model) -> Iterator[None]:
    """While this lasts, what is ours and the head stand in the profiler's record by their kind."""

    def marking(function: Any, kind: str) -> Any:
        @wraps(function)
        def marked(*words: Any, **given: Any) -> Any:
            with record_function(kind):
                return function(*words, **given)

        return marked

    head = model.network.get_output_embeddings()
    places = [*FUNCTIONS, (head, "forward", "head")]
    made = {getattr(make, "func", make) for make, *_ in solvers.FORMS.values()}
    places += [(solver, "reveal", "solver") for solver in made]
    with ExitStack() as patched:
        for owner, name, kind in places:
            patched.enter_context(patch.object(owner, name, marking(getattr(owner, name), kind)))
        yield
