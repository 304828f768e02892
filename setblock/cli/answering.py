"""Commands that answer prompts: generate, demo; and info."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from setblock.cli.common import (
    DECODING,
    BlockSizeOption,
    BranchesOption,
    Compile,
    CompileOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    FallbackOption,
    JsonOption,
    LenienceOption,
    LookupOption,
    MaskTokenOption,
    Mode,
    ModelName,
    ModeOption,
    PackOption,
    SeedFirstOption,
    SeedOption,
    SeedsOption,
    SlideOption,
    SolverOption,
    Switch,
    TemperatureOption,
    TopKOption,
    TopPOption,
    app,
    busy_note,
    err,
    load_model,
    out,
    print_json,
    refuse_idle,
    refuse_without,
    starting,
    tell_undrafted,
    warm_up,
    warn_unfit,
)

if TYPE_CHECKING:
    from setblock.generation import Generation
    from setblock.model import Model

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
    seed: SeedOption = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")
    ] = False,
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
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt.

    Seconds count neither loading nor the warm-up (a two-token answer to a one-token prompt).
    """
    asked = _read_prompt(model_name, text, prompt, prompt_file, messages, prompt_ids)
    if messages and chat:
        raise ValueError(f"--chat is for texts: --messages {messages} goes through the template")
    with starting(model_name):
        from setblock.generation import encode, settings_for, stream

    model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
    options: dict[str, Any] = {
        "mode": mode.value if mode else None,
        "solver": solver,
        "block_size": block_size,
        "max_new_tokens": 256 if max_new_tokens is None else max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
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
    }
    settings = settings_for(model, **options)
    refuse_idle([settings.mode], solver=solver, block_size=block_size)
    refuse_without(Mode.sbd, [settings.mode], slide=slide)
    if not settings.copies_alone:
        warn_unfit(model, settings.mode)
    ids = encode(model, [asked], chat=chat)
    room = (model.context_length - len(ids[0])) // settings.stride * settings.stride
    if max_new_tokens is None and 0 < room < settings.max_new_tokens:
        options["max_new_tokens"] = room
        settings = settings_for(model, **options)
    reveals = stream(model, ids, **options)  # checks the prompt before the first forward
    if mode is None and settings.mode == "ntp" and not model.trained:
        err.print(
            f"{model.name} was never trained for set block decoding: token by token (setblock "
            "speedup trains a faster one; --mode verified --block-size 1 --lookup 8 needs no "
            "training)",
            style="dim",
        )
    tell_undrafted(settings, block_size)
    warm_up(model, options)
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


@app.command()
def info(
    model_name: ModelName,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's architecture, an adapter's base, the mask token, and what it decodes by."""
    model = load_model(model_name, dtype, device, mask_token_id, pack=Switch.off)
    config = model.network.config
    facts = {
        "model": model.name,
        "base": model.base,
        "adapter": model.base and ("gated" if model.gated else "lora"),
        "architecture": type(model.network).__name__,
        "parameters": model.num_parameters,
        "layers": config.num_hidden_layers,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "mask_token_id": model.mask_token_id,
        "mask_token_source": model.mask_token_source,
        "eos_token_ids": sorted(model.eos_token_ids),
        "sbd_trained": model.trained,
        **{f"default_{name}": value for name, value in model.defaults.items()},
        "acceptance": model.acceptance,
        "acceptance_source": "the checkpoint's" if model.acceptance_is_known else "assumed",
        "slide": model.slides,
        "verified": model.drafting or None,
    }
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    shown = {"parameters": ",", "acceptance": ".2f"}
    drafting = "chosen by arithmetic; setblock tune measures"
    if model.drafting:
        drafting = ", ".join(f"{name} {value}" for name, value in model.drafting.items())
    for name, value in {**facts, "verified": drafting}.items():
        told = format(value, shown[name]) if name in shown else str(value)
        if value is not None:  # as of a model without a base
            table.add_row(name, told)
    out.print(table)


# For a bundled model that was not trained on our own problems.
QUESTIONS = {
    "smollm2": [
        "A baker fills 6 trays with 8 rolls each and sells 30 of them. How many rolls are left?",
        "Mia reads 12 pages a day for a week and 5 pages more on Sunday. How many pages is that?",
        "What is the capital of France, and what is it known for?",
    ]
}


@app.command()
def demo(
    model_name: Annotated[str, typer.Option("--model", help="Which model answers.")] = "nano",
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Ask this instead of the built-in problems; may be given again."),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            help="May be given again. Default: ntp and the model's own, or sbd.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    slide: SlideOption = None,
    seed: Annotated[int, typer.Option(help="Other built-in problems.")] = 0,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Show tokens as forwards reveal them.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Watch a model answer prompts by each mode: token by token, then by set block decoding.

    `--model smollm2` is SmolLM2-135M-Instruct with an adapter; `make demo-smollm2` installs it.
    """
    with starting(model_name):
        from setblock import live as show
        from setblock import nano
        from setblock.records import machine_of, new_record

    model = load_model(model_name, None, None, None)
    own_mode = Mode(model.defaults["mode"])
    blocks = Mode.sbd if own_mode == Mode.ntp else own_mode
    modes = list(dict.fromkeys(mode or (Mode.ntp, blocks)))
    refuse_without(Mode.sbd, modes, solver=solver, slide=slide)
    refuse_idle(modes, block_size=block_size)
    for one in modes:
        warn_unfit(model, one)
    problems = []
    prompts = prompt or QUESTIONS.get(model.name)
    if prompts is None:
        problems = [nano.problems(name, "test", 1, seed)[0] for name in nano.FAMILIES]
        prompts = [problem.prompt for problem in problems]
    elif seed:
        raise ValueError(f"--seed chooses among our own problems, got {seed} for other prompts")
    for one in modes:
        own = {"solver": solver, "slide": slide} if one == Mode.sbd else {}
        warm_up(model, {"mode": one.value, "block_size": block_size, **own})
    if not as_json and out.is_terminal:
        out.print("A token's colour is that of the forward that revealed it.", style="dim")
    answers = []
    for number, question in enumerate(prompts):
        if not as_json:
            out.rule(Text(f"{number + 1} of {len(prompts)}", style="bold"))
            out.print(question, style="bold")
        for one in modes:
            options: dict[str, Any] = {"mode": one, "block_size": block_size}
            if one == Mode.sbd:
                options |= {"solver": solver, "slide": slide}
            console = None if as_json else out

            def remark(generation: "Generation", number: int = number) -> str:
                right = nano.check(problems[number], generation.text) if problems else None
                return "" if right is None else "right, " if right else "wrong, "

            generation = show.watch(model, question, options, console, live, remark)
            right = nano.check(problems[number], generation.text) if problems else None
            answers.append({"prompt": question, "correct": right, **to_json(generation, model)})
    totals = [show.total(answers, one) for one in modes]
    if as_json:
        facts = new_record() | {"machine": machine_of(model.device)}
        del facts["results"]
        print_json({**facts, "model": model.name, "answers": answers, "totals": totals})
        return
    out.print(show.table(totals))
    busy_note()


def to_json(generation: "Generation", model: "Model") -> dict[str, Any]:
    """The JSON form of a result; solver, block_size and draft are null where they are not used."""
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
        "wall_s": generation.wall_s,
        "prefill_s": generation.prefill_s,
        "decode_s": generation.decode_s,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "mode": settings.mode,
        "solver": str(settings.solver) if settings.uses_solver else None,
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
        "model": model.name,
        "mask_token_id": model.mask_token_id,
        "mask_token_source": model.mask_token_source,
        "dtype": str(model.dtype).removeprefix("torch."),
        "packed": model.packed,
        "device": str(model.device),
    }


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
        try:
            text = _without_break(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {file} is not UTF-8: {error}") from error
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
        if not (text := _without_break(sys.stdin.read())):
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


def _read_messages(file: Path) -> list[dict[str, str]]:
    """A conversation, by itself or as the messages of an object; "-" is stdin."""
    try:
        told = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        found = json.loads(told)
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"--messages {file} is not one JSON list: {error}") from None
    if isinstance(found, dict):  # a row of data, a request
        found = found.get("messages")
    if not (isinstance(found, list) and found and all(isinstance(one, dict) for one in found)):
        raise ValueError(
            f"--messages {file} must hold one JSON list of messages, role and content each"
        )
    return found
