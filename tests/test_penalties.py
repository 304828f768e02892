"""Penalties of tokens that a text has, and min-p: transformers' own, and the same in every way."""

import math
from typing import Any

import pytest
import torch
import transformers
from conftest import gated_adapter
from fakes import EOS, TableModel
from hypothesis import given, settings
from hypothesis import strategies as st

from setblock import settings as module
from setblock.generation import generate, settings_for
from setblock.loading import load
from setblock.sampling import Sampler

PROMPTS = [[5, 9, 30, 9, 5], [7, 7, 12, 40, 8, 3, 3, 9], [6] * 5]
ALL: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
}
FAVOURS: dict[str, Any] = {"repetition_penalty": 0.8, "frequency_penalty": -0.5}
VERIFIED: list[dict[str, Any]] = [
    {},
    {"branches": 2, "seeds": 1},
    {"branches": 1, "lookup": 6},
    {"block_size": 1, "lookup": 5},
    {"draft": "solver", "solver": "fixed:2"},
]


def penalised(logits: list[float], prompt: list[int], answer: list[int], how: Any) -> list[float]:
    """The slow way, a token at a time."""
    found = []
    for token, logit in enumerate(logits):
        factor = how.get("repetition_penalty", 1)
        if token in (*prompt, *answer):
            logit = logit / factor if logit > 0 else logit * factor
        logit -= how.get("frequency_penalty", 0) * answer.count(token)
        logit -= how.get("presence_penalty", 0) * (token in answer)
        found.append(logit)
    return found


def agree_in_every_way(model: Any, how: dict[str, Any], noise: dict[str, Any]) -> None:
    """And say something else than without."""
    options: Any = {"max_new_tokens": 24, "block_size": 4, "logprobs": 2, **how, **noise}
    plain = generate(model, PROMPTS, mode="ntp", **options)
    unbound: Any = {**options, **dict.fromkeys(how)}
    free = generate(model, PROMPTS, mode="ntp", **unbound)
    assert [one.token_ids for one in plain] != [one.token_ids for one in free]
    for way in VERIFIED:
        for size in (1, 3):
            found = generate(model, PROMPTS, mode="verified", batch_size=size, **{**options, **way})
            assert [one.token_ids for one in found] == [one.token_ids for one in plain]
            for one, other in zip(found, plain, strict=True):
                assert one.entropy == pytest.approx(other.entropy, abs=1e-4)
                told, wanted = one.logprobs or (), other.logprobs or ()
                assert [each.logprob for each in told] == pytest.approx(
                    [each.logprob for each in wanted], abs=1e-4
                )


def slowly(model: TableModel, prompt: list[int], count: int, how: dict[str, Any]) -> list[int]:
    """The greedy answer, straight from the table."""
    answer: list[int] = []
    while len(answer) < count and (how.get("ignore_eos") or EOS not in answer):
        text = [*prompt, *answer]
        logits = model.next_token[len(text) - 1, text[-1]].tolist()
        logits[model.mask_token_id] = -math.inf
        for token, bias in how.get("logit_bias", {}).items():
            logits[token] += bias
        logits = penalised(logits, prompt, answer, how)
        if len(answer) < how.get("min_new_tokens", 0):
            logits[EOS] = -math.inf
        answer.append(max(range(len(logits)), key=lambda token: logits[token]))
    return answer


def agree_with_the_slow_way(seed: int, way: dict[str, Any], **how: Any) -> None:
    model = TableModel.random(seed)
    prompts = [[5, 3, 5], [7], [4, 4, 4, 9]]
    expected = [slowly(model, prompt, 16, how) for prompt in prompts]
    options: Any = {**how, "max_new_tokens": 16, "block_size": 4}
    ways: Any = ({"mode": "ntp"}, {"mode": "verified", **way})
    for one in ways:
        found = generate(model, prompts, **{**options, **one})
        assert [list(answer.token_ids) for answer in found] == expected


@given(st.integers(0, 3), st.floats(0.5, 3), st.floats(-2, 3), st.floats(-2, 3), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_tokens_are_those_of_a_slow_way(seed, repetition, presence, frequency, way):
    how = {"repetition_penalty": repetition, "presence_penalty": presence}
    how["frequency_penalty"] = frequency
    agree_with_the_slow_way(seed, VERIFIED[way], ignore_eos=True, **how)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_repetition_is_penalised_as_in_transformers(checkpoint, kind):
    model = load(checkpoint(kind))
    network = model.network
    for penalty in (1.3, 0.7):
        for prompt in PROMPTS:
            theirs = network.generate(
                torch.tensor([prompt]), do_sample=False, repetition_penalty=penalty,
                max_new_tokens=20, suppress_tokens=[model.mask_token_id], pad_token_id=0,
            )  # fmt: skip
            expected = theirs[0, len(prompt) :].tolist()
            for mode in ("ntp", "verified"):
                [found] = generate(
                    model, [prompt], mode=mode, repetition_penalty=penalty, max_new_tokens=20
                )
                assert list(found.token_ids) == expected


@pytest.mark.parametrize(
    "how", [ALL, FAVOURS, {"presence_penalty": 1.5}], ids=["all", "favours", "one"]
)
@pytest.mark.parametrize("noise", [{}, {"temperature": 1.0, "seed": 4, "min_p": 0.05}])
def test_verified_says_what_ntp_says(checkpoint, how, noise):
    agree_in_every_way(load(checkpoint("gemma3")), how, noise)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_drafts_that_a_chain_joins(checkpoint, tmp_path):
    gated_adapter(load(checkpoint()), tmp_path, chain_width=8)
    model = load(tmp_path)
    options: Any = {"max_new_tokens": 20, "block_size": 4, **ALL}
    plain = generate(model, PROMPTS, mode="ntp", **options)
    found = generate(model, PROMPTS, mode="verified", branches=2, **options)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_the_largest_penalties_leave_numbers(nano):
    for how in ({"frequency_penalty": 1000}, {"presence_penalty": -1000}):
        options: Any = {"max_new_tokens": 40, "ignore_eos": True, **how}
        found = [generate(nano, "hi", mode=mode, **options)[0] for mode in ("ntp", "verified")]
        assert found[0].token_ids == found[1].token_ids
    options = {"max_new_tokens": 20, "ignore_eos": True, "repetition_penalty": 0.01}
    assert generate(nano, "hi", mode="ntp", **options)[0].num_tokens == 20


def test_forms_are_kept_to(nano):
    options: Any = {"chat": True, "regex": "(a|b){8}", "frequency_penalty": 3.0}
    found = [generate(nano, "hi", mode=mode, **options)[0] for mode in ("ntp", "verified")]
    assert found[0].token_ids == found[1].token_ids
    assert set(found[0].text) == {"a", "b"}


# ------------------------------------------------------------------ min-p


@given(st.integers(0, 1000), st.floats(1e-6, 1), st.floats(0.1, 3))
@settings(deadline=None)
def test_min_p_keeps_what_transformers_keeps(seed, min_p, temperature):
    torch.manual_seed(seed)
    logits = 4 * torch.randn(1, 3, 50)
    rows, place = torch.tensor([0]), torch.arange(3)[None]
    sampler = Sampler(temperature=temperature, min_p=min_p)
    kept = sampler.perturbed(logits, rows, place) > -torch.inf
    theirs = transformers.MinPLogitsWarper(min_p=min_p)
    expected = theirs(None, logits[0] / temperature) > -torch.inf  # type: ignore[arg-type]
    margin = (logits[0] / temperature).log_softmax(-1)
    margin = margin - margin.amax(-1, keepdim=True) - math.log(min_p)
    clear = margin.abs() > 1e-4  # where rounding does not decide
    assert (kept[0] == expected)[clear].all()


def test_min_p_of_blocks(checkpoint):
    """All samples are greedy where only the likeliest token is left."""
    model = load(checkpoint("llama", settings={"trained": True}))
    for mode in ("sbd", "ntp", "verified"):
        options: Any = {"mode": mode, "max_new_tokens": 12, "block_size": 4}
        greedy = generate(model, PROMPTS, **options)
        sampled = generate(model, PROMPTS, temperature=1.0, min_p=1.0, **options)
        assert [one.token_ids for one in sampled] == [one.token_ids for one in greedy]


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("name", module.PENALTIES)
def test_blocks_have_none(checkpoint, name):
    model = load(checkpoint("llama", settings={"trained": True}))
    assert settings_for(model).mode == "sbd"
    neutral: Any = {name: module.PENALTIES[name]}
    given: Any = {name: 0.5}
    both: Any = {**module.PENALTIES, **given}  # those that change nothing are not to blame
    assert settings_for(model, **neutral).mode == "sbd"
    assert settings_for(model, **given).mode == "verified"
    message = f"^solver is for mode sbd, in which {name} can't be used: leave one of them out; got"
    with pytest.raises(ValueError, match=message):
        settings_for(model, solver="fixed:2", **both)
    assert settings_for(model, solver="fixed:2", draft="solver", **given).draft == "solver"
    with pytest.raises(
        ValueError, match=f"{name} is for modes ntp and verified.*got 0.5 in mode sbd"
    ):
        settings_for(model, mode="sbd", **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be a number in 0.01..100, got 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be a number in 0.01..100"),
        ({"repetition_penalty": "high"}, "repetition_penalty must be a number in 0.01..100"),
        ({"presence_penalty": 1e39}, "presence_penalty must be a number in -1000..1000, got 1e"),
        ({"presence_penalty": 10**400}, "presence_penalty must be a number in -1000..1000, got 1"),
        ({"frequency_penalty": True}, "frequency_penalty must be a number in -1000..1000, got Tr"),
        ({"min_p": -0.1}, r"min_p must be a number in 0..1 \(0 is off\), got -0.1"),
        ({"min_p": 1.5}, "min_p must be a number in 0..1"),
        ({"min_p": False}, "min_p must be a number in 0..1"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        settings_for(TableModel.random(), mode="ntp", **options)


def test_records_name_them_where_they_are_used():
    model = TableModel.random()
    assert not settings_for(model, mode="ntp").described.keys() & module.PENALTIES.keys()
    assert "min_p" not in settings_for(model, mode="ntp").described["sampler"]
    assert settings_for(model, mode="ntp", min_p=0.1).described["sampler"]["min_p"] == 0.1
    told = settings_for(model, mode="ntp", **ALL).described
    assert {name: told[name] for name in ALL} == ALL
