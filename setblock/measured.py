"""Records of measurements -> what they hold, checked, by kind."""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from setblock.evaluate import PERPLEXITY
from setblock.files import lines_of
from setblock.live import NAMES
from setblock.names import one_line
from setblock.scores import Sample, compare

KINDS = (
    "the records of `setblock evaluate`, `benchmark` and `tune` (--out), and what `setblock demo "
    "--json` prints"
)
LINE = (
    "task", "model", "mode", "solver", "n", "score", "interval", "tokens_per_forward", "wall_s",
)  # fmt: skip
COMPARISON = (
    "task", "first", "second", "only_first", "only_second", "p_value", "identical_share",
    "wall_clock_ratio",
)  # fmt: skip
SIDES = ("first", "second")  # of a comparison
FORWARD = ("queries", "batch_size", "cached", "seconds", "ratio")
# What reading something else than a record raises.
FAULTS = (ValueError, KeyError, TypeError, AttributeError, IndexError)
# What lines of one name may differ in.
APART = (
    "data", "split", "task_version", "chat", "shots", "dtype", "packed", "batch_size",
    "max_new_tokens", "seed", "top_p", "top_k", "min_p", "ignore_eos", "stop", "window",
    "held_out", "shots_data", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


# What lines that are compared have alike, besides the problems themselves.
ON = ("task", "data_sha256", "split", "held_out", "shots", "shots_data_sha256")


@dataclass
class Measured:
    """What the records hold, by kind.

    accepted: for each of `scores` in mode "verified" whose samples are at hand, and where every
    forward had a draft (a branch behind each length): of the forwards whose first j - 1 drafted
    tokens were accepted, the share that had the j-th accepted as well.
    """

    origins: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    pooled: list[dict[str, Any]] = field(default_factory=list)
    contenders: list[dict[str, Any]] = field(default_factory=list)
    forwards: list[dict[str, Any]] = field(default_factory=list)
    tunings: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    accepted: list[tuple[dict[str, Any], list[float]]] = field(default_factory=list)
    samples: list[tuple[Path, dict[str, Any], list[Sample]]] = field(default_factory=list)


def read(
    paths: Sequence[Path], check: Callable[[Measured], object] = lambda found: None
) -> Measured:
    """All records together.

    check: what raises one of FAULTS for a record that it can't do with.
    Raises: ValueError naming a file that is none, or a line of samples; OSError.
    """
    found = Measured()
    for path in dict.fromkeys(path.resolve() for path in paths):
        try:
            one = _read_one(path)
            check(_together(copy.deepcopy(one)))
        except Damaged:
            raise
        except FAULTS as error:
            why = one_line(error)
            raise ValueError(f"{path} is no record; those are {KINDS} ({why})") from error
        for kind in fields(Measured):
            getattr(found, kind.name).extend(getattr(one, kind.name))
    return _together(found)


def _together(found: Measured) -> Measured:
    """What lines of several records are to one another, put into them."""
    tell_apart(found.scores)
    _pair_up(found)
    for one in found.comparisons:
        for side in SIDES:
            one[side]["apart"] = one[side]["line"].get("apart", ())
    _name_models(found)
    return found


def _read_one(path: Path) -> Measured:
    found = Measured()
    record = json.loads(path.read_text(encoding="utf-8"))
    if "answers" in record:
        _ = record["answers"][0]
        found.answers += [_replayed(one) for one in record["answers"]]
        return found
    origin = {name: record[name] for name in ("command", "commit", "date", "machine")}
    own = record.get("imported", {})
    found.origins.append({"file": path.name, "imported": {**own}, **origin})
    samples = _samples_beside(path)
    for run, line in enumerate(record["results"]):
        if "contender" in line:
            found.contenders.append(line)
        elif "finalists" in line:
            found.tunings.append(line)
        else:
            _ = [line[name] for name in LINE]  # KeyError: a line of something else
            if None in (line["interval"] or ()):  # beyond all numbers
                line["interval"] = None
            _, _ = line["interval"] or (0, 0)
            _ = float(line["tokens_per_forward"]), Path(line["model"])
            _ = line.get("settings", {}).get
            if wrong := _out_of_range(line):
                raise Damaged(f"{path}: results[{run}].{wrong}")
            found.scores.append(line)
            _add_samples(found, path, line, samples.get(run, []))
    for one in record.get("comparisons", []):
        _ = [one[name] for name in COMPARISON]
        sides = {name: _with_line(one, name, record["results"]) for name in SIDES}
        found.comparisons.append({**one, **sides})
    for line in record.get("pooled", []):
        _ = [line[name] for name in (*LINE, "scores", "seeds")]
        found.pooled.append(line)
    for line in record.get("forwards", []):
        _ = [float(line[name]) for name in FORWARD]
        found.forwards.append({**line, "model": record["results"][0]["model"]})
    return found


def name_of(line: dict[str, Any]) -> str:
    """Model and decoding of a line in a few words."""
    words, settings = [line["model"], line["mode"], line["solver"]], line.get("settings") or {}
    if line["mode"] != "ntp" and settings.get("block_size"):
        words.append(f"k={settings['block_size']}")
    if settings.get("slide"):
        words.append("sliding")
    if settings.get("next_token_seed"):
        words.append("next-token seed")
    if settings.get("fallback") is not None:
        words.append(f"fallback {settings['fallback']}")
    if line["mode"] == "verified" and settings.get("draft") == "branches":
        words.append(f"{settings.get('branches') or 'all'}+{settings.get('seeds', 0)}")
        words += [f"lookup {settings['lookup']}"] if settings.get("lookup") else []
    if settings.get("lenience", 1) != 1:
        words.append(f"lenience {settings['lenience']}")
    if (sampler := settings.get("sampler") or {}).get("temperature"):
        words.append(f"temperature {sampler['temperature']}")
    return " ".join(filter(None, [*words, *line.get("apart", ())]))


def tell_apart(lines: Sequence[dict[str, Any]]) -> None:
    """Have lines on one task that would have the same name say wherein they differ."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        alike.setdefault((line["task"], name_of(line)), []).append(line)
    for some in alike.values():
        facts = []
        for line in some:
            settings = line.get("settings") or {}
            facts.append({**line, **(settings.get("sampler") or {}), **settings})
        for name in APART:
            if len({repr(one.get(name)) for one in facts}) > 1:
                for line, one in zip(some, facts, strict=True):
                    line["apart"] = [*line.get("apart", ()), f"{name}={one.get(name)}"]


class Damaged(ValueError):
    """A record or its samples, edited into what no command writes."""


ROUNDING = 1e-9  # of an interval's bounds


def _out_of_range(line: dict[str, Any]) -> str | None:
    """What is wrong with the numbers of a line of scores, if anything."""
    most = math.inf if line["task"] == PERPLEXITY else 1
    if (score := line["score"]) is not None:
        low, high = line["interval"] or (score, score)
        inside = low - ROUNDING <= score <= high + ROUNDING
        if not (inside and 0 <= low <= high <= most):
            return f"score and interval must lie in 0 .. {most}: {score}, {line['interval']}"
    for name, least in (("n", 1), ("tokens_per_forward", 0), ("wall_s", 0)):
        if not least <= line[name] < math.inf:
            return f"{name} must be a number of at least {least}, got {line[name]}"
    return None


def _name_models(found: Measured) -> None:
    """Call each model by its folder's name, or by its whole path where two have the same name."""
    lines = [*found.scores, *found.pooled, *found.contenders]
    lines += [*found.forwards, *found.tunings, *found.answers]
    lines += [one[place] for one in found.comparisons for place in ("first", "second")]
    models = dict.fromkeys(line["model"] for line in lines)
    names = [Path(model).name for model in models]
    for line in lines:
        name = Path(line["model"]).name
        line["model"] = name if names.count(name) == 1 else line["model"]


def _replayed(answer: dict[str, Any]) -> dict[str, Any]:
    """What of an answer of the demo the page needs."""
    names = ("prompt", "mode", "tokens", "reveal_step", "entropy", "nfe", "correct", "model")
    _, _ = NAMES[answer["mode"]], Path(answer["model"])
    return {name: answer[name] for name in names}


def _with_line(one: dict[str, Any], side: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One side of a comparison, with the one line of scores that it can be; its settings from
    there, if it has none.
    """
    names = [name for name in ("model", "mode", "solver", "settings") if name in one[side]]
    own = {name: one[side][name] for name in names}
    same = [line for line in lines if line["task"] == one["task"]]
    same = [line for line in same if own == {name: line.get(name) for name in names}]
    line = same[0] if len(same) == 1 else {}
    return {"settings": line.get("settings"), **own, "line": line}


def _samples_beside(path: Path) -> dict[int, list[Sample]]:
    """The samples beside a record, by the run that they are of."""
    file, samples = path.with_suffix(".samples.jsonl"), {}
    for number, _, sample in lines_of(file):
        try:
            samples.setdefault(sample.pop("run"), []).append(Sample.from_json(sample))
        except FAULTS as error:
            raise Damaged(f"{file}, line {number}, is no sample: {one_line(error)}") from error
    return samples


def _add_samples(
    found: Measured, path: Path, line: dict[str, Any], samples: Sequence[Sample]
) -> None:
    """Effects: `found` has the samples of a line, and what they say of it."""
    if len(samples) == line["n"]:
        found.samples.append((path, line, list(samples)))
    settings = line.get("settings", {})
    always = (settings.get("branches") or 0) >= (settings.get("block_size") or 1)
    own = not settings.get("lookup") and settings.get("lenience", 1) == 1
    if line["mode"] == "verified" and always and own and (shares := _accepted(samples)):
        found.accepted.append((line, shares))


def _accepted(samples: Sequence[Sample]) -> list[float]:
    """See `Measured`; of samples that say which forward revealed what."""
    lengths: Counter[int] = Counter()
    for sample in samples:
        if sample.reveal_step:
            counts = list(Counter(sample.reveal_step).values())
            lengths.update(counts[1:-1])  # the prompt's forward has no draft, the last is cut
    shares, most = [], max(lengths, default=1)
    for drafted in range(1, most):
        tried = sum(count for length, count in lengths.items() if length >= drafted)
        shares.append(sum(n for length, n in lengths.items() if length > drafted) / tried)
    return shares


def _pair_up(found: Measured) -> None:
    """Compare the first line on some problems with those of other records on the same ones: sampled
    answers with those of the same seed, or else with greedy ones.
    """
    firsts: dict[Any, tuple[Path, dict[str, Any], list[Sample]]] = {}
    places = []
    for path, line, samples in found.samples:
        asked = frozenset((one.index, one.key) for one in samples)
        problems = (*(line.get(name) for name in ON), asked)
        sampler = (line.get("settings") or {}).get("sampler") or {}
        seed = sampler.get("seed") if sampler.get("temperature") else None
        places.append((problems, seed))
        firsts.setdefault(places[-1], (path, line, samples))
    for (path, line, samples), (problems, seed) in zip(found.samples, places, strict=True):
        first = firsts[problems, seed]
        if first[0] == path:
            first = firsts.get((problems, None), first)
        if first[0] != path:
            compared = compare(first[1], line, (first[2], samples))
            compared["first"]["line"], compared["second"]["line"] = first[1], line
            # Seconds of different times, perhaps machines, make no ratio.
            found.comparisons.append({**compared, "wall_clock_ratio": None})
