"""What a training step costs beside plain fine-tuning: seconds and peak memory, at two lengths.

    python examples/train_cost.py --model smollm2-base

Each row is a process of its own, so that its peak memory is its own; the rows take turns, so that a
busy machine slows all of them alike. Every repeat draws other rows and noise. A step is drawing the
noise, forward, backward and AdamW. The ratio to trl's own step is that of the medians.
"""

import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset

# trl fills its namespace lazily, which hides these names from type checkers.
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from setblock import adapters, kernels, objective
from setblock.config import SBDConfig
from setblock.loading import load
from setblock.masks import WholeRows, flex_block_mask
from setblock.records import new_record, peak_bytes, save_record
from setblock.train import SBDTrainer

BASELINE = "trl full"
METHODS = {  # name: (objective, method, idle blocks); the first is SFTTrainer itself
    BASELINE: ("trl", "full", "drop"),
    "ntp full": ("ntp", "full", "drop"),
    "sbd full": ("sbd", "full", "drop"),
    "sbd full kept": ("sbd", "full", "keep"),
    "sbd lora": ("sbd", "lora", "drop"),
    "sbd gated": ("sbd", "gated", "drop"),
}
COMPILED = " compiled"  # behind a name: in kernels that torch.compile makes
ROWS = [*METHODS, *(name + COMPILED for name in ("sbd full", "sbd lora", "sbd gated"))]


def measure(model_name: str, row: str, length: int, steps: int, seed: int) -> dict[str, float]:
    """Median seconds of the steps after the first, and peak memory."""
    objective, method, idle_blocks = METHODS[row.removesuffix(COMPILED)]
    model = load(model_name, dtype="float32", device="cpu")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.vocab_size, (steps + 1, length), generator=generator)
    ids[ids == model.mask_token_id] = (model.mask_token_id + 1) % model.vocab_size
    rows = [
        {"input_ids": row, "labels": [-100] * (length // 2) + row[length // 2 :]}
        for row in ids.tolist()
    ]
    network = model.network
    if method != "full":
        network = adapters.attach(network, model_name, method, model.mask_token_id, 32, 64)
    common: dict[str, Any] = dict(
        output_dir="runs/cost",
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=1,
        max_length=None,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    data: dict[str, Any] = dict(
        train_dataset=Dataset.from_list(rows), processing_class=model.tokenizer
    )
    if objective == "trl":
        trainer: Any = SFTTrainer(network, SFTConfig(**common), **data)
    else:
        common |= dict(objective=objective, idle_blocks=idle_blocks)
        config = SBDConfig(**common, mask_token_id=model.mask_token_id)
        trainer = SBDTrainer(network, config, **data)
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    batches = iter(trainer.get_train_dataloader())
    seconds = []
    network.train()
    compiled = row.endswith(COMPILED)
    with kernels.training(network, "inductor") if compiled else nullcontext():
        for step in range(steps + 1):
            trainer.state.global_step = step
            begin = time.perf_counter()
            [batch], count = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
            with torch.autocast("cpu", torch.bfloat16):
                loss = trainer.compute_loss(network, batch, num_items_in_batch=count)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
    peak = peak_bytes(torch.device("cpu"))
    return {"step_s": statistics.median(seconds[1:]), "peak_bytes": peak or 0}


def mask_seconds(length: int, seed: int, times: int = 5) -> dict[str, float]:
    """Median times of the BlockMask of such a row's view: made anew, which every batch does unless
    idle blocks are kept, and of one whose tiles are known by length and block size.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, (1, length), generator=generator)
    labels = tokens.clone()
    labels[:, : length // 2] = objective.IGNORE
    position = torch.arange(length)[None]
    anew, known = [], []
    for repeat in range(times):
        _, masked = objective.draw_noise(seed, repeat, 0, length)
        size = objective.draw_block_size(seed, repeat)
        places = (position, torch.zeros_like(position))
        view = objective.noisy_view(tokens, labels, *places, masked[None], size, 0)
        layout = objective.drop_idle_blocks(view).layout
        begin = time.perf_counter()
        flex_block_mask(layout, layout)
        anew.append(time.perf_counter() - begin)
        layout, rows = view.layout, WholeRows(length, size)
        flex_block_mask(layout, layout, rows=rows)
        begin = time.perf_counter()
        flex_block_mask(layout, layout, rows=rows)
        known.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(anew), "cached_seconds": statistics.median(known)}


def main(
    model: Annotated[str, typer.Option(help="MODEL, as for `setblock train`.")],
    lengths: Annotated[str, typer.Option(help="Tokens of a row, half of them prompt.")] = "256,512",
    steps: Annotated[int, typer.Option(help="Timed steps of one row a process.")] = 4,
    repeats: Annotated[int, typer.Option(help="Processes for each row.")] = 3,
    out: Annotated[Path, typer.Option(help="The record.")] = Path(
        "benchmarks/records/train-cost.json"
    ),
    seed: Annotated[int, typer.Option(help="Of the first repeat's rows and noise.")] = 0,
    only: Annotated[str, typer.Option(help="One measurement, as the processes call it.")] = "",
) -> None:
    """Measure, and write the record."""
    if only:
        row, length = only.split(":")
        print(json.dumps(measure(model, row, int(length), steps, seed)))
        return
    record = new_record()
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repeat in range(repeats):
        for length in map(int, lengths.split(",")):
            for row in ROWS:
                own = ["--model", model, "--only", f"{row}:{length}", "--steps", str(steps)]
                command = [sys.executable, __file__, *own, "--seed", str(seed + repeat)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                result = json.loads(done.stdout.splitlines()[-1])
                found.setdefault((row, length), []).append(result)
                print(row, length, result, flush=True)
    for (row, length), results in found.items():
        step_s = [result["step_s"] for result in results]
        plain = statistics.median(result["step_s"] for result in found[BASELINE, length])
        record["results"].append(
            {
                "row": row,
                "length": length,
                "step_s": statistics.median(step_s),
                "step_s_all": step_s,
                "ratio": statistics.median(step_s) / plain,
                "peak_bytes": max(result["peak_bytes"] for result in results),
            }
        )
    for length in map(int, lengths.split(",")):
        result = {"row": "BlockMask", "length": length, **mask_seconds(length, seed)}
        record["results"].append(result)
        print(result, flush=True)
    save_record(record, out)


if __name__ == "__main__":
    typer.run(main)
