"""Runs of `train` that were stopped, killed or ended, and go on."""

import json
import re
import shutil
import signal
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainings import QUICK, ROWS, kill, one_line, run, train
from transformers import TrainerControl, TrainerState

from setblock.finetune import finetune
from setblock.run import TrainingRun
from setblock.watch import SaveOnSignal

# trl's own defaults use a name that transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


def test_a_finished_run_keeps_its_best_model(checkpoint, rows, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", folder)
    words += ("--eval-data", rows, "--eval-strategy", "steps", "--eval-steps", "1")
    words += ("--save-steps", "1", "--load-best-model-at-end", "yes", "--learning-rate", "0.3")
    # the lowest accuracy is the best one: that of a step before the last
    words += ("--metric-for-best-model", "eval_ntp_accuracy", "--greater-is-better", "no")
    train(monkeypatch, capsys, *words, "--lr-scheduler-type", "constant", "--optim", "sgd")
    first = load_file(folder / "model.safetensors")
    last = load_file(folder / "checkpoint-3" / "model.safetensors")
    assert any(not torch.equal(first[name], last[name]) for name in first)
    moved = folder.rename(tmp_path / "moved")
    (moved / "model.safetensors").unlink()
    words += ("--lr-scheduler-type", "constant", "--optim", "sgd", "--output-dir", moved)
    train(monkeypatch, capsys, *words, "--resume")
    again = load_file(moved / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    shutil.rmtree(moved / "checkpoint-1")
    with pytest.raises(SystemExit):
        train(monkeypatch, capsys, *words, "--resume")
    assert "the best model's checkpoint is gone" in one_line(capsys)


def test_resume_after_a_kill_that_cut_files_short(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    """In the middle of a checkpoint and of a line of the log."""
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", folder)
    words += ("--save-steps", "3", "--logging-steps", "2", "--num-train-epochs", "3")
    words += ("--decode-data", rows, "--decode-every", "2", "--answer-tokens", "4")
    words += tuple(QUICK.replace("--max-steps 3", "").split())  # six steps
    run(monkeypatch, "train", *words, "--json")
    straight = json.loads(capsys.readouterr().out)
    (folder / "checkpoint-6" / "trainer_state.json").unlink()
    whole = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(whole[:-20])
    run(monkeypatch, "train", *words, "--resume", "--json")
    shown = capsys.readouterr()
    said = "checkpoint-3: checkpoint-6 has no whole trainer_state.json: a stop cut it short"
    assert said in " ".join(shown.err.split())
    resumed = json.loads(shown.out)
    assert resumed["steps"] == 6
    assert resumed["train_loss"] == pytest.approx(straight["train_loss"], rel=1e-5)
    assert [one["step"] for one in straight["decode"]] == [0, 2, 4, 6]
    assert resumed["decode"] == straight["decode"]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [json.loads(line)["step"] for line in whole.splitlines()]
    assert [line["step"] for line in lines] == steps
    # killed in the very last decoding, with nothing left to train
    (folder / "log.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert "decode_n" not in (folder / "log.jsonl").read_text().splitlines()[-1]
    run(monkeypatch, "train", *words, "--resume", "--json")
    last = json.loads(capsys.readouterr().out)["decode"]
    assert [one["step"] for one in last] == [0, 2, 4, 6]
    assert last == straight["decode"]


def test_decodings_of_a_resumed_run_are_of_the_same_rows(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    words += ("--save-steps", "1", "--answer-tokens", "4", *QUICK.split())
    probe = ("--decode-data", rows, "--decode-every", "2")
    run(monkeypatch, "train", *words, *probe, "--decode-limit", "3")
    run(monkeypatch, "train", *words, "--resume")  # without any it changes none
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *words, *probe, "--decode-limit", "2", "--resume")
    assert re.search("decode_rows was '3 rows, sha256 .*', now '2 rows, sha256", one_line(capsys))
    run(monkeypatch, "train", *words, *probe, "--decode-limit", "3", "--resume")


def test_resume_is_as_if_nothing_had_happened(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    base = ("--model", checkpoint("llama"), "--data", rows, "--method", "lora")
    base += ("--save-steps", "1", "--logging-steps", "1")
    straight = train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "straight")
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *base, "--output-dir", tmp_path / "straight")
    assert "go on with --resume" in capsys.readouterr().err
    # a finished run without checkpoints is not written over either
    for file in (tmp_path / "straight").glob("checkpoint-*"):
        shutil.rmtree(file)
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *base, "--output-dir", tmp_path / "straight")
    assert "holds an earlier run (adapter_config.json)" in one_line(capsys)
    # stopped by a signal after its first step
    stop = threading.Event()
    monkeypatch.setattr("setblock.watch.SaveOnSignal.on_step_begin", lambda *a, **k: kill(stop))
    with pytest.raises(SystemExit) as code:
        train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "stopped")
    assert code.value.code == 128 + signal.SIGTERM
    err = capsys.readouterr()
    assert "stopped by SIGTERM with a checkpoint" in err.err
    assert json.loads(err.out)["steps"] == 1
    monkeypatch.undo()
    resumed = train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "stopped", "--resume")
    assert resumed["steps"] == 3
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("straight", "stopped")]
    first, second = map(load_file, files)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name])
    losses = [
        [line["matp_loss"] for line in one["log"] if "matp_loss" in line]
        for one in (straight, resumed)
    ]
    assert losses[0] == losses[1]
    assert resumed["train_loss"] == pytest.approx(straight["train_loss"])
    # finished: nothing is left to do, and nothing is done
    log = (tmp_path / "stopped" / "log.jsonl").read_text()
    ends = [line for line in map(json.loads, log.splitlines()) if "train_runtime" in line]
    assert [end["step"] for end in ends] == [3]
    assert ends[0]["train_loss"] == resumed["train_loss"]
    done = train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "stopped", "--resume")
    assert (done["steps"], done["train_loss"]) == (3, pytest.approx(straight["train_loss"]))
    assert (tmp_path / "stopped" / "log.jsonl").read_text() == log
    after = load_file(tmp_path / "stopped" / "adapter_model.safetensors")
    assert all(torch.equal(first[name], after[name]) for name in first)


@pytest.mark.parametrize("method", ["full", "gated", "chained"])
def test_resume_in_bfloat16_after_a_crash(
    checkpoint, rows, tmp_path, monkeypatch, capsys, method
) -> None:
    """Killed behind a checkpoint, with lines in the log of steps that come again; packed rows."""
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama-tied"), "--data", rows)
    words += ("--method", "full" if method == "full" else "gated")
    words += ("--chain-width", "8" if method == "chained" else "0")
    words += ("--output-dir", folder, "--save-steps", "2", "--logging-steps", "1")
    words += ("--packing", "yes", "--max-length", "64")
    words += tuple(word if word != "no" else "yes" for word in QUICK.split())  # bf16
    run(monkeypatch, "train", *words)
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    straight = load_file(folder / name)
    (folder / name).unlink()
    shutil.rmtree(folder / "checkpoint-3")
    capsys.readouterr()
    said: list[str] = []
    monkeypatch.setattr("transformers.trainer.logger.warning", said.append)
    run(monkeypatch, "train", *words, "--resume")
    assert not said, "a tied head is no missing one"
    assert "the last 1 of 3 steps in about" in " ".join(capsys.readouterr().err.split())
    resumed = load_file(folder / name)
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "matp_loss" in line] == [1, 2, 3]


def test_resume_keeps_its_settings(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", folder)
    words += ("--method", "lora", "--lora-rank", "4", "--save-steps", "1")
    train(monkeypatch, capsys, *words)
    for change, message in (
        (("--seed", "7", "--matp-weight", "3"), "matp_weight was 1.0, now 3.0; seed was 42, now 7"),
        (("--lora-rank", "8"), "lora_rank was 4, now 8"),
        (("--limit", "2"), "limit was None, now 2"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, "train", *words, *change, *QUICK.split(), "--resume")
        shown = one_line(capsys)
        for part in message.split("; "):
            assert part in shown
    longer = [word if word != "3" else "4" for word in QUICK.split()]
    run(monkeypatch, "train", *words, *longer, "--resume", "--logging-steps", "1", "--json")
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    with rows.open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *words, *longer, "--resume")
    assert re.search("rows was '4 rows, sha256 .*', now '5 rows, sha256", one_line(capsys))
    # a run of an earlier version, which told nothing of its rows and kept no sum of its losses
    settings = json.loads((folder / "_run" / "settings.json").read_text())
    del settings["rows"]
    (folder / "_run" / "settings.json").write_text(json.dumps(settings))
    shutil.rmtree(folder / "checkpoint-4")
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["setblock"]
    (folder / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
    run(monkeypatch, "train", *words, *longer, "--resume", "--json")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["train_loss"]) == (4, None)
    assert not any("train_loss" in line for line in summary["log"])


def test_a_run_that_died_before_its_first_checkpoint_is_begun_anew(
    checkpoint, rows, tmp_path, monkeypatch
) -> None:
    said: list[str] = []
    asked = TrainingRun(str(checkpoint("llama")), [str(rows)], tmp_path / "o")
    words = [*QUICK.split(), "--logging-steps", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("setblock.train.SBDTrainer._save_checkpoint", died)
        with pytest.raises(RuntimeError):
            finetune(asked, [*words, "--save-steps", "2"])
    log = tmp_path / "o" / "log.jsonl"
    before = log.read_text()
    assert '"step": 1' in before
    finetune(asked, words, said.append)
    assert any("ended before its first checkpoint: log-before.jsonl" in line for line in said)
    assert (tmp_path / "o" / "log-before.jsonl").read_text() == before
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == [1, 2, 3, 3]


def died(*words, **more):
    raise RuntimeError


@pytest.mark.parametrize(("epoch", "asked"), [(1.5, False), (2.0, True)])
def test_a_stop_within_an_epoch_evaluates_nothing(epoch, asked) -> None:
    """Else the best model could be one that a run without a stop never compares."""
    signals, control = SaveOnSignal(), TrainerControl(should_evaluate=True)
    args: Any = None
    signals.on_epoch_end(args, TrainerState(epoch=epoch), control)
    assert control.should_evaluate
    signals.stopped = "SIGTERM"
    signals.on_epoch_end(args, TrainerState(epoch=epoch), control)
    assert control.should_evaluate == asked


def test_resume_needs_a_checkpoint(checkpoint, rows, tmp_path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint to go on from"):
        finetune(
            TrainingRun(str(checkpoint("llama")), [str(rows)], tmp_path / "o", resume=True), []
        )
