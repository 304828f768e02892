"""Commands that predict by arithmetic: roofline, plan."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from setblock.cli.common import (
    app,
    err,
    out,
    print_json,
    print_table,
    refuse_below_one,
)
from setblock.cli.options import (
    JsonOption,
)

if TYPE_CHECKING:
    from setblock.roofline import Dimensions


@app.command()
def roofline(
    model_name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="llama-3.1-8b, llama-3.1-70b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, smollm2-135m, "
            "paper, a bundled model, or the folder or hub name of a configuration. "
            "Default: llama-3.1-8b.",
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
        str | None,
        typer.Option(help="fp8, bf16, int4, or, on a CPU, fp32. Default: bf16; fp32 on cpu."),
    ] = None,
    cache: Annotated[str | None, typer.Option(help="Of keys and values, likewise.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows; may be given again. Default: 1, 4, 8, 16.")
    ] = None,
    kv: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens in a row's cache; may be given again. Default: 1024, 8192, 32768; with "
            "--paper 16, 256 ... 1048576."
        ),
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
    refuse_below_one(batch=batch, kv=kv, block_size=block_size, nfe_speedup=nfe_speedup)
    wide = [size for size in block_size or [2, 4, 8, 16, 32, 64] if size >= 8]  # of table 4
    if nfe_speedup and not wide:
        raise ValueError(f"--nfe-speedup is for blocks of at least 8, got blocks of {block_size}")
    if wide and max(nfe_speedup or [0]) > min(wide):
        raise ValueError(
            f"--nfe-speedup {max(nfe_speedup or [0]):g} is more than a block of {min(wide)} holds"
        )
    machine = machines.device(device, weights, cache)
    if not kv:
        printed = [2**n for n in (range(4, 23) if as_json else range(4, 23, 4))]
        kv = printed if paper else [1024, 8192, 32768]
    sizes, gains = block_size or [2, 4, 8, 16, 32, 64], nfe_speedup or [2, 4, 8]
    each_size = set(sizes)
    each = (list(dict.fromkeys(some)) for some in (batch or [1, 4, 8, 16], kv, sizes, gains))
    cells = arithmetic.tables(machines.find_model(model_name), machine, *each)
    if as_json:
        print_json({"model": model_name, "device": asdict(machine), **cells})
        return
    for key, title in (
        (
            "table3",
            "Time of a forward of a block of k against one of one token, by batch and cache",
        ),
        ("table4", "Wall-clock speed-up of blocks of k at that many tokens per forward"),
    ):
        if not cells[key]:  # no block is wide enough
            continue
        places = ["batch", "kv"] + (["nfe_speedup"] if key == "table4" else [])
        sizes = sorted({cell["block_size"] for cell in cells[key]})
        caption = (
            "batch: rows; kv: tokens in each row's cache; k: block size"
            + "; nfe speedup: times fewer forwards than tokens" * ("nfe_speedup" in places)
            + "; blocks under 8 are left out" * (key == "table4" and set(wide) < each_size)
        )
        shown = Table(title=f"{title}: {model_name} on {machine.name}", caption=caption)
        for name in [*(place.replace("_", " ") for place in places), *(f"k={k}" for k in sizes)]:
            shown.add_column(name, justify="right")
        lines: dict[tuple, list[str]] = {}
        for cell in cells[key]:
            line = lines.setdefault(tuple(cell[place] for place in places), [])
            line.append(f"{cell['value']:.3f}")
        for where, values in lines.items():
            shown.add_row(*map(str, where), *values)
        print_table(shown)


@app.command()
def plan(
    model_name: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model's name or configuration, as for `roofline`."),
    ],
    device: Annotated[str, typer.Option(help="As for `roofline`.")] = "h100",
    weights: Annotated[str | None, typer.Option(help="As for `roofline`.")] = None,
    cache: Annotated[str | None, typer.Option(help="Of keys and values, likewise.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows; may be given again. Default: 1, 4, 16, 64.")
    ] = None,
    prompt_length: Annotated[int, typer.Option(help="Tokens in each row's cache.")] = 1024,
    block_size: Annotated[
        list[int] | None,
        typer.Option(help="Of mode sbd, to choose from; may be given again. Default: 16."),
    ] = None,
    tokens_per_forward: Annotated[
        list[float] | None,
        typer.Option(
            help="Of mode sbd, once for each --block-size: what `evaluate` measures; the paper has "
            "3 to 5. Default: 3."
        ),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="Of drafted tokens in mode verified, as `evaluate` fits. Default: the "
            "checkpoint's, else 0.8."
        ),
    ] = None,
    dispatch_ms: Annotated[
        float | None,
        typer.Option(
            help="Fixed milliseconds of a layer in a forward. Default: what --measured shows, else "
            "0.5, this package's own; 0 is the bare roofline; 0.17 was measured on an H100 under "
            "CUDA graphs."
        ),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds per token to meet, at the first --batch: which known models do so, "
            "by which mode."
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="Record of `setblock benchmark`: its forwards beside the predicted."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which mode, block size and batch pay on a machine, by arithmetic.

    With --latency also which known models are quick enough.

    Communication and memory's size are left out. Check what matters with `setblock benchmark`.
    """
    from setblock import machines, roofline
    from setblock import plan as planning

    sizes, rates = block_size or [16], tokens_per_forward or [3.0]
    batches = list(dict.fromkeys(batch or [1, 4, 16, 64]))
    refuse_below_one(batch=batches, block_size=sizes, prompt_length=prompt_length)
    if min(sizes) < 2:
        raise ValueError("--block-size must be at least 2: a block of 1 is mode ntp")
    if len(sizes) != len(rates) or len(set(sizes)) < len(sizes):
        raise ValueError(
            "--tokens-per-forward depends on the block size: give it once for each --block-size, "
            f"got {sizes} and {rates}"
        )
    for size, rate in zip(sizes, rates, strict=True):
        if not 1 <= rate <= size:
            raise ValueError(
                f"--tokens-per-forward must lie in 1..{size}, the block size, got {rate:g}"
            )
    whose = "--acceptance"
    if acceptance is None and (acceptance := planning.acceptance_of(model_name)) is not None:
        whose = f"{model_name}'s own; --acceptance"
    acceptance = roofline.ACCEPTANCE if acceptance is None else acceptance
    if not 0 < acceptance < 1:
        raise ValueError(f"--acceptance must lie between 0 and 1, got {acceptance}")
    if dispatch_ms is not None and not 0 <= dispatch_ms < float("inf"):
        raise ValueError(f"--dispatch-ms must be at least 0, got {dispatch_ms}")
    if latency is not None and not 0 < latency < float("inf"):
        raise ValueError(f"--latency must be above 0, got {latency}")
    machine = machines.device(device, weights, cache)
    dimensions = machines.find_model(model_name)
    forwards = _measured_forwards(measured, dimensions, machine.name) if measured else []
    if dispatch_ms is not None:
        dispatch_s = dispatch_ms / 1000
    elif forwards:
        dispatch_s = planning.measured_dispatch_s(dimensions, machine, forwards)
    else:
        dispatch_s = roofline.DISPATCH_S
    rate_of = dict(zip(sizes, rates, strict=True))
    given = planning.Assumptions(rate_of, acceptance, prompt_length, dispatch_s)
    found: dict[str, Any] = {"model": model_name, **planning.describe(given, machine)}
    with err.status("block sizes, branches and batches are weighed"):
        found["choices"] = [
            line for rows in batches for line in planning.choices(dimensions, machine, rows, given)
        ]
        found["paying_batches"] = planning.paying_batches(dimensions, machine, given)
        if latency is not None:
            found["right_size"] = planning.right_size(machine, batches[0], given, latency)
    if forwards:
        found["forwards"] = planning.beside_measured(dimensions, machine, forwards, dispatch_s)
    if as_json:
        print_json(found)
        return
    place = f"{model_name} on {machine.name}, {prompt_length} tokens in the cache"
    told = ", ".join(
        f"{rate:g} tokens per forward in blocks of {size}" for size, rate in rate_of.items()
    )
    driven = f"{1000 * dispatch_s:.3g} ms a layer for the Python that drives it (--dispatch-ms)"
    assumed = (
        f"assumed, not measured: in mode sbd {told} (--tokens-per-forward); in "
        f"mode verified {acceptance:g} of the drafted tokens accepted ({whose}); in each "
        f"forward {driven}"
    )
    if forwards and dispatch_ms is None:
        assumed = f"{assumed.rpartition('; ')[0]}. From {measured}: in each forward {driven}"
    title = f"{place}: the quickest first"
    print_table(_table(title, found["choices"], ("batch", *SETTING), assumed))
    out.print("the text of mode verified is that of ntp; that of sbd may be another")
    for mode, batches_of in found["paying_batches"].items():
        if batches_of is None:
            out.print(f"{mode} pays at no batch up to {planning.LARGEST_BATCH}")
            continue
        least, most = batches_of
        more = " or more" if most == planning.LARGEST_BATCH else ""
        start = f"from a batch of {least} " if least > 1 else ""
        out.print(f"{mode} pays {start}up to a batch of {most}{more}")
    if dimensions.experts is not None:
        out.print("each token is taken to choose its experts independently of the others")
    if latency is not None:
        title = f"{latency:g} ms per token at a batch of {batches[0]} on {machine.name}"
        print_table(_table(title, found["right_size"], ("model", *SHORT_SETTING, "meets")))
    if forwards:
        names = ("batch_size", "cached", "queries", "ratio", "predicted_ratio")
        print_table(_table("Forwards against one of one token", found["forwards"], names))


SETTING = (
    "mode", "block_size", "branches", "seeds", "tokens_per_forward", "ms_per_token", "speedup",
)  # fmt: skip
# So many fit beside a model into 80 columns; --json has all.
SHORT_SETTING = ("mode", "block_size", "branches", "tokens_per_forward", "ms_per_token")


def _table(
    title: str, lines: list[dict[str, Any]], names: tuple[str, ...], caption: str | None = None
) -> Table:
    """These columns of the lines; numbers to two places, yes and no, blank where there is none."""
    shown = Table(title=title, caption=caption)
    for name in names:
        justify = "left" if name in ("model", "mode") else "right"
        head = name.replace("_per_", " per\n").replace("_", "\n")
        shown.add_column(head, justify=justify, no_wrap=True)
    for line in lines:
        shown.add_row(*(_cell(line[name]) for name in names))
    return shown


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _measured_forwards(path: Path, dimensions: "Dimensions", machine: str) -> list[dict[str, Any]]:
    """The timed forwards of a benchmark record of this model on such a machine."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        lines, of = record["forwards"], record["dimensions"]
        on = "cpu" if record["machine"]["cuda"] is None else record["machine"]["cuda"]
        names = ("batch_size", "cached", "queries", "ratio", "seconds")
        if not all(float(line[name]) >= 0 for line in lines for name in names):
            raise KeyError("forwards")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--measured {path} is no record of `setblock benchmark`") from error
    if not lines:
        raise ValueError(
            f"--measured {path} holds no timed forwards, as of a benchmark that was interrupted"
        )
    # Records of before mixtures of experts were told of say nothing of them.
    if {"experts": None, **of} != json.loads(json.dumps(asdict(dimensions))):
        raise ValueError(f"--measured {path} was measured with a model of other dimensions")
    if (on == "cpu") != machine.startswith("cpu"):
        raise ValueError(f"--measured {path} was measured on {on}, and --device is {machine}")
    return lines
