"""The bundled adapter on SmolLM2-135M-Instruct itself, whose weights are part of a pip package."""

import gc

import pytest
import torch
from networks import load

import setblock
from setblock.cli.showing import QUESTIONS
from setblock.generation import settings_for
from setblock.names import BUNDLED

# peft asks transformers by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@pytest.fixture(scope="module")
def smollm2():
    """Half a gigabyte, twice over where its base is loaded besides."""
    yield load("smollm2")
    gc.collect()


def test_it_writes_the_text_of_its_base_in_fewer_forwards(smollm2):
    assert smollm2.gated
    assert smollm2.defaults["mode"] == "verified"
    question = QUESTIONS["smollm2"][0]
    options = {"chat": True, "max_new_tokens": 32}
    [answer] = setblock.generate(smollm2, [question], **options)
    [plain] = setblock.generate(smollm2, [question], mode="ntp", **options)
    [own] = setblock.generate(load("smollm2-base"), [question], mode="ntp", **options)
    assert answer.settings.mode == "verified"
    assert answer.token_ids == plain.token_ids == own.token_ids
    assert answer.nfe < plain.nfe


@pytest.mark.parametrize(("threads", "blocks"), [(1, [3, 1, 1, 1, 1]), (2, [5, 3, 1, 1, 1])])
def test_what_it_chooses_for_a_batch_in_float32(smollm2, monkeypatch, threads, blocks):
    """Copies and drafts, copies alone, nothing."""
    assert smollm2.dtype == torch.float32
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = [settings_for(smollm2, rows) for rows in (1, 2, 4, 8, 256)]
    assert [one.block_size for one in found] == blocks
    assert [(one.branches, one.lookup) for one in found] == [(1, 8)] * 4 + [(1, 0)]
    held = settings_for(smollm2, 256, block_size=8)
    assert (held.draft, held.branches, held.lookup) == ("branches", 1, 0), "no pairs of forwards"


def test_its_files(smollm2):
    folder = BUNDLED["smollm2"]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 40_000_000
    card = (folder / "README.md").read_text()
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card
    assert "Apache-2.0" in card


def test_the_demo_asks_it_questions_of_its_own(run, smollm2, monkeypatch):
    monkeypatch.setattr("setblock.loading.load", lambda *_, **__: smollm2)
    original = setblock.stream
    monkeypatch.setattr(
        "setblock.live.stream",
        lambda *words, **given: original(*words, **{**given, "max_new_tokens": 8}),
    )
    answer = run("demo", "--model", "smollm2", "--json").json
    assert answer["model"] == "smollm2"
    assert [one["mode"] for one in answer["totals"]] == ["ntp", "verified"]
    texts = [one["text"] for one in answer["answers"]]
    assert texts[::2] == texts[1::2]
    assert len(texts) == 2 * len(QUESTIONS["smollm2"])
