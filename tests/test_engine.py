"""Requests that are answered at a time: who shares forwards with whom, who waits, who fails."""

import threading
from typing import Any

import pytest
import torch
from fakes import TableModel
from test_running import alone, answer_of, told

from setblock import running
from setblock.cache import Memory
from setblock.engine import Engine, Job
from setblock.fields import Asked, Refused
from setblock.grammar import Grammar
from setblock.loading import load
from setblock.prompt_cache import PromptCache
from setblock.solvers import FixedCount

NTP: dict[str, Any] = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 12}
SBD: dict[str, Any] = {"mode": "sbd", "solver": "fixed:2", "block_size": 4, "max_new_tokens": 12}


class Desk:
    """An engine, what it was asked, and what came of it, in the order in which it came."""

    def __init__(self, model: Any, **how: Any) -> None:
        self.model, self.engine = model, Engine(model, **how)
        self.ended: list[int] = []
        self.results: dict[int, Any] = {}
        self.pieces: dict[int, list[str]] = {}
        self.open = threading.Event()
        self.engine.submit(self.open.wait)  # nothing begins before all have asked

    def ask(self, prompt: list[int], at: Any = None, form: Any = None, **options: Any) -> Asked:
        """at: called with each of its reveals."""
        number = len(self.pieces)
        asked = Asked(options, 12, False, frozenset({"prompt", *options}))
        answer = answer_of(self.model, number, prompt, **options)
        answer.grammar = form or answer.grammar
        self.pieces[number] = []

        def hear(reveal: Any) -> None:
            self.pieces[number].append(reveal.text)
            if at is not None:
                at(reveal)
            if reveal.generation is not None:
                self.end(number, reveal.generation)

        self.engine._ask(Job(answer, asked, hear, lambda error: self.end(number, error)))
        return asked

    def end(self, number: int, result: Any) -> None:
        self.ended.append(number)
        self.results[number] = result

    def wait(self) -> None:
        self.open.set()
        self.engine.submit(lambda: None).result()
        assert (self.engine._jobs, self.engine._batches) == ({}, [])

    def rows(self) -> list[int]:
        """How many rows each forward had."""
        return [rows for rows, _ in self.model.forwards]


def test_those_with_the_same_settings_share_forwards():
    """Whatever their seeds, limits and stop texts; each is told what it would be alone."""
    model = TableModel.random()
    hows = [{**NTP, "temperature": 1.0, "seed": n, "max_new_tokens": 12 - n} for n in range(4)]
    expected = [alone(model, [3 + n], **how) for n, how in enumerate(hows)]
    model.forwards.clear()
    desk = Desk(model)
    for n, how in enumerate(hows):
        desk.ask([3 + n], **how)
    desk.wait()
    assert [told(desk.results[n]) for n in range(4)] == [told(one) for one in expected]
    assert ["".join(desk.pieces[n]) for n in range(4)] == [one.text for one in expected]
    # Each comes by a forward of its own, beside one of those who are there.
    assert desk.rows()[:7] == [1, 1, 1, 2, 1, 3, 1]
    assert len(model.forwards) < 20, "of the 42 that each alone would take"


def test_at_least_one_is_answered():
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        Engine(TableModel.random(), most=0)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_so_many_are_under_way(most):
    """The others wait, in their order."""
    model = TableModel.random()
    desk = Desk(model, most=most)
    for n in range(6):
        desk.ask([3 + n], **{**NTP, "max_new_tokens": 12 - 2 * (n % 2)})
    desk.wait()
    assert max(desk.rows()) == most
    assert sorted(desk.ended) == list(range(6))
    if most == 1:
        assert desk.ended == list(range(6))
    for n in range(6):
        how = {**NTP, "max_new_tokens": 12 - 2 * (n % 2)}
        assert told(desk.results[n]) == told(alone(model, [3 + n], **how))


def test_a_short_answer_does_not_wait_for_a_long_one():
    model = TableModel.random()
    desk = Desk(model)
    desk.ask([5, 6], **{**NTP, "max_new_tokens": 100})
    desk.ask([7], **SBD)  # of other settings, in turns
    desk.ask([8], **{**NTP, "max_new_tokens": 5})
    desk.wait()
    assert desk.ended[-1] == 0
    assert told(desk.results[1]) == told(alone(model, [7], **SBD))


def test_what_earlier_requests_left_is_not_encoded_again():
    model, kept = TableModel.random(), PromptCache()
    desk = Desk(model, prompt_cache=kept)
    desk.ask([5, 6, 7, 8, 9], **NTP)
    desk.wait()
    for n in range(3):
        desk.ask([5, 6, 7, 8, 9, 3 + n], **NTP)
    desk.wait()
    assert [desk.results[n].cached_tokens for n in range(4)] == [0, 5, 5, 5]
    for n in range(3):
        assert told(desk.results[n + 1]) == told(alone(model, [5, 6, 7, 8, 9, 3 + n], **NTP))


def test_who_waits_begins_with_what_another_began_with():
    """Its prompt is kept as soon as it is encoded."""
    model, kept = TableModel.random(), PromptCache()
    desk = Desk(model, prompt_cache=kept)
    for n in range(3):
        desk.ask([5, 6, 7, 8, 9, 3 + n], **NTP)
    desk.wait()
    assert [desk.results[n].cached_tokens for n in range(3)] == [0, 5, 5]
    for n in range(3):
        assert told(desk.results[n]) == told(alone(model, [5, 6, 7, 8, 9, 3 + n], **NTP))
    assert kept.num_tokens == sum(5 + desk.results[n].num_tokens for n in range(3))


# ------------------------------------------------------------------ who leaves, who fails


def test_a_client_that_leaves_does_not_disturb_the_others():
    model = TableModel.random()
    desk = Desk(model)
    asked: list[Asked] = []
    heard = []

    def leave(reveal: Any) -> None:
        heard.append(reveal)
        if len(heard) == 3:
            asked[0].left.set()

    asked += [desk.ask([3], leave, **NTP), desk.ask([4], **NTP), desk.ask([5], **NTP)]
    asked[2].left.set()  # before it begins
    desk.wait()
    assert desk.ended[-1] == 1
    assert [desk.results[n].status for n in (0, 2)] == [499, 499]
    assert len(heard) == 3
    assert told(desk.results[1]) == told(alone(model, [4], **NTP))


def test_who_can_not_be_heard_fails_alone():
    model = TableModel.random()
    desk = Desk(model)

    def broken(reveal: Any) -> None:
        raise RuntimeError("no call")

    desk.ask([3], **NTP)
    desk.ask([4], broken, **NTP)
    desk.wait()
    assert str(desk.results[1]) == "no call"
    assert told(desk.results[0]) == told(alone(model, [3], **NTP))


@pytest.mark.parametrize("place", ["encode", "join"])
def test_who_can_not_come_fails_alone(monkeypatch, place):
    """As where memory is lacking for a long prompt."""
    model, expected = TableModel.random(), []
    expected = [alone(model, [3 + n], **NTP) for n in range(3)]
    whole = getattr(running.DecodeState, place)
    count = 0

    def scarce(state: Any, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2 - (place == "join"):
            raise MemoryError
        return whole(state, *given)

    monkeypatch.setattr(running.DecodeState, place, scarce)
    desk = Desk(model)
    for n in range(3):
        desk.ask([3 + n], **NTP)
    desk.wait()
    assert isinstance(desk.results[1], MemoryError)
    for n in (0, 2):
        assert told(desk.results[n]) == told(expected[n])


def test_a_forward_that_fails_ends_those_in_it(monkeypatch):
    """Others, and who comes later, go on."""
    model = TableModel.random()
    expected = alone(model, [5], **SBD), alone(model, [6], **NTP)
    forward = model.forward

    def broken(tokens: Any, *given: Any, **more: Any) -> Any:
        if len(tokens) == 2:
            raise RuntimeError("out of memory")
        return forward(tokens, *given, **more)

    monkeypatch.setattr(model, "forward", broken)
    desk = Desk(model)
    for prompt, how in (([3], NTP), ([4], NTP), ([5], SBD)):
        desk.ask(prompt, **how)
    desk.wait()
    assert [str(desk.results[n]) for n in (0, 1)] == ["out of memory"] * 2
    assert told(desk.results[2]) == told(expected[0])
    desk.ask([6], **NTP)
    desk.wait()
    assert told(desk.results[3]) == told(expected[1])


def test_memory_that_is_lacking_for_one_more_is_lacking_for_that_one(checkpoint, monkeypatch):
    """Those who are there have theirs."""
    model, grow, count = load(checkpoint()), Memory.grow, 0
    expected = [alone(model, [5 + n], **NTP) for n in range(4)]

    def scarce(memory: Memory, needed: int, rows: int = 1) -> None:
        nonlocal count
        count += rows > 1
        if rows > 1 and count == 1:
            raise torch.OutOfMemoryError("no memory")
        grow(memory, needed, rows)

    monkeypatch.setattr(Memory, "grow", scarce)
    desk = Desk(model)
    for n in range(4):
        desk.ask([5 + n], **NTP)
    desk.wait()
    assert str(desk.results[1]) == "no memory"
    for n in (0, 2, 3):
        assert told(desk.results[n]) == told(expected[n])


def test_who_fails_in_the_turn_of_another_who_fails(monkeypatch):
    """One can't be heard, one can't come: the third has nothing to do with it."""
    model, encode, count = TableModel.random(), running.DecodeState.encode, 0
    expected = alone(model, [3], **NTP)

    def scarce(state: running.DecodeState) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError
        return encode(state)

    heard = []

    def broken(reveal: Any) -> None:
        heard.append(reveal)
        if len(heard) == 2:
            raise RuntimeError("no call")

    monkeypatch.setattr(running.DecodeState, "encode", scarce)
    desk = Desk(model)
    desk.ask([3], **NTP)
    desk.ask([4], broken, **NTP)
    desk.ask([5], **NTP)
    desk.wait()
    assert str(desk.results[1]) == "no call"
    assert isinstance(desk.results[2], MemoryError)
    assert told(desk.results[0]) == told(expected)


def test_an_answer_that_is_no_number_ends_alone():
    """As of half precision that overflows at one text."""
    model = TableModel.random()
    expected = [alone(model, [3 + n] * (1 + n), **NTP) for n in range(3)]
    desk = Desk(model)
    desk.ask([3], **NTP)
    desk.ask([4, 4], **NTP)
    desk.ask([5, 5, 5], **NTP)
    finish = running._finish

    def overflowing(state: Any, slot: int, answer: Any, *given: Any) -> Any:
        if answer.row == 1:
            raise ValueError("the logits of table are not numbers: look at its weights")
        return finish(state, slot, answer, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_finish", overflowing)
        desk.wait()
    assert str(desk.results[1]).startswith("the logits of table are not numbers")
    for n in (0, 2):
        assert told(desk.results[n]) == told(expected[n])


class Mine:
    """A rule of one's own, by which no two of its kind are equal."""

    def __str__(self) -> str:
        return "mine"

    def reveal(self, predictions: Any, masked: Any) -> Any:
        return FixedCount(2).reveal(predictions, masked)


def test_a_solver_is_known_by_its_text():
    """Whether it has a say or not; each request has one of its own."""
    for how in (SBD, NTP, {**NTP, "mode": "verified", "draft": "solver"}):
        model = TableModel.random()
        desk = Desk(model)
        hows = [{**how, "block_size": 4, "solver": Mine()} for _ in range(3)]
        for n, own in enumerate(hows):
            desk.ask([3 + n], **own)
        desk.wait()
        assert max(desk.rows()) == 3
        for n, own in enumerate(hows):
            assert told(desk.results[n])[:4] == told(alone(model, [3 + n], **own))[:4]


def test_an_answer_whose_form_can_not_be_followed_ends_alone():
    """And the request is told why."""
    model = TableModel.random()

    class Form(Grammar):
        def copy(self) -> Grammar:
            return self

        def allowed(self, draft: Any = ()) -> Any:
            raise ValueError("regex can't be followed: no token can come next")

    desk = Desk(model)
    desk.ask([3], **NTP)
    desk.ask([4], form=Form("regex", None, [], 0), **NTP, regex=None)
    desk.ask([5], **NTP)
    desk.wait()
    assert max(desk.rows()) == 2
    error = desk.results[1]
    assert isinstance(error, Refused)
    assert (error.field, str(error)) == ("regex", "regex can't be followed: no token can come next")
    for n in (0, 2):
        assert told(desk.results[n]) == told(alone(model, [3 + n], **NTP))


def test_the_end_of_the_process_ends_all():
    model = TableModel.random()
    desk = Desk(model, most=2)
    desk.ask([3], lambda reveal: desk.engine.ending.set(), **NTP)
    for n in range(3):
        desk.ask([4 + n], **NTP)
    desk.wait()
    assert [desk.results[n].status for n in range(4)] == [503] * 4


def test_who_asks_while_all_are_ended_is_answered_too():
    desk = Desk(TableModel.random(), most=1)
    late = []
    end = desk.end

    def ending(number: int, result: Any) -> None:
        end(number, result)
        if not late:
            late.append(desk.ask([9], **NTP))

    desk.end = ending  # type: ignore[method-assign]
    desk.engine.ending.set()
    for n in range(2):
        desk.ask([3 + n], **NTP)
    desk.wait()
    assert [desk.results[n].status for n in range(3)] == [503] * 3


def test_an_error_of_the_engine_itself_leaves_nobody_waiting(monkeypatch):
    desk = Desk(TableModel.random(), most=1)
    monkeypatch.setattr(Engine, "_turn", lambda self, batch: 1 / 0)
    for n in range(3):
        desk.ask([3 + n], **NTP)
    desk.wait()
    assert [type(desk.results[n]) for n in range(3)] == [ZeroDivisionError] * 3


def test_where_forwards_are_replayed_there_is_one_batch_at_a_time(monkeypatch):
    """Each would have memory of its own for all who may come."""
    monkeypatch.setattr(TableModel, "replays", True)
    batches: list[int] = []
    turn = Engine._turn

    def counted(self: Engine, batch: Any) -> None:
        batches.append(len(self._batches))
        turn(self, batch)

    monkeypatch.setattr(Engine, "_turn", counted)
    model = TableModel.random()
    desk = Desk(model)
    for n, how in enumerate((NTP, NTP, SBD, NTP)):
        desk.ask([3 + n], **how)
    desk.wait()
    assert set(batches) == {1}
    assert desk.ended == [0, 1, 2, 3]
    for n, how in enumerate((NTP, NTP, SBD, NTP)):
        assert told(desk.results[n]) == told(alone(model, [3 + n], **how))
