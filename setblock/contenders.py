"""What a benchmark compares: this package's modes, transformers' own `generate`, and vLLM."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from setblock.architectures import own_attention
from setblock.generation import Options, generate
from setblock.masks import CLEAN, Layout
from setblock.model import Model

BASELINE = "ntp"
LOOKUP_TOKENS = 10  # transformers' own default for prompt-lookup decoding


@dataclass(frozen=True)
class Timing:
    """What one contender took for one batch of prompts, in seconds, and what came of it.

    prefill_s: the prompts' own forward, to the first token. nfe: `Generation.nfe` of all rows; None
    where the library does not tell.
    first: tokens of the prompts' own forwards, None for one of each row; where blocks slide, they
        bring whole blocks.
    forwards: of a single prompt's, behind its own: cached tokens, query tokens, noisy ones of them,
        logits.
    settings: of our own modes, `Settings.described`.
    """

    prefill_s: float
    decode_s: float
    tokens: int
    nfe: int | None
    token_ids: tuple[tuple[int, ...], ...]
    forwards: tuple[tuple[int, int, int, int], ...] = ()
    first: int | None = None
    settings: dict[str, Any] | None = None

    @property
    def decoded(self) -> int:
        """Tokens that decode_s is of."""
        return self.tokens - (len(self.token_ids) if self.first is None else self.first)

    @property
    def decoding_forwards(self) -> int | None:
        """Forwards that decode_s is of."""
        counted = len(self.token_ids) if self.first != 0 else 0
        return None if self.nfe is None else self.nfe - counted


Contender = Callable[[Model, Sequence[Sequence[int]], int], Timing]


def ours(**options: Any) -> Contender:
    """One of this package's modes."""

    def run(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Timing:
        given: Options = {**options, "max_new_tokens": max_new_tokens}  # type: ignore[typeddict-item]
        seen: list[tuple[int, Layout, int]] = []
        if len(prompts) == 1:
            model.watch = lambda cached, *shape: seen.append((cached[0], *shape))
        try:
            answers = generate(model, prompts, **given)
        finally:
            model.watch = None
        yields = answers[0].settings.mode != "sbd" or answers[0].settings.seeds_blocks
        return Timing(
            prefill_s=max(one.prefill_s for one in answers),
            decode_s=max(one.decode_s for one in answers),
            tokens=sum(one.num_tokens for one in answers),
            nfe=sum(one.nfe for one in answers),
            token_ids=tuple(one.token_ids for one in answers),
            forwards=tuple(
                (cached, layout.block.shape[1], int((layout.block != CLEAN).sum()), wanted)
                for cached, layout, wanted in seen[answers[0].prefill_forwards :]
            ),
            first=sum(one.reveal_step.count(1) for one in answers) if yields else 0,
            settings=answers[0].settings.described,
        )

    return run


def transformers_generate(stock: Any = None, settled: int = 1, **options: Any) -> Contender:
    """transformers' own greedy `generate`, prompts padded on the left, no mask token.

    stock: the same network with its linear layers as transformers has them, for a packed model.
    settled: tokens of each answer that are left out of the time of decoding, which is that of the
    others for each token. With a static cache every call records CUDA graphs anew.
    """

    def run(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Timing:
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), model.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        network: Any = stock or model.network
        ends = sorted(model.eos_token_ids)

        def timed(count: int) -> tuple[float, torch.Tensor]:
            begin = now(model)
            found = network.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=count,
                do_sample=False,
                suppress_tokens=[model.mask_token_id],
                pad_token_id=model.pad_token_id,
                eos_token_id=ends or [-1],  # else the checkpoint's own
                **options,
            )
            return now(model) - begin, found[:, width:]

        ours, theirs = network.config._attn_implementation, network.generation_config
        # Penalties and the like of the checkpoint would make it another decoding.
        network.generation_config = GenerationConfig()
        network.set_attn_implementation(own_attention(network.config))
        try:
            prefill_s, _ = timed(1)
            before_s = prefill_s if settled == 1 else timed(settled)[0]
            whole_s, found = timed(max_new_tokens)
        finally:
            network.set_attn_implementation(ours)
            network.generation_config = theirs
        counted = found.shape[1] - settled
        if settled > 1 and counted < 1:
            raise ValueError(f"settled={settled} leaves no token of {found.shape[1]} to time")
        answers = []
        for row in found.tolist():
            stop = min((row.index(end) + 1 for end in ends if end in row), default=len(row))
            answers.append(tuple(row[:stop]))
        return Timing(
            prefill_s=prefill_s,
            decode_s=max(whole_s - before_s, 0.0) * (found.shape[1] - 1) / max(counted, 1),
            tokens=sum(map(len, answers)),
            nfe=None,
            token_ids=tuple(answers),
        )

    return run


def contenders(
    batch_size: int,
    solvers: Sequence[str] = (),
    block_sizes: Sequence[int] = (),
    stock: Any = None,
    leniences: Sequence[float] = (),
    modes: Sequence[str] = ("sbd", "verified"),
    transformers: bool = True,
    lookups: Sequence[int] = (),
    slide: bool | None = None,
) -> dict[str, Contender]:
    """What is compared: our modes, and transformers' `generate`, plain and with prompt lookup.

    modes: besides the baseline. transformers: whether its own take part. solvers: of mode "sbd";
    block_sizes: of modes "sbd" and "verified"; none is the checkpoint's or the arithmetic's. Names
    tell them where there are several. leniences: of mode "verified", besides 1; lookups as well,
    none is the checkpoint's or the arithmetic's. slide: of mode "sbd"; None is the checkpoint's.
    transformers looks up prompts for one row at a
    time only. stock: the network that it gets, see `transformers_generate`.
    """

    def name(mode: str, size: int | None, solver: str | None = None) -> str:
        told = [solver] if solver and len(solvers) > 1 else []
        told += [f"k={size}"] if size and len(block_sizes) > 1 else []
        return " ".join([mode, *told])

    sizes = [{"block_size": size} for size in block_sizes] or [{}]
    found: dict[str, Contender] = {BASELINE: ours(mode="ntp")}
    for size in sizes if "sbd" in modes else ():
        for solver in solvers or [None]:
            options = {"mode": "sbd", "solver": solver, "slide": slide, **size}
            found[name("sbd", size.get("block_size"), solver)] = ours(**options)
    for size, lookup in product(sizes, lookups or [None]) if "verified" in modes else ():
        verified = name("verified", size.get("block_size"))
        verified += f" lookup={lookup}" if len(lookups) > 1 else ""
        options = {"mode": "verified", "lookup": lookup, **size}
        found[verified] = ours(**options)
        for lenience in leniences:
            found[f"{verified} lenience={lenience:g}"] = ours(**options, lenience=lenience)
    if transformers:
        found["transformers"] = transformers_generate(stock)
    if transformers and batch_size == 1:
        found["transformers-lookup"] = transformers_generate(
            stock, prompt_lookup_num_tokens=LOOKUP_TOKENS, use_cache=True
        )
    return found


def vllm_missing(model: Model) -> str | None:
    """Why vLLM can't take part; None if it can."""
    if find_spec("vllm") is None:
        return "it is not installed"
    if model.adapted:
        return "the model is an adapter: merge it first"
    if Path(model.name).is_file():
        return "the model is a GGUF file"
    return None


@contextmanager
def vllm(model: Model, longest: int, batch_size: int, max_new_tokens: int) -> Iterator[Contender]:
    """vLLM's own next-token decoding of the same checkpoint, in this process, where it is quickest.

    longest: tokens of the longest prompt. Prompts are computed anew (no prefix caching) and the
    mask token never said. On a CPU nothing is compiled.
    """
    width = min(longest + max_new_tokens, model.context_length)
    given: dict[str, Any] = {}
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        given["gpu_memory_utilization"] = 0.9 * free / total
    else:
        cache_bytes = model.least_bytes(width * batch_size) - model.weight_bytes
        given["enforce_eager"] = True
        own |= {
            "VLLM_CPU_KVCACHE_SPACE": str(1 + math.ceil(cache_bytes / 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        from vllm import LLM, SamplingParams  # type: ignore

        engine = LLM(
            model=model.network.config._name_or_path,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=width,
            max_num_seqs=batch_size,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **given,
        )
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value

    def run(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Timing:
        texts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]

        def timed(count: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
            settings = SamplingParams(
                temperature=0.0,
                max_tokens=count,
                stop_token_ids=sorted(model.eos_token_ids),
                ignore_eos=not model.eos_token_ids,
                logit_bias={model.mask_token_id: -100.0},
                detokenize=False,
            )
            begin = time.perf_counter()
            found = engine.generate(texts, settings, use_tqdm=False)
            seconds = time.perf_counter() - begin
            return seconds, tuple(tuple(one.outputs[0].token_ids) for one in found)

        prefill_s, _ = timed(1)
        whole_s, answers = timed(max_new_tokens)
        return Timing(
            prefill_s, max(whole_s - prefill_s, 0.0), sum(map(len, answers)), None, answers
        )

    try:
        yield run
    finally:
        engine.llm_engine.engine_core.shutdown()


def now(model: Model) -> float:
    """Seconds on a clock, after the device has done what it was told."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
    return time.perf_counter()
