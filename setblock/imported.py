"""Code of the user's own that runs before a command: a file, by --import."""

import hashlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

FILES: dict[str, str] = {}  # what ran, as it was typed, and its SHA-256; records name it


def run(path: Path) -> None:
    """Effects: what the code of this file does; it finds modules beside it.

    Raises: ValueError for a file that is no code, or an error in it; OSError.
    """
    content, place = path.read_bytes(), os.path.abspath(path)
    if path.suffix != ".py":
        raise ValueError(f"--import must be a Python file, FILE.py, got {str(path)!r}")
    module = ModuleType(f"imported_{path.stem}")
    module.__file__ = place
    sys.modules[module.__name__] = module  # where dataclasses look for it
    sys.path.append(os.path.dirname(place))  # behind all others: it hides no package
    FILES[str(path)] = hashlib.sha256(content).hexdigest()
    try:
        exec(compile(content, place, "exec"), vars(module))
    except Exception as error:
        raise ValueError(f"--import {path}: {type(error).__name__}: {error}") from error


def place_of(error: BaseException | None) -> str:
    """Where in such a file an error arose, " (FILE, line N)"; nothing elsewhere."""
    files = {os.path.abspath(file) for file in FILES}
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename in files:
                return f" ({frame.filename}, line {frame.lineno})"
        error = error.__cause__
    return ""
