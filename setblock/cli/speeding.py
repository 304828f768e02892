"""The command that makes a model faster, from nothing to a setting: speedup."""

import dataclasses
import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from setblock.cli.common import (
    app,
    busy_note,
    err,
    fail,
    load_model,
    out,
    print_json,
    quiet_libraries,
    refuse_below_one,
    starting,
)
from setblock.cli.options import (
    MACHINE,
    Compile,
    CompileOption,
    Dtype,
    DtypeOption,
    JsonOption,
)
from setblock.cli.training import ADAPTER, ANSWERS, DATA, check_packages, telling
from setblock.cli.tuning import search, tell, write_choice
from setblock.signals import Stopped, exit_code, stop_at_once

PROMPTS = 2000
# Options of `train` that have one value here.
DECIDED = {
    "method": "it trains a gated adapter",
    "resume": "the same command goes on by itself",
    "chat": "prompts go into the chat template, unless --plain is given",
    "answers": "it learns the model's own",
}
# Of the loss that text which rounding changed may show, as for `tune`.
MAX_DROP, CONFIDENCE = 0.005, 0.95


@app.command(context_settings={"ignore_unknown_options": True})
def speedup(
    model_name: Annotated[str, typer.Option("--model", help="MODEL, as for `generate`.")],
    output_dir: Annotated[
        Path, typer.Option(help="Where the faster MODEL goes, and all that is made on the way.")
    ],
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="--FIELD VALUE", help="See above.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts like those that it will be given, hundreds of them: JSONL, JSON or "
            "Parquet file of rows with a prompt, or of chats with messages, or a "
            f"dataset's hub name; may be given again. Default: own:{PROMPTS}, so many that a chat "
            "model makes up itself.",
            rich_help_panel=DATA,
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Of a hub dataset.", rich_help_panel=DATA)] = "train",
    prompt_field: Annotated[
        str, typer.Option(help="The column of prompts.", rich_help_panel=DATA)
    ] = "prompt",
    limit: Annotated[
        int | None, typer.Option(help="Take the first prompts only.", rich_help_panel=DATA)
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Prompts are plain text; without it they go into the chat template.",
            rich_help_panel=DATA,
        ),
    ] = False,
    held_out: Annotated[
        int,
        typer.Option(
            help="Prompts that are not trained on: half pick the setting, half confirm it.",
            rich_help_panel=DATA,
        ),
    ] = 16,
    answer_tokens: Annotated[
        int,
        typer.Option(help="Length limit of answers, learned and timed.", rich_help_panel=ANSWERS),
    ] = 256,
    answer_batch_size: Annotated[
        int, typer.Option(help="Prompts answered together.", rich_help_panel=ANSWERS)
    ] = 16,
    lora_rank: Annotated[int, typer.Option(help="Of the adapter.", rich_help_panel=ADAPTER)] = 32,
    batch_size: Annotated[
        int,
        typer.Option(help="Prompts decoded together, as you will.", rich_help_panel=MACHINE),
    ] = 1,
    dtype: DtypeOption = None,
    compile: CompileOption = Compile.off,
    as_json: JsonOption = False,
) -> None:
    """Make a model faster that goes on saying the same: one command from a model to a setting.

    The model answers prompts; a gated adapter, beside the untouched weights, learns to draft those
    answers; and on prompts held out the clock chooses how much to draft. The output folder is a
    MODEL that decodes `verified`, and its speedup.json tells what was done and how fast it is.

    The same command goes on where it was stopped. Every option of `train`'s trainer may follow,
    such as --max-steps 400, --per-device-train-batch-size 16 or --learning-rate 4e-4; by default
    each answer is learned four times, 8 a step. Before the first step it says how long that takes.
    """
    quiet_libraries()
    check_packages()
    with starting(model_name):
        from setblock.checkpoint import write_settings
        from setblock.records import new_record, save_record
        from setblock.run import TrainingRun
        from setblock.speedup import CHAIN_WIDTH, learn

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "speedup runs in one process: on several GPUs call train, with torchrun or accelerate, "
            "and then tune"
        )
    refuse_below_one(batch_size=batch_size)
    run = TrainingRun(
        model=model_name,
        data=data or [f"own:{PROMPTS}"],
        output_dir=output_dir,
        method="gated",
        split=split,
        prompt_field=prompt_field,
        limit=limit,
        chat=not plain,
        answers="model",
        answer_tokens=answer_tokens,
        answer_batch_size=answer_batch_size,
        lora_rank=lora_rank,
        chain_width=CHAIN_WIDTH,
    )
    words = fields or []
    _check_words(words)
    request = {"held_out": held_out, "batch_size": batch_size, "fields": words}
    request |= {"dtype": dtype and dtype.value, "compile": compile.value}
    request |= {
        name: value for name, value in dataclasses.asdict(run).items() if name != "output_dir"
    }
    file = output_dir / "speedup.json"
    record = _of_same(file, request) or new_record() | {"request": request}
    if "training" not in record:
        try:
            with telling(as_json) as say:
                record["training"] = learn(run, words, held_out, say)
        except Stopped as stop:
            fail(f"stopped by {stop}; the same command goes on", exit_code(str(stop)))
        if name := record["training"]["stopped_by"]:
            fail(f"stopped by {name} with a checkpoint; the same command goes on", exit_code(name))
        save_record(record, file)
    if not record["results"]:
        err.print(f"trying settings on {held_out} prompts that were not trained on", style="dim")
        try:
            with telling(as_json), stop_at_once():
                line, origin = _fastest(output_dir, record, dtype, compile)
        except Stopped as stop:
            fail(f"stopped by {stop} while timing; the same command goes on", exit_code(str(stop)))
        write_choice(output_dir, line, dtype, None)
        if line["chosen"]["mode"] == "ntp":  # else a gated adapter drafts by default
            write_settings(output_dir, mode="ntp", verified=None)
        record.pop("imported", None)
        record |= {**origin, "results": [line]}
        save_record(record, file)
        _note_choice(output_dir / "README.md", record)
        if not as_json:
            busy_note()
    elif not as_json:
        err.print(f"finished already; what {file} says:", style="dim")
    line = record["results"][0]
    if as_json:
        print_json(record)
        return
    tell(line)
    chosen, name = line["chosen"], model_name
    if chosen["mode"] == "ntp":
        out.print(
            f"{output_dir} decodes token by token: nothing else is faster on this machine yet. "
            "More steps (--max-steps), or more prompts in a new folder, make better drafts"
        )
        return
    but = ", but for rounding" if chosen["rounding"] else ""
    fast = f"{chosen['speed']:.2f} times as fast"
    where = f"timed on {line['confirmed_on']} of the prompts held out"
    out.print(f"{output_dir} says what {name} says token by token{but}, {fast}, {where}")
    if chosen["block_size"] == 1:
        out.print(
            "all of it comes from drafts copied from the text, which need no adapter: what this "
            "one has learned is of no use yet. More steps (--max-steps), or more prompts in a new "
            "folder, make better drafts"
        )
    out.print(f"now: setblock serve {output_dir}")


def _check_words(words: list[str]) -> None:
    """Raises: ValueError for an option that `train` has and that is decided here."""
    from setblock.run import TrainingRun, names_of

    own = {field.name for field in dataclasses.fields(TrainingRun)}
    for name in sorted(names_of(words) & own - set(inspect.signature(speedup).parameters)):
        option = f"--{name.replace('_', '-')}"
        why = DECIDED.get(name, "`setblock train` takes it")
        raise ValueError(f"{option} is no option of speedup: {why}")


def _of_same(file: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The record that an earlier call with this request left; None without one."""
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        same = record["request"] == json.loads(json.dumps(request))
        whole = isinstance(record["training"], dict) and isinstance(record["results"], list)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is no record of speedup: move it away") from error
    return record if same and whole else None


def _note_choice(card: Path, record: dict[str, Any]) -> None:
    """Effects: the model's card says what the clock chose, and where."""
    from setblock.card import with_choice
    from setblock.tune import words

    chosen, machine, asked = record["results"][0]["chosen"], record["machine"], record["request"]
    count = record["results"][0]["confirmed_on"]
    where = f"{machine['cuda'] or machine['cpu']}, batch size {asked['batch_size']}, timed on "
    where += f"{count} prompt{'s' * (count != 1)} of up to {asked['answer_tokens']} new tokens"
    choice = None if chosen["mode"] == "ntp" else words(chosen)
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    card.write_text(with_choice(text, choice, chosen["speed"], where), encoding="utf-8")


def _fastest(
    folder: Path, record: dict[str, Any], dtype: Dtype | None, compile: Compile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a search among verified settings ends in, by the clock on the held-out prompts, and
    when, where and by which code.
    """
    from setblock.records import Journal, machine_of, new_record
    from setblock.resume import OWN_FOLDER
    from setblock.speedup import HELD_OUT, as_learned
    from setblock.tune import Target, Tried

    asked = record["request"]
    model = load_model(str(folder), dtype, None, None, compile)
    items, form = as_learned(folder / OWN_FOLDER / HELD_OUT, model, asked["chat"])
    tried, target = Tried(modes=("verified",)), Target(MAX_DROP, CONFIDENCE, "clock")
    request = {
        **asked,
        "steps": record["training"]["steps"],
        "longest": model.defaults["block_size"],
    }
    # Times of other code, libraries or machines are no part of this search.
    machine = machine_of(model.device)
    now = {name: one for name, one in new_record().items() if name != "results"}
    origin = now | {"machine": machine}
    names = ("machine", "commit", "versions", "imported")
    told = [request, *(origin[name] for name in names if name in origin)]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
    path = folder / OWN_FOLDER / f"settings-{digest}.json"
    journal = Journal(request, path, path.exists())
    common = {"max_new_tokens": asked["answer_tokens"]}
    line = search(model, journal, items, tried, target, asked["batch_size"], form, common)
    return line, origin
