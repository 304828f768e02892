"""Answers of different temperatures, truncations, penalties and biases, decoded together."""

from typing import Any

import pytest
import torch
from conftest import gated_adapter
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graphs import WAYS
from test_running import PROMPTS, SHORT, alone, among, answer_of, ended, same, told

from setblock.loading import load
from setblock.running import Running
from setblock.sampling import Sampler, of_rows

NOISES: list[dict[str, Any]] = [
    {}, {"temperature": 1.0}, {"temperature": 0.4, "top_k": 5}, {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05}, {"top_p": 0.5},
]  # fmt: skip
PENALTIES: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.3, "min_new_tokens": 4},
    {"presence_penalty": 1.5, "logit_bias": {5: 3.0, 7: -100.0}}, {"frequency_penalty": -0.8},
    {"repetition_penalty": 0.7, "presence_penalty": 0.3, "frequency_penalty": 0.4},
]  # fmt: skip


def hows_of(way: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Of each prompt its own; of modes other than "sbd" with penalties."""
    hows = []
    for row in range(len(PROMPTS)):
        how = {**SHORT, **way, **more, **NOISES[row], "seed": row, "max_new_tokens": 20 - row}
        hows.append(how if way["mode"] == "sbd" else {**how, **PENALTIES[-row]})
    return hows


def joined(model: Any, hows: list[dict[str, Any]], room: int = 3) -> dict[int, Any]:
    asked = [
        (row, answer_of(model, row, prompt, **how))
        for row, (prompt, how) in enumerate(zip(PROMPTS, hows, strict=True))
    ]
    batch = Running(room)
    batch.begin([asked[0][1]])
    assert all(batch.suits(answer) for _, answer in asked[1:])
    return ended(batch, asked[1:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-window"])
def test_each_is_told_what_it_is_told_alone(checkpoint, kind, way):
    model = load(checkpoint(kind))
    hows = hows_of(WAYS[way], logprobs=2)
    for row, found in joined(model, hows).items():
        one = alone(model, PROMPTS[row], **hows[row])
        same(found, one)
        for own, other in zip(found.logprobs or (), one.logprobs or (), strict=True):
            assert own.token_id == other.token_id
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("way", ["sbd", "seeded", "verified"])
def test_drafts_of_a_chain(checkpoint, tmp_path, way):
    gated_adapter(load(checkpoint()), tmp_path, chain_width=8)
    model = load(tmp_path)
    hows = hows_of(WAYS[way])
    for row, found in joined(model, hows).items():
        same(found, alone(model, PROMPTS[row], **hows[row]))


def test_drafts_that_are_near_enough(checkpoint):
    model = load(checkpoint())
    hows = hows_of({**WAYS["verified"], "lenience": 0.3})
    for row, found in joined(model, hows).items():
        same(found, alone(model, PROMPTS[row], **hows[row]))


@pytest.mark.parametrize("way", ["ntp", "sliding", "verified"])
def test_those_of_graphs(checkpoint, simulated_graphs, way):
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    hows = hows_of(WAYS[way])
    for _ in range(2):
        for row, found in joined(model, hows).items():
            same(found, alone(plain, PROMPTS[row], **hows[row]))
    assert simulated_graphs


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_at_any_time_with_any_drafts(data):
    model: Any = TableModel.random(seed=data.draw(st.integers(0, 5)), vocab_size=9)
    model.worth = lambda rows: 0.0  # else copies are cut among many rows, and take other forwards
    way = data.draw(st.sampled_from(list(WAYS.values())))
    changing = data.draw(st.booleans())
    asked, expected, turn = [], [], 0
    for row in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(3, 5), min_size=1, max_size=8))
        how = {**SHORT, **data.draw(st.sampled_from(NOISES)), "seed": row % 2}
        how["max_new_tokens"] = data.draw(st.integers(4, 14))
        if way["mode"] != "sbd":
            how |= data.draw(st.sampled_from(PENALTIES))
        turn += data.draw(st.integers(0, 5))
        if changing:
            answer = answer_of(model, row, prompt, **how, mode="verified")
            free = {name: value for name, value in how.items() if name != "block_size"}
            answer.among = among(model, **free, mode="verified")
            expected.append(alone(model, prompt, **how, mode="ntp").token_ids)
        else:
            answer = answer_of(model, row, prompt, **how, **way)
            expected.append(told(alone(model, prompt, **how, **way)))
        asked.append((turn, answer))
    found = ended(Running(room=6), asked)
    for row, one in enumerate(expected):
        assert (found[row].token_ids if changing else told(found[row])) == one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samplers_of_rows(dtype):
    """Bit for bit what each makes of its rows, seeds, rows and places theirs."""
    samplers = [Sampler(**NOISES[place]).seedless for place in (1, 0, 3, 1, 5, 2, 4)]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 4, 50, generator=generator).to(dtype)
    logits[:, :, 2] = -torch.inf
    rows, seeds = torch.arange(7) + 3, torch.arange(7) % 2
    position = torch.arange(4) + torch.arange(7)[:, None]
    ids = torch.arange(50).expand(7, 4, 50) * 3
    together = of_rows(samplers)
    for named in (None, ids):
        picked = together.pick(logits, rows, position, seeds, named)
        scores = together.perturbed(logits, rows, position, seeds, named, truncate=False)
        for place, sampler in enumerate(samplers):
            here = slice(place, place + 1)
            given = logits[here], rows[here], position[here], seeds[here]
            its = None if named is None else named[here]
            assert torch.equal(picked[here], sampler.pick(*given, its))
            own = sampler.perturbed(*given, its, truncate=False)
            assert torch.equal(scores[here], own.float())
    assert of_rows(samplers[:1] * 3) == samplers[0]
    assert of_rows([samplers[1], samplers[4]]) == Sampler(), "greedy, whatever is left out"
    assert of_rows([]) == Sampler()


def test_penalties_leave_others_as_they_are(checkpoint):
    """To the bit, in bfloat16 too, as to rounding no penalty is none."""
    model = load(checkpoint(), dtype="bfloat16")
    how: Any = {**SHORT, "mode": "ntp"}
    state = model_state(model, [how, {**how, **PENALTIES[-1]}])
    logits = torch.randn(2, 1, model.vocab_size).to(torch.bfloat16)
    logits[:, :, 5] = -torch.inf
    found = state._penalised(logits, state.tokens[:, :0])
    assert torch.equal(found[0], logits[0].float())
    assert not torch.equal(found[1], logits[1].float())


def model_state(model: Any, hows: list[dict[str, Any]]) -> Any:
    """The state of answers to one prompt, behind their first tokens."""
    batch = Running(room=len(hows))
    for row, how in enumerate(hows):
        batch.begin([answer_of(model, row, [5, 5, 9], **how)])
        batch.come()
    return batch._state
