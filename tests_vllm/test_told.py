"""How likely tokens are, and what else a request may ask of them: vLLM's own answers."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from plain import Likely, plain
from test_engine import PENALISED, WAYS, Request, answers, counter, mixed, prompts
from test_forms import FORMS
from test_fused import BRANCHES, FUSED, SLIDING
from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

from setblock import likelihood
from setblock.generation import generate
from setblock.results import TokenLogprob
from setblock.vllm.requests import decoding_of

VERIFIED = ({}, *BRANCHES, {"mode": "verified", "draft": "solver"}, {"mode": "ntp"})
TRUNCATIONS = ("top_k", "top_p", "min_p")
WISHES: tuple[dict[str, Any], ...] = (
    {"logit_bias": {40: 3.0, 41: -100.0, 42: 1.5}},
    {"allowed_token_ids": list(range(2, 90, 2))},
    {"min_tokens": 30},
    {"min_tokens": 55, "ignore_eos": True},
    {"bad_words": ["a", "the", "is", " and", "so the answer", "4", "1 +"]},
    {"min_tokens": 20, "bad_words": ["4", "5"], "logit_bias": {2: 20.0}, "presence_penalty": 0.4},
    {"bad_words": ["."], "repetition_penalty": 1.2, "allowed_token_ids": list(range(900))},
)


@dataclass(frozen=True)
class Asked:
    """A request with these parameters of vLLM's."""

    ids: tuple[int, ...]
    way: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def params(self) -> Any:
        more = {"temperature": 0.0, "max_tokens": 60, **self.more}
        if form := more.pop("form", None):
            more["structured_outputs"] = StructuredOutputsParams(**form)
        return SamplingParams(**more, extra_args=dict(self.way))


def found(engine: Any, requests: Sequence[Any]) -> list[Any]:
    texts = [{"prompt_token_ids": list(one.ids)} for one in requests]
    return engine.generate(texts, [one.params() for one in requests], use_tqdm=False)


def likely(places: Any) -> list[Any]:
    return [
        place and {token: (one.logprob, one.rank) for token, one in place.items()}
        for place in places or []
    ]


def same(one: Likely, other: Likely, changed: float = 0.0, masks: int = 0) -> None:
    """As floating-point numbers of two programs are.

    masks: tokens that may be likelier in the other alone.
    """
    one, other = (  # which of those that may not be said are told of, is anyone's choice
        {token: it for token, it in here.items() if it[0] > -1e4} for here in (one, other)
    )
    assert one.keys() == other.keys()
    for token, (value, rank) in one.items():
        assert value == pytest.approx(other[token][0] + changed, abs=2e-4)
        assert rank in (other[token][1], other[token][1] - masks)


def as_told(one: TokenLogprob, told: Likely) -> None:
    assert told[one.token_id][0] == pytest.approx(one.logprob, abs=2e-4)
    assert set(told) == {one.token_id, *dict(one.top)}
    for place, (token, value) in enumerate(one.top, start=1):
        assert told[token] == (pytest.approx(value, abs=2e-4), place)


@dataclass(frozen=True)
class Telling(Request):
    most: int = 0

    def params(self) -> Any:
        params = super().params()
        params.logprobs = self.most
        return params

    def told(self, model: Any) -> list[TokenLogprob]:
        """As `Request.reference`."""
        way, most = dict(self.way), self.max_tokens
        options = {**self.sampling, "ignore_eos": self.ignore_eos, "logprobs": self.most}
        single = way.get("mode") in ("verified", "ntp")
        [alone] = generate(model, [self.ids], max_new_tokens=most, mode="ntp", **options)
        if single:
            return list(alone.logprobs or ())
        ids, first = self.ids, []
        if way.get("slide"):
            ids, most, first = (*ids, alone.token_ids[0]), most - 1, list(alone.logprobs or ())[:1]
            if not most or alone.num_tokens == 1:
                return first
        [rest] = generate(model, [ids], max_new_tokens=most, **way, **options)
        return first + list(rest.logprobs or ())


@pytest.mark.parametrize("kind", ["nano", "llama", "chained:llama"])
@pytest.mark.parametrize("settings", [FUSED, {"async_scheduling": True}])
def test_tokens_of_every_mode(engine, model, kind, settings):
    """Beside requests that tell nothing."""
    ways = WAYS + BRANCHES + SLIDING if settings == FUSED else WAYS
    served = engine(kind, **settings)
    draw = random.Random(3)
    plain_ones = mixed(model(kind), 24, ways)
    requests = [
        Telling(one.ids, one.way, one.max_tokens, one.sampling, one.ignore_eos, most)
        for one in plain_ones
        for most in (draw.choice((0, 1, 5, 20)),)
    ]
    said = found(served, [one for both in zip(requests, plain_ones, strict=True) for one in both])
    for request, one, other in zip(requests, said[::2], said[1::2], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert other.outputs[0].logprobs is None
        told, wanted = likely(one.outputs[0].logprobs), request.told(model(kind))
        assert [one.token_id for one in wanted] == list(one.outputs[0].token_ids)
        for place, reference in zip(told, wanted, strict=True):
            as_told(reference, place)


def asked_of(model: Any, count: int, more: Sequence[dict[str, Any]]) -> list[Asked]:
    """Without a mode, a request for nothing that blocks can't do is decoded by these."""
    draw, asked = random.Random(4), []
    for number, ids in enumerate(prompts(model, count)):
        given = more[number % len(more)]
        bound = given.keys() - {"temperature", "max_tokens", "logprobs", "seed", *TRUNCATIONS}
        asked.append(Asked(ids, draw.choice(VERIFIED if bound else VERIFIED[1:]), given))
    return asked


GREEDY = [more for more in PENALISED if "temperature" not in more]


@pytest.mark.parametrize("kind", ["nano", "llama", "qwen3"])
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs", "raw_logits"])
def test_vllms_own(engine, model, folder, kind, mode):
    """vLLM as it is says the same of the same tokens, but for its mask token, which has a share
    there where nothing is processed.
    """
    count = model(kind).network.config.vocab_size
    told = {"logprobs": 20 if mode != "raw_logprobs" else count}
    forms = [{"form": form} for form in FORMS]
    requests = asked_of(model(kind), 24, [*GREEDY, *WISHES, *forms, {**WISHES[5], **forms[0]}])
    own = [(one.ids, {**one.more, **told}) for one in requests]
    settings = {"logprobs_mode": mode, "max_logprobs": count}
    wanted = plain(folder(kind), own, **settings)
    requests = [replace(one, more={**one.more, "logprobs": 20}) for one in requests]
    answered = found(engine(kind, **FUSED, **settings), requests)
    for one, other in zip(answered, wanted, strict=True):
        [answer] = one.outputs
        assert tuple(answer.token_ids) == other.ids
        for here, there in zip(likely(answer.logprobs), other.told, strict=True):
            if mode == "raw_logprobs":
                mask, rank = there.pop(3)
                there = {token: (value, r - (r > rank)) for token, (value, r) in there.items()}
                there = {token: there[token] for token in here}
                same(here, there, -math.log1p(-math.exp(mask)))
            elif 3 not in there:
                same(here, there, masks=mode == "raw_logits")


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_vllms_own_of_samples(engine, model, folder, mode):
    """What a first token is picked from, whichever it is then."""
    ways = (
        {"temperature": 0.7}, {"temperature": 1.5, "top_k": 7}, {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.2}, {"temperature": 2.0, "presence_penalty": 1.0},
        {"temperature": 0.5, "logit_bias": {40: 3.0}, "repetition_penalty": 1.3},
    )  # fmt: skip
    requests = asked_of(
        model("llama"), 24, [{**way, "max_tokens": 1, "logprobs": 20, "seed": 1} for way in ways]
    )
    wanted = plain(folder("llama"), [(one.ids, one.more) for one in requests], logprobs_mode=mode)
    served = engine("llama", **FUSED, logprobs_mode=mode)
    for one, other in zip(found(served, requests), wanted, strict=True):
        [here], [there] = likely(one.outputs[0].logprobs), other.told
        both = {token for token in here.keys() & there.keys() if there[token][0] > -1e4}
        assert len(both) >= min(19, sum(value > -1e4 for value, _ in there.values()) - 1)
        same({token: here[token] for token in both}, {token: there[token] for token in both})


@pytest.mark.parametrize("kind", ["nano", "llama", "qwen3"])
def test_wishes(engine, model, folder, kind):
    requests = asked_of(model(kind), 35, WISHES)
    wanted = plain(folder(kind), [(one.ids, one.more) for one in requests])
    served = engine(kind, **FUSED)
    assert answers(served, requests) == [one.ids for one in wanted]
    free = answers(served, [replace(one, more={}) for one in requests])
    assert sum(one.ids != other for one, other in zip(wanted, free, strict=True)) > 10
    assert answers(engine(kind, async_scheduling=True), [
        replace(one, way={"mode": one.way.get("mode", "verified")}) for one in requests
    ]) == [one.ids for one in wanted]  # fmt: skip


@pytest.mark.parametrize("mode", ["sbd", "verified"])
@pytest.mark.parametrize(
    "settings",
    [FUSED, {**FUSED, "max_num_batched_tokens": 60, "max_num_seqs": 8}, {"async_scheduling": True}],
)
def test_prompts(engine, model, folder, mode, settings):
    requests = [
        Asked(ids, {"mode": mode}, {"max_tokens": 1 + number % 9, "prompt_logprobs": number % 4})
        for number, ids in enumerate(prompts(model("nano"), 12))
    ]
    wanted = plain(folder("nano"), [(one.ids, one.more) for one in requests])
    served = engine("nano", **settings)
    for one, other in zip(found(served, requests), wanted, strict=True):
        told = likely(one.prompt_logprobs)
        assert len(told) == len(one.prompt_token_ids)
        for here, there in zip(told[1:], other.prompt[1:], strict=True):
            assert there is not None
            same(here, there)


def test_prompts_beside_answers_to_the_end_of_the_context(engine, model):
    """Behind whose last tokens vLLM looks for another."""
    served = engine("nano", max_model_len=80, **FUSED)
    ids = [one for one in prompts(model("nano"), 40) if len(one) < 60]
    longest = [
        Asked(one, {"mode": "verified"}, {"max_tokens": 80 - len(one), "ignore_eos": True})
        for one in ids
    ]
    judged = [Asked(one, {}, {"max_tokens": 1, "prompt_logprobs": 0}) for one in ids]
    both = [one for pair in zip(longest, judged, strict=True) for one in pair]
    for request, one in zip(judged, found(served, both)[1::2], strict=True):
        wanted = likelihood.next_tokens(model("nano"), request.ids, 1).logprobs
        told = [next(iter(place.values()))[0] for place in likely(one.prompt_logprobs)[1:]]
        assert told == pytest.approx(wanted.tolist(), abs=1e-2)


def test_tokens_of_requests_that_lose_their_cache(engine, model):
    served = engine(
        "nano", num_gpu_blocks_override=10, max_model_len=208, block_size=32, max_num_seqs=8,
        max_num_batched_tokens=60, **FUSED,
    )  # fmt: skip
    ways = WAYS + BRANCHES  # blocks that slide are decoded anew
    ids = [one for one in prompts(model("nano"), 24) if len(one) < 90]
    requests = [
        Telling(one, ways[number % len(ways)], 100, ignore_eos=True, most=3)
        for number, one in enumerate(ids)
    ]
    for request, one in zip(requests, found(served, requests), strict=True):
        told = likely(one.outputs[0].logprobs)
        for place, reference in zip(told, request.told(model("nano")), strict=True):
            as_told(reference, place)
    assert counter(served, "vllm:num_preemptions") > 10


@pytest.mark.parametrize("way", [{}, {"mode": "verified"}, {"mode": "ntp"}, SLIDING[0]])
def test_several_answers(engine, model, way):
    [ids] = prompts(model("llama"), 1)  # a random network, unsure of every token
    served = engine("llama", **FUSED)

    def said(**more: Any) -> list[tuple[int, ...]]:
        [one] = found(served, [Asked(ids, way, {"temperature": 1.0, "max_tokens": 20, **more})])
        return [tuple(answer.token_ids) for answer in one.outputs]

    assert len(set(said(n=8))) > 4
    assert said(n=3, seed=11) == said(seed=11) + said(seed=12) + said(seed=13)
    [one] = found(served, [Asked(ids, way, {"temperature": 1.0, "n": 3, "logprobs": 2})])
    for answer in one.outputs:
        assert [next(iter(place)) for place in answer.logprobs] == list(answer.token_ids)


@pytest.mark.parametrize("most", [-1, 21])
def test_how_many_are_told_of(most):
    """Of which vLLM lets a server have more."""
    with pytest.raises(ValueError, match=rf"logprobs must lie in 0\.\.20, got {most}"):
        decoding_of(SamplingParams(logprobs=most), {}, 16)


def test_tokens_of_a_prompt_that_are_named(engine, model):
    [ids] = prompts(model("nano"), 1)
    scored = [[-1, token] for token in ids[2:]]
    more = {"prompt_logprob_token_ids": scored, "prompt_logprob_start": 1}
    [named] = found(engine("nano", **FUSED), [Asked(ids, {"mode": "sbd"}, more)])
    judged = likelihood.next_tokens(model("nano"), ids, 1).logprobs
    scores = named.prompt_token_id_logprobs
    assert scores[:, 1].tolist() == pytest.approx(judged[1:].tolist(), abs=1e-3)
    assert (scores[:, 0] == -math.inf).all()
