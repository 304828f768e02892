"""The plugin in a real engine: the ids of the reference decoder, whatever else the engine does."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from plain import plain
from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]

from setblock import nano
from setblock.generation import generate
from setblock.vllm import sampler
from setblock.vllm.requests import decoding_of

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"solver": "entropy:0.1"},
    {"solver": "entropy-threshold:0.3", "block_size": 5},
    {"solver": "confidence:0.9", "block_size": 8},
    {"mode": "verified"},
    {"mode": "verified", "solver": "entropy:inf", "block_size": 7},
    {"mode": "ntp"},
)
PENALISED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 1.0},
    {"frequency_penalty": 0.7, "temperature": 0.8, "seed": 5, "min_p": 0.1},
    {"temperature": 1.5, "seed": 3, "min_p": 0.3},
    {},
)


@dataclass(frozen=True)
class Request:
    """One request, to the engine and to the reference."""

    ids: tuple[int, ...]
    way: dict[str, Any]
    max_tokens: int = 60
    sampling: dict[str, Any] = field(default_factory=dict)  # of both by the same name
    ignore_eos: bool = False

    def params(self) -> Any:
        return SamplingParams(
            **{"temperature": 0.0, **self.sampling},
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            extra_args=dict(self.way),
        )

    def reference(self, model: Any) -> tuple[int, ...]:
        """Verified decoding is to say what next-token decoding says. Blocks that slide begin behind
        the token that the prompt's own forward, here without masks, says.
        """
        way, most = self.way, self.max_tokens
        options = {**self.sampling, "ignore_eos": self.ignore_eos}
        [alone] = generate(model, [self.ids], max_new_tokens=most, mode="ntp", **options)
        if way.get("mode") in ("verified", "ntp"):
            return alone.token_ids
        ids, first = self.ids, ()
        if way.get("slide"):
            first = alone.token_ids[:1]
            ids, most = (*ids, *first), most - 1
            if not most or alone.num_tokens == 1:
                return first
        return first + generate(model, [ids], max_new_tokens=most, **way, **options)[0].token_ids


def answers(engine: Any, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    prompts = [{"prompt_token_ids": list(one.ids)} for one in requests]
    found = engine.generate(prompts, [one.params() for one in requests], use_tqdm=False)
    return [tuple(one.outputs[0].token_ids) for one in found]


def prompts(model: Any, count: int) -> list[tuple[int, ...]]:
    """Problems of all families, in turns."""
    each = -(-count // len(nano.FAMILIES))
    families = [nano.problems(name, "validation", each) for name in nano.FAMILIES]
    texts = [one.prompt for some in zip(*families, strict=True) for one in some][:count]
    return [tuple(model.encode(text, chat=True)) for text in texts]


def mixed(model: Any, count: int, ways: Sequence[dict[str, Any]] = WAYS) -> list[Request]:
    """Requests of all these kinds, drawn by a fixed seed."""
    draw = random.Random(0)
    return [
        Request(
            ids,
            draw.choice(ways),
            draw.choice((1, 5, 16, 37, 60)),
            draw.choice(({}, {}, {"temperature": 0.8, "seed": draw.randrange(99), "top_p": 0.9})),
            draw.random() < 0.3,
        )
        for ids in prompts(model, count)
    ]


def agree(engine: Any, model: Any, requests: Sequence[Request]) -> None:
    for request, found in zip(requests, answers(engine, requests), strict=True):
        assert found == request.reference(model), request


@pytest.mark.parametrize("kind", ["nano", "llama", "qwen3", "qwen2", "mistral"])
def test_one_request_alone(engine, model, kind):
    reference = model(kind)
    ids = prompts(reference, 2)
    for way in WAYS:
        agree(engine(kind), reference, [Request(ids[0], way)])
    sampling = {"temperature": 1.0, "seed": 7, "top_k": 20}
    for way in ({}, {"mode": "verified"}, {"mode": "ntp"}):
        agree(engine(kind), reference, [Request(ids[1], way, sampling=sampling)])


def penalised(model: Any, count: int, ways: Sequence[dict[str, Any]]) -> list[Request]:
    """As `mixed`, most of them with penalties or min-p."""
    plain = mixed(model, count, ways)
    each = [(one, PENALISED[number % len(PENALISED)]) for number, one in enumerate(plain)]
    return [replace(one, sampling={**one.sampling, **more}) for one, more in each]


@pytest.mark.parametrize("kind", ["nano", "llama"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_penalties(engine, model, kind, asynchronous):
    served = engine(kind, async_scheduling=asynchronous)
    ways = [way for way in WAYS if way.get("mode") in ("verified", "ntp")] + [{}]
    requests = penalised(model(kind), 24, ways)
    plain = [replace(one, sampling={}) for one in requests]
    assert answers(served, requests) != answers(served, plain)
    agree(served, model(kind), requests + mixed(model(kind), 12))


def test_penalties_without_a_mode(engine, model):
    """A request is decoded by the mode that knows them."""
    [ids] = prompts(model("nano"), 1)
    params = Request(ids, {}, sampling=PENALISED[0]).params()
    assert not decoding_of(Request(ids, {}).params(), {"mode": "sbd"}, 16).verified
    for mode in ("sbd", "verified", "ntp"):
        assert decoding_of(params, {"mode": mode}, 16).verified


@pytest.mark.parametrize("kind", ["nano", "llama", "qwen3"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_32_requests_mixed(engine, model, kind, caching, asynchronous):
    served = engine(kind, enable_prefix_caching=caching, async_scheduling=asynchronous)
    requests = mixed(model(kind), 32)
    agree(served, model(kind), requests)
    agree(served, model(kind), requests[::-1])  # now their prompts are in the prefix cache


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_holds_few_logits_in_float32_at_a_time(engine, model, monkeypatch, fused):
    """A few requests after the other then, which say the same."""
    held = []
    clean = sampler.BlockSampler._clean

    def noted(one, logits):
        held.append(logits.numel())
        return clean(one, logits)

    monkeypatch.setattr(sampler.BlockSampler, "_clean", noted)
    bound = 32 * model("nano").vocab_size  # a single fused forward
    ways = (*WAYS, {"slide": True, "solver": "prefix:0.3"}) if fused else WAYS
    served = engine("nano", **{"fused": True} if fused else {})
    requests = mixed(model("nano"), 32, ways)
    answers(served, requests)
    assert max(held) > bound
    monkeypatch.setattr(sampler, "MOST_LOGITS", bound)
    held.clear()
    agree(served, model("nano"), requests)
    assert max(held) <= bound


def test_prompts_in_chunks(engine, model):
    """The budget of a step is less than most prompts and blocks together."""
    served = engine("nano", max_num_batched_tokens=130, max_num_seqs=8, block_size=32)
    agree(served, model("nano"), mixed(model("nano"), 32))


@pytest.mark.parametrize(
    "settings", [{"async_scheduling": True}, {"async_scheduling": False}, {"fused": True}]
)
def test_requests_that_lose_their_cache(engine, model, settings):
    """So few blocks of keys and values that requests are thrown out and begin again."""
    served = engine(
        "nano", num_gpu_blocks_override=10, max_model_len=208, block_size=32, max_num_seqs=8,
        **settings,
    )  # fmt: skip
    ids = [one for one in prompts(model("nano"), 40) if len(one) < 90]
    requests = [
        Request(one, WAYS[number % len(WAYS)], 100, ignore_eos=True)
        for number, one in enumerate(ids)
    ]
    agree(served, model("nano"), requests)
    assert counter(served, "vllm:num_preemptions") > 10


@pytest.mark.parametrize("kind", ["nano", "llama", "qwen3"])
def test_verified_is_vllms_own_next_token_text(engine, model, folder, kind):
    """Not only the reference's: vLLM as it is, in a process of its own, says the same."""
    greedy = [more for more in PENALISED if "temperature" not in more]
    asked = [
        (ids, greedy[number % len(greedy)]) for number, ids in enumerate(prompts(model(kind), 24))
    ]
    way = {"mode": "verified"}
    found = answers(engine(kind), [Request(ids, way, sampling=more) for ids, more in asked])
    assert [one.ids for one in plain(folder(kind), asked)] == found


def test_forwards_are_saved(engine, model):
    """What vLLM counts: tokens for each forward of a request."""
    served = engine("nano")
    rates = {}
    for mode in ("ntp", "verified", "sbd"):
        before = [counter(served, f"vllm:diffusion_num_{name}") for name in COUNTED]
        answers(served, [Request(ids, {"mode": mode}) for ids in prompts(model("nano"), 10)])
        steps, tokens = (
            counter(served, f"vllm:diffusion_num_{name}") - old
            for name, old in zip(COUNTED, before, strict=True)
        )
        rates[mode] = tokens / steps
    assert rates["ntp"] <= 1.01
    assert rates["verified"] > 2
    assert rates["sbd"] > 2


COUNTED = ("denoising_steps", "committed_tokens")


def counter(engine: Any, name: str) -> float:
    [found] = [one.value for one in engine.get_metrics() if one.name == name]
    return found


def test_texts_that_stop(engine, model):
    """A stop text inside a block: what vLLM emits ends before it."""
    [ids] = prompts(model("nano"), 1)
    whole = generate(model("nano"), [ids], mode="ntp", max_new_tokens=60)[0]
    stop = whole.text[10:14]
    for way in WAYS:
        params = Request(ids, way, sampling={"stop": stop}).params()
        [found] = engine("nano").generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)
        assert found.outputs[0].finish_reason == "stop"
        assert stop not in found.outputs[0].text
        if way.get("mode") in ("ntp", "verified"):
            assert found.outputs[0].text == whole.text[: whole.text.index(stop)]


def test_blocks_at_the_end_of_the_context(engine, model):
    """The last block is as short as what is left; its text is still next-token decoding's."""
    served = engine("nano", max_model_len=64)
    [ids] = [one for one in prompts(model("nano"), 5) if len(one) < 40][:1]
    for way in ({"mode": "verified"}, {"mode": "ntp"}):
        request = Request(ids, way, 64 - len(ids), ignore_eos=True)
        [found] = answers(served, [request])
        assert len(found) == 64 - len(ids)
        assert found == request.reference(model("nano"))
    [found] = answers(served, [Request(ids, {}, 64 - len(ids), ignore_eos=True)])
    assert len(found) == 64 - len(ids)


def test_without_a_seed_every_request_has_its_own(engine, model):
    [ids] = prompts(model("llama"), 1)  # a random network, unsure of every token
    params = SamplingParams(temperature=1.0, max_tokens=40)  # one for all of them
    texts = [{"prompt_token_ids": list(ids)}] * 8
    found = engine("llama").generate(texts, params, use_tqdm=False)
    assert len({tuple(one.outputs[0].token_ids) for one in found}) > 4


def test_a_budget_that_no_block_fits_into_is_refused(engine):
    with pytest.raises(ValueError, match="--long-prefill-token-threshold must be 0 or at least 16"):
        engine("nano", long_prefill_token_threshold=15)
    with pytest.raises(ValueError, match="--max-num-batched-tokens must be at least 16"):
        engine("nano", max_num_batched_tokens=8, max_num_seqs=4)


@pytest.mark.parametrize(
    ("fields", "extra", "message"),
    [
        ({}, {"mode": "fast"}, "mode must be one of sbd, ntp, verified, got 'fast'"),
        ({}, {"solver": "best"}, "solver must be one of entropy:GAMMA"),
        ({}, {"solver": 3}, "solver must be a text"),
        ({}, {"block_size": 17}, r"block_size must lie in 1\.\.16, the server's, got 17"),
        ({}, {"block_size": 0}, "block_size must lie in"),
        ({}, {"blocks": 3}, "blocks is not one of mode, solver, block_size, slide, draft, lookup"),
        ({}, {"mode": "verified", "draft": "branches"}, "must be solver on a server with --no-fus"),
        ({}, {"mode": "verified", "lookup": 3}, "lookup is for mode verified with draft branches"),
        ({"thinking_token_budget": 5}, {}, "thinking_token_budget is not supported"),
        ({"trace_decode_token_ids": [5]}, {}, "trace_decode_token_ids is not supported"),
        ({"logprob_token_ids": [5]}, {}, "logprob_token_ids is not supported"),
        ({"presence_penalty": 0.5}, {"mode": "sbd"}, "presence_penalty is for modes ntp and ver"),
        ({"repetition_penalty": 1e-5}, {}, r"repetition_penalty must be a number in 0.01\.\.100"),
        ({"min_tokens": 3}, {"mode": "sbd"}, "min_tokens is for modes ntp and verified"),
        ({"logit_bias": {3: 1.0}}, {"mode": "sbd"}, "logit_bias is for modes ntp and verified"),
        ({"allowed_token_ids": [3]}, {"mode": "sbd"}, "allowed_token_ids is for modes ntp and"),
        ({"bad_words": ["a"]}, {"mode": "sbd"}, "bad_words is for modes ntp and verified"),
        ({"seed": -5}, {}, "seed must be"),
        ({"seed": 2**63 - 2, "n": 3, "temperature": 1.0}, {}, r"seed must be at most 2\*\*63 - n"),
        ({"logit_bias": {5: float("inf")}}, {}, "logit_bias must be of finite numbers, got inf"),
        ({"allowed_token_ids": [3, 3]}, {}, "allowed_token_ids must be of more than the mask tok"),
        ({"stop_token_ids": list(range(20))}, {}, "stop_token_ids: at most 16"),
    ],
)
def test_what_is_not_supported_is_named(engine, model, fields, extra, message):
    params = SamplingParams(**{"temperature": 0.0, **fields}, max_tokens=4, extra_args=extra)
    with pytest.raises(VLLMValidationError, match=message):
        engine("nano").generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    agree(engine("nano"), model("nano"), [Request((5, 6), {})])  # it still answers
