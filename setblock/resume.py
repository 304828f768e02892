"""Going on with a stopped training run: its last whole checkpoint, its settings, its log."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open
from transformers import TrainerState

from setblock.config import SBDConfig
from setblock.files import write_whole

# What is not for the hub: its upload leaves out what begins with an underscore.
OWN_FOLDER = "_run"
# What a finished run leaves: another one must not mix with it.
LEFT = ("adapter_config.json", "model.safetensors", "model.safetensors.index.json")
PREFIX = "checkpoint-"


def left_in(folder: Path) -> list[str]:
    """What a run has left there, by name; of checkpoints one where there is nothing else.

    Of our own runs a checkpoint that a stop cut short is not counted.
    """
    left = [name for name in LEFT if (folder / name).exists()]
    ours = (folder / OWN_FOLDER / "settings.json").exists()
    return left or [one.name for one in _checkpoints(folder) if not ours or not is_cut(one)][:1]


def _checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    found = [one for one in folder.glob(f"{PREFIX}*") if one.name[len(PREFIX) :].isdecimal()]
    return sorted(found, key=lambda one: int(one.name[len(PREFIX) :]), reverse=True)


def last_checkpoint(folder: Path, resume: bool, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run to go on with, None for a new run.

    say: told of newer ones that a stop cut short.
    Effects: for a new run, what is left of a first checkpoint that a stop cut short is deleted.
    Raises: ValueError if there is none to go on from, or for a new run in a folder that holds one.
    """
    found = _checkpoints(folder)
    if not resume:
        if left := left_in(folder):
            way = "choose another output folder"
            if not all(map(is_cut, found)):
                way = f"go on with --resume, or {way}"
            raise ValueError(f"{folder} holds an earlier run ({', '.join(left)}): {way}")
        for cut in found:
            say(f"{cut} is of a run that ended while it was saved: deleted")
            if cut.is_symlink():
                cut.unlink(missing_ok=True)
            shutil.rmtree(cut, ignore_errors=True)  # another rank may be at it too
        return None
    if all(map(is_cut, found)):
        hint = ""
        if any((folder / OWN_FOLDER / f"{own}.jsonl").exists() for own in ("answers", "prompts")):
            hint = "; without --resume the same command goes on with what the model wrote"
        elif folder.exists() and not left_in(folder):
            hint = "; without --resume the same command begins anew"
        raise ValueError(f"resume: {folder} holds no checkpoint to go on from{hint}")
    broken, ranks = [], _processes(folder)
    for checkpoint in found:
        lack = _lack(checkpoint, ranks)
        if lack is None:
            if broken:
                say(f"going on from {checkpoint}: {'; '.join(broken)}")
            return checkpoint
        broken.append(f"{checkpoint.name} has no {lack}")
    raise ValueError(
        f"resume: no checkpoint in {folder} is whole ({'; '.join(broken)}): train again, into "
        "another output folder"
    )


def _processes(folder: Path) -> int:
    """As many as wrote the checkpoints, by the run's settings, else as there are now."""
    try:
        settings = json.loads((folder / OWN_FOLDER / "settings.json").read_text(encoding="utf-8"))
        return int(settings["processes"])
    except (OSError, ValueError, KeyError, TypeError):  # told of behind, with all settings
        return int(os.environ.get("WORLD_SIZE", "1"))


def _lack(checkpoint: Path, ranks: int) -> str | None:
    """What a checkpoint of so many ranks lacks, None if it is whole."""
    if is_cut(checkpoint):
        return "whole trainer_state.json: a stop cut it short"
    if not has_state(checkpoint):
        return "trainer_state.json that this version of transformers reads"
    if not any([*checkpoint.glob("optimizer*"), *checkpoint.glob("global_step*")]):  # DeepSpeed's
        return "optimizer state (save_only_model)"
    if (checkpoint / "optimizer.pt").is_file():  # else weights and states may be in parts
        states = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state*"]
        for kind in ("*.safetensors", "scheduler.pt", *states):
            if not any(checkpoint.glob(kind)):
                return kind
    if (config := checkpoint / "config.json").exists():
        try:
            json.loads(config.read_text(encoding="utf-8"))
        except ValueError:
            return "whole config.json"
    files = (one for kind in ("*.safetensors", "*.pt", "*.pth") for one in checkpoint.glob(kind))
    cut = sorted(file.name for file in files if not _is_whole(file))
    return f"whole {cut[0]}" if cut else None


def _is_whole(file: Path) -> bool:
    """Whether a file of tensors is as long as it says; a full disk leaves less."""
    if file.suffix != ".safetensors":
        return is_zipfile(file)  # torch's, whose table of contents comes last
    try:
        with safe_open(file, framework="pt"):
            return True
    except SafetensorError:
        return False


def is_cut(checkpoint: Path) -> bool:
    """Whether a stop came while a checkpoint was saved: its trainer_state.json is written last."""
    file = checkpoint / "trainer_state.json"
    try:
        return not (file.is_file() and isinstance(json.loads(file.read_bytes()), dict))
    except ValueError:
        return True


def has_state(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved to its end, and can be read here."""
    try:
        read_state(checkpoint)
    except (OSError, ValueError, TypeError):
        return False
    return True


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a checkpoint."""
    return TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))


def is_finished(state: TrainerState, config: SBDConfig) -> bool:
    """Whether a run of these settings ends where this state is."""
    if config.max_steps > 0:
        return state.global_step >= config.max_steps
    if not state.epoch:
        return False
    steps = math.ceil(state.global_step / state.epoch - 1e-6)  # of an epoch, whose last is as whole
    return state.global_step >= math.ceil(steps * config.num_train_epochs)


def check_settings(file: Path, new: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run to go on with, and the new ones that it did not have.

    A setting that an earlier version did not write down is not compared, nor is where the data lies
    if what its rows say is.
    Raises: ValueError for others.
    """
    if not file.is_file():
        raise ValueError(f"resume: {file} is gone, so the settings can't be compared")
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"resume: {file} is not whole ({error}), so the settings can't be compared"
        ) from None
    compared = old.keys() & new.keys() - ({"data"} if "rows" in old.keys() & new.keys() else set())
    changed = [name for name in new if name in compared and old[name] != new[name]]
    if changed:
        differences = "; ".join(f"{name} was {old[name]!r}, now {new[name]!r}" for name in changed)
        raise ValueError(f"resume: other settings than the run to go on with: {differences}")
    return {**old, **new}


def kept_lines(log: Path, state: TrainerState, finished: bool) -> list[dict[str, Any]]:
    """The lines of a log.jsonl that stay when the run goes on from this state.

    Lines of later steps will be made again; the one that closed the stopped part has no place in
    the middle, and a last one that a kill cut short is none.
    finished: nothing will be trained, so that the closing line stays.
    Raises: ValueError naming file and line for any other line that is not ours.
    """
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    kept = []
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            later = line["step"] > state.global_step
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{log}:{number}: not a line of a training log ({text[:40]!r}): take it out"
            ) from error
        if not later and (finished or "train_runtime" not in line):
            kept.append(line)
    return kept


def write_lines(log: Path, lines: list[dict[str, Any]]) -> None:
    """Effects: the log holds these lines alone; a kill meanwhile leaves it as it was."""
    write_whole(log, "".join(json.dumps(line) + "\n" for line in lines))
