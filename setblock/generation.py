"""Prompts in, text out: options, what they ask of a model, and batches of answers."""

import copy
import json
import logging
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from setblock.branches import SURE
from setblock.grammar import Grammar, compiled
from setblock.masks import MOST_SLOTS
from setblock.model import Conversation, Model
from setblock.names import ModelError
from setblock.prompt_cache import PromptCache
from setblock.results import Generation, Reveal
from setblock.running import Answer, to_their_ends
from setblock.sampling import Sampler
from setblock.settings import BIASES, FORMATS, PENALTIES, Settings
from setblock.solvers import Solver, parse

log = logging.getLogger(__name__)

ONE_SHOT = "entropy:inf"  # the solver that fills a block in one forward

# A text, a conversation, or several prompts: texts, conversations or lists of token ids.
Prompts = str | Conversation | Sequence[str | Conversation | Sequence[int]]


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; None or absent means the checkpoint's default.

    mode: "sbd", "ntp" or "verified". solver: a Solver or its text, such as "entropy:0.35".
    block_size: slots of a block. max_new_tokens: default 256, or what the context leaves a row.
    temperature: default 0, greedy. top_p, top_k, min_p: default off. seed: of the sampling noise.
    stop: texts that end a row.
    ignore_eos: generate on past EOS.
    slide, next_token_seed, fallback: of mode "sbd"; draft, branches, seeds, lookup, lenience: of
    mode "verified"; see settings.Settings.
    json_schema, regex, grammar: what the whole answer has to look like, at most one of them; a
    schema as its text or the object. repetition_penalty, presence_penalty, frequency_penalty: of
    tokens that the text has; default off. logit_bias: {token id: what is added to its logit}.
    min_new_tokens: before an end token. With any of these eight, decodes in mode "verified" where
    the mode would be "sbd" by itself.
    logprobs: tell the log-probability of each token, and of so many of the likeliest in its place.
    """

    mode: str | None
    solver: Solver | str | None
    block_size: int | None
    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    slide: bool | None
    next_token_seed: bool
    fallback: float | None
    draft: str
    branches: int | None
    seeds: int
    lookup: int | None
    lenience: float
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    min_new_tokens: int
    logprobs: int | None


# Options that other libraries' generation has as well, by whatever name; the others are ours alone.
COMMON = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop",
    "ignore_eos", "min_new_tokens", "logprobs",
)  # fmt: skip
OWN = tuple(name for name in Options.__annotations__ if name not in COMMON)


DRAWS = ("temperature", "top_p", "top_k", "min_p", "seed")  # options of the sampler
BLOCKS = {"solver", "block_size", "slide", "next_token_seed", "fallback"}  # options of mode "sbd"


def settings_for(model: Model, rows: int = 1, **options: Unpack[Options]) -> Settings:
    """The options as `Settings`, what is absent taken from the checkpoint.

    Mode "verified": what is absent of draft, block_size, branches and seeds is what is quickest by
    the arithmetic of `roofline.best_spending`, for `rows` rows decoded together, unless the
    checkpoint says it, as after `setblock tune`. A lookup that the checkpoint says without a block
    size is left out where copies do not pay. A model that was never trained for blocks has them
    only where an option of theirs is given. Solver and block size may come with mode "ntp", which
    uses neither, so that modes can be compared by the same options.
    Raises: ValueError naming the option, its value and what is allowed; TypeError for a name that
    is no option.
    """
    if unknown := set(options) - set(Options.__annotations__):
        raise TypeError(
            f"unknown options {sorted(unknown)}; known: {sorted(Options.__annotations__)}"
        )
    typed = {k: v for k, v in options.items() if v is not None}
    if isinstance(schema := typed.get("json_schema"), Mapping):
        try:
            told = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
            typed["json_schema"] = told
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"json_schema must be JSON: {error}") from None
    if (bias := typed.get("logit_bias")) is not None:
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias must be a dict of token ids and numbers, got {bias!r}")
        typed["logit_bias"] = tuple(bias.items())
    given = {**model.defaults, **typed}
    idle = {name for name in typed.keys() & BLOCKS if typed[name] is not False}
    if "mode" not in typed and not model.chooses_mode and idle:
        given["mode"] = "sbd"
    by_token = [name for name in FORMATS if name in typed]
    neutral = PENALTIES | BIASES
    by_token += [name for name in neutral if typed.get(name, neutral[name]) != neutral[name]]
    if by_token and "mode" not in typed and given["mode"] == "sbd":
        given["mode"] = "verified"
        if own := idle - {"block_size"} - ({"solver"} if typed.get("draft") == "solver" else set()):
            raise ValueError(
                f"{min(own)} is for mode sbd, in which {by_token[0]} can't be used: leave one of "
                f"them out; got {typed[min(own)]} and {by_token[0]} "
                f"{reprlib.repr(options[by_token[0]])}"
            )
    if given["mode"] == "ntp" and "mode" not in typed and idle:
        raise ValueError(
            f"{min(idle)} is for decoding in blocks, and {model.name} decodes in mode ntp unless "
            f"another is asked for; got {typed[min(idle)]} and no mode"
        )
    if given["mode"] == "verified" and given.get("draft", "branches") == "branches":
        if "solver" in typed:
            raise ValueError(
                "solver is for mode 'sbd', and for mode 'verified' with draft 'solver', got "
                f"{typed['solver']} in mode 'verified' with draft 'branches'"
            )
        given |= {**model.drafting, **typed}
        tuned = "block_size" in model.drafting
        if "lookup" not in typed and not tuned and model.worth(rows) >= SURE:
            given["lookup"] = 0
        fixed_size = tuned or "block_size" in typed
        drafting = "draft" in typed or given.get("lenience", 1) != 1
        given |= _spending(model, given, rows, fixed_size, one_forward=drafting)
    if given["mode"] == "sbd" and model.slides and "slide" not in typed:
        if "fallback" in typed:
            raise ValueError(
                f"fallback is for whole blocks, and those of {model.name} slide unless slide is "
                f"False (--no-slide); got {typed['fallback']!r}"
            )
        given["slide"] = True
    solver = given.pop("solver")
    stop = given.pop("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    draws = {name: given.pop(name) for name in DRAWS if name in given}
    try:
        rule = parse(solver) if isinstance(solver, str) else solver
    except ValueError as error:
        if "solver" in typed:
            raise
        raise ValueError(
            f"the solver that {model.name} names by itself: {error}; a rule of your own is made "
            "known by setblock --import FILE.py"
        ) from error
    return Settings(
        solver=rule,
        sampler=Sampler(**draws),
        stop=tuple(stop) if isinstance(stop, Iterable) else stop,
        **given,
    )


def unfit(model: Model, mode: str) -> str | None:
    """What to expect of a model in a mode that it is not made for; None where it is."""
    if mode != "ntp" and not model.trained:
        expect = "poor text" if mode == "sbd" else "no speed-up but from copies (lookup)"
        return (
            f"{model.name} was never trained for set block decoding; expect {expect} in mode "
            f"{mode} (ntp is unaffected)"
        )
    if mode == "sbd" and model.gated:
        return (
            f"{model.name} is a gated adapter, made to draft: in mode sbd nothing corrects its "
            "drafts; expect worse text"
        )
    return None


def _spending(
    model: Model, given: dict[str, Any], rows: int, fixed_size: bool, one_forward: bool
) -> dict[str, Any]:
    """draft, block_size, branches and seeds: those given, and the quickest of what is not."""
    size, branches, seeds = given["block_size"], given.get("branches"), given.get("seeds")
    # What is no number, or too small or large a one, is refused by Settings, by name.
    for value, least in ((size, 1), (branches, 1), (seeds, 0)):
        if value is not None and (type(value) is not int or value < least):
            return {}
    if size > MOST_SLOTS:
        return {}
    fixed = {"branches": branches, "seeds": seeds, "fixed_size": fixed_size}
    # Forwards of pairs copy nothing, and need no bound where a checkpoint asks for copies.
    pairs = not (given.get("lookup") or model.drafting.get("lookup"))
    best = model.best_spending(size, rows, **fixed, one_forward=one_forward, pairs=pairs)
    if best.branches == 0:
        return {"block_size": best.block_size, "draft": "solver", "solver": ONE_SHOT}
    branches = branches or best.branches
    return {"block_size": best.block_size, "branches": branches, "seeds": best.seeds}


def generate(
    model: Model,
    prompts: Prompts,
    *,
    chat: bool = False,
    batch_size: int | None = None,
    prompt_cache: PromptCache | None = None,
    **options: Unpack[Options],
) -> list[Generation]:
    """One `Generation` per prompt, in the order given.

    prompts: texts, conversations (lists of {"role": ..., "content": ...}, which go through the
    chat template), or lists of token ids, which are used as they are.
    chat: put each text into the tokenizer's chat template as a user's turn.
    batch_size: rows decoded together at most, None for all; as some end, others take their places.
    The tokens do not depend on it.
    prompt_cache: what earlier calls with it have encoded, of prompts that begin alike, is not
    encoded again, and this call's is added. Of one prompt, or with batch_size 1.
    Raises: ValueError for options out of range, and, before any forward, for an empty prompt of a
    model without BOS or one that leaves too little room in the model's context.
    """
    ids = encode(model, prompts, chat)
    reveals = _stream(model, ids, batch_size, options, text=False, prompt_cache=prompt_cache)
    results = dict(_ended(reveals))
    return [results[row] for row in range(len(ids))]


def finished(
    model: Model,
    ids: list[list[int]],
    batch_size: int | None = None,
    skip: Collection[int] = (),
    **options: Unpack[Options],
) -> Iterator[tuple[int, Generation]]:
    """(row, its result) of every row as it ends.

    ids: as `encode` gives them.
    skip: rows that need no answer.
    """
    return _ended(_stream(model, ids, batch_size, options, text=False, skip=skip))


def _ended(reveals: Iterator[Reveal]) -> Iterator[tuple[int, Generation]]:
    return ((reveal.row, reveal.generation) for reveal in reveals if reveal.generation is not None)


def stream(
    model: Model,
    prompts: Prompts,
    *,
    chat: bool = False,
    batch_size: int | None = None,
    prompt_cache: PromptCache | None = None,
    **options: Unpack[Options],
) -> Iterator[Reveal]:
    """Every row's tokens and text, forward by forward; arguments and errors as for `generate`.

    What a prompt_cache gets of an answer that is not taken to its end it has once the iterator is
    closed.
    """
    ids = encode(model, prompts, chat)
    return _stream(model, ids, batch_size, options, text=True, prompt_cache=prompt_cache)


def _stream(
    model: Model,
    ids: list[list[int]],
    batch_size: int | None,
    options: Options,
    text: bool,
    skip: Collection[int] = (),
    prompt_cache: PromptCache | None = None,
) -> Iterator[Reveal]:
    """text: whether each piece of a text is wanted, or its end alone."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    size = max(min(batch_size or len(ids), len(ids)), 1)
    if not isinstance(prompt_cache, PromptCache | None):
        raise ValueError(f"prompt_cache must be a setblock.PromptCache, got {prompt_cache!r}")
    if prompt_cache is not None and size > 1:
        raise ValueError(
            f"prompt_cache is for one row at a time: batch_size must be 1, got {size} rows together"
        )
    settings, grammar = checked(model, ids, size, options)
    in_pieces = text or bool(settings.stop)
    rows = [row for row in range(len(ids)) if row not in skip]
    if size > 1:  # those of like length, so that little is padded; longest first: memory fits
        rows.sort(key=lambda row: -len(ids[row]))
    answers = [Answer(row, ids[row], model, settings, row, in_pieces, grammar) for row in rows]
    return to_their_ends(answers, size, prompt_cache)


def checked(
    model: Model, ids: list[list[int]], rows: int, options: Options
) -> tuple[Settings, Grammar | None]:
    """(the settings, the grammar of each answer, if any) of these prompts, before any forward.

    rows: how many are decoded together.
    Effects: warns of a mode that the model is not made for, once.
    Raises: ValueError, see `generate`.
    """
    settings = settings_for(model, rows, **options)
    if settings.mode not in model.told and not settings.copies_alone:
        model.told.add(settings.mode)
        if why := unfit(model, settings.mode):
            log.warning("%s", why)
    for stop in settings.stop:
        if special := [token for token in model.special_tokens if token in stop]:
            raise ValueError(
                f"stop text {stop!r} holds the special token {special[0]!r}, which is never part "
                "of the text: the model's EOS ends an answer anyway"
            )
        if "\ufffd" in stop:
            raise ValueError(f"stop text {stop!r} holds U+FFFD, which stands for half a character")
    if (least := settings.min_new_tokens) > (most := settings.max_new_tokens):
        raise ValueError(
            f"min_new_tokens must be at most {most}, the new tokens that there may be, got {least}"
        )
    if unknown := [token for token, _ in settings.logit_bias if token >= model.vocab_size]:
        raise ValueError(
            f"logit_bias must be of token ids below {model.vocab_size}, the vocabulary of "
            f"{model.name}, got {unknown[0]}"
        )
    for row, prompt in enumerate(ids):
        _check_prompt(model, row, prompt, settings, options.get("max_new_tokens") is None)
    return settings, compiled(model, settings)


def ending_at(model: Model, stop: Iterable[str]) -> tuple[Model, list[str]]:
    """(the model, ending also at special tokens among these stop texts; the other texts).

    A special token is no part of a text: it ends an answer as EOS does, but for the mask token,
    which is never said.
    """
    texts = list(stop)
    named = [text for text in texts if text in model.special_tokens]
    ids: Any = model.tokenizer.convert_tokens_to_ids(named)
    ending = copy.copy(model)
    ending.eos_token_ids = (model.eos_token_ids | frozenset(ids)) - {model.mask_token_id}
    return ending, [text for text in texts if text not in named]


def encode(model: Model, prompts: Prompts, chat: bool = False) -> list[list[int]]:
    """Token ids of each prompt."""
    if not isinstance(model, Model):
        raise TypeError(f"model must be one that setblock.load() gave, got {model!r}")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be texts, or lists of messages or of ids, got {prompts!r}")
    several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if several and isinstance(several[0], Mapping):
        several = [several]
    ids: list[list[int]] = []
    for prompt in several:
        if isinstance(prompt, str):
            ids.append(model.encode(prompt, chat=chat))
        elif isinstance(prompt, Sequence) and all(type(token) is int for token in prompt):
            if chat:
                raise ValueError("chat=True needs text prompts: token ids are used as they are")
            ids.append(list(prompt))
        elif isinstance(prompt, Sequence) and all(isinstance(turn, Mapping) for turn in prompt):
            try:
                ids.append(model.encode(prompt))
            except ModelError as error:
                raise ModelError(f"prompt {len(ids)}: {error}") from None
        else:
            raise ValueError(
                f"prompt {len(ids)} must be a text, a list of messages or a list of token ids, got "
                f"{prompt!r}" + "; one prompt of ids goes in a list too" * (type(prompt) is int)
            )
    return ids


class TooLong(ValueError):
    """A prompt that leaves no room, in the model's context, for the answer that was asked for."""


def _check_prompt(
    model: Model, row: int, prompt: Sequence[int], settings: Settings, shortens: bool
) -> None:
    """shortens: whether an answer may end before max_new_tokens, at the end of the context."""
    if not prompt:
        raise ValueError(f"prompt {row} is empty: decoding needs at least one token")
    if other := next((token for token in prompt if not 0 <= token < model.vocab_size), None):
        raise ValueError(
            f"prompt {row} holds a token id outside 0..{model.vocab_size - 1}, {other}"
        )
    if model.mask_token_id in prompt:
        raise ValueError(
            f"prompt {row} holds the mask token {model.mask_token_id}, "
            f"{model.tokenizer.convert_ids_to_tokens(model.mask_token_id)!r}, which stands for "
            "what is yet to be generated: leave it out, or name another by mask_token_id"
        )
    if len(prompt) >= model.context_length:
        raise TooLong(
            f"prompt {row} has {len(prompt)} tokens and leaves no room for an answer in the "
            f"model's context of {model.context_length} tokens{model.context_note}"
        )
    most = settings.room(model.context_length - len(prompt))
    if shortens and not most:
        raise TooLong(
            f"prompt {row} has {len(prompt)} tokens and leaves no room for a block of "
            f"{settings.stride} in the model's context of {model.context_length} "
            f"tokens{model.context_note}"
        )
    if settings.num_slots > most and not shortens:
        limit = f"max_new_tokens={settings.max_new_tokens}"
        if settings.num_slots > settings.max_new_tokens:
            limit += f" ({settings.num_slots} in whole blocks of {settings.block_size})"
        raise TooLong(
            f"prompt {row} has {len(prompt)} tokens; with {limit} "
            f"it exceeds the model's context of {model.context_length} tokens{model.context_note}"
            + (f": at most {most} new ones fit behind it" if most > 0 else "")
        )
