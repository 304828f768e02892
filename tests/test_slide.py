"""Helpers of mode sbd: next-token seeds, blocks that slide, blocks that collapse."""

from typing import Any

import pytest
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import PROMPTS, SLOW, SOLVERS, networks, prompts, with_ends

from setblock.decode import DecodeState
from setblock.generation import generate, settings_for
from setblock.loading import load

__all__ = ["networks"]  # a fixture


def test_a_next_token_seed_is_the_next_token(networks) -> None:
    """The first token of every block is what next-token decoding says after the text before it."""
    model = with_ends(networks["qwen3", 1], 1000)
    options = {"mode": "sbd", "solver": "fixed:3", "block_size": 4, "max_new_tokens": 18}
    for result, prompt in zip(
        generate(model, PROMPTS, **options, next_token_seed=True),  # type: ignore[arg-type]
        PROMPTS,
        strict=True,
    ):
        for first in range(0, 18, 4):
            text = [*prompt, *result.token_ids[:first]]
            [exact] = generate(model, [text], mode="ntp", max_new_tokens=1)
            assert result.token_ids[first] == exact.token_ids[0]
        # The prompt's forward yields one, the next 3; then 3, the exact one among them, and 1.
        assert result.nfe == 1 + 1 + 2 + 2 + 2 + 1


def test_a_next_token_seed_of_blocks_of_one_token_is_next_token_decoding(networks) -> None:
    model = with_ends(networks["llama", 2], 7)
    exact = generate(model, PROMPTS, mode="ntp", max_new_tokens=11)
    seeded = generate(
        model, PROMPTS, mode="sbd", block_size=1, next_token_seed=True, max_new_tokens=11
    )
    assert [one.token_ids for one in seeded] == [one.token_ids for one in exact]
    assert [one.nfe for one in seeded] == [one.nfe for one in exact]


@pytest.mark.parametrize("solver", ["fixed:1", "entropy:0", "prefix:1.0"])
@pytest.mark.parametrize("block_size", [1, 5])
def test_of_blocks_that_slide_and_reveal_no_more_each_token_is_the_next(
    networks, solver, block_size
) -> None:
    """In as many forwards as next-token decoding takes: the solver is content with that token."""
    model = with_ends(networks["llama", 2], 7)
    exact = generate(model, PROMPTS, mode="ntp", max_new_tokens=11)
    options: dict[str, Any] = {"block_size": block_size, "max_new_tokens": 11, "solver": solver}
    for batch_size in (1, 3):
        slid = generate(model, PROMPTS, mode="sbd", slide=True, batch_size=batch_size, **options)
        assert [one.token_ids for one in slid] == [one.token_ids for one in exact]
        assert [one.nfe for one in slid] == [one.nfe for one in exact]


@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=60, **SLOW)
def test_blocks_that_slide_take_no_more_forwards_than_tokens(data, seed) -> None:
    """And yield a token without a gap in each, the next-token one."""
    options = {
        "block_size": data.draw(st.integers(1, 9)),
        "solver": data.draw(st.sampled_from(SOLVERS)),
        "max_new_tokens": data.draw(st.integers(1, 40)),
        "ignore_eos": True,
    }
    model, texts = TableModel.random(seed), data.draw(prompts(range(3, 12), 3))
    for text, result in zip(
        texts, generate(model, texts, mode="sbd", slide=True, **options), strict=True
    ):
        assert result.nfe <= result.num_tokens
        steps = list(result.reveal_step)
        for forward in range(1, result.nfe + 1):
            # What a forward begins with: the first token that none before it revealed.
            first = next(place for place, step in enumerate(steps) if step >= forward)
            if steps[first] == forward:
                [exact] = generate(
                    model, [[*text, *result.token_ids[:first]]], mode="ntp", max_new_tokens=1
                )
                assert result.token_ids[first] == exact.token_ids[0]


def test_a_checkpoint_may_say_that_its_blocks_slide(checkpoint) -> None:
    model = load(checkpoint("llama", settings={"slide": True, "trained": True}))
    assert settings_for(model).slide
    assert not settings_for(model, slide=False, fallback=1.0).slide
    assert not settings_for(model, mode="ntp").slide
    assert not settings_for(model, mode="verified").slide
    assert model.settings["slide"] is True
    with pytest.raises(ValueError, match=r"slide unless slide is False \(--no-slide\); got 1\.0"):
        settings_for(model, fallback=1.0)
    plain = load(checkpoint("llama"))
    assert settings_for(plain, slide=False).mode == "ntp", "asks for nothing"
    with pytest.raises(ValueError, match="setblock setting slide must be bool, got 1"):
        load(checkpoint("llama", settings={"slide": 1}))


@pytest.mark.parametrize("seed_first", [False, True])
def test_a_block_that_collapses_at_once_is_decoded_token_by_token(networks, seed_first) -> None:
    """A bound below every entropy: next-token decoding, and one forward more for each block."""
    model = with_ends(networks["llama", 1], 9)
    exact = generate(model, PROMPTS, mode="ntp", max_new_tokens=21)
    options = {"block_size": 6, "fallback": 0.0, "next_token_seed": seed_first}
    fallen = generate(model, PROMPTS, mode="sbd", max_new_tokens=21, **options)  # type: ignore[arg-type]
    for one, other in zip(exact, fallen, strict=True):
        assert other.token_ids == one.token_ids
        blocks = -(-other.num_tokens // 6)
        wasted = 1 if seed_first else blocks
        assert other.nfe <= one.nfe + wasted


@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=100, **SLOW)
def test_a_fallback_costs_one_forward_a_block_at_most(data, seed) -> None:
    model = TableModel.random(seed)
    size = data.draw(st.integers(1, 9))
    options = {
        "mode": "sbd",
        "block_size": size,
        "solver": data.draw(st.sampled_from(SOLVERS)),
        "fallback": data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0, 10.0])),
        "next_token_seed": data.draw(st.booleans()),
        "max_new_tokens": data.draw(st.integers(1, 40)),
        "ignore_eos": True,
    }
    for result in generate(model, data.draw(prompts(range(3, 12), 3)), **options):
        assert result.nfe <= result.num_tokens + -(-result.num_tokens // size)


def test_tokens_revealed_before_a_collapse_stay() -> None:
    """Slots 0 and 2 are sure, the rest are not: the rest comes from the next-token half."""
    model = TableModel.spelling("abcdefgh", start=2)
    flat = [3, 5, 6, 7]  # positions of slots 1, 3, 4, 5
    model.noisy[flat] = 0.0
    model.noisy[4] = model.noisy[4].roll(1)  # slot 2 is sure of the wrong letter
    state = DecodeState(
        model,
        [[4, 4]],
        [0],
        settings_for(model, mode="sbd", block_size=6, solver="confidence:0.9", fallback=0.5),
    )
    state.step()  # the prompt
    state.step()
    assert state.by_token_until[0] == 0
    state.step()  # nothing but unsure slots: falls back, reveals nothing
    assert state.by_token_until[0] == 8
    for _ in range(4):
        state.step()
    assert model.decode(state.committed(0)[0]) == "abddef"
    assert state.nfe[0] == 6, "one forward more than six tokens, one less for the pair revealed"
