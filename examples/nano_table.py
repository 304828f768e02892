"""Score the bundled models and write the records and the table that README and CARD quote.

    python examples/nano_table.py --out benchmarks/records

The gamma is picked on the validation split: of those whose mean accuracy is within one point of the
twin's, the one with the most tokens per forward. Accuracy is then reported on the test split, on
held-out wordings, and seconds at batch size 1. A stopped run goes on where it was.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import setblock
from setblock import evaluate, nano
from setblock.live import progress_bar

GAMMAS = (0, 0.01, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
MARGIN = 0.01
console = Console(stderr=True)


def runs(gammas: tuple[float, ...] | list[float]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model, decoding options): the twin and the SBD model token by token, then each gamma."""
    yield "nano-twin", {"mode": "ntp"}
    yield "nano", {"mode": "ntp"}
    for gamma in gammas:
        yield "nano", {"mode": "sbd", "solver": f"entropy:{gamma:g}"}


def measure(
    path: Path,
    gammas: tuple[float, ...] | list[float],
    split: str,
    limit: int,
    batch_size: int,
    held_out: bool = False,
) -> list[dict[str, Any]]:
    """The record's results: those already in the file, then the missing ones, saved one by one."""
    record = json.loads(path.read_text()) if path.is_file() else evaluate.new_record()
    done = {(one["task"], one["model"], one["mode"], one["solver"]) for one in record["results"]}
    problems = {
        name: nano.problems(name, split, limit, held_out=held_out) for name in nano.FAMILIES
    }
    models = {name: setblock.load(name, dtype="float32") for name in ("nano-twin", "nano")}
    for name, options in runs(gammas):
        for family in nano.FAMILIES:
            if (family, name, options["mode"], options.get("solver")) in done:
                continue
            label = f"{split} {name} {options['mode']} {options.get('solver', '')} {family}"
            with progress_bar(console, label, limit) as advance:
                line = evaluate.run(
                    models[name], family, problems[family], batch_size, advance, **options
                )
            record["results"].append(line | {"split": split, "held_out": held_out})
            evaluate.save_record(record, path)
    return record["results"]


def mean(
    results: list[dict[str, Any]], model: str, mode: str, solver: str | None, key: str
) -> float:
    """Mean over the families of one setting."""
    setting = (model, mode, solver)
    values = [one[key] for one in results if (one["model"], one["mode"], one["solver"]) == setting]
    assert len(values) == len(nano.FAMILIES)
    return sum(values) / len(values)


def pick_gamma(results: list[dict[str, Any]]) -> float | None:
    """The fastest gamma within the margin of the twin, None if there is none."""
    twin = mean(results, "nano-twin", "ntp", None, "score")
    good = [
        gamma
        for gamma in GAMMAS
        if mean(results, "nano", "sbd", f"entropy:{gamma:g}", "score") >= twin - MARGIN
    ]
    speed = lambda gamma: mean(results, "nano", "sbd", f"entropy:{gamma:g}", "tokens_per_forward")  # noqa: E731
    return max(good, key=speed, default=None)


def markdown(results: list[dict[str, Any]]) -> str:
    """One row per family and setting."""
    lines = [
        "| family | model | decoding | accuracy (95 %) | tokens per forward | seconds | entropy |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        low, high = one["interval"]
        lines.append(
            f"| {one['task']} | {one['model']} | {one['solver'] or 'ntp'} "
            f"| {one['score']:.1%} ({low:.1%} to {high:.1%}) | {one['tokens_per_forward']:.2f} "
            f"| {one['wall_s']:.1f} | {one['entropy_nats']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("benchmarks/records"),
    validation_limit: Annotated[int, typer.Option(help="Validation problems a family.")] = 200,
    limit: Annotated[int, typer.Option(help="Test problems a family.")] = 1000,
    held_out_limit: Annotated[int, typer.Option(help="Held-out problems a family.")] = 200,
    latency_limit: Annotated[int, typer.Option(help="Problems a family at batch size 1.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Problems decoded together.")] = 64,
) -> None:
    """Measure the bundled models; about an hour on two CPU cores."""
    validation = measure(
        out / "nano-validation.json", GAMMAS, "validation", validation_limit, batch_size
    )
    gamma = pick_gamma(validation)
    console.print(f"gamma picked on validation: {gamma}")
    chosen = [gamma] if gamma is not None else []
    measure(out / "nano-latency.json", chosen, "test", latency_limit, 1)
    measure(out / "nano-held-out.json", chosen, "test", held_out_limit, batch_size, held_out=True)
    test = measure(out / "nano-test.json", GAMMAS, "test", limit, batch_size)
    (out / "nano-test.md").write_text(markdown(test))


if __name__ == "__main__":
    typer.run(main)
