"""One training run as the command line asks for it: rows of a file in, a MODEL out."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints, no_type_check

import torch
from accelerate import PartialState
from peft import PeftConfig
from transformers import HfArgumentParser, set_seed

from setblock import adapters
from setblock.answers import regenerate
from setblock.checkpoint import write_settings
from setblock.config import SBDConfig
from setblock.data import SUFFIXES, fingerprint, load_rows, prepare
from setblock.estimate import describe, estimate
from setblock.loading import DTYPES, base_of, lasting, load, place_of
from setblock.model import Model
from setblock.records import new_record, save_record
from setblock.resume import (
    OWN_FOLDER,
    check_settings,
    is_finished,
    kept_lines,
    last_checkpoint,
    read_state,
    write_lines,
)
from setblock.solvers import parse
from setblock.train import SBDTrainer, loss_sum
from setblock.watch import DecodeProbe, SaveOnSignal, prompts_of, stop_at_once

ANSWERS = ("data", "model")
ATTENTIONS = ("sdpa", "flex_attention")
# Fields of SBDConfig that a resumed run may change; by these names or beginnings of names.
FREE = (
    *("output_dir", "max_steps", "num_train_epochs", "run_name", "report_to", "disable_tqdm"),
    *("logging_", "save_", "eval_", "hub_", "push_to_hub", "log_", "dataloader_num_workers"),
    *("do_", "load_best", "metric_for", "greater_is", "ddp_timeout", "logits_chunk_size"),
)


# It checks the types of its values itself, with an error for users: no runtime type check.
@no_type_check
@dataclass
class Run:
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

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Run).items():
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
        if self.decode_every < 0:
            raise ValueError(f"decode_every must be at least 0, got {self.decode_every}")
        if bool(self.decode_every) != (self.decode_data is not None):
            raise ValueError("decode_every and decode_data need each other")
        parse(self.decode_solver)
        if self.method == "full":
            for name in ("lora_rank", "lora_alpha", "lora_dropout"):
                if getattr(self, name) != getattr(Run, name):
                    raise ValueError(
                        f"{name} is for methods lora, qlora and gated, got {getattr(self, name)} "
                        "with full"
                    )
        if self.split != "train" and all(Path(name).suffix in SUFFIXES for name in self.data):
            raise ValueError(f"split is for hub datasets, got {self.split!r} with files alone")


del Run.__no_type_check__  # pyright: ignore[reportAttributeAccessIssue]  # it hides type hints


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


def finetune(run: Run, arguments: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train a model on rows and save it; what was done, as JSON values.

    arguments: fields of SBDConfig as on a command line, such as ["--max-steps", "100"].
    say: takes one line of text about what is going on, on the first rank alone.
    Effects: a signal stops the run after its step, with a checkpoint; while the model answers, at
    once, with watch.Stopped.
    Raises: ValueError for a field that there is none of or a value it can't take, for data that
    can't be read and for an output folder that holds a run already; ModelError for the model. All
    before anything is trained.
    """
    facts = new_record()  # of the code that is running, whatever happens to the files meanwhile
    del facts["results"]
    config = parse_config(run, arguments)
    if config.process_index:  # the first rank speaks for all
        say = _silent
    checkpoint = last_checkpoint(run.output_dir, run.resume, say)
    names = run.split, run.prompt_field, run.completion_field
    rows = load_rows(run.data, *names, run.limit, prompts_only=run.answers == "model")
    settings = {**_settings(run, config), "rows": fingerprint(rows)}
    held_out = load_rows([run.decode_data], *names, run.decode_limit) if run.decode_data else None
    if held_out is not None:
        settings["decode_rows"] = fingerprint(held_out)
    settings_file, log = run.output_dir / OWN_FOLDER / "settings.json", run.output_dir / "log.jsonl"
    state, finished, lines = None, False, []
    if checkpoint is not None:
        settings = check_settings(settings_file, settings)
        state = read_state(checkpoint)
        finished = is_finished(state, config)
        lines = kept_lines(log, state, finished)
    decodings = [line for line in lines if "decode_n" in line]
    if held_out is not None and "prompt" not in held_out.column_names:
        raise ValueError("decode_data needs rows of prompt and completion")
    judged = load_rows([run.eval_data], *names) if run.eval_data else None
    # float32 weights: updates at small rates would be lost in bfloat16; bf16 autocasts. A frozen
    # base needs no more than its own precision.
    frozen = run.method != "full"
    model = load(
        run.model,
        dtype="bfloat16" if frozen and config.bf16 else "float32",
        device=config.device,  # each rank its own
        mask_token_id=run.mask_token_id,
        four_bit=run.method == "qlora",
    )
    if model.adapted:
        run = _as_adapted(run, model)
    if not frozen:
        model.network.requires_grad_(True)  # a folded adapter leaves it frozen
    _check_length(config, model, typed="max_length" in _names(arguments))
    _check_saving(model)
    config.mask_token_id = model.mask_token_id
    if run.attention == "flex_attention":
        if model.device.type == "cpu":
            raise ValueError("attention 'flex_attention' can't train on a CPU; use sdpa")
        model.network.set_attn_implementation(run.attention)
    if held_out is not None:
        held_out = _as_prompts(held_out, model, run, config, "the held-out decoding", say)
    if run.answers == "model":
        prompts = _as_prompts(rows, model, run, config, "the training data", say)
        rows = _own_answers(run, model, prompts, say)
    else:
        rows = prepare(rows, model.tokenizer, run.chat)
    if frozen:
        set_seed(config.seed)  # of the adapter's first values
        own = {**_settings_of(model), "mask_token_id": model.mask_token_id}
        if model.adapted:  # up to here as it decodes: folded, or in layers that can't be trained
            base = base_of(str(place_of(run.model)))
            assert base is not None
            dtype = model.dtype
            model.network = None  # one copy of the base at a time
            bare = load(base, dtype, config.device)
            if bare.mask_token_id != model.mask_token_id:  # the adapter was given another one
                del bare
                bare = load(base, dtype, config.device, model.mask_token_id)
            if run.attention == "flex_attention":
                bare.network.set_attn_implementation(run.attention)
            network: Any = adapters.attach_again(bare.network, place_of(run.model))
        else:
            network = adapters.attach(
                model.network,
                lasting(run.model),
                run.method,
                model.mask_token_id,
                run.lora_rank,
                run.lora_alpha,
                run.lora_dropout,
            )
        model = Model(network, model.tokenizer, model.name, settings=own)
    signals = SaveOnSignal()
    probe = None
    if held_out is not None:
        options = {
            "mode": "sbd",
            "solver": run.decode_solver,
            "block_size": config.max_block_size,
            "max_new_tokens": run.answer_tokens,
        }
        probe = DecodeProbe(model, held_out, run.decode_every, options)
        probe.results += decodings
    try:
        trainer = SBDTrainer(
            model.network,
            config,
            train_dataset=rows,
            eval_dataset=None if judged is None else prepare(judged, model.tokenizer, run.chat),
            processing_class=model.tokenizer,
            callbacks=[signals, *([probe] if probe else [])],
        )
    except RuntimeError as error:  # such as a tracker that is not installed
        raise ValueError(str(error)) from error
    trainer.provenance = {**asdict(run), "output_dir": str(run.output_dir), "rows": len(rows)}
    cost = estimate(trainer)
    say(describe(cost))
    if trainer.is_world_process_zero():
        save_record(settings, settings_file)
        if checkpoint is not None:
            write_lines(log, lines)
    if state is not None and finished:
        say(f"nothing left to train: {checkpoint} is the last step's")
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = state
        if config.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = run.output_dir / Path(state.best_model_checkpoint).name  # it may have been moved
            if not best.is_dir():
                raise ValueError(f"resume: the best model's checkpoint is gone: {best}")
            state.best_model_checkpoint = str(best)
            trainer._load_best_model()
        total, steps = loss_sum(state), state.global_step
        loss = None if total is None else total / steps
        if probe is not None and all(line["step"] != steps for line in decodings):
            state.is_world_process_zero = trainer.is_world_process_zero()  # a file says yes to all
            probe.decode(config, state)
    else:
        done = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        steps, loss = done.global_step, done.metrics.get("train_loss")
    trainer.save_model(str(run.output_dir))
    if trainer.is_world_process_zero():
        trainer.create_model_card()
    if config.push_to_hub and not signals.stopped:
        trainer.push_to_hub()
    summary = {
        **facts,
        "output_dir": str(run.output_dir),
        "method": run.method,
        "rows": len(rows),
        "steps": steps,
        "train_loss": loss,
        "mask_token_id": model.mask_token_id,
        "stopped_by": signals.stopped,
        "estimate": cost,
        "decode": probe.results if probe else decodings,
        "log": trainer.state.log_history,
    }
    if trainer.is_world_process_zero():
        (run.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    trainer.leave()
    return summary


def parse_config(run: Run, arguments: list[str]) -> SBDConfig:
    """The SBDConfig that command-line words stand for."""
    names = _names(arguments)
    for name in sorted(names & {"output_dir", *(field.name for field in fields(Run))}):
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
    if run.mask_token_id is not None:
        words += ["--mask_token_id", str(run.mask_token_id)]
    kind: Any = SBDConfig  # the parser's own annotation takes no class
    parser = _Parser(kind, prog="setblock train", allow_abbrev=False)
    config, unknown = parser.parse_args_into_dataclasses(
        args=[*words, *arguments], return_remaining_strings=True
    )
    if unknown:
        raise ValueError(f"unknown training option {unknown[0]!r}: not a field of SFTConfig")
    probes = run.eval_data is not None or run.decode_every
    # transformers gave the field another name and keeps the old one as an alias.
    recomputing = getattr(config, "activation_checkpointing", config.gradient_checkpointing)
    if run.method == "gated" and recomputing and probes:
        raise ValueError(
            "gradient_checkpointing must be no with a gated adapter and eval_data or decode_every: "
            "peft takes no forward without a backward pass then"
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
    for name in ("chat_template_path", "eos_token"):
        if getattr(config, name, None) is not None:
            raise ValueError(f"{name}: give the model's tokenizer this setting instead")
    return config


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() == "true"


def _names(arguments: list[str]) -> set[str]:
    """The fields that these command-line words set."""
    words = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    return {word.replace("-", "_") for word in words}


def _settings(run: Run, config: SBDConfig) -> dict[str, Any]:
    """All that a resumed run must share with the first one, as JSON values."""
    own = {**asdict(run), "model": lasting(run.model)}
    for name in ("output_dir", "resume", "decode_data", "decode_every", "decode_limit"):
        del own[name]
    theirs = {name: value for name, value in config.to_dict().items() if not name.startswith(FREE)}
    return json.loads(json.dumps({**theirs, **own}, default=str))


def _as_adapted(run: Run, model: Model) -> Run:
    """The run with the settings of the adapter that it goes on training, or folds in.

    Raises: ValueError for an adapter of another method or other settings.
    """
    own = "gated" if model.gated else "lora"
    if (run.method, own) == ("full", "lora"):
        return run
    if run.method != own:
        raise ValueError(
            f"{run.model} is an adapter itself: go on training it with --method {own}, or train on "
            "its base"
        )
    config: Any = PeftConfig.from_pretrained(str(place_of(run.model)))
    trained = config.trainable_token_indices or []
    trained = trained.values() if isinstance(trained, dict) else [trained]
    if not any(model.mask_token_id in tokens for tokens in trained):
        raise ValueError(
            f"{run.model} has no trained embedding of mask token {model.mask_token_id}: train on "
            "its base"
        )
    kept = {name: getattr(config, name) for name in ("lora_alpha", "lora_dropout")}
    kept["lora_rank"] = config.r
    for name, value in kept.items():
        if getattr(run, name) not in (getattr(Run, name), value):
            raise ValueError(f"{name} of {run.model} is {value}, got {getattr(run, name)}")
    return replace(run, **kept)


def _check_saving(model: Model) -> None:
    """Raises: ValueError if transformers would refuse to save this model, hours later."""
    generation: Any = model.network.generation_config
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"{model.name} can't be saved as it is, because of its generation_config.json: {error}"
        ) from error


def merge(model: Model, output_dir: Path, dtype: str) -> None:
    """Writes the model, its adapter folded in if it has one, as one checkpoint.

    Raises: ValueError for a gated adapter.
    """
    if model.gated:
        raise ValueError(
            f"{model.name} is a gated adapter: it acts on masked positions alone, and one set of "
            "weights can't be the base on some positions and something else on others"
        )
    network: Any = model.network
    network.to(DTYPES[dtype]).save_pretrained(output_dir)
    model.tokenizer.save_pretrained(output_dir)
    settings = {**_settings_of(model), "mask_token_id": model.mask_token_id}
    write_settings(output_dir, **settings)


def _check_length(config: SBDConfig, model: Model, typed: bool) -> None:
    if config.max_length is None or config.max_length <= model.context_length:
        return
    if typed:
        raise ValueError(
            f"max_length={config.max_length} is more than {model.name} was made for: at most "
            f"{model.context_length}"
        )
    config.max_length = model.context_length  # trl's default is more than this model can take


def _as_prompts(
    rows: Any, model: Model, run: Run, config: SBDConfig, use: str, say: Callable[[str], None]
) -> Any:
    """Rows with prompts as training will see them, so that they are decoded the same way.

    Rows too long to be answered are left out, and counted aloud.
    """
    rows = prepare(rows, model.tokenizer, run.chat)
    slots = -(-run.answer_tokens // config.max_block_size) * config.max_block_size
    room = model.context_length - slots
    kept = [row for row, prompt in enumerate(prompts_of(model, rows)) if len(prompt) <= room]
    if not kept:
        raise ValueError(
            f"no prompt of {use} leaves room for answer_tokens={run.answer_tokens} in the model's "
            f"context of {model.context_length} tokens"
        )
    if len(kept) < len(rows):
        say(
            f"{len(rows) - len(kept)} of {len(rows)} prompts are left out of {use}: they have more "
            f"than {room} tokens, what answer_tokens={run.answer_tokens} leaves of the context"
        )
    return rows.select(kept)


def _own_answers(run: Run, model: Model, rows: Any, say: Callable[[str], None]) -> Any:
    file = run.output_dir / OWN_FOLDER / "answers.jsonl"
    say(f"answering {len(rows)} prompts with the model itself; {file}")
    every = max(len(rows) // 20, 1)

    def progress(count: int) -> None:
        if count % every == 0:
            say(f"{count} of {len(rows)} answers")

    # The others find all answers in the file.
    with PartialState().main_process_first(), stop_at_once():
        own = regenerate(model, rows, file, run.answer_tokens, run.answer_batch_size, progress)
    tokens = sum(sum(mask) for mask in own["completion_mask"])
    say(f"{len(own)} of {len(rows)} answers are trained on, {tokens:,} tokens")
    return own


def _silent(line: str) -> None:
    pass


def _settings_of(model: Model) -> dict[str, Any]:
    return {"trained": model.trained, **model.defaults}
