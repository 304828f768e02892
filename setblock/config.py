"""The settings of set block training: `SBDConfig(trl.SFTConfig)`."""

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import no_type_check

import torch
from accelerate.utils import DynamoBackend

# trl fills its namespace lazily, which hides these names from type checkers.
from trl import SFTConfig  # pyright: ignore[reportPrivateImportUsage]

from setblock.masks import MOST_SLOTS

OBJECTIVES = ("sbd", "ntp")
IDLE_BLOCKS = ("drop", "keep")


def multiplies_bfloat16() -> bool:
    """Whether this CPU does; where it only imitates that, a step takes twenty times as long."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


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
    first_slot_loss: bool = field(
        default=True,
        metadata={
            "help": "no: the first slot of a block has no masked-token loss. For adapters that "
            "only draft: verified decoding has the token of that slot from the clean half."
        },
    )
    end_fill: int | None = field(
        default=None,
        metadata={
            "help": "End tokens put behind each row that ends in one, and in the noisy copy behind "
            "each turn, so that the model sees, as while decoding, blocks that reach behind the "
            "end. Default: max_block_size - 1."
        },
    )
    full_mask_share: float = field(
        default=0.0,
        metadata={"help": "Share of the documents that are masked throughout. The paper's is 0."},
    )
    suffix_mask_share: float = field(
        default=0.0,
        metadata={
            "help": "Share of the documents each of whose blocks is masked from a random position "
            "to its end, as decoding from left to right meets it. The paper's is 0."
        },
    )
    matp_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of the masked-token loss beside the next-token loss."},
    )
    self_distill: float = field(
        default=0.0,
        metadata={
            "help": "0 to 1: how far masked positions learn the next-token distribution that the "
            "clean half of the same forward has there, instead of the text's token alone."
        },
    )
    idle_blocks: str = field(
        default="drop",
        metadata={
            "help": "Noisy blocks without a mask, on which no loss depends. drop: they are not "
            "computed. keep: they are, for shapes that depend on the row length alone (see "
            "pad_to_multiple_of) and a BlockMask cached by row length and block size.",
            "choices": list(IDLE_BLOCKS),
        },
    )
    max_minutes: float | None = field(
        default=None,
        metadata={
            "help": "This call trains no longer; its learning rate is by then where max_steps, or "
            "the epochs, would have it. Default: no limit."
        },
    )
    logits_chunk_size: int = field(
        default=1024,
        metadata={"help": "Labels whose logits are in memory at a time."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "Every trained weight has a gradient in each step; no search needed."},
    )
    mask_token_id: int | None = field(
        default=None,
        metadata={
            "help": "Id of the mask token. Default: the one that setblock.model.Model finds."
        },
    )

    def __post_init__(self) -> None:
        on_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.bf16 is None and on_cpu and not multiplies_bfloat16():
            self.bf16 = False  # trl's default is yes, on a CPU too
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {OBJECTIVES}, got {self.objective!r}")
        if self.idle_blocks not in IDLE_BLOCKS:
            raise ValueError(f"idle_blocks must be one of {IDLE_BLOCKS}, got {self.idle_blocks!r}")
        if self.idle_blocks == "keep" and self.objective == "ntp":
            raise ValueError("idle_blocks 'keep' is for objective 'sbd', got 'ntp', which has none")
        whole = ("min_block_size", "max_block_size", "end_fill", "mask_token_id")
        for name in (*whole, "full_mask_share", "suffix_mask_share", "self_distill", "matp_weight"):
            kind, words = (Integral, "a whole number") if name in whole else (Real, "a number")
            value = getattr(self, name)
            if value is None and name in ("end_fill", "mask_token_id"):
                continue
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{name} must be {words}, got {value!r}")
        for name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(
                "max_steps must be at least 1, or -1 to go by num_train_epochs, got "
                f"{self.max_steps}"
            )
        if self.max_steps == -1 and not self.num_train_epochs > 0:
            raise ValueError(
                f"num_train_epochs must be above 0, got {self.num_train_epochs} (or give max_steps)"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}")
        if not 1 <= self.min_block_size <= self.max_block_size:
            raise ValueError(
                "block sizes need 1 <= min_block_size <= max_block_size, got "
                f"min_block_size={self.min_block_size}, max_block_size={self.max_block_size}"
            )
        if self.max_block_size > MOST_SLOTS:
            raise ValueError(
                f"max_block_size must be at most {MOST_SLOTS}, got {self.max_block_size}"
            )
        for name in ("full_mask_share", "suffix_mask_share", "self_distill"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")
        if self.full_mask_share + self.suffix_mask_share > 1:
            raise ValueError(
                "full_mask_share and suffix_mask_share must sum to at most 1, got "
                f"{self.full_mask_share} and {self.suffix_mask_share}"
            )
        if not self.first_slot_loss and self.min_block_size < 2:
            raise ValueError("first_slot_loss no needs min_block_size of at least 2, got 1")
        backends = [one.value.lower() for one in DynamoBackend if one is not DynamoBackend.NO]
        if self.torch_compile_backend not in (None, *backends):
            raise ValueError(
                f"torch_compile_backend must be one of {', '.join(backends)}, got "
                f"{self.torch_compile_backend!r}"
            )
        modes = torch._inductor.list_mode_options()
        if self.torch_compile_mode not in (None, *modes):
            raise ValueError(
                f"torch_compile_mode must be one of {', '.join(modes)}, got "
                f"{self.torch_compile_mode!r}"
            )
        if not (math.isfinite(self.matp_weight) and self.matp_weight > 0):
            raise ValueError(f"matp_weight must be a number above 0, got {self.matp_weight}")
        if self.end_fill is not None and self.end_fill < 0:
            raise ValueError(f"end_fill must be at least 0, got {self.end_fill}")
        if self.max_minutes is not None and not 0 < self.max_minutes < math.inf:
            raise ValueError(f"max_minutes must be a number above 0, got {self.max_minutes}")
        if self.logits_chunk_size < 1:
            raise ValueError(f"logits_chunk_size must be at least 1, got {self.logits_chunk_size}")
        if self.mask_token_id is not None and self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must be at least 0, got {self.mask_token_id}")
        if self.packing and self.packing_strategy != "bfd":
            raise ValueError(
                "packing_strategy must be 'bfd', which keeps documents whole, got "
                f"{self.packing_strategy!r}"
            )
        if self.learning_rate < 0:
            raise ValueError(f"learning_rate must be at least 0, got {self.learning_rate}")
        if self.router_aux_loss_coef is None:  # to trl what a mixture of experts says itself
            self.router_aux_loss_coef = 0.0
        # Fields of SFTConfig whose other values this trainer's loss or collator would ignore.
        for name, allowed in (
            ("truncation_mode", "keep_start"),
            ("padding_free", False),
            ("loss_type", "nll"),
            ("label_smoothing_factor", 0.0),
            ("average_tokens_across_devices", True),
            ("router_aux_loss_coef", 0.0),
        ):
            if getattr(self, name) != allowed:
                raise ValueError(f"{name} must be {allowed!r}, got {getattr(self, name)!r}")

    @property
    def end_tokens(self) -> int:
        """End tokens behind each that ends a row or a turn."""
        return self.max_block_size - 1 if self.end_fill is None else self.end_fill


# The mark has done its work; left there it would hide the fields from HfArgumentParser.
del SBDConfig.__no_type_check__  # pyright: ignore[reportAttributeAccessIssue]
