"""From single answers to a setting's line of a record: sums, intervals, paired tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

Z_95 = 1.959964
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
NGRAM = 4  # tokens that count as repeated if they stood in the answer before


def percent(share: float) -> str:
    """To a tenth; of less than all never 100.0%."""
    return f"{share if share == 1 else min(share, 0.999):.1%}"


@dataclass(frozen=True)
class Sample:
    """One problem's answer; a line of the file of samples.

    index: of the problem. correct: None where nothing is right or wrong.
    entropy_nats: sum over the tokens of the entropies of what was predicted there, without
    temperature.
    logprob_nats: sum of their log-probabilities under next-token prediction by the same model.
    repetition: share of the answer's runs of NGRAM tokens that had occurred in it before.
    wall_s: seconds of decoding since the sample before.
    reveal_step: for each token the forward that revealed it.
    """

    index: int
    key: str
    correct: bool | None
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    nfe: int
    prefill_forwards: int
    entropy_nats: float
    logprob_nats: float
    repetition: float
    wall_s: float
    reveal_step: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Sample":
        """The sample of a line of a file."""
        steps = tuple(values.get("reveal_step", ()))
        return cls(**{**values, "token_ids": tuple(values["token_ids"]), "reveal_step": steps})


@dataclass
class Score:
    """What one setting made of the problems of one task; `result()` is its line of the record."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def accuracy(self) -> float | None:
        """Share of right answers so far, 0 before the first; None where none can be right."""
        if any(one.correct is None for one in self.samples):
            return None
        return sum(one.correct or False for one in self.samples) / max(len(self.samples), 1)

    @property
    def wall_s(self) -> float:
        """Seconds spent decoding all problems, checking left out."""
        return sum(one.wall_s for one in self.samples)

    def result(self) -> dict[str, Any]:
        """Counts, score and tokens per forward with 95 % intervals, and seconds.

        entropy_nats, logprob_nats: means over all tokens; repetition: mean over the answers.
        correct, score and interval are None for prompts without a right answer.
        """
        samples = self.samples
        n = len(samples)
        judged = all(one.correct is not None for one in samples)
        correct = sum(one.correct or False for one in samples)
        tokens = sum(len(one.token_ids) for one in samples)
        nfe = sum(one.nfe for one in samples)
        ended = [one for one in samples if one.finish_reason == "eos"]
        return {
            "n": n,
            "correct": correct if judged else None,
            "score": correct / n if judged else None,
            "interval": wilson_interval(correct, n) if judged else None,
            "tokens": tokens,
            "nfe": nfe,
            "prefill_forwards": sum(one.prefill_forwards for one in samples),
            "tokens_per_forward": tokens / nfe,
            "tokens_per_forward_interval": ratio_interval(
                [(len(one.token_ids), one.nfe) for one in samples]
            ),
            "tokens_per_forward_eos": sum(len(one.token_ids) for one in ended)
            / max(sum(one.nfe for one in ended), 1),
            "eos_share": len(ended) / n,
            "repetition": sum(one.repetition for one in samples) / n,
            "entropy_nats": sum(one.entropy_nats for one in samples) / tokens,
            "logprob_nats": sum(one.logprob_nats for one in samples) / tokens,
            "wall_s": self.wall_s,
        }


def wilson_interval(correct: float | int, n: float | int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share."""
    share, z2 = correct / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # Rounding must not put a bound on the other side of the share.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def ratio_interval(parts: Sequence[tuple[float | int, int]]) -> tuple[float, float] | None:
    """The 95 % interval of the ratio of two sums over answers or texts, from how much these differ.

    By linearization, for many parts; of few it is somewhat too narrow, as the ratio's own error
    counts by its slope alone. None for a single one. The sums are of what is never below 0.
    """
    n = len(parts)
    if n < 2:
        return None
    above, below = (sum(column) for column in zip(*parts, strict=True))
    spread = sum((one - above / below * other) ** 2 for one, other in parts) * n / (n - 1)
    half = _student(n - 1) * math.sqrt(spread) / below
    return max(0.0, above / below - half), above / below + half


def _student(freedom: int) -> float:
    """Student's two-sided 95 % quantile; behind the table by the first terms of its expansion."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = Z_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def repetition(ids: Sequence[int]) -> float:
    """Share of the runs of NGRAM tokens that had occurred before; 0 for a text without any."""
    runs = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The exact two-sided p-value of McNemar's test: two settings on the same problems.

    It says how probable so uneven a split of the problems that only one of them got right would be
    if both were equally good.
    """
    pairs = list(zip(first, second, strict=True))
    better, worse = pairs.count((True, False)), pairs.count((False, True))
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def compare(
    first: dict[str, Any], second: dict[str, Any], samples: Sequence[Sequence[Sample]]
) -> dict[str, Any]:
    """A paired comparison of two lines of a record on the same problems, given their samples.

    score_difference: of the second's score from the first's; its interval is Tango's, of 95 %.
    Rights, difference and p_value are None for prompts without a right answer.
    Raises: ValueError for samples of other problems.
    """
    right = [{one.index: bool(one.correct) for one in some} for some in samples]
    asked = [{(one.index, one.key) for one in some} for some in samples]
    if asked[0] != asked[1]:
        raise ValueError(
            f"samples must be of the same problems, got {len(asked[0] - asked[1])} of the first "
            f"and {len(asked[1] - asked[0])} of the second that the other has not"
        )
    answers = [[one[index] for index in sorted(right[0])] for one in right]
    same = {one.index: one.token_ids for one in samples[0]}
    judged = first["score"] is not None
    names = ("model", "mode", "solver", "settings")
    lost = sum(a and not b for a, b in zip(*answers, strict=True))
    won = sum(b and not a for a, b in zip(*answers, strict=True))
    low, high = drop_bounds(lost, won, len(answers[0]), 0.975)
    return {
        "task": first["task"],
        "n": len(answers[0]),
        "first": {name: first.get(name) for name in names},
        "second": {name: second.get(name) for name in names},
        "only_first": lost if judged else None,
        "only_second": won if judged else None,
        "score_difference": (won - lost) / len(answers[0]) if judged else None,
        "score_difference_interval": (-high, -low) if judged else None,
        "p_value": mcnemar(*answers) if judged else None,
        "identical_share": sum(same[one.index] == one.token_ids for one in samples[1])
        / len(samples[1]),
        "wall_clock_ratio": first["wall_s"] / second["wall_s"],
    }


def pooled(lines: Sequence[dict[str, Any]], samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """One setting under several seeds on the same problems, all answers together.

    scores: of each seed. Intervals are of 95 %, and go by how much problems differ, each with all
    of its answers, as answers to one problem are alike: Wilson's for the score, of as many
    independent answers as would spread like that, at least one a problem.
    Source: Korn and Graubard (1998), Survey Methodology 24, their Student's factor included.
    Raises: ValueError for samples of other problems.
    """
    by_problem: dict[tuple[int, str], list[Sample]] = {}
    for some in samples:
        for one in some:
            by_problem.setdefault((one.index, one.key), []).append(one)
    answers = list(by_problem.values())
    if any(len(some) != len(lines) for some in answers):
        raise ValueError("samples must be of the same problems, one of each seed")
    first, n = lines[0], len(answers) * len(lines)
    settings = first["settings"]
    score = interval = None
    if first["score"] is not None:
        rights = [sum(bool(one.correct) for one in some) for some in answers]
        score = sum(rights) / n
        spread = sum((right / len(lines) - score) ** 2 for right in rights)
        effective = float(len(answers))
        if spread:
            effective = score * (1 - score) * len(answers) * (len(answers) - 1) / spread
            effective *= (Z_95 / _student(len(answers) - 1)) ** 2
        effective = min(max(effective, len(answers)), n)
        interval = wilson_interval(score * effective, effective)
    tokens = [sum(len(one.token_ids) for one in some) for some in answers]
    nfe = [sum(one.nfe for one in some) for some in answers]
    return {
        **{name: first.get(name) for name in ("task", "model", "mode", "solver")},
        "seeds": [line["settings"]["sampler"]["seed"] for line in lines],
        "n": len(answers),
        "score": score,
        "scores": [line["score"] for line in lines],
        "interval": interval,
        "tokens_per_forward": sum(tokens) / sum(nfe),
        "tokens_per_forward_interval": ratio_interval(list(zip(tokens, nfe, strict=True))),
        "wall_s": sum(line["wall_s"] for line in lines),
        "settings": {**settings, "sampler": {**settings["sampler"], "seed": None}},
    }


def drop_bounds(lost: int, won: int, n: int, confidence: float) -> tuple[float, float]:
    """Bounds of how much less often the second of two settings is right, on the same n items.

    lost, won: items that only the first, only the second got right. Each bound holds with this
    confidence by itself.
    Source: Tango (1998), Statistics in Medicine 17: the score interval of paired proportions.
    """
    z = NormalDist().inv_cdf(confidence)
    seen = (lost - won) / n

    def errors_from_seen(drop: float) -> float:
        """How many standard errors what was seen lies from this drop, were it the true one."""
        a, b = 2 * n, -lost - won + (2 * n - lost + won) * drop
        inner = max(b * b + 4 * a * won * drop * (1 - drop), 0.0)
        only_second = (math.sqrt(inner) - b) / (2 * a)  # its likeliest share of the items
        variance = n * (2 * only_second + drop * (1 - drop))
        return abs(n * (drop - seen)) / math.sqrt(max(variance, 1e-12))

    def bound(outside: float) -> float:
        inside = seen
        for _ in range(60):
            middle = (inside + outside) / 2
            if errors_from_seen(middle) < z:
                inside = middle
            else:
                outside = middle
        return (inside + outside) / 2

    return bound(-1.0), bound(1.0)
