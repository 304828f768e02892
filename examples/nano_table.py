"""Score the bundled models and write the records and the table that README and CARD quote.

    python examples/nano_table.py --out benchmarks/records

The solver is picked on the validation split: of those whose mean accuracy is within one point of
the twin's, the one with the most tokens per forward. Accuracy is then reported on the test split,
on held-out wordings, and seconds at batch size 1. A stopped run goes on where it was.
"""

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import setblock
from setblock import evaluate, nano
from setblock.solvers import EntropyBound

GAMMAS = (0, 0.01, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
MARGIN = 0.01
SOLVERS = (
    *(str(EntropyBound(gamma)) for gamma in GAMMAS),
    "entropy-threshold:0.05",
    "entropy-threshold:0.2",
    "confidence:0.99",
    "prefix:0.9",
)
DEFAULT = "prefix:0.9"  # the shipped model's, reported where no solver keeps within the margin
console = Console(stderr=True)


def runs(solvers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model, decoding options): the twin and the SBD model token by token, then each solver."""
    yield "nano-twin", {"mode": "ntp"}
    yield "nano", {"mode": "ntp"}
    for solver in solvers:
        yield "nano", {"mode": "sbd", "solver": solver}


@dataclass(frozen=True)
class Job:
    """One line of a record: a model on a family under one setting."""

    model: str
    family: str
    options: dict[str, Any]
    split: str
    held_out: bool
    limit: int
    batch_size: int


def score(job: Job) -> dict[str, Any]:
    """The line of a job, by one thread: as many jobs run at a time as there are workers."""
    torch.set_num_threads(1)
    problems = nano.problems(job.family, job.split, job.limit, held_out=job.held_out)
    model = setblock.load(job.model, dtype="float32")
    setblock.generate(model, problems[0].prompt, chat=True, max_new_tokens=20, **job.options)
    line = evaluate.run(
        model, job.family, problems, job.batch_size, lambda score: None, **job.options
    )
    return line | {"split": job.split, "held_out": job.held_out}


def measure(
    path: Path,
    solvers: Sequence[str],
    split: str,
    limit: int,
    batch_size: int,
    workers: int,
    held_out: bool = False,
) -> list[dict[str, Any]]:
    """The record's results: those already in the file, then the missing ones, saved one by one."""
    record = json.loads(path.read_text()) if path.is_file() else evaluate.new_record()
    record["machine"]["threads"] = 1
    done = {(one["task"], one["model"], one["mode"], one["solver"]) for one in record["results"]}
    jobs = [
        Job(name, family, options, split, held_out, limit, batch_size)
        for name, options in runs(solvers)
        for family in nano.FAMILIES
        if (family, name, options["mode"], options.get("solver")) not in done
    ]
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with context.Pool(workers) as pool:
        for number, line in enumerate(pool.imap_unordered(score, jobs), start=1):
            record["results"].append(line)
            evaluate.save_record(record, path)
            console.print(
                f"{path.stem} {number} of {len(jobs)}: {line['model']} {line['task']} "
                f"{line['solver'] or 'ntp'} {share(line)}, "
                f"{line['tokens_per_forward']:.2f} tokens per forward, {line['wall_s']:.0f} s"
            )
    return record["results"]


def mean(
    results: list[dict[str, Any]], model: str, mode: str, solver: str | None, key: str
) -> float:
    """Mean over the families of one setting."""
    setting = (model, mode, solver)
    values = [one[key] for one in results if (one["model"], one["mode"], one["solver"]) == setting]
    assert len(values) == len(nano.FAMILIES)
    return sum(values) / len(values)


def pick_solver(results: list[dict[str, Any]]) -> str | None:
    """The fastest solver within the margin of the twin, None if there is none."""
    twin = mean(results, "nano-twin", "ntp", None, "score")
    good = [
        solver
        for solver in SOLVERS
        if mean(results, "nano", "sbd", solver, "score") >= twin - MARGIN
    ]

    def speed(solver: str) -> float:
        return mean(results, "nano", "sbd", solver, "tokens_per_forward")

    return max(good, key=speed, default=None)


def find(
    results: list[dict[str, Any]], family: str, model: str, solver: str | None
) -> dict[str, Any]:
    """The line of one family and setting; solver None is next-token decoding."""
    [line] = [
        one
        for one in results
        if (one["task"], one["model"], one["solver"]) == (family, model, solver)
    ]
    return line


def share(line: dict[str, Any]) -> str:
    """A score with its interval, in percent."""
    low, high = line["interval"]
    return f"{line['score']:.1%} ({100 * low:.1f}-{100 * high:.1f})"


def summary(
    test: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    latency: list[dict[str, Any]],
    solver: str,
) -> str:
    """Markdown: each family with the chosen solver, then all solvers."""
    lines = [
        f"| family | twin, token by token | SBD model, token by token | SBD model, `{solver}` | "
        "tokens per forward | held-out wordings (twin / SBD) | entropy of answers | "
        "wall clock, batch 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in nano.FAMILIES:
        twin, ntp = find(test, family, "nano-twin", None), find(test, family, "nano", None)
        sbd = find(test, family, "nano", solver)
        unseen = [find(held_out, family, "nano-twin", None), find(held_out, family, "nano", solver)]
        slow, fast = find(latency, family, "nano", None), find(latency, family, "nano", solver)
        lines.append(
            f"| {family} | {share(twin)} | {share(ntp)} | {share(sbd)} "
            f"| {sbd['tokens_per_forward']:.2f} "
            f"| {unseen[0]['score']:.1%} / {unseen[1]['score']:.1%} "
            f"| {twin['entropy_nats']:.4f} | {slow['wall_s'] / fast['wall_s']:.2f}x |"
        )
    lines += [
        "",
        "| solver | mean accuracy | mean tokens per forward | wall clock, batch 1 |",
        "|---|---|---|---|",
    ]
    slow_s = mean(latency, "nano", "ntp", None, "wall_s")
    for one in SOLVERS:
        setting = ("nano", "sbd", one)
        lines.append(
            f"| `{one}` | {mean(test, *setting, 'score'):.1%} "
            f"| {mean(test, *setting, 'tokens_per_forward'):.2f} "
            f"| {slow_s / mean(latency, *setting, 'wall_s'):.2f}x |"
        )
    return "\n".join(lines) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("benchmarks/records"),
    validation_limit: Annotated[int, typer.Option(help="Validation problems a family.")] = 200,
    limit: Annotated[int, typer.Option(help="Test problems a family.")] = 1000,
    held_out_limit: Annotated[int, typer.Option(help="Held-out problems a family.")] = 200,
    latency_limit: Annotated[int, typer.Option(help="Problems a family at batch size 1.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Problems decoded together.")] = 8,
    workers: Annotated[int, typer.Option(help="Settings measured at a time.")] = os.cpu_count()
    or 1,
) -> None:
    """Measure the bundled models; about an hour on two CPU cores at the default limits."""
    validation = measure(
        out / "nano-validation.json", SOLVERS, "validation", validation_limit, batch_size, workers
    )
    solver = pick_solver(validation)
    console.print(f"solver picked on validation: {solver}")
    if solver is None:
        solver = DEFAULT
        console.print(f"no solver keeps within one point of the twin: reporting {solver}")
    picked = [solver]
    latency = measure(out / "nano-latency.json", SOLVERS, "test", latency_limit, 1, 1)
    held_out = measure(
        out / "nano-held-out.json",
        picked,
        "test",
        held_out_limit,
        batch_size,
        workers,
        held_out=True,
    )
    test = measure(out / "nano-test.json", SOLVERS, "test", limit, batch_size, workers)
    (out / "nano-summary.md").write_text(summary(test, held_out, latency, solver))


if __name__ == "__main__":
    typer.run(main)
