"""The solvers against slow, obvious versions and transformers' entropy bound, and by property."""

import math
import re
from functools import partial
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from setblock import solvers
from setblock.solvers import (
    FORMS,
    ConfidenceThreshold,
    ConfidentPrefix,
    EntropyBound,
    EntropyThreshold,
    Factor,
    FixedCount,
    Predictions,
    Solver,
    entropy,
    entropy_prefix,
    parse,
    probability_of,
)

INF = math.inf
# Every name, with parameters at both ends and in between; none on a rounding boundary of PALETTE.
TEXTS = [
    *(f"{name}:{gamma}" for name in ("entropy", "confidence-bound", "margin-bound")
      for gamma in (0.0, 0.1, 0.35, 1.3, 4.1, INF)),
    *(f"entropy-threshold:{tau}" for tau in (0.0, 0.1, 0.9, INF)),
    *(f"{name}:{tau}" for name in ("confidence", "prefix") for tau in (0.0, 0.3, 0.9, 1.0)),
    *(f"factor:{f}" for f in (0.0, 0.05, 0.3, 1.0, 2.0, INF)),
    *(f"fixed:{n}" for n in (1, 2, 3, 99)),
]  # fmt: skip
# Few distinct predictions, so that a row holds many ties; the last column is the mask token's.
PALETTE = torch.tensor(
    [
        [0, -INF, -INF, -INF, -INF, -INF],
        [9, 0, 0, 0, 0, -INF],
        [6, 0, 0, 0, 0, -INF],
        [4, 0, 1, 0, 0, -INF],
        [3, 2.5, 0, 0, 0, -INF],
        [2, 0, 0, 1, 0, -INF],
        [0, 0, 0, 0, 0, -INF],
    ]
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(rows: int, block: int, vocab: int, seed: int = 0):
    """Logits from nearly certain to nearly flat, and masks from none to all."""
    draw = generator(seed)
    logits = torch.randn(rows, block, vocab, generator=draw)
    logits = logits * torch.rand(rows, block, 1, generator=draw) * 12
    logits[..., -1] = -INF
    masked = torch.rand(rows, block, generator=draw) < torch.rand(rows, 1, generator=draw)
    return logits, masked


def slow_reveal(solver: Solver, logits: list[list[float]], masked: list[bool]) -> list[bool]:
    """What `solver` reveals of one row, in plain Python, each rule as it is stated."""
    places = [i for i, is_masked in enumerate(masked) if is_masked]
    weights = [[math.exp(value) for value in row] for row in logits]
    probability = [sorted((w / sum(row) for w in row), reverse=True) for row in weights]
    sure = [row[0] for row in probability]
    margin = [row[0] - row[1] for row in probability]
    nats = [-sum(p * math.log(p) for p in row if p > 0) for row in probability]
    by_confidence = sorted(places, key=lambda i: -sure[i])
    counts = range(1, len(places) + 1)

    def longest(order, allowed) -> list[int]:
        return order[: max((n for n in counts if n == 1 or allowed(n)), default=0)]

    match solver:
        case EntropyBound(gamma, kind):
            proxy = {"entropy": lambda i: nats[i], "margin": lambda i: -margin[i]}
            order = sorted(places, key=proxy.get(kind, lambda i: -sure[i]))

            def within(n: int) -> bool:
                run = [nats[i] for i in order[:n]]
                return gamma > 0 and sum(run) - max(run) <= gamma

            chosen = longest(order, within)
        case EntropyThreshold(tau):
            chosen = [i for i in places if nats[i] < tau]
            chosen = chosen or sorted(places, key=lambda i: nats[i])[:1]
        case ConfidenceThreshold(tau):
            chosen = [i for i in places if sure[i] > tau] or by_confidence[:1]
        case Factor(f):
            chosen = longest(
                by_confidence, lambda n: (n + 1) * (1 - sure[by_confidence[n - 1]]) < f
            )
        case FixedCount(count):
            chosen = by_confidence[:count]
        case ConfidentPrefix(tau):
            chosen = longest(places, lambda n: all(sure[i] >= tau for i in places[:n]))
        case _:
            raise AssertionError(solver)
    return [i in chosen for i in range(len(masked))]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_the_slow_rule_on_rows_full_of_ties(text):
    draw = generator()
    logits = PALETTE[torch.randint(len(PALETTE), (150, 7), generator=draw)]
    masked = torch.rand(150, 7, generator=draw) < torch.rand(150, 1, generator=draw)
    assert {int(n) for n in masked.sum(1)} == set(range(8))
    solver = parse(text)
    rows = zip(logits.tolist(), masked.tolist(), strict=True)
    expected = [slow_reveal(solver, row, row_masked) for row, row_masked in rows]
    assert solver.reveal(Predictions(logits), masked).tolist() == expected


@pytest.mark.parametrize("text", TEXTS)
def test_equals_the_slow_rule_on_random_rows(text):
    logits, masked = random_rows(100, 16, 9)
    solver = parse(text)
    rows = zip(logits.tolist(), masked.tolist(), strict=True)
    expected = [slow_reveal(solver, row, row_masked) for row, row_masked in rows]
    assert solver.reveal(Predictions(logits), masked).tolist() == expected


eighths = st.integers(0, 24).map(lambda n: n / 8)  # sums of eighths are exact in float32


@given(
    row=st.lists(st.tuples(eighths, eighths, st.booleans()), min_size=1, max_size=9),
    gamma=eighths,
    by_score=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=120)
def test_entropy_prefix_is_the_longest_that_keeps_the_bound(row, gamma, by_score):
    nats, score, masked = (list(column) for column in zip(*row, strict=True))
    order = [i for i, is_masked in enumerate(masked) if is_masked]
    order.sort(key=lambda i: score[i] if by_score else nats[i])
    runs = [order[:n] for n in range(1, len(order) + 1)]
    bounds = [sum(nats[i] for i in run) - max(nats[i] for i in run) for run in runs]
    assert bounds == sorted(bounds)
    fitting = [run for run, bound in zip(runs, bounds, strict=True) if bound <= gamma]
    expected = (fitting[-1] if gamma > 0 else fitting[0]) if order else []

    score_tensor = torch.tensor([score]) if by_score else None
    found = entropy_prefix(torch.tensor([nats]), torch.tensor([masked]), gamma, score_tensor)
    assert found[0].nonzero()[:, 0].tolist() == sorted(expected)


def test_entropy_prefix_counts_small_entropies_before_a_large_one():
    # In float32 20.0000002 - 20 is 0, so that cumsum - max would let the last one in.
    nats = torch.tensor([[1e-7, 1e-7, 20.0]])
    found = entropy_prefix(nats, torch.ones(1, 3, dtype=torch.bool), 1.5e-7)
    assert found.tolist() == [[True, True, False]]


@pytest.mark.parametrize("text", TEXTS)
def test_predictions_are_scored_once(monkeypatch, text):
    """Whoever asks, and however often."""
    calls = []

    def counted(logits):
        calls.append(1)
        return probability_of(logits)

    monkeypatch.setattr(solvers, "probability_of", counted)
    logits, masked = random_rows(3, 4, 9)
    predictions = Predictions(logits)
    assert predictions.entropy is predictions.entropy
    assert parse(text).reveal(predictions, masked).equal(parse(text).reveal(predictions, masked))
    assert len(calls) == 1


@pytest.mark.parametrize("order", ["entropy", "confidence", "margin"])
def test_gamma_zero_reveals_exactly_one_even_where_entropies_are_zero(order):
    certain = PALETTE[torch.zeros(3, 5, dtype=torch.long)]
    masked = torch.tensor([[True] * 5, [False, False, True, False, True], [False] * 5])
    expected = [[True] + [False] * 4, [False, False, True, False, False], [False] * 5]
    assert EntropyBound(0, order).reveal(Predictions(certain), masked).tolist() == expected
    assert EntropyBound(1e-30, order).reveal(Predictions(certain), masked).equal(masked)
    flat = torch.zeros(3, 5, 4)
    assert EntropyBound(INF, order).reveal(Predictions(flat), masked).equal(masked)


def test_equals_the_entropy_bound_sampler_of_transformers():
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        EntropyBoundSampler,
        EntropyBoundSamplerConfig,
    )

    block, vocab = 16, 12
    compared = 0
    for seed, gamma in enumerate((0.01, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 5.0, 15.0)):
        logits, _ = random_rows(1010, block, vocab, seed)
        # Both sums round; a row with one within 1e-4 of gamma may go either way, so leave it out.
        nats = entropy(logits).double().sort(1).values
        clear = ((nats.cumsum(1) - nats - gamma).abs() > 1e-4).all(1)
        logits = logits[clear]
        oracle = EntropyBoundSampler(EntropyBoundSamplerConfig(gamma), block, vocab, 1)
        kept = cast(torch.LongTensor, torch.zeros(logits.shape[:2], dtype=torch.long))
        drawn = cast(torch.LongTensor, kept + 1)
        accepted = oracle.accept_canvas(kept, drawn, logits, 0).bool()
        assert (
            EntropyBound(gamma)
            .reveal(Predictions(logits), torch.ones_like(accepted))
            .equal(accepted)
        )
        compared += len(logits)
    assert compared >= 10_000


def test_entropy_bound_equals_brute_force_on_ten_thousand_rows():
    compared = 0
    for seed, gamma in enumerate((0.0, 0.01, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 5.0)):
        logits, masked = random_rows(1010, 16, 9, 100 + seed)
        # A sum within 1e-4 of gamma may round to either side of it: such rows are left out.
        nats = entropy(logits).double().masked_fill(~masked, 0).sort(1).values
        clear = (gamma == 0) | ((nats.cumsum(1) - nats - gamma).abs() > 1e-4).all(1)
        logits, masked = logits[clear], masked[clear]
        solver = EntropyBound(gamma)
        rows = zip(logits.tolist(), masked.tolist(), strict=True)
        expected = [slow_reveal(solver, row, row_masked) for row, row_masked in rows]
        assert solver.reveal(Predictions(logits), masked).tolist() == expected
        compared += len(logits)
    assert compared >= 10_000


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reveals_masked_positions_only_and_at_least_one_of_each_row(text, dtype):
    logits, masked = random_rows(200, 6, 5, seed=1)
    reveal = parse(text).reveal(Predictions(logits.to(dtype)), masked)
    assert reveal.dtype == torch.bool
    assert not (reveal & ~masked).any()
    assert reveal.any(1).equal(masked.any(1))


@pytest.mark.parametrize("text", TEXTS)
def test_reveals_something_even_of_broken_logits(text):
    logits = torch.full((2, 4, 5), math.nan)
    masked = torch.tensor([[False, True, False, True], [False] * 4])
    reveal = parse(text).reveal(Predictions(logits), masked)
    assert not (reveal & ~masked).any()
    assert reveal.any(1).tolist() == [True, False]


@given(
    text=st.sampled_from(TEXTS),
    seed=st.integers(0, 10_000),
    block=st.integers(1, 8),
    rows=st.integers(1, 4),
)
@settings(deadline=None, derandomize=True, max_examples=80)
def test_rows_are_independent_and_order_does_not_matter(text, seed, block, rows):
    solver = parse(text)
    logits, masked = random_rows(rows, block, 7, seed)
    reveal = solver.reveal(Predictions(logits), masked)
    for row in range(rows):
        alone = solver.reveal(Predictions(logits[row : row + 1]), masked[row : row + 1])
        assert alone[0].equal(reveal[row])
    if not isinstance(solver, ConfidentPrefix):  # the one rule that reads from left to right
        shuffle = torch.randperm(block, generator=generator(seed))
        shuffled = solver.reveal(Predictions(logits[:, shuffle]), masked[:, shuffle])
        assert shuffled.equal(reveal[:, shuffle])


@given(
    name=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 10_000),
    low=st.floats(0, 1),
    high=st.floats(0, 1),
)
@settings(deadline=None, derandomize=True, max_examples=80)
def test_reveals_more_as_the_parameter_loosens(name, seed, low, high):
    logits, masked = random_rows(5, 8, 7, seed)
    low, high = sorted((low, high))
    if name == "fixed":
        low, high = 1 + int(low * 8), 1 + int(high * 8)
    few, many = (
        parse(f"{name}:{value}").reveal(Predictions(logits), masked) for value in (low, high)
    )
    if name in ("confidence", "prefix"):  # for these a high value is the strict one
        few, many = many, few
    assert not (few & ~many).any()


@pytest.mark.parametrize(
    ("text", "count"),
    [("entropy:1.0", 2), ("confidence-bound:1.0", 2), ("margin-bound:1.0", 2), ("factor:1.6", 2),
     ("entropy-threshold:0.5", 1), ("confidence:0.9", 1), ("fixed:3", 3), ("prefix:0.9", 1)],
)  # fmt: skip
def test_ties_go_to_the_smaller_position(text, count):
    logits = torch.zeros(1, 40, 3)
    logits[..., -1] = -INF  # two equal tokens: entropy ln 2 = 0.69, confidence 0.5
    masked = torch.ones(1, 40, dtype=torch.bool)
    masked[0, 0] = False
    expected = list(range(1, 1 + count))
    assert parse(text).reveal(Predictions(logits), masked)[0].nonzero()[:, 0].tolist() == expected


def test_entropy_in_nats():
    logits = torch.tensor(
        [[[0.0, 0, 0, 0, -INF], [5, -INF, -INF, -INF, -INF], [0, 0, -INF, -INF, -INF]]]
    )
    expected = torch.tensor([[math.log(4), 0, math.log(2)]])
    torch.testing.assert_close(entropy(logits), expected)
    assert entropy(logits)[0, 1] == 0
    assert Predictions(logits).confidence.tolist() == [[0.25, 1.0, 0.5]]


def test_entropy_of_a_nearly_certain_prediction_is_not_cancelled_to_zero():
    # p = e^-40 of the runner-up: -p log p = 40 e^-40; logsumexp - sum p * logit is 0 in float32.
    found = entropy(torch.tensor([[[40.0, 0.0]]]))
    torch.testing.assert_close(found, torch.tensor([[40 * math.exp(-40)]]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_entropy_is_computed_in_float32_from_any_dtype(dtype):
    logits = random_rows(20, 8, 30)[0].to(dtype)
    assert entropy(logits).equal(entropy(logits.float()))
    assert (entropy(logits) >= 0).all()
    precise = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    torch.testing.assert_close(entropy(logits).double(), precise, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", TEXTS)
def test_parse_and_str_are_inverse(text):
    solver = parse(text)
    assert isinstance(solver, Solver)
    assert str(solver) == text
    assert parse(str(solver)) == solver
    assert hash(parse(text)) == hash(solver)


def test_parse_gives_the_solver_of_that_name():
    assert {text.partition(":")[0] for text in TEXTS} == set(FORMS)
    assert parse("entropy:0.35") == EntropyBound(0.35)
    assert parse("confidence-bound:0.35") == EntropyBound(0.35, order="confidence")
    assert parse("margin-bound:0.35") == EntropyBound(0.35, order="margin")
    assert parse("entropy-threshold:0.3") == EntropyThreshold(0.3)
    assert parse("confidence:0.9") == ConfidenceThreshold(0.9)
    assert parse("factor:1") == Factor(1)
    assert parse("fixed:2") == FixedCount(2)
    assert parse("prefix:0.9") == ConfidentPrefix(0.9)
    assert str(EntropyBound(1)) == "entropy:1.0"


ACCEPTED = (
    "solver must be one of entropy:GAMMA, confidence-bound:GAMMA, margin-bound:GAMMA, "
    "entropy-threshold:TAU, confidence:TAU, factor:F, fixed:N, prefix:TAU; got "
)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("", "''"),
        ("greedy", "'greedy'"),
        ("greedy:1", "'greedy:1'"),
        ("Entropy:1", "'Entropy:1'"),
        ("entropy", "'entropy' (GAMMA must be a number, got '')"),
        ("entropy:", "'entropy:' (GAMMA must be a number, got '')"),
        ("entropy:x", "'entropy:x' (GAMMA must be a number, got 'x')"),
        ("entropy:1:2", "'entropy:1:2' (GAMMA must be a number, got '1:2')"),
        ("entropy:nan", "'entropy:nan' (gamma must be a number from 0 to inf, got nan)"),
        ("margin-bound:-1", "'margin-bound:-1' (gamma must be a number from 0 to inf, got -1.0)"),
        ("entropy-threshold:-1",
         "'entropy-threshold:-1' (tau must be a number from 0 to inf, got -1.0)"),
        ("confidence:1.5", "'confidence:1.5' (tau must be a number from 0 to 1, got 1.5)"),
        ("prefix:inf", "'prefix:inf' (tau must be a number from 0 to 1, got inf)"),
        ("factor:-0.1", "'factor:-0.1' (f must be a number from 0 to inf, got -0.1)"),
        ("fixed:0", "'fixed:0' (n must be an integer from 1 to 2147483647, got 0)"),
        ("fixed:2147483648",
         "'fixed:2147483648' (n must be an integer from 1 to 2147483647, got 2147483648)"),
        ("fixed:1.5", "'fixed:1.5' (N must be a whole number, got '1.5')"),
    ],
)  # fmt: skip
def test_parse_lists_every_accepted_form(text, ending):
    with pytest.raises(ValueError, match=f"^{re.escape(ACCEPTED + ending)}$"):
        parse(text)


def build(kind, **fields):
    """A solver made without the runtime type check of the test run, as a user's call makes it."""
    solver = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(solver, name, value)
    solver.__post_init__()
    return solver


@pytest.mark.parametrize("value", [-0.1, -INF, math.nan, True])
@pytest.mark.parametrize(
    ("kind", "field", "high"),
    [(EntropyBound, "gamma", INF), (EntropyThreshold, "tau", INF), (Factor, "f", INF),
     (ConfidenceThreshold, "tau", 1), (ConfidentPrefix, "tau", 1)],
)  # fmt: skip
def test_a_number_out_of_range_is_refused(kind, field, high, value):
    message = f"{field} must be a number from 0 to {high}, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kind(value)


@pytest.mark.parametrize("value", ["0.3", None, 1j])
def test_what_is_no_number_is_refused(value):
    for kind, field in [(EntropyThreshold, "tau"), (ConfidenceThreshold, "tau"), (Factor, "f"),
                        (ConfidentPrefix, "tau")]:  # fmt: skip
        message = f"^{field} must be a number from 0 to (inf|1), got {re.escape(repr(value))}$"
        with pytest.raises(ValueError, match=message):
            build(kind, **{field: value})
    with pytest.raises(ValueError, match=r"^gamma must be a number from 0 to inf, got "):
        build(EntropyBound, gamma=value, order="entropy")


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_a_bad_count_is_refused(value):
    message = f"n must be an integer from 1 to 2147483647, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build(FixedCount, n=value)


def test_an_unknown_order_is_refused():
    message = "order must be one of ('entropy', 'confidence', 'margin'), got 'random'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build(EntropyBound, gamma=0.1, order="random")


@pytest.mark.parametrize("gamma", [-1, math.nan])
def test_entropy_prefix_refuses_a_bad_gamma(gamma):
    with pytest.raises(ValueError, match=f"^gamma must be a number from 0 to inf, got {gamma}$"):
        entropy_prefix(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), gamma)


class Mine:
    def __init__(self, x: float, told: str | None = None) -> None:
        self.told = f"mine-2:{x}" if told is None else told

    def __str__(self) -> str:
        return self.told

    def reveal(self, predictions, masked):
        return masked


def test_a_rule_of_one_s_own_gets_a_name(monkeypatch):
    monkeypatch.setattr(solvers, "FORMS", dict(FORMS))
    solvers.register("mine-2", Mine, field="TAU")
    assert str(parse("mine-2:0.5")) == "mine-2:0.5"
    with pytest.raises(ValueError, match=r"prefix:TAU, mine-2:TAU; got 'x'$"):
        parse("x")
    with pytest.raises(ValueError, match=r"TAU must be a number, got 'much'"):
        parse("mine-2:much")
    for name in ("a:b", "", "Mine"):
        with pytest.raises(ValueError, match=f"^a solver's name must be .*got '{name}'$"):
            solvers.register(name, Mine)
    for name in ("mine-2", "entropy"):
        with pytest.raises(ValueError, match=f"^there is a solver '{name}' already"):
            solvers.register(name, Mine)
    solvers.register("whole", lambda x: Mine(x, told=f"whole:{x:g}"))
    assert str(parse("whole:1")) == "whole:1", "the same number in another form"
    solvers.register("other", partial(Mine, told="mine-2:3"))
    with pytest.raises(ValueError, match=r"\(its __str__ must be 'other:1.0', got 'mine-2:3'\)$"):
        parse("other:1")


def test_predictions_outside_a_run_have_no_place():
    predictions = Predictions(torch.zeros(1, 2, 3))
    for name in ("place", "step"):
        with pytest.raises(ValueError, match=f"outside a decoding run have no {name}$"):
            getattr(predictions, name)
