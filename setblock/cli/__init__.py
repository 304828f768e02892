"""The `setblock` command. Every command also answers in JSON; errors are one line on stderr."""

import atexit
import gc
import inspect
import re
import signal
import sys
from contextlib import nullcontext
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

from setblock import imported
from setblock.cli import (  # noqa: F401  # each makes its commands known
    answering,
    benchmarking,
    chatting,
    measuring,
    planning,
    reporting,
    serving,
    showing,
    speeding,
    training,
    tuning,
)
from setblock.cli.common import (
    app,
    fail,
)
from setblock.signals import Stopped, stop_at_once, told

# What `setblock --help` lists together, in this order.
PANELS = {
    "Use a model": ("generate", "chat", "demo", "info", "serve"),
    "Train one": ("speedup", "train", "prompts", "merge", "export"),
    "Measure": ("evaluate", "benchmark", "profile", "report"),
    "Choose settings": ("tune", "plan", "roofline"),
}
panel_of = {name: panel for panel, names in PANELS.items() for name in names}


class _Flags:
    """A command whose flags are shown without typer's <bool>, as if a value had to be given."""

    params: Any

    def __init__(self, *words: Any, **given: Any) -> None:
        super().__init__(*words, **given)
        for option in self.params:
            if getattr(option, "is_flag", False):
                option.metavar = ""

    def get_help_option(self, ctx: Any) -> Any:
        """That of --help, which is no parameter."""
        if (option := super().get_help_option(ctx)) is not None:  # type: ignore[misc]
            option.metavar = ""
        return option


class _Command(_Flags, TyperCommand):
    """One of them."""


class _Commands(_Flags, TyperGroup):
    """All of them."""


def _name(command: CommandInfo) -> str:
    return command.name or getattr(command.callback, "__name__", "")


app.registered_commands.sort(key=lambda command: [*panel_of].index(_name(command)))
for command in app.registered_commands:
    command.rich_help_panel = panel_of[_name(command)]
    # A docstring's lines are as long as the code's; a paragraph is as wide as the terminal.
    paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    command.cls = _Command
app.info.cls = _Commands


def _told(error: typer.TyperException) -> str:
    """Typer's own message, and the value that an option can't have, which it may leave out."""
    message = error.format_message()
    problems = getattr(error.__cause__ or error.__context__, "errors", list)()
    given = [repr(one["input"]) for one in problems[:1]]
    return message + "".join(f", got {value}" for value in given if value not in message)


def _placed(message: str) -> str:
    """The message, or where --import goes, if it is of that word behind the command."""
    if re.match(r"(No such|unknown training) option:? '?--import\b", message):
        return "--import goes before the command: setblock --import FILE.py COMMAND ..."
    return message


def _leave_at_once() -> None:
    """Else the interpreter takes a second at its end to search all of torch for garbage.

    Where Triton was loaded it has to: Triton's library takes for leaked what is left, and says so.
    """
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


def main() -> None:
    """Run the command line; an expected failure is one line on stderr and a non-zero exit code."""
    atexit.register(_leave_at_once)
    # An answer may hold what a terminal's encoding lacks: told as escapes, not lost.
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    command, *words = [*_behind_imports(sys.argv[1:]), ""]
    served = command == "serve"  # whose server has handlers of its own
    came: list[str] = []
    try:
        with nullcontext([]) if served else stop_at_once(signal.SIGTERM) as came:
            code = app(prog_name="setblock", standalone_mode=False)
    except KeyboardInterrupt:  # another, while typer was at the first
        code = 130
    except typer.TyperException as error:  # words that no command takes
        message = _told(error).replace(": Value error, ", ": ")
        if message.startswith("No such option: -") and not message.startswith("No such option: --"):
            message += "; what begins with a dash and is no option goes last, after --"
        fail(_placed(message) or "a command is missing", error.exit_code)
    except OSError as error:
        place = f": {str(error.filename)!r}" if error.filename is not None else ""
        if isinstance(error, FileExistsError) and place:  # a folder was to be made there
            fail(f"{str(error.filename)!r} is a file, not a folder", 1)
        fail(f"{error.strerror}{place}" if error.strerror else str(error), 1)  # without the number
    except (ValueError, TypeError, ImportError) as error:
        fail(_placed(str(error)) or type(error).__name__, 1, imported.place_of(error))
    except Exception as error:
        from safetensors import SafetensorError  # a full disk, to this library

        cut = isinstance(error, RuntimeError) and "inline_container" in str(error)  # torch.save
        if place := imported.place_of(error):
            fail(f"{type(error).__name__}: {error}", 1, place)
        if not (cut or isinstance(error, SafetensorError)):
            raise
        fail(f"weights can't be read or written: {str(error).splitlines()[0]}", 1)
    if code == 130 and served:  # Ctrl-C, the way to end it
        sys.exit(code)
    if came:  # also where what runs at odd moments has swallowed the exception
        code = 130
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until it has ended
    if code == 130:  # typer's answer to Ctrl-C, and to what a signal raised
        how, code = told(Stopped(*came[:1]))
        out = _out_of(words)
        ways = {
            "evaluate": ": what is done is kept, go on with --resume",
            "tune": ": what is done is kept, go on with --resume",
            "benchmark": f": the rounds that were whole are in {out}",
        }
        way = ways.get(command, "")
        if way and out is None:
            way = ": nothing is kept without --out FILE"
        elif way and out is not None and not out.is_file():
            way = ": nothing was done by then that could be kept"
        if command == "speedup":
            way = ": what is done is kept, the same command goes on"
        fail(how + way, code)


def _behind_imports(words: list[str]) -> list[str]:
    """The words from the command's name on."""
    while words and words[0].partition("=")[0] == "--import":
        words = words[1 if "=" in words[0] else 2 :]
    return words


def _out_of(words: list[str]) -> Path | None:
    """The file that --out FILE or --out=FILE names."""
    for word, following in pairwise([*words, ""]):
        name, given, value = word.partition("=")
        if name == "--out":
            return Path(value if given else following)
    return None
