"""The `setblock` command. Every command also answers in JSON; errors are one line on stderr."""

import contextlib
import json
import logging
import os
import sys
import warnings
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from setblock.evaluate import Form
    from setblock.generation import Generation
    from setblock.model import Model

app = typer.Typer(
    help="Set block decoding: several tokens per forward from an ordinary causal language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Names and model text are shown as they are: no [markup], no :emoji:.
out = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
err = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Mode(StrEnum):
    """How to decode."""

    sbd = "sbd"
    ntp = "ntp"
    verified = "verified"


class Draft(StrEnum):
    """Where mode verified takes its drafts from."""

    branches = "branches"
    solver = "solver"


class Dtype(StrEnum):
    """Floating-point type of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


SOLVERS_HELP = (
    "Which masked positions each forward reveals: entropy:GAMMA (the paper's), "
    "confidence-bound:GAMMA, margin-bound:GAMMA, entropy-threshold:TAU, confidence:TAU, factor:F, "
    "fixed:N or prefix:TAU. "
    "Default: the checkpoint's, else entropy:0.1."
)
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A bundled model (nano, nano-twin), a checkpoint folder, a GGUF file, or a hub name.",
    ),
]
MaskTokenOption = Annotated[
    int | None,
    typer.Option("--mask-token-id", help="Mask token to use instead of the one `info` shows."),
]
ModeOption = Annotated[
    Mode | None,
    typer.Option(
        help="sbd: blocks. ntp: token by token. verified: blocks that give exactly the tokens of "
        "ntp. Default: the checkpoint's, else sbd."
    ),
]
SolverOption = Annotated[str | None, typer.Option(help=SOLVERS_HELP)]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a block. Default: the checkpoint's, else 16; with --draft branches up to "
        "that, what is quickest by arithmetic."
    ),
]
SeedFirstOption = Annotated[
    bool,
    typer.Option(
        "--next-token-seed",
        help="Mode sbd: the first token of each block is the next-token one, at no forward's cost.",
    ),
]
FallbackOption = Annotated[
    float | None,
    typer.Option(
        help="Mode sbd: finish a block token by token once every masked slot's entropy is above "
        "this many nats. Default: never."
    ),
]
DraftOption = Annotated[
    Draft | None,
    typer.Option(
        help="Mode verified: branches drafts in the forward that verifies, solver in forwards of "
        "its own, with --solver. Default: branches."
    ),
]
BranchesOption = Annotated[
    int | None,
    typer.Option(
        help="Mode verified: behind how many accepted lengths, the likeliest, the next draft is "
        "made. Default: what is quickest by arithmetic."
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        help="Mode verified: for each of them, drafts that begin with one of the likeliest tokens. "
        "Default: what is quickest by arithmetic."
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Default: the checkpoint's, else float32 on a CPU and bfloat16 elsewhere."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1 ... Default: the checkpoint's, else cuda if there is one."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def generate(
    model_name: ModelName,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt. Default: read from stdin.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File that holds the prompt.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids such as 1,2,3, used as they are.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    mode: ModeOption = None,
    mask_token_id: MaskTokenOption = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of this mass.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")
    ] = False,
    next_token_seed: SeedFirstOption = False,
    fallback: FallbackOption = None,
    draft: DraftOption = None,
    branches: BranchesOption = None,
    seeds: SeedsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    show_steps: Annotated[
        bool, typer.Option("--show-steps", help="Show what each forward revealed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt.

    Seconds count neither loading nor the warm-up (a two-token answer to a one-token prompt).
    """
    from setblock.generation import encode, settings_for, stream

    text_or_ids = _read_prompt(prompt, prompt_file, prompt_ids)
    model = _load(model_name, dtype, device, mask_token_id)
    options: dict[str, Any] = {
        "mode": mode.value if mode else None,
        "solver": solver,
        "block_size": block_size,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
        "next_token_seed": next_token_seed or None,
        "fallback": fallback,
        "draft": draft.value if draft else None,
        "branches": branches,
        "seeds": seeds,
    }
    settings = settings_for(model, **options)
    ids = encode(model, [text_or_ids], chat=chat)  # type: ignore[arg-type]
    reveals = stream(model, ids, **options)  # checks the prompt before the first forward
    _warn_untrained(model, settings.mode)
    if settings.mode == "verified" and settings.block_size == 1 and block_size is None:
        err.print(
            "drafting does not pay here by arithmetic: decoding token by token (--block-size "
            "drafts all the same)",
            style="yellow",
        )
    _warm_up(model, settings.mode)
    steps, generation = [], None
    for reveal in reveals:
        steps.append(reveal)
        generation = reveal.generation
        if as_json:
            continue
        if show_steps:
            pieces = ", ".join(
                f"{place}:{model.decode([token])!r}" for place, token in reveal.drafts
            )
            print(f"forward {reveal.nfe}: {pieces}", flush=True)
        else:  # not through rich, which drops control characters and expands tabs
            print(reveal.text, end="", flush=True)
    assert generation is not None
    if as_json:
        answer = to_json(generation, model)
        if show_steps:
            answer["steps"] = [{"nfe": one.nfe, "drafts": one.drafts} for one in steps]
        _print_json(answer)
        return
    print(generation.text if show_steps else "", flush=True)
    err.print(
        f"{generation.num_tokens} tokens, {generation.nfe} forwards, "
        f"{generation.tokens_per_forward:.2f} tokens per forward, {generation.wall_s:.2f} s "
        f"({generation.finish_reason})",
        style="dim",
    )


@app.command()
def info(
    model_name: ModelName,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's architecture, mask token, whether it is SBD-trained, and its defaults."""
    model = _load(model_name, dtype, device, mask_token_id)
    config = model.network.config
    facts = {
        "model": model.name,
        "architecture": type(model.network).__name__,
        "parameters": sum(weight.numel() for weight in model.network.parameters()),
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
    }
    if as_json:
        _print_json(facts)
        return
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, f"{value:,}" if name == "parameters" else str(value))
    out.print(table)


@app.command()
def demo(
    model_name: Annotated[str, typer.Option("--model", help="Which model answers.")] = "nano",
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Ask this instead of the built-in problems; may be given again."),
    ] = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    seed: Annotated[int, typer.Option(help="Other built-in problems.")] = 0,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Show tokens as forwards reveal them.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Watch a model answer prompts twice: token by token, then by set block decoding."""
    from setblock import live as show
    from setblock import nano

    model = _load(model_name, None, None, None)
    _warn_untrained(model, "sbd")
    problems = [] if prompt else [nano.problems(name, "test", 1, seed)[0] for name in nano.FAMILIES]
    prompts = prompt or [problem.prompt for problem in problems]
    for mode in (Mode.ntp, Mode.sbd):
        _warm_up(model, mode)
    answers = []
    for number, question in enumerate(prompts):
        if not as_json:
            out.rule(Text(f"{number + 1} of {len(prompts)}", style="bold"))
            out.print(question, style="bold")
        for mode in (Mode.ntp, Mode.sbd):
            options: dict[str, Any] = {"mode": mode, "solver": solver, "block_size": block_size}
            console = None if as_json else out
            generation = show.watch(model, question, options, console, animate=live)
            right = nano.check(problems[number], generation.text) if problems else None
            answers.append({"prompt": question, "correct": right, **to_json(generation, model)})
    totals = [show.total(answers, mode) for mode in (Mode.ntp, Mode.sbd)]
    if as_json:
        _print_json({"model": model.name, "answers": answers, "totals": totals})
        return
    out.print(show.table(totals))


@app.command()
def evaluate(
    model_names: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Models, as for `generate`.")
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="nano (all five families) or families of it; or, with --data, one of gsm8k, "
            "svamp, math, humaneval, mbpp, prompts (no right answer: for speed). Default: nano."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The task's file: JSON, JSONL or gzipped JSONL.")
    ] = None,
    shots: Annotated[
        int, typer.Option(help="Solved examples before each question, with --data.")
    ] = 0,
    shots_data: Annotated[
        Path | None, typer.Option(help="Their file; its first rows are taken.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain text, no chat template, with --data.")
    ] = False,
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Problems in wordings that training never saw.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Problems of each family.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Problems decoded together.")] = 32,
    mode: Annotated[
        list[Mode] | None, typer.Option(help="May be given again. Default: ntp and sbd.")
    ] = None,
    solver: Annotated[
        list[str] | None, typer.Option(help=f"May be given again. {SOLVERS_HELP}")
    ] = None,
    block_size: BlockSizeOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 256,
    next_token_seed: SeedFirstOption = False,
    fallback: FallbackOption = None,
    draft: DraftOption = None,
    branches: BranchesOption = None,
    seeds: SeedsOption = None,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the record to this JSON file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score models on tasks under several decoding settings; writes one JSON record.

    Tasks humaneval and mbpp run the model's code, in a subprocess with limits that are no security
    boundary: use a container for models you do not trust.
    """
    from setblock import evaluate as evaluation
    from setblock import nano
    from setblock.generation import settings_for
    from setblock.live import progress_bar
    from setblock.tasks import load_items

    form = None
    if data is not None:
        form = _task_form(task or [], data, shots, shots_data, plain, split, held_out)
    elif shots or shots_data or plain:
        raise ValueError("--shots, --shots-data and --plain are for benchmark tasks, with --data")
    families = [form.task.name] if form else evaluation.families(task or ["nano"])
    modes = mode or [Mode.ntp, Mode.sbd]
    drafts = Mode.verified in modes and draft == Draft.solver
    if solver and Mode.sbd not in modes and not drafts:
        raise ValueError(
            "--solver is for mode sbd, or mode verified with --draft solver, which --mode leaves "
            f"out; got {solver}"
        )
    own = {
        Mode.sbd: {"next_token_seed": next_token_seed or None, "fallback": fallback},
        Mode.verified: {"draft": draft and draft.value, "branches": branches, "seeds": seeds},
    }
    for one, values in own.items():
        given = [name.replace("_", "-") for name, value in values.items() if value is not None]
        if given and one not in modes:
            raise ValueError(f"--{given[0]} is for mode {one.value}, which --mode leaves out")
    for name, value in (("limit", limit), ("batch-size", batch_size)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    problems: dict[str, Any]
    if form and data:
        problems = {form.task.name: load_items(form.task, data, limit)}
    else:
        problems = {name: nano.problems(name, split, limit, held_out=held_out) for name in families}
    common: dict[str, Any] = {"block_size": block_size, "max_new_tokens": max_new_tokens}
    if form and not form.chat:
        common["stop"] = form.task.stop
    record = evaluation.new_record()
    for model_name in model_names:
        model = _load(model_name, dtype, device, mask_token_id)
        runs: list[dict[str, Any]] = [{"mode": "ntp", **common}] if Mode.ntp in modes else []
        for one, values in own.items():
            if one in modes:
                _warn_untrained(model, one.value)
                solvers = (solver or [None]) if one == Mode.sbd or drafts else [None]
                runs += [
                    {"mode": one.value, "solver": text, **common, **values} for text in solvers
                ]
        for options in runs:
            settings_for(model, **options)  # bad values are refused before the first problem
        for options in runs:
            _warm_up(model, options["mode"])
            for family in families:
                label = f"{model_name} {options['mode']} {options.get('solver') or ''} {family}"
                with progress_bar(err, label, len(problems[family])) as advance:
                    line = evaluation.run(
                        model, family, problems[family], batch_size, advance, form, **options
                    )
                place = {} if form else {"split": split, "held_out": held_out}
                record["results"].append(line | place)
                if out_file is not None:  # after every line, so that an interrupt loses nothing
                    evaluation.save_record(record, out_file)
    if as_json:
        _print_json(record)
        return
    out.print(evaluation.table(record["results"]))


@app.command()
def roofline(
    model_name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="llama-3.1-8b, llama-3.1-70b, qwen3-8b, qwen3-32b, smollm2-135m, paper, or the "
            "folder or hub name of a configuration. Default: llama-3.1-8b.",
        ),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Tables 3 and 4 as printed: paper's model, h100-paper, fp8."),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="h100-paper, h100, h200, a100, l4, rtx-4090, mi300x, b200, or cpu: this one, "
            "measured. Default: h100."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="fp8, bf16, int4, or, on a CPU, fp32. Default: bf16.")
    ] = None,
    cache: Annotated[str | None, typer.Option(help="Of keys and values, likewise.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows; may be given again. Default: 1, 4, 8, 16.")
    ] = None,
    kv: Annotated[
        list[int] | None,
        typer.Option(help="Tokens in the cache; may be given again. Default: 16, 256 ... 4194304."),
    ] = None,
    block_size: Annotated[
        list[int] | None, typer.Option(help="May be given again. Default: 2, 4 ... 64.")
    ] = None,
    nfe_speedup: Annotated[
        list[int] | None, typer.Option(help="Tokens per forward; again. Default: 2, 4, 8.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict by arithmetic what a forward of a block costs, and what fewer forwards gain."""
    from setblock import machines
    from setblock import roofline as arithmetic

    given = {"MODEL": model_name, "--device": device, "--weights": weights, "--cache": cache}
    if paper and (ignored := [name for name, value in given.items() if value is not None]):
        raise ValueError(
            f"--paper has its own model and machine; leave out {' and '.join(ignored)}"
        )
    model_name = model_name or ("paper" if paper else "llama-3.1-8b")
    device = device or ("h100-paper" if paper else "h100")
    for name, values in (
        ("batch", batch), ("kv", kv), ("block-size", block_size), ("nfe-speedup", nfe_speedup)
    ):  # fmt: skip
        if any(value < 1 for value in values or []):
            raise ValueError(f"--{name} must be at least 1, got {values}")
    machine = machines.device(device, weights, cache)
    cells = arithmetic.tables(
        machines.find_model(model_name),
        machine,
        batch or [1, 4, 8, 16],
        kv or [2**n for n in (range(4, 23) if as_json else range(4, 23, 4))],
        block_size or [2, 4, 8, 16, 32, 64],
        nfe_speedup or [2, 4, 8],
    )
    if as_json:
        _print_json({"model": model_name, "device": asdict(machine), **cells})
        return
    for key, title in (
        ("table3", "Time of a forward of a block against one of one token"),
        ("table4", "Wall-clock speed-up"),
    ):
        places = ["batch", "kv"] + (["nfe_speedup"] if key == "table4" else [])
        sizes = sorted({cell["block_size"] for cell in cells[key]})
        shown = Table(title=f"{title}: {model_name} on {machine.name}")
        for name in [*(place.replace("_", " ") for place in places), *map(str, sizes)]:
            shown.add_column(name, justify="right")
        lines: dict[tuple, list[str]] = {}
        for cell in cells[key]:
            line = lines.setdefault(tuple(cell[place] for place in places), [])
            line.append(f"{cell['value']:.3f}")
        for where, values in lines.items():
            shown.add_row(*map(str, where), *values)
        out.print(shown)


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    model_name: Annotated[
        str | None, typer.Option("--model", help="MODEL to start from, as for `generate`.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL, JSON or Parquet file, or a dataset's hub name; may be given again. Rows "
            "are prompt and completion, messages, or text; only answers have a loss."
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where the trained MODEL goes, and its checkpoints.")
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="[--FIELD VALUE]...", help="See above.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with any of these options and fields; typed ones win."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="full: all weights. lora, qlora: low-rank adapter on a frozen base, whole or in "
            "4 bits. gated: adapter on masked positions alone, next-token behaviour unchanged. "
            "Default: full."
        ),
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Of the adapter. Default: 32.")] = None,
    lora_alpha: Annotated[int | None, typer.Option(help="Its scale. Default: 64.")] = None,
    lora_dropout: Annotated[float | None, typer.Option(help="Default: 0.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a hub dataset. Default: train.")] = None,
    prompt_field: Annotated[
        str | None, typer.Option(help="The column of prompts. Default: prompt.")
    ] = None,
    completion_field: Annotated[
        str | None, typer.Option(help="The column of answers. Default: completion.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat", help="Put prompt and completion texts into the chat template."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Train on the first rows only.")] = None,
    attention: Annotated[
        str | None, typer.Option(help="sdpa, or flex_attention on a GPU. Default: sdpa.")
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            help="data: learn the data's answers. model: let the model answer the prompts first, "
            "and learn its own answers. Default: data."
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Length limit of generated answers. Default: 256.")
    ] = None,
    answer_batch_size: Annotated[
        int | None, typer.Option(help="Prompts answered together. Default: 16.")
    ] = None,
    decode_data: Annotated[
        str | None, typer.Option(help="Held-out prompts and completions, decoded now and then.")
    ] = None,
    decode_every: Annotated[int | None, typer.Option(help="Steps between two decodings.")] = None,
    decode_limit: Annotated[int | None, typer.Option(help="Rows to decode. Default: 32.")] = None,
    decode_solver: Annotated[
        str | None, typer.Option(help="With this solver. Default: entropy:0.1.")
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Go on from the output folder's checkpoint.")
    ] = None,
    mask_token_id: MaskTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model to decode by set blocks; every field of trl's SFTConfig is an option too.

    For example: --max-steps 1000 --learning-rate 1e-5 --per-device-train-batch-size 4
    --max-length 1024 --full-mask-share 0.1 --matp-weight 1 --self-distill 0.5.
    Ctrl-C or SIGTERM saves a checkpoint after the step; --resume goes on from it.
    """
    from dataclasses import fields as fields_of

    _quiet_libraries()
    from setblock.finetune import Run, finetune

    typed = {
        **{"model": model_name, "data": data, "output_dir": output_dir, "method": method},
        **{"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout},
        **{"split": split, "prompt_field": prompt_field, "completion_field": completion_field},
        **{"chat": chat, "limit": limit, "answers": answers, "answer_tokens": answer_tokens},
        **{"attention": attention},
        **{"answer_batch_size": answer_batch_size, "decode_data": decode_data},
        **{"decode_every": decode_every, "decode_limit": decode_limit},
        **{"decode_solver": decode_solver, "resume": resume, "mask_token_id": mask_token_id},
    }
    settings, words = _read_config(config, {one.name for one in fields_of(Run)})
    settings |= {name: value for name, value in typed.items() if value is not None}
    if missing := [name for name in ("model", "data", "output_dir") if name not in settings]:
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"missing: {names} (on the command line or in --config)")
    run = Run(**settings)
    words += fields or []

    def say(line: str) -> None:
        err.print(line, style="dim", markup=False, highlight=False)

    if as_json:
        with contextlib.redirect_stdout(sys.stderr):  # the trainer prints its log lines
            summary = finetune(run, words, say)
        _print_json(summary)
    else:
        summary = finetune(run, words, say)
        out.print(f"trained {summary['steps']} steps, saved to {summary['output_dir']}")
    if summary["stopped_by"]:
        _fail(f"stopped by {summary['stopped_by']} with a checkpoint; go on with --resume", 130)


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
    _quiet_libraries()
    from setblock.finetune import merge as fold

    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"{output_dir} is not empty")
    fold(_load(model_name, Dtype.float32, "cpu", None), output_dir, dtype.value)
    summary = {"model": model_name, "output_dir": str(output_dir), "dtype": dtype.value}
    if as_json:
        _print_json(summary)
        return
    out.print(f"{model_name} is now one checkpoint, {output_dir}")


def _task_form(
    tasks: list[str],
    data: Path,
    shots: int,
    shots_data: Path | None,
    plain: bool,
    split: str,
    held_out: bool,
) -> "Form":
    """How the one benchmark task that --data is for is put."""
    from setblock.evaluate import Form
    from setblock.tasks import TASKS, load_items

    if len(tasks) != 1 or tasks[0] not in TASKS:
        raise ValueError(f"--data is for one --task of {', '.join(TASKS)}; got {tasks or None}")
    if held_out or split != "test":
        raise ValueError("--split and --held-out are for the nano tasks; --data is one split")
    if shots < 0 or bool(shots) != (shots_data is not None):
        raise ValueError(f"--shots and --shots-data need each other; got {shots} and {shots_data}")
    task = TASKS[tasks[0]]
    examples = tuple(load_items(task, shots_data, shots)) if shots_data else ()
    if len(examples) < shots:
        raise ValueError(f"--shots {shots}: {shots_data} has {len(examples)} rows")
    return Form(task, not plain, examples, data)


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
    content = {
        str(name).replace("-", "_"): value
        for name, value in content.items()
        if value is not None  # null: the default
    }
    settings = {name: value for name, value in content.items() if name in own}
    if isinstance(settings.get("data"), str):
        settings["data"] = [settings["data"]]
    if "output_dir" in settings:
        settings["output_dir"] = Path(str(settings["output_dir"]))
    words = []
    for name, value in content.items():
        if name not in own:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return settings, words


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
        "next_token_seed": settings.next_token_seed,
        "fallback": settings.fallback,
        "draft": settings.draft if settings.mode == "verified" else None,
        "branches": settings.branches,
        "seeds": settings.seeds,
        "model": model.name,
        "mask_token_id": model.mask_token_id,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }


def _read_prompt(prompt: str | None, file: Path | None, ids: str | None) -> str | list[int]:
    given = [
        name
        for name, value in (("--prompt", prompt), ("--prompt-file", file), ("--prompt-ids", ids))
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"give one prompt: {' and '.join(given)} exclude each other")
    if ids is not None:
        try:
            return [int(token) for token in ids.split(",")]
        except ValueError:
            raise ValueError(f"--prompt-ids must be numbers such as 1,2,3, got {ids!r}") from None
    if file is not None:
        return file.read_text(encoding="utf-8")
    if prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt, --prompt-file, --prompt-ids or stdin")
    text = sys.stdin.read() if prompt is None else prompt
    text.encode()  # bytes that are no UTF-8 came as surrogates: ValueError
    return text


def _load(name: str, dtype: Dtype | None, device: str | None, mask_token_id: int | None) -> "Model":
    from transformers.utils import logging as transformers_logging

    from setblock.model import load

    transformers_logging.disable_progress_bar()  # ours is the spinner, and only on a terminal
    with err.status(Text(f"loading {name}")):
        return load(name, dtype=dtype and dtype.value, device=device, mask_token_id=mask_token_id)


def _quiet_libraries() -> None:
    """What libraries say at import and nobody here can act on, before they are imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # no prebuilt CPU kernels for it
    # trl's own default for SFTConfig; transformers will rename the field.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)


def _warn_untrained(model: "Model", mode: str) -> None:
    if mode != "ntp" and not model.trained:
        err.print(
            f"warning: {model.name} was never trained for set block decoding; expect "
            + ("poor text" if mode == "sbd" else "no speed-up")
            + " (mode ntp is unaffected)",
            style="yellow",
        )


def _warm_up(model: "Model", mode: str) -> None:
    """First forwards allocate and choose kernels; keep that out of the times."""
    from setblock.generation import generate as answer

    first = (
        model.bos_token_id
        if model.bos_token_id is not None
        else min(model.eos_token_ids, default=0)
    )
    answer(model, [[first]], mode=mode, max_new_tokens=2, ignore_eos=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _fail(message: str, code: int) -> NoReturn:
    err.print("error:", " ".join(message.split()), style="red")
    try:
        sys.stdout.flush()
    except OSError:  # a full disk; the interpreter would try again at exit and complain
        sys.stdout = open(os.devnull, "w")
    sys.exit(code)


def main() -> None:
    """Run the command line; an expected failure is one line on stderr and a non-zero exit code."""
    try:
        code = app(prog_name="setblock", standalone_mode=False)
    except typer.TyperException as error:  # words that no command takes
        _fail(error.format_message() or "a command is missing", error.exit_code)
    except (ValueError, TypeError, ImportError, OSError) as error:
        _fail(str(error) or type(error).__name__, 1)
    if code == 130:  # typer's answer to Ctrl-C
        _fail("interrupted", code)
