"""The choice of a block's width under load, against servers made up: a clock and a yield each."""

from types import SimpleNamespace
from typing import Any

import pytest

from setblock.vllm.adaptive import SETTLE, STEPS, TRIALS, Width, Widths
from setblock.vllm.requests import CUTS, HOLDS, WIDTH
from setblock.vllm.scheduler import Blocks

WIDTHS = (Width(1), Width(4), Width(8), Width(16))


class Server:
    """So many requests running: seconds and tokens of a step, by width."""

    def __init__(self, seconds: dict[int, float], tokens: dict[int, float], running: int) -> None:
        self.seconds, self.tokens, self.running = seconds, tokens, running
        self.now = self.owed = 0.0
        self.used: list[int] = []

    def best(self) -> float:
        return max(self.tokens[width] / self.seconds[width] for width, _ in WIDTHS)

    def run(self, widths: Widths, steps: int) -> float:
        """Tokens a second over these steps."""
        begin, total = self.now, 0
        for _ in range(steps):
            width = widths.choose(self.running, self.running).tokens
            self.used.append(width)
            self.now += self.seconds[width]
            self.owed += self.tokens[width] * self.running
            total += int(self.owed)
            widths.count(int(self.owed))
            self.owed -= int(self.owed)
        return total / (self.now - begin)


YIELDS = {1: 1.0, 4: 1.8, 8: 2.5, 16: 3.0}
LIGHT = {1: 0.010, 4: 0.0105, 8: 0.011, 16: 0.012}  # a step costs about the same at every width
HEAVY = {1: 0.010, 4: 0.030, 8: 0.055, 16: 0.110}  # it costs what its tokens cost
MIDDLE = {1: 0.010, 4: 0.011, 8: 0.022, 16: 0.044}


@pytest.mark.parametrize(
    ("seconds", "best"), [(LIGHT, 16), (HEAVY, 1), (MIDDLE, 4), ({**LIGHT, 16: 1.0}, 8)]
)
def test_the_quickest_width_is_found_and_kept(seconds, best):
    server = Server(seconds, YIELDS, 6)
    widths = Widths(WIDTHS, clock=lambda: server.now)
    server.run(widths, 40 * STEPS)
    assert server.used[0] == 16
    rate = server.run(widths, 500 * STEPS)
    assert max(set(server.used[-300 * STEPS :]), key=server.used.count) == best
    # What trials lose, and what their first steps lose, that are not judged.
    assert rate >= server.best() * server.running * (1 - 2 * TRIALS)


def test_what_is_worse_still_is_not_tried():
    """Of a width's neighbours, where it is the best; a hopeless one is judged by a few steps."""
    server = Server({**LIGHT, 8: 1.0}, YIELDS, 6)
    server.run(Widths(WIDTHS, clock=lambda: server.now), 100 * STEPS)
    assert server.used.count(1) < 5 * STEPS, "single tokens alone"
    first = server.used.index(8)
    assert server.used[first : first + SETTLE + STEPS // 4 + 1].count(8) == SETTLE + STEPS // 4


def test_useless_drafts_end_in_single_tokens():
    """Though all widths near the widest are alike: a block takes two forwards, and yields one."""
    server = Server({**dict.fromkeys((4, 8, 16), 0.0202), 1: 0.01}, dict.fromkeys(YIELDS, 1.0), 1)
    server.run(Widths(WIDTHS, clock=lambda: server.now), 100 * STEPS)
    assert server.used[-50 * STEPS :].count(1) > 40 * STEPS


def test_a_block_of_many_forwards_is_not_hopeless_before_its_end():
    now, steps, used = 0.0, 0, []
    widths = Widths((Width(1), Width(16)), clock=lambda: now)
    for _ in range(200 * STEPS):
        width = widths.choose(1, 1).tokens
        steps = steps + 1 if used and used[-1] == width else 0
        used.append(width)
        now += 0.01
        widths.count(1 if width == 1 else 16 * (steps % 9 == 8))
    assert used[-100 * STEPS :].count(16) > 90 * STEPS


def test_a_slow_step_is_forgiven():
    """The first, as where memory is allocated, or one in between."""
    for when in (1, 50 * STEPS):
        server = Server(LIGHT, YIELDS, 1)
        widths = Widths(WIDTHS, clock=lambda server=server: server.now)
        for _ in range(when):
            server.run(widths, 1)
        server.now += 30
        server.run(widths, 3000 * STEPS)
        assert server.used[-1000 * STEPS :].count(16) > 850 * STEPS, when


def test_a_width_about_as_good_gives_way_to_a_wider_one():
    server = Server({**LIGHT, 8: 0.0098}, YIELDS, 6)  # rates of 250 and 255
    widths = Widths(WIDTHS, clock=lambda: server.now)
    server.run(widths, 300 * STEPS)
    last = server.used[-200 * STEPS :]
    assert last.count(16) > 170 * STEPS, last.count(16) / STEPS


def test_loads_are_told_apart():
    light, heavy = Server(LIGHT, YIELDS, 1), Server(HEAVY, YIELDS, 40)
    now = [0.0]
    widths = Widths(WIDTHS, clock=lambda: now[0])
    for _ in range(60):
        for server in (light, heavy):
            server.now = now[0]
            before = len(server.used)
            while len(server.used) < before + 3 * STEPS:
                server.run(widths, 1)
                now[0] = server.now
    assert max(set(light.used[-900:]), key=light.used[-900:].count) == 16
    assert max(set(heavy.used[-900:]), key=heavy.used[-900:].count) == 1


def test_a_change_is_noticed():
    server = Server(LIGHT, YIELDS, 6)
    widths = Widths(WIDTHS, clock=lambda: server.now)
    server.run(widths, 100 * STEPS)
    server.seconds = HEAVY
    server.run(widths, 400 * STEPS)
    assert set(server.used[-STEPS:]) == {1}


def test_idle_times_do_not_count():
    server = Server(LIGHT, YIELDS, 1)
    widths = Widths(WIDTHS, clock=lambda: server.now)
    for _ in range(50):
        server.run(widths, 2 * STEPS)
        server.running = 0
        widths.choose(0, 0)
        server.now += 1000
        widths.choose(0, 0)
        server.running = 1
    for (width, _), one in widths.loads[1, 1].yields.items():
        assert one.rate == pytest.approx(YIELDS[width] / LIGHT[width], rel=0.2)


def test_requests_shorter_than_a_window_are_judged_together():
    server = Server(HEAVY, YIELDS, 1)
    widths = Widths(WIDTHS, clock=lambda: server.now)
    for _ in range(300):
        server.run(widths, STEPS // 2)
        widths.choose(0, 0)
        server.now += 5
    assert max(set(server.used[-900:]), key=server.used[-900:].count) == 1


def test_next_token_requests_say_nothing_of_drafts():
    server = Server(LIGHT, YIELDS, 4)
    widths = Widths(WIDTHS, clock=lambda: server.now)
    server.run(widths, 100 * STEPS)
    for _ in range(100 * STEPS):  # one token a step, whatever the width
        assert widths.choose(4, 0) == Width(16)
        server.now += HEAVY[16]
        widths.count(4)
    before = len(server.used)
    server.run(widths, 10 * STEPS)
    assert max(set(server.used[before:]), key=server.used[before:].count) == 16


def test_one_width_is_no_choice():
    widths = Widths((Width(1),))
    assert {widths.choose(running, running) for running in (0, 1, 5, 5, 5, 9) * STEPS} == {Width(1)}


def test_a_new_load_goes_by_the_nearest_one():
    server = Server(HEAVY, YIELDS, 40)
    widths = Widths(WIDTHS, clock=lambda: server.now)
    server.run(widths, 100 * STEPS)
    assert server.used[-1] == 1
    far = Server(LIGHT, YIELDS, 1)
    far.now = server.now
    widths.clock = lambda: far.now
    far.run(widths, STEPS)
    assert set(far.used) == {1}, "as the only other one"
    far.run(widths, 2000 * STEPS)
    assert max(set(far.used), key=far.used.count) == 16, "until it knows better"
    between = Server(HEAVY, YIELDS, 20)
    between.now = far.now
    widths.clock = lambda: between.now
    between.run(widths, STEPS)
    assert set(between.used) == {1}


@pytest.mark.parametrize(
    ("width", "branches", "ids", "kept"),
    [
        ((8,), True, [5, 6, 7, 3, 3, 3, 3, 3], [5, 6, 7, 3, 3, 3, 3, 3]),
        ((7,), True, [5, 6, 7, 3, 3, 3, 3, 3], [5, 6, 7, 3, 3, 3, 3]),
        ((5,), True, [5, 6, 7, 3, 3, 3, 3, 3], [5, 6, 7, 3, 3]),
        ((4,), True, [5, 6, 7, 3, 3, 3, 3, 3], [5, 6, 7]),
        ((9,), True, [5, 6, 7, 3], [5, 6, 7]),
        ((4,), True, [], []),
        ((8, False), True, [5, 6, 7, 3, 3, 3, 3, 3], [5, 6, 7]),
        ((2, False), True, [5, 6, 7], [5, 6]),
        ((2, False), True, [5, 6, 7, 3, 3, 3], [5, 6]),
        ((4,), False, [5, 3, 3, 3, 3], [5, 3, 3, 3]),
        ((2,), False, [5, 3, 3, 3, 3], [5, 3]),
        ((2,), True, [5, 6, 7, 3, 3, 3, 3, 3], [5, 6]),
        ((1,), True, [5, 3, 3, 3, 3], [5]),
        ((2,), True, [5, 6, 7], [5, 6]),
        ((4,), False, [5, 3, 3, 3, 3, 3, 3, 3], [5, 3, 3, 3]),
    ],
)
def test_what_a_narrower_step_leaves_of_a_forward(width, branches, ids, kept):
    """A part of it; of drafts from branches no mask alone, which would draft nothing."""
    scheduler, request = of_one_request(branches, ids)
    scheduler.widths = SimpleNamespace(choose=lambda running, drafting: Width(*width))
    assert scheduler.schedule() == kept
    # One that the step had no room for has all its tokens again in a wider one.
    scheduler.widths = SimpleNamespace(choose=lambda running, drafting: Width(16))
    assert scheduler.schedule() == (kept if branches and ids.count(3) == 1 else ids)
    scheduler.widths = SimpleNamespace(choose=lambda running, drafting: Width(1))
    request.spec_token_ids = [8, 9]
    assert scheduler.schedule() == [8]


def test_what_may_not_be_cut_is_whole_and_no_draft_to_choose_for():
    loads = []

    def choose(*load: int) -> Width:
        loads.append(load)
        return Width(1)

    scheduler, request = of_one_request(True, [5, 6, 7, 3, 3])
    scheduler.widths = SimpleNamespace(choose=choose)
    scheduler.schedule()
    assert request.spec_token_ids == [5]
    for given in ({}, {WIDTH: 5, HOLDS: 5}, {WIDTH: 1, CUTS: True}):
        request.spec_token_ids = [5, 6, 7, 3, 3]
        request.sampling_params.extra_args = given
        assert scheduler.schedule() == [5, 6, 7, 3, 3]
    assert loads == [(1, 1), (1, 0), (1, 0), (1, 0)]


def of_one_request(branches: bool, ids: list[int]) -> tuple[Any, Any]:
    """(a scheduler, its request, which is about to take these tokens)."""
    params = SimpleNamespace(extra_args={WIDTH: 5, HOLDS: branches, CUTS: True})
    request = SimpleNamespace(sampling_params=params, spec_token_ids=ids, request_id="one")

    class Theirs:
        num_spec_tokens = 16

        def __init__(self) -> None:
            self.running = [request]

        def schedule(self) -> Any:
            return request.spec_token_ids

    class Scheduler(Blocks, Theirs):
        pass

    scheduler: Any = Scheduler()
    scheduler.mask = 3
    return scheduler, request
