"""What the commands share: the application, its consoles, options, and how it loads and fails."""

import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from setblock import imported

if TYPE_CHECKING:
    from setblock.model import Model
    from setblock.settings import Settings
    from setblock.tasks import DataRows, Task

app = typer.Typer(
    help="Set block decoding: several tokens per forward from an ordinary causal language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COLUMNS = 80  # of a terminal, which tables are made for
# Names and model text are shown as they are: no [markup], no :emoji:.
PLAIN: Any = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
out, err = Console(**PLAIN), Console(stderr=True, **PLAIN)


def print_table(table: Table) -> None:
    """Print a table, of which some need 80 columns; on a narrower terminal its lines wrap."""
    wide = out if out.width >= COLUMNS else Console(width=COLUMNS, **PLAIN)
    wide.print(table)


def _version(asked: bool | None) -> None:
    if asked:
        from importlib.metadata import version

        print(version("setblock"))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit."),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE.py",
            help="Run this Python file first, which makes solvers of your own known by "
            "setblock.solvers.register. Before the command; may be given again.",
        ),
    ] = None,
) -> None:
    """Set block decoding: several tokens per forward from an ordinary causal language model."""
    for path in files or ():
        with starting():
            imported.run(path)


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
    float16 = "float16"


# Parts of a long --help; what stands in none is printed first.
DECODING, SBD, VERIFIED = "Decoding", "Decoding in mode sbd", "Decoding in mode verified"
SAMPLING, MACHINE = "Sampling", "Model and machine"

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
        help="A bundled model (nano, nano-twin, smollm2, smollm2-base), a checkpoint folder, a "
        "GGUF file, or a hub name.",
    ),
]
MaskTokenOption = Annotated[
    int | None,
    typer.Option(
        "--mask-token-id",
        help="Mask token to use instead of the one `info` shows.",
        rich_help_panel=MACHINE,
    ),
]
ModeOption = Annotated[
    Mode | None,
    typer.Option(
        help="sbd: blocks. ntp: token by token. verified: blocks that give exactly the tokens of "
        "ntp (in float32; rounding in bfloat16 can change some, --lenience below 1 does). "
        "Default: the checkpoint's, else sbd, or ntp where a model was never trained for blocks "
        "and no option of blocks is given.",
        rich_help_panel=DECODING,
    ),
]
SolverOption = Annotated[str | None, typer.Option(help=SOLVERS_HELP, rich_help_panel=DECODING)]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a block. Default: the checkpoint's, else 16. Mode verified: what `tune` "
        "wrote, else the length, up to that one, that is quickest by arithmetic.",
        rich_help_panel=DECODING,
    ),
]
SlideOption = Annotated[
    bool | None,
    typer.Option(
        help="Begin the next block behind the last final token, instead of behind the whole block, "
        "each with the token that next-token decoding has there. Default: the checkpoint's, else "
        "whole blocks.",
        rich_help_panel=SBD,
    ),
]
SeedFirstOption = Annotated[
    bool,
    typer.Option(
        "--next-token-seed",
        help="Begin each block with the token that next-token decoding has there. It "
        "takes no forward of its own.",
        rich_help_panel=SBD,
    ),
]
FallbackOption = Annotated[
    float | None,
    typer.Option(
        help="Once every masked position of a block has an entropy above this many "
        "nats, finish the block token by token. Default: never.",
        rich_help_panel=SBD,
    ),
]
DraftOption = Annotated[
    Draft | None,
    typer.Option(
        help="Where drafts come from. branches: from the forward that verifies the "
        "draft before. solver: from forwards of their own, filled by --solver. Default: what is "
        "quicker by arithmetic.",
        rich_help_panel=VERIFIED,
    ),
]
BranchesOption = Annotated[
    int | None,
    typer.Option(
        help="How many drafts a forward makes ahead, each for another number of "
        "accepted tokens, the likeliest numbers first. Default: the checkpoint's, else what is "
        "quickest by arithmetic.",
        rich_help_panel=VERIFIED,
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        help="How many more drafts each of these branches gets, that begin with "
        "its likeliest next tokens. Default: the checkpoint's, else what is quickest by "
        "arithmetic.",
        rich_help_panel=VERIFIED,
    ),
]
LOOKUP_HELP = (
    "Tokens at most of a draft that is copied from the text itself: where its last tokens occurred "
    "before, what followed them there is likely to follow again. Copied if that promises more than "
    "the model's own draft. Needs no training; with --block-size 1 there are no other drafts. "
    "Default: the checkpoint's, where it pays for so many rows at once, else 0, never."
)
LookupOption = Annotated[int | None, typer.Option(help=LOOKUP_HELP, rich_help_panel=VERIFIED)]
LENIENCE_HELP = (
    "Accept a drafted token as well if its probability, with sampling's noise if "
    "any, is at least this share of that of the token that ntp says: fewer forwards, and no longer "
    "exactly the tokens of ntp."
)
LenienceOption = Annotated[
    float | None,
    typer.Option(help=f"{LENIENCE_HELP} Default: 1, exactly those.", rich_help_panel=VERIFIED),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopPOption = Annotated[
    float,
    typer.Option(help="Sample from the likeliest tokens of this mass.", rich_help_panel=SAMPLING),
]
TopKOption = Annotated[
    int, typer.Option(help="Sample from this many tokens; 0 is all.", rich_help_panel=SAMPLING)
]
MinPOption = Annotated[
    float,
    typer.Option(
        help="Sample from tokens of at least this share of the likeliest one's probability; 0 is "
        "off.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionOption = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        help="Modes ntp and verified: divide the logits of tokens that the prompt or the answer "
        "has, multiply negative ones; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
PresenceOption = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        help="Modes ntp and verified: taken from the logits of tokens that the answer has.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyOption = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="Modes ntp and verified: the same for each time that the answer has the token.",
        rich_help_panel=SAMPLING,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Of the sampling noise.", rich_help_panel=SAMPLING)]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        metavar="TYPE",  # all of them would be wider than their column
        help="float32, bfloat16 or float16. Default: the checkpoint's, else float32 on a CPU and "
        "bfloat16 elsewhere, float16 on GPUs that compute in no bfloat16, such as T4 and V100.",
        rich_help_panel=MACHINE,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1 ... Default: the checkpoint's, else cuda if there is one.",
        rich_help_panel=MACHINE,
    ),
]


class Switch(StrEnum):
    """Whether."""

    on = "on"
    off = "off"


class Compile(StrEnum):
    """What forwards behind a prompt run as."""

    off = "off"
    on = "on"
    kernels = "kernels"
    graphs = "graphs"


CompileOption = Annotated[
    Compile,
    typer.Option(
        "--compile",
        help="kernels: decode in kernels that torch.compile makes at the first forwards, which "
        "takes a minute or more on a CPU, and less the next time. graphs: replay forwards of "
        "torch's own kernels as CUDA graphs; nothing to wait for. on: kernels, on a GPU as graphs.",
        rich_help_panel=MACHINE,
    ),
]
PackOption = Annotated[
    Switch | None,
    typer.Option(
        "--pack",
        help="on: lay out linear layers' weights for a CPU's kernels while loading. Default: on "
        "where that is possible.",
        rich_help_panel=MACHINE,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def load_model(
    name: str,
    dtype: Dtype | str | None,
    device: str | None,
    mask_token_id: int | None,
    compile: Compile = Compile.off,
    pack: Switch | None = None,
) -> "Model":
    """The model of a command; a spinner on a terminal meanwhile."""
    with starting(name):
        from transformers.utils import logging as transformers_logging

        from setblock.loading import load

    transformers_logging.disable_progress_bar()  # ours is the spinner, and only on a terminal
    transformers_logging.set_verbosity_error()  # what is wrong is in our one line
    with err.status(Text(f"loading {name}")):
        return load(
            name,
            dtype=dtype and str(dtype),
            device=device,
            mask_token_id=mask_token_id,
            compile=compile.value,
            pack=None if pack is None else pack is Switch.on,
        )


def starting(*models: str) -> Status:
    """A spinner on a terminal, for the seconds that importing torch and transformers takes.

    Raises: ModelError before that for a MODEL of a name that none can have.
    """
    from setblock.names import check

    quiet_libraries()
    for model in models:
        check(model)
    return err.status("starting")


def quiet_libraries() -> None:
    """What libraries say at import and nobody here can act on, before they are imported."""
    # trl's own default for SFTConfig; transformers will rename the field.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # each of its tries


def warn_unfit(model: "Model", mode: str) -> None:
    """One line on stderr for a model that is not made for this mode."""
    from setblock.generation import unfit

    if why := unfit(model, mode):
        err.print(f"warning: {why}", style="yellow")
    model.told.add(mode)


def refuse_idle(modes: Iterable[str], **given: Any) -> None:
    """Raises: ValueError for an option of blocks that was given where all modes are ntp."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None and set(modes) == {Mode.ntp}:
        option = "--" + name.replace("_", "-")
        raise ValueError(f"{option} is for modes sbd and verified, got {given[name]} in mode ntp")


def refuse_without(mode: str, modes: Iterable[str], **given: Any) -> None:
    """Raises: ValueError for an option of this mode that was given where no mode is this."""
    modes = list(modes)
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None and mode not in modes:
        option = "--" + "no-" * (given[name] is False) + name.replace("_", "-")
        are = "modes are" if len(modes) > 1 else "mode is"
        raise ValueError(f"{option} is for mode {mode}, and the {are} {', '.join(modes)}")


def refuse_below_one(**given: Any) -> None:
    """Raises: ValueError for an option below 1; a number, several, or None if it was not given."""
    for name, told in given.items():
        values = told if isinstance(told, Sequence) else [told]
        if wrong := [value for value in values if value is not None and value < 1]:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {wrong[0]}")


def refuse_solvers(solvers: Sequence[str] | None) -> None:
    """Raises: ValueError for one that is none, or is given twice, in whatever words."""
    from setblock.solvers import parse

    rules = [str(parse(one)) for one in solvers or ()]
    if len(set(rules)) < len(rules):
        raise ValueError(f"--solver must be given once for each, got {list(solvers or ())}")


def rows_of(
    tasks: Sequence[str], data: str, split: str | None, usual: str, nano: str = ""
) -> tuple["Task", "DataRows"]:
    """The one task that --data is for, and its rows.

    usual: the split of a hub dataset where none is given. nano: what else has splits, for errors.
    Raises: ValueError; OSError.
    """
    from setblock.tasks import TASKS, read_rows

    if len(tasks) != 1 or tasks[0] not in TASKS:
        raise ValueError(
            f"--data is for one --task of {', '.join(TASKS)}; got {', '.join(tasks) or 'none'} "
            "(prompts without right answers: --task prompts)"
        )
    refuse_split(split, data, nano)
    return TASKS[tasks[0]], read_rows(data, split or usual)


def refuse_split(split: str | None, data: str, nano: str = "") -> None:
    """Raises: ValueError for a split of rows in a file."""
    if split is not None and Path(data).exists():
        raise ValueError(f"--split is for {nano}hub datasets; a file is one split")


def warm_up(model: "Model", options: dict[str, Any]) -> None:
    """First forwards allocate, choose and make kernels: not in the times of these options."""
    from setblock.generation import generate as answer
    from setblock.settings import FORMATS

    first = (
        model.bos_token_id
        if model.bos_token_id is not None
        else min(model.eos_token_ids, default=0)
    )
    few = 24 if model.compiled else 2  # as many as bring every kind of forward
    few = min(few, options.get("max_new_tokens") or few)
    own: Any = {**options, "max_new_tokens": few, "ignore_eos": True, "stop": ()}
    own |= dict.fromkeys(FORMATS)  # which know how an answer ends
    answer(model, [[first]], **own)


def tell_undrafted(settings: "Settings", block_size: int | None, rows: int = 1) -> None:
    """One line on stderr where verified decoding drafts nothing, unless that was asked for."""
    drafts = settings.block_size > 1 or settings.lookup
    if settings.mode == "verified" and not drafts and block_size is None:
        several = f" for {rows} rows at once" if rows > 1 else ""
        err.print(
            f"drafting does not pay here by arithmetic{several}: decoding token by token "
            "(--block-size drafts all the same)",
            style="yellow",
        )


def busy_note() -> None:
    """One line on stderr behind times that were taken on a busy CPU."""
    import torch

    if not hasattr(os, "getloadavg"):  # Windows
        return
    load, cores, threads = os.getloadavg()[0], os.cpu_count() or 1, torch.get_num_threads()
    if load > cores:
        err.print(
            f"this machine is busy (load {load:.1f} on {cores} cores), so the seconds say little"
            + (f"; OMP_NUM_THREADS=1 suffers less than {threads} threads" if threads > 1 else ""),
            style="yellow",
        )


def print_json(value: dict[str, Any]) -> None:
    """All that stdout holds with --json; numbers that JSON has no word for are null."""
    from setblock.records import finite

    if sys.stdout is None:
        raise OSError("can't write the JSON object: stdout is closed")
    print(json.dumps(finite(value), allow_nan=False), flush=True)


def fail(message: str, code: int, place: str = "") -> NoReturn:
    """One line on stderr, and the end."""
    err.print("error:", " ".join(message.split()) + place, style="red")
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # a full disk; the interpreter would try again at exit and complain
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    sys.exit(code)
