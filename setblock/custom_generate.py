"""transformers' `model.generate(...)` by this package: what an exported checkpoint's code calls.

`setblock.export` writes a checkpoint whose custom_generate/generate.py leads here, so that
`AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True).generate(input_ids=...)` decodes
by blocks. Whatever transformers' `generate` has and this package has not is refused by name;
nothing is ignored but what changes no token.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    AutoTokenizer,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from setblock.generation import OWN, Options, ending_at, stream
from setblock.model import Model

# Settings of transformers' generation that are ours as well.
SHARED = (
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "min_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id",
    "stop_strings", "transformers_version",
)  # fmt: skip
TOP_K = 50  # where sampling is asked for without one: transformers' own default
# Those that change no token: caches, speed, or the form that our own code fills in.
HARMLESS = (
    "use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "compile_config",
    "disable_compile", "_from_model_config", "max_matching_ngram_size", "prefill_chunk_size",
    "tokenizer", "trust_remote_code", "synced_gpus", "continuous_batching_config",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "is_assistant",
)  # fmt: skip


@torch.no_grad()
def generate(
    inputs: Int[Tensor, "batch width"] | None = None,
    *,
    model: Any,
    input_ids: Int[Tensor, "batch width"] | None = None,
    attention_mask: Int[Tensor, "batch width"] | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    stopping_criteria: Iterable[StoppingCriteria] | None = None,
    **given: Any,
) -> Int[Tensor, "batch longest"]:
    """The prompts followed by their answers, padded on the right, as transformers returns them.

    given: settings of transformers' generation that this package has too (max_new_tokens,
    do_sample, temperature, top_p, top_k, min_p, repetition_penalty, min_new_tokens, eos_token_id,
    pad_token_id, stop_strings with tokenizer), and our own: mode, solver, block_size, seed, slide,
    next_token_seed, fallback, draft, branches, seeds, lookup, lenience, json_schema, regex,
    grammar, presence_penalty, frequency_penalty, logit_bias.
    stopping_criteria: those that are nothing but stop texts, a length or end tokens, see _stopping.
    Without a seed, sampling takes one from torch's generator, so that torch.manual_seed holds.
    Raises: ValueError naming what is not supported or out of range.
    """
    prompts = input_ids if input_ids is not None else inputs
    if prompts is None:
        raise ValueError("generate needs input_ids: embeddings are not supported")
    own = {name: given.pop(name) for name in OWN if given.get(name) is not None}
    tokenizer = given.pop("tokenizer", None)
    config = _config(model, generation_config, given)
    stop = _stopping(stopping_criteria or (), config)
    own_settings = getattr(model.generation_config, "setblock", None)
    wrapped = _wrapped(model, tokenizer, getattr(config, "setblock", own_settings))
    if config.suppress_tokens not in (None, [], [wrapped.mask_token_id]):
        raise ValueError(
            f"suppress_tokens={config.suppress_tokens} is not supported by set block decoding: "
            f"only the mask token, {wrapped.mask_token_id}, is never said"
        )
    options: Options = {**own}  # type: ignore[typeddict-item]
    limit = config.max_new_tokens
    if limit is None and config.max_length:
        limit = config.max_length - prompts.shape[1]
        if limit < 1:
            raise ValueError(
                f"max_length={config.max_length} leaves no room behind {prompts.shape[1]} tokens"
            )
    options["max_new_tokens"] = limit
    if config.repetition_penalty is not None:
        options["repetition_penalty"] = config.repetition_penalty
    if config.min_new_tokens:
        options["min_new_tokens"] = config.min_new_tokens
    if config.do_sample:
        options["temperature"] = 1.0 if config.temperature is None else config.temperature
        options["top_p"] = 1.0 if config.top_p is None else config.top_p
        options["top_k"] = TOP_K if config.top_k is None else config.top_k
        options["min_p"] = config.min_p or 0.0
        options.setdefault("seed", int(torch.randint(2**31, ())))
    if config.eos_token_id is not None or "eos_token_id" in given:
        ends = [] if config.eos_token_id is None else config.eos_token_id
        wrapped.eos_token_ids = frozenset(torch.as_tensor(ends).flatten().tolist())
    pad = config.pad_token_id
    if pad is None:
        pad = min(wrapped.eos_token_ids, default=wrapped.pad_token_id)
    shown = torch.ones_like(prompts) if attention_mask is None else attention_mask
    named = config.pad_token_id is not None
    if attention_mask is None and named and pad not in wrapped.eos_token_ids:
        shown = prompts != pad  # as transformers infers it
    wrapped, options["stop"] = ending_at(wrapped, stop)
    rows = [ids[seen.bool()].tolist() for ids, seen in zip(prompts, shown, strict=True)]
    if streamer is not None:
        if len(rows) > 1:
            raise ValueError(f"streamer takes one prompt at a time, got {len(rows)}")
        streamer.put(prompts.cpu())
    answers = _decode(wrapped, rows, streamer, options)
    longest = max(map(len, answers))
    found = prompts.new_full((len(rows), longest), pad)
    for row, answer in enumerate(answers):
        found[row, : len(answer)] = torch.tensor(answer)
    return torch.cat((prompts, found), dim=1)


def _stopping(criteria: Iterable[StoppingCriteria], config: Any) -> list[str]:
    """The stop texts. Lengths and end tokens of the criteria go into the configuration.

    As in transformers, a criterion replaces what the configuration says of its kind. lm-eval's
    MultiTokenEOSCriteria is known by its one text, `sequence`.
    Raises: ValueError naming the class of any other.
    """
    lengths, ends, texts, sequences = [], [], [], []
    for one in criteria:
        if type(one) is MaxLengthCriteria:
            lengths.append(one.max_length)
        elif type(one) is EosTokenCriteria:
            ends += one.eos_token_id.tolist()
        elif type(one) is StopStringCriteria:
            texts += one.stop_strings
        elif isinstance(sequence := getattr(one, "sequence", None), str):
            sequences.append(sequence)
        else:
            raise ValueError(
                f"stopping criterion {type(one).__name__} is not supported by set block decoding: "
                "known are MaxLengthCriteria, EosTokenCriteria, StopStringCriteria and lm-eval's "
                "MultiTokenEOSCriteria"
            )
    if lengths:
        config.update(max_length=min(lengths), max_new_tokens=None)
    if ends:
        config.update(eos_token_id=ends)
    own = config.stop_strings or []
    return (texts or ([own] if isinstance(own, str) else list(own))) + sequences


def _decode(
    model: Model, rows: list[list[int]], streamer: Any, options: Options
) -> list[tuple[int, ...]]:
    """Each row's token ids; the streamer is given them as they are committed, in order."""
    answers: dict[int, tuple[int, ...]] = {}
    slots: dict[int, int] = {}
    sent = 0
    for reveal in stream(model, rows, **options):
        if reveal.generation is not None:
            answers[reveal.row] = reveal.generation.token_ids
        if streamer is None:
            continue
        slots |= dict(reveal.drafts)
        if reveal.generation is not None:
            slots = dict(enumerate(reveal.generation.token_ids))
        fresh = []
        while sent in slots and not (fresh and fresh[-1] in model.eos_token_ids):
            fresh.append(slots[sent])
            sent += 1
        if fresh:
            streamer.put(torch.tensor(fresh))
    if streamer is not None:
        streamer.end()
    return [answers[row] for row in range(len(rows))]


def _config(model: Any, config: GenerationConfig | None, given: dict[str, Any]) -> Any:
    """The settings that hold; refuses what this package has not.

    What a given configuration leaves open is the model's, as in transformers.
    """
    own = model.generation_config.to_dict()
    config = copy.deepcopy(config or model.generation_config)
    assert config is not None
    config.update(**{k: v for k, v in own.items() if getattr(config, k, None) is None})
    usual = GenerationConfig()
    known = config.to_dict().keys() | usual.to_dict().keys()
    for name, value in given.items():
        if name not in known and name not in HARMLESS and value is not None:
            raise ValueError(
                f"{name} is not supported by set block decoding; known are {', '.join(OWN)} and "
                f"{', '.join(SHARED)}"
            )
    asked = {name: value for name, value in given.items() if name in known}
    for name, value in unsupported({**config.to_dict(), **asked}).items():
        raise ValueError(
            f"{name}={value!r} is not supported by set block decoding: leave it out, or decode "
            "token by token without trust_remote_code"
        )
    config.update(**asked)
    return config


def unsupported(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of transformers' settings of generation that ask for what this package has not."""
    standard = GenerationConfig().to_dict()
    return {
        name: value
        for name, value in settings.items()
        if name not in (*SHARED, *HARMLESS, "setblock", "suppress_tokens")
        if value not in (None, False, [], {})
        if not (name in standard and value == standard[name])
        if not (name in _OFF_AT_ONE and value == 1)
    }


# Settings that are off at 1, whatever transformers' default is; others that are 0 are off as well.
_OFF_AT_ONE = (
    *("num_beams", "num_return_sequences", "num_beam_groups", "encoder_repetition_penalty"),
    *("length_penalty", "typical_p", "guidance_scale"),
)


def _wrapped(network: Any, tokenizer: Any, settings: dict[str, Any] | None) -> Model:
    """The network as a Model, made once for these settings; its tokenizer from its own folder where
    none is given.
    """
    known = getattr(network, "_setblock", None)
    if known is None or network._setblock_for != settings:
        name = network.config._name_or_path
        tokenizer = tokenizer or (known and known.tokenizer) or AutoTokenizer.from_pretrained(name)
        known = Model(network, tokenizer, name, settings=copy.deepcopy(settings))
        network._setblock, network._setblock_for = known, copy.deepcopy(settings)
    return copy.copy(known)  # this call's end tokens stay its own
