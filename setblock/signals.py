"""Ctrl-C and SIGTERM as one exception, for what is to stop without losing what it has."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal came where nothing needs to be finished first; the text is its name."""


@contextmanager
def stop_at_once(*numbers: signal.Signals) -> Iterator[list[str]]:
    """Any of these signals, Ctrl-C's and SIGTERM unless told, raises Stopped within.

    Yields the names of those that came, to be read after the exception was turned into another.
    Effects: a process that was forked within ends by the signal, as if it were not met.
    """
    came: list[str] = []
    here = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() != here:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        signal.signal(number, signal.SIG_IGN)  # once is enough: more would stop the stopping
        came.append(signal.Signals(number).name)
        raise Stopped(came[-1])

    before = {number: signal.signal(number, stop) for number in numbers or SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(name: str) -> int:
    """Of a command that the signal of this name stopped; Ctrl-C's for a name of none."""
    known = name in signal.Signals.__members__
    return 128 + (signal.Signals[name] if known else signal.SIGINT)


def told(stop: KeyboardInterrupt) -> tuple[str, int]:
    """(how a command says that it was stopped so, its exit code)."""
    name = str(stop)
    return f"stopped by {name}" if name else "interrupted", exit_code(name)
