"""The trainer: trl's, with eq. 14 of arXiv:2509.04185 for a loss. On the CPU, in float32."""

import json
from typing import Any

import jaxtyping
import pytest
import torch
from conftest import LONGROPE
from datasets import Dataset
from trainers import (
    RECOMPUTING,
    SHAPES,
    SIZES,
    config,
    logged,
    network,
    samples,
    steps,
    trainer,
    weights,
)
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig  # pyright: ignore[reportPrivateImportUsage]

from setblock import adapters, loading, objective
from setblock.batches import Collator
from setblock.masks import CLEAN, PADDING, visible
from setblock.names import ModelError
from setblock.train import SBDTrainer


@pytest.mark.parametrize("shape", SHAPES)
def test_one_batch_of_eight_is_eight_batches_of_one(tmp_path, shape):
    whole = trainer(tmp_path, net=network(shape), per_device_train_batch_size=8)
    eight = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    parts = trainer(tmp_path, net=network(shape), **eight)
    for run in (whole, parts):
        run.train()
    for name in ("loss", "ntp_loss", "matp_loss", "mask_ratio", "block_size", "matp_accuracy"):
        assert len(logged(whole, name)) == 4
        assert logged(whole, name) == pytest.approx(logged(parts, name), abs=1e-5)
    assert len(set(logged(whole, "block_size"))) > 1
    assert (weights(whole) - weights(parts)).abs().max() < 1e-5
    untrained = trainer(tmp_path, net=network(shape))
    assert (weights(whole) - weights(untrained)).abs().max() > 1e-3


def test_logged_loss_is_the_mean_over_all_labels(tmp_path):
    run = trainer(tmp_path, max_steps=1, per_device_train_batch_size=8)
    [view], count = steps(run)
    run.train()
    ntp, matp = (
        view.labels[:, : view.num_clean].ne(-100).sum().item(),
        view.matp_labels.ne(-100).sum().item(),
    )
    assert count == ntp + matp
    [loss], [ntp_loss], [matp_loss] = (
        logged(run, name) for name in ("loss", "ntp_loss", "matp_loss")
    )
    assert loss == pytest.approx((ntp * ntp_loss + matp * matp_loss) / (ntp + matp), abs=1e-5)
    assert logged(run, "mask_ratio") == [
        pytest.approx(matp / sum(len(r["input_ids"]) - 3 for r in samples()))
    ]


def test_the_closing_line_is_of_training(tmp_path):
    """Though an evaluation came last."""
    own = Dataset.from_list(samples(2))
    options = {"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 4}
    run = trainer(tmp_path, eval_dataset=own, **options)
    run.train()
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4
    assert "train_runtime" in last
    assert last["matp_loss"] > 0
    assert not any(name.startswith("eval_") for name in last)


def test_block_size_belongs_to_the_step_and_noise_to_the_epoch(tmp_path):
    run = trainer(tmp_path, train_sampling_strategy="sequential")
    seen = set()
    for step in range(12):
        run.state.global_step = step
        views, _ = steps(run, num_batches=2)
        block_size = objective.draw_block_size(run.args.seed, step)
        for view in views:
            clean, noisy = view.layout.block.split(view.num_clean, dim=1)
            assert (clean == CLEAN).all()
            text = view.layout.document[:, view.num_clean :] != PADDING
            position = view.layout.position[:, view.num_clean :]
            assert torch.equal(noisy[text], (position - position % block_size)[text])
        seen.add(block_size)
    assert len(seen) > 5
    first, again, second = (
        (setattr(run.state, "epoch", epoch), steps(run)[0][0].matp_labels)[1]
        for epoch in (0, 0.5, 1.25)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    # keyed by the row: the batch of the last rows has the noise that these rows have anywhere
    rows = Dataset.from_list(samples()).add_column("sample_id", list(range(8)))
    reordered = trainer(tmp_path, rows.select([5, 0, 7, 1]), train_sampling_strategy="sequential")
    run.state.epoch = 0
    both = steps(run, 2)[0]
    alone = steps(reordered)[0][0]
    expected, actual = both[0].matp_labels[0], alone.matp_labels[1]
    assert_same_labels(expected, actual)
    assert_same_labels(both[1].matp_labels[1], alone.matp_labels[0])


def assert_same_labels(first, second):
    length = min(len(first), len(second))
    assert torch.equal(first[:length], second[:length])
    assert (torch.cat([first[length:], second[length:]]) == -100).all()


def test_overfits_a_few_rows(tmp_path):
    run = trainer(
        tmp_path,
        samples(4),
        max_steps=80,
        optim="adamw_torch",
        learning_rate=0.02,
        logging_steps=10,
    )
    run.train()
    for name, last in (("ntp_loss", 0.2), ("matp_loss", 1.2)):
        losses = logged(run, name)
        assert losses[0] > 2
        assert losses[-1] < last
    assert logged(run, "ntp_accuracy")[-1] > 0.8
    assert logged(run, "matp_accuracy")[-1] > 0.5


def test_next_token_objective_is_the_loss_of_transformers(tmp_path):
    run = trainer(tmp_path, objective="ntp", max_steps=1, per_device_train_batch_size=8)
    batch = next(iter(run.get_train_dataloader()))
    with torch.no_grad():
        theirs = network()(
            input_ids=batch["input_ids"],
            labels=batch["labels"],
            attention_mask=(batch["document"] >= 0).long(),
        ).loss.item()
    run.train()
    assert logged(run, "loss") == [pytest.approx(theirs, abs=1e-5)]
    assert logged(run, "ntp_loss") == [pytest.approx(theirs, abs=1e-5)]
    assert logged(run, "matp_loss") == logged(run, "block_size") == []
    own = run.model.generation_config.to_dict()["setblock"]
    assert own == {"trained": False, "mode": "ntp"}


def test_bfloat16_stays_close(tmp_path):
    losses = []
    for bf16 in (False, True):
        run = trainer(tmp_path, bf16=bf16, max_steps=3)
        run.train()
        assert weights(run).dtype == torch.float32
        losses.append(logged(run, "loss"))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_kept_idle_blocks_change_no_loss_and_no_weight(tmp_path, shape):
    runs = [
        trainer(tmp_path / how, net=network(shape), idle_blocks=how, pad_to_multiple_of=16)
        for how in ("drop", "keep")
    ]
    widths = []
    for run in runs:
        [view], _ = steps(run)
        widths.append((view.tokens.shape[1], view.rows))
        run.train()
    assert widths[1] == (32, (16, widths[1][1].block_size))
    assert widths[0][0] < 32
    assert widths[0][1] is None
    assert logged(runs[0], "loss") == pytest.approx(logged(runs[1], "loss"), rel=1e-5)
    torch.testing.assert_close(weights(runs[0]), weights(runs[1]))


# Eager FlexAttention, which is what a CPU runs, says that it is slow.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("idle_blocks", ["drop", "keep"])
def test_block_masks_give_the_losses_of_dense_masks(tmp_path, monkeypatch, packing, idle_blocks):
    """Forward alone: FlexAttention has no backward pass on a CPU."""
    monkeypatch.setattr("transformers.integrations.flex_attention.torch.compile", lambda f, **_: f)
    found = []
    for attention in ("sdpa", "flex_attention"):
        net = network()
        net.set_attn_implementation(attention)
        rows = Dataset.from_list(samples())
        changes: dict[str, Any] = {"packing": packing, "max_length": 40, "idle_blocks": idle_blocks}
        run = trainer(tmp_path / attention, net=net, eval_dataset=rows, **changes)
        found.append({k: v for k, v in run.evaluate().items() if k.endswith("loss")})
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0]["eval_matp_loss"] > 1


def test_kernels_of_flex_attention_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which torch_compile sets, for good
    net = network()
    net.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="torch_compile must be no with flex_attention"):
        trainer(tmp_path, net=net, torch_compile=True)


# peft asks for it on every wrap.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("setting", [{"self_distill": 0.5}, {RECOMPUTING: True}])
def test_a_gated_adapter_whose_layers_search_is_not_compiled(tmp_path, monkeypatch, setting):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    net: Any = adapters.attach(network(), "base", "gated", 3, 4, 8)
    with pytest.raises(ValueError, match="torch_compile must be no with a gated adapter and self"):
        trainer(tmp_path, net=net, torch_compile=True, **setting)


def test_what_torch_compile_has_not(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with pytest.raises(ValueError, match=r"torch_compile_backend must be one of eager, .*'fast'"):
        config(tmp_path, torch_compile_backend="fast")
    with pytest.raises(ValueError, match=r"torch_compile_mode must be one of default, .*'fast'"):
        config(tmp_path, torch_compile_mode="fast")


def test_evaluation_repeats_itself(tmp_path):
    parts = {"seen": Dataset.from_list(samples(4)), "unseen": Dataset.from_list(samples(6)[4:])}
    run = trainer(tmp_path, eval_dataset=parts)
    first, second = run.evaluate(), run.evaluate()
    timed = ("runtime", "per_second")
    for name in (name for name in first if not name.endswith(timed)):
        assert first[name] == second[name]
    assert "eval_unseen_loss" in first
    logs = [line for line in run.state.log_history if "eval_unseen_loss" in line]
    assert logs[0]["eval_matp_loss"] == logs[1]["eval_matp_loss"]
    assert logs[0]["eval_block_size"] == run.args.max_block_size


def test_checkpoints_know_their_mask_token(tmp_path):
    net = network()
    run = trainer(
        tmp_path, net=net, max_steps=1, max_block_size=8, mask_token_id=39, rows=samples(4)
    )
    run.train()
    run.save_model(str(tmp_path / "saved"))
    loaded = loading.load(tmp_path / "saved")
    assert loaded.trained
    assert loaded.mask_token_id == 39
    assert loaded.defaults["block_size"] == 8
    continued = trainer(tmp_path, net=loaded.network, max_steps=1)
    assert continued.mask_token_id == 39


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "mlm"}, r"objective must be one of \('sbd', 'ntp'\), got 'mlm'"),
        ({"min_block_size": 0}, "got min_block_size=0, max_block_size=16"),
        ({"max_block_size": 2048}, "max_block_size must be at most 1024, got 2048"),
        ({"min_block_size": 2.5}, r"min_block_size must be a whole number, got 2\.5"),
        ({"max_block_size": "8"}, "max_block_size must be a whole number, got '8'"),
        ({"min_block_size": None}, "min_block_size must be a whole number, got None"),
        ({"matp_weight": True}, "matp_weight must be a number, got True"),
        ({"end_fill": 1.5}, r"end_fill must be a whole number, got 1\.5"),
        ({"mask_token_id": "x"}, "mask_token_id must be a whole number, got 'x'"),
        ({"full_mask_share": "0.3"}, "full_mask_share must be a number, got '0.3'"),
        ({"max_block_size": 1}, "got min_block_size=2, max_block_size=1"),
        ({"mask_token_id": -1}, "mask_token_id must be at least 0, got -1"),
        ({"packing": True, "packing_strategy": "wrapped"}, "must be 'bfd'.*got 'wrapped'"),
        ({"padding_free": True}, "padding_free must be False, got True"),
        ({"truncation_mode": "middle"}, "truncation_mode must be 'keep_start'"),
        ({"loss_type": "dft"}, "loss_type must be 'nll', got 'dft'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0.0, got 0.1"),
        ({"average_tokens_across_devices": False}, "must be True, got False"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef must be 0.0, got 0.1"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


def test_what_the_trainer_cannot_do_is_refused(tmp_path, monkeypatch):
    # Users run without the type checks that would refuse the wrong class here.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    dataset = Dataset.from_list(samples())
    with pytest.raises(TypeError, match="args must be an SBDConfig, got SFTConfig"):
        SBDTrainer(network(), config(tmp_path, SFTConfig), train_dataset=dataset)
    with pytest.raises(ModelError, match=r"mask token 2 .* is also an EOS, BOS or padding"):
        trainer(tmp_path, mask_token_id=2)
    with pytest.raises(ValueError, match="max_length must be a number of tokens when packing"):
        trainer(tmp_path, packing=True, max_length=None)
    with pytest.raises(ValueError, match="sample_id must be a column of integers, got string"):
        trainer(tmp_path, [{**row, "sample_id": "a"} for row in samples()])
    rope = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LONGROPE))
    for length in (33, None):
        with pytest.raises(ValueError, match=f"max_length must be at most 32, .* got {length}"):
            trainer(tmp_path, net=rope, max_length=length)
    run: Any = trainer(tmp_path)
    with pytest.raises(ValueError, match="use evaluate"):
        run.predict(run.train_dataset)
    with pytest.raises(ValueError, match="rows need the column labels, got input_ids, sample_id"):
        Collator(0)([{"input_ids": [5], "sample_id": 0}])
    with pytest.raises(
        ValueError, match=r"a packed row .* needs a sample_id for each of its tokens"
    ):
        Collator(0)([{"input_ids": [5], "labels": [5], "sample_id": 0, "seq_lengths": [1]}])


def probabilities(run, view):
    """log p at every token of a view, by a plain forward."""
    with torch.no_grad():
        return run.model(
            input_ids=view.tokens,
            position_ids=view.layout.position,
            attention_mask=visible(view.layout, view.layout),
        ).logits.log_softmax(-1)


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.0), (0.3, 0.0), (1.0, 1.0), (2.0, 0.4)])
def test_weight_and_distillation_by_hand(tmp_path, weight, share, chunk):
    run = trainer(tmp_path, matp_weight=weight, self_distill=share, logits_chunk_size=chunk)
    batches, count = run.get_batch_samples(iter(run.get_train_dataloader()), 1, torch.device("cpu"))
    view = batches[0]["view"]
    log_p = probabilities(run, view)
    expected, divergences = 0.0, []
    for b, i in (view.labels != -100).nonzero().tolist():
        own = -log_p[b, i, view.labels[b, i]].item()
        if i < view.num_clean:
            expected += own
            continue
        position = view.layout.position[b, i].item()
        if position > 0:  # these documents stand alone in their rows
            taught = log_p[b, position - 1]
            divergence = (taught.exp() * (taught - log_p[b, i])).sum().item()
            divergences.append(divergence)
            own = (1 - share) * own + share * divergence
        expected += weight * own
    loss = run.compute_loss(run.model, batches[0], num_items_in_batch=count)
    assert loss.item() == pytest.approx(expected / int(count), abs=1e-5)
    told = run._totals["train" if run.model.training else "eval"].means().get("distill_loss")
    mean = sum(divergences) / len(divergences)
    assert told == (pytest.approx(mean, abs=1e-5) if share else None)


def test_log_file_holds_what_was_logged_and_more(tmp_path):
    run = trainer(tmp_path, max_block_size=6, min_block_size=6)
    run.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert [line["matp_loss"] for line in lines[:4]] == pytest.approx(logged(run, "matp_loss"))
    for line in lines[:4]:
        assert line["tokens_per_second"] > 0
        for name, length in (("offset", 6), ("mask_rate", 10)):
            shares = line[f"matp_accuracy_by_{name}"]
            assert len(shares) == length
            assert all(share is None or 0 <= share <= 1 for share in shares)


def test_accuracy_by_offset_and_mask_rate_is_that_of_each_label(tmp_path):
    run = trainer(tmp_path, max_block_size=5, min_block_size=5, per_device_train_batch_size=8)
    run.train()  # so that some labels are hit
    batches, _ = run.get_batch_samples(iter(run.get_train_dataloader()), 1, torch.device("cpu"))
    view = batches[0]["view"]
    guesses = probabilities(run, view).argmax(-1)
    run.forget()
    with torch.no_grad():
        run.compute_loss(run.model, batches[0])
    tables = run._totals["train"].breakdown()
    by_offset: dict[int, list[bool]] = {}
    by_rate: dict[int, list[bool]] = {}
    for b in range(8):
        places = (view.matp_labels[b] != -100).nonzero()[:, 0] + view.num_clean
        rate = len(places) / int((batches[0]["labels"][b] != -100).sum())
        for i in places.tolist():
            right = bool(guesses[b, i] == view.labels[b, i])
            by_offset.setdefault(view.layout.position[b, i].item() % 5, []).append(right)
            by_rate.setdefault(min(int(rate * 10), 9), []).append(right)
    for name, found in (("offset", by_offset), ("mask_rate", by_rate)):
        for index, share in enumerate(tables[f"matp_accuracy_by_{name}"]):
            if share is None:
                assert index not in found
            else:
                assert share == pytest.approx(sum(found[index]) / len(found[index]))
