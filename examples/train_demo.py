"""Train the bundled nano models from scratch: tokenizer, next-token base, NTP twin, SBD model.

    python examples/train_demo.py --output-dir runs/nano

Stages run in order and resume where they were stopped. The twin and the SBD model start from the
same base and see the same problems in the same order for the same number of steps.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint

# trl fills its namespace lazily, which hides these names from type checkers.
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

import setblock
from setblock import evaluate, nano
from setblock.checkpoint import write_settings
from setblock.config import SBDConfig
from setblock.train import SBDTrainer

VOCABULARY_SIZE = 1024
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL_TOKENS = [
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|mask|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
]
PAD, BEGIN, END, MASK = range(4)  # ids: the special tokens come first
SMALL_TALK_EVERY = 60
PLAIN_EVERY = 10
MICRO_BATCHES = (
    4  # the problems of a step, sorted by length, go through in four parts: little padding
)


def build_tokenizer(num_problems: int = 20_000) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,024 tokens, digits one by one, learned from training problems."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n| ?[^\s\d\w]+| ?[^\W\d]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    texts = (
        f"{problem.prompt}\n{problem.answer}"
        for problem in itertools.islice(nano.training_stream(0), num_problems)
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        mask_token="<|mask|>",
        extra_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 3.5 million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def build_dataset(
    tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, seed: int
) -> Dataset:
    """Token ids and completion masks: chat turns, now and then a plain prompt or small talk.

    The rows of each step are sorted by length, so that its micro-batches need little padding.
    """
    rows: list[dict[str, list[int]]] = []
    stream, small_talk = nano.training_stream(seed), nano.texts()["small_talk"]
    for index in range(steps * batch_size):
        if index % SMALL_TALK_EVERY == 0:
            prompt, answer = small_talk[index // SMALL_TALK_EVERY % len(small_talk)]
        else:
            problem = next(stream)
            prompt, answer = problem.prompt, problem.answer
        if index % PLAIN_EVERY == 5:
            head, answer = "<|begin|>" + prompt, "\n" + answer
        else:
            turns = [{"role": "user", "content": prompt}]
            head = str(
                tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            )
        head_ids = tokenizer.encode(head, add_special_tokens=False)
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), END]
        mask = [0] * len(head_ids) + [1] * len(answer_ids)
        rows.append({"input_ids": head_ids + answer_ids, "completion_mask": mask})
    batches = (rows[first : first + batch_size] for first in range(0, len(rows), batch_size))
    ordered = [
        row for batch in batches for row in sorted(batch, key=lambda row: len(row["input_ids"]))
    ]
    return Dataset.from_list(ordered)


def settings(output_dir: Path, steps: int, batch_size: int, **more: Any) -> dict[str, Any]:
    """What all three stages share."""
    return dict(
        output_dir=str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=batch_size // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES,
        train_sampling_strategy="sequential",  # the dataset is already in its final order
        learning_rate=3e-3,
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        max_length=None,
        logging_steps=20,
        save_steps=100,
        save_total_limit=1,
        report_to="none",
        dataloader_num_workers=0,
        **more,
    )


def train_base(
    tokenizer: PreTrainedTokenizerFast, folder: Path, steps: int, batch_size: int
) -> None:
    """An ordinary next-token model, by trl's own trainer, at a constant rate after the warm-up."""
    trainer = SFTTrainer(
        model=build_model(tokenizer),
        args=SFTConfig(
            **settings(
                folder,
                steps,
                batch_size,
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=200,
            )
        ),
        train_dataset=build_dataset(tokenizer, steps, batch_size, seed=1),
        processing_class=tokenizer,
    )
    finish(trainer, folder)


def train_from_base(
    tokenizer: PreTrainedTokenizerFast,
    base: Path,
    folder: Path,
    objective: str,
    steps: int,
    batch_size: int,
) -> None:
    """The NTP twin (objective "ntp") or the SBD model ("sbd"): same base, data, order and steps."""
    trainer = SBDTrainer(
        model=LlamaForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=SBDConfig(
            **settings(folder, steps, batch_size, lr_scheduler_type="cosine", warmup_steps=50),
            objective=objective,
        ),
        train_dataset=build_dataset(tokenizer, steps, batch_size, seed=2),
        processing_class=tokenizer,
    )
    finish(trainer, folder)


def bundle(tokenizer: PreTrainedTokenizerFast, stage: Path, folder: Path, **own: Any) -> None:
    """Write the checkpoint that ships: bfloat16 weights, tokenizer, defaults, the loss log."""
    model = LlamaForCausalLM.from_pretrained(stage, dtype=torch.bfloat16)
    model.generation_config._from_model_config = False  # else its own entries are dropped on load
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_settings(folder, mask_token_id=MASK, dtype="float32", **own)
    shutil.copyfile(stage / "log.json", folder / "log.json")


def measure_acceptance(folder: Path, limit: int, max_new_tokens: int = 256) -> float:
    """How likely a drafted token is accepted, on validation problems of all families."""
    problems = [one for name in nano.FAMILIES for one in nano.problems(name, "validation", limit)]
    options: Any = {"mode": "verified", "block_size": 16, "branches": 16, "seeds": 0}
    options["max_new_tokens"] = max_new_tokens
    line, _ = evaluate.run(setblock.load(folder), "nano", problems, 16, **options)
    return round(line["acceptance"], 3)


def finish(trainer: SFTTrainer, folder: Path) -> None:
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None
    )
    trainer.save_model(str(folder))
    (folder / "log.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")


def main(
    output_dir: Annotated[Path, typer.Option(help="Where the stages' folders go.")] = Path(
        "runs/nano"
    ),
    base_steps: Annotated[int, typer.Option(help="Steps of the next-token base.")] = 1000,
    steps: Annotated[int, typer.Option(help="Steps of the twin and of the SBD model.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Problems a step.")] = 64,
    bundle_dir: Annotated[
        Path | None, typer.Option(help="Write the checkpoints that ship here (setblock/demo).")
    ] = None,
    solver: Annotated[str, typer.Option(help="Default solver of the shipped SBD model.")] = (
        "prefix:0.99"
    ),
    acceptance_limit: Annotated[
        int, typer.Option(help="Validation problems a family to measure acceptance of drafts on.")
    ] = 20,
    only: Annotated[str, typer.Option(help="One stage alone: base, twin or sbd.")] = "",
) -> None:
    """Train the nano models; about two hours on two CPU cores."""
    tokenizer = build_tokenizer()
    base = output_dir / "base"
    stages = {
        "base": lambda folder: train_base(tokenizer, folder, base_steps, batch_size),
        "twin": lambda folder: train_from_base(tokenizer, base, folder, "ntp", steps, batch_size),
        "sbd": lambda folder: train_from_base(tokenizer, base, folder, "sbd", steps, batch_size),
    }
    if only and only not in stages:
        raise typer.BadParameter(f"--only must be one of {', '.join(stages)}, got {only!r}")
    for name, train in stages.items():
        if only in ("", name) and not (output_dir / name / "model.safetensors").exists():
            train(output_dir / name)
    if not only and bundle_dir is not None:
        sbd = {"mode": "sbd", "trained": True, "solver": solver, "slide": True, "block_size": 16}
        bundle(tokenizer, output_dir / "sbd", bundle_dir / "nano", **sbd)
        bundle(tokenizer, output_dir / "twin", bundle_dir / "nano-twin", mode="ntp")
        acceptance = measure_acceptance(bundle_dir / "nano", acceptance_limit)
        write_settings(bundle_dir / "nano", acceptance=acceptance)


if __name__ == "__main__":
    typer.run(main)
