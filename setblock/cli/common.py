"""What the commands share: the application, its consoles, and how it loads, refuses and fails."""

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from setblock import imported
from setblock.cli.options import Compile, Dtype, Mode, Switch

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


def refuse_unsampled(temperature: float, **given: Any) -> None:
    """Raises: ValueError for an option of sampling without a temperature; None or 0: not given."""
    if not temperature and (useless := [name for name, value in given.items() if value]):
        option = f"--{useless[0].replace('_', '-')}"
        raise ValueError(f"{option} is for sampling: give a --temperature above 0")


def refuse_repeated(**given: Sequence[Any] | None) -> None:
    """Raises: ValueError for an option of several values that has one of them twice."""
    for name, values in given.items():
        if values and len(set(values)) < len(values):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be given once for each, got {list(values)}")


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
    Raises: ValueError.
    """
    from setblock.tasks import TASKS, read_rows

    if len(tasks) != 1 or tasks[0] not in TASKS:
        raise ValueError(
            f"--data is for one --task of {', '.join(TASKS)}; got {', '.join(tasks) or 'none'} "
            "(prompts without right answers: --task prompts)"
        )
    refuse_split(split, data, nano)
    with reading("--data", data):
        return TASKS[tasks[0]], read_rows(data, split or usual)


@contextmanager
def reading(option: str, file: str | Path) -> Iterator[None]:
    """Where the file can't be read, the error names its option. Raises: ValueError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is not UTF-8: {error}") from None
    except OSError as error:
        inline = ": write what it holds into a file" if str(file)[:1] in ("[", "{") else ""
        why = error.strerror or error
        raise ValueError(f"{option} {file} can't be read: {why}{inline}") from None


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
    own["min_new_tokens"] = 0
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
