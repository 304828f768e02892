"""Tiny networks and trainers of them: in float32, on the CPU, by SGD."""

import copy
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from setblock.config import SBDConfig
from setblock.train import SBDTrainer

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<unk>"]
MASK = SPECIAL.index("<mask>")
VOCAB = 40
# The field that transformers renamed; the old name warns where there is the new one.
RECOMPUTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in SBDConfig.__dataclass_fields__
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tokenizer():
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    names = {f"{word.strip('<>')}_token": word for word in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


# SmolLM2 is a Llama with tied embeddings and three query heads to a key head.
SHAPES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "smollm2": (
        LlamaForCausalLM,
        LlamaConfig(
            **{**SIZES, "hidden_size": 24, "num_attention_heads": 3}, tie_word_embeddings=True
        ),
    ),
}


def network(shape="llama"):
    torch.manual_seed(0)
    kind, config = SHAPES[shape]
    return kind(copy.deepcopy(config))


def samples(num_rows=8, prompt=3):
    """Token rows of several lengths, the first tokens of each without a label."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(num_rows):
        length = 6 + 5 * i % 9
        ids = torch.randint(len(SPECIAL), VOCAB - 1, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


def config(folder, cls: Any = SBDConfig, **changes):
    settings = {
        "use_cpu": True,
        "bf16": False,
        RECOMPUTING: False,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",  # Adam would blow differences of the last bit up to a whole step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return cls(output_dir=str(folder), **{**settings, **changes})


def trainer(folder, rows=None, *, net=None, eval_dataset=None, **changes) -> Any:
    if not isinstance(rows, (Dataset, IterableDataset)):
        rows = Dataset.from_list(samples() if rows is None else rows)
    return SBDTrainer(
        net or network(),
        config(folder, **changes),
        train_dataset=rows,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
    )


def logged(trained, name):
    return [line[name] for line in trained.state.log_history if name in line]


def weights(trained):
    return torch.cat([weight.detach().flatten() for weight in trained.model.parameters()])


def steps(trained, num_batches=1):
    """The views of an optimizer step, as the training loop asks for them."""
    batches, count = trained.get_batch_samples(
        iter(trained.get_train_dataloader()), num_batches, torch.device("cpu")
    )
    return [batch["view"] for batch in batches], count
