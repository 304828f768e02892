"""Gated adapters: noisy tokens alone feel them, in training and in decoding."""

import copy
import json
import math
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gated_adapter
from layouts import decoding_layout
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trainers import MASK, SIZES, config, network, samples, tokenizer
from trainers import trainer as plain_trainer
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MixtralConfig,
    Qwen2MoeConfig,
)

from setblock import adapters, gated, objective
from setblock.generation import generate
from setblock.loading import load
from setblock.masks import CLEAN, causal_layout
from setblock.names import ModelError
from setblock.train import SBDTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


OTHER: dict[str, dict[str, Any]] = {  # adapters that attach() does not make
    "two rows": {"trainable_token_indices": {"embed_tokens": [MASK, 7]}},
    "no row": {},
    "biases": {"trainable_token_indices": {"embed_tokens": [MASK]}, "lora_bias": True},
}


def base(shape="llama"):
    """Networks as in trainers.network(), and one whose input embeddings are scaled."""
    if shape != "gemma3":
        return network(shape)
    torch.manual_seed(0)
    windows: Any = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    sizes = {**SIZES, "num_hidden_layers": 2, "query_pre_attn_scalar": 8, "head_dim": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **windows))


def adapted(method="gated", seed=1, shape="llama"):
    """A network with an adapter that does something: random, not zero."""
    if shape in OTHER:
        settings: Any = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **OTHER[shape]}
        settings |= {"task_type": "CAUSAL_LM", "alora_invocation_tokens": [MASK]}
        made: Any = get_peft_model(network(), LoraConfig(**settings))
    else:
        made = adapters.attach(base(shape), "base", method, MASK, rank=4, alpha=8)
    assert adapters.has_halves(made) == (method == "gated" and shape not in OTHER)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return made


def gated_trainer(folder, net, **changes):
    from datasets import Dataset

    return SBDTrainer(
        net,
        config(folder, **changes),
        train_dataset=Dataset.from_list(samples()),
        processing_class=tokenizer(),
    )


def gradients(run, batches):
    run.model.zero_grad()
    run.model.train()
    for batch in batches:
        run.compute_loss(run.model, batch).backward()
    return {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}


def batches(run):
    return run.get_batch_samples(iter(run.get_train_dataloader()), 2, torch.device("cpu"))[0]


@pytest.mark.parametrize(
    ("shape", "distill"),
    [("llama", 0.0), ("llama", 0.5), *((shape, 0.0) for shape in ("smollm2", "gemma3", *OTHER))],
)
def test_clean_half_without_gradient_is_the_same_step(tmp_path, monkeypatch, shape, distill):
    """Two forwards, of layers of our own, against one of peft's."""
    net: Any = adapted(shape=shape)
    short = gated_trainer(tmp_path, net, self_distill=distill)
    step = batches(short)
    forwards_before = [vars(module).get("forward") for module in net.modules()]
    losses, seen = [], []
    for two_passes in (True, False):
        if not two_passes:  # what a network that recomputes its activations does
            monkeypatch.setattr(net.base_model.model.model, "gradient_checkpointing", True)
        forwards = []
        hook = net.base_model.model.register_forward_pre_hook(
            lambda module, args, kwargs, forwards=forwards: forwards.append(
                kwargs["input_ids"].shape[1]
            ),
            with_kwargs=True,
        )
        found = gradients(short, copy.deepcopy(step))
        hook.remove()
        losses.append(found)
        seen.append(len(forwards))
    assert seen == ([2, 2] if distill else [4, 2])
    assert losses[0].keys() == losses[1].keys()
    assert any("lora_A" in name for name in losses[0])
    assert any("trainable_tokens_delta" in name for name in losses[0]) == (shape != "no row")
    assert [vars(module).get("forward") for module in net.modules()] == forwards_before
    for name, gradient in losses[0].items():
        assert torch.allclose(gradient, losses[1][name], atol=1e-5), name


@pytest.mark.parametrize("shape", ["llama", "no row"])
def test_peft_searches_no_row_for_its_noisy_tokens(tmp_path, monkeypatch, shape):
    """Each search would wait for the device."""
    run = gated_trainer(tmp_path, adapted(shape=shape))
    step = batches(run)
    monkeypatch.setattr("peft.tuners.lora.variants.calculate_alora_offsets", None)
    assert gradients(run, step)


def test_gated_training_moves_the_adapter_alone(tmp_path):
    net = adapted()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = gated_trainer(tmp_path, net, optim="adamw_torch", weight_decay=0.1)
    run.train()
    moved = {
        name for name, value in net.state_dict().items() if not torch.equal(value, before[name])
    }
    assert moved
    assert all("lora" in name or "embed_tokens.token_adapter" in name for name in moved), moved
    assert "ntp_loss" not in run.state.log_history[0]
    assert "matp_loss" in run.state.log_history[0]


def test_lora_and_gated_differ_on_clean_tokens():
    ids = torch.tensor([[5, 6, 7, MASK, MASK]])
    layout = decoding_layout(torch.arange(5)[None], torch.tensor([3]), torch.tensor([5]))
    plain = network()(input_ids=ids, position_ids=layout.position).logits
    from setblock.architectures import attention_mask

    for method in ("lora", "gated"):
        net = adapted(method)
        mask = attention_mask(net, layout, layout)
        inputs = {"input_ids": ids, "position_ids": layout.position, "attention_mask": mask}
        with torch.no_grad():
            logits = net(**inputs, **adapters.told(net, layout)).logits
        assert torch.equal(logits[:, :3], plain[:, :3]) == (method == "gated")
        assert not torch.allclose(logits[:, 3:], plain[:, 3:], atol=1e-2)


def test_gate_is_each_rows_noisy_tokens():
    net = adapted()
    position = torch.arange(6).expand(3, 6)
    layout = decoding_layout(position, torch.tensor([2, 4, 6]), torch.tensor([5, 6, 6]))
    noisy = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1], [0] * 6], dtype=torch.bool)
    [(name, told)] = adapters.told(net, layout).items()
    assert name == "alora_offsets"
    assert torch.equal(told, noisy)
    assert not adapters.told(net, causal_layout(position))[name].any()
    assert adapters.told(adapted("lora"), layout) == {}
    assert adapters.told(network(), layout) == {}


@pytest.mark.parametrize("shape", ["llama", "smollm2", "gemma3"])
def test_what_decodes_computes_what_was_trained(tmp_path, shape):
    """Layers of our own against peft's: rows of which some, all and no tokens are noisy."""
    from setblock.architectures import attention_mask

    net: Any = adapted(shape=shape).eval()
    net.save_pretrained(tmp_path)
    ours = gated.put_on(base(shape).eval(), tmp_path, MASK)
    assert adapters.is_gated(ours)
    assert not any("lora" in type(module).__module__ for module in ours.modules() if module)
    position = torch.arange(6).expand(3, 6)
    layout = decoding_layout(position, torch.tensor([2, 0, 6]), torch.tensor([6, 6, 6]))
    noisy = layout.block != CLEAN
    ids = torch.where(noisy, MASK, torch.arange(5, 11))
    inputs = {"input_ids": ids, "position_ids": layout.position}
    inputs["attention_mask"] = attention_mask(base(shape), layout, layout)
    with torch.no_grad():
        plain = base(shape).eval()(**inputs).logits
        theirs = net(**inputs, **adapters.told(net, layout)).logits
        with gated.opened(ours, layout, layout) as told:
            found = ours(**inputs, **told).logits
        assert torch.equal(ours(**inputs).logits[2], plain[2]), "the gate is shut again"
        one = layout.map(lambda part: part[:1])
        mask = attention_mask(base(shape), one, one)
        with gated.opened(ours, one, one):  # told of its noisy tokens alone
            alone = ours(input_ids=ids[:1], position_ids=position[:1], attention_mask=mask).logits
        assert torch.allclose(alone, theirs[:1], atol=1e-5)
    assert torch.equal(found[~noisy], plain[~noisy])
    assert torch.allclose(found, theirs, atol=1e-5)
    assert not torch.allclose(found[noisy], plain[noisy], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_clean_token_would_add_does_not_matter(dtype):
    """Not even where it is no number; dtype: of a base whose weights have another."""
    net: Any = adapted()
    layer = net.base_model.model.model.layers[0].self_attn.q_proj
    hidden = torch.randn(1, 3, layer.in_features)
    hidden[0, 0, 0] = torch.inf
    noisy = torch.tensor([[[False], [True], [True]]])
    said = torch.randn(1, 3, layer.out_features).to(dtype)
    result = said.clone()
    assert gated.Addition(layer, "default")(result, hidden, gated.Gate(noisy)) is result
    assert torch.equal(result[0, 0], said[0, 0])
    assert result[0, 1:].isfinite().all()
    expected = said + layer.lora_B["default"](layer.lora_A["default"](hidden)) * 2
    assert (expected - said)[0, 1:].abs().min() > 0
    close: Any = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(result[0, 1:], expected[0, 1:].to(dtype), **close)


def test_layers_that_read_the_same_share_a_product(checkpoint, tmp_path, monkeypatch):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path)
    network: Any = load(tmp_path).network
    attention, mlp = network.model.layers[0].self_attn, network.model.layers[0].mlp
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    shared = layers[0].addition.down
    assert all(layer.addition.down is shared for layer in layers)
    assert mlp.gate_proj.addition.down is mlp.up_proj.addition.down
    assert shared.weight.shape[1] == 3 * attention.o_proj.addition.down.weight.shape[1]

    def products(order: list[int], same: bool) -> list[torch.Tensor]:
        """What these layers say of equal tokens; `same`: of one tensor rather than of copies."""
        network.setblock_gate.noisy = torch.ones(1, 2, 1, dtype=torch.bool)
        made = {at: layers[at](hidden if same else hidden.clone()) for at in order}
        return [made[at] for at in sorted(made)]

    counted: list[tuple] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given: counted.append(given) or multiply(*given))
    hidden = torch.randn(1, 2, network.config.hidden_size)
    expected = products([0, 1, 2], same=True)
    assert (len(counted), layers[0].addition.product.kept) == (1, None)
    orders = [([2, 0, 1], True, 1), ([0, 1, 2], False, 3), ([1, 0, 1, 2], True, 2)]
    for order, same, count in orders:
        counted.clear()
        for one, other in zip(products(order, same), expected, strict=True):
            assert torch.equal(one, other)
        assert len(counted) == count


def test_biases_of_an_adapter_are_refused():
    net: Any = adapted()
    layer = net.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].bias = torch.nn.Parameter(torch.zeros(layer.out_features))
    with pytest.raises(ValueError, match="lora_bias must be false"):
        gated.Addition(layer, "default")


@pytest.mark.parametrize("shape", ["llama", "no row"])
def test_micro_batches_without_a_mask_cost_nothing_in_as_many_forwards(tmp_path, shape):
    """One in n + 1 rows of n labels has nothing masked; sharded ranks meet in every forward."""
    run = gated_trainer(tmp_path, adapted(shape=shape), per_device_train_batch_size=1)
    [batch] = batches(run)[:1]
    places = (batch["input_ids"], batch["labels"], batch["position_ids"], batch["document"])
    forwards, losses = [], []
    hook = run.model.register_forward_pre_hook(lambda *_: forwards.append(None))
    for masked in (torch.ones, torch.zeros):
        noise = masked(batch["input_ids"].shape, dtype=torch.bool)
        view = objective.noisy_view(*places, noise, 4, MASK)
        batch["view"] = objective.drop_idle_blocks(view).masked_only()
        run.model.zero_grad()
        loss = run.compute_loss(run.model, batch, num_items_in_batch=torch.tensor(7))
        loss.backward()
        losses.append(loss.item())
    hook.remove()
    assert len(forwards) == 2 * 2
    assert losses[0] > 0
    assert losses[1] == 0
    assert all(p.grad is None or not p.grad.any() for p in run.model.parameters())


def test_layers_that_fsdp_would_run_again_are_refused(tmp_path):
    """peft tells its layers where a row's noisy tokens begin during the forward pass alone."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net: Any = adapted()
    run = gated_trainer(tmp_path, net)
    layers = net.base_model.model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    with pytest.raises(ValueError, match="set fsdp_activation_checkpointing to false"):
        gradients(run, batches(run))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_writes_the_settings_of_an_adapter(tmp_path, monkeypatch, rank):
    """Two would take each other's file away; transformers calls this on every rank."""
    run = gated_trainer(tmp_path / "run", adapted())
    monkeypatch.setattr(type(run.args), "should_save", property(lambda args: rank == 0))
    run._save(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "generation_config.json").exists() == (rank == 0)


def test_lora_learns_as_eq_14_says(tmp_path):
    """The same losses as the whole network has before anything was learned."""
    whole = plain_trainer(tmp_path, max_steps=1)
    made = adapters.attach(network(), "base", "lora", MASK, rank=4, alpha=8)
    low_rank = gated_trainer(tmp_path, made, max_steps=1)
    for run in (whole, low_rank):
        run.train()
    for name in ("loss", "ntp_loss", "matp_loss"):
        assert low_rank.state.log_history[0][name] == pytest.approx(
            whole.state.log_history[0][name], abs=1e-5
        )


def test_one_row_is_told_of_its_noisy_end_alone(checkpoint, tmp_path):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path)
    network: Any = load(tmp_path).network
    position = torch.arange(5).expand(2, -1)
    layout = decoding_layout(position, torch.tensor([2, 4]), torch.tensor([5, 5]))
    both = [[False, False, True, True, True], [False] * 4 + [True]]
    for rows, told in ((layout, both), (layout.map(lambda part: part[:1]), [both[0][2:]])):
        with gated.opened(network, rows, rows):
            assert network.setblock_gate.noisy[..., 0].tolist() == told
            assert network.setblock_gate.whole == (len(told) == 1)
    clean = decoding_layout(position[:1], *[torch.tensor([5])] * 2)
    with gated.opened(network, clean, clean):
        assert network.setblock_gate.noisy is None
    one = layout.map(lambda part: part[:1].clone())
    one.block[0, 3] = CLEAN  # as padding is
    with gated.opened(network, one, one):
        noisy: Any = network.setblock_gate.noisy
        assert noisy[..., 0].tolist() == [[True, False, True]]
        assert not network.setblock_gate.whole
    assert not network.setblock_gate.whole


def test_threads_do_not_open_each_others_gates(checkpoint, tmp_path):
    """A forward of next tokens that begins in the middle of one of a block waits for its end."""
    gated_adapter(load(checkpoint("llama-tied")), tmp_path)
    model = load(tmp_path)
    tokens, position = torch.arange(5)[None], torch.arange(5)[None]
    noisy = decoding_layout(position, torch.tensor([2]), torch.tensor([5]))
    clean = decoding_layout(position, torch.tensor([5]), torch.tensor([5]))
    expected = [model.forward(tokens, layout) for layout in (noisy, clean)]
    assert not torch.equal(*expected)
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: found.append(model.forward(tokens, clean)))

    def begin_another(*_: Any) -> None:
        if not other.ident:
            other.start()
            other.join(timeout=0.5)  # which it would need without waiting

    layers: Any = model.network.get_submodule("model.layers")
    layers[1].register_forward_pre_hook(begin_another)
    assert torch.equal(model.forward(tokens, noisy), expected[0])
    other.join()
    assert torch.equal(found[0], expected[1])
    copied = copy.deepcopy(model.network)
    assert copied.setblock_gate is not model.network.setblock_gate


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer is part")
def test_adapters_of_others_are_refused_in_a_line(checkpoint, tmp_path):
    from peft import LoKrConfig

    base = checkpoint("llama-tied")

    def saved(name: str, made: Any) -> str:
        made.peft_config["default"].base_model_name_or_path = str(base)
        made.save_pretrained(tmp_path / name, save_embedding_layers=False)
        return str(tmp_path / name)

    def words(**more: Any) -> Any:
        return {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **more}

    other = get_peft_model(load(base).network, LoKrConfig(**words()))
    rowless = get_peft_model(load(base).network, LoraConfig(**words(alora_invocation_tokens=[4])))
    lora = get_peft_model(load(base).network, LoraConfig(**words()))
    wide = [
        {"bias": "lora_only"}, {"modules_to_save": ["input_layernorm"]},
        {"layer_replication": [(0, 2), (1, 2)]}, {"target_modules": ["q_proj", "lm_head"]},
    ]  # fmt: skip
    biased, saving, longer, heading = (
        get_peft_model(
            load(base).network, LoraConfig(**{**words(alora_invocation_tokens=[4]), **one})
        )
        for one in wide
    )
    rows = {"embed_tokens": [4], "lm_head": [9]}
    untied = checkpoint("llama")
    tokens = words(alora_invocation_tokens=[4], trainable_token_indices=rows)
    saying = get_peft_model(load(untied).network, LoraConfig(**tokens))
    saying.peft_config["default"].base_model_name_or_path = str(untied)
    saying.save_pretrained(tmp_path / "saying", save_embedding_layers=False)
    lacking, empty = saved("lacking", lora), saved("empty", lora)
    weights = load_file(f"{lacking}/adapter_model.safetensors")
    some = {name: weight for name, weight in weights.items() if "layers.1" not in name}
    save_file(some, f"{lacking}/adapter_model.safetensors")
    (tmp_path / "empty" / "adapter_model.safetensors").unlink()
    pissa = get_peft_model(
        load(base).network,
        LoraConfig(**words(alora_invocation_tokens=[4], init_lora_weights="pissa_niter_2")),
    )
    more, numberless, patternless, half = (
        saved(name, lora) for name in ("more", "numberless", "patternless", "half")
    )
    for name, field, value in (
        (more, "layers_to_transform", [0]),
        (numberless, "lora_alpha", None),
        (patternless, "rank_pattern", None),
    ):
        config = Path(name, "adapter_config.json")
        held = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(held | {field: value}), encoding="utf-8")
    config = Path(half, "adapter_config.json")
    config.write_text(config.read_text()[:100])
    head = get_peft_model(load(untied).network, LoraConfig(**words(target_modules=["lm_head"])))
    head.peft_config["default"].base_model_name_or_path = str(untied)
    head.save_pretrained(tmp_path / "whole-head", save_embedding_layers=True)  # the layers too
    assert load(tmp_path / "whole-head").trained is False
    for name, message in (
        (saved("other", other), "an adapter of peft's type LOKR, where only LORA can be put on"),
        (saved("rowless", rowless), "a gated adapter must have trained one row of the input"),
        (saved("biased", biased), "gated .* with bias 'lora_only' does not; only 'none' is allow"),
        (saved("saving", saving), r"gated .* with modules_to_save \['input_layernorm'\] does not"),
        (saved("longer", longer), r"gated .* with layer_replication .* does not; only None"),
        (saved("heading", heading), "a gated adapter must leave the output layer as it is"),
        (str(tmp_path / "saying"), "a gated adapter must leave the output layer as it is"),
        (
            saved("pissa", pissa),
            "gated .* with init_lora_weights 'pissa_niter_2' does not; True, False, 'gaussian', 'e",
        ),
        (
            more,
            r"the adapter holds 2 weights that have no place .*layers.1.self_attn.q_proj.lora_A",
        ),
        (numberless, "its adapter_config.json holds a value of a wrong kind .unsupported operand"),
        (patternless, "its adapter_config.json holds a value of a wrong kind"),
        (half, "adapter_config.json of .* is no JSON: Expecting"),
        (lacking, r"the adapter lacks 2 weights, .*layers.1.self_attn.q_proj.lora_A.* the first"),
        (empty, "the adapter's folder has no adapter_model.safetensors"),
    ):
        with pytest.raises(ModelError, match=message):
            load(name)
    with pytest.raises(ValueError, match=r"^the adapter lacks 2 weights, "):  # trained on, as well
        adapters.attach_again(load(base).network, lacking)


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva' but `eva_config` is not")
@pytest.mark.parametrize("own", [True, False, "gaussian", "eva", "orthogonal"])
def test_adapters_that_began_otherwise_leave_the_base_as_it_is(checkpoint, tmp_path, own):
    base = checkpoint("llama-tied")
    gated_adapter(load(base), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": own}))
    few: dict[str, Any] = {"mode": "ntp", "max_new_tokens": 12, "ignore_eos": True}
    [plain], [adapted] = (generate(load(one), [[5, 6, 7]], **few) for one in (base, tmp_path))
    assert adapted.token_ids == plain.token_ids


def test_a_mixture_of_experts_has_its_gate_beside_the_experts(checkpoint, tmp_path):
    folder = checkpoint("mixtral")
    made = gated_adapter(load(folder), tmp_path / "gated")
    layers = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(made.peft_config["default"].target_modules) == layers
    model = load(tmp_path / "gated")
    assert model.gated
    few: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    prompts = [[5, 6, 7], [8, 9]]
    expected = generate(load(folder), prompts, mode="ntp", **few)
    drafted = generate(model, prompts, mode="verified", block_size=4, branches=2, **few)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in expected]


def test_a_shared_expert_has_a_gate(tmp_path):
    """peft takes none of this one's experts for linear layers, and all layers beside them."""
    sizes = {**SIZES, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    experts = AutoModelForCausalLM.from_config(Qwen2MoeConfig(**sizes, num_experts=4))
    made: Any = adapters.attach(experts, "base", "gated", MASK, rank=4, alpha=8)
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}
    found = {name.split(".")[-1] for name in made.peft_config["default"].target_modules}
    assert found == layers | {"shared_expert_gate"}


LATENT: dict[str, Any] = {  # DeepSeek's attention, and experts beside dense layers of their names
    **{**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    "network_config",
    [MixtralConfig(**SIZES, num_local_experts=2), DeepseekV3Config(**LATENT)],
    ids=lambda value: value.model_type,
)
def test_a_mixture_of_experts_trains_a_gate(tmp_path, network_config):
    torch.manual_seed(0)
    experts = AutoModelForCausalLM.from_config(network_config)
    before = {name: one.clone() for name, one in experts.named_parameters() if ".mlp." in name}
    net: Any = adapters.attach(experts, "base", "gated", MASK, rank=4, alpha=8)
    run = plain_trainer(tmp_path, net=net, learning_rate=0.5)
    assert math.isfinite(run.train().training_loss)
    learned = {name for name, one in net.named_parameters() if one.requires_grad}
    assert any(one.abs().max() > 0 for name, one in net.named_parameters() if "lora_B" in name)
    assert all("lora" in name or "trainable_tokens" in name for name in learned)
    held = dict(net.named_parameters())
    for name, weight in before.items():
        assert torch.equal(held[f"base_model.model.{name}"], weight)


def test_an_adapter_is_put_on_without_a_warning(checkpoint, tmp_path):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path).gated


def test_products_of_16_bits_are_left_to_the_compiler(checkpoint, tmp_path, monkeypatch):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path)
    model = load(tmp_path, dtype="bfloat16", device="cpu")
    parts = [part for part in model.network.modules() if isinstance(part, gated.Addition)]
    assert {part.down.weight.dtype for part in parts} == {part.up.dtype for part in parts}
    assert {part.up.dtype for part in parts} == {torch.float32}
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    model.compile("kernels")
    assert {part.up.dtype for part in parts} == {torch.bfloat16}


def test_without_peft_it_is_told_how_to_get_it(checkpoint, tmp_path, monkeypatch):
    base = load(checkpoint("llama"))
    gated_adapter(base, tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ModelError, match=r"an adapter needs the package peft: pip install '\.\[smo"
    ):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_base_that_was_moved_is_asked_for(checkpoint, tmp_path):
    base = shutil.copytree(checkpoint(), tmp_path / "base")
    gated_adapter(load(base), tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"; if it was moved, say where to as base_model_name_or"):
        load(tmp_path / "adapter")
