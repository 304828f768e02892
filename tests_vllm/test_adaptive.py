"""Blocks whose width changes under way: what verified decoding says stays, and nothing is lost."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import Request, agree, answers, mixed, prompts

from setblock.masks import decoding_layout
from setblock.solvers import Predictions, parse

ADAPTIVE = {"adaptive": "all"}


@pytest.mark.parametrize("kind", ["nano", "llama"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_verified_text_stays_at_widths_drawn_for_every_step(
    engine, model, kind, asynchronous, width
):
    draw = random.Random(1)
    width(lambda: draw.choice((1, 2, 5, 8, 16)))
    served = engine(kind, async_scheduling=asynchronous, **ADAPTIVE)
    requests = mixed(model(kind), 32)
    verified = [one for one in requests if one.way.get("mode") in ("verified", "ntp")]
    agree(served, model(kind), verified)
    # Beside others, whose own text depends on the widths: each ends where it must.
    found = answers(served, requests)
    for request, ids in zip(requests, found, strict=True):
        if request in verified:
            assert ids == request.reference(model(kind)), request
        ended = ids[-1] in model(kind).eos_token_ids and not request.ignore_eos
        assert len(ids) == request.max_tokens or ended
        assert model(kind).mask_token_id not in ids


@pytest.mark.parametrize("asynchronous", [True, False])
def test_text_that_would_depend_on_the_widths_does_not(engine, model, asynchronous, width):
    draw = random.Random(5)
    width(lambda: draw.choice((1, 2, 5, 8, 16)))
    served = engine("llama", async_scheduling=asynchronous, adaptive="exact")
    agree(served, model("llama"), mixed(model("llama"), 32))


def test_blocks_of_one_token_are_next_token_decoding(engine, model, width):
    width(lambda: 1)
    for ids in prompts(model("nano"), 6):
        ours = answers(engine("nano", **ADAPTIVE), [Request(ids, {"mode": "sbd"})])
        assert ours == [Request(ids, {"mode": "ntp"}).reference(model("nano"))]


def test_blocks_begin_with_the_next_token(engine, model, width):
    """At their full width, against a loop without a cache."""
    width(lambda: 16)
    for solver in ("entropy:0.5", "prefix:0.9"):
        requests = [Request(ids, {"solver": solver}, 40) for ids in prompts(model("nano"), 6)]
        found = answers(engine("nano", **ADAPTIVE), requests)
        for request, ids in zip(requests, found, strict=True):
            assert ids == seeded(model("nano"), list(request.ids), parse(solver), 40)


def seeded(model: Any, text: list[int], solver: Any, most: int) -> tuple[int, ...]:
    """Blocks whose first token is the next-token one, the others the solver's."""
    answer: list[int] = []
    mask = model.mask_token_id

    def logits(block: list[int]) -> torch.Tensor:
        position = np.arange(len(text) + len(block))[None]
        start, end = np.array([len(text)]), np.array([position.shape[1]])
        queries = torch.tensor([text + block])
        layout = decoding_layout(position, start, end)
        return model.forward(queries, layout, model.new_cache(1, position.shape[1]))[0].float()

    while len(answer) < most:
        block = [int(logits([])[-1].argmax()), *[mask] * 15]
        while True:
            here = torch.tensor([block])
            place = torch.arange(len(answer), len(answer) + 16)
            past = torch.isin(here, torch.tensor(sorted(model.eos_token_ids))).cumsum(dim=1) > 0
            open_slots = (here == mask) & (place < most) & ~past
            if not open_slots.any():
                break
            found = logits(block)[-16:]
            found[:, mask] = -torch.inf
            reveal = solver.reveal(Predictions(found[None]), open_slots)
            block = torch.where(reveal, found.argmax(dim=-1), here)[0].tolist()
        text, answer = text + block, answer + block
        ends = [n for n, token in enumerate(answer) if token in model.eos_token_ids]
        if ends:
            return tuple(answer[: min(ends[0] + 1, most)])
    return tuple(answer[:most])
