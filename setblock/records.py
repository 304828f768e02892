"""Records of measurements: where they come from, and the samples behind them, safe on disk."""

import errno
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from setblock import imported
from setblock.files import end_last_line, lines_of, lock, write_whole


def new_record() -> dict[str, Any]:
    """A record without results: the command, code, machine and versions that will make them."""
    names = ("setblock", "torch", "transformers")
    return {
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        **({"imported": dict(imported.FILES)} if imported.FILES else {}),
        "results": [],
    }


def machine_of(device: torch.device) -> dict[str, Any]:
    """What computes: the CPU, and the GPU if it is the device."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


class Journal:
    """A record whose lines come one after the other, and the samples behind each, kept on disk.

    Line n of the record is run n. The samples stand in a file beside the record, one JSON object a
    line, with the run's number; both are written as they come, so that a stopped command can go on.
    request: what was asked for; a record goes on only for the same request, by the same code.
    Without a path nothing is written.
    resume: whether to go on with a record; None for a command that never does.
    """

    def __init__(
        self,
        request: dict[str, Any],
        path: Path | None,
        resume: bool | None = False,
        kept: Sequence[str] = (),
    ) -> None:
        """kept: names in the request that a resumed record keeps, whatever is asked for now.

        Raises: ValueError for a record that is there and not to go on with, or the reverse, or
        that another command is writing.
        """
        self.path, self.kept = path, kept
        self.record = new_record()
        results = self.record.pop("results")
        self.record |= {"request": request, "results": results}
        self._samples: dict[int, list[dict[str, Any]]] = {}
        if path is not None:
            lock(path)
        if resume:
            if path is None:
                raise ValueError("resume: no record to go on with: it needs --out FILE")
            if not path.is_file():
                raise ValueError(f"resume: no record to go on with at {path}")
            self._read(path)
        elif path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder: name a file")
        elif path is not None and (
            there := next((one for one in (path, self.samples_path) if one.exists()), None)
        ):
            way = "name another file" if resume is None else "go on with --resume, or name another"
            raise ValueError(f"{there} is there already: {way}")
        if path is not None:
            _check_place(path)

    @property
    def samples_path(self) -> Path:
        """Where the samples are."""
        assert self.path is not None
        return self.path.with_suffix(".samples.jsonl")

    def known(self, run: int) -> list[dict[str, Any]]:
        """The samples of a run that an earlier command left."""
        return self._samples.get(run, [])

    @property
    def num_known(self) -> int:
        """Samples of all runs that an earlier command left."""
        return sum(map(len, self._samples.values()))

    def finished(self, run: int) -> dict[str, Any] | None:
        """The line of a run that an earlier command finished."""
        results = self.record["results"]
        return results[run] if run < len(results) else None

    def add(self, run: int, sample: dict[str, Any]) -> None:
        """Write a sample down."""
        if self.path is not None:
            if not self.path.exists():
                save_record(self.record, self.path)
            with self.samples_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": run, **sample}) + "\n")

    def finish(self, line: dict[str, Any], comparison: dict[str, Any] | None = None) -> None:
        """Write down the next run's line, and how it compares."""
        self.record["results"].append(line)
        if comparison is not None:
            self.record.setdefault("comparisons", []).append(comparison)
        self.save()

    def save(self) -> None:
        """Write the record as it is now."""
        if self.path is not None:
            save_record(self.record, self.path)

    def _read(self, path: Path) -> None:
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            _ = old["results"][:0], old["request"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"resume: {path} is no record to go on with") from error
        if isinstance(old["request"], dict):
            stays = {name: old["request"][name] for name in self.kept if name in old["request"]}
            self.record["request"] |= stays
        before, after = (sorted(one.get("imported", {}).values()) for one in (old, self.record))
        if before != after:
            raise ValueError(
                f"resume: {path} was made with {_named(old)}, now with {_named(self.record)}"
            )
        for name in ("request", "commit", "versions"):
            now = json.loads(json.dumps(self.record[name]))
            if old.get(name) != now:
                raise ValueError(
                    f"resume: {path} was made by another {name}: {_difference(old.get(name), now)}"
                )
        self.record = old
        end_last_line(self.samples_path)
        seen: set[tuple[int, int]] = set()
        for _, line, sample in lines_of(self.samples_path):
            try:
                key = sample.pop("run"), sample["index"]
            except (TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"resume: {self.samples_path} holds a line that is no sample: {line[:80]}"
                ) from error
            if key in seen:
                raise ValueError(
                    f"resume: {self.samples_path} has sample {key[1]} of run {key[0]} twice: did "
                    "two commands write to it?"
                )
            seen.add(key)
            self._samples.setdefault(key[0], []).append(sample)


def _named(record: dict[str, Any]) -> str:
    """The files of a record that were imported, so that two of one name can be told apart."""
    files = [f"{file} ({digest[:8]})" for file, digest in record.get("imported", {}).items()]
    return f"--import {', '.join(files)}" if files else "no --import"


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        changed = [name for name in new if old.get(name) != new[name]]
        old, new = ({name: one.get(name) for name in changed} for one in (old, new))
    return f"{json.dumps(old)}, now {json.dumps(new)}"


def save_record(record: dict[str, Any], path: Path) -> None:
    """Write a record, where a link leads to; a reader never sees half of one."""
    place = path.resolve() if path.is_symlink() else path
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, json.dumps(finite(record), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value, where numbers that JSON has no word for are None."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_place(path: Path) -> None:
    """Raises: OSError where no file can be made, rather than behind an hour of work."""
    folder = (path.resolve() if path.is_symlink() else path.absolute()).parent
    while not folder.exists():
        if folder.is_symlink():  # it leads nowhere
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        folder = folder.parent
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def _program() -> str:
    """The command's name, also where it was started as `python -m setblock`."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def _cpu() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a checkout."""
    file = Path(__file__)
    try:
        _, commit, changes = [
            subprocess.run(
                ["git", *words], cwd=file.parent, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ["ls-files", "--error-unmatch", file.name],  # fails in somebody else's checkout
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "-uno", "."],
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes else "")


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that this process has held, on the device or, on a CPU, altogether; None
    where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # of what getrusage says
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
