"""What a run trains on: rows of files, prompts that the model made up, its own answers to them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState

from setblock import packed
from setblock.answers import regenerate
from setblock.config import SBDConfig
from setblock.data import prepare
from setblock.loading import load
from setblock.model import Model
from setblock.prompts import Sampling, write_prompts
from setblock.resume import OWN_FOLDER
from setblock.rows import load_rows
from setblock.run import OWN, TrainingRun
from setblock.signals import stop_at_once
from setblock.watch import prompts_of

MOST_COPIED = 2**32  # bytes of weights that there may be twice while a model answers


def training_rows(run: TrainingRun) -> Any:
    """The rows of the run's files, its own prompts among them if they are made up by now."""
    return load_rows(
        run.files,
        run.split,
        run.prompt_field,
        run.completion_field,
        run.limit,
        prompts_only=run.answers == "model",
        own=str(run.prompts_file),
    )


def check_beside_own(run: TrainingRun) -> None:
    """Looks at the data beside the model's own prompts, before minutes of making those up.

    Raises: ValueError for what can't be read, or prompts of messages, which do not mix with text.
    """
    others = [file for file in run.files if file != str(run.prompts_file)]
    names = run.split, run.prompt_field, run.completion_field
    if others and not isinstance(load_rows(others, *names, prompts_only=True)[0]["prompt"], str):
        raise ValueError(
            f"{OWN}{run.own_prompts} are prompts of text, which do not mix with data whose "
            f"prompts are messages: {', '.join(others)}"
        )


def as_prompts(
    rows: Any,
    model: Model,
    run: TrainingRun,
    config: SBDConfig,
    use: str,
    say: Callable[[str], None],
) -> Any:
    """Rows with prompts as training will see them, so that they are decoded the same way.

    Rows too long to be answered are left out, and counted aloud.
    """
    return prepare(fitting(rows, model, run, config, use, say), model.tokenizer, run.chat)


def fitting(
    rows: Any,
    model: Model,
    run: TrainingRun,
    config: SBDConfig,
    use: str,
    say: Callable[[str], None],
) -> Any:
    """The rows whose prompts leave room for an answer; the others are counted aloud.

    use: what the rows are for, as errors name it. Raises: ValueError if none is left.
    """
    room = room_of(model, run, config)
    asked = prompts_of(model, prepare(rows, model.tokenizer, run.chat))
    kept = [row for row, prompt in enumerate(asked) if len(prompt) <= room]
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


def room_of(model: Model, run: TrainingRun, config: SBDConfig) -> int:
    """Tokens of a prompt that answer_tokens leave in the context, in whole blocks."""
    slots = -(-run.answer_tokens // config.max_block_size) * config.max_block_size
    return model.context_length - slots


def make_up_prompts(run: TrainingRun, model: Model, seed: int, say: Callable[[str], None]) -> None:
    """Effects: run.prompts_file holds as many as were asked for."""
    count, file = run.own_prompts, run.prompts_file

    def num_known() -> int:
        return file.read_bytes().count(b"\n") if file.exists() else 0

    if (known := num_known()) < count:
        there = f", {known} of them before" if known else ""
        say(f"making up {count} prompts with the model itself{there}; {file}")
    every = max(count // 20, 1)

    def progress(number: int) -> None:
        if number % every == 0:
            say(f"{number} of {count} prompts")

    size = run.answer_batch_size
    with PartialState().main_process_first(), stop_at_once():
        _check_shared(file, num_known(), count)
        file.parent.mkdir(parents=True, exist_ok=True)
        found = write_prompts(model, file, count, Sampling(seed), size, progress)
    if found != count:
        raise ValueError(f"{file} holds {found} prompts, more than {OWN}{count}: move it away")


def own_answers(run: TrainingRun, model: Model, rows: Any, say: Callable[[str], None]) -> Any:
    """Rows of `regenerate`, kept in a file of the run; another call goes on from there.

    Effects: a signal stops it at once, with signals.Stopped; what is answered by then is kept.
    """
    file = run.output_dir / OWN_FOLDER / "answers.jsonl"
    every = max(len(rows) // 20, 1)

    def start(known: int) -> None:
        _check_shared(file, known, len(rows))
        if known < len(rows):
            there = f", {known} of them before" if known else ""
            say(f"answering {len(rows)} prompts with the model itself{there}; {file}")

    def progress(count: int) -> None:
        if count % every == 0:
            say(f"{count} of {len(rows)} answers")

    # The others find all answers in the file.
    length = run.answer_tokens
    with PartialState().main_process_first(), stop_at_once():
        own = regenerate(
            model, rows, file, length, run.answer_batch_size, progress, start, partial(_writer, run)
        )
    lengths = [sum(mask) for mask in own["completion_mask"]]
    full = [ids for ids, tokens in zip(own["input_ids"], lengths, strict=True) if tokens == length]
    cut = sum(ids[-1] not in model.eos_token_ids for ids in full)
    rest = "; the others are empty" if len(own) < len(rows) else ""
    rest += f"; {cut} were cut at answer_tokens={length}" if cut else ""
    say(f"{len(own)} of {len(rows)} answers are trained on, {sum(lengths):,} tokens{rest}")
    return own


def _check_shared(file: Path, known: int, count: int) -> None:
    """Raises: ValueError on a rank that can't see what the first one has written before it."""
    if known < count and not PartialState().is_main_process:
        raise ValueError(
            f"{file} has {known} of the {count} lines that the first rank wrote: output_dir must "
            "be in a folder that all machines share"
        )


def _writer(run: TrainingRun, model: Model) -> Model:
    """What answers for a model: on a CPU a copy whose weights are laid out for decoding.

    Those can't be trained. Of large models no copy is made.
    """
    if run.method == "qlora" or model.weight_bytes > MOST_COPIED or model.packed:
        return model
    if packed.missing(model.device, model.dtype) is not None:
        return model
    return load(run.model, model.dtype, model.device, run.mask_token_id, pack=True)
