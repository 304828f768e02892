"""Adapters: folded in, or, gated, acting on blocks alone."""

import pytest
from test_engine import Request, agree, answers, mixed, prompts


@pytest.mark.parametrize(
    "kind",
    ["gated:llama", "gated:qwen2", "gated:qwen3", "gated:mistral", "lora:llama", "lora:qwen3"],
)
def test_32_requests_mixed(engine, model, kind):
    agree(engine(kind), model(kind), mixed(model(kind), 32))


@pytest.mark.parametrize("kind", ["gated:qwen3", "lora:llama"])
def test_with_the_next_blocks_begun(engine, model, kind):
    agree(engine(kind, fused=True), model(kind), mixed(model(kind), 32))


def test_prompts_in_chunks(engine, model):
    served = engine("gated:llama", max_num_batched_tokens=40, max_num_seqs=8)
    agree(served, model("gated:llama"), mixed(model("gated:llama"), 32))


def test_the_text_of_a_gated_adapter_is_its_bases(engine, model):
    ids = prompts(model("llama"), 4)
    say = [Request(one, {"mode": "verified"}) for one in ids]
    theirs = [one.reference(model("llama")) for one in say]
    assert answers(engine("gated:llama"), say) == theirs
    assert answers(engine("lora:llama"), say) != theirs
    sbd = [Request(one, {}) for one in ids]  # its blocks are not
    assert answers(engine("gated:llama"), sbd) != [one.reference(model("llama")) for one in sbd]
