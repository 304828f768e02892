"""Training on two ranks: replicas and shards are one process, and what a shard will hold."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainers import SHAPES, logged, network, trainer, weights

from setblock.estimate import describe, estimate


def train_on_this_rank(folder, shape):
    run = trainer(
        folder,
        net=network(shape),
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)),
        train_sampling_strategy="sequential",
    )
    run.train()
    if run.accelerator.is_main_process:
        record = {name: logged(run, name) for name in ("loss", "ntp_loss", "matp_loss")}
        record["weights"] = weights(run).tolist()
        (folder / "record.json").write_text(json.dumps(record))
    return run


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """on_two_ranks(job): the folder of a job of this file, every shape's record in a folder of its
    own. Two processes, which torchrun starts, ran it, once for all tests.
    """

    @functools.cache
    def folder_of(job):
        folder = tmp_path_factory.mktemp(job)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, __file__, job, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return folder_of


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_are_one(tmp_path, on_two_ranks, shape):
    train_on_this_rank(tmp_path, shape).leave()
    places = (tmp_path, on_two_ranks("train") / shape)
    records = [json.loads((place / "record.json").read_text()) for place in places]
    for name, values in records[0].items():
        assert values == pytest.approx(records[1][name], abs=1e-5)


@pytest.mark.parametrize(
    ("plugin", "replicas", "shards"),
    [
        ({"fsdp_version": 2}, 1, 8),
        ({"fsdp_version": 2}, 2, 4),
        ({"fsdp_version": 1}, 1, 8),
        ({"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"}, 1, 4),
        ({"fsdp_version": 1, "sharding_strategy": "NO_SHARD"}, 1, 1),
    ],
)
@pytest.mark.parametrize("told", [True, False])  # by the launcher: processes of a machine
def test_the_estimate_of_one_shard(tmp_path, monkeypatch, plugin, replicas, shards, told):
    run = trainer(tmp_path, optim="adamw_torch")
    whole = estimate(run)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(**plugin)),
        num_processes=8,
        parallelism_config=ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=8),
    )
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    else:
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(run, "accelerator", accelerator)
    monkeypatch.setattr(run, "is_fsdp_enabled", True)
    cost = estimate(run)
    for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
        assert cost[name] == whole[name] // shards
    assert cost["tokens_per_second"] is cost["seconds"] is None
    line = describe(cost)
    assert (f"GiB in each of {shards} processes beside" in line) == (shards > 1)
    assert line.endswith("time is not estimated where processes share the weights")
    assert "time is not" not in describe(whole)


def shard_on_this_rank(folder, shape):
    """Three steps of a network that FSDP2 has cut up, half of the rows a rank: the first one's
    gradients, the weights behind the last, and the losses.
    """
    run = trainer(
        folder,
        net=two_layers(shape),
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)),
        train_sampling_strategy="sequential",
        self_distill=0.5,
        logits_chunk_size=7,
    )
    network = run.model
    sharded = run.accelerator.num_processes > 1
    if sharded:
        for layer in network.model.layers:
            fully_shard(layer)
        fully_shard(network)
    loader = run.accelerator.prepare(run.get_train_dataloader()) if sharded else None
    loader = loader or run.get_train_dataloader()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    network.train()
    record = {}
    for step in range(3):
        run.state.global_step, run.state.epoch = step, step
        [batch], count = run.get_batch_samples(iter(loader), 1, torch.device("cpu"))
        loss = run.compute_loss(network, batch, num_items_in_batch=count)
        loss.backward()
        losses = run.accelerator.gather(loss.detach().reshape(1))
        record[f"loss {step}"] = losses.mean().item()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        if step == 0:
            record |= {f"gradient of {name}": of.grad for name, of in network.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    record |= network.state_dict()
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
        for name, value in record.items()
    }
    if run.accelerator.is_main_process:
        values = {name: value.tolist() for name, value in whole.items()}
        (folder / "record.json").write_text(json.dumps(values))
    return run


def two_layers(shape):
    torch.manual_seed(0)
    kind, config = SHAPES[shape]
    settings = {**config.to_diff_dict(), "num_hidden_layers": 2}
    settings.pop("layer_types", None)
    return kind(type(config)(**settings))


@pytest.mark.parametrize("shape", SHAPES)
def test_two_shards_are_one(tmp_path, on_two_ranks, shape):
    """FSDP2 over two gloo ranks; accelerate itself offers it on accelerators only."""
    shard_on_this_rank(tmp_path, shape).leave()
    places = (tmp_path, on_two_ranks("shard") / shape)
    records = [json.loads((place / "record.json").read_text()) for place in places]
    assert records[0].keys() == records[1].keys()
    for name, values in records[0].items():
        assert torch.tensor(values).abs().max() > 0
        assert torch.allclose(torch.tensor(values), torch.tensor(records[1][name]), atol=1e-6)


JOBS = {"train": train_on_this_rank, "shard": shard_on_this_rank}


if __name__ == "__main__":
    last = None
    for shape in SHAPES:
        folder = Path(sys.argv[2]) / shape
        folder.mkdir(exist_ok=True)
        last = JOBS[sys.argv[1]](folder, shape)
    assert last is not None
    last.leave()
