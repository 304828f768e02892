"""What the trainer makes of rows: labels, ends, cuts, packing, and what it refuses of them."""

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset
from trainers import MASK, SHAPES, logged, network, samples, steps, trainer, weights

from setblock.batches import Collator
from setblock.train import refuse_split_rows


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
        assert view.labels[0, : view.num_clean].tolist() == [-100] * 3 + [
            9,
            10,
            11,
            12,
            13,
            14,
            2,
            -100,
        ]
        places = view.layout.position[:, length:][view.tokens[:, length:] == MASK]
        masked[places] = True
    assert masked.tolist() == [False] * 4 + [True] * 7


@pytest.mark.parametrize("stream", [False, True])
def test_plain_text_learns_every_token(tmp_path, stream):
    rows = Dataset.from_list([{"text": "w5 w6 w7"}] * 8)
    run = trainer(tmp_path, rows.to_iterable_dataset() if stream else rows, end_fill=0)
    [view], _ = steps(run)
    assert view.labels[0, : view.num_clean].tolist() == [6, 7, 2, -100]
    run.train()
    assert len(logged(run, "matp_loss")) == 4


@pytest.mark.parametrize("row", [{"question": "w5", "answer": "w6"}, {"prompt": "w5"}])
def test_rows_without_a_column_to_learn_from_are_refused(tmp_path, row):
    wanted = "input_ids, or prompt and completion, or messages, or text"
    rows = Dataset.from_list([row] * 8)
    for one in (rows, rows.to_iterable_dataset()):
        message = f"^the train dataset needs columns {wanted}; it has {', '.join(sorted(row))}$"
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, one)
    body = Dataset.from_list([{"body": "w5 w6"}] * 8)
    assert len(trainer(tmp_path, body, dataset_text_field="body").train_dataset) == 8


def test_prepared_datasets_can_skip_preparation(tmp_path):
    run = trainer(tmp_path, dataset_kwargs={"skip_prepare_dataset": True}, max_steps=1)
    run.train()
    assert len(logged(run, "matp_loss")) == 1


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
    # whichever of its ends a model's template uses
    net = network()
    net.generation_config.eos_token_id = [7, 2]
    both = [{"input_ids": [5, 6, end], "labels": [-100, 6, end]} for end in (2, 7)] * 4
    run = trainer(tmp_path, both, net=net, end_fill=2, per_device_train_batch_size=8)
    assert run.train_dataset["input_ids"][:2] == [[5, 6, 2, 2, 2], [5, 6, 7, 7, 7]]
    [view], _ = steps(run)
    asked = {tuple(row) for row in view.labels[:, :4].tolist()}
    assert asked == {(6, 2, -100, -100), (6, 7, -100, -100)}, "an end is learned, no copy is"


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
