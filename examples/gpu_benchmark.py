"""The wall clock of decoding at the shape of Llama-3.1-8B, random weights: the table that the paper
predicted and did not measure.

    for how in graphs off kernels; do
        for part in answers forwards kernels; do
            python examples/gpu_benchmark.py --compile $how --part $part \\
                --out benchmarks/records/gpu-8b-$how-$part.json
        done
    done

Forwards of 1 to 272 query tokens behind 128 to 32,768 cached ones, for 1 to 32 rows, beside the
roofline; the bandwidth that a forward of one token reaches as a share of what a copy reaches; the
speed-ups that follow for 2 to 8 tokens per forward; and whole answers, in which a solver reveals a
fixed number of tokens per forward, so that the speed-up over next-token decoding can be set against
it, or drafts are verified. `--part kernels` names the GPU's kernels in single forwards, of graphs
too, which shares of a run can't. `--liger` puts liger-kernel's kernels for rotations, norms and
activations in transformers' place, where that package is installed; `--joined` makes linear layers
that read the same tokens one. The record is written after
each part and each size of batch. Without a GPU, `--shape tiny --device cpu` runs the same script in
minutes, but for graphs, which are CUDA's.
"""

import itertools
import statistics
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from setblock import benchmark, contenders, machines, packed, profiling, shared
from setblock.cli.options import (
    Compile,
    CompileOption,
)
from setblock.loading import load
from setblock.model import Model
from setblock.names import ModelError
from setblock.plan import beside_measured
from setblock.records import new_record, save_record
from setblock.roofline import DISPATCH_S

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
PARTS = ("answers", "forwards", "kernels")
RATES = range(2, 9)  # tokens per forward
BLOCK = 16
LONGEST = 12  # kernels that are told of; the record has all
SETTLED = 8  # tokens after which transformers replays what it has compiled
console = Console()


def random_model(shape: str, context: int, device: str, dtype: str) -> Model:
    """A model of that shape; its tokenizer, the bundled one, has no part in what is measured."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=context)
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    tokenizer = load("nano", device="cpu").tokenizer
    model = Model(network, tokenizer, shape, mask_token_id=config.vocab_size - 1)
    model.eos_token_ids = frozenset()  # answers are as long as they may be
    return model


def with_liger(network: Any) -> None:
    """Effects: a Llama's rotations, norms and activations are liger-kernel's, each one kernel."""
    try:
        liger: Any = import_module("liger_kernel.transformers")
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"--liger needs: pip install liger-kernel ({error})") from error
    liger.apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=network)


def with_joined_layers(network: Any) -> None:
    """Effects: linear layers that read the same tokens are one product of one weight."""
    plain = [name for name, layer in network.named_modules() if type(layer) is torch.nn.Linear]
    for names in shared.groups(plain):
        if len(names) > 1:
            weight = torch.cat([network.get_submodule(name).weight.detach() for name in names])
            whole = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
            whole.weight = torch.nn.Parameter(weight, requires_grad=False)
            packed.divide(network, names, whole)


def copy_bandwidth(model: Model, size: int) -> float:
    """Bytes a second, read and written, of a copy of `size` bytes; the median of ten."""
    source = torch.empty(size, dtype=torch.uint8, device=model.device)
    target = torch.empty_like(source)

    def seconds() -> float:
        begin = contenders.now(model)
        target.copy_(source)
        return contenders.now(model) - begin

    return 2 * size / statistics.median([seconds() for _ in range(11)][1:])


def room_for(model: Model, rows: int, cached: int, queries: int, before: int) -> bool:
    """Whether cache, mask and logits of such a forward fit into what a GPU has free.

    before: query tokens of the forwards of this cache before it, whose graphs keep their logits.
    """
    if model.device.type != "cuda":
        return True
    sizes = machines.dimensions_of(model.network.config)
    cache = 2 * sizes.layers * sizes.cache * (cached + queries) * model.dtype.itemsize
    logits = (3 * queries + before) * model.vocab_size * 4
    heads = sizes.attention // sizes.cache  # that share a key: each has a line of the mask
    mask = queries * (cached + queries) * (1 + heads * model.dtype.itemsize)
    # What graphs have kept for an earlier size of batch goes when this one's cache is made.
    kept = torch.cuda.memory_reserved(model.device) - model.weight_bytes
    free = torch.cuda.mem_get_info(model.device)[0] + kept
    return rows * (cache + logits + mask) < 0.85 * free


def forwards(
    model: Model, batch: int, cached: list[int], queries: list[int], repeats: int, graphs: bool
) -> list[dict[str, Any]]:
    """A line for each forward of so many rows that fits, beside the roofline's, to which graphs
    need no time to be launched.
    """
    lines: list[dict[str, Any]] = []
    for length in cached:
        fit: list[int] = []
        for count in queries:
            if room_for(model, batch, length, count, sum(fit)):
                fit.append(count)
        if fit:
            lines += benchmark.forward_costs(model, [length], fit, batch, repeats)
            console.print(f"{batch} rows behind {length} tokens: {lines[-1]['seconds']:.4f} s")
    machine = machines.device_of(model.device, model.dtype)
    dispatch_s = 0.0 if graphs else DISPATCH_S
    return beside_measured(machines.dimensions_of(model.network.config), machine, lines, dispatch_s)


def reached(model: Model, lines: list[dict[str, Any]], copy: float) -> list[dict[str, Any]]:
    """Of forwards of one token: bytes that must be read a second, as a share of the copy's."""
    sizes = machines.dimensions_of(model.network.config)
    embedding, head = model.network.get_input_embeddings(), model.network.get_output_embeddings()
    unread = 0 if embedding.weight is head.weight else embedding.weight.nbytes  # but for one row
    weights = sum(one.nbytes for one in model.network.parameters()) - unread
    found = []
    for line in lines:
        if line["queries"] == 1:
            cache = 2 * sizes.layers * sizes.cache * line["cached"] * model.dtype.itemsize
            rate = (weights + line["batch_size"] * cache) / line["seconds"]
            names = ("batch_size", "cached")
            found.append({**{name: line[name] for name in names}, "share_of_copy": rate / copy})
    return found


def speedups(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What so many tokens per forward gain: of a block's forwards the first takes two blocks."""
    found = []
    for key in dict.fromkeys((line["batch_size"], line["cached"]) for line in lines):
        here = {
            line["queries"]: line["seconds"]
            for line in lines
            if (line["batch_size"], line["cached"]) == key
        }
        if {1, BLOCK, 2 * BLOCK} <= set(here):
            later = here[BLOCK]
            gains = {
                str(rate): BLOCK * here[1] / (here[2 * BLOCK] + (BLOCK / rate - 1) * later)
                for rate in RATES
            }
            found.append({"batch_size": key[0], "cached": key[1], "speedup": gains})
    return found


def answers(
    model: Model, length: int, tokens: int, repeats: int, others: bool
) -> list[dict[str, Any]]:
    """Whole answers behind such a prompt: 1, 2, 4 and 8 tokens per forward, and where time goes;
    not of compiled forwards, whose operations a profiler can't tell apart.
    """
    prompt = [5 + place % 200 for place in range(length)]
    running = {"ntp": contenders.ours(mode="ntp")}
    for rate in (1, 2, 4, 8):
        options: dict[str, Any] = {"solver": f"fixed:{rate}", "block_size": BLOCK}
        running[f"sbd fixed:{rate}"] = contenders.ours(mode="sbd", **options)
    # A random model's drafts are wrong, so that this is what verifying and drafting them costs.
    drafting = {"block_size": BLOCK // 2, "branches": 1, "seeds": 0}
    running["verified"] = contenders.ours(mode="verified", **drafting)
    if others:
        running["transformers"] = contenders.transformers_generate()
    if others and model.device.type == "cuda":  # which transformers compiles then
        running["transformers static"] = contenders.transformers_generate(
            cache_implementation="static", settled=min(SETTLED, tokens // 2)
        )
    lines = list(benchmark.compare(model, [prompt], 1, tokens, repeats, running))
    if model.compiled:
        return lines
    profiles: dict[str, dict[str, Any]] = {
        "ntp": {"mode": "ntp"},
        "sbd": {"mode": "sbd", "solver": "fixed:4", "block_size": BLOCK},
    }
    for name, options in profiles.items():
        options |= {"max_new_tokens": tokens, "ignore_eos": True}
        found = profiling.profiled(model, [prompt], 1, **options)
        lines.append({"contender": f"shares of {name}", "prompt_tokens": length, **found})
    return lines


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama-3.1-8b",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    compile: CompileOption = Compile.off,
    liger: Annotated[bool, typer.Option(help="With liger-kernel's rotations and others.")] = False,
    joined: Annotated[bool, typer.Option(help="Layers that read the same tokens as one.")] = False,
    part: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PARTS)}. Default: the first two.")
    ] = None,
    queries: Annotated[list[int] | None, typer.Option(help="Query tokens; again.")] = None,
    cached: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; again.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows; again.")] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Prompts of the whole answers, in tokens; again.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Of a whole answer.")] = 128,
    repeats: Annotated[int, typer.Option(help="After one that warms up.")] = 5,
    transformers: Annotated[bool, typer.Option(help="Also its generate.")] = True,
    copy_bytes: Annotated[int, typer.Option(help="Of the copy.")] = 4 * 2**30,
    out: Annotated[Path | None, typer.Option(help="Write the record to this file.")] = None,
) -> None:
    """Measure forwards and whole answers of a random model."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if part not in (None, *PARTS):
        raise typer.BadParameter(f"--part must be one of {', '.join(PARTS)}, got {part!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "--device cuda: no CUDA GPU is here; --shape tiny --device cpu runs"
        )
    widths = queries or [1, 8, 16, 32, 64, 128, 272]
    lengths, batches = cached or [128, 1024, 8192, 32768], rows or [1, 4, 8, 16, 32]
    prompts = prompt or [1024, 8192]
    context = max(max(lengths) + max(widths), max(prompts) + new_tokens + 2 * BLOCK)
    try:
        model = random_model(shape, context, device, dtype)
        if liger:
            with_liger(model.network)
        if joined:
            with_joined_layers(model.network)
        if compile is not Compile.off:
            model.compile(compile.value)
    except ModelError as error:
        raise typer.BadParameter(f"--compile {compile.value} --device {device}: {error}") from error
    record = new_record()
    record |= {"dtype": dtype, "compile": compile.value, "repeats": repeats}
    record |= {"liger": liger, "joined": joined}
    record["dimensions"] = asdict(machines.dimensions_of(model.network.config))
    record["copy_bytes_per_second"] = copy = copy_bandwidth(model, copy_bytes)
    console.print(f"a copy reaches {copy / 1e9:.0f} GB/s")
    record |= {"answers": [], "forwards": [], "kernels": []}

    def save() -> None:
        record["bandwidth"] = reached(model, record["forwards"], copy)
        record["speedups"] = speedups(record["forwards"])
        if device == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
            record["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        if out is not None:
            save_record(record, out)

    for length in prompts if part in (None, "answers") else ():
        record["answers"] += (lines := answers(model, length, new_tokens, repeats, transformers))
        save()
        for line in lines:
            if line.get("speedup"):
                console.print(f"{line['contender']} behind {length}: {line['speedup']:.2f}x")
    for batch in batches if part in (None, "forwards") else ():
        record["forwards"] += forwards(
            model, batch, lengths, widths, repeats, compile in (Compile.on, Compile.graphs)
        )
        save()
    for length, count in itertools.product(lengths, widths) if part == "kernels" else ():
        record["kernels"] += (lines := benchmark.forward_kernels(model, length, count, 1, repeats))
        save()
        busy, calls = (sum(line[name] for line in lines) for name in ("microseconds", "calls"))
        console.print(f"{count} tokens behind {length}: {calls:.0f} kernels, {busy / 1e3:.2f} ms")
        for line in lines[:LONGEST]:
            kernel = line["kernel"][:70]
            console.print(f"  {line['calls']:6.1f} x {line['microseconds']:9.1f} us  {kernel}")
    table = Table(title="Speed-up for so many tokens per forward, blocks of 16")
    for name in ("rows", "cached", *map(str, RATES)):
        table.add_column(name, justify="right")
    for line in record["speedups"]:
        gains = (f"{gain:.2f}" for gain in line["speedup"].values())
        table.add_row(str(line["batch_size"]), str(line["cached"]), *gains)
    if record["speedups"]:  # of the part that times forwards
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
