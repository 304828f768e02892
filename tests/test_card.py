"""The text of model cards; that training writes them is for test_finetune."""

from typing import Any

import pytest
from huggingface_hub import ModelCard

from setblock.card import card, with_choice

FACTS: Any = {
    "provenance": {"data": ["rows.jsonl"], "chat": False},
    "settings": {"seed": 1},
    "steps": 3,
}


@pytest.mark.parametrize(
    ("kind", "adapter", "words"),
    [
        ("sbd", False, "several tokens per\nforward"),
        ("gated", True, "the adapter drafts, the base\nverifies"),
        ("ntp", False, "next-token prediction alone"),
    ],
)
def test_the_hub_can_read_it(kind, adapter, words):
    text = card("me/mine", kind, "owner/base", adapter, losses={"matp_loss": 1.5}, **FACTS)
    read = ModelCard(text)
    front = read.data.to_dict()
    assert front["base_model"] == "owner/base"
    assert front["library_name"] == ("peft" if adapter else "transformers")
    assert "set-block-decoding" in front["tags"]
    assert words in read.text
    assert 'setblock generate me/mine --prompt "..."' in read.text
    for line in ('"rows.jsonl"', '"seed": 1', "after 3 steps", '"matp_loss": 1.5', "torch "):
        assert line in read.text


def test_a_local_base_is_left_out():
    text = card("mine", "sbd", None, False, losses={}, **FACTS)
    assert "base_model" not in ModelCard(text).data.to_dict()


def test_what_the_clock_chose_takes_the_place_of_how_to_choose():
    facts: Any = {**FACTS, "provenance": {"chat": True}}
    text = card("mine", "gated", None, True, losses={}, **facts)
    assert 'setblock generate mine --chat --prompt "..."' in text
    chosen = with_choice(text, "verified 3", 1.5, "some CPU")
    assert "chose, on prompts held out, verified 3: 1.50 times as\nfast as" in chosen
    assert "By default it decodes verified" not in chosen
    again = with_choice(chosen, None, 1.0, "some GPU")
    assert "found nothing faster (some GPU)" in again
    assert "verified 3" not in again
    assert ModelCard(again).data.to_dict() == ModelCard(text).data.to_dict()
    by_hand = with_choice("# Ours\n", "verified 3", 1.5, "some CPU")
    assert by_hand.startswith("# Ours\n\nBy the clock")
