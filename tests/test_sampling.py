"""Picking tokens: what is refused, what the noise depends on, and the distribution it gives."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from fakes import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st

from setblock.generation import generate
from setblock.sampling import Sampler, gumbel, keep_likeliest

INF = math.inf


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """The last column is the mask token's."""
    logits = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    logits[..., -1] = -INF
    return logits


def build(**fields) -> Sampler:
    """A sampler made without the runtime type check of the test run, as a user's call makes it."""
    sampler = object.__new__(Sampler)
    for name, value in fields.items():
        object.__setattr__(sampler, name, value)
    sampler.__post_init__()
    return sampler


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (
            "temperature",
            [-0.1, math.nan, INF, 1e-50, 1e308, 10**400, "hot", True],
            "temperature must be 0, which is greedy",
        ),
        ("top_p", [0, 0.0, 1.01, -1, math.nan, "all", True], r"top_p must be a number in \(0, 1\]"),
        ("top_k", [-1, 2.5, "3", True], "top_k must be an integer >= 0"),
        ("seed", [-1, 2**63, 0.5, "1", True], r"seed must be an integer in \[0, 2\*\*63\)"),
    ],
)
def test_what_a_sampler_refuses(field, values, message):
    for value in values:
        with pytest.raises(ValueError, match=f"{message}.*got {re.escape(repr(value))}"):
            build(**{field: value})


def test_what_a_sampler_takes():
    cases: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 1},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": 10**6},
        {"seed": 2**63 - 1},
    )
    for options in cases:
        sampler = Sampler(**options)
        picked = sampler.pick(random_logits(1, 1, 5), torch.tensor([0]), torch.tensor([[0]]))
        assert 0 <= int(picked) < 4


# ------------------------------------------------------------------ noise


def noise(seed: int, row: int, position: int, vocab: int) -> np.ndarray:
    """The noise of one place, [vocab]."""
    place = torch.tensor([seed]), torch.tensor([row]), torch.tensor([[position]])
    drawn = gumbel(*place, torch.arange(vocab))
    assert drawn.dtype == torch.float32
    return drawn[0, 0].numpy()


def slow_gumbel(seed: int, row: int, position: int, vocab: int) -> list[float]:
    """The same in whole numbers of Python."""

    def mixed(value: int) -> int:
        value %= 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    key = mixed(mixed(mixed(seed) + row) + position)
    bits = [mixed(key + token * 0x9E3779B97F4A7C15) >> 11 for token in range(1, vocab + 1)]
    return [-math.log(-math.log1p(-(one + 0.5) * 2.0**-53)) for one in bits]


def test_noise_is_fixed_by_seed_row_and_position():
    for seed, row, place in ((7, 2, 31), (2**63 - 1, 0, 0), (0, 10**6, 10**6)):
        assert np.allclose(noise(seed, row, place, 4), slow_gumbel(seed, row, place, 4), rtol=1e-5)
        assert np.array_equal(noise(seed, row, place, 400)[:4], noise(seed, row, place, 4))
    # Results stored with a seed must come out the same with any version of torch.
    known = [-0.4100373685359955, -0.31519830226898193, 0.2818719446659088, -0.5350257158279419]
    assert np.allclose(noise(7, 2, 31, 4), known, rtol=1e-6, atol=0)
    places = torch.tensor([7, 8]), torch.tensor([2, 3]), torch.tensor([[31, 5], [0, 1]])
    many = gumbel(*places, torch.arange(9))
    assert np.array_equal(many[0, 0].numpy(), noise(7, 2, 31, 9))
    assert np.array_equal(many[1, 1].numpy(), noise(8, 3, 1, 9))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 1.2, "top_p": 0.6},
    ],
)
def test_of_some_tokens_as_of_all(options):
    """Logits of a few tokens, told which: what all tokens give if the others can't be."""
    logits, rows = random_logits(2, 40, 30), torch.tensor([4, 1])
    position = torch.arange(80).view(2, 40)
    ids = logits.topk(6).indices.sort(dim=-1).values
    few = logits.gather(-1, ids)
    few[:, ::3] = few[:, ::3].round()  # ties, which go to the smaller id
    whole = torch.full_like(logits, -torch.inf).scatter(-1, ids, few)
    for seed in (0, 5):
        sampler = Sampler(seed=seed, **options)
        picked = sampler.pick(few, rows, position, ids=ids)
        assert torch.equal(picked, sampler.pick(whole, rows, position))
        scores = sampler.perturbed(few, rows, position, ids=ids, truncate=False)
        expected = sampler.perturbed(whole, rows, position, truncate=False).gather(-1, ids)
        torch.testing.assert_close(scores, expected)


def test_noise_of_other_places_is_other_noise():
    draws = {
        tuple(noise(seed, row, position, 3).tolist())
        for seed in (0, 1, 2**63 - 1)
        for row in (0, 1, 5)
        for position in range(50)
    }
    assert len(draws) == 3 * 3 * 50


def test_noise_is_standard_gumbel():
    """Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is passed by 99.9 % of samples."""
    drawn = np.sort(np.concatenate([noise(3, 0, position, 500) for position in range(40)]))
    expected = np.exp(-np.exp(-drawn.astype(np.float64)))
    steps = np.arange(len(drawn) + 1) / len(drawn)
    distance = np.maximum(np.abs(expected - steps[:-1]), np.abs(expected - steps[1:])).max()
    assert distance < 1.95 / math.sqrt(len(drawn))


def test_picks_do_not_depend_on_the_batch_or_the_slot():
    logits = random_logits(5, 6, 20)
    rows, position = torch.tensor([9, 3, 0, 4, 1]), torch.randint(0, 99, (5, 6))
    sampler = Sampler(temperature=0.9, top_k=12, top_p=0.9, seed=5)
    together = sampler.pick(logits, rows, position)
    for slot in range(5):
        one = slice(slot, slot + 1)
        assert torch.equal(sampler.pick(logits[one], rows[one], position[one]), together[one])
    turned = torch.tensor([4, 2, 0, 1, 3])
    assert torch.equal(
        sampler.pick(logits[turned], rows[turned], position[turned]), together[turned]
    )
    slots = torch.tensor([5, 1, 3])
    assert torch.equal(sampler.pick(logits[:, slots], rows, position[:, slots]), together[:, slots])


# ------------------------------------------------------------------ distribution


@pytest.mark.parametrize("axis", ["positions", "rows", "seeds"])
@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 4}]
)
def test_picks_follow_the_softmax(axis, options):
    """Pearson's chi-square over 3,000 draws, at the 99.9 % quantile."""
    num_draws, vocab = 3000, 9
    logits = random_logits(1, 1, vocab, seed=1, scale=1.0)
    if axis == "positions":
        picks = Sampler(seed=1, **options).pick(
            logits.expand(1, num_draws, vocab), torch.tensor([0]), torch.arange(num_draws)[None]
        )
    elif axis == "rows":
        picks = Sampler(seed=1, **options).pick(
            logits.expand(num_draws, 1, vocab),
            torch.arange(num_draws),
            torch.full((num_draws, 1), 17),
        )
    else:
        # Each of a sampler of its own, as of the first ones is shown: all of them take long.
        one, rows = torch.tensor([[17]]), torch.zeros(num_draws, dtype=torch.int64)
        picks = Sampler(**options).pick(
            logits.expand(num_draws, 1, vocab),
            rows,
            one.expand(num_draws, 1),
            torch.arange(num_draws),
        )
        for seed in range(200):
            alone = Sampler(seed=seed, **options).pick(logits, rows[:1], one)
            assert torch.equal(alone[0], picks[seed])
    kept = slow_keep(logits[0, 0].double() / options["temperature"], options.get("top_k", 0), 1.0)
    expected = num_draws * kept.softmax(-1)
    counts = torch.bincount(picks.flatten(), minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    alive = expected > 0
    statistic = ((counts - expected)[alive] ** 2 / expected[alive]).sum()
    quantile = {3: 16.27, 7: 24.32}[int(alive.sum()) - 1]
    assert statistic < quantile


def slow_keep(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """keep_likeliest for one prediction, token by token."""
    likeliest = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    likeliest = likeliest[: top_k or None]
    probability = logits[likeliest].softmax(-1)
    kept = torch.full_like(logits, -INF)
    mass = 0.0
    for token, p in zip(likeliest, probability.tolist(), strict=True):
        if mass >= top_p and top_p < 1 and mass > 0:
            break
        kept[token] = logits[token]
        mass += p
    return kept


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1e-6, 0.1, 0.37, 0.5, 0.83, 0.99, 1.0]),
    scale=st.sampled_from([0.1, 1.0, 5.0, 40.0]),
)
def test_keep_likeliest_equals_the_slow_version(seed, top_k, top_p, scale):
    logits = random_logits(2, 3, 9, seed=seed, scale=scale)
    kept = keep_likeliest(logits, top_k, top_p)
    for row in range(2):
        for slot in range(3):
            expected = slow_keep(logits[row, slot].double(), top_k, top_p)
            assert torch.equal(kept[row, slot].double(), expected)


def test_keep_likeliest_among_equals_keeps_the_smaller_ids():
    logits = torch.tensor([[[0.0, 1.0, 1.0, 1.0, 0.0, -INF]]])
    assert (keep_likeliest(logits, 2, 1.0) > -INF).tolist() == [[[False, True, True] + [False] * 3]]
    flat = torch.tensor([[[0.0, 0.0, 0.0, 0.0, -INF]]])
    # 0.25 + 0.25 reaches 0.5: the third is not needed.
    assert (keep_likeliest(flat, 0, 0.5) > -INF).tolist() == [[[True, True, False, False, False]]]
    assert (keep_likeliest(flat, 0, 1e-9) > -INF).sum() == 1


def test_keep_likeliest_leaves_its_argument_alone():
    logits = random_logits(1, 2, 6)
    before = logits.clone()
    keep_likeliest(logits, 2, 0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1e-6}, {"temperature": 1e-45}, {"temperature": 5.0, "top_k": 1},
     {"temperature": 5.0, "top_p": 1e-9}],
)  # fmt: skip
def test_the_greedy_limits(options):
    logits = random_logits(4, 8, 30)
    rows, position = torch.arange(4), torch.arange(8).repeat(4, 1)
    picks = Sampler(seed=2, **options).pick(logits, rows, position)
    assert torch.equal(picks, logits.argmax(-1))


def test_greedy_ties_go_to_the_smaller_id():
    logits = torch.tensor([[[0.0, 2.0, 1.0, 2.0, 2.0]]])
    assert Sampler().pick(logits, torch.tensor([0]), torch.tensor([[0]])).tolist() == [[1]]


def test_impossible_tokens_are_never_picked():
    logits = random_logits(1, 1, 6).expand(1, 2000, 6)
    sampler = Sampler(temperature=50.0, seed=1)
    picks = sampler.pick(logits, torch.tensor([0]), torch.arange(2000)[None])
    assert set(picks.flatten().tolist()) == set(range(5))


# ------------------------------------------------------------------ in generation


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
def test_a_seed_fixes_the_texts_whatever_the_batch(mode):
    model = TableModel.random(seed=1)
    prompts = [[3, 4, 5], [3, 4, 5], [6], [3, 4, 5, 6, 7]]
    run: dict[str, Any] = {
        "mode": mode,
        "temperature": 1.0,
        "seed": 11,
        "max_new_tokens": 20,
        "ignore_eos": True,
    }
    results = [r.token_ids for r in generate(model, prompts, **run)]
    for batch_size in (1, 2, 3):
        again = generate(model, prompts, batch_size=batch_size, **run)
        assert [r.token_ids for r in again] == results
    assert results[0] != results[1], "the same prompt in another row draws other noise"
    other = generate(model, prompts, **dict(run, seed=12))
    assert all(a.token_ids != b for a, b in zip(other, results, strict=True))


def test_the_order_of_revealing_does_not_change_the_noise():
    """On tables, where predictions depend on nothing else, all solvers give the same text."""
    model = TableModel.random(seed=1)
    run: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_new_tokens": 30, "ignore_eos": True}
    texts = {
        generate(model, [[5, 6]], solver=solver, block_size=size, **run)[0].token_ids
        for solver in ("fixed:1", "entropy:inf", "prefix:0.5")
        for size in (1, 7, 16)
    }
    assert len(texts) == 1
