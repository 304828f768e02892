"""Wall clock of this package's modes beside what transformers offers, on the same weights.

Ratios are paired: in each repeat every contender answers the same prompts, one after the other, and
its time per token is set against that of our own next-token decoding in the same repeat.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from setblock.generation import Options, generate
from setblock.masks import causal_layout, decoding_layout
from setblock.model import Model

BASELINE = "ntp"
LOOKUP_TOKENS = 10  # transformers' own default for prompt-lookup decoding


@dataclass(frozen=True)
class Run:
    """What one contender took for one batch of prompts, in seconds, and what came of it.

    prefill_s: the prompts' own forward, to the first token. nfe: forwards after it, of all rows;
    None where the library does not tell.
    """

    prefill_s: float
    decode_s: float
    tokens: int
    nfe: int | None
    token_ids: tuple[tuple[int, ...], ...]


Contender = Callable[[Model, Sequence[Sequence[int]], int], Run]


def ours(**options: Any) -> Contender:
    """One of this package's modes."""

    def run(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Run:
        given: Options = {**options, "max_new_tokens": max_new_tokens}  # type: ignore[typeddict-item]
        answers = generate(model, prompts, **given)
        return Run(
            prefill_s=max(one.prefill_s for one in answers),
            decode_s=max(one.decode_s for one in answers),
            tokens=sum(one.num_tokens for one in answers),
            nfe=sum(one.nfe for one in answers),
            token_ids=tuple(one.token_ids for one in answers),
        )

    return run


def transformers_generate(**options: Any) -> Contender:
    """transformers' own greedy `generate`, prompts padded on the left, no mask token."""

    def run(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Run:
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), model.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        network: Any = model.network
        ends = sorted(model.eos_token_ids)

        def timed(count: int) -> tuple[float, torch.Tensor]:
            begin = _now(model)
            found = network.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=count,
                do_sample=False,
                suppress_tokens=[model.mask_token_id],
                pad_token_id=model.pad_token_id,
                eos_token_id=ends or None,
                **options,
            )
            return _now(model) - begin, found[:, width:]

        prefill_s, _ = timed(1)
        whole_s, found = timed(max_new_tokens)
        answers = []
        for row in found.tolist():
            stop = min((row.index(end) + 1 for end in ends if end in row), default=len(row))
            answers.append(tuple(row[:stop]))
        return Run(
            prefill_s=prefill_s,
            decode_s=max(whole_s - prefill_s, 0.0),
            tokens=sum(map(len, answers)),
            nfe=None,
            token_ids=tuple(answers),
        )

    return run


def contenders(batch_size: int, **sbd: Any) -> dict[str, Contender]:
    """What is compared: our modes, and transformers' `generate`, plain and with prompt lookup.

    sbd: solver and block size of modes "sbd" and "verified". transformers looks up prompts for one
    row at a time only.
    """
    size = {"block_size": sbd["block_size"]} if sbd.get("block_size") else {}
    found: dict[str, Contender] = {
        BASELINE: ours(mode="ntp"),
        "sbd": ours(mode="sbd", **sbd),
        "verified": ours(mode="verified", **size),
        "transformers": transformers_generate(),
    }
    if batch_size == 1:
        found["transformers-lookup"] = transformers_generate(
            prompt_lookup_num_tokens=LOOKUP_TOKENS, use_cache=True
        )
    return found


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
    the baseline's token ids.
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
            "speedup": statistics.median(gains[False]),
            "speedup_range": (min(gains[False]), max(gains[False])),
            "total_speedup": statistics.median(gains[True]),
            "total_speedup_range": (min(gains[True]), max(gains[True])),
            "identical_share": sum(a == b for a, b in zip(exact, ids, strict=True)) / len(ids),
        }


def forward_costs(
    model: Model, cached: Sequence[int], queries: Sequence[int], batch_size: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Median seconds of one forward of `queries` tokens a row behind `cached` others, and the ratio
    to one of a single token: the measured counterpart of the paper's table 3.

    1 is next-token decoding, k a later forward of a block, 2k its first one.
    """
    widest = max(queries)
    for length in cached:
        cache = model.new_cache(batch_size, length + widest)
        if length:
            position = torch.arange(length, device=model.device).expand(batch_size, -1)
            tokens = torch.full((batch_size, length), model.pad_token_id, device=model.device)
            # One logit is enough of a forward that only fills the cache.
            model.forward(tokens, causal_layout(position), cache, logits_at=position[0, -1:])
            cache.keep(torch.full((batch_size,), length))
        seconds: dict[int, float] = {}
        for count in sorted({1, *queries}):
            position = torch.arange(length, length + count, device=model.device)
            start = torch.full((batch_size,), length + count // 2, device=model.device)
            end = torch.full_like(start, length + count)
            layout = decoding_layout(position.expand(batch_size, -1), start, end)
            tokens = torch.full((batch_size, count), model.mask_token_id, device=model.device)
            times = []
            for _ in range(repeats + 1):
                begin = _now(model)
                model.forward(tokens, layout, cache)
                times.append(_now(model) - begin)
            seconds[count] = statistics.median(times[1:])
            yield {
                "batch_size": batch_size,
                "cached": length,
                "queries": count,
                "seconds": seconds[count],
                "ratio": seconds[count] / seconds[1],
            }


def _now(model: Model) -> float:
    """Seconds on a clock, after the device has done what it was told."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
