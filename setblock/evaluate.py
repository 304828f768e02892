"""Tasks x decoding settings -> scores with intervals, forwards and seconds, as one JSON record."""

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

import torch
from rich.table import Table

from setblock import nano
from setblock.generation import Generation, Options, stream
from setblock.model import Model
from setblock.tasks import TASKS, Item, Task

Z_95 = 1.959964


@dataclass(frozen=True)
class Scored:
    """One problem's generation and whether it was right, None where nothing is."""

    problem: nano.Problem | Item
    generation: Generation
    correct: bool | None


@dataclass(frozen=True)
class Form:
    """How a benchmark task's items are put: as a chat turn or as text, behind solved examples."""

    task: Task
    chat: bool = True
    examples: tuple[Item, ...] = ()
    data: Path | None = None

    def prompt(self, item: Item) -> str:
        """The text of an item."""
        return self.task.prompt(item, self.examples, self.chat)

    def describe(self) -> dict[str, Any]:
        """What a line of a record says of it."""
        digest = hashlib.sha256(self.data.read_bytes()).hexdigest() if self.data else None
        return {
            "task_version": self.task.version,
            "chat": self.chat,
            "shots": len(self.examples),
            "data": self.data.name if self.data else None,
            "data_sha256": digest,
        }


@dataclass
class Score:
    """What one setting made of the problems of one task; `result()` is its line of the record."""

    wall_s: float = 0.0
    scored: list[Scored] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of right answers so far, 0 before the first."""
        return sum(one.correct or False for one in self.scored) / max(len(self.scored), 1)

    def result(self) -> dict[str, Any]:
        """Counts, score with its 95 % interval, tokens per forward and seconds.

        wall_s: seconds spent decoding all problems, checking left out.
        entropy_nats: mean entropy of the distributions that the tokens were taken from.
        correct, score and interval are None for prompts without a right answer.
        """
        generations = [one.generation for one in self.scored]
        judged = all(one.correct is not None for one in self.scored)
        correct = sum(one.correct or False for one in self.scored)
        tokens = sum(one.num_tokens for one in generations)
        nfe = sum(one.nfe for one in generations)
        ended = [one for one in generations if one.finish_reason == "eos"]
        return {
            "n": len(generations),
            "correct": correct if judged else None,
            "score": correct / len(generations) if judged else None,
            "interval": wilson_interval(correct, len(generations)) if judged else None,
            "tokens": tokens,
            "nfe": nfe,
            "prefill_forwards": sum(one.prefill_forwards for one in generations),
            "tokens_per_forward": tokens / nfe,
            "tokens_per_forward_eos": sum(one.num_tokens for one in ended)
            / max(sum(one.nfe for one in ended), 1),
            "eos_share": len(ended) / len(generations),
            "entropy_nats": sum(sum(one.entropy) for one in generations) / tokens,
            "wall_s": self.wall_s,
        }


def evaluate(
    model: Model,
    problems: Sequence[nano.Problem] | Sequence[Item],
    batch_size: int,
    on_progress: Callable[[Score], None] = lambda score: None,
    form: Form | None = None,
    **options: Unpack[Options],
) -> Score:
    """The score of one setting on these problems; `on_progress` is called after every answer.

    form: how items of a benchmark task are put; None for the nano families, always chat turns.
    """
    score = Score()
    chat = form is None or form.chat
    prompts = [one.prompt if form is None else form.prompt(one) for one in problems]  # type: ignore[arg-type]
    check: Any = nano.check if form is None else form.task.check
    reveals: Iterator = stream(model, prompts, chat=chat, batch_size=batch_size, **options)
    while True:
        begin = time.perf_counter()
        reveal = next(reveals, None)
        score.wall_s += time.perf_counter() - begin
        if reveal is None:
            return score
        if reveal.generation is not None:
            problem = problems[reveal.row]
            correct = check(problem, reveal.generation.text) if check else None
            score.scored.append(Scored(problem, reveal.generation, correct))
            on_progress(score)


def run(
    model: Model,
    task: str,
    problems: Sequence[nano.Problem] | Sequence[Item],
    batch_size: int,
    on_progress: Callable[[Score], None],
    form: Form | None = None,
    **options: Unpack[Options],
) -> dict[str, Any]:
    """One line of a record: a model's score on a task under one setting."""
    score = evaluate(model, problems, batch_size, on_progress, form, **options)
    settings = score.scored[0].generation.settings
    return {
        "task": task,
        "model": model.name,
        "mode": settings.mode,
        "solver": str(settings.solver) if settings.uses_solver else None,
        **score.result(),
        "batch_size": batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "settings": describe(settings),
        **(form.describe() if form else {}),
    }


def families(tasks: Sequence[str]) -> list[str]:
    """The families that task names stand for, each once; "nano" is all of them.

    Raises: ValueError for an unknown name.
    """
    found: dict[str, None] = {}
    for task in tasks:
        if task != "nano" and task not in nano.FAMILIES:
            if task in TASKS:
                raise ValueError(f"task {task} needs its rows: --data FILE")
            allowed = ", ".join(["nano", *nano.FAMILIES, *TASKS])
            raise ValueError(f"task must be one of {allowed}, got {task!r}")
        found |= dict.fromkeys(nano.FAMILIES if task == "nano" else [task])
    return list(found)


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The lines of a record as a table."""
    shown = Table()
    names = (
        "task",
        "model",
        "mode",
        "solver",
        "n",
        "score",
        "95 %",
        "tokens per forward",
        "seconds",
    )
    for name in names:
        justify = "left" if name in names[:4] else "right"
        shown.add_column(name, justify=justify, no_wrap=name == "task", overflow="fold")
    for line in results:
        scored = line["score"] is not None
        low, high = line["interval"] if scored else (0, 0)
        shown.add_row(
            line["task"],
            line["model"],
            line["mode"],
            line["solver"] or "",
            str(line["n"]),
            f"{line['score']:.1%}" if scored else "",
            f"{low:.1%} to {high:.1%}" if scored else "",
            f"{line['tokens_per_forward']:.2f}",
            f"{line['wall_s']:.1f}",
        )
    return shown


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share."""
    share, z2 = correct / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def describe(settings: Any) -> dict[str, Any]:
    """Decoding settings as JSON values."""
    return {**asdict(settings), "solver": str(settings.solver)}


def new_record() -> dict[str, Any]:
    """A record without results: the command, code, machine and versions that will make them."""
    names = ("setblock", "torch", "transformers")
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "results": [],
    }


def save_record(record: dict[str, Any], path: Path) -> None:
    """Write a record; a reader never sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def _cpu() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
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
