"""The order in which a run's rows come, so that a run that goes on finds its place in it."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import get_last_checkpoint

from setblock.resume import read_state


class ByLength(LengthGroupedSampler):
    """transformers' order by length, which follows from the seed and the epoch alone.

    Its own depends on what was drawn before: another one in an epoch that is gone on with.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: int) -> None:
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """accelerate's loaders call it too, but not of several processes that go on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        key = int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0])
        self.generator = torch.Generator().manual_seed(key)
        return super().__iter__()


def refuse_later_passes(folder: str, resume: str | bool) -> None:
    """Raises: ValueError for a stream that would be gone on with behind its first pass.

    resume: a checkpoint, or True for the newest in the folder.
    """
    place = get_last_checkpoint(folder) if resume is True else str(resume)
    epoch = None if place is None else read_state(Path(place)).epoch
    if epoch is not None and epoch > 1:
        raise ValueError(
            f"resume: {place} is of pass {math.ceil(epoch)} over a stream, which transformers "
            "can't find its place in: only the first can be gone on with"
        )
