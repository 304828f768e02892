"""How many tokens of a block a forward takes, chosen under load by what each choice has yielded.

A forward of many requests is bound by arithmetic, and drafts that cost nothing to one request cost
throughput to all. `Widths` watches how many tokens a second come out at each width and load, keeps
to the best, and tries the others so rarely that all trials together lose at most TRIALS of the
time. `scheduler` asks it at every step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

STEPS = 16  # of a window, over which a width is judged
SETTLE = 4  # steps behind a change of width that are not judged: blocks begin without any token
TRIALS = 0.02  # of the time, at most, that trials of worse widths may lose
MEMORY = 0.8  # weight of the windows before, at each new one


@dataclass
class Yield:
    """What a width has yielded at a load; the sums fade with each window.

    due: when it may be tried again.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    due: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; infinite before the first window, so that each is tried once."""
        return self.tokens / self.seconds if self.seconds else float("inf")


@dataclass
class Widths:
    """Chooses a width for every step. Loads are told apart by powers of two.

    widths: to choose from; the widest is tried first.
    """

    widths: Sequence[int]
    clock: Callable[[], float] = time.perf_counter
    seen: dict[tuple[int, int], Yield] = field(default_factory=dict)
    _load: int = 0
    _width: int = 0
    _steps: int = 0  # of the window at hand, below 0 while a change of width settles
    _tokens: int = 0
    _begin: float = 0.0

    def choose(self, running: int) -> int:
        """The width of the next step, with so many requests running."""
        now, load = self.clock(), running.bit_length()
        if load != self._load or not self._width:
            # What a window of two loads, or one with an idle time in it, yielded says nothing.
            self._load = load
            self._open(self._best(load, now), now)
            return self._width
        self._steps += 1
        if self._steps <= 0:
            self._tokens, self._begin = 0, now
        elif self._steps == STEPS:
            self._judge(now)
            self._open(self._best(load, now), now)
        return self._width

    def count(self, tokens: int) -> None:
        """Tokens that came out."""
        self._tokens += tokens

    def _open(self, width: int, now: float) -> None:
        self._steps = 0 if width == self._width else -SETTLE
        self._width, self._tokens, self._begin = width, 0, now

    def _yield(self, load: int, width: int) -> Yield:
        return self.seen.setdefault((load, width), Yield())

    def _judge(self, now: float) -> None:
        """The window's yield, and when this width may be tried again if another is better."""
        seconds = now - self._begin
        found = self._yield(self._load, self._width)
        found.tokens = MEMORY * found.tokens + self._tokens
        found.seconds = MEMORY * found.seconds + seconds
        best = max(one.rate for (load, _), one in self.seen.items() if load == self._load)
        lost = seconds * max(1 - found.rate / best, 0.1)
        found.due = now + lost * (len(self.widths) - 1) / TRIALS

    def _best(self, load: int, now: float) -> int:
        """The width with the highest rate, but for those whose trial is due."""
        found = {width: self._yield(load, width) for width in sorted(self.widths, reverse=True)}
        for width, one in found.items():
            if not one.seconds:
                return width
        best = max(found, key=lambda width: found[width].rate)
        due = [width for width, one in found.items() if width != best and one.due <= now]
        return min(due, key=lambda width: found[width].due) if due else best
