"""The bundled model's tasks: seeded problems with worked answers, and exact checkers.

Five families (`FAMILIES`), each with several kinds of problem and five wordings a kind. Every fifth
wording is held out: it never occurs in training and is scored apart. Whether a problem belongs to
"train", "validation" or "test" follows from a hash of what it asks (its `key`, which leaves the
wording out), so no question of one split occurs in another under any wording.

Each kind is one function of `setblock.kinds`; `nano.json` holds its wordings.
"""

import functools
import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setblock.execution import calls_agree
from setblock.kinds import FAMILIES

SPLITS = ("train", "validation", "test")
NUM_WORDINGS = 5
HELD_OUT_WORDING = 4
MAX_PROBLEMS = 5000  # every family has more than this many questions in every split


@dataclass(frozen=True)
class Problem:
    """One question with its worked answer.

    `target` is what `check` compares: the final answer (str), the JSON value, or for code the pair
    (function name, [(arguments, result), ...]).
    """

    family: str
    kind: str
    wording: int
    prompt: str
    answer: str
    target: object = field(hash=False)
    key: str

    @property
    def held_out(self) -> bool:
        """Whether the wording never occurs in training."""
        return self.wording == HELD_OUT_WORDING


def problems(
    family: str, split: str, count: int, seed: int = 0, held_out: bool = False
) -> list[Problem]:
    """`count` distinct problems of a family and split, the same ones for the same arguments.

    held_out: draw from the held-out wordings alone, else from the others alone.
    Raises: ValueError for an unknown family or split, a count over MAX_PROBLEMS, or held-out
    wordings of the train split.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if held_out and split == "train":
        raise ValueError("held_out wordings are never part of the split 'train'")
    if not 0 <= count <= MAX_PROBLEMS:
        raise ValueError(f"each family has at most {MAX_PROBLEMS} problems of a split, not {count}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    source = _draw(family, split, random.Random(f"{seed}/{family}/{split}/{held_out}"), held_out)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = next(source)
        found.setdefault(problem.key, problem)
    return list(found.values())


def training_stream(seed: int) -> Iterator[Problem]:
    """Training problems without end, families in turn."""
    sources = [
        _draw(family, "train", random.Random(f"{seed}/{family}"), False) for family in FAMILIES
    ]
    while True:
        for source in sources:
            yield next(source)


def check(problem: Problem, text: str) -> bool:
    """Whether `text` answers the problem: exactly the right final answer, JSON value or function.

    Effects: code answers are run in a limited subprocess (see `execution`), but for the worked
    answer itself, whose results are the target.
    """
    if problem.family == "code":
        if text == problem.answer:
            return True
        name, cases = problem.target  # type: ignore[misc]
        return calls_agree(text, name, cases)
    if problem.family == "json":
        try:
            return json.loads(text) == problem.target
        except (ValueError, RecursionError):  # the latter: thousands of open brackets
            return False
    found = re.findall(r"^Answer: (.*)$", text, flags=re.MULTILINE)
    return bool(found) and found[-1].strip() == problem.target


def split_of(key: str) -> str:
    """The split that a question belongs to: 5 % validation, 5 % test, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 20
    return {0: "validation", 1: "test"}.get(bucket, "train")


@functools.cache
def texts() -> dict[str, Any]:
    """The texts of nano.json.

    wordings: kind -> five wordings, the last one held out.
    small_talk: (prompt, answer) pairs for a visitor who says hello; trained on, never scored.
    """
    return json.loads(Path(__file__).with_name("nano.json").read_text(encoding="utf-8"))


def _draw(family: str, split: str, rng: random.Random, held_out: bool) -> Iterator[Problem]:
    kinds = FAMILIES[family]
    while True:
        kind = rng.choice(kinds)
        draft = kind(rng)
        name = kind.__name__
        key = f"{name} {json.dumps(draft.fields, sort_keys=True)}"
        if split_of(key) != split:
            continue
        wording = HELD_OUT_WORDING if held_out else rng.randrange(NUM_WORDINGS - 1)
        prompt = texts()["wordings"][name][wording].format(**draft.fields)
        yield Problem(family, name, wording, prompt, draft.answer, draft.target, key)
