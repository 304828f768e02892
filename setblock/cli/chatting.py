"""The command that holds a conversation: chat."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from setblock.cli.common import (
    app,
    err,
    load_model,
    refuse_below_one,
    refuse_idle,
    refuse_unsampled,
    refuse_without,
    starting,
    warm_up,
    warn_unfit,
)
from setblock.cli.options import (
    BlockSizeOption,
    Compile,
    CompileOption,
    DeviceOption,
    DtypeOption,
    FrequencyOption,
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
    SeedOption,
    SlideOption,
    SolverOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from setblock.signals import Stopped

if TYPE_CHECKING:
    from setblock.model import Model
    from setblock.prompt_cache import PromptCache

NEW, EXIT, HELP = "/new", "/exit", "/help"


@app.command()
def chat(
    model_name: ModelName,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the first message.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer at most. Default: the context's rest.")
    ] = None,
    mode: ModeOption = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    slide: SlideOption = None,
    lookup: LookupOption = None,
    lenience: LenienceOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    seed: SeedOption = 0,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    compile: CompileOption = Compile.off,
    pack: PackOption = None,
) -> None:
    """Hold a conversation.

    Each line is a message, and /new begins another conversation. Of the next prompt only what is
    new is encoded. Ctrl-C ends an answer or a line, Ctrl-D or /exit the command. Without a
    terminal, lines of stdin are the messages, and Ctrl-C before an answer ends the command.
    """
    refuse_below_one(max_new_tokens=max_new_tokens)
    refuse_unsampled(temperature, top_p=top_p != 1, top_k=top_k, min_p=min_p, seed=seed)
    with starting(model_name):
        from setblock.generation import settings_for
        from setblock.prompt_cache import PromptCache

    model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
    options: dict[str, Any] = {
        "mode": mode and mode.value,
        "solver": solver,
        "block_size": block_size,
        "slide": slide,
        "lookup": lookup,
        "lenience": lenience,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    settings = settings_for(model, **options)
    refuse_idle([settings.mode], solver=solver, block_size=block_size)
    refuse_without(Mode.sbd, [settings.mode], slide=slide)
    told = [] if system is None else [{"role": "system", "content": system}]
    model.in_template([*told, {"role": "user", "content": ""}])  # where there is none
    warn_unfit(model, settings.mode)
    warm_up(model, options)
    cache, turns = PromptCache(model.context_length), list(told)
    for line in _lines():
        if line == EXIT:
            return
        if line == NEW:
            turns = list(told)
            err.print("a new conversation", style="dim")
            continue
        if line == HELP:
            err.print(
                f"{NEW} begins another conversation, {EXIT} or Ctrl-D ends this, Ctrl-C an answer",
                style="dim",
            )
            continue
        if re.fullmatch(r"/\w*", line):
            err.print(f"no command {line}; there are {NEW}, {HELP} and {EXIT}", style="red")
            continue
        turns.append({"role": "user", "content": line})
        try:
            text = _answer(model, turns, max_new_tokens, cache, options)
        except ValueError as error:  # too long, or what a template refuses
            err.print(f"error: {error}; {NEW} begins a new conversation", style="red")
            text = ""
        if text:
            turns.append({"role": "assistant", "content": text})
        else:  # the next message stands in its place
            turns.pop()


def _lines() -> Iterator[str]:
    """What is typed, or stands in stdin, empty lines left out."""
    typed = sys.stdin is not None and sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # arrow keys
            import readline  # noqa: F401
        err.print(f"Ctrl-C ends an answer, Ctrl-D this; {NEW} begins anew", style="dim")
    while True:
        try:
            line = input("> ") if typed else next(iter(sys.stdin or ()))
        except (EOFError, StopIteration):
            if typed:
                print()
            return
        except KeyboardInterrupt as stop:
            if isinstance(stop, Stopped) or not typed:
                raise
            err.print(f"\nCtrl-D or {EXIT} ends this", style="dim")
            continue
        if line := line.strip():
            yield line


def _answer(
    model: "Model",
    turns: list[dict[str, str]],
    max_new_tokens: int | None,
    cache: "PromptCache",
    options: dict[str, Any],
) -> str:
    """The answer, told as it comes; as far as it came before a Ctrl-C."""
    from setblock.generation import encode, settings_for, stream

    [ids] = encode(model, turns)
    room = settings_for(model, **options).room(model.context_length - len(ids))
    limit = max(room, 1) if max_new_tokens is None else max_new_tokens
    begin = time.perf_counter()
    reveals = stream(model, [ids], prompt_cache=cache, max_new_tokens=limit, **options)
    text, first_s, generation = "", None, None
    try:
        for reveal in reveals:
            if first_s is None:
                first_s = time.perf_counter() - begin
            text += reveal.text
            generation = reveal.generation
            print(reveal.text, end="", flush=True)
    except KeyboardInterrupt as stop:
        if isinstance(stop, Stopped):  # SIGTERM ends more than the answer
            raise
    print(flush=True)
    if generation is None:
        err.print("stopped", style="dim")
        return text
    tokens, nfe = generation.num_tokens, generation.nfe
    ending = ", cut off at the limit" if generation.finish_reason == "length" else ""
    ending += "" if text else ": nothing, so that the message is left out"
    err.print(
        f"{tokens} token{'s' * (tokens != 1)} in {nfe} forward{'s' * (nfe != 1)}, "
        f"{generation.tokens_per_forward:.2f} per forward; first after {first_s:.2f} s, all after "
        f"{time.perf_counter() - begin:.2f} s{ending}",
        style="dim",
    )
    return text
