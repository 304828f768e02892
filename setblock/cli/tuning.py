"""The command that picks a setting: tune."""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from setblock.cli.common import (
    app,
    busy_note,
    err,
    load_model,
    out,
    print_json,
    print_table,
    refuse_below_one,
    refuse_solvers,
    refuse_without,
    rows_of,
    starting,
    warm_up,
    warn_unfit,
)
from setblock.cli.options import (
    DECODING,
    Compile,
    CompileOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    MaskTokenOption,
    ModelName,
    PackOption,
)

if TYPE_CHECKING:
    from setblock.evaluate import Form
    from setblock.model import Model
    from setblock.records import Journal
    from setblock.tune import Target, Tried

FEW_TIMED = 8  # items whose clock leaves open which of two close settings is faster


@app.command()
def tune(
    model_name: ModelName,
    task: Annotated[
        list[str] | None,
        typer.Option(help="As for `evaluate`, but perplexity. Default: nano."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="The task's rows, as for `evaluate`.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Of a hub dataset. Default: validation.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain text, no chat template, with --data.")
    ] = False,
    limit: Annotated[
        int, typer.Option(help="Items, of each nano family: half pick, half confirm.")
    ] = 200,
    max_drop: Annotated[
        float,
        typer.Option(
            help="Loss of score allowed against token by token, in points. Rounding's, of verified "
            "decoding in bfloat16, counts only once it is proven to be larger."
        ),
    ] = 0.5,
    confidence: Annotated[
        float, typer.Option(help="Of the statement that the loss is no larger.")
    ] = 0.95,
    by: Annotated[
        str, typer.Option(help="What is fastest: clock (seconds per token) or forwards.")
    ] = "clock",
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="To try, sbd or verified; may be given again. Default: both.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    solver: Annotated[
        list[str] | None,
        typer.Option(
            help="To try in mode sbd; may be given again. Default: eleven, of 3 kinds.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    slide: Annotated[
        bool | None,
        typer.Option(
            help="To try in mode sbd: only blocks that slide, or only whole ones. Default: both.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            help="To try; may be given again. Default: the model's, in mode verified all up to it.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Items decoded together.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 256,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    compile: CompileOption = Compile.off,
    pack: PackOption = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write/--no-write",
            help="Put the choice into the checkpoint's generation_config.json, where every command "
            "finds it.",
        ),
    ] = True,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Record; beside it, in x.samples.jsonl for x.json, every answer."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the stopped run in --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest decoding that loses at most so much score, and make it the model's default.

    Tries solvers, block sizes and verified decoding on half of the items, fewer settings on more
    items in each round; the last three answer the other half, and the fastest whose loss there is
    proven to be small enough is chosen. If nothing is both proven and faster, no setting is
    written.

    Verified decoding needs no proof: its text is that of token by token, but for rounding, which in
    bfloat16 lets many answers differ. How many of its drafts are accepted is measured first; of all
    block sizes and numbers of branches the six that are quickest by arithmetic are tried, with
    drafts copied from the text (lookup) and some without, and lookup alone, which needs no
    training. Tune with the --batch-size that you will decode with.

    On items without right answers, such as --task prompts, an answer is right that says what token
    by token says. To lose nothing: --mode verified --task prompts --data YOURS.jsonl.

    With both modes and the default solvers an item that picks is decoded five to eighteen times,
    the more the fewer there are, one that confirms four times.
    """
    if not 0 <= max_drop < 100:
        raise ValueError(f"--max-drop must lie in 0..100 points, 100 left out, got {max_drop:g}")
    refuse_below_one(limit=limit, batch_size=batch_size)
    with starting(model_name):
        from setblock import evaluate, nano
        from setblock import tune as tuning
        from setblock.card import SPEEDUP
        from setblock.loading import fingerprint_of
        from setblock.names import BUNDLED
        from setblock.records import Journal, machine_of
        from setblock.tasks import load_items

    refuse_solvers(solver)
    target = tuning.Target(max_drop / 100, confidence, by)
    if write and (model_name in BUNDLED or not Path(model_name).is_dir()):
        raise ValueError(
            f"{model_name!r} is no checkpoint folder that the choice could be written into: name "
            "one, or give --no-write"
        )
    if write and not os.access(model_name, os.W_OK):
        raise ValueError(f"{model_name} can't be written into: give --no-write")
    form, items = None, []
    if data is None:
        if plain or split:
            raise ValueError("--plain and --split are for benchmark tasks, with --data")
        for family in evaluate.families(task or ["nano"]):
            items += nano.problems(family, "validation", limit)
    else:
        one, rows = rows_of(task or [], data, split, "validation")
        form = evaluate.Form(one, chat=not plain, data=rows)
        items = load_items(one, rows, limit)
    if len(items) < 2:
        raise ValueError("tune needs at least 2 items: one to pick by, one to confirm")
    slides = (False, True) if slide is None else (slide,)
    tried = tuning.Tried(mode or tuning.MODES, solver or tuning.SOLVERS, block_size, slides=slides)
    refuse_without("sbd", tried.modes, solver=solver or None, slide=slide)
    model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
    if not model.trained:  # else what is tried is measured
        for one in tried.modes:
            warn_unfit(model, one)
    model.told.update(tuning.MODES)
    tried.check(model)
    common: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if form and not form.chat:
        common["stop"] = form.task.stop
    request = {
        "model": model_name,
        "weights": fingerprint_of(model_name, settings=False),  # those are written in the end
        "mask_token_id": mask_token_id,
        "dtype": dtype and dtype.value,
        "device": device,
        "compile": compile.value,
        "pack": pack and pack.value,
        "task": task,
        **(form.describe() if form else {}),
        "limit": limit,
        **asdict(target),
        "batch_size": batch_size,
        "tried": asdict(tried),
        "longest": model.defaults["block_size"],
        "common": common,
    }
    journal = Journal(request, out_file, resume, kept=("longest",))
    journal.record["machine"] = machine_of(model.device)
    line = search(model, journal, items, tried, target, batch_size, form, common)
    written = write_choice(model_name, line, dtype, mask_token_id) if write else {}
    if as_json:
        print_json(journal.record)
        return
    tell(line)
    if line["by"] == "clock":
        busy_note()
    if line["chosen"]["mode"] == "ntp":
        need = tuning.items_needed(target, len(line["finalists"]))
        out.print(
            f"nothing faster is proven to lose at most {max_drop:g} points, and no setting is "
            "written"
            + (f"; a setting that answers all alike needs {need} confirming items" if need else "")
            + f", here were {line['confirmed_on']}"
        )
    if "mode" in written:
        place = Path(model_name) / "generation_config.json"
        out.print(f"written into {place}, where it was {tuning.words(line['before'])}")
        if "dtype" in written:
            err.print(
                f"so is dtype {written['dtype']}, in which the folder is loaded from now on where "
                "no other is asked for",
                style="yellow",
            )
        card = place.with_name("README.md")
        if card.is_file() and SPEEDUP in card.read_text(encoding="utf-8"):
            out.print(f"{card} still says what {SPEEDUP} chose")
    elif "acceptance" in written:
        out.print(f"written into {model_name}: the acceptance alone")
    elif not write:
        out.print(f"--no-write: {model_name} is as it was")


def search(
    model: "Model",
    journal: "Journal",
    items: Sequence[Any],
    tried: "Tried",
    target: "Target",
    batch_size: int,
    form: "Form | None",
    common: dict[str, Any],
) -> dict[str, Any]:
    """The line of the journal's record that a search ends in; a finished record has it already.

    Effects: rounds and answers are in the journal as they come.
    """
    from setblock import tune as tuning
    from setblock.live import spinner
    from setblock.scores import Sample

    record = journal.record
    if (line := journal.finished(0)) is not None:
        return line
    acceptance = model.acceptance if model.acceptance_is_known else None
    before = {**model.defaults, **model.drafting, "acceptance": acceptance}
    before["slide"] = model.slides and before["mode"] == "sbd"
    record["rounds"] = []

    def note(done: dict[str, Any]) -> None:
        record["rounds"].append(done)
        journal.save()
        kept = sum(one["kept"] for one in done["settings"])
        items = f"{done['items']} item{'s' * (done['items'] != 1)}"
        err.print(f"{items}, {len(done['settings'])} settings: {kept} go on")

    count = 0

    def add(run: int, sample: Sample) -> None:
        nonlocal count
        count += 1
        journal.add(run, asdict(sample))
        update(f"{count} answers timed")

    with spinner(err, "trying settings") as update:
        line = tuning.tune(
            model,
            items,
            replace(tried, longest=record["request"]["longest"]),
            target,
            batch_size,
            form,
            warm_up=lambda options: warm_up(model, options),
            known=lambda run: [Sample.from_json(one) for one in journal.known(run)],
            on_sample=add,
            on_round=note,
            **common,
        )
    line["before"] = before
    journal.finish(line)
    return line


def write_choice(
    folder: str | Path, line: dict[str, Any], dtype: Dtype | None, mask_token_id: int | None
) -> dict[str, Any]:
    """What of a search's line was put into a checkpoint: acceptance, and a faster setting if any.

    dtype, mask_token_id: those that were typed, which are part of the choice.
    """
    from setblock.checkpoint import DRAFTING, write_settings

    chosen, settings = line["chosen"], {}
    if line["acceptance"] is not None:
        settings["acceptance"] = line["acceptance"]
    if chosen["mode"] != "ntp":
        settings["mode"] = chosen["mode"]
        if chosen["mode"] == "verified":  # beside block size and solver of mode sbd
            settings["verified"] = {name: chosen[name] for name in DRAFTING}
        else:
            settings |= {name: chosen[name] for name in ("solver", "block_size")}
            settings["slide"] = chosen["slide"] or None
        if mask_token_id is not None:
            settings["mask_token_id"] = mask_token_id
        if dtype is not None:
            settings["dtype"] = dtype.value
    write_settings(folder, **settings)
    return settings


def tell(line: dict[str, Any]) -> None:
    """A search's finalists and its choice, on stdout."""
    from setblock import tune as tuning

    chosen = line["chosen"]
    print_table(_table(line["finalists"], line["by"], line["judged"]))
    if any(one["lossless"] for one in line["finalists"]):
        out.print("verified in float32 needs no bound: its text is that of token by token")
    if any(one["rounding"] for one in line["finalists"]):
        out.print("rounding: verified, whose text differs from token by token by rounding alone")
    if line["acceptance"] is not None:
        was = line["before"]["acceptance"]
        but = "" if was is None else f", was {was:.2f}"
        out.print(f"acceptance of drafted tokens: {line['acceptance']:.2f}{but}")
    clock = line["by"] == "clock"
    unit = "the speed of token by token" if clock else "fewer forwards than token by token"
    out.print(f"chosen: {tuning.words(chosen)}, {chosen['speed']:.2f} times {unit}")
    if clock and chosen["mode"] != "ntp" and line["confirmed_on"] < FEW_TIMED:
        count = line["confirmed_on"]
        out.print(
            f"timed on {count} item{'s' * (count != 1)} in the end: too few to tell settings apart "
            "that are nearly as fast"
        )


def _table(lines: list[dict[str, Any]], by: str, judged: bool) -> Table:
    from setblock.tune import loss_cells, proven, words

    shown = Table(title="Against token by token, on the items that had no part in picking")
    gain = "speed" if by == "clock" else "forwards"
    score = "score" if judged else "same"
    for name in ("setting", score, "loss", "at most", "per forward", gain, "proven"):
        shown.add_column(name, justify="left" if name == "setting" else "right")
    for line in lines:
        shown.add_row(
            words(line),
            *loss_cells(line),
            f"{line['tokens_per_forward']:.2f}",
            f"{line['speed']:.2f}x",
            proven(line),
        )
    return shown
