"""Code of the user's own that runs before a command: a file, by --import."""

import hashlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path

FILES: dict[str, str] = {}  # what ran, and its SHA-256; records name it


def run(path: Path) -> None:
    """Effects: what the code of this file does.

    Raises: ValueError for a file that is no code, or an error in it; OSError.
    """
    content = path.read_bytes()
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--import must be a Python file, FILE.py, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    FILES[str(path)] = hashlib.sha256(content).hexdigest()
    try:
        spec.loader.exec_module(module)
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
