"""Picking a setting: what is tried, in words, and how many items that takes."""

from dataclasses import replace

import pytest
from test_tune import VERIFIED, model

from setblock import tune
from setblock.scores import drop_bounds
from setblock.tune import Target, Tried, _rank, items_needed, words

__all__ = ["model"]  # a fixture


def test_rank_of_settings():
    """What rounding changed is no loss to rank by; what a solver changed is."""
    target = Target(0.01, 0.9, "clock")
    slow, fast = {"speed": 1.2, "drop": 0.0}, {"speed": 2.0, "drop": 0.5}
    assert _rank(fast | {"rounding": True}, target) < _rank(slow | {"rounding": False}, target)
    assert _rank(slow | {"rounding": False}, target) < _rank(fast | {"rounding": False}, target)


def test_verified_settings_to_try(model):
    """One branch, all, and the arithmetic's for each size; the six that it says are quickest.

    With lookup; the first three without; and lookup alone.
    """
    every = VERIFIED.verified(model, 1)
    assert len({tuple(one.items()) for one in every}) == len(every)
    tried, rest = every[: tune.MOST_VERIFIED], every[tune.MOST_VERIFIED :]
    assert {one["lookup"] for one in tried} == {tune.LOOKUP}
    assert rest[:-1] == [one | {"lookup": 0} for one in tried[: tune.WITHOUT_LOOKUP]]
    alone = {"block_size": 1, "branches": 1, "seeds": 0, "lookup": tune.LOOKUP}
    assert rest[-1] == {"mode": "verified", **alone}
    assert {one["block_size"] for one in tried} == {2, 3, 4}, "up to the checkpoint's"
    more = Tried(block_sizes=[8]).verified(model, 1)
    assert {(one["branches"], one["seeds"]) for one in more} >= {(1, 0), (8, 0)}
    spent = [
        model.best_spending(
            one["block_size"], 1, fixed_size=True, branches=one["branches"], seeds=one["seeds"]
        ).seconds_per_token
        for one in tried
    ]
    assert spent == sorted(spent)
    assert Tried(["sbd"]).verified(model, 1) == []
    assert Tried(block_sizes=[1]).verified(model, 1) == []
    wide = Tried(["verified"], block_sizes=[200])
    wide.check(model)
    assert {one["branches"] for one in wide.verified(model, 1)} == {1}, "200 would be too many"
    twice = Tried(["sbd"], ["fixed:2", "fixed:2"], [4, 4])
    assert [one["slide"] for one in twice.with_solvers(model)] == [False, True]


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        (Tried(["ntp"]), "mode must be one of sbd, verified to be tuned, got ntp"),
        (Tried(block_sizes=[4, 0]), "block_size must be an integer of at least 1, got 0"),
        (Tried(["verified"], block_sizes=[1]), "blocks of one token leave nothing to try"),
        (Tried(["sbd"], block_sizes=[1]), "blocks of one token leave nothing to try"),
        (Tried(solvers=["best"]), "solver must be one of"),
    ],
)
def test_bad_settings_to_try(model, tried, message):
    with pytest.raises(ValueError, match=message):
        tried.check(model)


def test_what_is_tried_follows_from_the_longest_block(model):
    """The checkpoint's, or that of a run that goes on."""
    longer = Tried(longest=8)
    assert {one["block_size"] for one in longer.with_solvers(model)} == {8}
    assert longer.drafting(model, 1)["block_size"] <= longer.up_to(model) == 8
    assert Tried().up_to(model) == 4
    assert Tried(block_sizes=[2, 6]).up_to(model) == 6


def test_words():
    nothing: dict = dict.fromkeys(tune.NAMES)
    assert words(nothing | {"mode": "ntp", "block_size": 4}) == "ntp"
    sbd = {"mode": "sbd", "solver": "fixed:2", "block_size": 4}
    assert words(nothing | sbd) == words(sbd) == "sbd fixed:2, blocks of 4"
    assert words(sbd | {"slide": True}) == "sbd fixed:2, blocks of 4 that slide"
    drafted = {"mode": "verified", "solver": "fixed:2", "block_size": 3}
    assert words(drafted) == "verified, blocks of 3"
    assert words(drafted | {"branches": 1, "seeds": 0}) == "verified, blocks of 3, 1 branch"
    assert (
        words(drafted | {"branches": 2, "seeds": 1}) == "verified, blocks of 3, 2 branches, 1 seed"
    )
    copied = drafted | {"branches": 1, "lookup": 8}
    assert words(copied) == "verified, blocks of 3, 1 branch, lookup 8"
    assert words(copied | {"block_size": 1}) == "verified, lookup 8 alone"
    assert words(sbd | {"lookup": 8}) == "sbd fixed:2, blocks of 4", (
        "where the checkpoint has it for verified"
    )


def test_items_needed():
    """Between equal settings the bound is z^2 / (n + z^2)."""
    target = Target(0.005, 0.95, "clock")
    need = items_needed(target)
    assert need is not None
    assert 800 < need < 1000
    confidence = 1 - 0.05 / tune.FINALISTS
    assert drop_bounds(0, 0, need, confidence)[1] <= 0.005
    assert drop_bounds(0, 0, need - 1, confidence)[1] > 0.005
    assert items_needed(replace(target, max_drop=0.0)) is None
