"""Intervals, repetition and paired tests, against numbers from elsewhere."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest

from setblock.scores import (
    Sample,
    Score,
    compare,
    drop_bounds,
    mcnemar,
    percent,
    pooled,
    ratio_interval,
    repetition,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # Roots x of n (share - x)^2 = z^2 x (1 - x), by numpy.
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (0, 1, 0.0, 0.793451),
        (1, 1, 0.206549, 1.0),
        (5, 10, 0.236593, 0.763407),
        (80, 100, 0.711171, 0.866633),
        (1, 1000, 0.000177, 0.005643),
    ],
)
def test_wilson_interval(correct, n, low, high):
    assert wilson_interval(correct, n) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(
    ("share", "told"), [(1.0, "100.0%"), (0.9999, "99.9%"), (0.5, "50.0%"), (0.0, "0.0%")]
)
def test_less_than_all_is_not_all(share, told):
    assert percent(share) == told


def test_ratio_interval_covers_the_ratio():
    """Of many sets of answers drawn at random some 95 in 100 have the true ratio inside."""
    draw = np.random.default_rng(0)
    inside = 0
    for _ in range(1000):
        forwards = draw.integers(5, 60, 80)
        tokens = draw.poisson(2.5 * forwards) + draw.integers(-4, 5, 80)
        bounds = ratio_interval(list(zip(tokens.tolist(), forwards.tolist(), strict=True)))
        assert bounds is not None
        inside += bounds[0] <= 2.5 <= bounds[1]
    assert 920 < inside < 980


def test_ratio_interval_of_few():
    assert ratio_interval([(5, 2)]) is None
    assert ratio_interval([(4, 2), (6, 3), (2, 1)]) == (2, 2)
    # Of equally many forwards it is that of a mean: t(n - 1) * sqrt(variance / n) around it.
    assert ratio_interval([(2, 1), (4, 1)]) == pytest.approx((0, 3 + 12.7062))
    for n, t in ((3, 4.30265), (11, 2.22814), (12, 2.20099), (21, 2.08596), (101, 1.98397)):
        values = [20 + one % 3 for one in range(n)]
        mean, half = statistics.mean(values), t * statistics.stdev(values) / math.sqrt(n)
        bounds = ratio_interval([(one, 1) for one in values])
        assert bounds == pytest.approx((mean - half, mean + half), abs=1e-4)


@pytest.mark.parametrize("n", [1, 2, 4, 7, 10, 50, 150, 300])
def test_the_interval_holds_the_share_and_mirrors(n):
    for correct in range(n + 1):
        low, high = wilson_interval(correct, n)
        assert 0 <= low < high <= 1
        assert low <= correct / n <= high
        assert wilson_interval(n - correct, n) == pytest.approx((1 - high, 1 - low))


def test_more_problems_narrow_the_interval():
    widths = [high - low for low, high in (wilson_interval(n // 2, n) for n in (4, 40, 400))]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(
    ("ids", "rate"),
    [
        ([], 0),
        ([1, 2, 3], 0),
        ([1, 2, 3, 4, 5, 6], 0),
        ([7] * 8, 4 / 5),  # five runs of four, one of them new
        ([1, 2, 3, 4] * 2, 1 / 5),
    ],
)
def test_repetition(ids, rate):
    assert repetition(ids) == pytest.approx(rate)


@pytest.mark.parametrize("n", [0, 1, 5, 9])
def test_mcnemar_counts_all_ways_to_split(n):
    """Among all equally probable splits of the n problems, those at least as uneven."""
    for better in range(n + 1):
        first = [True] * better + [False] * (n - better) + [True, False, True]
        second = [False] * better + [True] * (n - better) + [True, False, True]
        uneven = abs(2 * better - n)
        splits = [abs(2 * sum(split) - n) for split in product((0, 1), repeat=n)]
        expected = sum(one >= uneven for one in splits) / len(splits)
        assert mcnemar(first, second) == pytest.approx(expected)


def sample(index: int, correct: bool | None, ids: tuple[int, ...] = (1, 2)) -> Sample:
    return Sample(index, str(index), correct, "ab", ids, "eos", 1, 1, 0.5, -1.0, 0.0, 0.25)


def test_comparison():
    first = [sample(0, True), sample(1, True), sample(2, False), sample(3, True)]
    second = [sample(3, False, (9,)), sample(1, True), sample(0, False), sample(2, False)]
    lines = [
        {"task": "t", "model": "m", "mode": mode, "solver": None, **Score(some).result()}
        for mode, some in (("ntp", first), ("sbd", second))
    ]
    found = compare(lines[0], lines[1], (first, second))
    assert found == {
        "task": "t",
        "n": 4,
        "first": {"model": "m", "mode": "ntp", "solver": None, "settings": None},
        "second": {"model": "m", "mode": "sbd", "solver": None, "settings": None},
        "only_first": 2,
        "only_second": 0,
        "score_difference": -0.5,
        "score_difference_interval": tuple(-end for end in drop_bounds(2, 0, 4, 0.975)[::-1]),
        "p_value": 0.5,
        "identical_share": 0.75,
        "wall_clock_ratio": 1.0,
    }


def test_comparison_of_other_problems():
    first, second = [sample(0, True)], [replace(sample(0, True), key="another")]
    line = {"task": "t", "model": "m", "mode": "ntp", "solver": None, **Score(first).result()}
    with pytest.raises(ValueError, match=r"samples must be of the same problems, got 1 of"):
        compare(line, line, (first, second))


def seeded(rights: Sequence[Sequence[bool | None]]) -> dict:
    """What is pooled of these answers, a list a seed; answers of seed n have n + 1 tokens."""
    samples = [
        [sample(index, right, (1,) * (seed + 1)) for index, right in enumerate(some)]
        for seed, some in enumerate(rights)
    ]
    lines = [
        {**Score(some).result(), "task": "a", "model": "m", "mode": "ntp", "solver": None}
        | {"settings": {"sampler": {"seed": seed, "top_k": 3}}}
        for seed, some in enumerate(samples)
    ]
    return pooled(lines, samples)


def test_seeds_that_say_the_same_are_as_good_as_one():
    rights = [True] * 7 + [False] * 3
    found = seeded([rights] * 4)
    assert (found["n"], found["score"], found["scores"]) == (10, 0.7, [0.7] * 4)
    assert found["interval"] == pytest.approx(wilson_interval(7, 10))
    assert found["seeds"] == [0, 1, 2, 3]
    assert found["settings"] == {"sampler": {"seed": None, "top_k": 3}}
    assert found["tokens_per_forward"] == (1 + 2 + 3 + 4) / sum(4 * [sample(0, True).nfe])


def test_all_right_under_every_seed_is_as_sure_as_under_one():
    assert seeded([[True] * 10] * 3)["interval"] == pytest.approx(wilson_interval(10, 10))


def test_seeds_that_know_nothing_of_one_another_are_more_problems():
    draw = np.random.default_rng(0)
    rights = (draw.random((3, 4000)) < 0.4).tolist()
    found = seeded(rights)
    count = sum(map(sum, rights))
    assert found["score"] == count / 12000
    assert found["interval"] == pytest.approx(wilson_interval(count, 12000), abs=1e-3)
    low, high = found["interval"]
    assert high - low <= 1.05 * (2 * 1.96 * math.sqrt(0.24 / 12000))


@pytest.mark.parametrize(("problems", "seeds", "a", "b"), [(60, 2, 0.7, 0.7), (8, 10, 0.3, 3)])
def test_the_interval_over_seeds_covers_the_truth(problems, seeds, a, b):
    """Problems of many kinds: 95 of 100 intervals hold the mean chance, of few problems too."""
    draw, held = np.random.default_rng(1), 0
    for _ in range(600):
        chance = draw.beta(a, b, problems)
        low, high = seeded((draw.random((seeds, problems)) < chance).tolist())["interval"]
        held += low <= a / (a + b) <= high
    assert 0.92 <= held / 600 <= 0.98


def test_pooled_without_right_answers_and_of_other_problems():
    found = seeded([[None, None], [None, None]])
    assert (found["score"], found["interval"], found["scores"]) == (None, None, [None, None])
    with pytest.raises(ValueError, match="samples must be of the same problems, one of each seed"):
        seeded([[True, True], [True]])


def test_comparison_without_right_answers():
    samples = [sample(0, None)]
    line = {"task": "t", "model": "m", "mode": "ntp", "solver": None, **Score(samples).result()}
    found = compare(line, line, (samples, samples))
    assert (found["only_first"], found["p_value"], found["identical_share"]) == (None, None, 1)


def test_a_sample_comes_back_from_a_file():
    one = sample(3, None)
    assert Sample.from_json(json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.parametrize(("lost", "won", "n"), [(0, 0, 50), (5, 3, 100), (7, 0, 20), (2, 9, 30)])
@pytest.mark.parametrize("confidence", [0.8, 0.975])
def test_drop_bounds_are_where_the_score_test_turns(lost, won, n, confidence):
    """At a bound the likeliest model with that drop, found by trying many, is z errors away."""
    z = NormalDist().inv_cdf(confidence)
    for drop, sign in zip(drop_bounds(lost, won, n, confidence), (1, -1), strict=True):

        def likelihood(second: float, drop: float = drop) -> float:
            """Of so many items that only the second gets right."""
            shares = (second + drop, second, 1 - 2 * second - drop)
            counts = (lost, won, n - lost - won)
            if min(shares) < 0:
                return -math.inf
            return sum(
                c * math.log(max(s, 1e-300)) for c, s in zip(counts, shares, strict=True) if c
            )

        steps = 20_000
        tried = [max(0.0, -drop) + i / steps * (1 - abs(drop)) / 2 for i in range(steps + 1)]
        best = max(tried, key=likelihood)
        deviation = math.sqrt((2 * best + drop - drop**2) / n)
        assert ((lost - won) / n - drop) / deviation == pytest.approx(sign * z, abs=0.02)


def test_drop_bounds_mirror_and_shrink():
    low, high = drop_bounds(4, 9, 60, 0.95)
    assert drop_bounds(9, 4, 60, 0.95) == pytest.approx((-high, -low))
    assert low < (4 - 9) / 60 < high
    wider, narrower = drop_bounds(4, 9, 60, 0.99), drop_bounds(40, 90, 600, 0.95)
    assert wider[0] < low
    assert high < wider[1]
    assert low < narrower[0] < narrower[1] < high
    assert drop_bounds(0, 0, 100, 0.95)[1] == pytest.approx(1.6449**2 / (100 + 1.6449**2), abs=1e-4)
