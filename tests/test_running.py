"""Answers that join others on their way: each gets what it would get alone."""

from collections.abc import Sequence
from typing import Any

import fakes
import numpy as np
import pytest
from conftest import gated_adapter
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graphs import WAYS

from setblock import graphs, running
from setblock.generation import checked, generate, settings_for
from setblock.loading import load
from setblock.prompt_cache import PromptCache
from setblock.results import Generation
from setblock.running import Answer, Running
from setblock.state import CHUNK

PROMPTS = [[5, 9, 30, 7], [8], [40, 41, 42] * 9, [5, 9, 30, 8, 2], [7, 7]]
SHORT: dict[str, Any] = {"block_size": 4, "max_new_tokens": 14}


def answer_of(model: Any, row: int, prompt: list[int], **options: Any) -> Answer:
    given: Any = options
    found, grammar = checked(model, [prompt], 1, given)
    return Answer(row, prompt, model, found, 0, True, grammar)


def ended(batch: Running, waiting: Sequence[tuple[int, Answer]]) -> dict[int, Generation]:
    """Results by row; each of the waiting begins at its turn or, in order, as soon as it may."""
    results, turn, queue = {}, 0, list(waiting)
    while queue or len(batch):
        if queue and turn >= queue[0][0] and not batch.coming:
            answer = queue[0][1]
            if (not len(batch) or batch.suits(answer)) and batch.begin([answer]):
                del queue[0]
        reveals = [
            *(batch.step() if batch.answers else ()),
            *(batch.come() if batch.coming else ()),
        ]
        for reveal in reveals:
            if reveal.generation is not None:
                results[reveal.row] = reveal.generation
        turn += 1
    return results


def told(one: Generation) -> Any:
    return one.token_ids, one.text, one.nfe, one.reveal_step, one.finish_reason, one.settings


def same(found: Generation, expected: Generation) -> None:
    assert told(found) == told(expected)
    assert found.prefill_forwards == expected.prefill_forwards
    assert np.allclose(found.entropy, expected.entropy, atol=1e-4)


def alone(model: Any, prompt: list[int], **options: Any) -> Generation:
    return generate(model, [prompt], **options)[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-window"])
def test_who_joins_is_told_the_same(checkpoint, kind, way):
    """Greedily and sampled, each with its own seed, limit and stop text."""
    model = load(checkpoint(kind))
    for more in ({}, {"temperature": 1.0, "ignore_eos": True}):
        hows = [
            {**SHORT, **WAYS[way], **more, "max_new_tokens": 20 - 3 * row, "seed": row}
            for row in range(len(PROMPTS))
        ]
        hows[1]["stop"] = "a"
        asked = [
            (2 * row, answer_of(model, row, prompt, **how))
            for row, (prompt, how) in enumerate(zip(PROMPTS, hows, strict=True))
        ]
        found = ended(Running(room=3), asked)
        for row, (prompt, how) in enumerate(zip(PROMPTS, hows, strict=True)):
            same(found[row], alone(model, prompt, **how))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_gated_adapter_whose_drafts_are_joined(checkpoint, tmp_path):
    gated_adapter(load(checkpoint()), tmp_path, chain_width=8)
    model = load(tmp_path)
    for way in (WAYS[name] for name in ("sbd", "seeded", "verified")):
        how = {**SHORT, **way, "temperature": 1.0}
        asked = [
            (row, answer_of(model, row, prompt, **how, seed=row))
            for row, prompt in enumerate(PROMPTS)
        ]
        for row, found in ended(Running(room=5), asked).items():
            same(found, alone(model, PROMPTS[row], **how, seed=row))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_answers_at_any_time(data):
    """Over a cache that checks itself what it is asked to hold, filled from earlier prompts."""
    model = TableModel.random(seed=data.draw(st.integers(0, 5)), vocab_size=7)
    how = data.draw(st.sampled_from(list(WAYS.values())))
    kept = data.draw(st.sampled_from([None, PromptCache(30)]))
    asked, expected, turn = [], [], 0
    for row in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(3, 5), min_size=1, max_size=8))
        limit = data.draw(st.integers(4, 14))
        options = {**SHORT, **how, "max_new_tokens": limit, "temperature": 1.0, "seed": row % 2}
        turn += data.draw(st.integers(0, 5))
        asked.append((turn, answer_of(model, row, prompt, **options)))
        expected.append(alone(model, prompt, **options))
    found = ended(Running(room=6, prompt_cache=kept), asked)
    # Beside three others copies are cut short, so that forwards may be others.
    cut = len(expected) > 3 and expected[0].settings.lookup > 0
    for row, one in enumerate(expected):
        if cut:
            assert (found[row].token_ids, found[row].text) == (one.token_ids, one.text)
        else:
            assert told(found[row]) == told(one)


DRAFTS: list[dict[str, Any]] = [
    {"block_size": 6, "branches": 3, "seeds": 1},
    {"block_size": 2, "branches": 1, "lookup": 5},
    {"block_size": 1, "lookup": 8},
    {"block_size": 1},
    {"draft": "solver", "solver": "fixed:2", "block_size": 5},
]


def among(model: Any, **options: Any) -> Any:
    """Other drafts for every number of answers, none of which changes a token."""

    def settings_of(count: int) -> Any:
        return settings_for(model, count, **options, **DRAFTS[count % len(DRAFTS)])

    return settings_of


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_how_much_is_drafted_depends_on_how_many_there_are(checkpoint, kind):
    """Not what is said."""
    model = load(checkpoint(kind))
    for more in ({}, {"temperature": 1.0, "ignore_eos": True}):
        hows = [
            {"mode": "verified", "max_new_tokens": 24 - 3 * row, "seed": row, **more}
            for row in range(len(PROMPTS))
        ]
        asked = []
        for row, (prompt, how) in enumerate(zip(PROMPTS, hows, strict=True)):
            answer = answer_of(model, row, prompt, **how)
            answer.among = among(model, **how)
            asked.append((2 * row, answer))
        found = ended(Running(room=4), asked)
        for row, (prompt, how) in enumerate(zip(PROMPTS, hows, strict=True)):
            assert found[row].token_ids == alone(model, prompt, **{**how, "mode": "ntp"}).token_ids


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_drafts_may_change_at_any_time(data):
    model = TableModel.random(seed=data.draw(st.integers(0, 5)), vocab_size=7)
    asked, expected, turn = [], [], 0
    for row in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(3, 5), min_size=1, max_size=8))
        how = {"max_new_tokens": data.draw(st.integers(1, 14)), "temperature": 1.0, "seed": row}
        turn += data.draw(st.integers(0, 4))
        answer = answer_of(model, row, prompt, mode="verified", block_size=1, **how)
        answer.among = among(model, mode="verified", **how)
        asked.append((turn, answer))
        expected.append(alone(model, prompt, mode="ntp", **how))
    found = ended(Running(room=6), asked)
    for row, one in enumerate(expected):
        assert found[row].token_ids == one.token_ids


@pytest.mark.parametrize("way", ["ntp", "sbd", "verified"])
def test_a_long_prompt_is_encoded_between_the_steps_of_others(way):
    model = TableModel.random(context_length=4000, vocab_size=8)
    text = np.random.default_rng(0).integers(3, 8, 2 * CHUNK + 5).tolist()
    how = {**SHORT, **WAYS[way], "ignore_eos": True}
    batch = Running(room=2)
    first, long = (answer_of(model, row, one, **how) for row, one in enumerate(([5, 6], text)))
    batch.begin([first])
    batch.come()
    batch.begin([long])
    said = []
    while batch.coming:
        said.append(len(first.ids))
        batch.step()
        batch.come()
    assert len(said) == 3, "parts of the prompt"
    assert sorted(set(said)) == said, "the other goes on meanwhile"
    results = ended(batch, [])
    same(results[1], alone(model, text, **how))
    same(results[0], alone(model, [5, 6], **how))


# ------------------------------------------------------------------ who leaves


def test_who_leaves_does_not_disturb_the_others():
    """On its way, while it comes, and as the last; what is encoded is kept."""
    model, kept = TableModel.random(), PromptCache()
    how: Any = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 9}
    batch = Running(room=4, prompt_cache=kept)
    answers = [answer_of(model, row, [3 + row] * 4, **how) for row in range(4)]
    for answer in answers[:3]:
        batch.begin([answer])
        batch.come()
    batch.step()
    batch.begin([answers[3]])
    batch.leave([answers[0], answers[3]])
    assert (batch.answers, batch.coming) == ([answers[2], answers[1]], [])
    said = answers[0].ids
    assert kept.num_tokens == 4 + len(said) - 1 + 2 * 4, "and the others' prompts"
    results = ended(batch, [])
    for row in (1, 2):
        same(results[row], alone(model, [3 + row] * 4, **how))
    [again] = generate(model, [[3] * 4 + said], prompt_cache=kept, **how)
    assert again.cached_tokens == 4 + len(said) - 1
    last = answer_of(model, 0, [3, 4], **how)
    batch.begin([last])
    batch.come()
    batch.leave([last])
    assert len(batch) == 0
    same(ended(batch, [(0, answer_of(model, 5, [6], **how))])[5], alone(model, [6], **how))


def test_memory_is_given_back_once_nobody_is_there(checkpoint):
    model = load(checkpoint())
    batch = Running(room=2)
    ended(batch, [(0, answer_of(model, 0, [5, 6], **SHORT, mode="ntp"))])
    assert batch._state is None


# ------------------------------------------------------------------ who may join


def test_who_is_decoded_together():
    model, other = TableModel.random(), TableModel.random()
    batch = Running(room=3)
    batch.begin([answer_of(model, 0, [5], mode="sbd", solver="fixed:2", block_size=4)])

    def suits(one: Any = model, **options: Any) -> bool:
        given = {"mode": "sbd", "solver": "fixed:2", "block_size": 4, **options}
        return batch.suits(answer_of(one, 1, [6, 7], **given))

    assert suits()
    assert suits(seed=5, stop="a", max_new_tokens=4)
    assert not suits(max_new_tokens=3), "shorter than a block"
    assert suits(temperature=1.0, top_k=3)
    assert not suits(logprobs=2)
    assert not suits(solver="fixed:3")
    assert not suits(block_size=5)
    assert not suits(mode="ntp", solver=None)
    assert not suits(ignore_eos=True)
    assert not suits(other)
    closed = Running()
    closed.begin([answer_of(model, 0, [5], mode="ntp")])
    assert not closed.suits(answer_of(model, 1, [5], mode="ntp")), "which nobody may join"


def test_a_batch_whose_forward_failed_goes_on_without_those(monkeypatch):
    model = TableModel.random()
    how: Any = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 6}
    first, second, third = (answer_of(model, row, [3 + row], **how) for row in range(3))
    batch = Running(room=3)
    batch.begin([first])
    batch.come()
    batch.begin([second])

    def broken(*given: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(running.DecodeState, "join", broken)
        assert batch.come()  # what its first step brought
    assert (batch.answers, batch.coming) == ([first], [])
    second = answer_of(model, 1, [4], **how)
    batch.begin([second])
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", broken)
        assert batch.step() == []
    assert (batch.answers, batch.coming) == ([], [second])
    assert [(one.row, type(error)) for one, error in batch.failed] == [
        (1, MemoryError),
        (0, MemoryError),
    ]
    found = ended(batch, [(0, third)])
    for row, answer in ((1, second), (2, third)):
        same(found[row], alone(model, list(answer.prompt), **how))


def test_who_comes_as_the_last_one_leaves_has_its_memory(checkpoint):
    model = load(checkpoint())
    short: Any = {**SHORT, "mode": "ntp", "ignore_eos": True, "max_new_tokens": 3}
    batch = Running(room=2)
    batch.begin([answer_of(model, 0, [5], **short)])
    batch.come()
    long = answer_of(model, 1, [7] * 90, **{**short, "max_new_tokens": 60})
    batch.begin([long])
    while batch.answers:
        batch.step()
    found = ended(batch, [])
    same(found[1], alone(model, [7] * 90, **{**short, "max_new_tokens": 60}))


def test_who_comes_stays_where_graphs_are(checkpoint, simulated_graphs, monkeypatch):
    """Also where the forward of those who were there has failed."""
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    how: Any = {**SHORT, "mode": "ntp", "ignore_eos": True}
    first, second = answer_of(model, 0, [5, 6], **how), answer_of(model, 1, [7], **how)
    batch = Running(room=2)
    batch.begin([first])
    batch.come()
    batch.begin([second])
    with monkeypatch.context() as patch:
        patch.setattr(running.DecodeState, "step", lambda state: 1 / 0)
        batch.step()
    assert [type(error) for _, error in batch.failed] == [ZeroDivisionError]
    batch.come()
    state: Any = batch._state
    assert state.cache in model._graphs._of  # type: ignore[union-attr]
    same(ended(batch, [])[1], alone(plain, [7], **how))


def test_no_more_than_there_is_room_for():
    model = TableModel.random()
    how: Any = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 30}
    for room, most in ((1, 1), (3, 3), (None, 1)):
        batch = Running(room=room)
        for row in range(4):
            began = batch.begin([answer_of(model, row, [3 + row], **how)])
            assert began == (row < most)
            if began:
                batch.come()


def test_more_is_drafted_for_those_who_may_say_more():
    """Where the first says how, and may say little itself."""
    model = TableModel.random(context_length=400)
    how: Any = {"mode": "verified", "ignore_eos": True, "block_size": 1}
    limits = [200, 6, 150]

    def settings_of(count: int) -> Any:
        large = {"block_size": 16, "branches": 16, "seeds": 2}
        drafts: Any = {**how, **(large if count == 2 else {}), "max_new_tokens": 6}
        return settings_for(model, **drafts)

    asked = []
    for row, (turn, limit) in enumerate(zip((0, 0, 160), limits, strict=True)):
        answer = answer_of(model, row, [3 + row], **how, max_new_tokens=limit)
        answer.among = settings_of
        asked.append((turn, answer))
    found = ended(Running(room=3), asked)
    for row, limit in enumerate(limits):
        expected = alone(model, [3 + row], mode="ntp", ignore_eos=True, max_new_tokens=limit)
        assert found[row].token_ids == expected.token_ids


def test_an_answer_whose_text_fails_goes_alone(monkeypatch):
    model = TableModel.random()
    how: Any = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 6}
    kept = PromptCache()
    batch = Running(room=3, prompt_cache=kept)
    answers = [answer_of(model, row, [3 + row] * 3, **how) for row in range(3)]
    for answer in answers:
        batch.begin([answer])
        batch.come()

    def broken(*given: Any) -> None:
        raise ValueError("not numbers")

    monkeypatch.setattr(answers[1].pieces, "extend", broken)
    batch.step()
    assert [(one.row, str(error)) for one, error in batch.failed] == [(1, "not numbers")]
    assert kept.num_tokens == 3 * 3, "prompts, nothing of an error"
    found = ended(batch, [])
    for row in (0, 2):
        same(found[row], alone(model, [3 + row] * 3, **how))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
def test_a_prompt_cache_that_lacks_memory_is_emptied(monkeypatch, caplog, error):
    """Which torch says of a CPU by a RuntimeError."""
    model, kept = TableModel.random(), PromptCache()
    how: Any = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 4}
    generate(model, [[3, 4]], prompt_cache=kept, **how)
    assert kept.num_tokens

    def scarce(*given: Any) -> None:
        raise error

    monkeypatch.setattr(fakes.TableCache, "saved", scarce)
    [found] = generate(model, [[5, 6]], prompt_cache=kept, **how)
    same(found, alone(model, [5, 6], **how))
    assert kept.num_tokens == 0
    why = str(error) or "MemoryError"
    assert caplog.messages == [f"the prompt cache is empty again, as keeping a text failed: {why}"]


def test_graphs_memory_has_room_for_those_who_may_come(checkpoint, simulated_graphs, monkeypatch):
    """They join within it; who needs more waits until nobody is there."""
    monkeypatch.setattr(graphs, "GRAIN", 16)
    monkeypatch.setattr(graphs, "SHARED", 48)
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    how: Any = {**SHORT, "mode": "ntp", "ignore_eos": True}
    batch = Running(room=2)
    batch.begin([answer_of(model, 0, [5, 6], **how)])
    batch.come()
    long = answer_of(model, 2, [5] * 40, **how)
    third = answer_of(model, 1, [7], **how)
    assert not batch.begin([long])
    assert batch.begin([third])
    batch.come()
    assert not batch.begin([answer_of(model, 3, [7], **how)]), "no row is free"
    found = ended(batch, [(0, long)])
    for row, prompt in ((0, [5, 6]), (1, [7]), (2, list(long.prompt))):
        same(found[row], alone(plain, prompt, **how))
    assert len(simulated_graphs) > 1
    assert isinstance(batch, Running)
