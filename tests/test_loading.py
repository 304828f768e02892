"""From a name to a model: folders, settings, GGUF files, and what is refused."""

import json
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
import transformers
from conftest import copied, make_tokenizer
from networks import load

from setblock import loading
from setblock.checkpoint import fingerprint
from setblock.loading import fingerprint_of
from setblock.masks import causal_layout
from setblock.names import ModelError


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


def test_a_checkpoint_whose_weights_have_other_shapes(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": 24}))
    message = r"has 6 weights of other shapes than its config\.json says, among them 'model\.layers"
    with pytest.raises(ModelError, match=message):
        load(folder)


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
