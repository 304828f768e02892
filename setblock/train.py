"""Set block training on top of trl: `SBDTrainer(trl.SFTTrainer)`.

Data, chat templates, prompt masking, optimizers, checkpoints and distribution are trl's and
transformers'. What is ours: documents keep their sample id, so that their noise can be keyed by it;
an optimizer step draws its block size and its noise before its first forward and counts the labels
of all its micro-batches and ranks; the loss is eq. 14 of arXiv:2509.04185 (setblock.objective).
"""

import copy
import gc
import json
from collections.abc import Callable, Iterator, Sized
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DynamoBackend, is_peft_model
from datasets import Dataset, IterableDataset
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler

# trl fills its namespace lazily, which hides these names from type checkers.
from trl import SFTTrainer, pack_dataset  # pyright: ignore[reportPrivateImportUsage]

from setblock import kernels, objective
from setblock.adapters import chain_of, is_gated
from setblock.architectures import context_of
from setblock.batches import (
    Collator,
    cut,
    fill_behind_end,
    map_datasets,
    refuse_mask_token,
    repeat_sample_id,
    sliced,
    with_sample_ids,
)
from setblock.card import card
from setblock.checkpoint import write_settings
from setblock.config import SBDConfig
from setblock.masks import CLEAN
from setblock.model import Model, ends_of
from setblock.order import ByLength, refuse_later_passes
from setblock.timelimit import TimeLimit
from setblock.totals import Totals
from setblock.views import label_scores

# Fields for the model card: ours, and those of the optimizer and the data.
OPTIONS = (
    *("objective", "min_block_size", "max_block_size", "drop_ragged_block", "end_fill"),
    "first_slot_loss",
    *("full_mask_share", "suffix_mask_share", "matp_weight", "self_distill", "mask_token_id"),
    *("idle_blocks", "seed", "max_length", "packing", "bf16"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)

# By this name a checkpoint's trainer_state.json holds what is ours.
KEPT = "setblock"


def loss_sum(state: TrainerState) -> float | None:
    """The losses of all steps up to a checkpoint, None where its version did not keep it."""
    if not state.global_step:
        return 0.0
    kept: Any = state.stateful_callbacks  # a dict, whatever its annotation says
    return kept.get(KEPT, {}).get("loss_sum")


class _Clock(TrainerCallback):
    """Stops the clock of tokens per second behind each optimizer step; begins the sum of losses;
    counts the passes over the data.
    """

    def __init__(self, trainer: "SBDTrainer") -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._loss_sum = loss_sum(state)
        self.trainer._loss.zero_()
        self.trainer._pass = -1

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer._pass += 1
        if (order := self.trainer._by_length) is not None:
            order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._totals["train"].stop()


class SBDTrainer(SFTTrainer):
    """`trl.SFTTrainer` with the set block objective.

    Takes any text dataset that SFTTrainer takes: text, prompt-completion, conversations, or
    tokenised (`input_ids` with `labels` or `completion_mask`). Prompt tokens have no loss in either
    half. A `sample_id` column of integers keys the noise; without one the row's index does. Logs
    ntp_loss and matp_loss (nats per label), ntp_accuracy and matp_accuracy, matp_text_loss and
    matp_text_accuracy (without the end tokens that fill up a text's last block), mask_ratio (masked
    share of the labelled positions), with self_distill distill_loss (nats of divergence per taught
    label: matp_loss stays that against the text), block_size and tokens_per_second (of the clean
    text), and writes each line of the log, with the masked accuracy by offset in the block and by
    the document's mask rate, to log.jsonl in the output folder.
    A network with a gated adapter (setblock.adapters) learns from the masked-token loss alone: its
    clean half is the frozen base. A chain beside it (setblock.chain) learns from the masked tokens
    too, changes none of the adapter's gradients but where their norm is clipped, counts in the
    loss, and logs chain_loss and chain_accuracy.
    Raises: ValueError for a batch without labels or with mask tokens in its text, and for a loss
    that is not finite, naming the step.
    """

    args: SBDConfig
    model: Any

    def __init__(
        self,
        model: Any,
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
        limits = [] if args.max_minutes is None else [TimeLimit(args.max_minutes)]
        # Here, since trl prepares the data in __init__; a name has none yet.
        self._generation = getattr(model, "generation_config", None)
        super().__init__(
            model,
            args,
            train_dataset=with_sample_ids(train_dataset),
            eval_dataset=map_datasets(with_sample_ids, eval_dataset),
            processing_class=processing_class,
            callbacks=[_Clock(self), *limits, *(callbacks or [])],
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            formatting_func=formatting_func,
        )
        refuse_split_rows(self.accelerator.parallelism_config)
        # Of a whole network kernels would be made anew in each step, for as many labels as it has,
        # and accelerate's way to compile its layers alone does nothing in mixed precision.
        dynamo: Any = self.accelerator.state.dynamo_plugin
        dynamo.backend = DynamoBackend.NO
        if args.torch_compile and self.model.config._attn_implementation == "flex_attention":
            raise ValueError(
                "torch_compile must be no with flex_attention, which has kernels of its own: with "
                "its masks those of a layer would be made anew in each step"
            )
        recomputing = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
        if args.torch_compile and is_gated(self.model) and (args.self_distill or recomputing):
            raise ValueError(
                "torch_compile must be no with a gated adapter and self_distill above 0 or "
                "gradient_checkpointing: peft looks for noisy tokens in each layer then, which is "
                "no part of a kernel"
            )
        # trl puts the adapters of a quantised base into bfloat16, where small updates are lost, and
        # a resumed run would not.
        for weight in self.model.parameters():
            if weight.requires_grad and is_peft_model(self.model):
                weight.data = weight.data.float()
        if self._is_vision_dataset:
            raise ValueError("train_dataset holds images; SBDTrainer takes text only")
        if self.model.config.get_text_config() is not self.model.config:
            raise ValueError(
                f"model is a multimodal {self.model.config.model_type}: train its text part, the "
                "network of setblock.load(..., pack=False)"
            )
        context = context_of(self.model.config)
        shortened = context < self.model.config.max_position_embeddings
        if shortened and (args.max_length is None or args.max_length > context):
            raise ValueError(
                f"max_length must be at most {context}, beyond which the model's longrope "
                f"embeddings change, got {args.max_length}"
            )
        self.gated = is_gated(self.model)
        if self.gated and args.objective == "ntp":
            raise ValueError(
                "objective must be 'sbd' with a gated adapter: it never acts on clean tokens"
            )
        pad_token_id, multiple = self._tokenizer.pad_token_id, args.pad_to_multiple_of or 1
        assert isinstance(pad_token_id, int)
        assert isinstance(multiple, int)
        # trl takes no collator of ours beside packing, so it comes after __init__.
        self.data_collator = Collator(pad_token_id, multiple)
        # compute_loss divides by the label counts of the whole step, so nobody else shall.
        self.loss_is_scaled_for_ga = True
        self.mask_token_id = self._adopt_mask_token() if args.objective == "sbd" else None
        if self.mask_token_id is None:
            generation: Any = self.model.generation_config  # takes keys of its users
            settings = generation.to_dict().get("setblock", {})
            generation.setblock = {**settings, "trained": False, "mode": "ntp"}
            generation._from_model_config = False  # as in _adopt_mask_token
        if self.mask_token_id is not None:
            refuse_mask_token(self.train_dataset, self.mask_token_id)
        self._last_means: dict[str, float] = {}
        # Of the steps so far, None if unknown; and of those since it was last brought up to date.
        self._loss_sum: float | None = 0.0
        self._by_length: ByLength | None = None
        self._pass = 0  # over the data, since training began
        self._loss = torch.zeros((), device=self.accelerator.device)
        self.provenance: dict[str, Any] = {}  # for the model card: model, data, method
        self._totals = {
            mode: Totals(self.accelerator.device, args.max_block_size) for mode in ("train", "eval")
        }

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = self._by_length = ByLength(sampler, seed)
        return sampler

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """trl's own; with torch_compile in kernels of one layer for all layers like it.

        Raises: ValueError for a stream that is to be gone on with behind its first pass.
        """
        resume = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        if resume and not isinstance(self.train_dataset, Sized):
            refuse_later_passes(str(self.args.output_dir), resume)
        if not self.args.torch_compile:
            return super().train(*args, **kwargs)
        backend, mode = str(self.args.torch_compile_backend), self.args.torch_compile_mode
        with kernels.training(self.model, backend, mode):
            return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """(the micro-batches of one optimizer step with their views, their labels over all ranks).

        The step and the epoch come from the trainer's state, which a resumed run restores; of a
        stream that counts shares of max_steps, and is resumed in its first pass alone.
        """
        self._totals["train"].start()
        batches = list(islice(epoch_iterator, num_batches))
        step = self.state.global_step
        block_size = objective.draw_block_size(
            self.args.seed, step, self.args.min_block_size, self.args.max_block_size
        )
        count = torch.zeros((), dtype=torch.long, device=device)
        epoch = int(self.state.epoch or 0) if isinstance(self.train_dataset, Sized) else self._pass
        for batch in batches:
            batch["view"] = self._view(batch, epoch, block_size)
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
        share = self.args.self_distill
        teachers = view.teachers(self._ends) if share else None
        scores = label_scores(view, teachers, self.model, model, self.args.logits_chunk_size)
        losses = objective.losses(scores.nats, view)
        noisy = (view.layout.block != CLEAN)[view.supervised]
        taught = torch.zeros_like(noisy)
        nats = losses.ntp_sum + self.args.matp_weight * losses.matp_sum
        if teachers is not None:
            taught = (teachers >= 0)[view.supervised]
            change = share * (scores.divergence - scores.nats)[taught]
            nats = nats + self.args.matp_weight * change.sum()
        fills = view.fills(self._ends)[view.supervised]
        self._totals[mode].add(scores, view, block_size, inputs, taught, fills)
        nats = nats + scores.chain_nats.sum()  # of weights of its own
        if not torch.isfinite(nats):
            raise ValueError(
                f"the loss of step {self.state.global_step + 1} is not finite: next-token "
                f"{losses.ntp_sum.item()}, masked-token {losses.matp_sum.item()} nats, "
                f"sample ids {inputs['sample_id'][inputs['lengths'] > 0].tolist()}"
            )
        if num_items_in_batch is None:
            return nats / max(1, noisy.numel())
        # The count runs over all ranks, and their gradients will be averaged: undo the average.
        num_ranks = self.accelerator.num_processes // self.get_tp_size()
        return nats * num_ranks / torch.as_tensor(num_items_in_batch).clamp(min=1)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a micro-batch, whose gradients it adds."""
        loss = super().training_step(*args, **kwargs)
        self._loss += loss
        return loss

    def _keep_loss(self) -> None:
        """Brings the sum of losses up to date; a collective call over the ranks."""
        new = torch.as_tensor(self.accelerator.reduce(self._loss, "mean")).item()
        self._loss = torch.zeros_like(self._loss)
        if self._loss_sum is not None:
            self._loss_sum += new

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Effects: beside trl's, the sum of losses is in the checkpoint's trainer_state.json."""
        self._keep_loss()
        kept: Any = self.state.stateful_callbacks
        kept[KEPT] = {"loss_sum": self._loss_sum}
        super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs `logs` with the means since the last line; a collective call over the ranks.

        Its train_loss is the mean over all steps of the run, those before a stop too; transformers
        knows only those since.
        """
        self._keep_loss()
        if "train_runtime" in logs:
            self.model.train()  # an evaluation may have come last
        if logs.pop("train_loss", None) is not None and self._loss_sum is not None:
            logs["train_loss"] = self._loss_sum / self.state.global_step
        mode = "train" if self.model.training else "eval"
        totals = self._totals[mode]
        totals.values = torch.as_tensor(self.accelerator.reduce(totals.values, "sum"))
        means = totals.means()
        for name, value in means.items():
            self._metrics[mode][name].append(value)
        if self.is_world_process_zero():
            prefix = "" if mode == "train" else "eval_"
            line = {"step": self.state.global_step, "epoch": self.state.epoch, **logs}
            more = {**means, **totals.breakdown()}
            line |= {prefix + name: value for name, value in more.items()}
            folder = Path(str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if mode == "train" and means:
            self._last_means = means
        self._totals[mode] = Totals(self.accelerator.device, self.args.max_block_size)
        super().log(logs, start_time)

    def forget(self) -> None:
        """Drops what the next line of the log would report."""
        self._totals["train"] = Totals(self.accelerator.device, self.args.max_block_size)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Effects: README.md in the output folder says what was trained how, and to what losses.

        In place of trl's, whose example of use needs a base from the hub; on the first rank alone.
        """
        if not self.is_world_process_zero():
            return
        means = self._last_means | self._totals["train"].means()
        own = {f.name: getattr(self.args, f.name) for f in fields(SBDConfig) if f.name in OPTIONS}
        folder = Path(str(self.args.output_dir))
        adapted = bool(is_peft_model(self.model))
        base = self.provenance.get("model", self.model.config._name_or_path)
        base = str(self.model.active_peft_config.base_model_name_or_path if adapted else base)
        text = card(
            self.hub_model_id or folder.resolve().name,
            "gated" if self.gated else self.args.objective,
            base if base.count("/") == 1 and not Path(base).exists() else None,
            adapted,
            self.provenance,
            own,
            self.state.global_step,
            {name: value for name, value in means.items() if name.endswith(("loss", "accuracy"))},
        )
        (folder / "README.md").write_text(text, encoding="utf-8")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Says nothing of a head that is the embedding, which no checkpoint holds twice."""
        tied = set(self.model.all_tied_weights_keys)
        if load_result.unexpected_keys or not set(load_result.missing_keys) <= tied:
            super()._issue_warnings_after_load(load_result)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        generation: Any = self.model.generation_config
        settings = generation.to_dict().get("setblock")
        if is_peft_model(self.model) and settings and self.args.should_save:
            # peft saves the adapter alone; without this nobody could tell how to decode with it.
            write_settings(output_dir or str(self.args.output_dir), **settings)

    def leave(self) -> None:
        """Leaves the process group; the trainer can't be used afterwards.

        The wrapped network goes first: gloo's threads deadlock or abort now and then when the group
        dies with it, at the end of the interpreter or in a destructor that holds Python's lock.
        """
        if self.args.world_size > 1:
            self.accelerator.wait_for_everyone()
            self.model_wrapped = self.model = None
            self.accelerator.free_memory()
            gc.collect()
        self.accelerator.end_training()

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
            objective.Noise(self.args.full_mask_share, self.args.suffix_mask_share),
            block_size,
        )
        view = objective.noisy_view(
            tokens,
            labels,
            *places,
            masked.to(tokens.device),
            block_size,
            self.mask_token_id,
            self.args.drop_ragged_block,
            self.args.first_slot_loss,
            self._ends,
            self.args.end_tokens,
        )
        if self.args.idle_blocks == "drop":
            view = objective.drop_idle_blocks(view)
        if self.gated:
            return view.masked_only()
        return view.without_next(self._ends)

    @property
    def _ends(self) -> frozenset[int]:
        """The tokens whose copies may fill up a text's last block."""
        return ends_of(self._generation, self._tokenizer)

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
        for name in ("acceptance", "slide", "verified"):  # of other weights
            settings.pop(name, None)
        generation.setblock = {
            **settings,
            "mode": "verified" if self.gated else "sbd",
            "mask_token_id": model.mask_token_id,
            "block_size": self.args.max_block_size,
            "trained": True,
        }
        if (chain := chain_of(self.model)) is not None:
            generation.setblock["chain_width"] = chain.width
        # Else from_pretrained would drop the entry, without a word.
        generation._from_model_config = False
        return model.mask_token_id

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, name):
        """SFTTrainer's dataset with its sample ids, through packing too.

        SFTTrainer's own packing keeps no columns but the tokens and the labels, so its pack_dataset
        is called from here, with the id repeated for each token as one more column to pack.
        """
        columns = set(dataset.column_names or next(iter(dataset), ())) - {"sample_id"}  # our own
        texts = {args.dataset_text_field}
        forms = ({"input_ids"}, {"prompt", "completion"}, {"messages"}, texts)
        if columns and formatting_func is None and not any(form <= columns for form in forms):
            wanted = ", or ".join(" and ".join(sorted(form, reverse=True)) for form in forms)
            raise ValueError(
                f"the {name} dataset needs columns {wanted}; it has {', '.join(sorted(columns))}"
            )
        dataset = with_sample_ids(dataset)
        # SFTTrainer goes by the prompt and completion columns alone, and would train on the prompts
        # of a tokenised dataset whose completion_mask says which tokens they are.
        if args.completion_only_loss is None and "completion_mask" in (dataset.column_names or ()):
            self.completion_only_loss = True
        whole = copy.copy(args)
        whole.max_length = None
        prepared: Any = super()._prepare_dataset(
            dataset, processing_class, whole, False, formatting_func, name
        )
        tokenised = "labels" in (prepared.column_names or ())
        if tokenised and args.max_length is not None:
            prepared = cut(prepared, args.max_length, name)
        if tokenised and args.objective == "sbd":
            fn_kwargs = {"ends": sorted(self._ends), "count": args.end_tokens}
            prepared = prepared.map(fill_behind_end, fn_kwargs=fn_kwargs)
            if args.max_length is not None:  # of the fill alone, by now
                prepared = prepared.map(sliced, fn_kwargs={"length": args.max_length})
        if packing:
            if args.max_length is None:
                raise ValueError("max_length must be a number of tokens when packing, got None")
            prepared = prepared.map(repeat_sample_id)
            prepared = prepared.select_columns(["input_ids", "labels", "sample_id"])
            prepared = pack_dataset(prepared, args.max_length, args.packing_strategy)
        return prepared

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "sample_id", "seq_lengths"]


def refuse_split_rows(parallelism: ParallelismConfig | None) -> None:
    """Raises: ValueError for parallelism that cuts rows into pieces: our mask needs them whole."""
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "cp_size and sp_size must be 1, got "
            f"cp_size={parallelism.cp_size}, sp_size={parallelism.sp_size}"
        )
