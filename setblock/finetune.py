"""One training run as the command line asks for it: rows of a file in, a MODEL out."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import PrinterCallback, ProgressCallback, TrainerState, set_seed

from setblock import adapters
from setblock.checkpoint import base_of, write_settings
from setblock.config import SBDConfig
from setblock.corpus import (
    as_prompts,
    check_beside_own,
    make_up_prompts,
    own_answers,
    room_of,
    training_rows,
)
from setblock.data import prepare
from setblock.estimate import describe, estimate
from setblock.files import let_read, lock, whole_or_empty
from setblock.loading import DTYPES, load, place_of
from setblock.model import Model
from setblock.names import lasting
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
from setblock.rows import fingerprint, load_rows, talks, with_answers
from setblock.run import TrainingRun, names_of, parse_config, settings_of_run
from setblock.train import SBDTrainer, loss_sum
from setblock.trial import check_head
from setblock.watch import Bar, DecodeProbe, LogLines, SaveOnSignal


def finetune(
    run: TrainingRun, arguments: list[str], say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train a model on rows and save it; what was done, as JSON values.

    arguments: fields of SBDConfig as on a command line, such as ["--max-steps", "100"].
    say: takes one line of text about what is going on, on the first rank alone.
    Effects: a signal stops the run after its step, with a checkpoint; while the model answers, at
    once, with signals.Stopped.
    Raises: ValueError for a field that there is none of or a value it can't take, for data that
    can't be read and for an output folder that holds a run already, or that another process writes
    to; ModelError for the model. All before anything is trained.
    """
    facts = new_record()  # of the code that is running, whatever happens to the files meanwhile
    del facts["results"]
    config = parse_config(run, arguments)
    if config.process_index:  # the first rank speaks for all
        say = lambda line: None  # noqa: E731
    else:
        lock(run.output_dir)
    checkpoint = last_checkpoint(run.output_dir, run.resume, say)
    names = run.split, run.prompt_field, run.completion_field
    settings = settings_of_run(run, config)
    rows = None
    if checkpoint is not None or not run.own_prompts:
        rows = training_rows(run)
        settings["rows"] = fingerprint(rows)
    else:
        check_beside_own(run)
    held_out = load_rows([run.decode_data], *names, run.decode_limit) if run.decode_data else None
    if held_out is not None:
        settings["decode_rows"] = fingerprint(held_out)
        held_out = with_answers(held_out)
    settings_file, log = run.output_dir / OWN_FOLDER / "settings.json", run.output_dir / "log.jsonl"
    state, finished, lines = None, False, []
    if checkpoint is not None:
        settings = check_settings(settings_file, settings)
        state = read_state(checkpoint)
        finished = is_finished(state, config)
        lines = kept_lines(log, state, finished)
    decodings = [line for line in lines if "decode_n" in line]
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
    adapters.check_no_chain(model.network.config, run.chain_width)
    check_head(model, chain=run.chain_width > 0)
    if not frozen:
        model.network.requires_grad_(True)  # a folded adapter leaves it frozen
    _check_length(config, model, typed="max_length" in names_of(arguments))
    _check_saving(model)
    config.mask_token_id = model.mask_token_id
    if run.attention == "flex_attention":
        if model.device.type == "cpu":
            raise ValueError("attention 'flex_attention' can't train on a CPU; use sdpa")
        model.network.set_attn_implementation(run.attention)
    if run.answers == "model" and room_of(model, run, config) < 1:
        raise ValueError(
            f"answer_tokens={run.answer_tokens} leaves no room for a prompt in the model's context "
            f"of {model.context_length} tokens"
        )
    if held_out is not None:
        held_out = as_prompts(held_out, model, run, config, "the held-out decoding", say)
    if rows is None:
        make_up_prompts(run, model, config.seed, say)
        rows = training_rows(run)
        settings["rows"] = fingerprint(rows)
    chat = run.chat or talks(rows)
    if run.answers == "model":
        prompts = as_prompts(rows, model, run, config, "the training data", say)
        rows = own_answers(run, model, prompts, say)
    else:
        rows = prepare(rows, model.tokenizer, run.chat)
    if frozen:
        model = _with_adapter(run, config, model)
    signals = SaveOnSignal()
    probe = None
    if held_out is not None:
        probe = _probe(run, config, model, held_out, say)
        probe.results += decodings
        probe.stopped = lambda: signals.stopped is not None
    judged = None if judged is None else prepare(judged, model.tokenizer, run.chat)
    callbacks = [signals, *([probe] if probe else []), LogLines(say)]
    trainer = _trainer(config, model, rows, judged, callbacks)
    facts_of_run = {"chat": chat, "output_dir": str(run.output_dir), "rows": len(rows)}
    trainer.provenance = {**asdict(run), **facts_of_run}
    cost = estimate(trainer, done=0 if state is None else state.global_step)
    if not finished:
        say(describe(cost))
    if trainer.is_world_process_zero():
        save_record(settings, settings_file)
        if checkpoint is not None:
            write_lines(log, lines)
        elif log.exists():
            say(
                f"{log} is of a run that ended before its first checkpoint: {log.stem}-before.jsonl"
            )
            log.replace(log.with_name(f"{log.stem}-before.jsonl"))
    if checkpoint is not None and state is not None and finished:
        say(f"nothing left to train: {checkpoint} is the last step's, and is saved once more")
        _restore(trainer, checkpoint, state)
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
        let_read(run.output_dir)
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
        told = json.dumps(summary, indent=2) + "\n"
        (run.output_dir / "summary.json").write_text(told, encoding="utf-8")
    trainer.leave()
    return summary


def _with_adapter(run: TrainingRun, config: SBDConfig, model: Model) -> Model:
    """The model with the adapter that is trained: a new one, or the one that it has."""
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
        place = place_of(run.model)
        network: Any = adapters.attach_again(bare.network, place, run.chain_width)
    else:
        network = adapters.attach(
            model.network,
            lasting(run.model),
            run.method,
            model.mask_token_id,
            run.lora_rank,
            run.lora_alpha,
            run.lora_dropout,
            run.chain_width,
        )
    return Model(network, model.tokenizer, model.name, settings=own)


def _probe(
    run: TrainingRun, config: SBDConfig, model: Model, held_out: Any, say: Callable[[str], None]
) -> DecodeProbe:
    """What decodes the held-out prompts now and then."""
    options = {
        "mode": "sbd",
        "solver": run.decode_solver,
        "block_size": config.max_block_size,
        "max_new_tokens": run.answer_tokens,
    }
    return DecodeProbe(model, held_out, run.decode_every, options, say)


def _trainer(
    config: SBDConfig, model: Model, rows: Any, judged: Any, callbacks: list[Any]
) -> SBDTrainer:
    """The trainer of these rows, with our lines and bar in place of transformers'."""
    try:
        trainer = SBDTrainer(
            model.network,
            config,
            train_dataset=rows,
            eval_dataset=judged,
            processing_class=model.tokenizer,
            callbacks=callbacks,
        )
    except RuntimeError as error:  # such as a tracker that is not installed
        raise ValueError(str(error)) from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if not config.disable_tqdm and sys.stderr.isatty():
        trainer.add_callback(Bar())
    return trainer


def _restore(trainer: SBDTrainer, checkpoint: Path, state: TrainerState) -> None:
    """The model of a run that has no step left, as its end would have left it."""
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        folder = Path(str(trainer.args.output_dir))
        best = folder / Path(state.best_model_checkpoint).name  # it may have been moved
        if not best.is_dir():
            raise ValueError(f"resume: the best model's checkpoint is gone: {best}")
        state.best_model_checkpoint = str(best)
        trainer._load_best_model()


def _as_adapted(run: TrainingRun, model: Model) -> TrainingRun:
    """The run with the settings of the adapter that it goes on training, or folds in.

    Raises: ValueError for an adapter of another method or other settings.
    """
    own = "gated" if model.gated else "lora"
    if (run.method, own) == ("full", "lora"):
        return run
    if run.method != own:
        fold = "fold it into its base by setblock merge, " if own == "lora" else ""
        raise ValueError(
            f"{run.model} is an adapter itself: {fold}go on training it with setblock train "
            f"--method {own}, or train on its base"
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
    if (chain := adapters.chain_of(model.network)) is not None:
        kept["chain_width"] = chain.width
    for name, value in kept.items():
        if getattr(run, name) not in (getattr(TrainingRun, name), value):
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

    Raises: ValueError for a gated adapter, and for a folder that is not empty.
    """
    if model.gated:
        raise ValueError(
            f"{model.name} is a gated adapter: it acts on masked positions alone, and one set of "
            "weights can't be the base on some positions and something else on others"
        )
    network: Any = model.network
    with whole_or_empty(output_dir):
        network.to(DTYPES[dtype]).save_pretrained(output_dir)
        let_read(output_dir)
        model.tokenizer.save_pretrained(output_dir)
        write_settings(output_dir, **model.settings)


def _check_length(config: SBDConfig, model: Model, typed: bool) -> None:
    if config.max_length is None or config.max_length <= model.context_length:
        return
    if typed:
        raise ValueError(
            f"max_length={config.max_length} is more than {model.name} was made for: at most "
            f"{model.context_length}"
        )
    config.max_length = model.context_length  # trl's default is more than this model can take


def _settings_of(model: Model) -> dict[str, Any]:
    return {"trained": model.trained, **model.defaults}
