"""The benchmark's numbers, with a clock that stands still but where the test moves it."""

import os
from typing import Any

import pytest
import torch
import transformers

from setblock import contenders
from setblock.benchmark import compare, forward_costs, stretched
from setblock.contenders import Timing, transformers_generate
from setblock.generation import generate
from setblock.loading import load
from setblock.model import Model

PROMPTS = [[5, 9, 30], [7, 7, 12, 40, 8], [21]]


@pytest.fixture(scope="module")
def model(checkpoint) -> Model:
    return load(checkpoint("llama"), dtype="float32", device="cpu")


def test_transformers_says_what_next_token_decoding_does(model):
    ours = generate(model, PROMPTS, mode="ntp", max_new_tokens=12)
    theirs = transformers_generate()(model, PROMPTS, 12)
    assert theirs.token_ids == tuple(one.token_ids for one in ours)
    assert theirs.tokens == sum(one.num_tokens for one in ours)
    assert theirs.prefill_s > 0


def test_prompt_lookup_says_the_same(model, monkeypatch):
    found = contenders.contenders(1)
    assert list(found) == ["ntp", "sbd", "verified", "transformers", "transformers-lookup"]
    for prompt in PROMPTS:
        runs = {name: run(model, [prompt], 12) for name, run in found.items()}
        for name in ("verified", "transformers", "transformers-lookup"):
            assert runs[name].token_ids == runs["ntp"].token_ids
    assert "transformers-lookup" not in contenders.contenders(2)
    names = list(contenders.contenders(2, leniences=(0.5, 0.2)))
    assert names[2:5] == ["verified", "verified lenience=0.5", "verified lenience=0.2"]
    names = list(contenders.contenders(2, lookups=(0, 8), block_sizes=(1, 4), leniences=(0.5,)))
    verified = [f"verified k={size} lookup={most}" for size in (1, 4) for most in (0, 8)]
    assert names[3:-1] == [name + more for name in verified for more in ("", " lenience=0.5")]
    assert list(contenders.contenders(2, lookups=(8,)))[2] == "verified"
    options = []
    monkeypatch.setattr(contenders, "ours", lambda **given: options.append(given) or max)
    contenders.contenders(2, lookups=(0, 8), block_sizes=(4,), leniences=(0.5,), modes=["verified"])
    given = {"mode": "verified", "block_size": 4}
    assert options[1:] == [
        given | {"lookup": most} | more for most in (0, 8) for more in ({}, {"lenience": 0.5})
    ]
    monkeypatch.undo()
    copying = contenders.contenders(1, block_sizes=(1,), lookups=(0, 8))
    few, many = (copying[f"verified lookup={most}"](model, [PROMPTS[0]], 12) for most in (0, 8))
    assert few.token_ids == many.token_ids
    assert few.forwards != many.forwards, "some tokens were copied"


def test_vllm_is_asked_for_the_same(model, fake_vllm, monkeypatch):
    """An engine that answers as ours does; what it was told stands beside it."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert contenders.vllm_missing(model) is None
    ours = generate(model, PROMPTS, mode="ntp", max_new_tokens=12)
    with contenders.vllm(model, 5, 3, 12) as run:
        found = run(model, PROMPTS, 12)
        [engine] = fake_vllm
        assert not engine.ended
    assert engine.ended
    assert found.token_ids == tuple(one.token_ids for one in ours)
    assert found.tokens == sum(one.num_tokens for one in ours)
    assert found.prefill_s > 0
    assert engine.limits == [1, 12], "the first token alone, then all"
    assert (engine.given["max_model_len"], engine.given["max_num_seqs"]) == (17, 3)
    assert (engine.given["dtype"], engine.given["enable_prefix_caching"]) == ("float32", False)
    assert engine.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert engine.environment["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ, "restored"


def test_why_vllm_can_not_take_part(model, fake_vllm, monkeypatch, tmp_path):
    monkeypatch.setattr(model, "base", "some base")
    assert "merge it first" in str(contenders.vllm_missing(model))
    monkeypatch.undo()
    monkeypatch.setattr(contenders, "find_spec", lambda name: None)
    assert contenders.vllm_missing(model) == "it is not installed"
    monkeypatch.setattr(contenders, "find_spec", lambda name: name)
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr(model, "name", str(tmp_path / "x.gguf"))
    assert contenders.vllm_missing(model) == "the model is a GGUF file"


def test_several_solvers_and_block_sizes(model):
    found = contenders.contenders(2, ["fixed:1", "fixed:4"], [4, 8])
    assert list(found) == [
        "ntp", "sbd fixed:1 k=4", "sbd fixed:4 k=4", "sbd fixed:1 k=8", "sbd fixed:4 k=8",
        "verified k=4", "verified k=8", "transformers",
    ]  # fmt: skip
    nfe = {
        name: run(model, PROMPTS[:1], 8).nfe or 0 for name, run in found.items() if "sbd" in name
    }
    assert nfe["sbd fixed:4 k=8"] < nfe["sbd fixed:1 k=8"]
    assert list(contenders.contenders(2, ["fixed:1"], [4, 8]))[1:3] == ["sbd k=4", "sbd k=8"]


def test_answers_end_at_eos(model, monkeypatch):
    free = generate(model, PROMPTS, mode="ntp", max_new_tokens=12)
    monkeypatch.setattr(model, "eos_token_ids", frozenset([free[0].token_ids[4]]))
    ours = generate(model, PROMPTS, mode="ntp", max_new_tokens=12)
    theirs = transformers_generate()(model, PROMPTS, 12)
    assert theirs.token_ids == tuple(one.token_ids for one in ours)
    assert len(theirs.token_ids[0]) <= 5


def test_without_ends_every_answer_is_as_long_as_it_may(model, monkeypatch):
    monkeypatch.setattr(model, "eos_token_ids", frozenset())
    monkeypatch.setattr(model.network.generation_config, "eos_token_id", list(range(200)))
    for name, run in contenders.contenders(1).items():
        assert run(model, PROMPTS[:1], 9).tokens == 9, name


def test_answers_of_one_token_have_no_speed_of_decoding(model):
    running: Any = {
        name: lambda model, prompts, tokens: Timing(1.0, 0.0, 2, None, ((1,), (2,)))
        for name in ("ntp", "fast")
    }
    for line in compare(model, [[1], [2, 2]], 2, 10, 2, running):
        assert line["speedup"] is line["speedup_range"] is None
        assert line["total_speedup"] == 1


def test_ratios_are_paired_and_the_first_round_does_not_count(model):
    seconds = {"ntp": [100, 8, 12, 20], "fast": [100, 2, 4, 4]}  # of the prompt's decoding

    def contender(name: str):
        left = iter(seconds[name])
        return lambda model, prompts, tokens: Timing(1.0, float(next(left)), 10, 5, ((1, 2), (2,)))

    running: Any = {name: contender(name) for name in seconds}
    ntp, fast = compare(model, [[1], [2, 2]], 2, 10, 3, running)
    assert ntp["speedup"] == ntp["total_speedup"] == 1
    assert fast["speedup"] == pytest.approx(4)
    assert fast["speedup_range"] == pytest.approx((3, 5))
    assert fast["total_speedup_range"] == pytest.approx((13 / 5, 21 / 5))
    assert (fast["decode_s"], fast["prefill_s"]) == (4, 1)
    assert (fast["tokens_per_forward"], fast["identical_share"]) == (2, 1)
    assert fast["tokens_per_second"] == pytest.approx(10 / 5)
    assert fast["prompt_tokens"] == 1.5


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_an_interrupt_keeps_whole_rounds(model, broken):
    turns: list[tuple[int, str]] = []

    def run(model, prompts, tokens):
        if turns[-1] == (broken, "fast"):
            raise KeyboardInterrupt
        return Timing(1.0, 1.0 + turns[-1][0], 10, 5, ((1, 2), (2,)))

    lines: list[dict[str, Any]] = []
    running: Any = {"ntp": run, "fast": run}
    found = compare(model, [[1], [2, 2]], 2, 10, 5, running, lambda *at: turns.append(at))
    with pytest.raises(KeyboardInterrupt):
        lines.extend(found)
    assert turns == [(i, name) for i in range(broken + 1) for name in running]
    told = [(line["contender"], line["repeats"], line["decode_s"]) for line in lines]
    assert told == ([("ntp", 2, 2.5), ("fast", 2, 2.5)] if broken == 3 else [])


@pytest.mark.parametrize(
    ("length", "expected"),
    [(None, [1, 2, 3]), (3, [1, 2, 3]), (2, [2, 3]), (7, [3, 1, 2, 3, 1, 2, 3])],
)
def test_prompts_are_stretched_at_the_front(length, expected):
    assert stretched([1, 2, 3], length) == expected


def test_forwards_are_timed_behind_the_cache(model, monkeypatch):
    """Each forward takes as many seconds as it has tokens to look at."""
    now, seen = 0.0, []
    forward, shares = model.forward, []

    def timed(tokens: torch.Tensor, layout: Any, cache: Any, logits_at: Any = None) -> Any:
        nonlocal now
        held = int(cache.lengths.max())
        seen.append((tokens.shape[0], held, tokens.shape[1]))
        if held and cache.layers[0].is_initialized:
            shares.append(float((cache.layers[0].keys[:, :, :held] != 0).float().mean()))
        now += held + tokens.shape[1]
        return forward(tokens, layout, cache, logits_at)

    monkeypatch.setattr(model, "forward", timed)
    monkeypatch.setattr(contenders.time, "perf_counter", lambda: now)
    lines = list(forward_costs(model, [0, 8], (1, 4, 8), 2, 3))
    assert [(one["cached"], one["queries"], one["seconds"]) for one in lines] == [
        (0, 1, 1), (0, 4, 4), (0, 8, 8), (8, 1, 9), (8, 4, 12), (8, 8, 16)
    ]  # fmt: skip
    assert lines[-1]["ratio"] == 16 / 9
    assert lines[-1]["ratio_range"] == (16 / 9, 16 / 9)
    widths = [width for _, held, width in seen if held == 8]
    assert widths == [1, 4, 8] * 5, "they take turns"
    assert seen.count((2, 8, 4)) == 5, "two to warm up, three to time"
    assert shares == [1] * 15, "all that is cached are random numbers"


def test_the_ceiling_is_what_bare_forwards_take(model, monkeypatch):
    """A clock on which a forward takes its query tokens and a tenth of its logits in seconds, and
    all the rest of a step nothing: every mode runs at its ceiling.
    """
    now = 0.0
    forward = model.forward

    def timed(tokens: torch.Tensor, layout: Any, cache: Any, logits_at: Any = None) -> Any:
        nonlocal now
        wanted = tokens.shape[1] if logits_at is None else len(logits_at)
        now += tokens.shape[1] + wanted / 10
        return forward(tokens, layout, cache, logits_at)

    monkeypatch.setattr(model, "eos_token_ids", frozenset())
    monkeypatch.setattr(model, "forward", timed)
    monkeypatch.setattr(contenders.time, "perf_counter", lambda: now)
    running = {
        "ntp": contenders.ours(mode="ntp"),
        "sbd": contenders.ours(mode="sbd", solver="fixed:2", block_size=4),
        "verified": contenders.ours(mode="verified", block_size=4, branches=2),
    }
    lines = {line["contender"]: line for line in compare(model, PROMPTS, 1, 9, 2, running)}
    # Token by token: behind the prompt 8 forwards of one token and one logit.
    base = len(PROMPTS) * 8 * 1.1
    for name, line in lines.items():
        assert line["share_of_ceiling"] == pytest.approx(1), name
        first = 0 if name == "sbd" else len(PROMPTS)  # tokens and forwards, of whole blocks none
        forwards = line["tokens"] / line["tokens_per_forward"] - first
        rate = (line["tokens"] - first) / forwards
        assert line["efficiency"] == pytest.approx(line["speedup"] / rate)
    assert lines["ntp"]["ceiling"] == 1
    sbd = lines["sbd"]
    assert sbd["ceiling"] == pytest.approx((base / 24) / (sbd["decode_s"] / sbd["tokens"]))
    assert model.watch is None
    for name, noisy in (("ntp", {0}), ("sbd", {4})):
        forwards = running[name](model, PROMPTS[:1], 9).forwards
        assert {one[2] for one in forwards} == noisy, "an adapter may act on those alone"
    lines = list(compare(model, PROMPTS, 2, 9, 2, running))
    assert [line["ceiling"] for line in lines] == [None, None, None], "one prompt at a time"


@pytest.mark.parametrize("count", [3, 5, 9])
def test_blocks_near_the_limit_have_bare_forwards_too(model, monkeypatch, count):
    """They want more logits than they have query tokens."""
    monkeypatch.setattr(model, "eos_token_ids", frozenset())
    ways: list[Any] = [
        {"mode": "sbd", "solver": "fixed:2", "block_size": 8, "slide": True},
        {"mode": "verified", "draft": "solver", "solver": "fixed:1", "block_size": 8},
    ]
    running = {"ntp": contenders.ours(mode="ntp")}
    running |= {str(n): contenders.ours(**one) for n, one in enumerate(ways)}
    for line in compare(model, PROMPTS, 1, count, 1, running):
        assert line["ceiling"] > 0


def test_tokens_of_the_prompts_forward_are_not_those_of_decoding(model, monkeypatch):
    """Where blocks slide it brings a block, of whose time nothing is in decode_s."""
    monkeypatch.setattr(model, "eos_token_ids", frozenset())
    ways: dict[str, tuple[dict[str, Any], int]] = {
        "ntp": ({"mode": "ntp"}, 3),
        "verified": ({"mode": "verified", "block_size": 4}, 3),
        "whole": ({"mode": "sbd", "solver": "fixed:2", "block_size": 4}, 0),
        "seeded": ({"mode": "sbd", "block_size": 4, "next_token_seed": True}, 3),
        "sliding": ({"mode": "sbd", "solver": "prefix:0.0", "block_size": 4, "slide": True}, 12),
    }
    for name, (options, first) in ways.items():
        timing = contenders.ours(**options)(model, PROMPTS, 10)
        assert (timing.tokens, timing.decoded) == (30, 30 - first), name
        counted = len(PROMPTS) if first else 0
        assert timing.decoding_forwards == (timing.nfe or 0) - counted, name

    def run(seconds: float, first: int | None) -> contenders.Contender:
        ids = (tuple(range(20)),)
        return lambda model, prompts, most: Timing(1.0, seconds, 20, 10, ids, first=first)

    lines = compare(model, [[5]], 1, 20, 1, {"ntp": run(19.0, None), "sbd": run(5.0, 10)})
    base, line = lines
    assert base["speedup"] == 1
    assert line["speedup"] == pytest.approx(2), "ten tokens in five seconds"
    assert line["total_speedup"] == pytest.approx(20 / 6)


def test_penalties_of_a_checkpoint_are_not_transformers(model, monkeypatch):
    """Else it would be another decoding than ours."""
    own = transformers.GenerationConfig(repetition_penalty=2.5, min_new_tokens=12)
    monkeypatch.setattr(model.network, "generation_config", own)
    ours = generate(model, PROMPTS, mode="ntp", max_new_tokens=12)
    theirs = transformers_generate()(model, PROMPTS, 12)
    assert theirs.token_ids == tuple(one.token_ids for one in ours)
    assert model.network.generation_config is own


def test_answers_of_the_first_forward_alone_have_no_speed_up(model, monkeypatch):
    """Blocks that slide may end within it; there is no time to compare then."""
    monkeypatch.setattr(model, "eos_token_ids", frozenset())
    running = {
        "ntp": contenders.ours(mode="ntp"),
        "sbd": contenders.ours(mode="sbd", solver="prefix:0.0", block_size=4, slide=True),
    }
    base, line = compare(model, PROMPTS, 1, 3, 2, running)
    assert base["speedup"] == 1
    assert line["tokens_per_forward"] == 3
    assert line["decode_s"] == 0
    assert line["speedup"] is None
    assert line["speedup_range"] is None
    assert line["efficiency"] is None
    assert line["share_of_ceiling"] is None
