"""A training that has so much time."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from trainings import run, write
from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from setblock import timelimit
from setblock.timelimit import TimeLimit

WORDS = "--use-cpu --bf16 no --disable-tqdm yes --per-device-train-batch-size 2 --logging-steps 1"


def scheduled(
    monkeypatch, per_step: float, warmup: float = 0, of_all_ranks: int = 1
) -> list[float]:
    """Rates of 100 steps of a linear schedule, of which a minute has room for some."""
    now = 0.0
    monkeypatch.setattr(timelimit.time, "monotonic", lambda: now)
    limit, state, control = TimeLimit(1.0), TrainerState(max_steps=100), TrainerControl()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / (100 * of_all_ranks)))
    args: Any = SimpleNamespace(world_size=1, warmup_steps=warmup, save_strategy=SaveStrategy.STEPS)
    wrapped = SimpleNamespace(scheduler=schedule)
    limit.on_train_begin(args, state, control, lr_scheduler=wrapped)
    rates = []
    while state.global_step < state.max_steps and not control.should_training_stop:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(of_all_ranks):
            schedule.step()
        now += per_step
        state.global_step += 1
        limit.on_step_end(args, state, control)
    assert control.should_save == control.should_training_stop
    return rates


@pytest.mark.parametrize("of_all_ranks", [1, 2])
def test_the_rate_falls_by_the_clock(monkeypatch, of_all_ranks):
    """Twenty steps fit: the rate falls as that of a hundred would, a step behind."""
    rates = scheduled(monkeypatch, 3.0, of_all_ranks=of_all_ranks)
    assert len(rates) == 20
    assert rates[2:] == pytest.approx([1 - (step - 1) / 20 for step in range(2, 20)])


def test_a_warm_up_that_is_a_share_is_one_of_the_time(monkeypatch):
    rates = scheduled(monkeypatch, 3.0, warmup=0.1)
    assert rates == scheduled(monkeypatch, 3.0)


def test_a_slow_first_step_is_no_more_than_its_time(monkeypatch):
    """A third of the time, and no step beyond the schedule's end."""
    rates = scheduled(monkeypatch, 20.0)
    assert rates == pytest.approx([1, 0.99, 1 - 1 / 3], abs=0.011)
    assert len(scheduled(monkeypatch, 36.0)) == 2


def test_with_time_to_spare_nothing_changes(monkeypatch):
    rates = scheduled(monkeypatch, 0.1)
    assert rates == pytest.approx([1 - step / 100 for step in range(100)])


def test_the_warm_up_takes_its_steps(monkeypatch):
    rates = scheduled(monkeypatch, 3.0, warmup=10)
    assert rates[:11] == pytest.approx([1 - step / 100 for step in range(11)])
    assert rates[12] < 0.5


def rows_in(folder) -> list[str]:
    rows = write(folder / "rows.jsonl", [{"prompt": "abc", "completion": "defgh"}] * 4)
    return ["--data", str(rows), "--output-dir", str(folder / "out"), *WORDS.split()]


def test_a_run_ends_in_time_and_goes_on(checkpoint, tmp_path, monkeypatch, capsys):
    words = [*rows_in(tmp_path), "--max-steps", "5000", "--lr-scheduler-type", "linear"]
    words += ["--model", str(checkpoint("llama")), "--decode-every", "100000", "--decode-data"]
    words += [str(tmp_path / "rows.jsonl"), "--answer-tokens", "4", "--max-minutes"]

    def train(*more: str) -> dict[str, Any]:
        run(monkeypatch, "train", *words, *more, "--json")
        return json.loads(capsys.readouterr().out)

    done = train("0.1")
    steps = done["steps"]
    assert 1 < steps < 5000
    assert (tmp_path / "out" / f"checkpoint-{steps}").is_dir()
    assert done["stopped_by"] is None
    assert [one["step"] for one in done["decode"]] == [0, steps], "it ends as any other run"
    assert done["estimate"]["seconds"] <= 6
    assert (tmp_path / "out" / "model.safetensors").is_file()
    log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in log]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 2
    assert train("0.02", "--resume", "--save-strategy", "no")["steps"] > steps
    assert len([*(tmp_path / "out").glob("checkpoint-*")]) == 1


def test_a_rate_that_follows_from_no_step():
    args: Any = SimpleNamespace(lr_scheduler_type="reduce_lr_on_plateau")
    with pytest.raises(ValueError, match="max_minutes needs a learning rate that"):
        TimeLimit(1.0).on_train_begin(args, TrainerState(), TrainerControl(), lr_scheduler=None)
