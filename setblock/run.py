"""What one training run is asked for: the options of `setblock train`, and fields of SBDConfig."""

import json
import os
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints, no_type_check

import torch
from transformers import HfArgumentParser
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from setblock import adapters
from setblock.config import SBDConfig
from setblock.names import lasting
from setblock.resume import OWN_FOLDER
from setblock.rows import SUFFIXES
from setblock.solvers import parse

ANSWERS = ("data", "model")
OWN = "own:"  # data of this name are prompts that the model makes up
REFUSED = ("chat_template_path", "eos_token")  # fields of SFTConfig that are the tokenizer's
ADAPTER_RATE = "5e-4"  # trl's default, 2e-5, is one for all weights
ATTENTIONS = ("sdpa", "flex_attention")
# Fields of SBDConfig that a resumed run may change; by these names or beginnings of names.
FREE = (
    *(
        "output_dir",
        "max_steps",
        "max_minutes",
        "num_train_epochs",
        "run_name",
        "report_to",
        "disable_tqdm",
    ),
    *("logging_", "save_", "eval_", "hub_", "push_to_hub", "log_", "dataloader_num_workers"),
    *("do_", "load_best", "metric_for", "greater_is", "ddp_timeout", "logits_chunk_size"),
)


# It checks the types of its values itself, with an error for users: no runtime type check.
@no_type_check
@dataclass
class TrainingRun:
    """What `setblock train` does beside the fields of SBDConfig; its options by the same names.

    Raises: ValueError naming the field.
    """

    model: str
    data: list[str]
    output_dir: Path
    method: str = "full"
    split: str = "train"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    chat: bool = False
    limit: int | None = None
    mask_token_id: int | None = None
    lora_rank: int = 32
    lora_alpha: int = 64
    lora_dropout: float = 0.0
    chain_width: int = 0
    attention: str = "sdpa"
    answers: str = "data"
    answer_tokens: int = 256
    answer_batch_size: int = 16
    eval_data: str | None = None
    decode_data: str | None = None
    decode_every: int = 0
    decode_limit: int = 32
    decode_solver: str = "entropy:0.1"
    resume: bool = False

    @property
    def own_prompts(self) -> int:
        """How many prompts the model shall make up."""
        return sum(int(name.removeprefix(OWN)) for name in self.data if name.startswith(OWN))

    @property
    def prompts_file(self) -> Path:
        """Where they are."""
        return self.output_dir / OWN_FOLDER / "prompts.jsonl"

    @property
    def files(self) -> list[str]:
        """`data`, the model's own prompts by their file."""
        return [str(self.prompts_file) if n.startswith(OWN) else n for n in self.data]

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainingRun).items():
            if not _is_a(getattr(self, name), kind):
                wanted = str(kind) if get_args(kind) else kind.__name__
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        choices = {"method": adapters.METHODS, "answers": ANSWERS, "attention": ATTENTIONS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {got!r}")
        for name in (
            "lora_rank",
            "lora_alpha",
            "answer_tokens",
            "answer_batch_size",
            "decode_limit",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must lie in 0..1, got {self.lora_dropout}")
        if self.chain_width < 0:
            raise ValueError(f"chain_width must be at least 0, got {self.chain_width}")
        if self.chain_width and self.method != "gated":
            raise ValueError(
                f"chain_width is for method gated, got {self.chain_width} with {self.method}"
            )
        if self.decode_every < 0:
            raise ValueError(f"decode_every must be at least 0, got {self.decode_every}")
        if bool(self.decode_every) != (self.decode_data is not None):
            raise ValueError("decode_every and decode_data need each other")
        parse(self.decode_solver)
        if self.method == "full":
            for name in ("lora_rank", "lora_alpha", "lora_dropout"):
                if getattr(self, name) != getattr(TrainingRun, name):
                    raise ValueError(
                        f"{name} is for methods lora, qlora and gated, got {getattr(self, name)} "
                        "with full"
                    )
        own = [name for name in self.data if name.startswith(OWN)]
        for name in own:
            count = name.removeprefix(OWN)
            if not count.isdecimal() or int(count) < 1:
                raise ValueError(f"data {name!r} must be {OWN}COUNT, such as {OWN}2000")
        if len(own) > 1:
            raise ValueError(f"data {own[1]!r}: {own[0]!r} is there already")
        if own and not (self.chat and self.answers == "model"):
            raise ValueError(
                f"data {own[0]!r} are users' turns that the model makes up, for it to answer: "
                "give chat and answers 'model' as well"
            )
        for name in ("eval_data", "decode_data"):
            if str(getattr(self, name)).startswith(OWN):
                raise ValueError(f"{name} can't be {OWN}COUNT, which is for data alone")
        if self.split != "train" and all(Path(name).suffix in SUFFIXES for name in self.files):
            raise ValueError(f"split is for hub datasets, got {self.split!r} with files alone")


del TrainingRun.__no_type_check__  # pyright: ignore[reportAttributeAccessIssue]  # it hides type hints


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value read from a file has this type; true and 1 are two types, 1 and 1.0 one."""
    if isinstance(kind, UnionType):
        return any(_is_a(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_a(one, get_args(kind)[0]) for one in value)
    if kind is float and type(value) is int:
        return True
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_config(run: TrainingRun, arguments: list[str]) -> SBDConfig:
    """The SBDConfig that command-line words stand for."""
    names = names_of(arguments)
    for name in sorted(names & {"output_dir", *(field.name for field in fields(TrainingRun))}):
        raise ValueError(f"--{name}: write it --{name.replace('_', '-')}, with hyphens")
    words = ["--output_dir", str(run.output_dir), "--report_to", "none"]
    if not torch.cuda.is_available():
        words += ["--use_cpu"]  # else trl refuses its own default, bf16
    # It buys memory, which a CPU run has, and a gated adapter's clean half needs none. FSDP brings
    # its own, by accelerate's configuration, and refuses two.
    spare = run.method == "gated" or not torch.cuda.is_available()
    sharded = _is_true("ACCELERATE_USE_FSDP")
    if sharded and run.method == "gated" and _is_true("FSDP_ACTIVATION_CHECKPOINTING"):
        raise ValueError(
            "a gated adapter does not know its tokens again when FSDP recomputes a layer: set "
            "fsdp_activation_checkpointing to false in accelerate's configuration"
        )
    typed = any(name.endswith("_checkpointing") for name in names)
    if not typed and (spare or sharded):
        words += ["--gradient_checkpointing", "no"]
    if run.method != "full" and "learning_rate" not in names:
        words += ["--learning_rate", ADAPTER_RATE]
    if run.mask_token_id is not None:
        words += ["--mask_token_id", str(run.mask_token_id)]
    kind: Any = SBDConfig  # the parser's own annotation takes no class
    parser = _Parser(kind, prog="setblock train", allow_abbrev=False)
    config, unknown = parser.parse_args_into_dataclasses(
        args=[*words, *arguments], return_remaining_strings=True
    )
    if unknown:
        known = {field.name for kind in (TrainingRun, SBDConfig) for field in fields(kind)}
        known = known - {*REFUSED, "resume_from_checkpoint"} | {"model", "config", "json"}
        asked = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
        near = [f"--{name.replace('_', '-')}" for name in get_close_matches(asked, known)]
        raise ValueError(
            f"unknown training option {unknown[0]!r}, and no field of SFTConfig"
            + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    probes = run.eval_data is not None or run.decode_every
    # transformers gave the field another name and keeps the old one as an alias.
    recomputing = getattr(config, "activation_checkpointing", config.gradient_checkpointing)
    if run.method == "gated" and recomputing and probes:
        raise ValueError(
            "gradient_checkpointing must be no with a gated adapter and eval_data or decode_every: "
            "peft takes no forward without a backward pass then"
        )
    if config.n_gpu > 1:
        raise ValueError(
            f"one process sees {config.n_gpu} GPUs, and training takes one a process: set "
            f"CUDA_VISIBLE_DEVICES=0, or start {config.n_gpu} of them with torchrun or accelerate "
            "launch"
        )
    if config.resume_from_checkpoint is not None:
        raise ValueError("resume_from_checkpoint: use --resume, which takes the last checkpoint")
    if config.activation_offloading and config.use_cpu:
        raise ValueError("activation_offloading needs a GPU")
    if (run.eval_data is None) != (config.eval_strategy == "no"):
        raise ValueError(
            "eval_data and eval_strategy (steps or epoch) need each other, got "
            f"eval_data={run.eval_data!r}, eval_strategy={str(config.eval_strategy.value)!r}"
        )
    get_reporting_integration_callbacks(config.report_to)  # refuses what it does not know
    for name in REFUSED:
        if getattr(config, name, None) is not None:
            raise ValueError(f"{name}: give the model's tokenizer this setting instead")
    return config


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() == "true"


def names_of(arguments: list[str]) -> set[str]:
    """The fields that these command-line words set."""
    words = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    return {word.replace("-", "_") for word in words}


def settings_of_run(run: TrainingRun, config: SBDConfig) -> dict[str, Any]:
    """All that a resumed run must share with the first one, as JSON values."""
    own = {**asdict(run), "model": lasting(run.model)}
    own["processes"] = config.world_size
    for name in ("output_dir", "resume", "decode_data", "decode_every", "decode_limit"):
        del own[name]
    theirs = {name: value for name, value in config.to_dict().items() if not name.startswith(FREE)}
    return json.loads(json.dumps({**theirs, **own}, default=str))
