"""Wall clock of this package's modes beside what others offer, on the same weights.

Ratios are paired: in each repeat every contender answers the same prompts, one after the other, and
its time per token is set against that of our own next-token decoding in the same repeat.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from setblock.cache import PrefixCache
from setblock.contenders import BASELINE, Contender, Run, now
from setblock.masks import causal_layout, decoding_layout
from setblock.model import Model


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
) -> Iterator[dict[str, Any]]:
    """One line for each contender, once all repeats are done; a first, untimed round warms up.

    speedup: of the decoding time per token against the baseline, median over the repeats with the
    least and the most; total_speedup: with the prompts' forward. identical_share: of answers with
    the baseline's token ids. speedup is None where no answer has a second token.
    """
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    rounds: dict[str, list[list[Run]]] = {name: [] for name in running}
    for repeat in range(repeats + 1):
        for name, run in running.items():
            done = [run(model, batch, max_new_tokens) for batch in batches]
            if repeat:
                rounds[name].append(done)

    def per_token(runs: list[Run], whole: bool) -> float:
        seconds = sum(run.decode_s + (run.prefill_s if whole else 0.0) for run in runs)
        return max(seconds, 1e-9) / sum(run.tokens for run in runs)  # a clock may stand still

    exact = [ids for run in rounds[BASELINE][0] for ids in run.token_ids]
    for name, found in rounds.items():
        gains = {
            whole: [
                per_token(base, whole) / per_token(runs, whole)
                for base, runs in zip(rounds[BASELINE], found, strict=True)
            ]
            for whole in (False, True)
        }
        runs = found[0]
        tokens = sum(run.tokens for run in runs)
        decoded = min(tokens, sum(map(len, exact))) > len(exact)
        nfe = [run.nfe for run in runs if run.nfe is not None]
        ids = [ids for run in runs for ids in run.token_ids]
        yield {
            "contender": name,
            "batch_size": batch_size,
            "prompt_tokens": statistics.mean(map(len, prompts)),
            "n": len(prompts),
            "tokens": tokens,
            "tokens_per_forward": tokens / sum(nfe) if nfe else None,
            "prefill_s": statistics.median(sum(run.prefill_s for run in runs) for runs in found),
            "decode_s": statistics.median(sum(run.decode_s for run in runs) for runs in found),
            "tokens_per_second": statistics.median(1 / per_token(runs, True) for runs in found),
            # Where prompts alone were answered there is no decoding to compare.
            "speedup": statistics.median(gains[False]) if decoded else None,
            "speedup_range": (min(gains[False]), max(gains[False])) if decoded else None,
            "total_speedup": statistics.median(gains[True]),
            "total_speedup_range": (min(gains[True]), max(gains[True])),
            "identical_share": sum(a == b for a, b in zip(exact, ids, strict=True)) / len(ids),
        }


def forward_costs(
    model: Model, cached: Sequence[int], queries: Sequence[int], batch_size: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Seconds of one forward of `queries` tokens a row behind `cached` others, and the ratio to one
    of a single token: the measured counterpart of the paper's table 3.

    1 is next-token decoding, k a later forward of a block, 2k its first one. The widths take turns,
    so that a machine that slows down slows all of them; a first round warms up. Medians, of the
    ratio also the least and the most.
    """
    widest = max(queries)
    widths = sorted({1, *queries})
    for length in cached:
        cache = model.new_cache(batch_size, length + widest)
        if length:
            position = torch.arange(length, device=model.device).expand(batch_size, -1)
            tokens = torch.full((batch_size, length), model.pad_token_id, device=model.device)
            # One logit is enough of a forward that only fills the cache.
            model.forward(tokens, causal_layout(position), cache, logits_at=position[0, -1:])
            cache.keep(torch.full((batch_size,), length))

        def forward(count: int, cache: PrefixCache = cache, length: int = length) -> float:
            position = torch.arange(length, length + count, device=model.device)
            start = torch.full((batch_size,), length + count // 2, device=model.device)
            end = torch.full_like(start, length + count)
            layout = decoding_layout(position.expand(batch_size, -1), start, end)
            tokens = torch.full((batch_size, count), model.mask_token_id, device=model.device)
            begin = now(model)
            model.forward(tokens, layout, cache)
            return now(model) - begin

        rounds = [{count: forward(count) for count in widths} for _ in range(repeats + 1)][1:]
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
