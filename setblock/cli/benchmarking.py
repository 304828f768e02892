"""Commands that measure wall clock: benchmark, profile."""

import os
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from setblock.cli.common import (
    app,
    busy_note,
    err,
    load_model,
    print_json,
    print_table,
    refuse_below_one,
    refuse_idle,
    refuse_repeated,
    refuse_solvers,
    refuse_without,
    rows_of,
    starting,
    tell_undrafted,
    warn_unfit,
)
from setblock.cli.options import (
    DECODING,
    LENIENCE_HELP,
    LOOKUP_HELP,
    SOLVERS_HELP,
    VERIFIED,
    BlockSizeOption,
    Compile,
    CompileOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaskTokenOption,
    Mode,
    ModelName,
    PackOption,
    SlideOption,
    SolverOption,
    Switch,
)
from setblock.scores import percent

TaskOption = Annotated[
    str | None,
    typer.Option(help="Whose prompts, with --data. Default: those of the bundled model."),
]
DataOption = Annotated[str | None, typer.Option(help="The task's rows, as for `evaluate`.")]


@app.command()
def benchmark(
    model_name: ModelName,
    task: TaskOption = None,
    data: DataOption = None,
    limit: Annotated[int, typer.Option(help="Prompts.")] = 8,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Prompts answered together; may be given again. Default: 1."),
    ] = None,
    prompt_length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens that prompts are brought to, by their own tokens over and over in front; "
            "may be given again. Default: as they are."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Let every answer take --max-new-tokens, ends ignored."),
    ] = False,
    repeats: Annotated[int, typer.Option(help="Timed rounds, after one that warms up.")] = 5,
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers/--no-transformers", help="Let transformers' own decoding take part."
        ),
    ] = True,
    vllm: Annotated[
        bool | None,
        typer.Option(
            "--vllm/--no-vllm",
            help="Let vLLM take part, token by token. Default: if it is installed and can.",
        ),
    ] = None,
    cached: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens in the cache of the timed forwards; may be given again. Default: 128 and "
            "512."
        ),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            help="May be given again; ntp, which speed-ups are against, is always there. Default: "
            "all three.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    solver: Annotated[
        list[str] | None,
        typer.Option(help=f"May be given again. {SOLVERS_HELP}", rich_help_panel=DECODING),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of a block; may be given again. Default: the checkpoint's.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    slide: SlideOption = None,
    lenience: Annotated[
        list[float] | None,
        typer.Option(
            help=f"May be given again, for one more contender each. {LENIENCE_HELP}",
            rich_help_panel=VERIFIED,
        ),
    ] = None,
    lookup: Annotated[
        list[int] | None,
        typer.Option(
            help=f"May be given again, for a contender each. {LOOKUP_HELP}",
            rich_help_panel=VERIFIED,
        ),
    ] = None,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    compile: CompileOption = Compile.off,
    pack: PackOption = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the record to this JSON file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time token-by-token, set block and verified decoding beside transformers' own, and vLLM's.

    All answer the same prompts greedily, with the same weights (transformers' as it loads them,
    in a second copy where ours are packed), in turns: first a round that warms
    up, then the timed ones. Speed-ups are of seconds per token against our own token-by-token
    decoding of the same round; the median, least and most stand in the table. Besides, single
    forwards of 1, k and 2k tokens are timed; with one prompt at a time, the ceiling of a speed-up
    is what a run's forwards would take by themselves. Stopped by Ctrl-C or SIGTERM, it keeps the
    rounds that were whole in the file that --out names.
    """
    sizes = batch_size or [1]
    refuse_below_one(batch_size=sizes, prompt_length=prompt_length, limit=limit, repeats=repeats)
    refuse_repeated(
        batch_size=batch_size,
        block_size=block_size,
        lenience=lenience,
        lookup=lookup,
        cached=cached,
    )
    if max(sizes) > limit:
        raise ValueError(f"--batch-size {max(sizes)} takes more prompts than --limit {limit}")
    if max_new_tokens < 2:
        raise ValueError("--max-new-tokens must be at least 2: the first is the prompt's forward's")
    if min(cached or [0]) < 0:
        raise ValueError(f"--cached must be at least 0, got {min(cached or [0])}")
    modes = tuple(dict.fromkeys(mode or Mode))
    refuse_without(Mode.sbd, modes, solver=solver or None, slide=slide)
    refuse_without(Mode.verified, modes, lenience=lenience or None, lookup=lookup or None)
    refuse_idle(modes, block_size=block_size[0] if block_size else None)
    with starting(model_name):
        from setblock import benchmark as measure
        from setblock import contenders, machines
        from setblock.generation import encode, settings_for
        from setblock.live import spinner
        from setblock.plan import beside_measured
        from setblock.records import Journal, machine_of
        from setblock.roofline import DISPATCH_S

    refuse_solvers(solver)
    texts = _texts(task, data, limit)
    request = {"model": model_name, "task": task, "data": data, "limit": limit, "repeats": repeats}
    request |= {"mode": mode, "transformers": transformers}
    request |= {"batch_size": batch_size, "prompt_length": prompt_length, "cached": cached}
    request |= {"ignore_eos": ignore_eos, "solver": solver, "block_size": block_size}
    request |= {"compile": compile.value, "pack": pack and pack.value, "lenience": lenience}
    request |= {"lookup": lookup, "slide": slide}
    journal = Journal(request | {"max_new_tokens": max_new_tokens}, out_file, resume=None)
    model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
    journal.record["machine"] = machine_of(model.device)
    for one in modes:
        warn_unfit(model, one)
    if ignore_eos:
        model.eos_token_ids = frozenset()
    blocks = [  # bad values are refused here
        settings_for(model, mode="sbd", solver=rule, block_size=one, slide=slide)
        for rule in solver or [None]
        for one in block_size or [None]
    ]
    wide = {one.block_size for one in blocks}
    size = max(wide)
    for one, each, copies, rows in product(
        lenience or [1], block_size or [None], lookup or [None], sizes
    ):
        if Mode.verified in modes:
            given: dict[str, Any] = {"lenience": one, "block_size": each, "lookup": copies}
            tell_undrafted(settings_for(model, rows, mode="verified", **given), each, rows)
    chat = model.tokenizer.chat_template is not None
    ids = encode(model, texts, chat)
    if (rows := max(sizes)) > len(ids):
        raise ValueError(f"--batch-size {rows} is more than the {len(ids)} prompts there are")
    room = model.context_length
    for name, most, more in (
        ("cached", max(cached or [0]), 2 * size),
        ("prompt-length", max(prompt_length or [0]), -(-max_new_tokens // size) * size),
    ):
        if most + more > room:
            raise ValueError(
                f"--{name} {most} with {more} tokens behind it exceeds the model's context of "
                f"{room} tokens"
            )
    record = journal.record
    dimensions = machines.dimensions_of(model.network.config)
    record["dimensions"] = asdict(dimensions)
    record |= {"dtype": str(model.dtype).removeprefix("torch."), "packed": model.packed}
    record |= {"chat": chat, "slide": Mode.sbd in modes and blocks[0].slide, "forwards": []}
    longest = max(prompt_length or map(len, ids))
    stock = None  # what transformers itself would decode with
    if model.packed and transformers:
        plain = load_model(model_name, dtype, device, mask_token_id, pack=Switch.off)
        stock = plain.network
    with ExitStack() as running:
        engine = None
        missing = contenders.vllm_missing(model)
        if vllm and missing:
            raise ValueError(f"--vllm: vLLM can't take part, {missing}")
        if vllm is not False and not missing:
            with err.status("vLLM starts"):
                started = contenders.vllm(model, longest, max(sizes), max_new_tokens)
                engine = running.enter_context(started)
        elif vllm is None:
            record["vllm"] = f"left out: {missing}"
        for length in prompt_length or [None]:
            prompts = [measure.stretched(one, length) for one in ids]
            for batch in sizes:
                rivals = contenders.contenders(
                    batch,
                    solver or (),
                    block_size or (),
                    stock,
                    lenience or (),
                    modes,
                    transformers,
                    lookup or (),
                    slide,
                )
                if engine is not None:
                    rivals["vllm"] = engine
                title = f"{len(prompts)} prompts, batches of {batch}"
                with spinner(err, title) as update:

                    def begun(
                        repeat: int, name: str, update: Any = update, title: str = title
                    ) -> None:
                        turn = f"round {repeat} of {repeats}" if repeat else "warming up"
                        update(f"{title}: {turn}, {name}")

                    for line in measure.compare(
                        model, prompts, batch, max_new_tokens, repeats, rivals, begun
                    ):
                        journal.finish({"task": "benchmark", "model": model.name, **line})
    machine = machines.device_of(model.device, model.dtype)
    for batch in sizes:
        with err.status(Text(f"single forwards, batches of {batch}")):
            lengths = cached or [n for n in (128, 512) if n + 2 * size <= room] or [0]
            queries = sorted({1, *wide, *(2 * one for one in wide)})
            costs = measure.forward_costs(model, lengths, queries, batch, repeats)
            record["forwards"] += beside_measured(dimensions, machine, list(costs), DISPATCH_S)
    journal.save()
    if as_json:
        print_json(record)
        return
    print_table(_contenders(record["results"]))
    print_table(_forwards(record["forwards"]))
    busy_note()


@app.command()
def profile(
    model_name: ModelName,
    task: TaskOption = None,
    data: DataOption = None,
    limit: Annotated[int, typer.Option(help="Prompts, answered one by one.")] = 3,
    prompt_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens that prompts are brought to, by their own over and over in front."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 2,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(help="May be given again. Default: all three.", rich_help_panel=DECODING),
    ] = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    slide: SlideOption = None,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    compile: CompileOption = Compile.off,
    pack: PackOption = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the record to this JSON file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Where the time of decoding goes: attention, linear layers, head, solver, cache, Python.

    Shares of the wall clock from torch's profiler, of the prompts' own forwards too. Being watched
    takes time itself, most of all where operations are small; the table says how much.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines
    refuse_below_one(limit=limit, repeats=repeats, max_new_tokens=max_new_tokens)
    refuse_below_one(prompt_length=prompt_length)
    modes = mode or [Mode.ntp, Mode.sbd, Mode.verified]
    refuse_without(Mode.sbd, modes, solver=solver, slide=slide)
    refuse_idle(modes, block_size=block_size)
    with starting(model_name):
        from setblock import benchmark as measure
        from setblock import profiling
        from setblock.generation import encode, settings_for
        from setblock.records import Journal, machine_of

    texts = _texts(task, data, limit)
    request: dict[str, Any] = {"model": model_name, "task": task, "data": data, "limit": limit}
    request |= {"repeats": repeats, "prompt_length": prompt_length, "compile": compile.value}
    request |= {"pack": pack and pack.value, "slide": slide}
    journal = Journal(request | {"max_new_tokens": max_new_tokens}, out_file, resume=None)
    model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
    journal.record["machine"] = machine_of(model.device)
    ids = encode(model, texts, model.tokenizer.chat_template is not None)
    prompts = [measure.stretched(one, prompt_length) for one in ids]
    journal.record |= {"dtype": str(model.dtype).removeprefix("torch."), "packed": model.packed}
    ways, settings = {}, {}
    for one in modes:
        options: dict[str, Any] = {"mode": one.value, "max_new_tokens": max_new_tokens}
        options |= {"block_size": block_size} if one is not Mode.ntp else {}
        options |= {"solver": solver, "slide": slide} if one is Mode.sbd else {}
        settings[one.value] = settings_for(model, **options)  # bad values are refused here
        ways[one.value] = options
    journal.record["slide"] = any(one.slide for one in settings.values())
    for name, options in ways.items():
        with err.status(Text(f"{name}: {len(prompts)} prompts, {repeats} rounds")):
            line = profiling.profiled(model, prompts, repeats, **options)
        told = {"mode": name, "settings": settings[name].described}
        journal.finish({"task": "profile", "model": model.name, **told, **line})
    journal.save()
    if as_json:
        print_json(journal.record)
        return
    lines = journal.record["results"]
    shown = Table(title="Shares of the wall clock")
    for name in ("", *(line["mode"] for line in lines)):
        shown.add_column(name, justify="right" if name else "left")
    for kind in (*profiling.KINDS, profiling.REST):
        shown.add_row(
            kind,
            *(f"{line['shares'][kind]:.0%}" for line in lines),
            end_section=kind == profiling.REST,
        )
    for name, of in (
        ("tokens per forward", lambda line: f"{line['tokens_per_forward']:.2f}"),
        ("ms a token", lambda line: f"{1000 * line['wall_s'] / line['tokens']:.2f}"),
        ("longer for being watched", lambda line: f"{line['overhead']:.2f}x"),
    ):
        shown.add_row(name, *map(of, lines))
    print_table(shown)


def _texts(task: str | None, data: str | None, limit: int) -> list[Any]:
    """The prompts of a task's rows, or the bundled model's."""
    from setblock import nano
    from setblock.tasks import TASKS, load_items

    if task is not None and task not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {task!r}")
    if data is not None:
        one, rows = rows_of([task] if task else [], data, None, "test")
        return [one.prompt(row, (), True) for row in load_items(one, rows, limit)]
    if task is not None:
        raise ValueError(f"task {task} needs its rows: --data FILE")
    each = -(-limit // len(nano.FAMILIES))
    families = [nano.problems(name, "validation", each) for name in nano.FAMILIES]
    return [one.prompt for some in zip(*families, strict=True) for one in some][:limit]


def _contenders(lines: list[dict[str, Any]]) -> Table:
    """One section for each batch size and prompt length; fits into 80 columns."""
    shown = Table(
        title="Against token by token (ntp); median, least to most of the rounds",
        caption="with prompt: its forward included, which the speed-up leaves out.\n"
        "of ceiling: share of what the costs of bare forwards would allow.\n"
        "same: answers with the tokens of ntp.\n"
        "transformers-lookup: its decoding that copies from the prompt",
        caption_justify="left",
    )
    shown.add_column("decoding", overflow="fold", min_width=12, max_width=12)
    names = ("per forward", "tokens/s", "speed-up", "with prompt", "of ceiling", "same")
    for name in names:
        shown.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    place = None
    for line in lines:
        here = f"batch {line['batch_size']}, prompt {line['prompt_tokens']:.0f}"
        if here != place:
            shown.add_section()
            shown.add_row(Text(here, style="dim"))
            place = here
        per_forward, reached = line["tokens_per_forward"], line["share_of_ceiling"]
        gains = [
            ""
            if line[name] is None
            else "{}x\n{}-{}".format(*map(_three_digits, (line[name], *line[name + "_range"])))
            for name in ("speedup", "total_speedup")
        ]
        shown.add_row(
            line["contender"].replace("transformers-", "transformers "),
            "" if per_forward is None else f"{per_forward:.2f}",
            f"{line['tokens_per_second']:.1f}",
            *gains,
            "" if reached is None else f"{reached:.0%}",
            percent(line["identical_share"]),
        )
    return shown


def _three_digits(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def _forwards(lines: list[dict[str, Any]]) -> Table:
    shown = Table(title="One forward")
    for name in ("batch", "cached", "query tokens", "ms", "against one token"):
        shown.add_column(name, justify="right")
    for line in lines:
        shown.add_row(
            *(str(line[name]) for name in ("batch_size", "cached", "queries")),
            f"{1000 * line['seconds']:.2f}",
            f"{line['ratio']:.2f}",
        )
    return shown
