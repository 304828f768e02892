"""What a training run will take, told before its first step."""

import math
import os
import time
from collections.abc import Sized
from typing import Any

import torch

from setblock.records import peak_bytes
from setblock.train import SBDTrainer


def estimate(trainer: SBDTrainer, done: int = 0) -> dict[str, Any]:
    """What the run will take: bytes by arithmetic, seconds and peak by one micro-batch tried now.

    peak_bytes: what this process held at most until now, activations included, the optimizer not.
    The bytes are those of one process: all of the model's, or its part of `shards` under FSDP.
    Processes that share the weights out among them (FSDP, DeepSpeed) try nothing: none could hold
    the model before it is cut. What DeepSpeed cuts up depends on its stage, and is not divided.
    done: steps of a run that goes on; seconds are those of the steps that are left.
    Effects: one forward and backward, without a trace in weights, gradients, noise or log.
    Raises: ValueError for rows that are too few or do not fit into memory.
    """
    args, network = trainer.args, trainer.model
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    cost: dict[str, Any] = {
        "parameters": sum(p.numel() for p in network.parameters()),
        "trained_parameters": trained,
        "shards": (parts := _shards(trainer)),
        "weight_bytes": weights // parts,
        "gradient_bytes": 4 * trained // parts,
        "optimizer_bytes": 8 * trained // parts if "adam" in str(args.optim).lower() else None,
        "peak_bytes": None,
        "tokens_per_second": None,
        "steps": None,
        "steps_done": done,
        "seconds": None,
    }
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return cost
    devices = [args.device] if args.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        loader = trainer.get_train_dataloader()
        batch = next(iter(loader), None)
        if batch is None:
            raise ValueError(
                "dataloader_drop_last leaves no batch: the data has fewer rows than "
                f"per_device_train_batch_size={args.per_device_train_batch_size}"
            )
        network.to(args.device)  # pyright: ignore[reportArgumentType, reportCallIssue]
        batch = {name: value.to(args.device) for name, value in batch.items()}
        tokens = int((batch["document"] >= 0).sum())
        network.train()
        _recompute(trainer)
        begin = time.perf_counter()
        try:
            # As accelerate runs the forwards of a model that it has prepared.
            with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(network, batch)
            loss.backward()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"per_device_train_batch_size={args.per_device_train_batch_size} does not fit: a "
                f"micro-batch of {tokens:,} tokens needs more memory than the GPU has left. Lower "
                "it and raise gradient_accumulation_steps, or lower max_length or "
                "logits_chunk_size"
            ) from error
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    network.zero_grad()
    trainer.forget()
    per_step = args.gradient_accumulation_steps
    steps = args.max_steps
    if steps <= 0 and isinstance(trainer.train_dataset, Sized):
        rows_at_a_time = args.per_device_train_batch_size * args.world_size
        batches = math.ceil(len(trainer.train_dataset) / rows_at_a_time)
        steps = math.ceil(math.ceil(batches / per_step) * args.num_train_epochs)
    cost["tokens_per_second"] = args.world_size * tokens / seconds
    cost["peak_bytes"] = peak_bytes(args.device)
    if steps > 0:
        most = math.inf if args.max_minutes is None else 60 * args.max_minutes
        left = seconds * per_step * max(steps - done, 0)
        cost |= {"steps": steps, "seconds": min(left, most)}
    return cost


def _recompute(trainer: SBDTrainer) -> None:
    """Effects: layers keep as much for the backward pass as in training, which says so only when it
    begins.
    """
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # its new name, its old one
        if getattr(trainer.args, name, None):
            options = dict(getattr(trainer.args, f"{name}_kwargs") or {})
            own = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
            enable: Any = getattr(trainer.model, f"{name}_enable")
            enable(**{f"{name}_kwargs": options or None}, **own)
            return


def _shards(trainer: SBDTrainer) -> int:
    """Among how many processes FSDP shares out weights, gradients and optimizer; 1 without."""
    if not trainer.is_fsdp_enabled:
        return 1
    accelerator: Any = trainer.accelerator
    plugin, ranks = accelerator.state.fsdp_plugin, accelerator.num_processes
    if plugin.fsdp_version == 2:
        parallel = accelerator.parallelism_config
        return ranks // (1 if parallel is None else parallel.dp_replicate_size)
    strategy = str(plugin.sharding_strategy or plugin.reshard_after_forward)
    if "NO_SHARD" in strategy:
        return 1
    if "HYBRID" in strategy:  # in each machine
        # A launcher other than torch's may not say it; torch itself goes by the GPUs.
        return int(os.environ.get("LOCAL_WORLD_SIZE") or torch.accelerator.device_count())
    return ranks


def describe(cost: dict[str, Any]) -> str:
    """One line of text for `estimate`."""
    held = [cost[f"{name}_bytes"] for name in ("weight", "gradient", "optimizer")]
    line = (
        f"{cost['trained_parameters']:,} of {cost['parameters']:,} parameters are trained; "
        f"weights, gradients and optimizer take {sum(filter(None, held)) / 2**30:.2f} GiB "
        + (f"in each of {cost['shards']} processes " if cost["shards"] > 1 else "")
        + "beside the activations"
    )
    if cost["peak_bytes"] is not None:
        without = cost["peak_bytes"] / 2**30
        line += f" (a micro-batch without the optimizer reached {without:.2f} GiB)"
    if cost["tokens_per_second"] is None:
        line += "; time is not estimated where processes share the weights"
    else:
        line += f"; about {cost['tokens_per_second']:,.0f} tokens a second"
    if cost["seconds"] is not None:
        left = f"the last {cost['steps'] - cost['steps_done']:,} of " if cost["steps_done"] else ""
        steps = f"{cost['steps']:,} step{'s' * (cost['steps'] != 1)}"
        line += f", {left}{steps} in about {_words(cost['seconds'])}"
    return line


def _words(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 100:
        return f"{max(seconds, 2):.0f} seconds"
    return f"{seconds / 60:,.0f} minutes" if seconds < 6000 else f"{seconds / 3600:,.1f} hours"
