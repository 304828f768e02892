"""A training that has so much time, whatever that is in steps."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy


class TimeLimit(TrainerCallback):
    """Ends a training after so many minutes, with a checkpoint; the learning rate falls by the
    clock.

    A schedule is told the later step of two: the one that it is at, and the one that it would be at
    if max_steps took as long as there is time. A warm-up of so many steps has them first; one that
    is a share of the steps is one of the time.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self._begin = 0.0
        self._spent = 0.0  # share of the time, the same on all ranks

    def on_train_begin(self, args, state, control, lr_scheduler: Any = None, **kwargs):
        """Raises: ValueError for a schedule that is not made of steps."""
        self._begin, self._spent = time.monotonic(), 0.0
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate's wrapper
        if not hasattr(schedule, "lr_lambdas"):
            raise ValueError(
                "max_minutes needs a learning rate that follows from the step, got "
                f"lr_scheduler_type={args.lr_scheduler_type!s}"
            )
        first = args.warmup_steps if args.warmup_steps >= 1 else 0
        of_step = [*schedule.lr_lambdas]

        def by_clock(rate: Callable[[int], float]) -> Callable[[int], float]:
            def told(step: int) -> float:
                done = state.global_step
                if done <= first:
                    return rate(step)
                counted = round(step / (done + 1))  # a step of all ranks may count as several
                return rate(max(step, int(self._spent * state.max_steps * counted)))

            return told

        schedule.lr_lambdas = [by_clock(rate) for rate in of_step]

    def on_step_end(self, args, state, control, **kwargs):
        spent = (time.monotonic() - self._begin) / (60 * self.minutes)
        if args.world_size > 1:
            latest = torch.tensor(spent, device=args.device)
            torch.distributed.all_reduce(latest, torch.distributed.ReduceOp.MAX)
            spent = latest.item()
        self._spent = min(spent, 1.0)
        if spent >= 1:
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO
