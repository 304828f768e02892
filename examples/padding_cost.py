"""What leaving padding out of forwards saves on a CPU, for rows of different lengths.

    python examples/padding_cost.py --model smollm2 --rows 9,1,1,1 --rows 40,60,120,200

Each forward is timed with padding and without, in turns, on one cache, and the median of the pairs'
ratios is told. With one thread: OMP_NUM_THREADS=1.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from setblock import model as models
from setblock.loading import load
from setblock.masks import decoding_layout
from setblock.model import Model
from setblock.names import ModelError
from setblock.records import new_record, save_record

ROWS = ["2,1,1,1", "4,2,1,1", "9,1,1,1", "5,4,3,2,1,1,1,1", "40,60,120,200"]


def filled(model: Model, lengths: list[int], cached: int) -> Any:
    """A cache of as many rows with so many random tokens each, and room for a forward."""
    cache = model.new_cache(len(lengths), cached + max(lengths))
    end = np.full(len(lengths), cached)
    position = np.tile(np.arange(cached), (len(lengths), 1))
    tokens = torch.randint(model.vocab_size, position.shape)
    none = torch.empty(0, dtype=torch.long)
    model.forward(tokens, decoding_layout(position, end, end), cache, logits_at=none)
    cache.keep(end)
    return cache


def seconds(model: Model, cache: Any, lengths: list[int]) -> float:
    """Of a forward of so many tokens in each row, with all their logits."""
    cached, width = int(cache.lengths[0]), max(lengths)
    position = np.tile(cached + np.arange(width), (len(lengths), 1))
    end = cached + np.array(lengths)
    tokens = torch.randint(model.vocab_size, position.shape)
    begin = time.perf_counter()
    model.forward(tokens, decoding_layout(position, end, end), cache)
    return time.perf_counter() - begin


def main(
    model: Annotated[str, typer.Option(help="MODEL to time.")] = "smollm2",
    rows: Annotated[list[str], typer.Option(help="Tokens of each row; may be repeated.")] = ROWS,
    cached: Annotated[int, typer.Option(help="Of a row in the cache.", min=1, max=4096)] = 200,
    repeats: Annotated[int, typer.Option(help="Pairs of forwards.", min=1)] = 15,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    compile: Annotated[
        bool, typer.Option("--compile", help="In kernels that torch.compile makes first.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The record.")] = Path(
        "benchmarks/records/padding-cost.json"
    ),
) -> None:
    """Measure, and write the record."""
    record = new_record()
    try:
        loaded = load(model, device="cpu", dtype=dtype, pack=True, compile=compile)
    except ModelError as error:
        raise typer.BadParameter(str(error)) from error
    print("| tokens of rows | padded, ms | without, ms | times as fast |")
    print("| --- | ---: | ---: | ---: |")
    without = models.line_of
    for words in rows:
        try:
            lengths = [int(word) for word in words.split(",")]
        except ValueError as error:
            raise typer.BadParameter(f"--rows {words!r}: numbers with commas") from error
        if min(lengths) < 1:
            raise typer.BadParameter(f"--rows {words!r}: each row has a token at least")
        cache, pairs = filled(loaded, lengths, cached), []
        for _ in range(repeats + 2):  # two to warm up
            pair = []
            for line_of in (lambda layout: None, without):
                models.line_of = line_of
                pair.append(seconds(loaded, cache, lengths))
            pairs.append(pair)
        models.line_of = without
        padded, plain = (statistics.median(times) for times in zip(*pairs[2:], strict=True))
        ratios = [one / other for one, other in pairs[2:]]
        ratio, spread = statistics.median(ratios), (min(ratios), max(ratios))
        line = {"rows": lengths, "padded_s": padded, "without_s": plain}
        record["results"].append(line | {"speedup": ratio, "speedup_range": spread})
        print(f"| {words} | {padded * 1e3:.1f} | {plain * 1e3:.1f} | {ratio:.2f} |", flush=True)
    settings = {"model": loaded.name, "dtype": dtype, "cached": cached, "compile": compile}
    save_record(record | settings, out)


if __name__ == "__main__":
    typer.run(main)
