"""One training run as the command line asks for it: rows of a file in, a checkpoint out."""

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import Dataset
from transformers import HfArgumentParser

from setblock.model import load
from setblock.train import SBDConfig, SBDTrainer

ROW_FORMATS = ({"prompt", "completion"}, {"text"})


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def finetune(
    model_name: str,
    data: Path,
    output_dir: Path,
    mask_token_id: int | None,
    arguments: list[str],
) -> dict[str, Any]:
    """Train a model on a file's rows and save it; what was done, as JSON values.

    arguments: fields of SBDConfig as on a command line, such as ["--max-steps", "100"].
    Raises: ValueError for a field that there is none of or a value it can't take, ModelError for
    the model, both before anything is trained.
    """
    config = parse_config(output_dir, mask_token_id, arguments)
    rows = read_rows(data)
    # float32 weights: updates at small rates would be lost in bfloat16; bf16 autocasts.
    model = load(model_name, dtype="float32", mask_token_id=mask_token_id)
    config.mask_token_id = model.mask_token_id
    trainer = SBDTrainer(
        model.network,
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=model.tokenizer,
    )
    result = trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(str(output_dir))
    trainer.accelerator.end_training()  # leaves the process group, which some ranks die of at exit
    return {
        "output_dir": str(output_dir),
        "rows": len(rows),
        "steps": result.global_step,
        "train_loss": result.training_loss,
        "mask_token_id": model.mask_token_id,
        "log": trainer.state.log_history,
    }


def parse_config(output_dir: Path, mask_token_id: int | None, arguments: list[str]) -> SBDConfig:
    """The SBDConfig that command-line words stand for."""
    words = ["--output_dir", str(output_dir), "--report_to", "none"]
    if not torch.cuda.is_available():
        words += ["--use_cpu"]  # else trl refuses its own default, bf16
    if mask_token_id is not None:
        words += ["--mask_token_id", str(mask_token_id)]
    fields: Any = SBDConfig  # the parser's own annotation takes no class
    parser = _Parser(fields, prog="setblock train", allow_abbrev=False)
    config, unknown = parser.parse_args_into_dataclasses(
        args=[*words, *arguments], return_remaining_strings=True
    )
    if unknown:
        raise ValueError(f"unknown training option {unknown[0]!r}: not a field of SFTConfig")
    return config


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file.

    Raises: ValueError naming file and line for one that is not a row of a known format, and for a
    file without rows.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not any(keys <= row.keys() for keys in ROW_FORMATS):
            raise ValueError(f"{path}:{number}: a row needs prompt and completion, or text")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows
