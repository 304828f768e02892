"""Attention of one layer over a long cache, whole and in pieces, on a GPU.

    python examples/gpu_attention.py --out benchmarks/records/gpu-attention.json

Shapes are those of Llama-3.1-8B: 32 heads that share 8 of keys and values, 128 wide, bfloat16, and
the last 300 slots out of sight. Each way is a CUDA graph of 20 calls; the error is that of the
result against float32's, as a share of its norm.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from setblock import attention, graphs
from setblock.records import new_record, save_record

HEADS, SHARED, WIDTH, UNSEEN, CALLS = 32, 8, 128, 300, 20
PIECES = (1, 8, 16)
DEVICE = "cuda"
console = Console()


def seconds_of(call: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """Of one call, the median; the first turn warms up."""

    def many() -> tuple[Tensor]:
        return ([call() for _ in range(CALLS)][-1],)

    run, _ = graphs.record(many, graphs.new_pool(), device)
    seconds = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000 / CALLS)
    return statistics.median(seconds[1:])


@torch.no_grad()
def measured(
    device: torch.device, batch: int, slots: int, queries: int, repeats: int
) -> list[dict[str, Any]]:
    """A line for each number of pieces."""
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int, length: int) -> Tensor:
        shape = batch, heads, length, WIDTH
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    query, key, value = random(HEADS, queries), random(SHARED, slots), random(SHARED, slots)
    seen = slots - min(UNSEEN, slots // 4) + torch.arange(queries, device=device)
    mask = torch.arange(slots, device=device) < seen[:, None]
    mask = mask.expand(batch, 1, -1, -1).contiguous()
    exact = attention.folded(query.float(), key.float(), value.float(), mask, None)
    lines = []
    for count in PIECES if batch == 1 else (1,):

        def call(count: int = count) -> Tensor:
            if count == 1:
                return attention.folded(query, key, value, mask, None)
            return attention.in_pieces(query, key, value, mask, None, count)

        error = ((call().float() - exact).norm() / exact.norm()).item()
        microseconds = 1e6 * seconds_of(call, device, repeats)
        cell = {"batch_size": batch, "slots": slots, "queries": queries, "pieces": count}
        lines.append({**cell, "microseconds": microseconds, "error": error})
    return lines


def main(
    slots: Annotated[list[int] | None, typer.Option(help="Of the cache; again.")] = None,
    queries: Annotated[list[int] | None, typer.Option(help="Query tokens; again.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Again.")] = None,
    repeats: Annotated[int, typer.Option(help="After one that warms up.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the record to this file.")] = None,
) -> None:
    """Measure attention whole and in pieces."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        typer.echo("error: no CUDA GPU is here", err=True)
        raise typer.Exit(1)
    record = new_record()
    table = Table(title="one layer's attention, microseconds")
    for name in ("rows", "slots", "queries", *(f"in {count}" for count in PIECES)):
        table.add_column(name, justify="right")
    for batch in rows or [1, 8]:
        for length in slots or [1536, 8704, 33280]:
            for count in queries or [1, 16, 32]:
                lines = measured(torch.device(DEVICE), batch, length, count, repeats)
                record["results"] += lines
                times = [f"{line['microseconds']:.0f}" for line in lines]
                table.add_row(str(batch), str(length), str(count), *times)
    console.print(table)
    if out is not None:
        save_record(record, out)


if __name__ == "__main__":
    typer.run(main)
