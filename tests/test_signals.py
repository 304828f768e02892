"""Signals as one exception."""

import multiprocessing
import signal
import time
from typing import Any

import pytest

from setblock.signals import SIGNALS, Stopped, stop_at_once


@pytest.mark.parametrize("met", [(), (signal.SIGTERM,)])
def test_only_the_signals_met_raise(met) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    for number in SIGNALS:
        raised = Stopped if not met or number in met else KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt) as stop, stop_at_once(*met) as came:
            signal.raise_signal(number)
        assert type(stop.value) is raised
        assert came == ([signal.Signals(number).name] if raised is Stopped else [])
    assert [signal.getsignal(one) for one in SIGNALS] == before


def _raise_twice() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)


def test_a_second_signal_does_not_stop_the_stopping() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stop, stop_at_once(signal.SIGTERM) as came:
        _raise_twice()
    assert stop.value.__context__ is None, "the first one"
    assert came == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) == before


def _wait(started: Any) -> None:
    started.set()
    time.sleep(600)


def test_a_forked_process_ends_by_the_signal(capfd) -> None:
    """A worker that its parent ends shall not speak of it."""
    forked = multiprocessing.get_context("fork")
    started = forked.Event()
    with stop_at_once() as came:
        worker = forked.Process(target=_wait, args=(started,), daemon=True)
        worker.start()
        assert started.wait(60)
        worker.terminate()
        worker.join(60)
    assert (worker.exitcode, came) == (-signal.SIGTERM, [])
    assert capfd.readouterr() == ("", "")
