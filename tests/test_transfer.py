"""Host and device: what crosses between them in a step of decoding, and what it waits for."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import gated_adapter
from elsewhere import elsewhere

from setblock.generation import generate
from setblock.likelihood import next_tokens
from setblock.loading import load
from setblock.model import Model
from setblock.transfer import to_device, to_host

PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 3], [4] * 11]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 3}
VERIFIED = {"mode": "verified", "block_size": 4}
# Options, and how often a step waits for the device at most.
WAYS: list[tuple[dict[str, Any], int]] = [
    ({"mode": "ntp"}, 1),
    ({"mode": "ntp", **SAMPLED}, 1),
    ({"mode": "sbd", "solver": "entropy:2.0"}, 1),
    ({"mode": "sbd", "solver": "prefix:0.1", "next_token_seed": True, **SAMPLED}, 1),
    ({"mode": "sbd", "solver": "margin-bound:2.0", "fallback": 3.0}, 2),
    ({"mode": "sbd", "solver": "confidence:0.01", "slide": True}, 1),
    ({**VERIFIED, "branches": 1}, 2),
    ({**VERIFIED, "branches": 3, "seeds": 2, "lookup": 6, **SAMPLED}, 2),
    ({**VERIFIED, "branches": 4, "lenience": 0.01}, 2),
    ({**VERIFIED, "draft": "solver", "solver": "confidence:0.01"}, 2),
    ({**VERIFIED, "block_size": 1, "lookup": 5}, 1),
]


@pytest.fixture
def padded(monkeypatch):
    """Rows of different lengths here too, as on a device, for the same numbers to the last bit."""
    monkeypatch.setattr(Model, "leaves_padding_out", False)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("options", "most"), WAYS)
def test_a_step_waits_for_the_device_to_decide_and_for_nothing_else(
    checkpoint, monkeypatch, options, most, rows
):
    model = load(checkpoint("llama"), device="cpu")
    few = {**options, "max_new_tokens": 20, "ignore_eos": True}
    expected = generate(model, PROMPTS[:rows], **few)
    with elsewhere(model, monkeypatch) as count:
        answers = generate(model, PROMPTS[:rows], **few)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert [one.nfe for one in answers] == [one.nfe for one in expected]
    assert [one.entropy for one in answers] == [one.entropy for one in expected]
    assert count.forwards >= max(one.nfe for one in answers)
    assert sum(count.waits.values()) <= most * count.forwards, count.waits
    assert set(count.waits) == {"cpu"}


@pytest.mark.usefixtures("padded")
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("more", [{}, SAMPLED, {"seeds": 2, "branches": 2}])
def test_nor_does_one_of_a_gated_adapter_with_a_chain(
    checkpoint, tmp_path, monkeypatch, rows, more
):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path, chain_width=8)
    model = load(tmp_path, device="cpu")
    few = {**VERIFIED, "branches": 1, "max_new_tokens": 20, "ignore_eos": True, **more}
    expected = generate(model, PROMPTS[:rows], **few)
    with elsewhere(model, monkeypatch) as count:
        answers = generate(model, PROMPTS[:rows], **few)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert [one.nfe for one in answers] == [one.nfe for one in expected]
    assert count.waits.keys() == {"cpu"}
    assert count.waits["cpu"] <= 2 * count.forwards


def test_scores_of_a_text_wait_once_a_forward(checkpoint, monkeypatch):
    model = load(checkpoint("llama"), device="cpu")
    text = [*range(3, 40)] * 8
    expected = next_tokens(model, text[:250], 5)
    monkeypatch.setattr("setblock.likelihood.QUERIES", 64)
    with elsewhere(model, monkeypatch) as count:
        found = next_tokens(model, text[:250], 5)
    assert count.waits == {"cpu": count.forwards}
    assert torch.equal(found.likeliest, expected.likeliest)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_tensor_of_the_host_is_noticed_on_the_device(checkpoint, monkeypatch):
    model = load(checkpoint("llama"), device="cpu")
    with elsewhere(model, monkeypatch) as count:
        [moved] = to_device(model.device, torch.arange(3))
        with pytest.raises(AssertionError, match="two devices"):
            _ = moved + torch.arange(3)
        there, array = moved + 0, np.arange(3)
        mixes: list[Any] = [np.asarray, array.__getitem__, lambda one: one + array]
        mixes.append(lambda one: array.__setitem__(slice(None), one))
        for mix in mixes:
            with pytest.raises(TypeError):
                mix(there)
        with pytest.raises(AssertionError, match="and an array"):
            _ = there[array]
        with pytest.raises(TypeError, match="is no array"):
            to_device(torch.device("cuda:1"), there, array)
        assert (moved + 1).tolist() == [1, 2, 3]
        assert moved[moved > 1].device == model.device
    # To index an array numpy asks for a number first.
    assert count.waits == {"tolist": 1, "__getitem__": 1, "__index__": 1}


def test_one_copy_carries_tensors_of_every_kind(checkpoint, monkeypatch):
    model = load(checkpoint("llama"), device="cpu")
    ids = torch.tensor([[2**40 + 1, -3], [0, 7]])
    some = torch.tensor([True, False, True])
    none = torch.empty(2, 0, dtype=torch.long)
    halves = torch.tensor([[0.1], [float("nan")], [float("-inf")]])
    with elsewhere(model, monkeypatch) as count:
        moved = to_device(model.device, ids, some, none)
        assert [one.device for one in moved] == [model.device] * 3
        assert all(a is b for a, b in zip(to_device(model.device, *moved), moved, strict=True))
        nats = torch.zeros(3, 1, device=model.device) + halves.to(model.device)
        back = to_host(*moved, nats)
        assert count.waits == {"cpu": 1}
    given = [one.numpy() for one in (ids, some, none, halves)]
    for before, after in zip(given, back, strict=True):
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before)
    # On a CPU nothing is copied.
    for one, tensor in zip(given, to_device(torch.device("cpu"), *given), strict=True):
        assert np.shares_memory(one, to_host(tensor)[0]) or not one.size
