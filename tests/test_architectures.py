"""Families of networks that decode: a small one of each, with random weights, against the laws."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_tokenizer
from families import WHAT_PEFT_SAYS, known, made, small
from layouts import decoding_layout
from networks import load
from safetensors.torch import load_file, save_file

from setblock import adapters, architectures, generate, model, packed, trial
from setblock.architectures import TESTED, WITH_TEXT
from setblock.checkpoint import write_settings
from setblock.masks import CLEAN, PADDING, Layout
from setblock.model import Model
from setblock.names import ModelError

pytestmark = WHAT_PEFT_SAYS

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]]
WAYS: list[dict[str, Any]] = [
    {"branches": 2, "seeds": 1, "lookup": 3},
    {"draft": "solver", "solver": "fixed:2"},
]


@pytest.fixture(scope="module", params=known(TESTED))
def random_model(request, tmp_path_factory) -> Model:
    return made(request.param, tmp_path_factory.mktemp(request.param))


def ids_of(model: Model, prompts: list[list[int]], **options: Any) -> list[tuple[int, ...]]:
    common: dict[str, Any] = {"max_new_tokens": 14, "ignore_eos": True, **options}
    return [one.token_ids for one in generate(model, prompts, **common)]


def test_every_family_decodes_by_the_laws(random_model) -> None:
    """Next tokens are transformers' own; verified text is theirs; no row depends on another."""
    # With transformers' own attention that leaves nothing out.
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(random_model.name), attn_implementation="eager"
    )
    texts = ids_of(random_model, PROMPTS, mode="ntp")
    assert len(set(texts[0])) > 1
    for prompt, text in zip(PROMPTS, texts, strict=True):
        own = network.generate(
            torch.tensor([prompt]),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=[random_model.mask_token_id],
        )
        assert list(text) == own[0, len(prompt) :].tolist()
    for way in WAYS:
        assert ids_of(random_model, PROMPTS, mode="verified", block_size=4, **way) == texts
    blocks: dict[str, Any] = {"mode": "sbd", "solver": "fixed:2", "block_size": 4}
    together = ids_of(random_model, PROMPTS, **blocks)
    assert [ids_of(random_model, [prompt], **blocks)[0] for prompt in PROMPTS] == together


def test_every_family_runs_in_weights_laid_out_anew(random_model, monkeypatch) -> None:
    """All of its layers, as in 16 bits, but where the tokens are the same."""
    if packed.missing(torch.device("cpu"), torch.float32):
        pytest.skip("not on this processor")
    monkeypatch.setattr(packed, "SMALLEST", dict.fromkeys(packed.SMALLEST, 0))
    model = load(str(random_model.name), pack=True)
    assert any(isinstance(layer, packed.PackedLinear) for layer in model.network.modules())
    texts = ids_of(random_model, PROMPTS, mode="ntp")
    assert ids_of(model, PROMPTS, mode="verified", block_size=4) == texts


def test_every_family_says_the_same_without_padding(random_model, monkeypatch) -> None:
    """Rows of different lengths in one line, but where a class calls torch's attention itself."""
    end = torch.tensor([7, 3])
    layout = decoding_layout(torch.arange(11).repeat(2, 1), end, end + 4)
    tokens = torch.where(layout.block == CLEAN, torch.arange(11) + 5, random_model.mask_token_id)
    real = layout.document != PADDING
    shapes, run = [], random_model._run

    def heard(tokens: torch.Tensor, *words: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(tokens.shape))
        return run(tokens, *words)

    monkeypatch.setattr(Model, "_run", staticmethod(heard))
    found = []
    for line_of in (model.line_of, lambda layout: None):
        monkeypatch.setattr(model, "line_of", line_of)
        found.append(random_model.forward(tokens, layout, random_model.new_cache(2, 20))[real])
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    whole = [(2, 11)] if random_model.network.config.model_type == "falcon" else [(1, 18)]
    assert shapes == [*whole, (2, 11)]


def test_every_family_passes_the_trial_of_the_others(random_model, monkeypatch) -> None:
    monkeypatch.setattr(trial, "TESTED", ())
    trial.try_out(random_model)
    trial.check_head(random_model, chain=not adapters.no_chain(random_model.network.config))


@pytest.mark.parametrize(("family", "chain"), [("granite", False), ("minicpm3", True)])
def test_logits_that_the_output_layer_does_not_make_are_no_training(
    tmp_path, monkeypatch, family, chain
) -> None:
    """As if it was not known what theirs do to them."""
    model = made(family, tmp_path)
    trial.check_head(model, chain)
    monkeypatch.setattr(trial, "TESTED", ())
    monkeypatch.setattr(trial, "after_head", lambda config: lambda logits: logits)
    message = "can't be trained: its logits are not " + ("as a chain" if chain else "its output")
    with pytest.raises(ModelError, match=f"^{family}, which the tests do not know, {message}"):
        trial.check_head(model, chain)


def test_a_setting_that_a_network_does_not_know_is_no_training(tmp_path) -> None:
    """Another family's: a step's scores would be scaled, and the network's logits are not."""
    model = made("llama", tmp_path)
    trial.check_head(model)
    model.network.config.logit_scale = 0.0625
    with pytest.raises(ModelError, match=r"^llama can't be trained: its logits are not its output"):
        trial.check_head(model)


def test_logits_that_a_network_goes_on_changing_are_no_training(tmp_path, monkeypatch) -> None:
    """As if it kept the number somewhere else: a step's scores would be changed."""
    model = made("granite", tmp_path)
    monkeypatch.setattr(trial, "TESTED", ())
    trial.check_head(model)
    monkeypatch.setattr(trial, "left_alone", lambda network: nullcontext())
    with pytest.raises(ModelError, match="can't be trained: its logits are not its output layer's"):
        trial.check_head(model)


def save_gated_adapter(model: Model, folder: Path) -> None:
    """One with random weights."""
    base = str(model.name)
    network: Any = load(base, pack=False).network
    mask, width = model.mask_token_id, 0 if adapters.no_chain(network.config) else 8
    adapted = adapters.attach(network, base, "gated", mask, rank=4, alpha=8, chain_width=width)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(str(folder))
    write_settings(folder, mask_token_id=mask, chain_width=width or None, trained=True)


def test_every_family_takes_a_gated_adapter(random_model, tmp_path, monkeypatch) -> None:
    """Whatever it drafts, the text is the base's."""
    save_gated_adapter(random_model, tmp_path)
    monkeypatch.setattr(trial, "TESTED", ())
    model = load(tmp_path)
    texts = ids_of(random_model, PROMPTS, mode="ntp")
    assert ids_of(model, PROMPTS, mode="ntp") == texts
    for way in WAYS:
        assert ids_of(model, PROMPTS, mode="verified", block_size=4, **way) == texts


def test_a_gate_on_what_reads_the_cache_is_refused(tmp_path, monkeypatch) -> None:
    """Of adapters that attach() does not make."""
    model = made("deepseek_v3", tmp_path / "base")
    monkeypatch.setattr(adapters, "OF_CACHE", "")
    save_gated_adapter(model, tmp_path / "adapter")
    with pytest.raises(ModelError, match="a gated adapter can't act on kv_b_proj, which reads the"):
        load(tmp_path / "adapter")


def test_the_page_lists_the_families() -> None:
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    listed = page.partition("### Which models run")[2].partition("\n- ")[0]
    assert f"{len(TESTED)} of them" in listed
    assert re.findall(r"`(\w+)`", listed.partition("of single blocks predict.")[2]) == list(TESTED)
    parts = page.partition("- Of **multimodal** models")[2].partition(". With small")[0]
    assert re.findall(r"`(\w+)`", parts) == list(WITH_TEXT)


@pytest.mark.parametrize("family", known(("gemma3n_text", "moshi", "dory")))
def test_windows_that_nobody_tested_are_refused(family) -> None:
    config = transformers.CONFIG_MAPPING[family]()
    with pytest.raises(ModelError, match=f"^{family} has sliding windows, and nobody has tested"):
        architectures.check_architecture(config)


def _everything(queries: Layout, keys: Layout) -> torch.Tensor:
    return torch.ones(1, 1, queries.position.shape[1], keys.position.shape[1], dtype=torch.bool)


def _in_place(queries: Layout, keys: Layout) -> torch.Tensor:
    """By place in the row: a block sees itself and the whole text."""
    blocks = (queries.block != CLEAN)[:, None, :, None] & (keys.block != CLEAN)[:, None, None, :]
    return _everything(queries, keys).tril() | blocks


def _itself(queries: Layout, keys: Layout) -> torch.Tensor:
    """Blocks see nothing but each token itself."""
    noisy = (queries.block != CLEAN)[:, None, :, None]
    return torch.where(noisy, torch.eye(noisy.shape[2], dtype=torch.bool), _in_place(queries, keys))


def _one_by_one(queries: Layout, keys: Layout) -> torch.Tensor:
    """A block's slots see the text before it and themselves."""
    noisy = (queries.block != CLEAN)[:, None, :, None] & (keys.block != CLEAN)[:, None, None, :]
    other = ~torch.eye(noisy.shape[2], dtype=torch.bool)
    return architectures.visible(queries, keys) & ~(noisy & other)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (_everything, "next tokens are other ones than the network's own"),
        (_itself, "a block does not see the text before it"),
        (_one_by_one, "a block's slots do not see each other"),
        (_in_place, "a block sees the tokens that it is to predict"),
    ],
)
def test_a_network_that_misreads_masks_is_refused(checkpoint, monkeypatch, rule, message) -> None:
    """Its masks stand for what it makes of ours."""
    monkeypatch.setattr(trial, "TESTED", ())

    def misread(network: Any, queries: Layout, keys: Layout, windows: Any) -> torch.Tensor:
        return rule(queries, keys)

    monkeypatch.setattr(model, "attention_mask", misread)
    with pytest.raises(ModelError, match=f"^llama, which the tests do not know, .*: {message}$"):
        load(checkpoint())


def test_a_network_that_misreads_its_cache_is_refused(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(trial, "TESTED", ())

    def blind(network: Any, queries: Layout, cache: Any, windows: Any) -> torch.Tensor:
        mask = masks(network, queries, cache, windows)
        mask[..., 0] = False
        return mask

    masks = architectures.decoding_mask
    monkeypatch.setattr(model, "decoding_mask", blind)
    with pytest.raises(ModelError, match=r"behind a cache are other ones than without$"):
        load(checkpoint())


def test_a_network_that_fails_is_refused(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(trial, "TESTED", ())

    def fails(*given: Any) -> torch.Tensor:
        raise KeyError("full_attention")

    monkeypatch.setattr(model, "attention_mask", fails)
    with pytest.raises(ModelError, match=r"its forwards fail with them: 'full_attention'$"):
        load(checkpoint())


def test_16_bits_pass_the_trial(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(trial, "TESTED", ())
    for kind in ("llama", "mixtral", "qwen3-window"):
        for dtype in ("bfloat16", "float16"):
            load(checkpoint(kind), dtype=dtype)
    load("nano", dtype="bfloat16")


def test_few_words_are_enough(checkpoint, monkeypatch) -> None:
    """A vocabulary of fewer tokens than the trial's text."""
    monkeypatch.setattr(trial, "TESTED", ())
    tried = load(checkpoint())
    tried.vocab_size = 7
    text = trial._text(tried)
    assert text.shape == (2, 12)
    assert (text[:, 1:] != text[:, :-1]).all()
    trial.try_out(tried)


def test_experts_stored_in_four_bits_are_unpacked(tmp_path) -> None:
    """As GPT-OSS comes from the hub; without kernels for such numbers, as on most CPUs."""
    config: Any = small("gpt_oss")
    config.intermediate_size = config.hidden_size = 64
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(tmp_path)
    make_tokenizer(mask_token="<mask>").save_pretrained(tmp_path)
    stored = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = experts, outputs, inputs // 32  # a scale for 32 numbers, two of them in a byte
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(124, 127, shape, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    model = load(tmp_path, pack=False)
    assert {weight.dtype for weight in model.network.parameters()} == {torch.float32}
    texts = ids_of(model, PROMPTS, mode="ntp")
    assert len(set(texts[0])) > 1
    assert ids_of(model, PROMPTS, mode="verified", block_size=4, branches=2) == texts
    model.network.save_pretrained(tmp_path / "unpacked")
    model.tokenizer.save_pretrained(tmp_path / "unpacked")
    assert ids_of(load(tmp_path / "unpacked"), PROMPTS, mode="ntp") == texts


def test_a_network_in_memory_is_no_name(checkpoint):
    network = load(checkpoint()).network
    with pytest.raises(ModelError, match="must be a text or a path, got a LlamaForCausalLM: of a"):
        load(network)  # type: ignore[arg-type]
