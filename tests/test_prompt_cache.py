"""Prompts that begin like earlier ones: the same answers, with less to encode."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import gated_adapter
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graphs import WAYS

from setblock import prompt_cache, running
from setblock.generation import generate, stream
from setblock.loading import load
from setblock.masks import causal_layout
from setblock.prompt_cache import PromptCache
from setblock.state import CHUNK, Rows

SHORT: dict[str, Any] = {"block_size": 4, "max_new_tokens": 14}
# Turns of a conversation, one that begins alike, the first again, one of one token, another.
TURNS = [[5, 9, 30, 7], [8, 3], [40, 41, 42]]
OTHERS = [[5, 9, 30, 8, 2], [5, 9, 30, 7], [5], [30, 9, 5] * 7]


def turns(model, cache: PromptCache | None = None, **options: Any) -> list[Any]:
    """What the model answers to each turn of a conversation, then to other prompts."""
    text, answers = [], []
    for new in TURNS:
        answers += generate(model, [[*text, *new]], prompt_cache=cache, **options)
        text += [*new, *answers[-1].token_ids]
    return answers + generate(model, OTHERS, prompt_cache=cache, batch_size=1, **options)


def told(answers: list[Any]) -> list[Any]:
    return [(one.token_ids, one.nfe, one.reveal_step, one.finish_reason) for one in answers]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_answers_are_the_same(checkpoint, kind, way):
    model = load(checkpoint(kind))
    for options in (SHORT, {**SHORT, "ignore_eos": True, "temperature": 1.0}):
        plain, cache = turns(model, **options, **WAYS[way]), PromptCache()
        found = turns(model, cache, **options, **WAYS[way])
        assert told(found) == told(plain)
        assert all(one.cached_tokens == 0 for one in plain)
        # Of a conversation all but what came since the last forward; never the whole of a prompt.
        first, second, third, alike, again, single, other = (one.cached_tokens for one in found)
        assert (first, alike, again, single, other) == (0, 3, 3, 0, 0)
        answered = len(TURNS[0]) + found[0].num_tokens
        assert answered - 4 <= second <= answered
        assert second < third < found[2].prompt_tokens


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_gated_adapter_whose_drafts_are_joined(checkpoint, tmp_path):
    gated_adapter(load(checkpoint()), tmp_path, chain_width=8)
    model = load(tmp_path)
    for way in (WAYS[name] for name in ("ntp", "seeded", "verified")):
        assert told(turns(model, PromptCache(), **SHORT, **way)) == told(
            turns(model, **SHORT, **way)
        )


@pytest.mark.parametrize("how", ["graphs", "kernels"])
def test_what_is_left_of_a_prompt_runs_plainly(checkpoint, simulated_graphs, monkeypatch, how):
    """No graph is recorded, no kernel made for its length."""
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    widths: list[int] = []
    if how == "kernels":
        model.compile("graphs")
        run = model._run
        model._graphs, model._compiled = None, lambda *given: (widths.append(1), run(*given))[1]
    options: dict[str, Any] = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 6}
    cache, text = PromptCache(), [5, 9, 30]
    for number in range(4):
        [answer] = generate(model, [text], prompt_cache=cache, **options)
        assert answer.token_ids == generate(plain, [text], **options)[0].token_ids
        assert answer.cached_tokens == (len(text) - 3 if number else 0)
        text += [*answer.token_ids, 7, 8]
    if how == "kernels":
        assert len(widths) == 4 * 5
    else:
        assert len(simulated_graphs) == 1


def test_only_what_is_new_is_encoded(monkeypatch):
    model, cache = TableModel.random(context_length=4000, vocab_size=8), PromptCache()
    text = np.random.default_rng(0).integers(3, 8, 3 * CHUNK).tolist()
    options: dict[str, Any] = {"mode": "ntp", "max_new_tokens": 1}

    def widths(prompt: list[int], cache: PromptCache | None = cache) -> list[int]:
        model.forwards.clear()
        [answer] = generate(model, [prompt], prompt_cache=cache, **options)
        assert answer.prefill_forwards == len(model.forwards)
        assert told([answer]) == told(generate(model, [prompt], **options))
        return [width for _, width in model.forwards[: answer.prefill_forwards]]

    assert widths(text[: CHUNK + 100]) == [100, CHUNK]
    assert widths(text[: CHUNK + 300]) == [200]
    assert widths(text[: 3 * CHUNK]) == [1024 - 300, CHUNK]
    assert widths(text[:50]) == [1]
    assert widths(text[:50], None) == [50]


def test_keys_and_values_are_those_of_the_text(checkpoint):
    model, cache = load(checkpoint("gemma3")), PromptCache()
    ways: Any = {"mode": "verified"}, {"mode": "sbd", "solver": "fixed:3"}, {"mode": "ntp"}
    for options in ways:
        generate(model, [[5, 9, 30, 7]], prompt_cache=cache, **SHORT, **options, ignore_eos=True)
    assert len(cache._texts) == 2  # the last one has said the same as the first
    for text in cache._texts:
        fresh = model.new_cache(1, 64)
        ids = torch.from_numpy(text.tokens)[None]
        model.forward(ids, causal_layout(torch.arange(ids.shape[1])[None]), fresh)
        fresh.keep(np.array([len(text.tokens)]))
        expected: Any = fresh.saved(len(text.tokens))
        for pair, other in zip(text.saved, expected, strict=True):
            for states, fresh_ones in zip(pair, other, strict=True):
                assert torch.allclose(states, fresh_ones, atol=1e-5)


# ------------------------------------------------------------------ what is kept


def spelled(cache: PromptCache) -> list[list[int]]:
    """The texts, the one that was used longest ago first."""
    return [text.tokens.tolist() for text in cache._texts]


def test_texts_that_were_used_longest_ago_go_first():
    model, cache = TableModel.random(), PromptCache(most_tokens=10)
    options: dict[str, Any] = {"mode": "ntp", "max_new_tokens": 1, "prompt_cache": cache}
    generate(model, [[3, 4, 5, 6]], **options)
    generate(model, [[7, 8, 9]], **options)
    assert spelled(cache) == [[3, 4, 5, 6], [7, 8, 9]]
    generate(model, [[3, 4, 5, 6]], **options)  # the same again
    assert spelled(cache) == [[7, 8, 9], [3, 4, 5, 6]]
    generate(model, [[3, 4, 5, 6, 7]], **options)  # goes on with one
    assert spelled(cache) == [[7, 8, 9], [3, 4, 5, 6, 7]]
    generate(model, [[10, 11]], **options)
    generate(model, [[3, 9]], **options)  # which begins like one
    assert spelled(cache) == [[10, 11], [3, 4, 5, 6, 7], [3, 9]]
    assert cache.num_tokens == 9
    generate(model, [list(range(3, 12)) * 2], **options)  # longer than what may be kept
    assert spelled(cache) == [[3, 4, 5, 6, 7, 8, 9, 10, 11, 3]]
    cache.clear()
    assert cache.num_tokens == 0
    for prompt in ([5, 3], [5, 4], [5, 6]):  # what begins like all of them uses the latest
        generate(model, [prompt], **options)
    assert spelled(cache) == [[5, 3], [5, 4], [5, 6]]


def test_an_answer_that_is_left_is_kept_as_far_as_it_came():
    model, cache = TableModel.random(), PromptCache()
    options: dict[str, Any] = {"mode": "ntp", "ignore_eos": True, "prompt_cache": cache}
    reveals: Any = stream(model, [[3, 4, 5]], **options)
    said = [next(reveals).drafts[0][1] for _ in range(4)]
    assert cache.num_tokens == 0
    reveals.close()
    assert spelled(cache) == [[3, 4, 5, *said[:3]]]


def test_ctrl_c_keeps_what_was_encoded(monkeypatch):
    model, cache = TableModel.random(), PromptCache()
    options: dict[str, Any] = {"mode": "ntp", "max_new_tokens": 9, "ignore_eos": True}
    step, count = running.DecodeState.step, 0

    def interrupted(self: running.DecodeState) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step(self)

    [plain] = generate(model, [[3, 4, 5]], **options)
    monkeypatch.setattr(running.DecodeState, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, [[3, 4, 5]], prompt_cache=cache, **options)
    assert spelled(cache) == [[3, 4, 5, *plain.token_ids[:2]]]
    [again] = generate(model, [[3, 4, 5]], prompt_cache=cache, **options)
    assert (again.token_ids, again.cached_tokens) == (plain.token_ids, 2)


def test_nothing_is_kept_of_an_error(monkeypatch):
    model, cache = TableModel.random(), PromptCache()
    options: dict[str, Any] = {"mode": "ntp", "max_new_tokens": 4, "prompt_cache": cache}

    def broken(self: Rows) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("setblock.running.DecodeState.step", broken)
        with pytest.raises(MemoryError):
            generate(model, [[3, 4, 5]], **options)
    assert cache.num_tokens == 0
    assert told(generate(model, [[3, 4, 5]], **options)) == told(
        generate(model, [[3, 4, 5]], mode="ntp", max_new_tokens=4)
    )


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_prompts_after_each_other(data):
    """Their answers, from a cache that checks itself what it is asked to hold."""
    model = TableModel.random(seed=data.draw(st.integers(0, 5)), vocab_size=7)
    cache = PromptCache(data.draw(st.integers(1, 60)))
    ways = st.sampled_from(list(WAYS.values()))
    for _ in range(6):
        prompt = data.draw(st.lists(st.integers(3, 5), min_size=1, max_size=8))
        options: Any = {**SHORT, **data.draw(ways)}
        [answer] = generate(model, [prompt], prompt_cache=cache, **options)
        assert told([answer]) == told(generate(model, [prompt], **options))
        assert cache.num_tokens <= cache.most_tokens
        assert answer.cached_tokens < len(prompt)


# ------------------------------------------------------------------ what is refused


def test_rows_together_are_refused():
    model, cache = TableModel.random(), PromptCache()
    message = "prompt_cache is for one row at a time: batch_size must be 1, got 2 rows together"
    for answered in (generate, stream):
        with pytest.raises(ValueError, match=message):
            answered(model, [[3], [4]], prompt_cache=cache)


@pytest.mark.parametrize("wrong", [16384, {}, True, "x"])
def test_what_is_no_prompt_cache_is_refused(wrong):
    with pytest.raises(ValueError, match=r"prompt_cache must be a setblock\.PromptCache, got"):
        generate(TableModel.random(), [[3]], prompt_cache=wrong)


def test_another_model_is_refused():
    first, second, cache = TableModel.random(), TableModel.random(1), PromptCache()
    options: dict[str, Any] = {"mode": "ntp", "max_new_tokens": 2, "prompt_cache": cache}
    generate(first, [[3, 4]], **options)
    with pytest.raises(ValueError, match="prompt_cache holds texts of another model"):
        generate(second, [[3, 4]], **options)
    cache.clear()
    generate(second, [[3, 4]], **options)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_how_much_may_be_kept(value):
    with pytest.raises(ValueError, match="most_tokens must be an integer of at least 1, got"):
        prompt_cache.PromptCache(value)
