"""What tests of networks share: load one, run it, look at its embeddings and tokens."""

from pathlib import Path
from typing import Any

import torch
from conftest import make_tokenizer
from layouts import decoding_layout

from setblock import loading
from setblock.model import Model


def load(name: str | Path, device: str | None = "cpu", **options: Any) -> Model:
    """Load on the CPU, where the laws hold to the last bits, accelerator or not."""
    return loading.load(name, device=device, **options)


def uncached(model: Model, text: list[int], start: int, end: int) -> torch.Tensor:
    """Logits [end, vocab] of one row: `text` up to `end`, noisy from `start` on."""
    layout = decoding_layout(torch.arange(end)[None], torch.tensor([start]), torch.tensor([end]))
    return model.forward(torch.tensor([text[:end]]), layout)[0]


def token_id(name: str, **options) -> int:
    tokenizer: Any = make_tokenizer(**options)
    return tokenizer.convert_tokens_to_ids(name)


def embeddings(network: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return network.get_input_embeddings().weight, network.get_output_embeddings().weight
