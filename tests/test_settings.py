"""Settings in a checkpoint's folder: their defaults, how they are written, what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from networks import load, token_id

from setblock.checkpoint import read_settings, write_settings
from setblock.names import ModelError


def test_settings_survive_a_file_that_transformers_reads_without_them(checkpoint):
    settings = {"mask_token_id": 7, "trained": True, "block_size": 8, "solver": "fixed:2"}
    folder = checkpoint(settings=settings)
    file = json.loads((folder / "generation_config.json").read_text())
    assert file["_from_model_config"] is True
    # transformers drops the unknown key of such a file, so we read the file ourselves.
    stock = transformers.GenerationConfig.from_pretrained(folder)
    assert "setblock" not in stock.to_dict()
    model = load(folder)
    assert model.trained
    assert model.defaults == {"mode": "sbd", "solver": "fixed:2", "block_size": 8}


def test_transformers_keeps_settings_without_the_flag(checkpoint, tmp_path):
    settings = {"mask_token_id": 7}
    folder = shutil.copytree(checkpoint(settings=settings), tmp_path / "copy")
    file = folder / "generation_config.json"
    entries = json.loads(file.read_text())
    del entries["_from_model_config"]
    file.write_text(json.dumps(entries))
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    network.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert saved["setblock"] == settings
    assert load(folder).mask_token_id == 7


def test_defaults_without_settings(checkpoint):
    model = load(checkpoint())
    assert not model.trained
    assert model.defaults == {"mode": "ntp", "solver": "entropy:0.1", "block_size": 16}
    assert load(checkpoint(settings={"trained": True})).defaults["mode"] == "sbd"
    assert load(checkpoint(settings={"mode": "verified"})).defaults["mode"] == "verified"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"blocksize": 8},
            "'blocksize' is not one of acceptance, block_size, .*trained, verified",
        ),
        ({"block_size": 0}, "block_size must be int in 1..1024, got 0"),
        ({"block_size": "8"}, "block_size must be int in 1..1024, got '8'"),
        ({"block_size": 2048}, "block_size must be int in 1..1024, got 2048"),
        ({"acceptance": 1.0}, "acceptance must be float between 0 and 1, got 1.0"),
        ({"acceptance": 1}, "acceptance must be float between 0 and 1, got 1"),
        (
            {"verified": 3},
            "verified must be dict of block_size and branches, at least 1, seeds",
        ),
        (
            {"verified": {"block_size": 3, "branches": 0, "seeds": 0}},
            "verified must be dict of",
        ),
        ({"verified": {"lookup": -1}}, "verified must be dict of block_size"),
        ({"verified": {"length": 1}}, "verified must be dict of block_size"),
        ({"trained": 1}, "trained must be bool, got 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(checkpoint, settings, message):
    with pytest.raises(ModelError, match=message):
        load(checkpoint(settings=settings))


def test_settings_are_written_whole_or_not_at_all(checkpoint, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoint(), tmp_path / "copy")
    write_settings(folder, block_size=4)
    before = (folder / "generation_config.json").read_text()

    def cut(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode()[:20])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="No space left"):
        write_settings(folder, block_size=8)
    assert (folder / "generation_config.json").read_text() == before


def test_settings_are_not_written_where_a_link_leads(checkpoint, tmp_path):
    """As into the hub's cache, where revisions share their files."""
    folder = shutil.copytree(checkpoint(), tmp_path / "copy")
    shared, file = tmp_path / "shared.json", folder / "generation_config.json"
    write_settings(folder, block_size=4)
    shutil.move(file, shared)
    file.symlink_to(shared)
    before = shared.read_text()
    write_settings(folder, block_size=8)
    assert shared.read_text() == before
    assert load(folder).defaults["block_size"] == 8


def test_settings_of_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_settings(tmp_path / "none", block_size=4)
    assert list(tmp_path.iterdir()) == []


def test_settings_written_to_a_checkpoint_are_found(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(), tmp_path / "copy")
    write_settings(folder, mask_token_id=7, trained=True)
    write_settings(folder, block_size=4, dtype="float16", device="cpu")
    model = load(folder, device=None)
    assert (model.mask_token_id, model.trained, model.defaults["block_size"]) == (7, True, 4)
    assert (model.dtype, model.device.type) == (torch.float16, "cpu")
    assert load(folder, dtype="float32").dtype == torch.float32
    assert load(folder).eos_token_ids == {token_id("</s>")}  # the file's other keys stay
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    network.save_pretrained(tmp_path / "again")  # by transformers, which knows nothing of them
    assert read_settings(str(tmp_path / "again"))["trained"]
    with pytest.raises(ModelError, match="'blocksize' is not one of"):
        write_settings(folder, blocksize=4)
    with pytest.raises(ModelError, match=r"mask_token_id must be int of at least 0, got -1"):
        write_settings(folder, mask_token_id=-1)
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        {"generation_config.json", *(file.name for file in checkpoint().iterdir())}
    )
    write_settings(folder, device="abacus")
    with pytest.raises(ModelError, match="device 'abacus' can't be used"):
        load(folder, device=None)


def test_settings_that_are_no_json(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json of .* is no JSON: Expecting"):
        read_settings(str(tmp_path))
