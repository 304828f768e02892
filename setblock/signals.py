"""Ctrl-C and SIGTERM as one exception, for what is to stop without losing what it has."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal came where nothing needs to be finished first; the text is its name."""


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Ctrl-C or SIGTERM raises Stopped within."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
