"""The text of model cards; that training writes them is for test_finetune."""

import pytest
from huggingface_hub import ModelCard

from setblock.card import card

FACTS: dict = {
    "provenance": {"data": ["rows.jsonl"], "chat": False},
    "settings": {"seed": 1},
    "steps": 3,
}


@pytest.mark.parametrize(
    ("kind", "adapter", "words"),
    [
        ("sbd", False, "several tokens per\nforward"),
        ("gated", True, "drafts, the base verifies"),
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
