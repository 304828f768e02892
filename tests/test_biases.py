"""What is added to logits, and ends that come too early: the same in every way of decoding."""

import math
from typing import Any

import pytest
import torch
from fakes import EOS, TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_penalties import PROMPTS, VERIFIED, agree_in_every_way, agree_with_the_slow_way

from setblock.generation import generate, settings_for
from setblock.loading import load
from setblock.sampling import without_ends

BIAS = {5: 4.0, 9: -100.0, 30: 2.5, 41: -1.5}
ALL: dict[str, Any] = {"logit_bias": BIAS, "min_new_tokens": 14, "repetition_penalty": 1.2}


@given(
    st.integers(0, 3),
    st.dictionaries(st.integers(3, 11), st.floats(-4, 4)),
    st.integers(0, 16),
    st.floats(0, 9),
    st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_tokens_are_those_of_a_slow_way(seed, bias, least, ending, way):
    biases = {**bias, EOS: ending}
    agree_with_the_slow_way(
        seed, VERIFIED[way], logit_bias=biases, min_new_tokens=least, presence_penalty=0.5
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_as_transformers_has_them(checkpoint, kind):
    model = load(checkpoint(kind))
    network = model.network
    end = min(model.eos_token_ids)
    pairs = [[[token], bias] for token, bias in {**BIAS, end: 6.0}.items()]
    for prompt in PROMPTS:
        for least in (0, 1, 7):
            theirs = network.generate(
                torch.tensor([prompt]), do_sample=False, sequence_bias=pairs, max_new_tokens=20,
                min_new_tokens=least, suppress_tokens=[model.mask_token_id], pad_token_id=0,
            )  # fmt: skip
            how: Any = {"logit_bias": {**BIAS, end: 6.0}, "min_new_tokens": least}
            for mode in ("ntp", "verified"):
                [found] = generate(model, [prompt], mode=mode, max_new_tokens=20, **how)
                assert list(found.token_ids) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("how", [ALL, {"logit_bias": BIAS}, {"min_new_tokens": 20}])
@pytest.mark.parametrize("noise", [{}, {"temperature": 1.0, "seed": 4}])
def test_verified_says_what_ntp_says(checkpoint, how, noise):
    model = load(checkpoint("gemma3"))
    end = {min(model.eos_token_ids): 9.0}
    how = {**how, "logit_bias": {**how.get("logit_bias", {}), **end}}
    agree_in_every_way(model, how, noise)


def test_an_end_that_no_token_is(monkeypatch):
    model = TableModel.random()
    monkeypatch.setattr(model, "eos_token_ids", frozenset([EOS, 5000]))
    options: Any = {"mode": "ntp", "max_new_tokens": 9, "min_new_tokens": 8}
    [found] = generate(model, [[5]], logit_bias={EOS: 50.0}, **options)
    assert found.token_ids.index(EOS) == 8


def test_a_form_that_ends_first_ends(nano):
    options: Any = {"chat": True, "regex": "(a|b){3,8}", "min_new_tokens": 40}
    found = [generate(nano, "hi", mode=mode, **options)[0] for mode in ("ntp", "verified")]
    assert found[0].token_ids == found[1].token_ids
    assert len(found[0].text) == 8  # as long as may be
    assert found[0].finish_reason == "eos"


def test_where_nothing_else_is_left_an_end_stays():
    logits = torch.tensor([[[1.0, -math.inf, 2.0], [1.0, -math.inf, -math.inf], [1.0, 0.0, 2.0]]])
    early = torch.tensor([[True, True, False]])
    found = without_ends(logits, torch.tensor([0, 1]), early)
    assert found[0, 0].tolist() == [-math.inf, -math.inf, 2.0]
    assert found[0, 1:].tolist() == logits[0, 1:].tolist()


@pytest.mark.parametrize("given", [{"logit_bias": {5: 1.0}}, {"min_new_tokens": 2}])
def test_blocks_have_none(checkpoint, given):
    model = load(checkpoint("llama", settings={"trained": True}))
    [name] = given
    assert settings_for(model, logit_bias={}, min_new_tokens=0).mode == "sbd"
    assert settings_for(model, **given).mode == "verified"
    with pytest.raises(ValueError, match=f"^solver is for mode sbd, in which {name} can't be used"):
        settings_for(model, solver="fixed:2", **given)
    with pytest.raises(ValueError, match=f"{name} is for modes ntp and verified.* in mode sbd"):
        settings_for(model, mode="sbd", **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": [5]}, r"logit_bias must be a dict of token ids and numbers, got \[5\]"),
        ({"logit_bias": {"5": 1}}, "logit_bias must be of token ids, each with a number in -100"),
        ({"logit_bias": {-1: 1}}, "logit_bias must be of token ids.*, got -1: 1"),
        ({"logit_bias": {5: 101}}, r"a number in -100\.\.100, got 5: 101"),
        ({"logit_bias": {5: True}}, "got 5: True"),
        ({"logit_bias": {5: math.nan}}, "got 5: nan"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias may be of 1024 tokens, got 10"),
        ({"min_new_tokens": -1}, "min_new_tokens must be an integer of at least 0, got -1"),
        ({"min_new_tokens": 1.0}, "min_new_tokens must be an integer"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        settings_for(TableModel.random(), mode="ntp", **options)


def test_what_the_model_or_the_answer_has_no_room_for():
    model = TableModel.random()
    with pytest.raises(ValueError, match="min_new_tokens must be at most 8, the new tokens that"):
        generate(model, [[5]], mode="ntp", min_new_tokens=9, max_new_tokens=8)
    message = f"logit_bias must be of token ids below {model.vocab_size}, the vocabulary of table"
    with pytest.raises(ValueError, match=message):
        generate(model, [[5]], mode="ntp", logit_bias={model.vocab_size: 1.0})


def test_records_name_them_where_they_are_used():
    model = TableModel.random()
    assert not settings_for(model, mode="ntp").described.keys() & ALL.keys()
    told = settings_for(model, mode="ntp", **ALL).described
    assert dict(told["logit_bias"]) == BIAS
    assert told["min_new_tokens"] == 14
