"""How a command is stopped from outside, and what it then says."""

import signal

import pytest

STOPS = pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")]
)
