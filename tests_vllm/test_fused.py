"""A block's commit and the next one's first forward in one: the same tokens, fewer forwards."""

from typing import Any

import pytest
from test_engine import Request, agree, answers, mixed, prompts

from setblock.generation import generate

FUSED = {"fused": True}


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
    for way in ({"mode": "verified"}, {"mode": "ntp"}):
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
    requests = [Request(ids, {"mode": "verified"}, 60) for ids in prompts(model("nano"), 10)]
    apart = [steps(engine("nano", async_scheduling=False), one) for one in requests]
    fused = [steps(engine("nano", **FUSED), one) for one in requests]
    assert sum(fused) < sum(apart)


def test_with_widths_that_change(engine, model):
    served = engine("nano", adaptive=True, **FUSED)
    requests = mixed(model("nano"), 32)
    requests = [one for one in requests if one.way.get("mode") in ("verified", "ntp")]
    for _ in range(3):
        assert answers(served, requests) == [one.reference(model("nano")) for one in requests]
