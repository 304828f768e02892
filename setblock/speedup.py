"""From a model to a faster one that says the same, as `setblock speedup` does before it tunes.

Prompts, the model's own answers to them, and a gated adapter that learns to draft those; some
prompts are kept back, for the clock to choose by.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from setblock.adapters import no_chain
from setblock.corpus import check_beside_own, fitting, make_up_prompts, training_rows
from setblock.data import prepare
from setblock.evaluate import Form
from setblock.files import lock, write_whole
from setblock.finetune import finetune
from setblock.loading import load
from setblock.model import Model
from setblock.names import ModelError
from setblock.resume import OWN_FOLDER, PREFIX, is_cut, left_in
from setblock.rows import load_rows
from setblock.run import TrainingRun, names_of, parse_config
from setblock.tasks import TASKS, Item
from setblock.trial import check_head
from setblock.watch import prompts_of

CHAIN_WIDTH = 256
LEARNED, HELD_OUT = "learned.jsonl", "held_out.jsonl"
# Fields of SBDConfig for adapters that draft; what is typed comes first. docs/findings.md says what
# was learned of each: whole blocks as drafts are, some from a random slot on, no loss where
# verification has the token already.
RECIPE = {
    **{"min_block_size": 3, "max_block_size": 8},
    **{"full_mask_share": 0.7, "suffix_mask_share": 0.3, "first_slot_loss": "no"},
    **{"num_train_epochs": 4, "per_device_train_batch_size": 8, "learning_rate": 8e-4},
    **{"lr_scheduler_type": "cosine", "warmup_steps": 20},
    **{"train_sampling_strategy": "group_by_length", "logits_chunk_size": 8192},
    **{"logging_steps": 10, "save_steps": 50, "save_total_limit": 1},
}


def with_recipe(words: list[str]) -> list[str]:
    """Command-line words for fields of SBDConfig, and those of RECIPE that they do not set."""
    rest = [name for name in RECIPE if name not in names_of(words)]
    return words + [
        part for name in rest for part in (f"--{name.replace('_', '-')}", str(RECIPE[name]))
    ]


def learn(
    run: TrainingRun, words: list[str], held_out: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The summary of the training.

    run: of method gated, answers "model"; its data are all prompts. Goes on where an earlier call
    was stopped, whatever it was doing.
    Effects: run.output_dir holds the trained model, and in its folder _run the two parts of the
    prompts, LEARNED and HELD_OUT. Prompts that leave no room for an answer are in neither.
    Raises: as finetune, and ValueError for a number of held-out prompts that leaves none to learn.
    """
    words = with_recipe(words)
    config = parse_config(run, words)  # what is wrong in the words, before minutes of prompts
    lock(run.output_dir)
    most = run.own_prompts if len(run.data) == 1 and run.own_prompts else None
    _check_number(held_out, most)
    files = [run.output_dir / OWN_FOLDER / name for name in (LEARNED, HELD_OUT)]
    if not files[0].exists() and (left := left_in(run.output_dir)):
        raise ValueError(
            f"{run.output_dir} holds a run of another command ({', '.join(left)}): choose another "
            "output folder"
        )
    model = load(run.model, "bfloat16" if config.bf16 else "float32", config.device, pack=None)
    if model.trained:
        say(
            f"{model.name} is trained for set block decoding already; speeds here are over its "
            "token by token"
        )
    check_head(model)
    why = no_chain(model.network.config)
    try:
        check_head(model, chain=True)
    except ModelError as error:
        why = str(error)
    if why:
        say(f"drafts have no chain: {why}")
        run = replace(run, chain_width=0)
    if run.own_prompts:
        check_beside_own(run)
        make_up_prompts(run, model, config.seed, say)
    rows = fitting(training_rows(run), model, run, config, "the data", say)
    del model
    parts = _parted(rows["prompt"], held_out)
    if again := len(rows) - sum(map(len, parts)):
        say(f"{again} of {len(rows)} prompts are left out of the data: they are there already")
    for file, prompts in zip(files, parts, strict=True):
        _write(file, prompts)
    part = {"data": [str(files[0])], "split": "train", "prompt_field": "prompt", "limit": None}
    resume = not all(map(is_cut, run.output_dir.glob(f"{PREFIX}*")))
    return finetune(replace(run, **part, resume=resume), words, say)


@dataclass(frozen=True)
class AsLearned(Form):
    """Prompts put in the very tokens that training put them in.

    ids: of each by its item's key.
    """

    ids: Mapping[str, list[int]] = field(default_factory=dict)

    def prompt(self, item: Item) -> list[int]:
        return self.ids[item.key]


def as_learned(file: Path, model: Model, chat: bool) -> tuple[list[Item], Form]:
    """(the prompts of HELD_OUT, how they are put) as `evaluate` takes them, chats whole."""
    rows = load_rows([str(file)], prompts_only=True)
    ids = prompts_of(model, prepare(rows, model.tokenizer, chat))
    items = [Item(str(n), json.dumps(prompt), "", None) for n, prompt in enumerate(rows["prompt"])]
    keyed = {item.key: one for item, one in zip(items, ids, strict=True)}
    return items, AsLearned(TASKS["prompts"], chat=False, ids=keyed)


def _check_number(held_out: int, prompts: int | None) -> None:
    """Raises: ValueError for held-out prompts that nothing can be chosen by, or all there are."""
    if held_out < 2 or (prompts is not None and held_out >= prompts):
        most = "" if prompts is None else f", and less than {prompts}, the number of prompts"
        other = "" if prompts is None else ": give another (--held-out), or more prompts"
        raise ValueError(f"held_out must be at least 2{most}, got {held_out}{other}")


def _parted(prompts: Sequence[Any], held_out: int) -> tuple[list[Any], list[Any]]:
    """(prompts to learn from, prompts to measure with), different ones; files often go by kind."""
    different = [json.loads(one) for one in dict.fromkeys(json.dumps(one) for one in prompts)]
    _check_number(held_out, len(different))
    kept = {number * len(different) // held_out for number in range(held_out)}
    parts: tuple[list[Any], list[Any]] = ([], [])
    for number, prompt in enumerate(different):
        parts[number in kept].append(prompt)
    return parts


def _write(file: Path, prompts: list[Any]) -> None:
    """Raises: ValueError for a file that holds other prompts."""
    content = "".join(json.dumps({"prompt": one}) + "\n" for one in prompts)
    if file.exists() and file.read_text(encoding="utf-8") != content:
        raise ValueError(
            f"{file} was made of other prompts, or with another held_out: choose "
            "another output folder"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content)
