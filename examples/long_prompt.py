"""Memory and time of a long prompt: peak bytes beside the least that weights and cache need.

    python examples/long_prompt.py --tokens 32768

A random network of a small shape, so that the prompt is what counts. Each measurement is a process
of its own, since a process's peak never falls: the prompt in chunks, as `setblock.generate` encodes
it, and in one forward, whose mask has a line for each of its tokens.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from setblock import machines, state
from setblock.generation import generate
from setblock.loading import load
from setblock.model import Model
from setblock.records import new_record, peak_bytes, save_record

SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BLOCK = 16


def measure(tokens: int, chunk: int, new_tokens: int) -> dict[str, Any]:
    """One prompt of random tokens and an answer of `new_tokens`."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=tokens + new_tokens + BLOCK)
    network = AutoModelForCausalLM.from_config(config)
    model = Model(network, load("nano").tokenizer, "random", mask_token_id=2047)
    model.eos_token_ids = frozenset()
    state.CHUNK = chunk
    short = [torch.randint(2000, (8,)).tolist()]
    options: Any = {"max_new_tokens": new_tokens, "mode": "sbd", "solver": "fixed:4"}
    options["block_size"] = BLOCK
    generate(model, short, **options)  # what the first forwards need once and for all
    before = peak_bytes(model.device)
    [found] = generate(model, [torch.randint(2000, (tokens,)).tolist()], **options)
    sizes = machines.dimensions_of(config)
    cache = 2 * sizes.layers * sizes.cache * (tokens + new_tokens) * model.dtype.itemsize
    peak = peak_bytes(model.device)
    return {
        "tokens": tokens,
        "chunk": chunk,
        "prefill_forwards": found.prefill_forwards,
        "prefill_s": found.prefill_s,
        "decode_s": found.decode_s,
        "weights_bytes": sum(one.numel() * one.element_size() for one in network.parameters()),
        "cache_bytes": cache,
        "peak_bytes": peak,
        "more_than_idle_bytes": None if peak is None or before is None else peak - before,
    }


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt.")] = 32768,
    chunks: Annotated[
        str, typer.Option(help="Tokens of a prompt's forward; 0 is all of them.")
    ] = f"{state.CHUNK},0",
    new_tokens: Annotated[int, typer.Option(min=1, help="Of the answer.")] = 32,
    out: Annotated[Path, typer.Option(help="The record.")] = Path(
        "benchmarks/records/long-prompt.json"
    ),
    only: Annotated[int | None, typer.Option(help="One measurement, as the processes call it.")] = (
        None
    ),
) -> None:
    """Measure, and write the record."""
    if only is not None:
        print(json.dumps(measure(tokens, only or tokens, new_tokens)))
        return
    record = new_record()
    for chunk in map(int, chunks.split(",")):
        own = ["--tokens", str(tokens), "--new-tokens", str(new_tokens), "--only", str(chunk)]
        command = [sys.executable, __file__, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        record["results"].append(result)
        peak, more = (result[name] or 0 for name in ("peak_bytes", "more_than_idle_bytes"))
        print(
            f"{tokens} tokens, {result['chunk']} at a time: {result['prefill_s']:.1f} s, peak "
            f"{peak / 1e6:.0f} MB, {more / 1e6:.0f} more "
            f"than before the prompt; the cache alone is {result['cache_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
    save_record(record, out)


if __name__ == "__main__":
    typer.run(main)
