"""Intervals, repetition and paired tests, against numbers from elsewhere."""

import json
from dataclasses import asdict
from itertools import product

import pytest

from setblock.scores import Sample, Score, compare, mcnemar, repetition, wilson_interval


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


@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_the_interval_holds_the_share_and_mirrors(n):
    for correct in range(n + 1):
        low, high = wilson_interval(correct, n)
        assert 0 <= low < high <= 1
        assert low - 1e-12 <= correct / n <= high + 1e-12
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
        "first": {"model": "m", "mode": "ntp", "solver": None},
        "second": {"model": "m", "mode": "sbd", "solver": None},
        "only_first": 2,
        "only_second": 0,
        "p_value": 0.5,
        "identical_share": 0.75,
        "wall_clock_ratio": 1.0,
    }


def test_comparison_without_right_answers():
    samples = [sample(0, None)]
    line = {"task": "t", "model": "m", "mode": "ntp", "solver": None, **Score(samples).result()}
    found = compare(line, line, (samples, samples))
    assert (found["only_first"], found["p_value"], found["identical_share"]) == (None, None, 1)


def test_a_sample_comes_back_from_a_file():
    one = sample(3, None)
    assert Sample.from_json(json.loads(json.dumps(asdict(one)))) == one
