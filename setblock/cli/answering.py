"""The command that answers a prompt: generate."""

import json
import math
import reprlib
import string
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from setblock.cli.common import (
    app,
    busy_note,
    err,
    load_model,
    print_json,
    reading,
    refuse_idle,
    refuse_unsampled,
    refuse_without,
    starting,
    tell_undrafted,
    warm_up,
    warn_unfit,
)
from setblock.cli.options import (
    BiasOption,
    BlockSizeOption,
    BranchesOption,
    Compile,
    CompileOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    FallbackOption,
    FrequencyOption,
    JsonOption,
    LeastOption,
    LenienceOption,
    LookupOption,
    MaskTokenOption,
    MinPOption,
    Mode,
    ModelName,
    ModeOption,
    PackOption,
    PresenceOption,
    RepetitionOption,
    SeedFirstOption,
    SeedOption,
    SeedsOption,
    SlideOption,
    SolverOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)

if TYPE_CHECKING:
    from setblock.model import Model
    from setblock.results import Generation

SLOW_S = 5.0  # of an answer, from which on it is worth saying what else may slow it down


@app.command()
def generate(
    model_name: ModelName,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Behind -- if it begins with a dash. Default: read from stdin, less a line break "
            "at its end.",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The same, spelled out.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File that holds the prompt, less a line break at its end.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON file of a conversation to go on with, [{"role": "system", "content": ...}, '
            '{"role": "user", ...}, ...] or {"messages": [...]}, which goes through the chat '
            "template; - is stdin.",
        ),
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids such as 1,2,3, used as they are.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    mode: ModeOption = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Generated tokens at most. Default: 256, or fewer where the context ends before."
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    logit_bias: BiasOption = None,
    min_new_tokens: LeastOption = 0,
    seed: SeedOption = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")
    ] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file of a JSON Schema that the whole answer has to match; - is stdin. "
            "Decodes in mode verified; in ntp if --mode or the model says so.",
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            help="Regular expression that the whole answer has to match. Decodes in the same modes."
        ),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of a grammar, in llguidance's Lark, that the whole answer has to match; "
            "- is stdin. Decodes in the same modes.",
        ),
    ] = None,
    slide: SlideOption = None,
    next_token_seed: SeedFirstOption = False,
    fallback: FallbackOption = None,
    draft: DraftOption = None,
    branches: BranchesOption = None,
    seeds: SeedsOption = None,
    lookup: LookupOption = None,
    lenience: LenienceOption = None,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    compile: CompileOption = Compile.off,
    pack: PackOption = None,
    show_steps: Annotated[
        bool, typer.Option("--show-steps", help="Show what each forward revealed.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="With --json: tell the log-probability of each token, and of so many of the "
            "likeliest in its place; 0 is of the token alone.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt.

    Seconds count neither loading nor the warm-up (a few tokens to a one-token prompt).
    """
    if logprobs is not None and not as_json:
        raise ValueError(f"--logprobs is for --json, got {logprobs} without it")
    for option, file in (("--json-schema", json_schema), ("--grammar", grammar)):
        sources = (text, prompt, prompt_file, messages, prompt_ids)
        unread = all(one is None for one in sources) or str(messages) == "-"
        if str(file) == "-" and unread:
            raise ValueError(f"{option} - leaves no stdin for the prompt: give PROMPT or a file")
    biases = _read_biases(logit_bias or ())
    asked = _read_prompt(model_name, text, prompt, prompt_file, messages, prompt_ids)
    refuse_unsampled(temperature, top_p=top_p != 1, top_k=top_k, min_p=min_p, seed=seed)
    if prompt_ids and chat:
        raise ValueError(f"--chat is for texts: --prompt-ids {prompt_ids} are used as they are")
    if messages and chat:
        raise ValueError(f"--chat is for texts: --messages {messages} goes through the template")
    schema = None if json_schema is None else _read_schema(json_schema)
    written = None if grammar is None else _read_text("--grammar", grammar)
    with starting(model_name):
        from setblock.generation import encode, settings_for, stream

    model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
    options: dict[str, Any] = {
        "mode": mode.value if mode else None,
        "solver": solver,
        "block_size": block_size,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": biases,
        "min_new_tokens": min_new_tokens,
        "seed": seed,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
        "slide": slide,
        "next_token_seed": next_token_seed or None,
        "fallback": fallback,
        "draft": draft.value if draft else None,
        "branches": branches,
        "seeds": seeds,
        "lookup": lookup,
        "lenience": lenience,
        "json_schema": schema,
        "regex": regex,
        "grammar": written,
        "logprobs": logprobs,
    }
    settings = settings_for(model, **options)
    refuse_idle([settings.mode], solver=solver, block_size=block_size)
    refuse_without(Mode.sbd, [settings.mode], slide=slide)
    if not settings.copies_alone:
        warn_unfit(model, settings.mode)
    ids = encode(model, [asked], chat=chat)
    reveals = stream(model, ids, **options)  # checks the prompt before the first forward
    if mode is None and settings.mode == "ntp" and not model.trained:
        err.print(
            f"{model.name} was never trained for set block decoding: token by token (setblock "
            "speedup trains a faster one; --mode verified --block-size 1 --lookup 8 needs no "
            "training)",
            style="dim",
        )
    tell_undrafted(settings, block_size)
    warm_up(model, {**options, "mode": settings.mode})
    steps, generation = [], None
    try:
        for reveal in reveals:
            steps.append(reveal)
            generation = reveal.generation
            if as_json:
                continue
            if show_steps:
                drafts = ((place, model.piece(token)) for place, token in reveal.drafts)
                pieces = ", ".join(f"{place}:{piece!r}" for place, piece in drafts)
                print(f"forward {reveal.nfe}: {pieces}", flush=True)
            else:  # not through rich, which drops control characters and expands tabs
                print(reveal.text, end="", flush=True)
    except KeyboardInterrupt:
        if steps and not as_json and not show_steps:
            print(flush=True)  # what is said of it has a line of its own
        raise
    assert generation is not None
    if as_json:
        answer = to_json(generation, model)
        if show_steps:
            answer["steps"] = [{"nfe": one.nfe, "drafts": one.drafts} for one in steps]
        print_json(answer)
        return
    print(generation.text if show_steps else "", flush=True)
    plain = not (chat or messages or prompt_ids)
    if not generation.text and plain and model.tokenizer.chat_template is not None:
        err.print(
            f"the answer is empty: {model.name} knows chat turns, and --chat makes the prompt one",
            style="yellow",
        )
    if not generation.text and (chat or messages) and generation.finish_reason == "eos":
        err.print(f"the answer is empty: {model.name} ended its turn at once", style="yellow")
    tokens, nfe = generation.num_tokens, generation.nfe
    if show_steps and any(place >= tokens for one in steps for place, _ in one.drafts):
        err.print(
            f"places from {tokens} on lie past the answer's end and are no part of it", style="dim"
        )
    err.print(
        f"{tokens} token{'s' * (tokens != 1)}, {nfe} forward{'s' * (nfe != 1)}, "
        f"{generation.tokens_per_forward:.2f} tokens per forward, {generation.wall_s:.2f} s, "
        f"of which {generation.prefill_s:.2f} s for the prompt ({generation.finish_reason})",
        style="dim",
    )
    if generation.wall_s > SLOW_S:
        busy_note()


def to_json(generation: "Generation", model: "Model") -> dict[str, Any]:
    """The JSON form of a result; solver, block_size and draft are null where they are not used."""
    from setblock.settings import PENALTIES

    settings = generation.settings
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "num_tokens": generation.num_tokens,
        "nfe": generation.nfe,
        "prefill_forwards": generation.prefill_forwards,
        "tokens_per_forward": generation.tokens_per_forward,
        "tokens": [model.decode([token]) for token in generation.token_ids],
        "reveal_step": generation.reveal_step,
        "entropy": generation.entropy,
        "logprobs": generation.logprobs and [asdict(one) for one in generation.logprobs],
        "wall_s": generation.wall_s,
        "prefill_s": generation.prefill_s,
        "decode_s": generation.decode_s,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "mode": settings.mode,
        "solver": settings.described["solver"],
        "block_size": settings.block_size if settings.mode != "ntp" else None,
        "max_new_tokens": settings.max_new_tokens,
        **asdict(settings.sampler),
        "stop": settings.stop,
        "ignore_eos": settings.ignore_eos,
        "slide": settings.slide,
        "next_token_seed": settings.next_token_seed,
        "fallback": settings.fallback,
        "draft": settings.draft if settings.mode == "verified" else None,
        "branches": settings.branches,
        "seeds": settings.seeds,
        "lookup": settings.lookup,
        "lenience": settings.lenience,
        "json_schema": settings.json_schema and json.loads(settings.json_schema),
        "regex": settings.regex,
        "grammar": settings.grammar,
        **{name: getattr(settings, name) for name in PENALTIES},
        "logit_bias": dict(settings.logit_bias),
        "min_new_tokens": settings.min_new_tokens,
        "model": model.name,
        "mask_token_id": model.mask_token_id,
        "mask_token_source": model.mask_token_source,
        "dtype": str(model.dtype).removeprefix("torch."),
        "packed": model.packed,
        "device": str(model.device),
    }


def _read_biases(given: Iterable[str]) -> dict[int, float]:
    """Raises: ValueError for what is no token id and a number, or an id given twice."""
    found: dict[int, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            number = math.nan if {"_", *string.whitespace} & {*bias} else float(bias)
        except ValueError:
            number = math.nan
        if not (token.isascii() and token.isdecimal() and len(token) < 19) or math.isnan(number):
            got = reprlib.repr(text)
            raise ValueError(f"--logit-bias must be ID=BIAS, such as 42=-5, got {got}")
        if int(token) in found:
            raise ValueError(f"--logit-bias may be given once for a token, got {token} twice")
        found[int(token)] = number
    return found


def _without_break(text: str) -> str:
    """The text without the line break that files and `echo` end in."""
    return text.removesuffix("\n").removesuffix("\r")


def _read_prompt(
    model: str,
    text: str | None,
    prompt: str | None,
    file: Path | None,
    messages: Path | None,
    ids: str | None,
) -> str | list[int] | list[dict[str, str]]:
    sources = {"PROMPT": text, "--prompt": prompt, "--prompt-file": file}
    sources |= {"--messages": messages, "--prompt-ids": ids}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"give one prompt: {' and '.join(given)} exclude each other")
    if ids is not None:
        try:
            return [int(token) for token in ids.split(",")]
        except ValueError:
            raise ValueError(f"--prompt-ids must be numbers such as 1,2,3, got {ids!r}") from None
    if messages is not None:
        return _read_messages(messages)
    if file is not None:
        with reading("--prompt-file", file):
            text = _without_break(file.read_text(encoding="utf-8"))
        if not text:
            raise ValueError(f"no prompt: {file} is empty (--prompt '' is an empty prompt)")
        return text
    text = prompt if text is None else text
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError(
                f"no prompt for MODEL {model}: give PROMPT, --prompt-file, --messages, "
                "--prompt-ids or stdin"
            )
        try:
            text = _without_break(sys.stdin.read())
        except UnicodeDecodeError as error:
            raise ValueError(f"the prompt on stdin is not UTF-8: {error}") from None
        if not text:
            raise ValueError(
                f"no prompt for MODEL {model}: stdin is empty (--prompt '' is an empty prompt)"
            )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # what is no UTF-8 came as half of a surrogate pair each
        byte, place = ord(text[error.start]) & 0xFF, error.start
        raise ValueError(
            f"the prompt is not UTF-8: byte 0x{byte:02x} behind {place} characters"
        ) from None
    return text


def _read_text(option: str, file: Path) -> str:
    """What the file of an option holds; "-" is stdin."""
    with reading(option, file):
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")


def _read_schema(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_text("--json-schema", file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--json-schema {file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--json-schema {file} must hold a JSON Schema, an object")
    return found


def _read_messages(file: Path) -> list[dict[str, str]]:
    """A conversation, by itself or as the messages of an object; "-" is stdin."""
    try:
        found = json.loads(_read_text("--messages", file))
    except json.JSONDecodeError as error:
        raise ValueError(f"--messages {file} is not one JSON list: {error}") from None
    if isinstance(found, dict):  # a row of data, a request
        found = found.get("messages")
    if not (isinstance(found, list) and found and all(isinstance(one, dict) for one in found)):
        raise ValueError(
            f"--messages {file} must hold one JSON list of messages, role and content each"
        )
    return found
