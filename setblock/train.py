"""Set block training on top of trl: `SBDConfig(trl.SFTConfig)` and `SBDTrainer(trl.SFTTrainer)`.

Data, chat templates, prompt masking, optimizers, checkpoints and distribution are trl's and
transformers'. What is ours: documents keep their sample id, so that their noise can be keyed by it;
an optimizer step draws its block size and its noise before its first forward and counts the labels
of all its micro-batches and ranks; the loss is eq. 14 of arXiv:2509.04185 (setblock.objective).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, no_type_check

import torch
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset, IterableDataset, Value
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

# trl fills its namespace lazily, which hides these names from type checkers.
from trl import SFTConfig, SFTTrainer, pack_dataset  # pyright: ignore[reportPrivateImportUsage]

from setblock import objective
from setblock.masks import CLEAN
from setblock.model import Model, attention_mask

OBJECTIVES = ("sbd", "ntp")


# transformers' own fields hold values that their annotations exclude: no runtime type check.
@no_type_check
@dataclass
class SBDConfig(SFTConfig):
    """Everything of `trl.SFTConfig`, and the settings of set block training.

    Raises: ValueError naming the field for a value out of range, and for settings of SFTConfig that
    this trainer would have to ignore.
    """

    objective: str = field(
        default="sbd",
        metadata={
            "help": "sbd: next-token plus masked-token loss. ntp: an ordinary next-token step on "
            "the same data in the same order, for the baseline.",
            "choices": list(OBJECTIVES),
        },
    )
    min_block_size: int = field(
        default=2, metadata={"help": "Smallest block size; each step draws one uniformly."}
    )
    max_block_size: int = field(
        default=16,
        metadata={"help": "Largest block size, included. Evaluation always uses this one."},
    )
    drop_ragged_block: bool = field(
        default=False,
        metadata={
            "help": "Leave a document's last, incomplete block out of the masked-token loss, as "
            "the paper does. It holds the end of the text, so the default keeps it."
        },
    )
    mask_token_id: int | None = field(
        default=None,
        metadata={
            "help": "Id of the mask token. Default: the one that setblock.model.Model finds."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {OBJECTIVES}, got {self.objective!r}")
        if not 1 <= self.min_block_size <= self.max_block_size:
            raise ValueError(
                "block sizes need 1 <= min_block_size <= max_block_size, got "
                f"min_block_size={self.min_block_size}, max_block_size={self.max_block_size}"
            )
        if self.mask_token_id is not None and self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must be at least 0, got {self.mask_token_id}")
        if self.packing and self.packing_strategy != "bfd":
            raise ValueError(
                "packing_strategy must be 'bfd', which keeps documents whole, got "
                f"{self.packing_strategy!r}"
            )
        # Fields of SFTConfig whose other values this trainer's loss or collator would ignore.
        for name, allowed in (
            ("padding_free", False),
            ("loss_type", "nll"),
            ("label_smoothing_factor", 0.0),
            ("average_tokens_across_devices", True),
        ):
            if getattr(self, name) != allowed:
                raise ValueError(f"{name} must be {allowed!r}, got {getattr(self, name)!r}")


# The mark has done its work; left there it would hide the fields from HfArgumentParser.
del SBDConfig.__no_type_check__  # pyright: ignore[reportAttributeAccessIssue]


class SBDTrainer(SFTTrainer):
    """`trl.SFTTrainer` with the set block objective.

    Takes any text dataset that SFTTrainer takes: text, prompt-completion, conversations, or
    tokenised (`input_ids` with `labels` or `completion_mask`). Prompt tokens have no loss in either
    half. A `sample_id` column of integers keys the noise; without one the row's index does. Logs
    ntp_loss and matp_loss (nats per label), ntp_accuracy and matp_accuracy, mask_ratio (masked
    share of the labelled positions) and block_size.
    Raises: ValueError for a batch without labels or with mask tokens in its text, and for a loss
    that is not finite, naming the step.
    """

    args: SBDConfig
    model: PreTrainedModel

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: SBDConfig,
        *,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: Dataset | IterableDataset | dict[str, Any] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict], str] | None = None,
    ) -> None:
        if not isinstance(args, SBDConfig):
            raise TypeError(f"args must be an SBDConfig, got {type(args).__name__}")
        super().__init__(
            model,
            args,
            train_dataset=_with_sample_ids(train_dataset),
            eval_dataset=_map_datasets(_with_sample_ids, eval_dataset),
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            formatting_func=formatting_func,
        )
        refuse_split_rows(self.accelerator.parallelism_config)
        if self._is_vision_dataset:
            raise ValueError("train_dataset holds images; SBDTrainer takes text only")
        if self.aux_loss_enabled:
            raise ValueError(
                "the auxiliary loss of a mixture of experts is not supported: set "
                "router_aux_loss_coef=0.0"
            )
        pad_token_id, multiple = self._tokenizer.pad_token_id, args.pad_to_multiple_of or 1
        assert isinstance(pad_token_id, int)
        assert isinstance(multiple, int)
        # trl takes no collator of ours beside packing, so it comes after __init__.
        self.data_collator = Collator(pad_token_id, multiple)
        # compute_loss divides by the label counts of the whole step, so nobody else shall.
        self.loss_is_scaled_for_ga = True
        self.mask_token_id = self._adopt_mask_token() if args.objective == "sbd" else None
        self._totals = {mode: _Totals(self.accelerator.device) for mode in ("train", "eval")}

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """(the micro-batches of one optimizer step with their views, their labels over all ranks).

        The step and the epoch come from the trainer's state, which a resumed run restores.
        """
        batches = list(islice(epoch_iterator, num_batches))
        step = self.state.global_step
        block_size = objective.draw_block_size(
            self.args.seed, step, self.args.min_block_size, self.args.max_block_size
        )
        count = torch.zeros((), dtype=torch.long, device=device)
        for batch in batches:
            batch["view"] = self._view(batch, int(self.state.epoch or 0), block_size)
            batch["block_size"] = block_size
            count += batch["view"].supervised.sum()
        if self.args.world_size > 1:
            # Tensor-parallel ranks hold the same batch.
            count = torch.as_tensor(self.accelerator.gather(count)).sum() // self.get_tp_size()
        return batches, count

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Float[Tensor, ""]:
        """A micro-batch's share of eq. 14: its nats over the labels of the whole optimizer step.

        In evaluation: nats per label of the batch, with the noise of epoch 0 and the largest block.
        """
        if return_outputs:
            raise ValueError("SBDTrainer returns no logits: use evaluate(), not predict()")
        mode = "train" if self.model.training else "eval"
        block_size = inputs.get("block_size", self.args.max_block_size)
        view = inputs["view"] if "view" in inputs else self._view(inputs, 0, block_size)
        supervised = view.supervised
        # Columns that any row supervises: indices are what every supported transformers takes here.
        columns = supervised.any(dim=0).nonzero()[:, 0]
        logits = model(
            input_ids=view.tokens,
            position_ids=view.layout.position,
            attention_mask=attention_mask(self.model, view.layout, view.layout),
            logits_to_keep=columns,
            use_cache=False,
        ).logits[supervised[:, columns]]
        losses = objective.supervised_losses(logits, view)
        self._totals[mode].add(losses, logits.detach(), view, block_size, inputs["labels"])
        nats = losses.ntp_sum + losses.matp_sum
        if not torch.isfinite(nats):
            raise ValueError(
                f"the loss of step {self.state.global_step} is not finite: next-token "
                f"{losses.ntp_sum.item()}, masked-token {losses.matp_sum.item()} nats, "
                f"sample ids {inputs['sample_id'].flatten().tolist()}"
            )
        if num_items_in_batch is None:
            return nats / max(1, logits.shape[0])
        # The count runs over all ranks, and their gradients will be averaged: undo the average.
        num_ranks = self.accelerator.num_processes // self.get_tp_size()
        return nats * num_ranks / torch.as_tensor(num_items_in_batch).clamp(min=1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs `logs` with the means since the last line; a collective call over the ranks."""
        mode = "train" if self.model.training else "eval"
        totals = self._totals[mode]
        totals.values = torch.as_tensor(self.accelerator.reduce(totals.values, "sum"))
        for name, value in totals.means().items():
            self._metrics[mode][name].append(value)
        self._totals[mode] = _Totals(self.accelerator.device)
        super().log(logs, start_time)

    def _view(self, batch: dict[str, Tensor], epoch: int, block_size: int) -> objective.View:
        """What the forward of this batch reads; refuses a batch that has nothing to learn from."""
        tokens, labels = batch["input_ids"], batch["labels"]
        places = batch["position_ids"], batch["document"]
        if not (labels != objective.IGNORE).any():
            raise ValueError(
                f"a batch of step {self.state.global_step} has no labels: all are "
                f"{objective.IGNORE} in samples {batch['sample_id'].flatten().tolist()}"
            )
        if self.mask_token_id is None:
            return objective.clean_view(tokens, labels, *places)
        if (tokens == self.mask_token_id).any():
            raise ValueError(
                f"a batch of step {self.state.global_step} holds the mask token "
                f"{self.mask_token_id} in its text, in one of the samples "
                f"{batch['sample_id'].flatten().tolist()}"
            )
        masked = objective.draw_batch_noise(
            self.args.seed,
            epoch,
            batch["sample_id"].tolist(),
            batch["lengths"].tolist(),
            tokens.shape[1],
        )
        view = objective.noisy_view(
            tokens,
            labels,
            *places,
            masked.to(tokens.device),
            block_size,
            self.mask_token_id,
            self.args.drop_ragged_block,
        )
        return objective.drop_idle_blocks(view)

    def _adopt_mask_token(self) -> int:
        """The mask token, found as everywhere else and written into the checkpoints to come.

        Effects: as those of Model(); the network's generation_config gets a "setblock" entry.
        Raises: ModelError.
        """
        generation: Any = self.model.generation_config  # takes keys of its users
        settings = {**generation.to_dict().get("setblock", {})}
        model = Model(
            self.model, self._tokenizer, mask_token_id=self.args.mask_token_id, settings=settings
        )
        generation.setblock = {
            **settings,
            "mask_token_id": model.mask_token_id,
            "block_size": self.args.max_block_size,
            "trained": True,
        }
        # Else from_pretrained would drop the entry, without a word.
        generation._from_model_config = False
        return model.mask_token_id

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, name):
        """SFTTrainer's dataset with its sample ids, through packing too.

        SFTTrainer's own packing keeps no columns but the tokens and the labels, so its pack_dataset
        is called from here, with the id repeated for each token as one more column to pack.
        """
        dataset = _with_sample_ids(dataset)
        # SFTTrainer goes by the prompt and completion columns alone, and would train on the prompts
        # of a tokenised dataset whose completion_mask says which tokens they are.
        if args.completion_only_loss is None and "completion_mask" in (dataset.column_names or ()):
            self.completion_only_loss = True
        prepared: Any = super()._prepare_dataset(
            dataset, processing_class, args, False, formatting_func, name
        )
        if packing:
            if args.max_length is None:
                raise ValueError("max_length must be a number of tokens when packing, got None")
            prepared = prepared.map(_repeat_sample_id)
            prepared = prepared.select_columns(["input_ids", "labels", "sample_id"])
            prepared = pack_dataset(prepared, args.max_length, args.packing_strategy)
        return prepared

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "sample_id", "seq_lengths"]


@dataclass
class Collator:
    """Rows -> a right-padded batch with the places of its documents.

    Yields input_ids, labels, position_ids and document [batch, length], and sample_id and lengths
    [batch, documents of the fullest row], with length 0 for what a row lacks.
    """

    pad_token_id: int
    multiple: int = 1

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        for name in ("input_ids", "labels", "sample_id"):
            if name not in rows[0]:
                raise ValueError(f"rows need the column {name}, got {', '.join(rows[0])}")
        length = max(len(row["input_ids"]) for row in rows)
        length += -length % self.multiple
        lengths = [row.get("seq_lengths", [len(row["input_ids"])]) for row in rows]
        num_documents = max(map(len, lengths))
        padded_lengths = _pad(lengths, num_documents, 0)
        position, document = objective.document_places(padded_lengths, length)
        return {
            "input_ids": _pad([row["input_ids"] for row in rows], length, self.pad_token_id),
            "labels": _pad([row["labels"] for row in rows], length, objective.IGNORE),
            "position_ids": position,
            "document": document,
            "sample_id": _pad([_sample_ids(row) for row in rows], num_documents, 0),
            "lengths": padded_lengths,
        }


class _Totals:
    """Running sums of what the log reports, on the device, so that no step waits for them."""

    NAMES = (
        *("ntp_nats", "ntp_labels", "ntp_right", "matp_nats", "matp_labels", "matp_right"),
        *("maskable", "block_sizes", "batches"),
    )

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(self.NAMES), device=device)

    def add(
        self,
        losses: objective.Losses,
        logits: Float[Tensor, "_ vocab"],
        view: objective.View,
        block_size: int,
        labels: Int[Tensor, "batch _"],
    ) -> None:
        noisy = (view.layout.block != CLEAN)[view.supervised]
        right = logits.argmax(dim=-1) == view.labels[view.supervised]
        matp_right = (right & noisy).sum()
        sums = (
            *(losses.ntp_sum.detach(), losses.ntp_count, right.sum() - matp_right),
            *(losses.matp_sum.detach(), losses.matp_count, matp_right),
            *((labels != objective.IGNORE).sum(), block_size, 1),
        )
        device = self.values.device
        self.values += torch.stack([torch.as_tensor(value, device=device) for value in sums])

    def means(self) -> dict[str, float]:
        """Name -> mean, of a half only where it had labels."""
        totals = dict(zip(self.NAMES, self.values.tolist(), strict=True))
        means = {}
        for half in ("ntp", "matp"):
            if totals[f"{half}_labels"]:
                means[f"{half}_loss"] = totals[f"{half}_nats"] / totals[f"{half}_labels"]
                means[f"{half}_accuracy"] = totals[f"{half}_right"] / totals[f"{half}_labels"]
        if totals["matp_labels"]:
            means["mask_ratio"] = totals["matp_labels"] / totals["maskable"]
            means["block_size"] = totals["block_sizes"] / totals["batches"]
        return means


def refuse_split_rows(parallelism: ParallelismConfig | None) -> None:
    """Raises: ValueError for parallelism that cuts rows into pieces: our mask needs them whole."""
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "cp_size and sp_size must be 1, got "
            f"cp_size={parallelism.cp_size}, sp_size={parallelism.sp_size}"
        )


def _with_sample_ids(dataset: Any) -> Any:
    """The dataset with a sample_id column: its own, else the row's index."""
    if "sample_id" in (dataset.column_names or ()):
        kind = (dataset.features or {}).get("sample_id")
        if isinstance(kind, Value) and "int" not in kind.dtype:
            raise ValueError(f"sample_id must be a column of integers, got {kind.dtype}")
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.map(lambda _, index: {"sample_id": index}, with_indices=True)
    return dataset.add_column("sample_id", range(len(dataset)))


def _map_datasets(function: Callable[[Any], Any], datasets: Any) -> Any:
    """`function` of one dataset, or of each of a dict of them, or None of None."""
    if datasets is None:
        return None
    if isinstance(datasets, dict):
        return {name: function(dataset) for name, dataset in datasets.items()}
    return function(datasets)


def _repeat_sample_id(row: Mapping[str, Any]) -> dict[str, list[int]]:
    return {"sample_id": [row["sample_id"]] * len(row["input_ids"])}


def _sample_ids(row: dict[str, Any]) -> list[int]:
    """The sample id of each document of a row; a packed row holds them once per token."""
    if "seq_lengths" not in row:
        return [row["sample_id"]]
    if isinstance(row["sample_id"], int):
        raise ValueError("a packed row (with seq_lengths) needs a sample_id for each of its tokens")
    starts = accumulate(row["seq_lengths"][:-1], initial=0)
    return [row["sample_id"][start] for start in starts]


def _pad(rows: list[list[int]], length: int, value: int) -> Int[Tensor, "batch length"]:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])
