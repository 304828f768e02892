"""What tests of `setblock train` share: rows, a quick run of the command, what it printed."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from setblock import cli
from setblock.loading import load
from setblock.masks import causal_layout

PAIRS = [("a b ", "c d e"), ("b ", "a c"), ("x y z ", "z y x x"), ("q ", "r s t u v")]
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
QUICK = "--max-steps 3 --per-device-train-batch-size 2 --use-cpu --bf16 no --disable-tqdm yes"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["setblock", *map(str, words)])
    cli.main()


def train(monkeypatch, capsys, *words: str | Path) -> dict[str, Any]:
    """The JSON summary of a quick run."""
    run(monkeypatch, "train", *words, *QUICK.split(), "--json")
    out = capsys.readouterr().out
    assert out.count("\n") == 1, "stdout holds one JSON object and nothing else"
    return json.loads(out)


def next_token_logits(model, ids=(5, 6, 7, 8)):
    tokens = torch.tensor([ids])
    return model.forward(tokens, causal_layout(torch.arange(len(ids))[None]))


def ending(source: Path, folder: Path) -> Path:
    """The checkpoint with an end token that is likelier than before."""
    model = load(source)
    [end] = model.eos_token_ids
    weight = model.network.get_output_embeddings().weight.data
    weight[end] *= 3
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def one_line(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def kill(once: threading.Event) -> None:
    if not once.is_set():
        once.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
