"""Files that a kill leaves whole, lines of JSON that outlast a stop, and one writer at a time."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def write_whole(path: Path, text: str) -> None:
    """Write a file anew: a reader sees the old one or the new one, never half of one."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # what was asked for


@contextmanager
def whole_or_empty(folder: Path) -> Iterator[None]:
    """Within, a folder is filled; what stops that, an interrupt too, leaves it as it was.

    Raises: ValueError for a folder that is not empty.
    """
    there = folder.exists()
    if there and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    try:
        yield
    except BaseException:
        for one in folder.iterdir() if folder.exists() else ():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        if folder.exists() and not there:
            folder.rmdir()
        raise


def let_read(folder: Path) -> None:
    """Effects: weights in this folder may be read by whoever may read other new files.

    safetensors leaves them to their owner alone, so that a server of another user would not start.
    """
    if hasattr(os, "getuid"):  # not on Windows
        os.umask(mask := os.umask(0))
        for file in folder.glob("*.safetensors"):
            file.chmod(0o666 & ~mask)


def lines_of(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(number, text, value) of each line that is JSON; those that a kill cut short are left out."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for number, line in enumerate(text.split("\n"), start=1):  # JSON texts hold other breaks
        try:
            value = json.loads(line)
        except ValueError:
            continue
        yield number, line, value


def end_last_line(path: Path) -> None:
    """Effects: a last line that a kill cut short ends, so that the next is one of its own."""
    if path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")


_LOCKS: dict[Path, FileLock] = {}  # of what this process writes


def lock(path: Path) -> None:
    """Keep other processes from this file or folder until this one ends.

    By a file in the folder for temporary ones, which the system unlocks.
    Raises: ValueError if another process has it.
    """
    place = path.resolve()
    if place in _LOCKS:
        return
    digest = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else "user"  # Windows: the folder is a user's own
    own = FileLock(Path(tempfile.gettempdir()) / f"setblock-{user}-{digest}.lock", timeout=0)
    try:
        own.acquire()
    except Timeout:
        raise ValueError(f"another command is writing to {path}") from None
    _LOCKS[place] = own
