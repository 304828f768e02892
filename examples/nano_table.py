"""Score the bundled models and write the records and the table that the card quotes.

    python examples/nano_table.py --batch-size 16 --workers 2

The setting is picked on the validation split: of those whose mean accuracy is within one point of
the twin's, the one with the most tokens per forward. Accuracy is then reported on the test split,
on held-out wordings, and seconds at batch size 1. A stopped run goes on where it was. To measure
lines anew, delete them from the records; that of seconds, nano-latency.json, as a whole.
"""

import json
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import setblock
from setblock import evaluate, nano, records
from setblock.solvers import EntropyBound

GAMMAS = (0, 0.01, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
MARGIN = 0.01
TWIN, NTP = "twin, token by token", "token by token"
BLOCKS: dict[str, dict[str, Any]] = {
    solver: {"mode": "sbd", "solver": solver, "slide": False}
    for solver in (
        *(str(EntropyBound(gamma)) for gamma in GAMMAS),
        *("confidence:0.99", "prefix:0.999", "prefix:0.99", "prefix:0.9"),
    )
}
BLOCKS["prefix:0.99, next-token seed"] = BLOCKS["prefix:0.99"] | {"next_token_seed": True}
BLOCKS |= {
    f"{solver}, sliding": BLOCKS[solver] | {"slide": True}
    for solver in ("entropy:0.1", "prefix:0.999", "prefix:0.99", "prefix:0.9")
}
VERIFIED: dict[str, dict[str, Any]] = {
    f"verified, {branches} branch{'es' * (branches > 1)}": {
        "mode": "verified",
        "block_size": 16,
        "branches": branches,
        "seeds": 0,
    }
    for branches in (1, 4)
}
SETTINGS = {TWIN: {"mode": "ntp"}, NTP: {"mode": "ntp"}} | BLOCKS | VERIFIED
# The shipped model's, reported where nothing keeps within the margin.
DEFAULT = "prefix:0.99, sliding"
console = Console(stderr=True)


@dataclass(frozen=True)
class Job:
    """One line of a record: a setting on a family."""

    setting: str
    family: str
    split: str
    held_out: bool
    limit: int
    batch_size: int


def score(job: Job) -> dict[str, Any]:
    """The line of a job, by one thread: as many jobs run at a time as there are workers."""
    torch.set_num_threads(1)
    problems = nano.problems(job.family, job.split, job.limit, held_out=job.held_out)
    name = "nano-twin" if job.setting == TWIN else "nano"
    options: Any = SETTINGS[job.setting]
    model = setblock.load(name, dtype="float32")
    setblock.generate(model, problems[0].prompt, chat=True, max_new_tokens=20, **options)
    line, _ = evaluate.run(
        model, job.family, problems, job.batch_size, lambda score: None, **options
    )
    return {"setting": job.setting, **line, "split": job.split, "held_out": job.held_out}


def measure(
    path: Path,
    settings: Iterable[str],
    split: str,
    limit: int,
    batch_size: int,
    workers: int,
    held_out: bool = False,
) -> dict[str, Any]:
    """The record: the lines already in the file, then the missing ones, saved one by one.

    later: in a record that another commit began, what made the lines of these settings.
    """
    record = now = records.new_record()
    now["machine"]["threads"] = 1
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
    done = {(one["setting"], one["task"]) for one in record["results"]}
    jobs = [
        Job(setting, family, split, held_out, limit, batch_size)
        for setting in settings
        for family in nano.FAMILIES
        if (setting, family) not in done
    ]
    if jobs and now["commit"] != [record, *record.get("later", [])][-1]["commit"]:
        del now["results"]
        record.setdefault("later", []).append(now | {"settings": []})
    later = record.get("later", [None])[-1]
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with context.Pool(workers) as pool:
        for number, line in enumerate(pool.imap_unordered(score, jobs), start=1):
            record["results"].append(line)
            if later and line["setting"] not in later["settings"]:
                later["settings"].append(line["setting"])
            records.save_record(record, path)
            console.print(
                f"{path.stem} {number} of {len(jobs)}: {line['task']}, {line['setting']}: "
                f"{share(line)}, "
                f"{line['tokens_per_forward']:.2f} tokens per forward, {line['wall_s']:.0f} s"
            )
    return record


def mean(results: list[dict[str, Any]], setting: str, key: str) -> float:
    """Mean over the families of one setting."""
    values = [one[key] for one in results if one["setting"] == setting]
    assert len(values) == len(nano.FAMILIES)
    return sum(values) / len(values)


def pick_setting(results: list[dict[str, Any]]) -> str | None:
    """The one with the most tokens per forward within the margin, None if there is none."""
    least = mean(results, TWIN, "score") - MARGIN
    good = [name for name in BLOCKS if mean(results, name, "score") >= least]
    return max(good, key=lambda name: mean(results, name, "tokens_per_forward"), default=None)


def find(results: list[dict[str, Any]], family: str, setting: str) -> dict[str, Any]:
    """The line of one family and setting."""
    [line] = [one for one in results if (one["task"], one["setting"]) == (family, setting)]
    return line


def share(line: dict[str, Any]) -> str:
    """A score with its interval, in percent."""
    low, high = line["interval"]
    return f"{line['score']:.1%} ({100 * low:.1f}-{100 * high:.1f})"


def origin(test: dict[str, Any], latency: dict[str, Any]) -> str:
    """The command, code and machine that made these records, and the lines that came later."""
    told = f"Made by `python examples/{test['command']}` at {_where(test)}."
    for later in test.get("later", []):
        rows = ", ".join(f"`{name}`" for name in later["settings"])
        told += f" The rows {rows}: at {_where(later)}."
    return told + f" The wall clock, of all rows: at {_where(latency)}."


def _where(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return (
        f"commit {record['commit'][:7]} on {machine['cores']} cores of an {machine['cpu']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}"
    )


def summary(
    record: dict[str, Any],
    held_out: list[dict[str, Any]],
    clock: dict[str, Any],
    picked: str,
) -> str:
    """Markdown: each family with the picked setting, then all settings.

    record: the test split's. clock: the record of seconds at batch size 1, all of one commit.
    """
    test, latency = record["results"], clock["results"]
    lines = [
        f"| family | twin, token by token | SBD model, token by token | SBD model, `{picked}` | "
        "tokens per forward | held-out wordings (twin / SBD) | entropy of answers | "
        "wall clock, batch 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in nano.FAMILIES:
        twin, ntp, sbd = (find(test, family, setting) for setting in (TWIN, NTP, picked))
        unseen = [find(held_out, family, setting) for setting in (TWIN, picked)]
        slow, fast = (find(latency, family, setting) for setting in (NTP, picked))
        lines.append(
            f"| {family} | {share(twin)} | {share(ntp)} | {share(sbd)} "
            f"| {sbd['tokens_per_forward']:.2f} "
            f"| {unseen[0]['score']:.1%} / {unseen[1]['score']:.1%} "
            f"| {twin['entropy_nats']:.4f} | {slow['wall_s'] / fast['wall_s']:.2f}x |"
        )
    lines += [
        "",
        "| setting | mean accuracy | mean tokens per forward | wall clock, batch 1 |",
        "|---|---|---|---|",
    ]
    slow_s = mean(latency, NTP, "wall_s")
    for name in SETTINGS:
        lines.append(
            f"| {name} | {mean(test, name, 'score'):.1%} "
            f"| {mean(test, name, 'tokens_per_forward'):.2f} "
            f"| {slow_s / mean(latency, name, 'wall_s'):.2f}x |"
        )
    lines += ["", origin(record, clock)]
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
        out / "nano-validation.json", SETTINGS, "validation", validation_limit, batch_size, workers
    )["results"]
    picked = pick_setting(validation)
    console.print(f"picked on validation: {picked}")
    if picked is None:
        picked = DEFAULT
        console.print(f"no setting keeps within one point of the twin: reporting {picked}")
    latency = measure(out / "nano-latency.json", SETTINGS, "test", latency_limit, 1, 1)
    held_out = measure(
        out / "nano-held-out.json",
        [TWIN, NTP, picked],
        "test",
        held_out_limit,
        batch_size,
        workers,
        held_out=True,
    )["results"]
    test = measure(out / "nano-test.json", SETTINGS, "test", limit, batch_size, workers)
    (out / "nano-summary.md").write_text(summary(test, held_out, latency, picked))


if __name__ == "__main__":
    typer.run(main)
