"""What a step of decoding takes outside of the network: Python, and operations on a few numbers.

    python examples/host_time.py --out benchmarks/records/host-time.json

The network's place is taken by a table of random logits by position, so that each row writes the
same text and every draft of a block is right; its own time is left out. What remains is masks,
copies, solvers and choices of tokens over the model's vocabulary, and bookkeeping. On a GPU the
device waits meanwhile. A chain is left out, as it is a network too.
"""

import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from setblock import generate, load
from setblock.contenders import now
from setblock.model import Model
from setblock.records import new_record, save_record

WAYS: dict[str, dict[str, Any]] = {
    "ntp": {"mode": "ntp"},
    "sbd": {"mode": "sbd", "block_size": 16},
    "verified": {"mode": "verified", "block_size": 8, "branches": 1, "seeds": 0, "lookup": 0},
    "copies too": {"mode": "verified", "block_size": 8, "branches": 1, "seeds": 0, "lookup": 8},
    "a solver's drafts": {"mode": "verified", "draft": "solver", "block_size": 8},
}
PROMPT = [5, 6, 7, 8, 9, 10]
console = Console()


class Told:
    """In the place of a network's forward.

    seconds, forwards: what it took, and how often it was called.
    """

    def __init__(self, model: Model, length: int) -> None:
        self.model, self.seconds, self.forwards = model, 0.0, 0
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(length + 1, model.vocab_size, generator=generator)
        if model.mask_token_id < model.vocab_size:
            logits[:, model.mask_token_id] = -torch.inf
        logits.scatter_(1, logits.argmax(dim=1, keepdim=True), 30.0)
        self.logits = logits.to(model.device)

    def __call__(
        self,
        tokens: Tensor,
        position: Tensor,
        mask: Any,
        cache: Any,
        logits_at: Tensor | None,
        told: Any,
    ) -> tuple[Tensor, Tensor]:
        begin = now(self.model)
        # A mask predicts itself, any other token the next one.
        at = position + (tokens != self.model.mask_token_id)
        logits = self.logits[at if logits_at is None else at[:, logits_at]]
        self.seconds += now(self.model) - begin
        self.forwards += 1
        return logits, logits[..., :0]


def measured(model: Model, rows: int, most: int, repeats: int) -> list[dict[str, Any]]:
    """A line for each way of decoding; the ways take turns."""
    told = Told(model, len(PROMPT) + most + 64)
    model._run, model.chain = told, None  # type: ignore[method-assign]
    spent: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(repeats + 1):
        for name, way in WAYS.items():
            told.seconds, told.forwards = 0.0, 0
            begin = now(model)
            generate(model, [PROMPT] * rows, max_new_tokens=most, ignore_eos=True, **way)
            seconds = now(model) - begin - told.seconds
            if repeat:  # the first round warms up
                spent[name].append(1e6 * seconds / told.forwards)
    return [
        {
            "way": name,
            "rows": rows,
            "microseconds": statistics.median(found),
            "range": (min(found), max(found)),
        }
        for name, found in spent.items()
    ]


def main(
    model: Annotated[str, typer.Argument(help="A name, path or hub name.")] = "nano",
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Again. 1 and 8.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 192,
    repeats: Annotated[int, typer.Option(min=1, help="After one that warms up.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the record to this file.")] = None,
) -> None:
    """Measure the part of decoding that is not the network's."""
    loaded = load(model)
    record = new_record()
    record |= {"model": loaded.name, "max_new_tokens": max_new_tokens, "repeats": repeats}
    table = Table(title=f"microseconds of a forward outside of {loaded.name}'s network")
    for heading in ("way", "rows", "median", "least", "most"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for count in rows or [1, 8]:
        lines = measured(loaded, count, max_new_tokens, repeats)
        record["results"] += lines
        for line in lines:
            numbers = (line["microseconds"], *line["range"])
            table.add_row(line["way"], str(count), *(f"{number:.0f}" for number in numbers))
    console.print(table)
    if out is not None:
        save_record(record, out)
        console.print(f"record: {out}")


if __name__ == "__main__":
    typer.run(main)
