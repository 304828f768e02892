"""The command that scores: evaluate."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from setblock.cli.common import (
    app,
    busy_note,
    err,
    load_model,
    print_json,
    print_table,
    reading,
    refuse_below_one,
    refuse_idle,
    refuse_repeated,
    refuse_solvers,
    refuse_split,
    refuse_unsampled,
    refuse_without,
    rows_of,
    starting,
    tell_undrafted,
    warm_up,
    warn_unfit,
)
from setblock.cli.options import (
    DECODING,
    SAMPLING,
    SOLVERS_HELP,
    BlockSizeOption,
    BranchesOption,
    Compile,
    CompileOption,
    DeviceOption,
    Draft,
    DraftOption,
    DtypeOption,
    FallbackOption,
    JsonOption,
    LenienceOption,
    LookupOption,
    MaskTokenOption,
    MinPOption,
    Mode,
    PackOption,
    SeedFirstOption,
    SeedsOption,
    SlideOption,
    Switch,
    TemperatureOption,
    TopKOption,
    TopPOption,
)

if TYPE_CHECKING:
    from setblock.evaluate import Form
    from setblock.records import Journal
    from setblock.tasks import DataRows


@app.command()
def evaluate(
    model_names: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Models, as for `generate`.")
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="nano (all five families) or families of it; or, with --data, one of gsm8k, "
            "svamp, math, humaneval, mbpp, answers (prompt and completion, as for training), "
            "prompts (no right answer: for speed), perplexity (of "
            "plain text, or rows of text, under next-token prediction). Default: nano."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="The task's rows: a JSON, JSONL, gzipped JSONL or Parquet file, or a hub dataset "
            "such as openai/gsm8k:main."
        ),
    ] = None,
    shots: Annotated[
        int, typer.Option(help="Solved examples before each question, with --data.")
    ] = 0,
    shots_data: Annotated[
        str | None,
        typer.Option(
            help="Their rows, likewise, of a hub dataset its train split; the first are taken."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain text, no chat template, with --data.")
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            help="Task perplexity: tokens seen at a time, overlapping by half. Default: the "
            "model's context."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="validation or test; of a hub dataset any. Default: test."),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Problems in wordings that training never saw.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Problems of each family.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Problems decoded together.")] = 32,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            help="May be given again. Default: ntp, and every mode that one of the models decodes "
            "in; sbd if that is ntp alone.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    solver: Annotated[
        list[str] | None,
        typer.Option(help=f"May be given again. {SOLVERS_HELP}", rich_help_panel=DECODING),
    ] = None,
    block_size: BlockSizeOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 256,
    slide: SlideOption = None,
    next_token_seed: SeedFirstOption = False,
    fallback: FallbackOption = None,
    draft: DraftOption = None,
    branches: BranchesOption = None,
    seeds: SeedsOption = None,
    lookup: LookupOption = None,
    lenience: LenienceOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            help="Of the sampling noise. May be given again: each setting is then scored under "
            "each seed, and over all of them. Default: 0.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    compile: CompileOption = Compile.off,
    pack: PackOption = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write the record to this JSON file, and beside it each answer, as it comes: to "
            "scores.samples.jsonl for scores.json.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the stopped evaluation in --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Score models on tasks under several decoding settings; writes one JSON record.

    Each line also says how degenerate the text is: the share of answers that end by themselves,
    repetition, and the mean log-probability of its tokens under next-token prediction. Every
    setting after a task's first is compared with that one on the same problems.

    Tasks humaneval and mbpp run the model's code, in a subprocess with limits that are no security
    boundary: use a container for models you do not trust.
    """
    noise = {"top_k": top_k, "min_p": min_p, "seed": None if seed == [0] else seed}
    refuse_unsampled(temperature, top_p=top_p != 1, **noise)
    refuse_repeated(seed=seed)
    if len(set(model_names)) < len(model_names):
        raise ValueError(f"MODEL must be given once for each, got {model_names}")
    with starting(*model_names):
        from setblock import evaluate as evaluation
        from setblock import nano
        from setblock.generation import settings_for
        from setblock.live import lines, progress_bar
        from setblock.loading import fingerprint_of
        from setblock.records import Journal, machine_of
        from setblock.scores import Sample, compare, pooled
        from setblock.tasks import load_items

    models = {"models": model_names, "mask_token_id": mask_token_id}
    models |= {"dtype": dtype and dtype.value, "device": device}
    models |= {"compile": compile.value} if compile is not Compile.off else {}
    models |= {"pack": "off"} if pack is Switch.off else {}
    models["weights"] = [fingerprint_of(name) for name in model_names]
    given = {
        "mode": mode,
        "solver": solver,
        "block-size": block_size,
        "slide": slide,
        "next-token-seed": next_token_seed or None,
        "fallback": fallback,
        "draft": draft,
        "branches": branches,
        "seeds": seeds,
        "lookup": lookup,
        "lenience": lenience,
        "temperature": temperature or None,
        "shots": shots or None,
        "plain": plain or None,
        "compile": compile if compile is not Compile.off else None,
    }
    if task == [evaluation.PERPLEXITY]:
        if useless := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"--{useless[0]}: perplexity reads text and decodes none")
        for name, value, usual in (
            ("batch-size", batch_size, 32), ("max-new-tokens", max_new_tokens, 256)
        ):  # fmt: skip
            if value != usual:
                raise ValueError(f"--{name}: perplexity reads a text at a time and decodes none")
        if data is None:
            raise ValueError("task perplexity needs its text: --data FILE")
        refuse_below_one(limit=limit)
        named = {"held-out": held_out or None, "shots-data": shots_data}
        if useless := [name for name, value in named.items() if value is not None]:
            raise ValueError(f"--{useless[0]}: perplexity reads plain text")
        refuse_split(split, data, "the nano tasks and for ")
        with reading("--data", data):
            texts = evaluation.read_texts(data, limit, split or "test")
        request = {**models, "data": texts.name, "data_sha256": texts.sha256, "limit": limit}
        request |= {"window": window}
        journal = Journal(request, out_file, resume)
        _judge_texts(journal, texts, window, (dtype, device, mask_token_id, compile, pack))
        _show(journal.record, as_json)
        return
    if window is not None:
        raise ValueError("--window is for --task perplexity alone")
    form = None
    if data is not None:
        form = _task_form(task or [], data, shots, shots_data, plain, split, held_out)
    elif shots or shots_data or plain:
        raise ValueError("--shots, --shots-data and --plain are for benchmark tasks, with --data")
    modes = mode or [Mode.ntp, *_own_modes(model_names)]
    drafts = Mode.verified in modes and draft == Draft.solver
    if solver and Mode.sbd not in modes and not drafts:
        raise ValueError(
            "--solver is for mode sbd, or mode verified with --draft solver, and the modes are "
            f"{', '.join(modes)}; got {solver}"
        )
    own = {
        Mode.sbd: {
            "slide": slide,
            "next_token_seed": next_token_seed or None,
            "fallback": fallback,
        },
        Mode.verified: {
            "draft": draft and draft.value,
            "branches": branches,
            "seeds": seeds,
            "lookup": lookup,
            "lenience": lenience,
        },
    }
    refuse_solvers(solver)
    for one, values in own.items():
        refuse_without(one, modes, **values)
    refuse_below_one(limit=limit, batch_size=batch_size)
    problems: dict[str, Any]
    if form and form.data:
        problems = {form.task.name: load_items(form.task, form.data, limit)}
    else:
        families = evaluation.families(task or ["nano"])
        split = split or "test"
        problems = {name: nano.problems(name, split, limit, held_out=held_out) for name in families}
    refuse_idle(modes, block_size=block_size)
    common: dict[str, Any] = {"block_size": block_size, "max_new_tokens": max_new_tokens}
    if temperature:
        common |= {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    if form and not form.chat:
        common["stop"] = form.task.stop
    place = {} if form else {"split": split, "held_out": held_out}
    settings: list[dict[str, Any]] = [{"mode": "ntp", **common}] if Mode.ntp in modes else []
    for one, values in own.items():
        if one in modes:
            solvers = (solver or [None]) if one == Mode.sbd or drafts else [None]
            fixed = {"mode": one.value, **common, **values}
            settings += [{**fixed, "solver": text} for text in solvers]
    if temperature:
        settings = [{**one, "seed": noise} for one in settings for noise in seed or [0]]
    request = {
        **models,
        "tasks": list(problems),
        **place,
        **(form.describe() if form else {}),
        "limit": limit,
        "batch_size": batch_size,
        "settings": settings,
    }
    journal = Journal(request, out_file, resume)
    if resume:
        err.print(f"{out_file} holds {journal.num_known} answers", style="dim")
    firsts: dict[tuple[str, int], tuple[dict[str, Any], list[Sample]]] = {}
    seeded: dict[str, list[tuple[dict[str, Any], list[Sample]]]] = {}
    run, say = 0, lines(err)
    total = len(model_names) * len(settings) * len(problems)
    for model_name in model_names:
        model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
        journal.record["machine"] = machine_of(model.device)
        for one in modes:
            warn_unfit(model, one.value)
        rows = min(batch_size, max(map(len, problems.values())))
        for options in settings:  # bad values are refused before the first problem
            tell_undrafted(settings_for(model, rows, **options), options.get("block_size"), rows)
        for options in settings:
            if any(journal.finished(run + later) is None for later in range(len(problems))):
                warm_up(model, options)
            for family, items in problems.items():
                known = [Sample.from_json(sample) for sample in journal.known(run)]
                line = journal.finished(run)
                if line is None:
                    noise = f"seed {options['seed']}" if seed and len(seed) > 1 else None
                    words = (model_name, options["mode"], options.get("solver"), noise, family)
                    label = f"{run + 1}/{total} " + " ".join(filter(None, words))
                    with progress_bar(err, label, len(items), say) as advance:

                        def note(score: Any, run: int = run, advance: Any = advance) -> None:
                            journal.add(run, asdict(score.samples[-1]))
                            advance(score)

                        line, score = evaluation.run(
                            model, family, items, batch_size, note, form, known, **options
                        )
                    line, known = line | place, score.samples
                    first = firsts.get((family, options.get("seed", 0)))
                    compared = compare(first[0], line, (first[1], known)) if first else None
                    journal.finish(line, compared)
                elif len(known) != line["n"]:
                    raise ValueError(
                        f"resume: {journal.samples_path} holds {len(known)} of the {line['n']} "
                        f"samples of run {run}"
                    )
                firsts.setdefault((family, options.get("seed", 0)), (line, known))
                alike = json.dumps([model_name, family, {**options, "seed": None}])
                seeded.setdefault(alike, []).append((line, known))
                run += 1
    if seed and len(seed) > 1:
        parts = (zip(*some, strict=True) for some in seeded.values())
        journal.record["pooled"] = [pooled(lines, samples) for lines, samples in parts]
        journal.save()
    _show(journal.record, as_json)
    if not as_json:
        busy_note()


def _own_modes(names: list[str]) -> list[Mode]:
    """The modes that these models decode in by default; sbd if that is ntp alone."""
    from setblock.loading import settings_of
    from setblock.model import DEFAULTS

    own = {settings_of(name).get("mode", DEFAULTS["mode"]) for name in names}
    return [one for one in (Mode.sbd, Mode.verified) if one in own] or [Mode.sbd]


def _judge_texts(
    journal: "Journal", data: "DataRows", window: int | None, loaded: tuple[Any, ...]
) -> None:
    """The lines of perplexity, one a model, into the journal; loaded: how `load_model` shall."""
    from setblock.evaluate import judge
    from setblock.records import machine_of

    for run, name in enumerate(journal.record["request"]["models"]):
        if journal.finished(run) is None:
            model = load_model(name, *loaded)
            journal.record["machine"] = machine_of(model.device)
            with err.status(Text(f"{name} reads {data.name}")):
                line = judge(model, data, window)
            journal.finish(line)


def _show(record: dict[str, Any], as_json: bool) -> None:
    """The record as JSON, or its tables."""
    from setblock import evaluate as evaluation

    if as_json:
        print_json(record)
        return
    print_table(evaluation.table(record["results"]))
    if over_seeds := record.get("pooled"):
        print_table(evaluation.pooled_table(over_seeds))
    if comparisons := record.get("comparisons"):
        print_table(evaluation.comparison_table(comparisons))


def _task_form(
    tasks: list[str],
    data: str,
    shots: int,
    shots_data: str | None,
    plain: bool,
    split: str | None,
    held_out: bool,
) -> "Form":
    """How the one benchmark task that --data is for is put."""
    from setblock.evaluate import Form
    from setblock.tasks import load_items, read_rows

    if held_out:
        raise ValueError("--held-out is for the nano tasks")
    if shots < 0 or bool(shots) != (shots_data is not None):
        raise ValueError(f"--shots and --shots-data need each other; got {shots} and {shots_data}")
    task, rows = rows_of(tasks, data, split, "test", "the nano tasks and for ")
    solved = None
    if shots_data:
        with reading("--shots-data", shots_data):
            solved = read_rows(shots_data, "train")
    examples = tuple(load_items(task, solved, shots)) if solved else ()
    if len(examples) < shots:
        raise ValueError(f"--shots {shots}: {shots_data} has {len(examples)} rows")
    if solved is not None and solved.sha256 == rows.sha256:
        raise ValueError(f"--shots-data {shots_data} holds the very rows of --data: name others")
    return Form(task, not plain, examples, rows, solved)
