"""Multimodal models, of which the part that reads and writes text runs alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_tokenizer
from datasets import Dataset
from families import WHAT_PEFT_SAYS, small
from networks import load
from safetensors.torch import load_file, save_file
from test_architectures import PROMPTS, ids_of, save_gated_adapter
from trainers import config as training
from trainers import samples, tokenizer
from typer.testing import CliRunner

from setblock.architectures import WITH_TEXT
from setblock.cli import app
from setblock.names import ModelError
from setblock.train import SBDTrainer

pytestmark = WHAT_PEFT_SAYS

# Of what looks at pictures, under whatever name its configuration knows it by.
VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim"), 8),
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
}

QUANTIZED: Any = {"quantization_config": {"quant_method": "fp8"}}


def whole(kind: str, folder: Path, tied: bool = False) -> Any:
    """A small multimodal network of this kind with random weights, also in that folder."""
    config: Any = transformers.CONFIG_MAPPING[kind]
    usual = config()
    parts: dict[str, Any] = {"text_config": small(usual.get_text_config().model_type).to_dict()}
    if vision := getattr(usual, "vision_config", None):
        known = {*vision.to_dict(), "global_head_dim"}
        own = {name: value for name, value in VISION.items() if name in known}
        parts["vision_config"] = {"model_type": vision.model_type, **own}
    if kind == "gemma3":
        parts["mm_tokens_per_image"] = 4
    torch.manual_seed(0)
    network: Any = transformers.AutoModelForImageTextToText.from_config(
        config(**parts, tie_word_embeddings=tied)
    )
    for weight in network.parameters():
        if weight.dim() > 1 and weight.std() < 0.1:
            torch.nn.init.normal_(weight, std=0.2)
    network.eval().save_pretrained(folder)
    make_tokenizer(mask_token="<mask>").save_pretrained(folder)
    return network


def own_texts(network: Any, mask_token_id: int) -> list[tuple[int, ...]]:
    """What transformers generates with all of the network."""
    given: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    given |= {"pad_token_id": 0, "suppress_tokens": [mask_token_id]}
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        said = network.generate(ids, attention_mask=torch.ones_like(ids), **given)
        texts.append(tuple(said[0, len(prompt) :].tolist()))
    return texts


@pytest.mark.parametrize("kind", WITH_TEXT)
def test_the_text_part_says_what_the_whole_says(tmp_path, kind, capfd) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("of a newer transformers")
    network = whole(kind, tmp_path)
    model = load(tmp_path)
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    texts = own_texts(network, model.mask_token_id)
    assert len(set(texts[0])) > 1
    assert ids_of(model, PROMPTS, mode="ntp") == texts
    assert ids_of(model, PROMPTS, mode="verified", block_size=4, branches=2) == texts
    assert not any("vision" in name for name, _ in model.network.named_parameters())


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_of_weights_in_both_orders(tmp_path, kind, tied) -> None:
    """As on the hub, and as transformers would have them in a network of today."""
    network = whole(kind, tmp_path, tied)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert any(name.startswith("language_model.model.layers.") for name in weights)
    before = load(tmp_path)
    texts = ids_of(before, PROMPTS, mode="ntp")
    assert texts == own_texts(network, before.mask_token_id)
    assert before.network.config.tie_word_embeddings == tied
    renamed = {}
    for name, weight in weights.items():
        name = name.replace("language_model.model.", "model.language_model.")
        renamed[name.replace("language_model.lm_head.", "lm_head.")] = weight
    save_file(renamed, file, metadata={"format": "pt"})
    assert ids_of(load(tmp_path), PROMPTS, mode="ntp") == texts


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "llava"])
def test_an_output_layer_that_no_setting_speaks_of(tmp_path, kind) -> None:
    """Where the class would have none of its own, as Mistral Small 3's."""
    network = whole(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, pack=False)
    texts = own_texts(network, model.mask_token_id)
    assert ids_of(model, PROMPTS, mode="ntp") == texts
    model.network.save_pretrained(tmp_path / "alone")
    model.tokenizer.save_pretrained(tmp_path / "alone")
    assert ids_of(load(tmp_path / "alone"), PROMPTS, mode="ntp") == texts


def test_a_trainer_asks_for_the_text_part(tmp_path) -> None:
    whole("gemma3", tmp_path)
    rows = Dataset.from_list(samples())
    given: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer()}
    with pytest.raises(ValueError, match=r"^model is a multimodal gemma3: train its text part"):
        SBDTrainer(str(tmp_path), training(tmp_path / "run"), **given)
    network = load(tmp_path, pack=False).network
    SBDTrainer(network, training(tmp_path / "run", max_steps=1), **given).train()


def test_a_gated_adapter_on_a_text_part(tmp_path) -> None:
    whole("gemma3", tmp_path / "base")
    base = load(tmp_path / "base")
    save_gated_adapter(base, tmp_path / "adapter")
    texts = ids_of(base, PROMPTS, mode="ntp")
    model = load(tmp_path / "adapter")
    assert ids_of(model, PROMPTS, mode="verified", block_size=4) == texts


def test_a_text_part_is_saved_alone(tmp_path) -> None:
    whole("gemma3", tmp_path / "base")
    base = load(tmp_path / "base", pack=False)
    texts = ids_of(base, PROMPTS, mode="ntp")
    base.network.save_pretrained(tmp_path / "alone")
    base.tokenizer.save_pretrained(tmp_path / "alone")
    assert ids_of(load(tmp_path / "alone"), PROMPTS, mode="ntp") == texts


def test_info_and_arithmetic_know_the_text_part(tmp_path) -> None:
    whole("gemma4", tmp_path)
    for command in ("info", "plan"):
        told = CliRunner().invoke(app, [command, str(tmp_path)])
        assert told.exit_code == 0, told.output


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.PaliGemmaConfig(), "paligemma is multimodal; of such models only the text"),
        (
            transformers.LlavaConfig(**QUANTIZED),
            "llava is multimodal and quantized",
        ),
        (
            transformers.LlavaConfig(text_config={"model_type": "llama", **QUANTIZED}),
            "llava is multimodal and quantized",
        ),
        (
            transformers.LlavaConfig(text_config={"model_type": "mamba"}),
            "^mamba has no attention that takes a mask",
        ),
    ],
)
def test_what_can_not_stand_alone_is_refused(tmp_path, config, message) -> None:
    config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)
