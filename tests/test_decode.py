"""Decoding against the oracle in reference.py, token for token, and what each forward costs."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jaxtyping
import pytest
import reference
import torch
import transformers
from conftest import SIZES, make_tokenizer
from fakes import MASK, TableModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from setblock import state
from setblock.generation import generate, settings_for
from setblock.masks import Layout
from setblock.model import Model
from setblock.results import Generation
from setblock.settings import MODES
from setblock.solvers import FORMS

# Each solver both timid and bold.
SOLVERS = [
    *(f"{name}:{gamma}" for name in ("entropy", "confidence-bound", "margin-bound")
      for gamma in (0.0, 0.3, 2.5)),
    "entropy:inf", "entropy-threshold:0.2", "entropy-threshold:1.2", "confidence:0.3",
    "confidence:0.8", "factor:0.4", "factor:2.0", "fixed:1", "fixed:3", "prefix:0.2", "prefix:0.9",
]  # fmt: skip
CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
PROMPTS = [[5], [7, 3, 9, 4, 6, 8, 3, 3], [4, 10, 5]]
# Derandomized: a threshold can fall between the last bits of a cached and an uncached forward, and
# what is found by chance here would fail somebody else's change.
SLOW: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="session")
def networks() -> dict[tuple[str, int], Model]:
    """Random float32 networks, weights so large that entropies vary from 0.01 to 3 nats."""
    made = {}
    for kind, config_class in CONFIGS.items():
        for seed in range(3):
            tokenizer = make_tokenizer()
            config = config_class(**{**SIZES, "initializer_range": 1.0})
            config.vocab_size = len(tokenizer) + 1
            torch.manual_seed(seed)
            network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            made[kind, seed] = Model(network, tokenizer, name=f"{kind} {seed}")
    return made


def with_ends(model: Model, every: int) -> Model:
    """The model with each `every`-th token an EOS; none if it has fewer tokens."""
    changed = copy.copy(model)
    ends = frozenset(range(every - 1, model.vocab_size, every))
    changed.eos_token_ids = ends - {model.mask_token_id}
    return changed


def recorded(model: Model) -> tuple[Model, list[Layout]]:
    """The model, and a list that grows by the layout of each of its forwards."""
    watched, layouts = copy.copy(model), []

    def forward(tokens, layout, cache=None, logits_at=None):
        layouts.append(layout)
        return model.forward(tokens, layout, cache, logits_at)

    watched.forward = forward  # type: ignore[method-assign]
    return watched, layouts


def shapes(layouts: Sequence[Layout]) -> list[tuple[int, ...]]:
    return [tuple(layout.position.shape) for layout in layouts]


def facts(generation: Generation) -> tuple[list[int], int, list[int]]:
    return list(generation.token_ids), generation.nfe, list(generation.reveal_step)


def assert_equals_oracle(model: Model, prompts: list[list[int]], **options) -> list[Generation]:
    """Alone, in chunks of two and all at once: always what the oracle says."""
    run = settings_for(model, **options)
    expected = [reference.decode(model, prompt, run, row) for row, prompt in enumerate(prompts)]
    results = []
    for batch_size in sorted({1, 2, len(prompts)}):
        results = generate(model, prompts, batch_size=batch_size, **options)
        assert [facts(result) for result in results] == expected, (
            f"{batch_size=}, {options}: not what the oracle says"
        )
    return results


@st.composite
def options(draw, max_new_tokens: int):
    """Any options but stop texts."""
    chosen: dict[str, Any] = {
        "mode": draw(st.sampled_from(["sbd", "sbd", "sbd", "ntp"])),
        "solver": draw(st.sampled_from(SOLVERS)),
        "block_size": draw(st.integers(1, 20)),
        "max_new_tokens": draw(st.integers(1, max_new_tokens)),
        "ignore_eos": draw(st.booleans()),
    }
    if chosen["mode"] == "sbd":
        chosen["next_token_seed"] = draw(st.booleans())
        chosen["slide"] = draw(st.booleans())
        if not chosen["slide"]:
            chosen["fallback"] = draw(st.sampled_from([None, None, 0.0, 0.4, 1.0]))
    if draw(st.booleans()):
        chosen["temperature"] = draw(st.sampled_from([0.3, 1.0, 1.5]))
        chosen["top_k"] = draw(st.sampled_from([0, 3]))
        chosen["top_p"] = draw(st.sampled_from([1.0, 0.8]))
        chosen["seed"] = draw(st.integers(0, 2**62))
    return chosen


def prompts(tokens: Sequence[int], max_rows: int):
    prompt = st.lists(st.sampled_from(tokens), min_size=1, max_size=9)
    return st.lists(prompt, min_size=1, max_size=max_rows)


# ------------------------------------------------------------------ equal to the oracle


@settings(**SLOW, max_examples=35)
@given(
    seed=st.integers(0, 5),
    prompts=prompts(range(2, 12), max_rows=4),
    options=options(max_new_tokens=35),
    stop=st.lists(st.text("abcd", min_size=1, max_size=2), max_size=2),
)
def test_tables_decode_as_the_oracle_says(seed, prompts, options, stop):
    model = TableModel.random(seed)
    results = assert_equals_oracle(model, prompts, stop=stop, **options)
    assert not any(MASK in result.token_ids for result in results)


@settings(**SLOW, max_examples=12)
@given(
    kind=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 2),
    every=st.sampled_from([4, 15, 300]),
    prompts=prompts(range(0, 256), max_rows=3),
    options=options(max_new_tokens=20),
)
def test_networks_decode_as_the_oracle_says(networks, kind, seed, every, prompts, options):
    assert_equals_oracle(with_ends(networks[kind, seed], every), prompts, **options)


@settings(**SLOW, max_examples=25)
@given(
    seed=st.integers(0, 5),
    prompts=prompts(range(2, 12), max_rows=4),
    options=options(max_new_tokens=12),
)
def test_prompts_in_chunks(seed, prompts, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "CHUNK", 2)
        results = assert_equals_oracle(TableModel.random(seed), prompts, **options)
    expected = [1 + max(-(-(len(prompt) - 2) // 2), 0) for prompt in prompts]
    # All rows of a batch take part in its longest prompt's.
    assert [one.prefill_forwards for one in results] == [max(expected)] * len(prompts)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("mode", MODES)
def test_a_networks_prompts_in_chunks(networks, kind, mode, monkeypatch):
    model = with_ends(networks[kind, 0], every=300)
    texts = [list(range(3, 3 + count)) for count in (1, 7, 30, 41)]
    whole = generate(model, texts, mode=mode, max_new_tokens=20)
    monkeypatch.setattr(state, "CHUNK", 8)
    watched, layouts = recorded(model)
    chunks = generate(watched, texts, mode=mode, max_new_tokens=20)
    assert [facts(one) for one in chunks] == [facts(one) for one in whole]
    widths = [layout.position.shape[1] for layout in layouts]
    assert widths[:5] == [8, 8, 8, 8, 1]


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_with_a_limit_that_no_block_ends_at(solver):
    assert {text.partition(":")[0] for text in SOLVERS} == set(FORMS)
    model = TableModel.random(seed=1)
    results = assert_equals_oracle(
        model, PROMPTS, solver=solver, block_size=16, max_new_tokens=43, ignore_eos=True
    )
    assert [result.num_tokens for result in results] == [43, 43, 43]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}])
def test_a_network_with_a_limit_that_no_block_ends_at(networks, kind, sampling):
    model = with_ends(networks[kind, 1], every=300)
    options = {"mode": "sbd", "solver": "entropy:1.2", "block_size": 16, "max_new_tokens": 43}
    results = assert_equals_oracle(model, PROMPTS, **options, **sampling)
    assert [result.num_tokens for result in results] == [43, 43, 43]
    assert all(result.nfe < 43 for result in results), "nothing was revealed together"


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
def test_a_network_stops_inside_a_block(networks, mode):
    model = with_ends(networks["llama", 0], every=300)
    run: dict[str, Any] = {
        "mode": mode,
        "solver": "entropy:1.2",
        "block_size": 12,
        "max_new_tokens": 30,
    }
    free = generate(model, PROMPTS, **run)
    # A character of the second block, which no byte of another character can be part of.
    texts = [model.decode([token]) for token in free[0].token_ids[13:22]]
    stop = next(text for text in texts if text.isascii() and text)
    results = assert_equals_oracle(model, PROMPTS, stop=stop, **run)
    assert results[0].finish_reason == "stop"
    assert results[0].token_ids == free[0].token_ids[: results[0].num_tokens]


def test_a_block_larger_than_the_limit():
    model = TableModel.random(seed=2)
    for limit in (1, 2, 5):
        assert_equals_oracle(
            model, PROMPTS, solver="entropy:0.3", block_size=20, max_new_tokens=limit
        )


def test_next_token_decoding_is_transformers_own(networks):
    model = networks["qwen3", 2]
    for prompt in PROMPTS:
        expected = model.network.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=20,
            suppress_tokens=[model.mask_token_id],
            eos_token_id=None,
            pad_token_id=model.pad_token_id,
        )
        (result,) = generate(model, [prompt], mode="ntp", max_new_tokens=20, ignore_eos=True)
        assert list(result.token_ids) == expected[0, len(prompt) :].tolist()


class Rule:
    """A user's own: the first masked slot, and what else it is told to."""

    def __init__(self, first: bool, others: bool) -> None:
        self.first, self.others = first, others

    def __str__(self) -> str:
        return "mine"

    def reveal(self, predictions, masked):
        first = masked & (masked.cumsum(-1) == 1)
        return first & self.first | ~masked & self.others


class Timed(Rule):
    """One that goes by place and step: of the answer's even places all, of odd ones the first few,
    more in each forward.
    """

    def __init__(self) -> None:
        self.seen = []

    def reveal(self, predictions, masked):
        self.seen.append((predictions.place.tolist(), predictions.step.tolist()))
        odd = masked & (predictions.place % 2 == 1)
        few = odd & (odd.cumsum(-1) <= predictions.step[:, None])
        first = masked & (masked.cumsum(-1) == 1)
        return first | (masked & ~odd & (predictions.step[:, None] > 0)) | few


@pytest.mark.parametrize("how", [{}, {"next_token_seed": True}, {"slide": True}, {"fallback": 1.0}])
def test_a_rule_of_one_s_own_is_told_place_and_step(networks, how):
    for model in networks.values():
        options: Any = {"mode": "sbd", "block_size": 7, "max_new_tokens": 25, **how}
        assert_equals_oracle(model, PROMPTS, solver=Timed(), **options)


def test_what_a_rule_is_told_of_a_block():
    rule, none = Timed(), {"ignore_eos": True, "solver": Rule(True, False)}
    options: Any = {"block_size": 3, "max_new_tokens": 6, **none}
    generate(TableModel.random(), [PROMPTS[0]], mode="sbd", **options | {"solver": rule})
    first, second = [0, 1, 2], [3, 4, 5]
    assert rule.seen == [([first], [0]), ([first], [1]), ([second], [0]), ([second], [1])]
    rule = Timed()
    how: Any = {"mode": "verified", "draft": "solver", **options, "solver": rule}
    [found] = generate(TableModel.random(), [PROMPTS[0]], **how)
    starts = [place[0][0] for place, _ in rule.seen]
    assert starts[0] == 1, "behind the token that the prompt's forward gives"
    for (place, step), (later, following) in pairwise(rule.seen):
        assert following == ([step[0] + 1] if later == place else [0])
    assert found.num_tokens == 6


class Answers(Rule):
    """One that answers this, whatever is asked."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def reveal(self, predictions, masked):
        return self.answer(masked)


@pytest.mark.parametrize("how", [{"mode": "sbd"}, {"mode": "verified", "draft": "solver"}])
@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda masked: masked[:1], r"\[1, .\] of torch.bool"),
        (lambda masked: masked[0], r"\[.\] of torch.bool"),
        (lambda masked: masked.float(), r"\[2, .\] of torch.float32"),
        (lambda masked: masked.numpy(), "ndarray"),
        (lambda masked: None, "NoneType"),
    ],
)
def test_a_rule_of_one_s_own_answers_with_a_mask(monkeypatch, how, answer, got):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run it
    options: Any = {"block_size": 4, "max_new_tokens": 12, **how}
    with pytest.raises(TypeError, match=rf"^solver mine must .* of shape \[2, [34]\], got {got}$"):
        generate(TableModel.random(), [PROMPTS[0]] * 2, solver=Answers(answer), **options)


def test_a_rule_of_one_s_own_is_an_object_with_a_name():
    class Nameless:
        def reveal(self, predictions, masked):
            return masked

    options: Any = {"mode": "sbd", "block_size": 4}
    kind: Any = Rule
    with pytest.raises(ValueError, match=r"^solver must have a __str__, which names it in results"):
        generate(TableModel.random(), [PROMPTS[0]], solver=Nameless(), **options)
    with pytest.raises(ValueError, match=r"^solver must be a solver or its text, got <class"):
        generate(TableModel.random(), [PROMPTS[0]], **options, solver=kind)


class Scribbler:
    """Reveals the surest slots; with scores and a mask of its own, or in those it is given."""

    def __init__(self, own: bool, least: float) -> None:
        self.own, self.least = own, least

    def __str__(self) -> str:
        return "scribbler"

    def reveal(self, predictions: Any, masked: torch.Tensor) -> torch.Tensor:
        given = masked, predictions.entropy, predictions.place, predictions.step, predictions.logits
        masked, nats, place, step, logits = (one.clone() for one in given) if self.own else given
        nats += 0.05 * place + 0.01 * step[:, None]
        step += 1
        place *= 0
        logits -= logits.amax()
        nats.masked_fill_(~masked, torch.inf)
        masked &= (nats == nats.amin(-1, keepdim=True)) & (logits.amax() < self.least)
        return masked


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "sbd"},
        {"mode": "sbd", "slide": True},
        {"mode": "verified", "draft": "solver"},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_a_rule_may_change_what_it_is_given(how):
    """Nothing of the run changes with it."""
    options: Any = {"block_size": 4, "max_new_tokens": 12, "ignore_eos": True, **how}
    model = TableModel.random()
    found = [
        generate(model, PROMPTS, solver=Scribbler(own, 1.0), **options) for own in (True, False)
    ]
    for one, other in zip(*found, strict=True):
        assert (one.token_ids, one.nfe, one.reveal_step, one.entropy) == (
            *(other.token_ids, other.nfe, other.reveal_step, other.entropy),
        )
    if "slide" not in how:
        with pytest.raises(ValueError, match="solver scribbler reveals none of a row's masked"):
            generate(model, PROMPTS, solver=Scribbler(False, -1.0), **options)


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "sbd"},
        {"mode": "sbd", "slide": True},
        {"mode": "verified", "draft": "solver"},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_a_rule_of_one_s_own_keeps_to_what_is_masked(how):
    model = TableModel.random()
    options: Any = {"block_size": 4, "max_new_tokens": 12, "ignore_eos": True, **how}
    [found] = generate(model, [PROMPTS[0]], solver=Rule(True, False), **options)
    assert str(found.settings.solver) == "mine"
    assert found.num_tokens == 12
    with pytest.raises(ValueError, match="solver mine reveals positions that are not masked"):
        generate(model, [PROMPTS[0]], solver=Rule(True, True), **options)
    if "slide" in how:  # where each block has a token that is known
        assert generate(model, [PROMPTS[0]], solver=Rule(False, False), **options)[0].nfe >= 12
    else:
        with pytest.raises(ValueError, match="solver mine reveals none of a row's masked"):
            generate(model, [PROMPTS[0]], solver=Rule(False, False), **options)
