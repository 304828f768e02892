"""Going on with a stopped training run: what its folder may hold, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainers import config
from transformers import TrainerState

from setblock.resume import (
    OWN_FOLDER,
    check_settings,
    is_finished,
    kept_lines,
    last_checkpoint,
    left_in,
    write_lines,
)


def made(folder: Path, *steps: int) -> Path:
    """A run's folder with a whole checkpoint of each of these steps."""
    for step in steps:
        place = folder / f"checkpoint-{step}"
        place.mkdir(parents=True)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"a": torch.zeros(100)}, place / name)
        save_file({"a": torch.zeros(100)}, place / "model.safetensors")
        (place / "config.json").write_text("{}")
        TrainerState(global_step=step).save_to_json(str(place / "trainer_state.json"))
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.safetensors", "*.safetensors"),
        ("optimizer.pt", "optimizer state (save_only_model)"),
        ("scheduler.pt", "scheduler.pt"),
        ("config.json", None),
        ("rng_state.pth", "rng_state*"),
    ],
)
def test_a_checkpoint_whose_files_were_cut_short_is_passed_over(tmp_path, name, kind) -> None:
    folder, said = made(tmp_path / "out", 2, 4), []
    file = folder / "checkpoint-4" / name
    assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-4"
    file.write_bytes(file.read_bytes()[:-1])
    assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-2"
    if kind is None:  # another kind of model has none
        return
    file.unlink()
    assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-2"
    start = f"going on from {folder}/checkpoint-2: checkpoint-4 has no"
    assert said == [f"{start} whole {name}", f"{start} {kind}"]


def test_a_checkpoint_in_parts_is_whole(tmp_path) -> None:
    """Weights and optimizer of FSDP lie in folders."""
    folder = made(tmp_path, 2)
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / "checkpoint-2" / name).unlink()
    (folder / "checkpoint-2" / "optimizer_0").mkdir()
    assert last_checkpoint(folder, True, print) == folder / "checkpoint-2"


@pytest.mark.parametrize(
    ("epochs", "state", "finished"),
    [
        (2, {"epoch": 2.0, "global_step": 6, "max_steps": 9}, True),
        (3, {"epoch": 2.0, "global_step": 6, "max_steps": 6}, False),
        (0.7, {"epoch": 0.8, "global_step": 2, "max_steps": 3}, False),
        (0.7, {"epoch": 1.0, "global_step": 3, "max_steps": 3}, True),
        # Fewer are asked for than the run that was stopped had.
        (1.6, {"epoch": 1.5, "global_step": 9, "max_steps": 12}, False),
        (1.5, {"epoch": 1.5, "global_step": 9, "max_steps": 12}, True),
        (0.5, {"epoch": 1.5, "global_step": 9, "max_steps": 12}, True),
        # 22 micro-batches, four a step.
        (1.2, {"epoch": 1 + 4 / 22, "global_step": 7, "max_steps": 12}, False),
        (1.1, {"epoch": 1 + 4 / 22, "global_step": 7, "max_steps": 12}, True),
    ],
)
def test_a_part_of_an_epoch_has_whole_steps(tmp_path, epochs, state, finished) -> None:
    asked = config(tmp_path, max_steps=-1, num_train_epochs=epochs)
    assert is_finished(TrainerState(**state), asked) == finished


@pytest.mark.parametrize("left", [None, "", '{"epoch": 0.4, "glo', "[1]"])
def test_a_checkpoint_that_a_stop_cut_short_is_passed_over(tmp_path, left) -> None:
    folder, said = made(tmp_path / "out", 2, 4, 10), []
    (folder / "checkpoint-old").mkdir()
    assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-10"
    assert not said
    state = folder / "checkpoint-10" / "trainer_state.json"
    state.unlink() if left is None else state.write_text(left)
    (folder / "checkpoint-4" / "optimizer.pt").unlink()
    assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-2"
    assert said == [
        f"going on from {folder}/checkpoint-2: checkpoint-10 has no whole trainer_state.json: a "
        "stop cut it short; checkpoint-4 has no optimizer state (save_only_model)"
    ]
    (folder / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* is whole \(checkpoint-10 has no who"
    ):
        last_checkpoint(folder, True, said.append)


def test_a_first_checkpoint_that_a_stop_cut_short_is_none(tmp_path) -> None:
    folder, said = made(tmp_path, 4), []
    (folder / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint to go on from$"):
        last_checkpoint(folder, True, said.append)
    assert left_in(folder) == ["checkpoint-4"], "somebody else's"
    (folder / OWN_FOLDER).mkdir()
    (folder / OWN_FOLDER / "settings.json").touch()
    with pytest.raises(ValueError, match="without --resume the same command begins anew"):
        last_checkpoint(folder, True, said.append)
    (folder / OWN_FOLDER / "answers.jsonl").touch()
    with pytest.raises(ValueError, match="goes on with what the model wrote"):
        last_checkpoint(folder, True, said.append)
    assert left_in(folder) == said == []
    assert last_checkpoint(folder, False, said.append) is None
    assert said == [f"{folder}/checkpoint-4 is of a run that ended while it was saved: deleted"]
    assert not (folder / "checkpoint-4").exists()


@pytest.mark.parametrize("fault", ["field", "permission"])
def test_checkpoints_that_can_not_be_read_are_not_deleted(tmp_path, monkeypatch, fault) -> None:
    """As by another version of transformers, whose state has other fields."""
    folder, said = made(tmp_path, 2, 4), []
    (folder / OWN_FOLDER).mkdir()
    (folder / OWN_FOLDER / "settings.json").write_text("{}")
    if fault == "permission":
        monkeypatch.setattr(TrainerState, "load_from_json", lambda path: os.listdir(f"{path}/no"))
    for step in (2, 4) if fault == "field" else ():
        state = folder / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"new": 1}))
    with pytest.raises(ValueError, match="that this version of transformers reads"):
        last_checkpoint(folder, True, said.append)
    with pytest.raises(ValueError, match=r"holds an earlier run \(checkpoint-4\): go on"):
        last_checkpoint(folder, False, said.append)
    assert len(list(folder.glob("checkpoint-*"))) == 2
    assert not said


def test_a_link_to_a_checkpoint_that_was_cut_short_is_taken_away(tmp_path) -> None:
    elsewhere = made(tmp_path / "elsewhere", 4) / "checkpoint-4"
    (elsewhere / "trainer_state.json").unlink()
    (tmp_path / "run" / OWN_FOLDER).mkdir(parents=True)
    (tmp_path / "run" / OWN_FOLDER / "settings.json").write_text("{}")
    (tmp_path / "run" / "checkpoint-4").symlink_to(elsewhere)
    assert last_checkpoint(tmp_path / "run", False, print) is None
    assert not (tmp_path / "run" / "checkpoint-4").is_symlink()
    assert elsewhere.is_dir()


def test_each_rank_has_a_state_of_its_own(tmp_path, monkeypatch) -> None:
    folder, said = made(tmp_path, 2, 4), []
    for step in (2, 4):
        one = folder / f"checkpoint-{step}" / "rng_state.pth"
        for rank in (0, 1):
            shutil.copy(one, one.with_name(f"rng_state_{rank}.pth"))
        one.unlink()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-4"
    (folder / "checkpoint-4" / "rng_state_1.pth").unlink()
    assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-2"
    assert said[0].endswith("checkpoint-4 has no rng_state_1.pth")
    # As many as the run had: that there are others now is said of its settings.
    (folder / OWN_FOLDER).mkdir()
    (folder / OWN_FOLDER / "settings.json").write_text('{"processes": 2}')
    for now in ("1", "4"):
        monkeypatch.setenv("WORLD_SIZE", now)
        assert last_checkpoint(folder, True, said.append) == folder / "checkpoint-2"


def test_a_new_run_mixes_with_no_other(tmp_path) -> None:
    assert last_checkpoint(tmp_path / "none", False, print) is None
    with pytest.raises(ValueError, match=r"holds an earlier run \(.*checkpoint-3\): go on with"):
        last_checkpoint(made(tmp_path, 3), False, print)
    (tmp_path / "died").mkdir()
    (tmp_path / "died" / "log.jsonl").touch()  # before its first checkpoint
    assert last_checkpoint(tmp_path / "died", False, print) is None
    with pytest.raises(ValueError, match="without --resume the same command begins anew"):
        last_checkpoint(tmp_path / "died", True, print)
    (tmp_path / "died" / "model.safetensors").touch()  # a run without checkpoints, at its end
    with pytest.raises(ValueError, match=r"no checkpoint to go on from$"):
        last_checkpoint(tmp_path / "died", True, print)
    with pytest.raises(ValueError, match=r"\(model.safetensors\): choose another output folder$"):
        last_checkpoint(tmp_path / "died", False, print)


def test_data_may_lie_elsewhere(tmp_path) -> None:
    """Where what its rows say is compared."""
    file = tmp_path / "settings.json"
    old = {"data": ["rows.jsonl"], "rows": "abc", "seed": 1}
    file.write_text(json.dumps(old))
    new = {**old, "data": ["elsewhere/rows.jsonl"]}
    assert check_settings(file, new) == new
    with pytest.raises(ValueError, match="other settings than the run to go on with: rows was"):
        check_settings(file, {**new, "rows": "def"})
    del old["rows"]
    file.write_text(json.dumps(old))
    with pytest.raises(ValueError, match="data was"):
        check_settings(file, new)


def test_settings_of_an_earlier_version_lack_what_is_new(tmp_path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"seed": 42, "gone": 1}')
    check_settings(file, {"seed": 42, "rows": "4 rows"})
    with pytest.raises(ValueError, match=r"run to go on with: seed was 42, now 7$"):
        check_settings(file, {"seed": 7, "rows": "4 rows"})
    file.write_text("")
    with pytest.raises(ValueError, match=r"settings\.json is not whole"):
        check_settings(file, {})
    file.unlink()
    with pytest.raises(ValueError, match=r"settings\.json is gone"):
        check_settings(file, {})


LINES = [
    {"step": 0, "decode_n": 3},
    {"step": 1, "loss": 2.5},
    {"step": 2, "loss": 1.5},
    {"step": 2, "train_runtime": 9.0},
    {"step": 3, "loss": 0.5},
]


@pytest.mark.parametrize("end", ["", "\n", '{"step": 4, "lo', '{"step": 4, "lo\n'])
def test_the_log_up_to_where_a_run_goes_on(tmp_path, end) -> None:
    log, state = tmp_path / "log.jsonl", TrainerState(global_step=2)
    assert kept_lines(log, state, False) == []
    log.write_text("\n".join(map(json.dumps, LINES)) + "\n" + end)
    assert kept_lines(log, state, finished=False) == LINES[:3]
    assert kept_lines(log, state, finished=True) == LINES[:4]
    write_lines(log, LINES[:3])
    assert [json.loads(line) for line in log.read_text().splitlines()] == LINES[:3]
    assert list(tmp_path.iterdir()) == [log]


@pytest.mark.parametrize("line", ['{"step": 1', "", "7", '{"loss": 1.0}', '{"step": null}'])
def test_a_broken_line_in_the_middle_of_the_log_is_named(tmp_path, line) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: not a line of a training log .*: take it"):
        kept_lines(log, TrainerState(global_step=2), finished=False)
