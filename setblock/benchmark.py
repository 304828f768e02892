"""Wall clock of this package's modes beside what others offer, on the same weights.

Ratios are paired: in each repeat every contender answers the same prompts, one after the other, and
its time per token is set against that of our own next-token decoding in the same repeat.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from setblock.cache import PrefixCache
from setblock.contenders import BASELINE, Contender, Timing, now
from setblock.masks import Layout, decoding_layout
from setblock.model import Model

Round = tuple[
    list[Timing], float
]  # a contender's runs, and what their bare forwards took, in seconds
WARM_UPS = 2  # rounds of bare forwards: in the second one graphs are recorded


def stretched(prompt: Sequence[int], length: int | None) -> list[int]:
    """The prompt, made `length` tokens long by its own tokens over and over in front of it."""
    if length is None:
        return list(prompt)
    copies = math.ceil(length / len(prompt))
    return (list(prompt) * copies)[-length:]


def compare(
    model: Model,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    max_new_tokens: int,
    repeats: int,
    running: dict[str, Contender],
    begun: Callable[[int, str], None] = lambda repeat, name: None,
) -> Iterator[dict[str, Any]]:
    """One line for each contender, once all repeats are done; a first, untimed round warms up.

    begun: called before each turn with the round, 0 to warm up, and the contender.
    repeats in a line: the rounds behind it. An interrupt is raised behind the lines of the rounds
    that were whole by then.

    speedup: of the decoding time per token behind those of the prompts' forward against the
    baseline, median over the repeats with the least and the most; total_speedup: of all time and
    tokens. identical_share: of answers with
    the baseline's token ids. settings: of our own modes, all that was chosen, by a checkpoint or by
    arithmetic too. speedup is None where no answer has a second token, or all are the
    first forward's.

    Of our own modes with one prompt at a time: efficiency, the speed-up for each token per forward
    behind the prompt's;
    ceiling, the speed-up if a run took what its bare forwards take, which are made once more behind
    each run; and the share of it reached, paired like the speed-up.
    """
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    rounds: list[dict[str, Round]] = []
    stopped = None
    try:
        for repeat in range(repeats + 1):
            found: dict[str, Round] = {}
            for name, run in running.items():
                begun(repeat, name)
                done = [run(model, batch, max_new_tokens) for batch in batches]
                forwards = [one.forwards for one in done if batch_size == 1]
                found[name] = done, sum((_bare_seconds(model, one) for one in forwards), 0.0)
            if repeat:
                rounds.append(found)
    except KeyboardInterrupt as error:
        stopped = error
    if rounds:
        yield from _lines(rounds, prompts, batch_size)
    if stopped:
        raise stopped


def _lines(
    rounds: list[dict[str, Round]], prompts: Sequence[Sequence[int]], batch_size: int
) -> Iterator[dict[str, Any]]:
    def per_token(runs: list[Timing], whole: bool) -> float:
        seconds = sum(run.decode_s + (run.prefill_s if whole else 0.0) for run in runs)
        tokens = sum(run.tokens if whole else run.decoded for run in runs)
        return max(seconds, 1e-9) / max(tokens, 1)  # a clock may stand still

    base, base_bare = zip(*(one[BASELINE] for one in rounds), strict=True)
    exact = [ids for run in base[0] for ids in run.token_ids]
    for name in rounds[0]:
        found, bare = zip(*(one[name] for one in rounds), strict=True)
        gains = {
            whole: [
                per_token(slow, whole) / per_token(runs, whole)
                for slow, runs in zip(base, found, strict=True)
            ]
            for whole in (False, True)
        }
        runs = found[0]
        tokens = sum(run.tokens for run in runs)
        behind, base_behind = (sum(run.decoded for run in runs) for runs in (found[0], base[0]))
        decoded = min(behind, base_behind) > 0
        # Nor did it take time where the first forward gave whole answers.
        decoded &= all(any(run.decode_s for run in runs) for runs in found)
        nfe = [run.nfe for run in runs if run.nfe is not None]
        ids = [ids for run in runs for ids in run.token_ids]
        speedup = statistics.median(gains[False]) if decoded else None
        per_forward = tokens / sum(nfe) if nfe else None
        forwards = sum(run.decoding_forwards or 0 for run in runs)
        ceilings = [
            slow / own * behind / base_behind
            for slow, own in zip(base_bare, bare, strict=True)
            if slow and own and decoded
        ]
        shares = [gain / most for gain, most in zip(gains[False], ceilings, strict=False)]
        yield {
            "contender": name,
            "settings": runs[0].settings,
            "batch_size": batch_size,
            "prompt_tokens": statistics.mean(map(len, prompts)),
            "n": len(prompts),
            "repeats": len(rounds),
            "tokens": tokens,
            "tokens_per_forward": per_forward,
            "prefill_s": statistics.median(sum(run.prefill_s for run in runs) for runs in found),
            "decode_s": statistics.median(sum(run.decode_s for run in runs) for runs in found),
            "tokens_per_second": statistics.median(1 / per_token(runs, True) for runs in found),
            # Where prompts alone were answered there is no decoding to compare.
            "speedup": speedup,
            "speedup_range": (min(gains[False]), max(gains[False])) if decoded else None,
            "total_speedup": statistics.median(gains[True]),
            "total_speedup_range": (min(gains[True]), max(gains[True])),
            "identical_share": sum(a == b for a, b in zip(exact, ids, strict=True)) / len(ids),
            "efficiency": speedup * forwards / behind if speedup and forwards else None,
            "ceiling": statistics.median(ceilings) if ceilings else None,
            "share_of_ceiling": statistics.median(shares) if ceilings and decoded else None,
        }


def _bare_seconds(model: Model, forwards: Sequence[tuple[int, int, int, int]]) -> float:
    """What forwards of so many query tokens take by themselves, one after the other, each behind as
    many cached tokens as it was, with as many noisy ones and logits of as many; the first is made
    once more before.
    """
    if not forwards:
        return 0.0
    # As in decoding: with room behind the last one, and allocated before the first. Otherwise
    # torch.compile would make kernels for these two cases.
    cache = model.new_cache(1, max(cached + count for cached, count, *_ in forwards) + 1)
    _forward_seconds(model, cache, 1, 0, 1)
    seconds = []
    for cached, *shape in (forwards[0], *forwards):
        cache.lengths = np.array([cached])  # of whatever its memory holds
        seconds.append(_forward_seconds(model, cache, *shape))
    return sum(seconds[1:])


def forward_costs(
    model: Model, cached: Sequence[int], queries: Sequence[int], batch_size: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Seconds of one forward of `queries` tokens a row behind `cached` others, and the ratio to one
    of a single token: the measured counterpart of the paper's table 3.

    1 is next-token decoding, k a later forward of a block, 2k its first one. The widths take turns,
    so that a machine that slows down slows all of them; two rounds warm up. Medians, of the
    ratio also the least and the most. What is cached are random numbers.
    """
    widths = sorted({1, *queries})
    for length in cached:
        rounds = _in_turns(model, length, widths, batch_size, repeats)
        for count in widths:
            ratios = [one[count] / one[1] for one in rounds]
            yield {
                "batch_size": batch_size,
                "cached": length,
                "queries": count,
                "seconds": statistics.median(one[count] for one in rounds),
                "ratio": statistics.median(ratios),
                "ratio_range": (min(ratios), max(ratios)),
            }


def _in_turns(
    model: Model, cached: int, widths: Sequence[int], batch_size: int, repeats: int
) -> list[dict[int, float]]:
    """For each round the seconds of a forward of so many tokens, with the logits of all."""
    cache = _filled(model, cached, max(widths), batch_size)
    return [
        {count: _forward_seconds(model, cache, count, count // 2, count) for count in widths}
        for _ in range(repeats + WARM_UPS)
    ][WARM_UPS:]


def forward_kernels(
    model: Model, cached: int, count: int, batch_size: int, repeats: int
) -> list[dict[str, Any]]:
    """The kernels of a GPU in a forward of `count` tokens a row behind `cached` others, the longest
    first, with calls and microseconds of a forward, means of `repeats`; on a CPU the operations.

    Of a replayed graph too, in which a profiler can't tell whose kernels they are.
    """
    cache = _filled(model, cached, count, batch_size)
    on_gpu = model.device.type == "cuda"
    where = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    for _ in range(WARM_UPS):
        _forward_seconds(model, cache, count, count // 2, count)
    with profile(activities=[where], acc_events=True) as profiler:
        for _ in range(repeats):
            _forward_seconds(model, cache, count, count // 2, count)
    found = []
    for one in profiler.key_averages():
        if on_gpu and one.device_type.name == "CPU":
            continue  # a call on the host that launches one
        took = one.self_device_time_total if on_gpu else one.self_cpu_time_total
        line = {"queries": count, "cached": cached, "batch_size": batch_size, "kernel": one.key}
        found.append({**line, "calls": one.count / repeats, "microseconds": took / repeats})
    return sorted(found, key=lambda line: -line["microseconds"])


def _filled(model: Model, cached: int, widest: int, batch_size: int) -> PrefixCache:
    """A cache of so many random tokens a row, with room for forwards behind them."""
    cache = model.new_cache(batch_size, cached + widest + 1)  # with room behind, as in decoding
    _forward_seconds(model, cache, 1, 0, 1)  # makes the memory; behind nothing, so plainly
    cache.lengths = np.full(batch_size, cached)
    cache.stage(_layout(cache, widest, 0))  # makes room
    cache.memory.fill_at_random()
    return cache


def _layout(cache: PrefixCache, count: int, noisy: int) -> Layout:
    """Of so many tokens a row behind the cached ones, the last of them noisy."""
    first = cache.lengths
    position = first[:, None] + np.arange(count)
    return decoding_layout(position, first + count - noisy, first + count)


def _forward_seconds(model: Model, cache: Any, count: int, noisy: int, wanted: int) -> float:
    """Of one forward of so many tokens a row behind the cached ones, the last of them noisy, with
    logits of so many.
    """
    layout = _layout(cache, count, noisy)
    tokens = torch.full(layout.position.shape, model.mask_token_id)
    # Of more logits than tokens, as near a limit, some are of the same one.
    picked = torch.arange(count - wanted, count).clamp(min=0)
    begin = now(model)
    model.forward(tokens, layout, cache, picked)
    return now(model) - begin
