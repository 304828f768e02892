"""A block's commit and the next one's first forward in one: the same tokens, fewer forwards.

Mode verified then has its drafts from branches, unless a request names a solver.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import WAYS, Request, agree, answers, counter, mixed, penalised, prompts

from setblock.generation import generate
from setblock.masks import decoding_layout
from setblock.vllm import sampler, state

FUSED = {"fused": True}
BRANCHES: tuple[dict[str, Any], ...] = (
    {"mode": "verified"},
    {"mode": "verified", "draft": "branches", "block_size": 5},
    {"mode": "verified", "block_size": 2},
    {"mode": "verified", "lookup": 6},
    {"mode": "verified", "lookup": 3, "block_size": 4},
    {"mode": "verified", "lookup": 12, "block_size": 3},
    {"mode": "verified", "lookup": 9, "block_size": 1},  # copies alone
)
SLIDING: tuple[dict[str, Any], ...] = (
    {"slide": True, "solver": "prefix:0.99"},
    {"slide": True, "solver": "prefix:0.0"},  # whole drafts
    {"slide": True, "solver": "prefix:0.3", "block_size": 5},
    {"slide": True, "solver": "prefix:0.3", "block_size": 2},
    {"slide": True, "solver": "prefix:0.3", "block_size": 1},  # token by token
)


@pytest.mark.parametrize("kind", ["nano", "llama", "qwen3"])
@pytest.mark.parametrize("caching", [True, False])
def test_32_requests_mixed(engine, model, kind, caching):
    served = engine(kind, enable_prefix_caching=caching, **FUSED)
    requests = mixed(model(kind), 32)
    agree(served, model(kind), requests)
    agree(served, model(kind), requests[::-1])  # now their prompts are in the prefix cache


def test_prompts_in_chunks_and_blocks_cut_by_the_budget(engine, model):
    served = engine("nano", max_num_batched_tokens=130, max_num_seqs=8, block_size=32, **FUSED)
    agree(served, model("nano"), mixed(model("nano"), 32))


def test_the_end_of_the_context(engine, model):
    served = engine("nano", max_model_len=64, **FUSED)
    [ids] = [one for one in prompts(model("nano"), 5) if len(one) < 40][:1]
    ways = *BRANCHES, *SLIDING, {"mode": "verified", "draft": "solver"}, {"mode": "ntp"}
    for way in ways:
        agree(served, model("nano"), [Request(ids, way, 64 - len(ids), ignore_eos=True)])


def steps(served: Any, request: Request) -> int:
    """Forwards of a request behind its prompt's, as its own answer says."""
    prompt = {"prompt_token_ids": list(request.ids)}
    [found] = served.generate([prompt], request.params(), use_tqdm=False)
    return found.outputs[0].spec_decode_metrics.to_dict()["num_spec_steps"]


@pytest.mark.parametrize("solver", ["entropy:0.1", "prefix:0.99", "entropy:inf"])
def test_forwards_are_the_methods_own(engine, model, solver):
    """Those that setblock.generate counts, and one that commits the last block; apart, one for
    each block before.
    """
    apart, fused = [], []
    requests = [Request(ids, {"solver": solver}, 60) for ids in prompts(model("nano"), 10)]
    for request in requests:
        [found] = generate(model("nano"), [request.ids], max_new_tokens=60, **request.way)
        fused.append(found.nfe + 1)
        apart.append(found.nfe + -(-found.num_tokens // 16))
    assert [steps(engine("nano", async_scheduling=False), one) for one in requests] == apart
    assert [steps(engine("nano", **FUSED), one) for one in requests] == fused


def test_verified_blocks_begin_early_too(engine, model):
    way = {"mode": "verified", "draft": "solver"}
    requests = [Request(ids, way, 60) for ids in prompts(model("nano"), 10)]
    apart = [steps(engine("nano", async_scheduling=False), one) for one in requests]
    fused = [steps(engine("nano", **FUSED), one) for one in requests]
    assert sum(fused) < sum(apart)


def test_with_widths_that_change(engine, model):
    served = engine("nano", adaptive="all", **FUSED)
    requests = mixed(model("nano"), 32)
    requests = [one for one in requests if one.way.get("mode") in ("verified", "ntp")]
    requests += mixed(model("nano"), 12, BRANCHES)
    for _ in range(3):
        assert answers(served, requests) == [one.reference(model("nano")) for one in requests]


@pytest.mark.parametrize("kind", ["nano", "chained:llama"])
def test_drafts_from_branches_at_widths_drawn_for_every_step(engine, model, kind, width):
    draw = random.Random(2)
    width(lambda: draw.choice((1, 2, 3, 5, 8, 11, 16, 32, (16, False))))
    served = engine(kind, adaptive="all", **FUSED)
    agree(served, model(kind), mixed(model(kind), 32, BRANCHES))


@pytest.mark.parametrize("kind", ["nano", "chained:llama"])
def test_text_that_would_depend_on_the_widths_does_not(engine, model, kind, width):
    """As a server has it unless it is told otherwise: only requests that say the same are cut."""
    draw = random.Random(4)
    width(lambda: draw.choice((1, 2, 3, 5, 8, 11, 16, 32, (16, False))))
    served = engine(kind, adaptive="exact", **FUSED)
    ways = (*BRANCHES, *SLIDING, *WAYS, {"mode": "verified", "draft": "solver"})
    agree(served, model(kind), mixed(model(kind), 48, ways))
    lenient = [
        Request(one, {"mode": "verified", "lenience": 0.3}) for one in prompts(model(kind), 6)
    ]
    found = [answers(served, [one]) for one in lenient]
    assert found == [answers(engine(kind, **FUSED), [one]) for one in lenient]


def test_a_narrow_step_makes_shorter_drafts(engine, model, width):
    """Half the tokens of a forward draft less than all of them, and more than none."""
    asked = [Request(ids, {"mode": "verified"}, 60) for ids in prompts(model("nano"), 6)]
    forwards = []
    for wide in (1, 8, 32):
        width(lambda: wide)  # noqa: B023
        forwards.append(sum(steps(engine("nano", adaptive="all", **FUSED), one) for one in asked))
    assert forwards[0] > 2 * forwards[1] > 2 * forwards[2]


@pytest.mark.parametrize("kind", ["nano", "llama", "gated:qwen3", "chained:llama"])
@pytest.mark.parametrize("caching", [True, False])
def test_drafts_from_branches(engine, model, kind, caching):
    served = engine(kind, enable_prefix_caching=caching, **FUSED)
    requests = mixed(model(kind), 32, BRANCHES + WAYS)
    agree(served, model(kind), requests)
    agree(served, model(kind), requests[::-1])


@pytest.mark.parametrize("kind", ["nano", "llama", "chained:llama"])
def test_penalties(engine, model, kind):
    served = engine(kind, **FUSED)
    drafts = {"mode": "verified", "draft": "solver"}
    requests = penalised(model(kind), 32, (*BRANCHES, drafts, {"mode": "ntp"}))
    agree(served, model(kind), requests + mixed(model(kind), 12, SLIDING + WAYS))


def test_penalties_of_requests_that_lose_their_cache(engine, model):
    """What was generated before is part of a prompt to vLLM then, not to a penalty."""
    served = engine(
        "nano", num_gpu_blocks_override=10, max_model_len=208, block_size=32, max_num_seqs=8,
        max_num_batched_tokens=60, **FUSED,
    )  # fmt: skip
    ids = [one for one in prompts(model("nano"), 20) if len(one) < 90]
    sampling = {"presence_penalty": 1.5, "frequency_penalty": 0.3}
    ways = [BRANCHES[number % len(BRANCHES)] for number in range(len(ids))]
    pairs = zip(ids, ways, strict=True)
    agree(served, model("nano"), [Request(*one, 100, sampling, ignore_eos=True) for one in pairs])
    assert counter(served, "vllm:num_preemptions") > 10


@pytest.mark.parametrize("kind", ["nano", "llama", "gated:qwen3", "chained:llama"])
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_that_slide(engine, model, kind, caching):
    served = engine(kind, enable_prefix_caching=caching, **FUSED)
    requests = mixed(model(kind), 32, SLIDING + WAYS)
    agree(served, model(kind), requests)
    agree(served, model(kind), requests[::-1])


def test_blocks_that_slide_cut_by_the_budget(engine, model):
    """What is cut short is forwarded again, so that the text is the same."""
    served = engine("nano", max_num_batched_tokens=130, max_num_seqs=8, block_size=32, **FUSED)
    agree(served, model("nano"), mixed(model("nano"), 32, SLIDING))
    # At the least that a budget may be a step has no room for most of the requests.
    served = engine("nano", max_num_batched_tokens=32, max_num_seqs=8, block_size=32, **FUSED)
    agree(served, model("nano"), mixed(model("nano"), 16, SLIDING))
    ids, way = prompts(model("nano"), 8), SLIDING[0]
    warm = [{"temperature": 0.1 * (one + 1), "seed": one} for one in range(8)]
    requests = [Request(one, way, 60, noise) for one, noise in zip(ids, warm, strict=True)]
    agree(served, model("nano"), requests)


def test_blocks_that_slide_end_at_a_stop_token(engine, model):
    """Wherever in a block it stands."""
    way, reference = {"slide": True, "solver": "prefix:0.99"}, model("nano")
    for ids in prompts(reference, 5):
        asked = Request(ids, way, 60, ignore_eos=True)
        whole = asked.reference(reference)
        for place in (0, 1, 2, 5, 9, 17):
            params = asked.params()
            params.stop_token_ids = [whole[place]]
            prompt = [{"prompt_token_ids": list(ids)}]
            [found] = engine("nano", **FUSED).generate(prompt, params, use_tqdm=False)
            assert tuple(found.outputs[0].token_ids) == whole[: whole.index(whole[place]) + 1]


def test_forwards_of_blocks_that_slide(engine, model):
    """Those that setblock.generate counts behind the first token, and one that commits the last."""
    reference, served = model("nano"), engine("nano", **FUSED)
    for ids in prompts(reference, 10):
        way = {"slide": True, "solver": "prefix:0.99"}
        text = Request(ids, way, 60).reference(reference)
        [found] = generate(reference, [(*ids, text[0])], max_new_tokens=59, **way)
        assert steps(served, Request(ids, way, 60)) == found.nfe + 1
        assert steps(served, Request(ids, way, 60)) < len(text) / 3


@pytest.mark.parametrize("kind", ["nano", "chained:llama"])
def test_blocks_that_slide_at_widths_drawn_for_every_step(engine, model, kind, width):
    """The text depends on the widths then, but every answer ends as asked; single tokens are those
    of next-token decoding.
    """
    draw = random.Random(2)
    width(lambda: draw.choice((1, 2, 3, 5, 8, 11, 16, 32, (16, False))))
    served = engine(kind, adaptive="all", **FUSED)
    requests = mixed(model(kind), 32, SLIDING)
    for request, ids in zip(requests, answers(served, requests), strict=True):
        ends = not request.ignore_eos and ids[-1] in model(kind).eos_token_ids
        assert ends or len(ids) == request.max_tokens
    width(lambda: 1)
    ways = [{"mode": "ntp"}] * len(requests)
    single = [
        Request(one.ids, way, one.max_tokens, one.sampling, one.ignore_eos)
        for one, way in zip(requests, ways, strict=True)
    ]
    assert answers(served, requests) == [one.reference(model(kind)) for one in single]


@pytest.mark.parametrize("adaptive", [{}, {"adaptive": "all"}])
def test_blocks_that_slide_and_lose_their_cache(engine, model, width, adaptive):
    """What was revealed and in no cache yet is decoded anew: every answer ends as asked."""
    draw = random.Random(3)
    width(lambda: draw.choice((1, 3, 8, 16, 32, (16, False))))
    served = engine(
        "nano", num_gpu_blocks_override=10, max_model_len=208, block_size=32, max_num_seqs=8,
        max_num_batched_tokens=60, **adaptive, **FUSED,
    )  # fmt: skip
    ids = [one for one in prompts(model("nano"), 20) if len(one) < 90]
    requests = [Request(one, SLIDING[0], 100, ignore_eos=True) for one in ids]
    assert [len(one) for one in answers(served, requests)] == [100] * len(ids)
    assert counter(served, "vllm:num_preemptions") > 10


def test_drafts_from_branches_cut_by_the_budget(engine, model):
    served = engine("nano", max_num_batched_tokens=130, max_num_seqs=8, block_size=32, **FUSED)
    agree(served, model("nano"), mixed(model("nano"), 32, BRANCHES))


def test_forwards_of_drafts_from_branches(engine, model):
    """Never more than one a token, and fewer than of drafts by a solver.
    Copies help a text that repeats itself, as what nano says behind its end does.
    """
    ids = {kind: prompts(model(kind), 10) for kind in ("nano", "llama")}

    def forwards(kind: str, most: int = 60, on: bool = False, **way: Any) -> list[int]:
        asked = {"mode": "verified", **way}
        requests = [Request(one, asked, most, ignore_eos=on) for one in ids[kind]]
        return [steps(engine(kind, **FUSED), one) for one in requests]

    for kind in ids:
        single = forwards(kind, block_size=1, lookup=0)
        whole = [len(Request(one, {"mode": "ntp"}, 60).reference(model(kind))) for one in ids[kind]]
        assert single == whole
        for way in BRANCHES:
            many = forwards(kind, **way)
            assert all(few <= one for few, one in zip(many, single, strict=True)), way
    assert sum(forwards("nano", 200, True, block_size=1, lookup=9)) < 0.8 * 2000
    assert sum(forwards("nano")) < 0.75 * sum(forwards("nano", draft="solver"))
    assert sum(forwards("nano")) < sum(forwards("nano", solver="entropy:inf"))


def test_a_draft_is_made_of_its_own_slots(engine, model, monkeypatch):
    """A chain reads the hidden states that the slots' logits come from, and the token before."""
    drafted, seen = sampler.BlockSampler._drafted, []

    def checked(self, how, logits, at, first, places, seeds):
        network = self.state.model
        assert network.joining is not None
        own = network.compute_logits(network.last_hidden[at.flatten()]).view(logits.shape)
        own[..., self.state.mask_token_id] = -torch.inf
        torch.testing.assert_close(own, logits)
        seen.extend(first.tolist())
        return drafted(self, how, logits, at, first, places, seeds)

    monkeypatch.setattr(sampler.BlockSampler, "_drafted", checked)
    served, reference = engine("chained:llama", **FUSED), model("chained:llama")
    for request in mixed(reference, 8, BRANCHES):
        before = len(seen)
        agree(served, reference, [request])
        # The tokens before the drafts are the answer's, in its order; what ends it may be cut off.
        text = iter(request.reference(reference))
        assert all(token in text for token in seen[before:-1])
    assert len(seen) > 20


@pytest.mark.parametrize("draft", [{"draft": "branches"}, {"solver": "entropy:inf"}])
def test_lenience(engine, model, draft):
    """Every token is at least so likely as it says, beside the likeliest behind the same text."""
    reference, served, lenience = model("nano"), engine("nano", **FUSED), 0.01
    way = {"mode": "verified", "lenience": lenience, **draft}
    requests = [Request(ids, way, 100) for ids in prompts(reference, 40)]
    changed = 0
    for request, ids in zip(requests, answers(served, requests), strict=True):
        tokens = torch.tensor([[*request.ids, *ids]])
        length = tokens.shape[1]
        layout = decoding_layout(np.arange(length)[None], np.array([length]), np.array([length]))
        logits = reference.forward(tokens, layout, reference.new_cache(1, length))[0].float()
        logits = logits[len(request.ids) - 1 : -1]
        logits[:, reference.mask_token_id] = -torch.inf
        beside = logits.gather(1, torch.tensor(ids)[:, None])[:, 0] - logits.amax(dim=1)
        assert (beside.exp() >= lenience * 0.99).all()
        changed += int((beside < -1e-4).sum())
        # What ends an answer is neither put there nor taken away.
        for token in reference.eos_token_ids:
            there = torch.tensor(ids) == token
            assert ((logits.argmax(dim=1) == token) == there).all()
    assert changed > 5
    sums = [sum(steps(served, one) for one in requests[:10])]
    exact = {**way, "lenience": 1}
    requests = [Request(one.ids, exact, 100) for one in requests]
    agree(served, reference, requests)
    assert sums[0] < sum(steps(served, one) for one in requests[:10])


def test_copies_are_exact_whatever_the_lenience(engine, model, monkeypatch):
    drafted = sampler.BlockSampler._drafted

    def doubted(*words):
        tokens, chance, logits = drafted(*words)
        return tokens, 0 * chance, logits  # so that nothing but copies is drafted

    monkeypatch.setattr(sampler.BlockSampler, "_drafted", doubted)
    way = {"mode": "verified", "lookup": 9, "lenience": 1e-6}
    requests = [Request(ids, way, 100, ignore_eos=True) for ids in prompts(model("nano"), 10)]
    served = engine("nano", **FUSED)
    agree(served, model("nano"), requests)
    assert sum(steps(served, one) for one in requests) < 900


def test_what_is_verified_is_read_before_anything_new_is_put_there(engine, model, monkeypatch):
    """Else a step would wait for its own forward."""
    told, stepped = [], sampler.BlockSampler.__call__
    for name in ("read", "update"):
        plain = getattr(state.HostCopy, name)
        noted = lambda self, name=name, plain=plain: (told.append(name), plain(self))[1]  # noqa: E731
        monkeypatch.setattr(state.HostCopy, name, noted)

    def checked(*words):
        told.clear()
        found = stepped(*words)
        assert told == sorted(told), "reads come first"
        steps_seen.append(tuple(told))
        return found

    steps_seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(sampler.BlockSampler, "__call__", checked)
    served = engine("nano", max_num_batched_tokens=130, max_num_seqs=8, block_size=32, **FUSED)
    agree(served, model("nano"), mixed(model("nano"), 16, BRANCHES + SLIDING))
    assert any({"read", "update"} == set(one) for one in steps_seen)


@pytest.mark.parametrize("adaptive", [{}, {"adaptive": "all"}])
def test_drafts_from_branches_that_lose_their_cache(engine, model, width, adaptive):
    draw = random.Random(3)
    width(lambda: draw.choice((1, 3, 8, 16, 32, (16, False))))
    served = engine(
        "nano", num_gpu_blocks_override=10, max_model_len=208, block_size=32, max_num_seqs=8,
        max_num_batched_tokens=60, **adaptive, **FUSED,
    )  # fmt: skip
    ids = [one for one in prompts(model("nano"), 20) if len(one) < 90]
    ways = [BRANCHES[number % len(BRANCHES)] for number in range(len(ids))]
    requests = [Request(*one, 100, ignore_eos=True) for one in zip(ids, ways, strict=True)]
    agree(served, model("nano"), requests)
    assert counter(served, "vllm:num_preemptions") > 10
