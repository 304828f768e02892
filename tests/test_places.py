"""More prompts than are decoded together: as answers end, the next ones take their places."""

from typing import Any

import numpy as np
import pytest
from conftest import gated_adapter
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graphs import WAYS

from setblock import prompt_cache
from setblock.generation import finished, generate, stream
from setblock.loading import load
from setblock.prompt_cache import ALIKE
from setblock.state import CHUNK

COMMON = [5, 9, 30, 7, 41, 8]
PROMPTS = [
    [*COMMON, 2],
    [*COMMON, *[40, 41, 42] * 5],
    COMMON,
    [*COMMON, 8, 8],
    [*COMMON, 5],
    COMMON,
]
SHORT: dict[str, Any] = {"block_size": 4, "max_new_tokens": 14, "temperature": 1.0}


def same(model: Any, prompts: list[list[int]], together: int, plain: Any = None, **how: Any) -> int:
    """How many forwards it took."""
    expected = generate(plain or model, prompts, **how)
    counted, forward = [], model.forward
    model.forward = lambda *given, **more: counted.append(1) or forward(*given, **more)
    found = generate(model, prompts, batch_size=together, **how)
    del model.forward
    for one, other in zip(expected, found, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (
            *(other.token_ids, other.text, other.finish_reason),
        )
        assert (one.nfe, one.reveal_step) == (other.nfe, other.reveal_step)
        assert np.allclose(one.entropy, other.entropy, atol=1e-4)
        assert other.cached_tokens == 0
    return len(counted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-window"])
def test_answers_do_not_depend_on_it(checkpoint, monkeypatch, kind, way):
    monkeypatch.setattr(prompt_cache, "ALIKE", 4)
    model = load(checkpoint(kind))
    for together in (1, 2, 4):
        same(model, PROMPTS, together, **SHORT, **WAYS[way])
        same(model, PROMPTS, together, **SHORT, **WAYS[way], stop="a")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_those_of_a_gated_adapter(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_cache, "ALIKE", 4)
    gated_adapter(load(checkpoint()), tmp_path, chain_width=8)
    model = load(tmp_path)
    for way in ("sliding", "verified"):
        same(model, PROMPTS, 2, **SHORT, **WAYS[way])


@pytest.mark.parametrize("way", ["ntp", "sbd", "verified"])
def test_those_of_graphs(checkpoint, simulated_graphs, monkeypatch, way):
    monkeypatch.setattr(prompt_cache, "ALIKE", 4)
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    for together in (2, 2, 3, 1):
        count = same(model, PROMPTS, together, plain, **SHORT, **WAYS[way])
        assert count == same(plain, PROMPTS, together, **SHORT, **WAYS[way])  # who comes has room
    assert simulated_graphs


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_prompts(data):
    """Over a cache that checks itself what it is asked to hold."""
    model: Any = TableModel.random(seed=data.draw(st.integers(0, 5)), vocab_size=7)
    model.worth = lambda rows: 0.0  # else copies are cut among many rows, and take other forwards
    prompt = st.lists(st.integers(3, 5), min_size=1, max_size=8)
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=8))
    way = data.draw(st.sampled_from(list(WAYS.values())))
    together = data.draw(st.integers(1, 9))
    rows = data.draw(st.sets(st.integers(0, len(prompts) - 1)))
    same(model, prompts, together, **SHORT, **way)
    expected = generate(model, prompts, **SHORT, **way)
    left = dict(finished(model, prompts, together, rows, **SHORT, **way))
    assert left.keys() == set(range(len(prompts))) - rows
    assert all(one.token_ids == expected[row].token_ids for row, one in left.items())


def test_places_are_taken_at_once():
    """Two at a time, nobody is alone in a forward but who comes, until nobody waits any more."""
    model = TableModel.random(seed=3)
    limits = {3: 12, 4: 29}
    model.next_token[:] = -20
    for length in range(model.context_length):  # a prompt's last token says how far it goes
        for first, limit in limits.items():
            model.next_token[length, first, first if length < limit else 1] = 20
    order = [3, 4] * 4
    last = max(limits.values())
    results = generate(model, [[token] for token in order], mode="ntp", batch_size=2)
    assert [one.num_tokens for one in results] == [limits[token] + 1 for token in order]
    rows = [batch for batch, _ in model.forwards]
    assert max(rows) == 2
    assert sum(rows) == sum(one.num_tokens for one in results)
    assert rows.count(1) <= len(order) - 2 + last
    assert all(rows[place : place + 2] != [1, 1] for place in range(len(rows) - last))


def test_of_short_answers_several_come_at_a_time():
    """Of eight places that are free after two forwards each, all are left until the last is."""
    model = TableModel.random(seed=3)
    options: Any = {"mode": "ntp", "max_new_tokens": 2, "ignore_eos": True}
    generate(model, [[3 + row % 5] for row in range(32)], batch_size=8, **options)
    assert model.forwards == [(8, 1)] * 8


def test_reveals_tell_whose_they_are():
    model = TableModel.random(seed=2)
    prompts = [[3 + row] * (row + 1) for row in range(6)]
    how: Any = {"max_new_tokens": 9, "mode": "sbd", "block_size": 3, "ignore_eos": True}
    expected = generate(model, prompts, **how)
    texts, ended = [""] * 6, []
    for reveal in stream(model, prompts, batch_size=2, **how):
        texts[reveal.row] += reveal.text
        ended += [reveal.row] if reveal.generation else []
    assert sorted(ended) == [*range(6)]
    assert ended != [*range(6)]  # the longest begin
    assert texts == [one.text for one in expected]


def test_one_at_a_time_they_keep_their_order():
    model = TableModel.random(seed=2)
    rows = [reveal.row for reveal in stream(model, [[3] * 2, [4] * 5, [5]], batch_size=1)]
    assert rows == sorted(rows)


def test_an_error_is_told_and_ends_them(monkeypatch):
    model = TableModel.random(seed=2)
    model.noisy[7] = model.next_token[7] = float("nan")
    with pytest.raises(ValueError, match="are not numbers"):
        generate(model, [[3], [4], [5]], batch_size=2, mode="ntp", ignore_eos=True)


def test_what_all_begin_with_is_encoded_once():
    text = np.random.default_rng(0).integers(3, 8, CHUNK + 300).tolist()
    model = TableModel.random(context_length=4000, vocab_size=8)

    def forwards(prompts: list[list[int]], together: int) -> list[tuple[int, int]]:
        model.forwards.clear()
        found = generate(model, prompts, batch_size=together, mode="ntp", max_new_tokens=1)
        once = len(model.forwards) - -(-len(prompts) // together)
        assert [one.prefill_forwards for one in found] == [once + 1] * len(prompts)
        return model.forwards

    three = [[*text, 3, 4], [*text, 4, 5, 6], [*text, 7]]
    assert forwards(three, 1) == [(1, CHUNK), (1, 300), (1, 2), (1, 3), (1, 1)]
    assert forwards(three, 2) == [(1, CHUNK), (1, 300), (2, 3), (1, 1)]
    short = [[*text[:ALIKE], 3], [*text[:ALIKE], 4], [*text[: ALIKE - 1], 5]]
    assert forwards(short, 2) == [(2, ALIKE + 1), (1, ALIKE)]
    assert forwards(short[:2], 2) == [(1, ALIKE), (2, 1)]
