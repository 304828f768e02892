"""What the type and layout of weights change on a CPU: the linear layers of one forward, alone.

    python examples/cpu_weights.py --out benchmarks/records/cpu-weights.json

All linear layers of a model's shape with random weights, one after the other as a forward runs
them, for 1 to 16 tokens: in float32 and bfloat16, as torch keeps them and laid out for oneDNN,
filled up to four tokens where `--pack` does that, and unfilled; in float32 also for MKL (`--pack`
takes that on Intel's processors) and transposed (`--pack` takes that for single tokens and small
weights, on others); and in 8 bits by torch's own kernels: the weights alone, or activations too,
rounded by a scale of each token's own, or by one for all tokens of a forward. With the last one
verified decoding could not keep its text: a token's logits would depend on the others. Attention,
norms and Python between layers have no part in it.
All kinds take turns, so that a machine that slows down slows all of them; medians. A kind that has
no kernels on this processor is named and left out.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from setblock import machines, packed
from setblock.records import new_record, save_record

Layer = Callable[[Tensor], Tensor]
console = Console()


def plain(weight: Tensor) -> Layer:
    return lambda tokens: linear(tokens, weight)


def one_dnn(weight: Tensor) -> Layer:
    return packed.OneDNN(weight, None)


def one_dnn_unfilled(weight: Tensor) -> Layer:
    layer = packed.OneDNN(weight, None)
    layer.fewest = 1
    return layer


def mkl(weight: Tensor) -> Layer:
    return packed.MKL(weight, None)


def transposed(weight: Tensor) -> Layer:
    turned = weight.T.contiguous()
    return lambda tokens: torch.matmul(tokens, turned)


def eight_bits(weight: Tensor) -> Layer:
    """Each output has a scale; the product is bfloat16's."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    rounded = (weight / scale).round().to(torch.int8)
    scales = scale[:, 0].to(weight.dtype)
    return lambda tokens: torch.ops.aten._weight_int8pack_mm(tokens, rounded, scales)


def eight_bits_by_token(weight: Tensor) -> Layer:
    scale = weight.abs().amax(dim=1) / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8).T.contiguous()

    def layer(tokens: Tensor) -> Tensor:
        own = tokens.abs().amax(dim=1, keepdim=True) / 127
        return torch.ops.aten._int_mm((tokens / own).round().to(torch.int8), rounded) * own * scale

    return layer


def eight_bits_all(weight: Tensor) -> Layer:
    scale = weight.abs().amax(dim=1) / 127
    zeros = torch.zeros(len(scale), dtype=torch.long)
    rounded = torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8)
    held = torch.ops.quantized.linear_prepack(rounded, None)
    return lambda tokens: torch.ops.quantized.linear_dynamic(tokens, held, reduce_range=True)


KINDS: dict[str, tuple[torch.dtype, Callable[[Tensor], Layer]]] = {
    "float32": (torch.float32, plain),
    "float32, oneDNN": (torch.float32, one_dnn),
    "float32, oneDNN, unfilled": (torch.float32, one_dnn_unfilled),
    "float32, MKL": (torch.float32, mkl),
    "float32, transposed": (torch.float32, transposed),
    "bfloat16": (torch.bfloat16, plain),
    "bfloat16, oneDNN": (torch.bfloat16, one_dnn),
    "8 bits, weights": (torch.bfloat16, eight_bits),
    "8 bits, each token too": (torch.float32, eight_bits_by_token),
    "8 bits, all tokens too": (torch.float32, eight_bits_all),
}


def missing(kind: str) -> str | None:
    """Why this kind of weights can't be made here; None if it can."""
    if kind.endswith("MKL"):
        return None if torch.backends.mkl.is_available() else "this torch is built without MKL"
    return packed.missing(torch.device("cpu"), KINDS[kind][0]) if "oneDNN" in kind else None


def forward_seconds(layers: list[tuple[int, Layer]], tokens: dict[int, Tensor]) -> float:
    begin = time.perf_counter()
    for width, layer in layers:
        layer(tokens[width])
    return time.perf_counter() - begin


@torch.no_grad()
def measured(
    model: str, kinds: list[str], queries: list[int], repeats: int
) -> list[dict[str, Any]]:
    """A line for each kind and number of tokens."""
    sizes = machines.find_model(model)
    assert sizes.output is not None
    shapes = [*sizes.linears * sizes.layers, sizes.output]
    made: dict[str, list[tuple[int, Layer]]] = {}
    for kind in kinds:
        dtype, make = KINDS[kind]
        weights = [torch.randn(after, before, dtype=dtype) / before for before, after in shapes]
        made[kind] = [(weight.shape[1], make(weight)) for weight in weights]
    widths = {before for before, _ in shapes}
    lines = []
    for count in queries:
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(repeats + 2):
            for kind, layers in made.items():
                dtype = KINDS[kind][0]
                tokens = {width: torch.randn(count, width, dtype=dtype) for width in widths}
                spent = forward_seconds(layers, tokens)
                if repeat > 1:  # two rounds warm up
                    seconds[kind].append(spent)
        for kind, found in seconds.items():
            faster = [one / own for one, own in zip(seconds["float32"], found, strict=True)]
            lines.append(
                {
                    "weights": kind,
                    "threads": torch.get_num_threads(),
                    "queries": count,
                    "seconds": statistics.median(found),
                    "faster_than_float32": statistics.median(faster),
                    "range": (min(faster), max(faster)),
                }
            )
    return lines


def main(
    model: Annotated[str, typer.Option(help="Whose shape; as for `setblock plan`.")] = (
        "smollm2-135m"
    ),
    queries: Annotated[list[int] | None, typer.Option(help="Tokens; again. 1, 4, 8, 16.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Again. 1, and torch's own.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="After two that warm up.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the record to this file.")] = None,
) -> None:
    """Measure the linear layers of a forward."""
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # will be removed
    if why := packed.missing(torch.device("cpu"), torch.float32):
        raise typer.BadParameter(f"nothing to compare here: {why}")
    left_out = {kind: why for kind in KINDS if (why := missing(kind))}
    for kind, why in left_out.items():
        console.print(f"left out: {kind}: {why}")
    kinds = [kind for kind in KINDS if kind not in left_out]
    record = new_record()
    record |= {"model": model, "repeats": repeats, "left_out": left_out}
    counts = queries or [1, 4, 8, 16]
    for number in threads or sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(number)
        lines = measured(model, kinds, counts, repeats)
        record["results"] += lines
        table = Table(title=f"Milliseconds of {model}'s linear layers, {number} thread(s)")
        for name in ("weights", *(f"tokens: {count}" for count in counts)):
            table.add_column(name, justify="left" if name == "weights" else "right")
        for kind in kinds:
            cells = [line["seconds"] for line in lines if line["weights"] == kind]
            table.add_row(kind, *(f"{1000 * cell:.1f}" for cell in cells))
        console.print(table)
        if out is not None:
            save_record(record, out)


if __name__ == "__main__":
    typer.run(main)
