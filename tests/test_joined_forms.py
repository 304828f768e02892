"""Answers of different forms, and of none, that are decoded together."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import Desk
from test_grammar import PATTERNS, PERSON, SUMS
from test_running import DRAFTS, PROMPTS, alone, among, answer_of, ended, same, told

from setblock import reading as module
from setblock.fields import Refused
from setblock.generation import settings_for
from setblock.loading import load
from setblock.running import Running

FORMS: list[dict[str, Any]] = [
    {"json_schema": PERSON}, {}, {"regex": PATTERNS[5]}, {"grammar": SUMS}, {"regex": PATTERNS[0]},
]  # fmt: skip
VERIFIED: list[dict[str, Any]] = [{"mode": "verified", **drafts} for drafts in DRAFTS]


@pytest.fixture(scope="module")
def networks(checkpoint):
    """Random float32 networks with a token for each byte."""
    return {kind: load(checkpoint(kind), device="cpu") for kind in ("llama", "gemma3")}


@pytest.mark.parametrize("way", [{"mode": "ntp"}, *VERIFIED])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_each_is_told_what_it_is_told_alone(networks, way, temperature):
    how = {**way, "temperature": temperature}
    for model in networks.values():
        hows = [
            {**how, **form, "max_new_tokens": 40 - 5 * row, "seed": row}
            for row, form in enumerate(FORMS)
        ]
        asked = [
            (2 * row, answer_of(model, row, prompt, **own))
            for row, (prompt, own) in enumerate(zip(PROMPTS, hows, strict=True))
        ]
        batch = Running(room=4)
        batch.begin([asked[0][1]])
        assert all(batch.suits(answer) for _, answer in asked[1:])
        found = ended(batch, asked[1:])
        for row, (prompt, own) in enumerate(zip(PROMPTS, hows, strict=True)):
            same(found[row], alone(model, prompt, **own))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_forms_at_any_time_with_any_drafts(networks, data):
    model = networks["llama"]
    asked, expected, turn = [], [], 0
    for row in range(data.draw(st.integers(1, 5))):
        prompt = data.draw(st.sampled_from(PROMPTS))
        limit = data.draw(st.integers(1, 30))
        how = {"max_new_tokens": limit, "seed": row, **data.draw(st.sampled_from(FORMS))}
        turn += data.draw(st.integers(0, 6))
        answer = answer_of(model, row, prompt, mode="verified", block_size=1, **how)
        answer.among = among(model, mode="verified", **how)
        asked.append((turn, answer))
        expected.append(alone(model, prompt, mode="ntp", **how))
    found = ended(Running(room=5), asked)
    for row, one in enumerate(expected):
        assert found[row].token_ids == one.token_ids


def test_what_has_no_alternative_is_drafted_as_soon_as_drafts_are_other_ones(networks):
    """26 tokens and the end: five by a forward each, the others in three forwards."""
    model, text = networks["llama"], "abcdefghijklmnopqrstuvwxyz"
    how: Any = {"mode": "verified", "block_size": 1, "max_new_tokens": 40}
    answer = answer_of(model, 0, [5], regex=text, **how)
    answer.among = lambda count: settings_for(model, **how, lookup=8 * (count > 1))
    found = ended(Running(room=2), [(0, answer), (4, answer_of(model, 1, [6], **how))])
    assert (found[0].text, found[0].nfe) == (text, 8)


@pytest.mark.parametrize("mode", ["ntp", "verified"])
def test_where_nothing_can_follow_one_goes_alone(networks, monkeypatch, mode):
    """As is known of some forms on the way only."""
    model = networks["llama"]
    how: Any = {"mode": mode, "max_new_tokens": 20}
    expected = alone(model, [5], **how), alone(model, [6], regex=PATTERNS[5], **how)
    monkeypatch.setattr(module, "LIMITS", {"max_items_in_row": 50})
    large = {"type": "object", "properties": {f"key{n}": {} for n in range(99)}}
    hows = [how, {**how, "regex": PATTERNS[5]}, {**how, "json_schema": large}]
    desk = Desk(model)
    for n, own in enumerate(hows):
        desk.ask([5 + n], **own)
    desk.wait()
    assert [told(desk.results[n]) for n in (0, 1)] == [told(one) for one in expected]
    error = desk.results[2]
    assert isinstance(error, ValueError | Refused)
    assert "can't be followed" in str(error)
    with pytest.raises(ValueError, match="json_schema can't be followed"):
        alone(model, [7], json_schema=large, **how)
