"""Callbacks of a training run.

Lines of its losses, a stop and a checkpoint on a signal, held-out prompts decoded now and then.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import ProgressCallback, TrainerCallback

from setblock.endings import answers_alike, final_answer
from setblock.generation import generate
from setblock.model import Model
from setblock.settings import MODES
from setblock.signals import SIGNALS


class SaveOnSignal(TrainerCallback):
    """Ctrl-C or SIGTERM: finish the step, save a checkpoint, stop. A second one stops at once.

    Within two seconds a second one is the same: a launcher sends on what its terminal sent to all.
    `stopped` is the signal's name afterwards, None without one.
    """

    def __init__(self) -> None:
        self.stopped: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size > 1:  # all ranks stop after the same step
            noted = torch.tensor(int(self.stopped is not None), device=args.device)
            torch.distributed.all_reduce(noted, torch.distributed.ReduceOp.MAX)
            if noted and self.stopped is None:
                self.stopped = "a signal to another rank"
        if self.stopped:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.stopped and (state.epoch or 0) % 1:  # else the epoch is over
            control.should_evaluate = False  # a run without a stop has nothing to compare it with

    def on_train_end(self, args, state, control, **kwargs):
        self.restore()

    def restore(self) -> None:
        """Puts the handlers back that were there before the training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: Any) -> None:
        if self.stopped is None:
            self.stopped, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > 2:
            self.restore()
            signal.raise_signal(number)


class LogLines(TrainerCallback):
    """Says a line for each logged step: losses, accuracy, speed and the time that is left."""

    PARTS = (  # of a logged line, which SBDTrainer writes
        ("ntp_loss", "next-token loss {:.3f}"),
        ("matp_loss", "masked-token loss {:.3f}"),
        ("distill_loss", "divergence from the clean half {:.3f}"),
        ("matp_text_accuracy", "{:.1%} of masked tokens right"),
        ("eval_ntp_loss", "held-out next-token loss {:.3f}"),
        ("eval_matp_loss", "held-out masked-token loss {:.3f}"),
        ("eval_distill_loss", "divergence from the clean half {:.3f}"),
        ("eval_matp_text_accuracy", "{:.1%} of masked tokens right"),
        ("tokens_per_second", "{:.0f} tokens a second"),
    )

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._begin, self._first = 0.0, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin, self._first = time.monotonic(), state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        parts = [form.format(logs[name]) for name, form in self.PARTS if name in logs]
        done = state.global_step - self._first
        if not (state.is_world_process_zero and parts and done):
            return
        spent = time.monotonic() - self._begin
        left = spent / done * (state.max_steps - state.global_step)
        if args.max_minutes is not None:
            left = min(left, max(60 * args.max_minutes - spent, 0.0))
        parts.append(f"{left / 60:.0f} min left" if left > 90 else f"{left:.0f} s left")
        self.say(f"step {state.global_step} of {state.max_steps}: {', '.join(parts)}")


class Bar(ProgressCallback):
    """transformers' progress bar, without the logged values, which LogLines says."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


class DecodeProbe(TrainerCallback):
    """Decodes held-out prompts every `every` steps, before the first and after the last.

    A run that goes on has its first decoding behind it. Each time one more entry of `results`, also
    written to log.jsonl: step, decode_tokens_per_forward, and decode_score, the share of answers
    that end in the same final answer as the row's completion, as task "answers" has it.
    options: of `generate`. say: told a line of each result.
    Effects: every rank decodes, since its weights may be in parts on all of them; the first writes.
    """

    def __init__(
        self,
        model: Model,
        rows: Dataset,
        every: int,
        options: dict[str, Any],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.rows, self.every, self.options = model, rows, every, options
        model.told.update(MODES)  # that it is not trained yet goes without saying
        self.say = say
        self.results: list[dict[str, Any]] = []
        self.stopped: Callable[[], bool] = lambda: False  # whether the run was told to stop

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.decode(args, state)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self.decode(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        # A run that was told to stop has its checkpoint to think of; one may end early by itself.
        if state.global_step >= state.max_steps or not self.stopped():
            if not self.results or self.results[-1]["step"] != state.global_step:
                self.decode(args, state)

    def decode(self, args: Any, state: Any) -> None:
        """One more entry of `results`."""
        network = self.model.network
        training = network.training
        network.eval()
        try:
            with torch.autocast(self.model.device.type, torch.bfloat16, enabled=bool(args.bf16)):
                answers = generate(self.model, prompts_of(self.model, self.rows), **self.options)
        finally:
            network.train(training)
        wanted = [final_answer(_text(row["completion"])) for row in self.rows]  # type: ignore[index]
        right = [answers_alike(one.text, want) for one, want in zip(answers, wanted, strict=True)]
        result = {
            "step": state.global_step,
            "decode_tokens_per_forward": sum(one.num_tokens for one in answers)
            / sum(one.nfe for one in answers),
            "decode_score": sum(right) / len(right),
            "decode_n": len(right),
            "decode_eos_share": sum(one.finish_reason == "eos" for one in answers) / len(right),
            "decode_solver": self.options["solver"],
        }
        self.results.append(result)
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        self.say(
            f"step {state.global_step}: {len(right)} answers at "
            f"{result['decode_tokens_per_forward']:.2f} tokens per forward, {sum(right)} of them "
            "right"
        )


def prompts_of(model: Model, rows: Any) -> list[list[int]]:
    """Token ids of the prompts of prompt-completion rows, chat turns through the template."""
    return [model.encode(row["prompt"]) for row in rows]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
