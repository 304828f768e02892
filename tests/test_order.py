"""The order in which a run's rows come: the same when it goes on."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from trainers import SHAPES, logged, network, samples, trainer, weights

from setblock import objective


@pytest.mark.parametrize("order", ["random", "group_by_length"])
@pytest.mark.parametrize("shape", SHAPES)
def test_resume_changes_nothing(tmp_path, shape, order):
    # 8 rows in micro-batches of 2, two a step: an epoch is 2 steps, so that 3 is inside the second.
    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_steps": 3,
        "save_strategy": "steps",
        "optim": "adamw_torch",
        "train_sampling_strategy": order,
    }
    straight = trainer(tmp_path, net=network(shape), **options)
    straight.train()
    resumed = trainer(tmp_path, net=network(shape), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name in ("loss", "ntp_loss", "matp_loss", "mask_ratio", "block_size"):
        assert logged(resumed, name) == logged(straight, name)
    assert torch.equal(weights(resumed), weights(straight))


def test_each_epoch_has_an_order_by_length_of_its_own(tmp_path):
    rows, given = samples(40), {"train_sampling_strategy": "group_by_length", "use_cpu": True}
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (1, 0), (2, 0)):
        sampler = trainer(tmp_path, rows, seed=seed, **given)._get_train_sampler()
        sampler.set_epoch(epoch)
        torch.rand(3)  # whatever else draws
        orders.append(list(sampler))
        assert sorted(orders[-1]) == list(range(40))
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert orders[0] != orders[3]


def test_each_pass_over_a_stream_has_noise_of_its_own(tmp_path, monkeypatch):
    keys: list[tuple[int, list]] = []
    drawn = objective.draw_batch_noise

    def noted(seed, epoch, ids, *rest):
        keys.append((epoch, [one for [one] in ids]))
        return drawn(seed, epoch, ids, *rest)

    monkeypatch.setattr(objective, "draw_batch_noise", noted)
    rows = Dataset.from_list(samples(4)).add_column("sample_id", list(range(4)))
    options = {"per_device_train_batch_size": 2, "max_steps": 5, "save_strategy": "steps"}
    stream: Any = rows.to_iterable_dataset()
    run = trainer(tmp_path, stream, **options, save_steps=1)
    run.train()
    assert keys == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3]), (2, [0, 1])]
    again = trainer(tmp_path, stream, **options)
    with pytest.raises(ValueError, match=r"checkpoint-3 is of pass 2 over a stream"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    keys.clear()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert keys == [(0, [2, 3]), (1, [0, 1]), (1, [2, 3]), (2, [0, 1])]
