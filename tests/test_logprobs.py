"""How likely tokens were: log-probabilities beside an answer."""

import math
from typing import Any

import jaxtyping
import pytest
import torch
from conftest import gated_adapter
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graphs import WAYS
from test_running import PROMPTS, answer_of, ended

import setblock
from setblock.generation import generate, stream
from setblock.loading import load
from setblock.running import Running

SHORT: dict[str, Any] = {"block_size": 4, "max_new_tokens": 14}


def scored(model: Any, prompt: list[int], ids: tuple[int, ...]) -> list[list[float]]:
    """Log-probabilities of all tokens at each place of an answer, by one forward of all of it."""
    text = torch.tensor([[*prompt, *ids]])
    logits = model.network(text).logits[0, len(prompt) - 1 : -1]
    logits[:, model.mask_token_id] = -torch.inf
    return logits.log_softmax(dim=-1).tolist()


@pytest.mark.parametrize("way", ["ntp", "verified", "copied", "drafts"])
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_those_of_the_network(checkpoint, way, temperature):
    """Of exact modes: without temperature, whatever else is decoded beside."""
    model = load(checkpoint("llama"))
    how: Any = {**SHORT, **WAYS[way], "temperature": temperature, "top_k": 9, "logprobs": 3}
    for prompt, one in zip(PROMPTS, generate(model, PROMPTS, **how), strict=True):
        assert one.logprobs is not None
        for token, told, known in zip(
            one.token_ids, one.logprobs, scored(model, prompt, one.token_ids), strict=True
        ):
            assert told.token_id == token
            assert told.logprob == pytest.approx(known[token], abs=1e-4)
            ranked = sorted(known, reverse=True)[:3]
            assert [value for _, value in told.top] == pytest.approx(ranked, abs=1e-4)
            assert all(known[id] == pytest.approx(value, abs=1e-4) for id, value in told.top)
        if not temperature:
            assert all(told.top[0][0] == told.token_id for told in one.logprobs)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_they_are_of_what_entropies_are_of(data):
    """In every mode, with penalties and lenience too; and are told as the answer goes on."""
    model = TableModel.random(seed=data.draw(st.integers(0, 5)), vocab_size=7)
    way = data.draw(st.sampled_from(list(WAYS.values())))
    how: Any = {**SHORT, **way, "temperature": data.draw(st.sampled_from([0, 1.3])), "logprobs": 20}
    if way["mode"] != "sbd" and data.draw(st.booleans()):
        how["repetition_penalty"] = 1.5
    if way["mode"] == "verified" and data.draw(st.booleans()):
        how["lenience"] = 0.1
    prompts = data.draw(st.lists(st.lists(st.integers(3, 5), min_size=1), min_size=1, max_size=3))
    told: dict[int, list[Any]] = {row: [] for row in range(len(prompts))}
    for reveal in stream(model, prompts, **how):
        told[reveal.row] += reveal.logprobs
        if reveal.generation is None:
            continue
        one = reveal.generation
        assert one.logprobs is not None
        assert one.logprobs == tuple(told[reveal.row])
        assert [each.token_id for each in one.logprobs] == list(one.token_ids)
        for each, nats in zip(one.logprobs, one.entropy, strict=True):
            values = dict(each.top)
            assert values[each.token_id] == pytest.approx(each.logprob, abs=1e-5)
            assert list(values.values()) == sorted(values.values(), reverse=True)
            assert sum(map(math.exp, values.values())) == pytest.approx(1, abs=1e-4)
            expected = -sum(math.exp(value) * value for value in values.values())
            assert nats == pytest.approx(expected, abs=1e-3)
        plain: Any = dict(how, logprobs=None)
        [without] = generate(model, [prompts[reveal.row]], **plain)
        assert without.logprobs is None
        if len(prompts) == 1:
            assert without.token_ids == one.token_ids


def test_lenient_tokens_have_their_own(checkpoint):
    model = load(checkpoint("llama"))
    how: Any = {**SHORT, "mode": "verified", "branches": 2, "lenience": 1e-6, "logprobs": 1}
    found = generate(model, PROMPTS, ignore_eos=True, **how)
    others = 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.logprobs is not None
        for told, known in zip(one.logprobs, scored(model, prompt, one.token_ids), strict=True):
            assert told.logprob == pytest.approx(known[told.token_id], abs=1e-4)
            others += told.top[0][0] != told.token_id
    assert others > 5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_those_of_a_chain_in_blocks(checkpoint, tmp_path):
    """A slot's distribution knows the token before it."""
    gated_adapter(load(checkpoint()), tmp_path, chain_width=8)
    model = load(tmp_path)
    how: Any = {**SHORT, "mode": "sbd", "solver": "fixed:2", "slide": True, "logprobs": 2}
    for one in generate(model, PROMPTS, **how):
        assert one.logprobs is not None
        assert all(told.top[0] == (told.token_id, told.logprob) for told in one.logprobs)


def test_of_a_form_those_that_it_allows(checkpoint):
    model = load(checkpoint("llama"))
    letters = model.encode("yn")
    for mode in ("ntp", "verified"):
        [one] = generate(model, [[5, 6]], regex="y|n", mode=mode, logprobs=5)
        assert one.logprobs is not None
        said, end = one.logprobs
        assert {token for token, _ in said.top} == set(letters[-2:])
        assert sum(math.exp(value) for _, value in said.top) == pytest.approx(1, abs=1e-5)
        assert (end.logprob, end.top) == (0, ((one.token_ids[-1], 0),))
    raw = scored(model, [5, 6], one.token_ids)[0]
    gap = said.top[0][1] - said.top[1][1]
    assert gap == pytest.approx(raw[said.top[0][0]] - raw[said.top[1][0]], abs=1e-4)


def test_a_stop_text_cuts_them():
    model = TableModel.random()
    [one] = generate(model, [[5]], mode="ntp", max_new_tokens=12, ignore_eos=True)
    stop = one.text[3:5]
    *_, last = stream(
        model, [[5]], mode="ntp", max_new_tokens=12, ignore_eos=True, stop=stop, logprobs=0
    )
    found = last.generation
    assert found is not None
    assert found.logprobs is not None
    assert [told.token_id for told in found.logprobs] == list(found.token_ids)
    assert all(told.top == () for told in found.logprobs)


def test_who_joins_is_told_the_same(checkpoint):
    model = load(checkpoint("llama"))
    for way in ("ntp", "sliding", "verified"):
        how: Any = {**SHORT, **WAYS[way], "logprobs": 2}
        asked = [
            (2 * row, answer_of(model, row, prompt, **how)) for row, prompt in enumerate(PROMPTS)
        ]
        found = ended(Running(room=3), asked)
        for row, prompt in enumerate(PROMPTS):
            [alone] = generate(model, [prompt], **how)
            for one, other in zip(found[row].logprobs or (), alone.logprobs or (), strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [id for id, _ in one.top] == [id for id, _ in other.top]


@pytest.mark.parametrize("value", [-1, 21, 1.0, True, "3"])
def test_refused(value: Any, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run it
    with pytest.raises(ValueError, match=r"logprobs must be an integer in 0\.\.20, got"):
        generate(TableModel.random(), [[5]], logprobs=value)


def test_the_command(run):
    words = ("generate", "nano", "--chat", "What is 384 + 967?", "--mode", "ntp")
    found = run(*words, "--logprobs", "2", "--json").json
    assert [one["token_id"] for one in found["logprobs"]] == found["token_ids"]
    assert all(len(one["top"]) == 2 and one["logprob"] <= 0 for one in found["logprobs"])
    assert run(*words, "--json").json["logprobs"] is None
    assert "--logprobs is for --json, got 2 without it" in run(*words, "--logprobs", "2").error
    error = run(*words, "--logprobs", "99", "--json").error
    assert "logprobs must be an integer in 0..20, got 99" in error
    assert setblock.TokenLogprob(1, -0.5, ()).top == ()
