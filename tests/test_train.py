"""The trainer: trl's, with eq. 14 of arXiv:2509.04185 for a loss. On the CPU, in float32."""

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import SFTConfig  # pyright: ignore[reportPrivateImportUsage]

from setblock import loading, objective
from setblock.batches import Collator
from setblock.checkpoint import ModelError
from setblock.config import SBDConfig
from setblock.estimate import describe, estimate
from setblock.masks import CLEAN, PADDING, visible
from setblock.train import SBDTrainer, refuse_split_rows

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<unk>"]
MASK = SPECIAL.index("<mask>")
VOCAB = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tokenizer():
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    names = {f"{word.strip('<>')}_token": word for word in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


# SmolLM2 is a Llama with tied embeddings and three query heads to a key head.
SHAPES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "smollm2": (
        LlamaForCausalLM,
        LlamaConfig(
            **{**SIZES, "hidden_size": 24, "num_attention_heads": 3}, tie_word_embeddings=True
        ),
    ),
}


def network(shape="llama"):
    torch.manual_seed(0)
    kind, config = SHAPES[shape]
    return kind(copy.deepcopy(config))


def samples(num_rows=8, prompt=3):
    """Token rows of several lengths, the first tokens of each without a label."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(num_rows):
        length = 6 + 5 * i % 9
        ids = torch.randint(len(SPECIAL), VOCAB - 1, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


def config(folder, cls: Any = SBDConfig, **changes):
    settings = {
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",  # Adam would blow differences of the last bit up to a whole step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return cls(output_dir=str(folder), **{**settings, **changes})


def trainer(folder, rows=None, *, net=None, eval_dataset=None, **changes) -> Any:
    if not isinstance(rows, (Dataset, IterableDataset)):
        rows = Dataset.from_list(samples() if rows is None else rows)
    return SBDTrainer(
        net or network(),
        config(folder, **changes),
        train_dataset=rows,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
    )


def logged(trained, name):
    return [line[name] for line in trained.state.log_history if name in line]


def weights(trained):
    return torch.cat([weight.detach().flatten() for weight in trained.model.parameters()])


def steps(trained, num_batches=1):
    """The views of an optimizer step, as the training loop asks for them."""
    batches, count = trained.get_batch_samples(
        iter(trained.get_train_dataloader()), num_batches, torch.device("cpu")
    )
    return [batch["view"] for batch in batches], count


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
    ntp, matp = view.ntp_labels.ne(-100).sum().item(), view.matp_labels.ne(-100).sum().item()
    assert count == ntp + matp
    [loss], [ntp_loss], [matp_loss] = (
        logged(run, name) for name in ("loss", "ntp_loss", "matp_loss")
    )
    assert loss == pytest.approx((ntp * ntp_loss + matp * matp_loss) / (ntp + matp), abs=1e-5)
    assert logged(run, "mask_ratio") == [
        pytest.approx(matp / sum(len(r["input_ids"]) - 3 for r in samples()))
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_resume_changes_nothing(tmp_path, shape):
    # 8 rows in micro-batches of 2, two a step: an epoch is 2 steps, so that 3 is inside the second.
    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_steps": 3,
        "save_strategy": "steps",
        "optim": "adamw_torch",
    }
    straight = trainer(tmp_path, net=network(shape), **options)
    straight.train()
    resumed = trainer(tmp_path, net=network(shape), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name in ("loss", "ntp_loss", "matp_loss", "mask_ratio", "block_size"):
        assert logged(resumed, name) == logged(straight, name)
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_is_unpacked(tmp_path, shape):
    options = {"max_steps": 2, "per_device_train_batch_size": 8}
    apart = trainer(tmp_path, net=network(shape), **options)
    packed = trainer(tmp_path, net=network(shape), packing=True, max_length=24, **options)
    [view], count = steps(packed)
    assert len(view.tokens) < 8
    assert int(view.layout.document.max()) > 0
    assert count == steps(apart)[1]
    for run in (apart, packed):
        run.train()
    for name in ("loss", "ntp_loss", "matp_loss", "mask_ratio"):
        assert logged(packed, name) == pytest.approx(logged(apart, name), abs=1e-5)
    assert (weights(apart) - weights(packed)).abs().max() < 1e-5


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
            assert torch.equal(noisy[text], (position // block_size)[text])
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


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "w5 w6 w7 w8", "completion": " w9 w10 w11 w12 w13 w14"}] * 4,
        [
            {
                "input_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 2],
                "completion_mask": [0] * 4 + [1] * 7,
            }
        ]
        * 4,
    ],
    ids=["prompt-completion", "completion-mask"],
)
def test_prompts_are_neither_masked_nor_learned(tmp_path, rows):
    run = trainer(tmp_path, rows, end_fill=0)
    masked = torch.zeros(11, dtype=torch.bool)
    for epoch in range(8):
        run.state.epoch = epoch
        [view], _ = steps(run)
        length = view.num_clean
        assert view.tokens[0, :length].tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 2]
        assert view.ntp_labels[0].tolist() == [-100] * 3 + [9, 10, 11, 12, 13, 14, 2, -100]
        places = view.layout.position[:, length:][view.tokens[:, length:] == MASK]
        masked[places] = True
    assert masked.tolist() == [False] * 4 + [True] * 7


@pytest.mark.parametrize("stream", [False, True])
def test_plain_text_learns_every_token(tmp_path, stream):
    rows = Dataset.from_list([{"text": "w5 w6 w7"}] * 8)
    run = trainer(tmp_path, rows.to_iterable_dataset() if stream else rows, end_fill=0)
    [view], _ = steps(run)
    assert view.ntp_labels[0].tolist() == [6, 7, 2, -100]
    run.train()
    assert len(logged(run, "matp_loss")) == 4


def test_prepared_datasets_can_skip_preparation(tmp_path):
    run = trainer(tmp_path, dataset_kwargs={"skip_prepare_dataset": True}, max_steps=1)
    run.train()
    assert len(logged(run, "matp_loss")) == 1


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


def test_collator_pads_on_the_right_to_a_multiple():
    batch = Collator(pad_token_id=0, multiple=4)(
        [
            {
                "input_ids": [5, 6, 7],
                "labels": [-100, 6, 7],
                "sample_id": [9, 9, 4],
                "seq_lengths": [2, 1],
            },
            {"input_ids": [8], "labels": [8], "sample_id": 2},
        ]
    )
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 0], [8, 0, 0, 0]],
        "labels": [[-100, 6, 7, -100], [8, -100, -100, -100]],
        "position_ids": [[0, 1, 0, 0], [0, 0, 0, 0]],
        "document": [[0, 0, 1, -1], [0, -1, -1, -1]],
        "sample_id": [[9, 4], [2, 0]],
        "lengths": [[2, 1], [1, 0]],
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "mlm"}, r"objective must be one of \('sbd', 'ntp'\), got 'mlm'"),
        ({"min_block_size": 0}, "got min_block_size=0, max_block_size=16"),
        ({"max_block_size": 1}, "got min_block_size=2, max_block_size=1"),
        ({"mask_token_id": -1}, "mask_token_id must be at least 0, got -1"),
        ({"packing": True, "packing_strategy": "wrapped"}, "must be 'bfd'.*got 'wrapped'"),
        ({"padding_free": True}, "padding_free must be False, got True"),
        ({"truncation_mode": "middle"}, "truncation_mode must be 'keep_start'"),
        ({"loss_type": "dft"}, "loss_type must be 'nll', got 'dft'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0.0, got 0.1"),
        ({"average_tokens_across_devices": False}, "must be True, got False"),
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
    experts = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    with pytest.raises(ValueError, match=r"auxiliary loss .* set router_aux_loss_coef=0.0"):
        trainer(tmp_path, net=experts)
    run: Any = trainer(tmp_path)
    with pytest.raises(ValueError, match="use evaluate"):
        run.predict(run.train_dataset)
    with pytest.raises(ValueError, match="rows need the column labels, got input_ids, sample_id"):
        Collator(0)([{"input_ids": [5], "sample_id": 0}])
    with pytest.raises(
        ValueError, match=r"a packed row .* needs a sample_id for each of its tokens"
    ):
        Collator(0)([{"input_ids": [5], "labels": [5], "sample_id": 0, "seq_lengths": [1]}])


def test_rows_cut_into_pieces_are_refused():
    with pytest.raises(ValueError, match="must be 1, got cp_size=2, sp_size=1"):
        refuse_split_rows(ParallelismConfig(cp_size=2))
    refuse_split_rows(ParallelismConfig(tp_size=2))
    refuse_split_rows(None)


def test_batches_that_teach_nothing_or_break_are_refused(tmp_path):
    silent = [{**row, "labels": [-100] * len(row["input_ids"])} for row in samples(4)]
    with pytest.raises(ValueError, match=r"a batch of step 0 has no labels: .* samples \[0, 1"):
        trainer(tmp_path, silent, max_length=None, train_sampling_strategy="sequential").train()
    spoilt = [{"input_ids": [5, MASK, 6], "labels": [5, MASK, 6]}]
    with pytest.raises(ValueError, match=r"step 0 holds the mask token 3 in its text.*\[0\]"):
        trainer(tmp_path, Dataset.from_list(spoilt).to_iterable_dataset()).train()
    net = network()
    net.lm_head.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="the loss of step 1 is not finite: next-token nan"):
        trainer(tmp_path, net=net).train()


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
    expected = 0.0
    for b, i in (view.labels != -100).nonzero().tolist():
        own = -log_p[b, i, view.labels[b, i]].item()
        if i < view.num_clean:
            expected += own
            continue
        position = view.layout.position[b, i].item()
        if position > 0:  # these documents stand alone in their rows
            taught = log_p[b, position - 1]
            divergence = (taught.exp() * (taught - log_p[b, i])).sum().item()
            own = (1 - share) * own + share * divergence
        expected += weight * own
    loss = run.compute_loss(run.model, batches[0], num_items_in_batch=count)
    assert loss.item() == pytest.approx(expected / int(count), abs=1e-5)


def test_end_fill_lets_blocks_reach_behind_the_end(tmp_path):
    rows = Dataset.from_list([{"prompt": "w5 w6", "completion": " w7"}] * 8)
    for settings, fill in (({}, 15), ({"end_fill": 0}, 0), ({"max_block_size": 4}, 3)):
        run = trainer(tmp_path, rows, **settings)
        [row] = run.train_dataset.select([0]).to_list()
        assert row["input_ids"] == [5, 6, 7, 2] + [2] * fill
        assert row["labels"] == [-100, -100, 7, 2] + [2] * fill
    twin = trainer(tmp_path, rows, objective="ntp")
    assert twin.train_dataset[0]["input_ids"] == [5, 6, 7, 2]
    # a line break of a chat template behind the end gives way; an end in the prompt is none
    behind = [{"input_ids": [5, 2, 9], "labels": [-100, 2, 9]}] * 8
    assert trainer(tmp_path, behind, end_fill=2).train_dataset[0]["input_ids"] == [5, 2, 2, 2]
    prompt = [{"input_ids": [5, 2, 9], "labels": [-100, -100, 9]}] * 8
    assert trainer(tmp_path, prompt).train_dataset[0]["input_ids"] == [5, 2, 9]


def test_cut_rows_are_counted(tmp_path, caplog):
    caplog.set_level("WARNING", logger="setblock.batches")
    run = trainer(tmp_path, max_length=8)
    assert max(map(len, run.train_dataset["input_ids"])) == 8
    lengths = [len(row["input_ids"]) for row in samples()]
    longer = sum(length > 8 for length in lengths)
    assert f"train dataset: {longer} of 8 rows were longer than max_length=8" in caplog.text
    caplog.clear()
    trainer(tmp_path, max_length=100)
    assert not caplog.text
    with pytest.raises(ValueError, match=r"none of the 8 rows .* within max_length=3"):
        trainer(tmp_path, max_length=3)


def test_mask_token_in_the_text_is_found_before_the_first_step(tmp_path):
    rows = samples()
    rows[5]["input_ids"][1] = MASK
    with pytest.raises(ValueError, match="row 5 of the train dataset holds the mask token 3"):
        trainer(tmp_path, rows)


def test_fill_stays_within_max_length_and_packs(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 2], "labels": [-100, 6, 7, 2]}] * 8
    apart = trainer(tmp_path, rows, max_length=12)
    assert set(map(len, apart.train_dataset["input_ids"])) == {12}
    packed = trainer(tmp_path, rows, max_length=40, packing=True, max_block_size=8)
    alone = trainer(tmp_path, rows, max_length=40, max_block_size=8)
    assert set(map(len, alone.train_dataset["input_ids"])) == {11}
    assert {n for row in packed.train_dataset["seq_lengths"] for n in row} == {11}


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


def train_on_this_rank(folder, shape):
    run = trainer(
        folder,
        net=network(shape),
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)),
        train_sampling_strategy="sequential",
    )
    run.train()
    if run.accelerator.is_main_process:
        record = {name: logged(run, name) for name in ("loss", "ntp_loss", "matp_loss")}
        record["weights"] = weights(run).tolist()
        (folder / "record.json").write_text(json.dumps(record))
    return run


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """on_two_ranks(job): the folder of a job of this file, every shape's record in a folder of its
    own. Two processes, which torchrun starts, ran it, once for all tests.
    """

    @functools.cache
    def folder_of(job):
        folder = tmp_path_factory.mktemp(job)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, __file__, job, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return folder_of


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_are_one(tmp_path, on_two_ranks, shape):
    train_on_this_rank(tmp_path, shape).leave()
    places = (tmp_path, on_two_ranks("train") / shape)
    records = [json.loads((place / "record.json").read_text()) for place in places]
    for name, values in records[0].items():
        assert values == pytest.approx(records[1][name], abs=1e-5)


@pytest.mark.parametrize(
    ("plugin", "replicas", "shards"),
    [
        ({"fsdp_version": 2}, 1, 8),
        ({"fsdp_version": 2}, 2, 4),
        ({"fsdp_version": 1}, 1, 8),
        ({"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"}, 1, 4),
        ({"fsdp_version": 1, "sharding_strategy": "NO_SHARD"}, 1, 1),
    ],
)
@pytest.mark.parametrize("told", [True, False])  # by the launcher: processes of a machine
def test_the_estimate_of_one_shard(tmp_path, monkeypatch, plugin, replicas, shards, told):
    run = trainer(tmp_path, optim="adamw_torch")
    whole = estimate(run)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(**plugin)),
        num_processes=8,
        parallelism_config=ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=8),
    )
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    else:
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(run, "accelerator", accelerator)
    monkeypatch.setattr(run, "is_fsdp_enabled", True)
    cost = estimate(run)
    for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
        assert cost[name] == whole[name] // shards
    assert cost["tokens_per_second"] is cost["seconds"] is None
    line = describe(cost)
    assert (f"GiB in each of {shards} processes beside" in line) == (shards > 1)
    assert line.endswith("time is not estimated where processes share the weights")
    assert "time is not" not in describe(whole)


def shard_on_this_rank(folder, shape):
    """Three steps of a network that FSDP2 has cut up, half of the rows a rank: the first one's
    gradients, the weights behind the last, and the losses.
    """
    run = trainer(
        folder,
        net=two_layers(shape),
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)),
        train_sampling_strategy="sequential",
        self_distill=0.5,
        logits_chunk_size=7,
    )
    network = run.model
    sharded = run.accelerator.num_processes > 1
    if sharded:
        for layer in network.model.layers:
            fully_shard(layer)
        fully_shard(network)
    loader = run.accelerator.prepare(run.get_train_dataloader()) if sharded else None
    loader = loader or run.get_train_dataloader()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    network.train()
    record = {}
    for step in range(3):
        run.state.global_step, run.state.epoch = step, step
        [batch], count = run.get_batch_samples(iter(loader), 1, torch.device("cpu"))
        loss = run.compute_loss(network, batch, num_items_in_batch=count)
        loss.backward()
        losses = run.accelerator.gather(loss.detach().reshape(1))
        record[f"loss {step}"] = losses.mean().item()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        if step == 0:
            record |= {f"gradient of {name}": of.grad for name, of in network.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    record |= network.state_dict()
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
        for name, value in record.items()
    }
    if run.accelerator.is_main_process:
        values = {name: value.tolist() for name, value in whole.items()}
        (folder / "record.json").write_text(json.dumps(values))
    return run


def two_layers(shape):
    torch.manual_seed(0)
    kind, config = SHAPES[shape]
    settings = {**config.to_diff_dict(), "num_hidden_layers": 2}
    settings.pop("layer_types", None)
    return kind(type(config)(**settings))


@pytest.mark.parametrize("shape", SHAPES)
def test_two_shards_are_one(tmp_path, on_two_ranks, shape):
    """FSDP2 over two gloo ranks; accelerate itself offers it on accelerators only."""
    shard_on_this_rank(tmp_path, shape).leave()
    places = (tmp_path, on_two_ranks("shard") / shape)
    records = [json.loads((place / "record.json").read_text()) for place in places]
    assert records[0].keys() == records[1].keys()
    for name, values in records[0].items():
        assert torch.tensor(values).abs().max() > 0
        assert torch.allclose(torch.tensor(values), torch.tensor(records[1][name]), atol=1e-6)


JOBS = {"train": train_on_this_rank, "shard": shard_on_this_rank}

if __name__ == "__main__":
    last = None
    for shape in SHAPES:
        folder = Path(sys.argv[2]) / shape
        folder.mkdir(exist_ok=True)
        last = JOBS[sys.argv[1]](folder, shape)
    last and last.leave()
