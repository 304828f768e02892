"""Measure verified decoding on the bundled model and write its record and table.

    python examples/nano_lossless.py --out benchmarks/records

Every family's problems are decoded token by token, by blocks, and verified; the token ids of the
verified modes are compared with those of next-token decoding in the same precision. Beside tokens
per forward stand the query tokens that a forward took, and what the roofline makes of both for a
Llama-3.1-8B.
"""

import copy
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import setblock
from setblock import evaluate, nano, records
from setblock.machines import MODELS, device
from setblock.masks import PADDING
from setblock.roofline import forward_s

NTP = {"mode": "ntp"}
VERIFIED = {"mode": "verified", "block_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "token by token": NTP,
    "blocks, entropy:0.01": {"mode": "sbd", "solver": "entropy:0.01", "slide": False},
    "blocks, prefix:0.99": {"mode": "sbd", "solver": "prefix:0.99", "slide": False},
    "verified, solver entropy:0.1": {**VERIFIED, "draft": "solver", "solver": "entropy:0.1"},
    "verified, solver entropy:inf": {**VERIFIED, "draft": "solver", "solver": "entropy:inf"},
    "verified, 1 branch": {**VERIFIED, "branches": 1},
    "verified, 4 branches": {**VERIFIED, "branches": 4},
    "verified, all branches": {**VERIFIED, "branches": 16},
    "verified, chosen by arithmetic": {"mode": "verified"},
    "bfloat16, token by token": NTP,
    "bfloat16, verified, 1 branch": {**VERIFIED, "branches": 1},
}
DEVICES = ("h100", "h200")
CACHED = 1024  # tokens in the cache, for the roofline
BATCHES = (1, 8, 32)
console = Console(stderr=True)


@dataclass
class Counter:
    """Query tokens of the forwards after the prompts' own, padding left out."""

    queries: int = 0
    rows: int = 0

    def watch(self, model: setblock.Model) -> setblock.Model:
        """The model, its forwards counted."""
        watched = copy.copy(model)

        def forward(tokens, layout, cache, logits_at=None):
            if int(cache.lengths.max()):
                self.queries += int((layout.document != PADDING).sum())
                self.rows += len(tokens)
            return model.forward(tokens, layout, cache, logits_at)

        watched.forward = forward  # type: ignore[method-assign]
        return watched


def score(job: tuple[str, int, int]) -> list[dict[str, Any]]:
    """The lines of one family, by one thread."""
    family, limit, batch_size = job
    torch.set_num_threads(1)
    problems = nano.problems(family, "test", limit)
    exact: dict[str, list[tuple[int, ...]]] = {}
    lines = []
    for name, options in SETTINGS.items():
        counter, model = Counter(), load(name)
        line, found = evaluate.run(counter.watch(model), family, problems, batch_size, **options)
        ids = {one.index: one.token_ids for one in found.samples}
        answers = [ids[index] for index in range(len(problems))]
        first = exact.setdefault(line["dtype"], answers)  # the first setting is token by token
        same = sum(one == other for one, other in zip(first, answers, strict=True))
        lines.append(
            {
                "setting": name,
                **line,
                "identical_share": same / len(problems),
                "queries_per_forward": counter.queries / max(counter.rows, 1),
            }
        )
    return lines


def load(setting: str) -> setblock.Model:
    """The model in the precision of a setting."""
    return setblock.load("nano", dtype="bfloat16" if "bfloat16" in setting else "float32")


def time_alone(lines: list[dict[str, Any]], limit: int) -> None:
    """Adds seconds at batch size 1 to the lines of a family, with nothing beside it, one thread."""
    torch.set_num_threads(1)
    problems = nano.problems(lines[0]["task"], "test", limit)
    for line in lines:
        options, model = SETTINGS[line["setting"]], load(line["setting"])
        setblock.generate(model, problems[0].prompt, chat=True, max_new_tokens=20, **options)
        line["wall_s_batch_1"] = evaluate.evaluate(model, problems, 1, **options).wall_s
        line["speedup_batch_1"] = lines[0]["wall_s_batch_1"] / line["wall_s_batch_1"]


def predicted(name: str, batch: int, queries: float, tokens_per_forward: float) -> float:
    """Wall-clock speed-up over token by token of a Llama-3.1-8B, by arithmetic."""
    one, many = (
        forward_s(MODELS["llama-3.1-8b"], device(name), count, batch, CACHED)
        for count in (1, round(queries))
    )
    return tokens_per_forward * one / many


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one line a setting, means over the families."""
    columns = [f"{name}, batch {batch}" for name in DEVICES for batch in BATCHES]
    lines = [
        "| setting | accuracy | ids as token by token | tokens per forward | query tokens per "
        f"forward | CPU, batch 1 | {' | '.join(columns)} |",
        "|---" * (6 + len(columns)) + "|",
    ]
    for name in SETTINGS:
        rows = [one for one in results if one["setting"] == name]

        def mean(key: str, rows: list[dict[str, Any]] = rows) -> float:
            return sum(row[key] for row in rows) / len(rows)

        gains = [
            sum(
                predicted(name, batch, row["queries_per_forward"], row["tokens_per_forward"])
                for row in rows
            )
            / len(rows)
            for name in DEVICES
            for batch in BATCHES
        ]
        lines.append(
            f"| {name} | {mean('score'):.1%} | {mean('identical_share'):.1%} "
            f"| {mean('tokens_per_forward'):.2f} | {mean('queries_per_forward'):.0f} "
            f"| {mean('speedup_batch_1'):.2f}x | {' | '.join(f'{gain:.2f}x' for gain in gains)} |"
        )
    return "\n".join(lines) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = Path("benchmarks/records"),
    limit: Annotated[int, typer.Option(help="Problems a family.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Problems decoded together.")] = 16,
    latency_limit: Annotated[int, typer.Option(help="Problems a family at batch size 1.")] = 20,
    workers: Annotated[int, typer.Option(help="Families measured at a time.")] = os.cpu_count()
    or 1,
) -> None:
    """Measure every family under every setting."""
    path = out / "nano-lossless.json"
    record = records.new_record()
    record["machine"]["threads"] = 1
    jobs = [(family, limit, batch_size) for family in nano.FAMILIES]
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with context.Pool(workers) as pool:
        for lines in pool.imap_unordered(score, jobs):
            record["results"] += lines
            records.save_record(record, path)
            for line in lines:
                console.print(
                    f"{line['task']} {line['setting']}: {line['score']:.1%}, "
                    f"{line['identical_share']:.1%} identical, "
                    f"{line['tokens_per_forward']:.2f} tokens per forward"
                )
    for family in nano.FAMILIES:
        time_alone([line for line in record["results"] if line["task"] == family], latency_limit)
        records.save_record(record, path)
    (out / "nano-lossless.md").write_text(table(record["results"]))
    broken = [
        (line["task"], line["setting"], line["identical_share"])
        for line in record["results"]
        if line["mode"] == "verified" and line["dtype"] == "float32" and line["identical_share"] < 1
    ]
    if broken:
        console.print(f"not identical to token by token: {broken}", style="red")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
