"""The types that a training run computes in, and is estimated in."""

import pytest
import torch
from trainers import config, trainer

from setblock.estimate import estimate


def test_on_a_processor_that_imitates_bfloat16_it_is_not_the_default(tmp_path, monkeypatch):
    for there in (True, False):
        monkeypatch.setattr("setblock.config.multiplies_bfloat16", lambda there=there: there)
        chosen = [config(tmp_path, bf16=given).bf16 for given in (None, True, False)]
        assert chosen == [there, True, False]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_is_tried_in_the_types_that_it_will_run_in(tmp_path, monkeypatch, bf16):
    run, seen = trainer(tmp_path, bf16=bf16), []
    monkeypatch.setattr(run.model, "forward", forward_of(run.model.forward, seen))
    estimate(run)
    assert seen == [bf16]


def forward_of(own, seen):
    def forward(*words, **given):
        seen.append(torch.is_autocast_enabled("cpu"))
        return own(*words, **given)

    return forward
