"""Verified decoding with drafts copied from the text itself."""

from typing import Any

import numpy as np
import pytest
import reference
import torch
from fakes import TableModel
from hypothesis import given
from hypothesis import strategies as st

from setblock.branches import MOST_MATCHED, WORTH, BranchDrafts, looked_up
from setblock.generation import generate, settings_for


@given(
    texts=st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=60), min_size=1, max_size=4),
    count=st.integers(1, 20),
)
def test_what_is_looked_up_is_what_the_slow_way_finds(texts, count) -> None:
    width = max(map(len, texts)) + 7
    tokens = np.array([[*text, *[0] * (width - len(text))] for text in texts])
    copied, run = looked_up(tokens, np.array([len(text) for text in texts]), count)
    for text, ours, length in zip(texts, copied.tolist(), run.tolist(), strict=True):
        expected, matched = reference.looked_up(text, count, MOST_MATCHED)
        assert length == matched
        if matched:
            assert ours == expected


def test_a_text_that_repeats_itself_is_copied_in_as_many_forwards_as_the_slow_way_takes() -> None:
    """Blocks of one token: there are no other drafts."""
    text = "a fox saw a fox who saw a dog. a fox saw a fox who saw a dog who saw a fox."
    model = TableModel.spelling(text, start=2)
    count, lookup = len(text), 8
    for prompt in ([5, 6], [7, 8]):
        [exact] = generate(model, [prompt], mode="ntp", max_new_tokens=count)
        [copied] = generate(
            model, [prompt], mode="verified", block_size=1, lookup=lookup, max_new_tokens=count
        )
        assert copied.token_ids == exact.token_ids
        whole = [*prompt, *exact.token_ids]
        known, forwards = len(prompt) + 1, 1
        while known < len(whole):
            draft, run = reference.looked_up(whole[:known], lookup, MOST_MATCHED)
            chance, accepted = 1.0, 0
            for offset, token in enumerate(draft[: len(whole) - known - 1] if run else []):
                matched = run + offset
                chance *= 0.25 if matched == 1 else matched / (matched + 2)
                if chance < WORTH or token != whole[known + offset]:
                    break
                accepted += 1
            known, forwards = known + accepted + 1, forwards + 1
        assert copied.nfe == forwards
        assert forwards < 0.6 * exact.nfe


def test_a_sure_draft_is_not_given_up_for_a_copy_that_promises_less() -> None:
    """The model knows a text that never repeats; its letters' last places would say otherwise."""
    text = "abacadaeafagahaiajakal"
    model = TableModel.spelling(text, start=2)
    options: dict[str, Any] = {"mode": "verified", "block_size": 6, "branches": 6}
    options["max_new_tokens"] = len(text)
    [own] = generate(model, [[20, 21]], **options)
    [both] = generate(model, [[20, 21]], **options, lookup=8)
    assert both.token_ids == own.token_ids
    assert both.nfe == own.nfe


@pytest.mark.parametrize(
    ("padded", "worth", "lengths"),
    [  # of two rows
        (False, 0.0, [4, 0]),
        (False, 0.25, [3, 0]),
        (False, 0.45, [1, 0]),
        (False, 0.7, [0, 0]),
        (True, 0.0, [4, 0]),
        (True, 0.25, [1, 0]),
        (True, 0.35, [0, 0]),
    ],
)
def test_as_much_is_copied_as_is_worth_its_time(monkeypatch, padded, worth, lengths) -> None:
    """Three tokens match: chances are 0.6, 0.4, 0.29 and 0.21, and half of it for two rows that
    each token widens.
    """
    model = TableModel.spelling("abc", start=2)
    monkeypatch.setattr(TableModel, "worth", lambda model, rows: worth if rows == 2 else 1.0)
    monkeypatch.setattr(TableModel, "leaves_padding_out", not padded)
    run = settings_for(model, mode="verified", block_size=1, lookup=6, max_new_tokens=40)
    prompts = [[5, 6, 7, 8, 9, 5, 6, 7], [10, 11, 12, 13]]
    state = BranchDrafts(model, prompts, [0, 1], run)
    state._look_up()
    assert state.length.tolist() == lengths
    assert state.draft[0, : lengths[0]].tolist() == [8, 9, 5, 6][: lengths[0]]
    assert state.copied.tolist() == state.sure.tolist() == [lengths[0] > 0, False]


def test_with_lenience_no_copy_is_cut_for_its_cost(monkeypatch) -> None:
    """There drafts decide about tokens, and rows beside a row must not."""
    model = TableModel.spelling("abc", start=2)
    monkeypatch.setattr(TableModel, "worth", lambda model, rows: 1.0)
    lengths = []
    for lenience in (1.0, 0.5):
        run = settings_for(
            model, mode="verified", block_size=2, lookup=6, max_new_tokens=40, lenience=lenience
        )
        state = BranchDrafts(model, [[5, 6, 7, 8, 9, 5, 6, 7]], [0], run)
        state._look_up()
        lengths.append(int(state.length[0]))
    assert lengths == [0, 4]


def test_a_branch_behind_fewer_tokens_than_were_accepted_still_drafts() -> None:
    """One branch, behind the prompt alone once: of its block the slots further on are of use."""
    text = "the quick brown fox jumps over a lazy dog"
    model = TableModel.spelling(text, start=2)
    run = settings_for(model, mode="verified", block_size=6, branches=1, max_new_tokens=len(text))
    state = BranchDrafts(model, [[5, 6]], [0], run)
    state.step()
    state.confidence[:, 2:] = 0.0  # so the branch comes to stand behind two drafted tokens
    state.step()
    assert int(state.start[0]) == 2 + 1 + 6, "all five drafted tokens and the next"
    assert int(state.length[0]) == 5 - 3, "the branch predicted three of them as well"
    drafted = state.draft[0, :2].tolist()
    assert model.decode(drafted) == text[7:9]


def test_no_branch_behind_a_sure_copy() -> None:
    """Of a model that drafts nothing well: branches until three letters stood before, none then."""
    model = TableModel.spelling("abcdefgh" * 5, start=2)
    model.noisy[:] = 0.0
    model.noisy[:, model.mask_token_id] = -torch.inf
    run = settings_for(
        model, mode="verified", block_size=4, branches=4, lookup=5, max_new_tokens=40
    )
    state = BranchDrafts(model, [[20, 21]], [0], run)
    seen = []
    while not state.committed(0)[1]:
        sure = bool(state.sure[0])
        assert bool(state._plan()[2].any()) is not sure
        seen.append((int(state.start[0]) - 2, sure))
        state.step()
    # The second a is the ninth letter; behind the eleventh, c, three have stood before.
    assert seen[:12] == [(n, n >= 11) for n in range(10)] + seen[10:12]
    assert all(sure for start, sure in seen if start >= 11)
    assert not any(sure for start, sure in seen if start < 11)
    assert max(start for start, _ in seen) > 30
