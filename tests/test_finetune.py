"""The `train` command: a file of rows becomes a checkpoint that every other command takes."""

import json
import sys
from pathlib import Path

import pytest

from setblock import cli
from setblock.finetune import parse_config, read_rows
from setblock.model import load

# trl's own defaults use a name that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")

ROWS = [{"prompt": "a b ", "completion": "c d e"}, {"prompt": "b ", "completion": "a c"}]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["setblock", *map(str, words)])
    cli.main()


def test_trained_model_loads_and_knows_it(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "out"
    start = [
        "train",
        "--model",
        checkpoint("llama", mask_token="<mask>"),
        "--data",
        rows,
        "--output-dir",
        folder,
    ]
    options = [
        "--max-steps",
        "2",
        "--per-device-train-batch-size",
        "2",
        "--use-cpu",
        "--bf16",
        "no",
    ]
    mask = str(load(checkpoint("llama", mask_token="<mask>")).mask_token_id)
    run(monkeypatch, *start, *options, "--mask-token-id", mask, "--json")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["rows"] == 2
    model = load(folder)
    assert model.trained
    assert model.mask_token_id == int(mask)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no rows"),
        ('{"text": "a"}\n{"text": ', ":2: not JSON"),
        ('{"text": "a"}\n\n{"question": "a"}\n', ":3: a row needs prompt and completion"),
        ("[1]\n", ":1: a row needs"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, content, message) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-such-option", "1"], "unknown training option '--no-such-option'"),
        (["--max-steps", "many"], "max_steps"),
        (["--objective", "diffusion"], "objective"),
        (["--max-block-size", "1"], "max_block_size=1"),
    ],
)
def test_bad_options_are_named(tmp_path, words, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(tmp_path, None, words)
