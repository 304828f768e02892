"""Commands that make models: prompts, train, merge."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from setblock.cli.common import (
    app,
    err,
    fail,
    load_model,
    out,
    print_json,
    quiet_libraries,
    starting,
)
from setblock.cli.options import (
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    MaskTokenOption,
    ModelName,
    Switch,
)
from setblock.signals import Stopped, exit_code, told

# Parts of the long --help of `train`.
DATA, ADAPTER, ANSWERS = "Data", "Adapter", "The model's own answers"
WATCHING = "Watching"


@app.command()
def prompts(
    model_name: ModelName,
    out_file: Annotated[
        Path,
        typer.Option(
            "--out",
            help='JSONL file, {"prompt": ...} a line; one of the same settings is gone on with.',
        ),
    ],
    count: Annotated[int, typer.Option(help="Different prompts to write.")] = 1000,
    max_tokens: Annotated[int, typer.Option(help="Longer ones are left out.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts sampled together.")] = 16,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of this mass.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Of sampling; another one gives other prompts.")] = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a chat model make up prompts, to train it on its own answers without a dataset.

    Then: setblock train --model MODEL --data FILE --chat --answers model ... What a chat model
    writes where its chat template has the user speak is what it knows of its users.
    """
    with starting(model_name):
        from setblock.prompts import Sampling, write_prompts

    model = load_model(model_name, dtype, device, None)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    sampling = Sampling(seed, max_tokens, temperature, top_p)
    done = None

    def progress(number: int) -> None:
        nonlocal done
        if done is None or number % max(count // 20, 1) == 0:
            err.print(f"{number} of {count} prompts", style="dim")
        done = number

    try:
        done = write_prompts(model, out_file, count, sampling, batch_size, progress)
    except KeyboardInterrupt as stop:
        if not done:
            raise
        how, code = told(stop)
        fail(f"{how}: {done} of {count} prompts are in {out_file}; the same command goes on", code)
    if as_json:
        print_json({"model": model_name, "out": str(out_file), "prompts": done, "seed": seed})
        return
    more = f", more than the {count} asked for" if done > count else ""
    out.print(f"{done} prompts in {out_file}{more}")


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    model_name: Annotated[
        str | None, typer.Option("--model", help="MODEL to start from, as for `generate`.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL, JSON or Parquet file, or a dataset's hub name; may be given again. Rows "
            "are prompt and completion, messages, or text; only answers have a loss. own:COUNT: "
            "so many prompts that a chat model makes up itself, with --chat --answers model."
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where the trained MODEL goes, and its checkpoints.")
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="--FIELD VALUE", help="See above.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with any of these options and fields; typed ones win."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="full: all weights. lora, qlora: low-rank adapter on a frozen base, whole or in "
            "4 bits. gated: adapter that works at masked positions only, so that next-token "
            "decoding stays as it is. "
            "Default: full."
        ),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help="Of the adapter. Default: 32.", rich_help_panel=ADAPTER)
    ] = None,
    lora_alpha: Annotated[
        int | None, typer.Option(help="Its scale. Default: 64.", rich_help_panel=ADAPTER)
    ] = None,
    lora_dropout: Annotated[
        float | None, typer.Option(help="Default: 0.", rich_help_panel=ADAPTER)
    ] = None,
    chain_width: Annotated[
        int | None,
        typer.Option(
            help="Train a small network beside a gated adapter that joins the tokens of a draft, "
            "of so many inner values, such as 256. Default: 0, none.",
            rich_help_panel=ADAPTER,
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Of a hub dataset. Default: train.", rich_help_panel=DATA)
    ] = None,
    prompt_field: Annotated[
        str | None,
        typer.Option(help="The column of prompts. Default: prompt.", rich_help_panel=DATA),
    ] = None,
    completion_field: Annotated[
        str | None,
        typer.Option(help="The column of answers. Default: completion.", rich_help_panel=DATA),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat",
            help="Put prompt and completion texts into the chat template.",
            rich_help_panel=DATA,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Train on the first rows only.", rich_help_panel=DATA)
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="sdpa, or flex_attention on a GPU. Default: sdpa.")
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            help="data: learn the data's answers. model: let the model answer the prompts first, "
            "and learn its own answers; rows need no more than a prompt, or chats. Default: data.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            help="Length limit of generated answers. Default: 256.", rich_help_panel=ANSWERS
        ),
    ] = None,
    answer_batch_size: Annotated[
        int | None,
        typer.Option(help="Prompts answered together. Default: 16.", rich_help_panel=ANSWERS),
    ] = None,
    eval_data: Annotated[
        str | None,
        typer.Option(
            help="Held-out rows for the losses of --eval-strategy steps or epoch.",
            rich_help_panel=WATCHING,
        ),
    ] = None,
    decode_data: Annotated[
        str | None,
        typer.Option(
            help="Held-out prompts and completions, or chats whose last answers are asked for; "
            "decoded now and then.",
            rich_help_panel=WATCHING,
        ),
    ] = None,
    decode_every: Annotated[
        int | None, typer.Option(help="Steps between two decodings.", rich_help_panel=WATCHING)
    ] = None,
    decode_limit: Annotated[
        int | None, typer.Option(help="Rows to decode. Default: 32.", rich_help_panel=WATCHING)
    ] = None,
    decode_solver: Annotated[
        str | None,
        typer.Option(help="With this solver. Default: entropy:0.1.", rich_help_panel=WATCHING),
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Go on from the output folder's checkpoint.")
    ] = None,
    mask_token_id: MaskTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model to decode by set blocks; every field of trl's SFTConfig is an option too.

    Needed, here or in --config: --model, --data and --output-dir. For example: --max-steps 1000
    --learning-rate 1e-5 --per-device-train-batch-size 4 --max-length 1024. The learning rate is
    2e-5 for method full and 5e-4 for adapters where none is given.

    Of set block training: --objective sbd|ntp (both losses, or next tokens alone),
    --min-block-size and --max-block-size (2 to 16), --full-mask-share and --suffix-mask-share (of
    rows whose blocks are masked throughout, or from some position to their end), --matp-weight (of
    the masked-token loss), --self-distill (how far its target is the model's own distribution),
    --first-slot-loss yes|no, --end-fill (end tokens behind an answer), --drop-ragged-block,
    --idle-blocks drop|keep, --logits-chunk-size, --max-minutes (the learning rate then falls by the
    clock). docs/training.md says more of each.

    Ctrl-C or SIGTERM saves a checkpoint after the step; --resume goes on from it.
    """
    from dataclasses import fields as fields_of

    quiet_libraries()
    check_packages()
    with starting(*([model_name] if model_name else [])):
        from accelerate import PartialState

        from setblock.finetune import finetune
        from setblock.run import TrainingRun

    typed = {
        **{"model": model_name, "data": data, "output_dir": output_dir, "method": method},
        **{"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout},
        **{"chain_width": chain_width},
        **{"split": split, "prompt_field": prompt_field, "completion_field": completion_field},
        **{"chat": chat, "limit": limit, "answers": answers, "answer_tokens": answer_tokens},
        **{"attention": attention, "eval_data": eval_data},
        **{"answer_batch_size": answer_batch_size, "decode_data": decode_data},
        **{"decode_every": decode_every, "decode_limit": decode_limit},
        **{"decode_solver": decode_solver, "resume": resume, "mask_token_id": mask_token_id},
    }
    settings, words = _read_config(config, {one.name for one in fields_of(TrainingRun)})
    settings |= {name: value for name, value in typed.items() if value is not None}
    if missing := [name for name in ("model", "data", "output_dir") if name not in settings]:
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"missing: {names} (on the command line or in --config)")
    run = TrainingRun(**settings)
    words += fields or []

    try:
        with telling(as_json) as say:
            summary = finetune(run, words, say)
    except Stopped as stop:
        name = str(stop)
        fail(
            f"stopped by {name}; answers and checkpoints that there are, are kept: the same "
            "command goes on, with --resume from a checkpoint",
            exit_code(name),
        )
    if not PartialState().is_main_process:
        pass  # the first rank speaks for all
    elif as_json:
        print_json(summary)
    else:
        steps = summary["steps"]
        out.print(f"trained {steps} step{'s' * (steps != 1)}, saved to {summary['output_dir']}")
    if name := summary["stopped_by"]:
        fail(f"stopped by {name} with a checkpoint; go on with --resume", exit_code(name))


@app.command()
def merge(
    model_name: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A trained MODEL: a lora or qlora adapter, or whole."),
    ],
    output_dir: Annotated[Path, typer.Argument(help="Where the whole checkpoint goes.")],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights that are written.")] = Dtype.bfloat16,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model as one checkpoint, an adapter folded into its base."""
    quiet_libraries()
    check_packages()
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"{output_dir} is not empty")
    with starting(model_name):
        from setblock.finetune import merge as fold

    model = load_model(model_name, "auto", "cpu", None, pack=Switch.off)
    if str(model.dtype) != f"torch.{dtype.value}":  # else they would be rounded twice
        del model
        model = load_model(model_name, Dtype.float32, "cpu", None, pack=Switch.off)
    fold(model, output_dir, dtype.value)
    summary = {"model": model_name, "output_dir": str(output_dir), "dtype": dtype.value}
    if as_json:
        print_json(summary)
        return
    out.print(f"{model_name} is now one checkpoint, {output_dir}, in {dtype.value}")


@contextlib.contextmanager
def telling(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Within, a training has what tells a line on stderr, above bars that only a terminal gets.

    as_json: stdout, where the trainer prints its log lines, is stderr as well.
    """
    import datasets
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    def say(line: str) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            err.print(line, style="dim")

    if not err.is_terminal:
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield say


def check_packages() -> None:
    """Raises: ValueError that names the extra."""
    missing = [name for name in ("trl", "peft", "datasets", "accelerate") if not find_spec(name)]
    if missing:
        raise ValueError(
            f"training needs {', '.join(missing)}, not installed here: make setup in the checkout, "
            "or pip install '.[train]'"
        )


def _read_config(path: Path | None, own: set[str]) -> tuple[dict[str, Any], list[str]]:
    """(settings of a training run, words for the trainer's fields) of a YAML file."""
    if path is None:
        return {}, []
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: needs names and values, got {type(content).__name__}")
    spelled = [str(name).replace("-", "_") for name in content]
    if twice := {name for name in spelled if spelled.count(name) > 1}:
        raise ValueError(f"{path}: {', '.join(sorted(twice))}: given more than once")
    content = {
        name: value
        for name, value in zip(spelled, content.values(), strict=True)
        if value is not None  # null: the default
    }
    if "json" in content:
        raise ValueError(f"{path}: json says how the command answers: give --json beside the file")
    settings = {name: value for name, value in content.items() if name in own}
    if isinstance(settings.get("data"), str):
        settings["data"] = [settings["data"]]
    if "output_dir" in settings:
        settings["output_dir"] = Path(str(settings["output_dir"]))
    words = []
    for name, value in content.items():
        if name not in own:
            if name.endswith("_strategy") and value is False:
                value = "no"  # which YAML takes for false
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}"]
            words += [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
    return settings, words
