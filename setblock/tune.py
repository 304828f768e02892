"""The fastest decoding of a model whose loss of score against next-token decoding is bounded.

Half of the items pick: every setting answers a few of them, the worse half of the settings is left
out, the rest answer twice as many, and so on. The other half confirms: of the last few settings the
fastest is taken whose loss on items that had no part in picking is, with the confidence asked for,
at most the bound. Where items have no right answers, one is right that says what token by token
says. Verified decoding needs no such proof: nothing but rounding parts it from token by token.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from setblock.checkpoint import DRAFTING
from setblock.evaluate import Form, acceptance_fitting, evaluate, prompt_ids
from setblock.generation import finished, settings_for
from setblock.model import Model
from setblock.roofline import ACCEPTANCE, Spending
from setblock.scores import Sample, Score, drop_bounds, percent
from setblock.settings import MOST_QUERIES

NAMES = ("mode", "solver", "slide", *DRAFTING)  # what tells settings apart
FIRST_ITEMS = 8  # of the first round, at least
FINALISTS = 3
BASELINE: dict[str, Any] = {"mode": "ntp"}
SOLVERS = (
    *("entropy:0.01", "entropy:0.05", "entropy:0.1", "entropy:0.2", "entropy:0.35", "entropy:0.6"),
    *("confidence:0.9", "confidence:0.99", "prefix:0.9", "prefix:0.99", "prefix:0.999"),
)
MODES = ("sbd", "verified")
MOST_VERIFIED = 6  # block sizes and branches of verified decoding that are tried
WITHOUT_LOOKUP = 3  # of them without lookup too
LOOKUP = 8
SPEEDS = ("clock", "forwards")


@dataclass(frozen=True)
class Target:
    """What is asked for.

    max_drop: share of the items, 0.005 for half a point. confidence: that the loss is no larger.
    by: "clock", seconds per token, or "forwards", tokens per forward.
    """

    max_drop: float
    confidence: float
    by: str

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise ValueError(f"max_drop must lie in 0..1, 1 left out, got {self.max_drop}")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence must lie in 0.5..1, 1 left out, got {self.confidence}")
        if self.by not in SPEEDS:
            raise ValueError(f"by must be one of {', '.join(SPEEDS)}, got {self.by!r}")


@dataclass
class Candidate:
    """A setting and its answers so far, by item; half 0 picks, half 1 confirms."""

    options: dict[str, Any]
    answers: list[dict[int, Sample]] = field(default_factory=lambda: [{}, {}])


@dataclass(frozen=True)
class Tried:
    """What to try.

    modes: of MODES. solvers: texts, of mode "sbd". block_sizes: None for `longest` in mode "sbd",
    and all up to it in mode "verified". longest: None for the checkpoint's block size. slides:
    whether blocks do, in mode "sbd".
    """

    modes: Sequence[str] = MODES
    solvers: Sequence[str] = SOLVERS
    block_sizes: Sequence[int] | None = None
    longest: int | None = None
    slides: Sequence[bool] = (False, True)

    def check(self, model: Model) -> None:
        """Raises: ValueError for what is no mode or solver, or no block size."""
        for mode in self.modes:
            if mode not in MODES:
                raise ValueError(f"mode must be one of {', '.join(MODES)} to be tuned, got {mode}")
        for size in self.block_sizes or ():
            settings_for(model, mode="sbd", block_size=size)
        found = self.with_solvers(model) + self.verified(model, 1)
        for options in found:
            settings_for(model, **options)
        if not found:
            raise ValueError("blocks of one token leave nothing to try: give a larger block size")

    def up_to(self, model: Model) -> int:
        """The longest block that is tried."""
        return max(self.block_sizes or [self.longest or model.defaults["block_size"]])

    def drafting(self, model: Model, rows: int) -> dict[str, Any]:
        """The setting that the acceptance of drafts is measured with: quickest by arithmetic."""
        spent = model.best_spending(self.up_to(model), rows, one_forward=True)
        return _verified(spent)

    def with_solvers(self, model: Model) -> list[dict[str, Any]]:
        """Every solver with every block size, in mode "sbd", whole blocks and blocks that slide."""
        sizes = self.block_sizes or [self.up_to(model)]
        return [
            {"mode": "sbd", "solver": solver, "block_size": size, "slide": slide}
            for size in (dict.fromkeys(sizes) if "sbd" in self.modes else ())
            for solver in dict.fromkeys(self.solvers)
            for slide in self.slides
            if size > 1  # else token by token
        ]

    def verified(self, model: Model, rows: int) -> list[dict[str, Any]]:
        """For each block size one branch, all, and what arithmetic has for `rows` rows.

        Of them the MOST_VERIFIED that it says are quickest, with lookup, the first few without; and
        lookup alone, where no block sizes were asked for.
        """
        sizes = self.block_sizes or range(2, self.up_to(model) + 1)
        spent = {
            model.best_spending(
                size, rows, fixed_size=True, one_forward=True, branches=branches, seeds=seeds
            )
            for size in (sizes if "verified" in self.modes else ())
            if size > 1
            for branches, seeds in ((1, 0), (size, 0), (None, None))
        }
        spent = {
            one
            for one in spent
            if LOOKUP + one.block_size * (1 + one.branches * (1 + one.seeds)) <= MOST_QUERIES
        }
        order = sorted(spent, key=lambda one: (one.seconds_per_token, *astuple(one)))
        drafted = [_verified(one) for one in order[:MOST_VERIFIED]]
        found = [one | {"lookup": LOOKUP} for one in drafted] + drafted[:WITHOUT_LOOKUP]
        if drafted and self.block_sizes is None:
            found.append(found[0] | {"block_size": 1, "branches": 1, "seeds": 0})
        return found


def _verified(spent: Spending) -> dict[str, Any]:
    """Its drafts alone: without lookup, whatever the checkpoint says."""
    return {
        "mode": "verified",
        "block_size": spent.block_size,
        "branches": spent.branches,
        "seeds": spent.seeds,
        "lookup": 0,
    }


def tune(
    model: Model,
    items: Sequence[Any],
    tried: Tried,
    target: Target,
    batch_size: int,
    form: Form | None = None,
    warm_up: Callable[[dict[str, Any]], None] = lambda options: None,
    known: Callable[[int], Sequence[Sample]] = lambda run: (),
    on_sample: Callable[[int, Sample], None] = lambda run, sample: None,
    on_round: Callable[[dict[str, Any]], None] = lambda line: None,
    **common: Any,
) -> dict[str, Any]:
    """One line of a record: what was tried, and what is chosen.

    items: at least two different ones; half of them, drawn by lot, pick, the rest confirm.
    warm_up: called with the options of each setting before its first answer.
    known, on_sample: answers that an earlier call left, and where to keep new ones; run 2c + h is
    candidate c's half h; the baseline is 0, the measuring of acceptance 1, and then come those
    tried.
    on_round: called after each round. common: options of all settings, such as max_new_tokens.
    Effects: before verified decoding is tried, model.acceptance becomes that of its drafts.
    """
    # Each prompt once, in an order of no meaning: families and years come one after the other.
    prompts = [form.prompt(one) if form else one.prompt for one in items]  # type: ignore[arg-type]
    drawn = list({str(prompt): one for prompt, one in zip(prompts, items, strict=True)}.values())
    random.Random(0).shuffle(drawn)
    halves = [drawn[::2], drawn[1::2]]
    if not halves[1]:
        raise ValueError("tuning needs at least 2 different items: one to pick by, one to confirm")
    baseline = Candidate({**BASELINE, **common})
    some = min(FIRST_ITEMS, len(halves[0]))
    if "verified" in tried.modes:
        model.acceptance = ACCEPTANCE  # drafts of one kind, whatever was measured before
    drafting = Candidate({**tried.drafting(model, min(batch_size, some)), **common})
    # A prompt that does not fit is told before anything is decoded, by its place in the data.
    ids = prompt_ids(model, items, form)
    shapes = {(one["block_size"], one["slide"]): one for one in tried.with_solvers(model)}
    for options in (baseline.options, *({**one, **common} for one in shapes.values())):
        finished(model, ids, **options)
    runs = {id(baseline): 0, id(drafting): 1}
    exact = model.dtype == torch.float32
    judged = form is None or form.task.check is not None

    def answer(one: Candidate, half: int, count: int) -> None:
        run = 2 * runs[id(one)] + half
        found = one.answers[half]
        if not found:
            found |= {sample.index: sample for sample in known(run)}
        for start in range(0, count, batch_size):
            batch = range(start, min(start + batch_size, count))
            if all(index in found for index in batch):
                continue
            asked = halves[half][batch.start : batch.stop]
            # Kept once all are there: each has its share of the batch's time.
            for sample in evaluate(model, asked, batch_size, form=form, **one.options).samples:
                found[start + sample.index] = replace(sample, index=start + sample.index)
                on_sample(run, found[start + sample.index])

    def answer_in_turns(some: Sequence[Candidate], half: int, count: int) -> None:
        """A batch of items by each, then the next: what else the machine does meets all alike."""
        for end in range(batch_size, count + batch_size, batch_size):
            for one in some:
                answer(one, half, min(end, count))

    acceptance = None
    warm_up(baseline.options)
    if "verified" in tried.modes:
        warm_up(drafting.options)
        used = settings_for(model, min(batch_size, some), **drafting.options)
        if used.block_size > 1:
            answer(drafting, 0, some)
            answers = [drafting.answers[0][index] for index in range(some)]
            acceptance = acceptance_fitting(used, _per_forward(answers))
            model.acceptance = acceptance
    settings = tried.with_solvers(model) + tried.verified(model, min(batch_size, len(halves[0])))
    going = [Candidate({**options, **common}) for options in settings]
    runs |= {id(one): len(runs) + number for number, one in enumerate(going)}
    for one in going:
        warm_up(one.options)
    count = max(FIRST_ITEMS, len(halves[0]) // 8)
    count = min(-(-count // batch_size) * batch_size, len(halves[0]))  # whole batches
    needs_right = judged and any(one["mode"] != "verified" for one in settings)
    while True:
        answer_in_turns((baseline, *going), 0, count)
        if needs_right and not any(one.correct for one in baseline.answers[0].values()):
            answer(baseline, 0, len(halves[0]))  # a weak model may get only later ones right
            if not any(one.correct for one in baseline.answers[0].values()):
                raise ValueError(
                    f"token by token gets none of {len(halves[0])} items right, so nothing can be "
                    "lost: look at the prompts and at max_new_tokens, or try mode verified alone, "
                    "whose text is that of token by token"
                )
        lines = [_line(one, baseline, 0, count, target, 1, exact, judged) for one in going]
        order = sorted(range(len(going)), key=lambda i: _rank(lines[i], target))
        kept = max(-(-len(going) // 2), min(FINALISTS, len(going)))
        for place, index in enumerate(order):
            lines[index]["kept"] = place < kept
        on_round({"items": count, "settings": lines})
        going = [going[index] for index in order[:kept]]
        if len(going) <= FINALISTS:
            break
        count = min(2 * count, len(halves[0]))
    answer_in_turns((baseline, *going), 1, len(halves[1]))
    finals = [
        _line(one, baseline, 1, len(halves[1]), target, len(going), exact, judged) for one in going
    ]
    finals.sort(key=lambda line: -line["speed"])
    good = [one for one in finals if (one["proven"] or one["rounding"]) and one["speed"] > 1]
    first = Score(list(baseline.answers[1].values())).result()
    chosen = good[0] if good else _describe(baseline) | {"speed": 1.0, "drop": 0.0}
    return {
        "model": model.name,
        "max_drop": target.max_drop,
        "confidence": target.confidence,
        "by": target.by,
        "batch_size": batch_size,
        "picked_on": count,
        "confirmed_on": len(halves[1]),
        "acceptance": acceptance,
        "judged": judged,
        "baseline": {"score": first["score"], "interval": first["interval"]},
        "finalists": finals,
        "chosen": chosen,
    }


def items_needed(target: Target, finalists: int = FINALISTS) -> int | None:
    """How many confirming items prove the bound for a setting that answers all of them alike.

    None if no number does.
    """
    if target.max_drop == 0:
        return None
    confidence = 1 - (1 - target.confidence) / finalists
    count = 1
    while drop_bounds(0, 0, count, confidence)[1] > target.max_drop:
        count *= 2
    low = count // 2
    while count - low > 1:
        middle = (count + low) // 2
        if drop_bounds(0, 0, middle, confidence)[1] > target.max_drop:
            low = middle
        else:
            count = middle
    return count


def _line(
    one: Candidate,
    baseline: Candidate,
    half: int,
    count: int,
    target: Target,
    compared: int,
    exact: bool,
    judged: bool,
) -> dict[str, Any]:
    """A candidate beside the baseline on the first `count` items of a half.

    compared: how many settings share the error that `confidence` leaves (Bonferroni).
    judged: whether items have right answers; else the baseline's tokens are right.
    lossless: that the text can't differ, in mode "verified" in float32 (exact), and did not on any
    item of either half. rounding: else in mode "verified", where rounding alone makes texts differ;
    no if right answers tell of a loss above max_drop. proven: that the loss is at most max_drop.
    """
    first, mine = (
        {index: some.answers[half][index] for index in range(count)} for some in (baseline, one)
    )
    same = [first[index].token_ids == mine[index].token_ids for index in mine]
    pairs = [(True, alike) for alike in same]
    if judged:
        pairs = [(bool(first[index].correct), bool(mine[index].correct)) for index in mine]
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    confidence = 1 - (1 - target.confidence) / compared
    low, high = drop_bounds(lost, won, len(pairs), confidence)
    seen = [  # up to here: a run that goes on may know more
        (sample, baseline.answers[part][index])
        for part, answers in enumerate(one.answers[: half + 1])
        for index, sample in answers.items()
        if index in baseline.answers[part] and (part < half or index < count)
    ]
    differs = any(sample.token_ids != theirs.token_ids for sample, theirs in seen)
    verified = one.options["mode"] == "verified"
    lossless = verified and exact and not differs
    return {
        **_describe(one),
        "n": len(pairs),
        "score": sum(right for _, right in pairs) / len(pairs),
        "drop": (lost - won) / len(pairs),
        "drop_bounds": (low, high),
        "identical_share": sum(same) / len(pairs),
        "tokens_per_forward": _per_forward(mine.values()),
        "speed": _speed(first.values(), mine.values(), target.by),
        "lossless": lossless,
        "rounding": verified and not lossless and not (judged and low > target.max_drop),
        "proven": high <= target.max_drop or lossless,
    }


def _describe(one: Candidate) -> dict[str, Any]:
    return {name: one.options.get(name) for name in NAMES}


def loss_cells(line: Mapping[str, Any]) -> tuple[str, str, str]:
    """Score, points of it lost and at most lost, of a finalist that may be of an old record."""
    most = f"{100 * line['drop_bounds'][1]:.1f}"
    lost = "0, exact" if line.get("lossless") else most
    return percent(line["score"]), f"{100 * line['drop']:.1f}", lost


def proven(line: Mapping[str, Any]) -> str:
    """Whether a finalist's loss is bounded as asked, or comes of rounding alone."""
    return "yes" if line["proven"] else "rounding" if line.get("rounding") else "no"


def words(settings: Mapping[str, Any]) -> str:
    """A setting in a few words, such as "verified, blocks of 3, 1 branch, lookup 8"."""
    if settings["mode"] == "ntp":
        return "ntp"
    branches, seeds = settings.get("branches"), settings.get("seeds")
    solver = settings.get("solver") if settings["mode"] == "sbd" else None
    verified = settings["mode"] == "verified"
    lookup = f"lookup {settings['lookup']}" if verified and settings.get("lookup") else ""
    if lookup and settings["block_size"] == 1:
        return f"{settings['mode']}, {lookup} alone"
    said = f"{settings['mode']} {solver}" if solver else settings["mode"]
    said += f", blocks of {settings['block_size']}" + " that slide" * bool(settings.get("slide"))
    for name, plural, count in (("branch", "branches", branches), ("seed", "seeds", seeds)):
        said += f", {count} {name if count == 1 else plural}" if count else ""
    return f"{said}, {lookup}" if lookup else said


def _rank(line: dict[str, Any], target: Target) -> tuple[float, float]:
    """Settings within the bound by what was seen come first, the fastest of them leading."""
    loss = 0.0 if line["rounding"] else line["drop"] - target.max_drop
    return max(loss, 0.0), -line["speed"]


def _per_forward(samples: Any) -> float:
    return sum(len(one.token_ids) for one in samples) / sum(one.nfe for one in samples)


def _speed(first: Any, mine: Any, by: str) -> float:
    """How much faster than the baseline, per token, on the same items."""
    if by == "forwards":
        return _per_forward(mine) / _per_forward(first)
    seconds = [
        max(sum(one.wall_s for one in some), 1e-9) / sum(len(one.token_ids) for one in some)
        for some in (list(first), list(mine))
    ]
    return seconds[0] / seconds[1]
