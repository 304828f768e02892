"""How many tokens of a block a forward takes, chosen under load by what each choice has yielded.

A forward of many requests is bound by arithmetic, and drafts that cost nothing to one request cost
throughput to all. `Widths` watches how many tokens a second come out at each width and load, keeps
to the best, or to a wider one about as good, and tries its neighbours so rarely that all trials
together lose little more than TRIALS of the time. `scheduler` asks it at every step.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STEPS = 16  # of a window, over which a width is judged; a quarter is enough for a hopeless one
NEAR = 2  # widths on either side of the best that are tried, and single tokens, which draft nothing
SETTLE = 4  # steps behind a change of width that are not judged: blocks begin without any token
TRIALS = 0.02  # of the time, at most, that trials of worse widths may lose
MEMORY = 0.9  # weight of the windows before, at each new one
MARGIN = 0.05  # of the best rate, by which a wider width may fall behind: rates are noisy


class Width(NamedTuple):
    """What of a request's draft a step takes: so many tokens, and of drafts from branches, without
    `masks`, those that are known alone: copies.
    """

    tokens: int
    masks: bool = True


@dataclass
class Yield:
    """What a width has yielded; the sums fade with each window. due: when it may be tried again."""

    tokens: float = 0.0
    seconds: float = 0.0
    due: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Load:
    """The widths under one load, and the window of the one at hand.

    first: of them, the one to begin with. steps: below 0 while a change of width settles.
    """

    yields: dict[Width, Yield]
    first: Width
    width: Width | None = None
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    longest: tuple[float, int] = (0.0, 0)  # seconds and tokens of the window's longest step

    def note(self, tokens: int, seconds: float, now: float) -> None:
        """A step at this width."""
        assert self.width is not None
        self.steps += 1
        if self.steps <= 0:
            return
        self.tokens += tokens
        self.seconds += seconds
        self.longest = max(self.longest, (seconds, tokens))
        best = max((one.rate for one in self.yields.values() if one.seconds), default=0.0)
        # Of a block that takes many forwards nothing has come out yet.
        hopeless = self.steps >= STEPS // 4 and 0 < self.tokens < best * self.seconds / 2
        if self.steps < STEPS and not hopeless:
            return
        if self.longest[0] > self.seconds / 2:  # something else made it so slow
            self.seconds -= self.longest[0]
            self.tokens -= self.longest[1]
        found, fade = self.yields[self.width], MEMORY ** (self.steps / STEPS)
        found.tokens = fade * found.tokens + self.tokens
        found.seconds = fade * found.seconds + self.seconds
        best = max(best, found.rate)
        # A width about as good as the best one is not tried all the time either.
        spent = self.seconds * (1 + SETTLE / self.steps)
        lost = spent * max(1 - found.rate / best, 0.1) if best else 0.0
        found.due = now + lost * (len(self.yields) - 1) / TRIALS
        self.steps, self.tokens, self.seconds, self.longest = 0, 0, 0.0, (0.0, 0)

    def choose(self, now: float) -> Width:
        """The width of the next step: in a window's first one the best, or one to try."""
        if self.steps == 0:
            width = self._best(now)
            if width != self.width:
                self.steps = -SETTLE
            self.width = width
        assert self.width is not None
        return self.width

    def _best(self, now: float) -> Width:
        best = self.best()
        if not self.yields[best].seconds:
            return best
        widths = sorted(self.yields)
        place = widths.index(best)
        near = {widths[0], *widths[max(place - NEAR, 0) : place + 1 + NEAR]} - {best}
        due = [width for width in sorted(near, reverse=True) if self.yields[width].due <= now]
        return min(due, key=lambda width: self.yields[width].due, default=best)

    def best(self) -> Width:
        """The widest of those that yield most, as far as is known."""
        known = {width: one.rate for width, one in self.yields.items() if one.seconds}
        enough = (1 - MARGIN) * max(known.values(), default=0.0)
        return max((width for width, rate in known.items() if rate >= enough), default=self.first)

    def heir(self) -> "Load":
        """A load of which nothing is known but that it resembles this one: it begins with this
        one's best width, and tries each of the others when this one would.
        """
        yields = {width: Yield(due=one.due) for width, one in self.yields.items()}
        return Load(yields, self.best())


@dataclass
class Widths:
    """Chooses a width for every step, under each load for itself.

    widths: to choose from; the widest is tried first. Loads are told apart by powers of two, of the
    requests that run and of those among them that draft at all; a new one goes by what is known of
    the nearest.
    """

    widths: Sequence[Width]
    clock: Callable[[], float] = time.perf_counter
    loads: dict[tuple[int, int], Load] = field(default_factory=dict)
    _current: Load | None = None  # of the step under way; None where nothing is to be chosen
    _begin: float = 0.0
    _tokens: int = 0

    def choose(self, running: int, drafting: int) -> Width:
        """The width of the next step, with so many requests running."""
        now = self.clock()
        if self._current is not None:
            self._current.note(self._tokens, now - self._begin, now)
        self._begin, self._tokens, self._current = now, 0, None
        if not drafting:
            return max(self.widths)
        key = running.bit_length(), drafting.bit_length()
        if key not in self.loads:
            near = min(self.loads, key=lambda one: math.dist(one, key), default=None)
            untold = Load({width: Yield() for width in self.widths}, max(self.widths))
            self.loads[key] = untold if near is None else self.loads[near].heir()
        self._current = self.loads[key]
        return self._current.choose(now)

    def count(self, tokens: int) -> None:
        """Tokens that came out."""
        self._tokens += tokens
