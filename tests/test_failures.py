"""Failures while several are answered: each is told to whom it is of, and to nobody else."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch
from fakes import TableModel
from test_engine import NTP, SBD, Desk
from test_running import alone, answer_of, ended, told

from setblock import branches, prompt_cache, running
from setblock.cache import PrefixCache, _PrefixLayer
from setblock.engine import Engine, logger
from setblock.fields import Asked, Refused
from setblock.generation import generate
from setblock.grammar import Grammar
from setblock.loading import load
from setblock.prompt_cache import PromptCache
from setblock.running import Running


@pytest.fixture
def lacking(monkeypatch):
    """Memory is lacking once, where rows that stay would be moved."""
    select, left = _PrefixLayer.select, [1]

    def scarce(layer: _PrefixLayer, places: Any, rows: Any, count: int) -> None:
        if len(places) and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no memory")
        select(layer, places, rows, count)

    monkeypatch.setattr(_PrefixLayer, "select", scarce)
    return left


def test_as_a_client_leaves(checkpoint, lacking):
    """Those of its batch have nothing to go on with; those of another one have."""
    model = load(checkpoint())
    expected = alone(model, [7], **SBD), alone(model, [8], **NTP)
    desk, count = Desk(model), 0

    def leave(reveal: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            asked.left.set()

    asked = desk.ask([5], leave, **NTP)
    desk.ask([6], **NTP)
    desk.ask([7], **SBD)
    desk.wait()
    assert str(desk.results[1]) == "no memory"
    assert told(desk.results[2]) == told(expected[0])
    assert desk.results[0].status == 499
    desk.ask([8], **NTP)
    desk.wait()
    assert told(desk.results[3]) == told(expected[1])


def test_as_one_ends(checkpoint, lacking):
    """Its last token is there."""
    model = load(checkpoint())
    lacking[0] = 0
    expected = alone(model, [5], **{**NTP, "max_new_tokens": 4})
    lacking[0] = 1
    desk = Desk(model)
    desk.ask([5], **{**NTP, "max_new_tokens": 4})
    desk.ask([6], **NTP)
    desk.ask([7], **NTP)
    desk.wait()
    assert told(desk.results[0]) == told(expected)
    assert "".join(desk.pieces[0]) == expected.text
    assert [str(desk.results[n]) for n in (1, 2)] == ["no memory"] * 2


@pytest.mark.parametrize("graphed", [False, True])
def test_while_a_failure_is_cleared_up(checkpoint, simulated_graphs, monkeypatch, graphed):
    """Nobody goes on in memory of which is not known what it holds."""
    plain = load(checkpoint())
    model = load(checkpoint(), compile="graphs" if graphed else "off")
    how: Any = {"mode": "ntp", "ignore_eos": True, "max_new_tokens": 8}
    batch = Running(room=3)
    for row in range(2):
        batch.begin([answer_of(model, row, [5, 6 + row], **how)])
        batch.come()
    batch.leave([batch.answers[1]])
    batch.begin([answer_of(model, 2, [30] * 3, **how)])

    def broken(state: Any) -> None:
        raise MemoryError("first")

    def broken_too(layer: Any, *given: Any) -> None:
        raise MemoryError("second")

    with monkeypatch.context() as patch:
        patch.setattr(running.DecodeState, "step", broken)
        patch.setattr(_PrefixLayer, "select", broken_too)
        batch.step()
    assert [(one.row, str(error)) for one, error in batch.failed] == [(0, "first"), (2, "second")]
    assert len(batch) == 0
    batch.failed.clear()
    found = ended(batch, [(0, answer_of(model, 3, [30] * 3, **how))])
    assert told(found[3]) == told(alone(plain, [30] * 3, **how))


@pytest.mark.parametrize("leaves", [False, True])
def test_where_torch_says_that_memory_is_lacking_for_the_prompt_cache(monkeypatch, leaves):
    """By a RuntimeError, on a CPU."""
    model = TableModel.random()
    expected = [alone(model, [3 + n], **how) for n, how in enumerate((NTP, NTP, SBD))]

    def scarce(*given: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(type(model.new_cache(1, 1)), "saved", scarce)
    desk = Desk(model, prompt_cache=PromptCache())
    asked = desk.ask([3], lambda _: asked.left.set() if leaves else None, **NTP)
    desk.ask([4], **NTP)
    desk.ask([5], **SBD)
    desk.wait()
    for n in range(leaves, 3):
        assert told(desk.results[n]) == told(expected[n])


def test_a_panic_of_a_library_leaves_nobody_waiting(monkeypatch):
    """pyo3's are no Exception."""

    class PanicException(BaseException):
        pass

    model = TableModel.random()
    expected = alone(model, [5], **NTP)
    decode, count = model.decode, 0

    def panicking(ids: list[int]) -> str:
        nonlocal count
        count += 1
        if count == 5:
            raise PanicException("rust")
        return decode(ids)

    monkeypatch.setattr(model, "decode", panicking)
    desk = Desk(model)
    desk.ask([3], **NTP)
    desk.ask([4], **NTP)
    desk.wait()
    assert [repr(desk.results[n]) for n in (0, 1)] == ["RuntimeError('rust')"] * 2
    desk.ask([5], **NTP)
    desk.wait()
    assert told(desk.results[2]) == told(expected)


def test_what_failed_holds_no_memory(checkpoint, monkeypatch):
    """Though its error went on to who asked, who holds it."""
    model, caches = load(checkpoint()), []
    init = PrefixCache.__init__

    def seen(cache: PrefixCache, *given: Any, **more: Any) -> None:
        init(cache, *given, **more)
        caches.append(weakref.ref(cache))

    monkeypatch.setattr(PrefixCache, "__init__", seen)
    monkeypatch.setattr(running.DecodeState, "step", lambda state: 1 / 0)
    monkeypatch.setattr(
        logger, "error", lambda *given, **more: None
    )  # pytest would keep the record
    engine = Engine(model)
    served: Any = type("Served", (), {"model": model, "form": {}})
    asked = Asked({"mode": "ntp"}, 4, False, frozenset({"prompt"}))
    asks = (None, served, {"input_ids": torch.tensor([[5, 6]])}, asked, "one")
    gc.disable()
    try:
        with pytest.raises(Refused, match="division by zero") as caught:
            asyncio.run(engine.generate_non_streaming(*asks))
        engine.submit(lambda: None).result()
        assert [cache() for cache in caches] == [None]
        assert caught.value.status == 500
    finally:
        gc.enable()


# ------------------------------------------------------------------ logits that are no numbers


@pytest.mark.parametrize("mask", [0, None])
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    "way",
    [
        {"mode": "ntp"},
        {"mode": "sbd", "solver": "fixed:2", "block_size": 4},
        {"mode": "sbd", "solver": "prefix:0.5", "block_size": 4, "slide": True},
        {"mode": "verified", "block_size": 4, "branches": 2},
        {"mode": "verified", "draft": "solver", "solver": "fixed:2", "block_size": 4},
    ],
)
def test_logits_that_are_no_numbers_end_their_answer(checkpoint, mask, temperature, way):
    """At once, whatever the mask token's place in the vocabulary; those beside it go on."""
    model = load(checkpoint("llama"), mask_token_id=mask)
    weights = model.network.get_input_embeddings().weight
    how: Any = {**way, "temperature": temperature, "max_new_tokens": 12, "ignore_eos": True}
    with torch.no_grad():
        kept = weights[7].clone()
        weights[7] = float("nan")
        weights.requires_grad_(False)
    try:
        with pytest.raises(ValueError, match="are not numbers: look at its weights"):
            generate(model, [[5, 7, 9]], **how)
        desk = Desk(model)
        desk.ask([5, 7, 9], **how)
        desk.ask([5, 8, 9], **how)
        desk.wait()
        assert "are not numbers" in str(desk.results[0])
        assert desk.results[1].num_tokens == 12
    finally:
        with torch.no_grad():
            weights[7] = kept


def test_padding_is_the_mask_token_whatever_was_drafted(checkpoint, monkeypatch):
    """So that what a row drafted and did not get says nothing to it in a wider forward."""
    model = load(checkpoint("llama"))
    how: Any = {"mode": "verified", "block_size": 5, "branches": 2, "seeds": 1, "ignore_eos": True}
    forward, padded = branches.BranchDrafts._forward, 0

    def watched(state: Any, queries: Any, layout: Any, *given: Any) -> Any:
        nonlocal padded
        padding = (layout.document < 0).numpy()
        padded += int(padding.sum())
        assert (queries[padding] == model.mask_token_id).all()
        return forward(state, queries, layout, *given)

    monkeypatch.setattr(branches.BranchDrafts, "_forward", watched)
    generate(model, [[5, 9], [8], [40, 41, 42] * 3], max_new_tokens=30, **how)
    assert padded > 20


@pytest.mark.parametrize(
    "way",
    [
        {"mode": "ntp"},
        {"mode": "sbd", "slide": False, "solver": "fixed:2", "block_size": 4},
        {"mode": "sbd", "slide": True, "solver": "fixed:2", "block_size": 4},
        {"mode": "verified", "block_size": 4, "branches": 2},
    ],
)
def test_logits_that_are_no_numbers_are_not_of_the_next_prompt(checkpoint, way):
    """What begins alike is taken from a text only if its keys and values are numbers."""
    model, plain = load(checkpoint("llama")), load(checkpoint("llama"))

    def overflowing(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out.masked_fill((given[0] == 9)[..., None], float("nan"))

    model.network.get_input_embeddings().register_forward_hook(overflowing)
    how: Any = {**way, "max_new_tokens": 8, "ignore_eos": True, "temperature": 1.0, "top_k": 2}
    desk = Desk(model, prompt_cache=PromptCache())
    prompts = [[5, 7, 30, 9], [5, 7, 30, 8], [5, 7, 30, 6]]
    for row, prompt in enumerate(prompts):
        desk.ask(prompt, **how, seed=row)
    desk.wait()
    assert "are not numbers" in str(desk.results[0])
    for row in (1, 2):
        expected = told(alone(plain, prompts[row], **how, seed=row))
        if 9 not in expected[0]:
            assert told(desk.results[row]) == expected
    assert any(not isinstance(desk.results[row], Exception) for row in (1, 2))


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
@pytest.mark.parametrize("name", ["say", "allowed", "fitted"])
def test_an_error_in_a_form_is_that_answers_alone(checkpoint, monkeypatch, name, error):
    model = load(checkpoint("llama"))
    how: Any = {"mode": "verified", "block_size": 4, "branches": 1, "max_new_tokens": 12}
    expected = [alone(model, [5 + row], regex="[a-z]{6,9}", **how) for row in range(3)]
    whole, count = getattr(Grammar, name), [0]

    def failing(grammar: Grammar, *given: Any) -> Any:
        count[0] += 1
        if count[0] == 5:
            raise error("of one form")
        return whole(grammar, *given)

    monkeypatch.setattr(Grammar, name, failing)
    batch = Running(room=3)
    batch.begin([answer_of(model, row, [5 + row], regex="[a-z]{6,9}", **how) for row in range(3)])
    results, failed = {}, []
    while len(batch):
        for reveal in batch.come() if batch.coming else batch.step():
            if reveal.generation is not None:
                results[reveal.row] = reveal.generation
        failed += [(answer.row, str(error)) for answer, error in batch.failed]
        batch.failed.clear()
    [(row, message)] = failed
    assert message == "of one form"
    assert results.keys() == {0, 1, 2} - {row}
    for other, one in results.items():
        assert told(one) == told(expected[other])


def test_what_all_begin_with_is_no_number(checkpoint, monkeypatch):
    """Each is told so."""
    monkeypatch.setattr(prompt_cache, "ALIKE", 2)
    model = load(checkpoint("llama"))

    def overflowing(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out.masked_fill((given[0] == 9)[..., None], float("nan"))

    model.network.get_input_embeddings().register_forward_hook(overflowing)
    for size in (1, 2):
        with pytest.raises(ValueError, match="are not numbers"):
            generate(model, [[5, 9, 6], [5, 9, 7], [5, 9, 8]], mode="ntp", batch_size=size)
