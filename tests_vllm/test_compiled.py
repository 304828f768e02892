"""The network in kernels that vLLM has torch.compile make, and replayed as graphs."""

import json
from dataclasses import replace

import captured
import pytest
import torch
from conftest import FAMILIES, _write_adapter
from test_engine import agree, mixed
from test_fused import BRANCHES, FUSED, SLIDING

from setblock.checkpoint import write_settings
from setblock.loading import load

KERNELS = {"cudagraph_mode": "NONE"}
# The same graph of the network, of which no kernels are made, which would take a while.
TRACED = {**KERNELS, "mode": 2, "backend": "eager"}


def shows_blocks(requests, reference):
    """Whether some of these answers hang on masks, as those of mode verified do not."""
    return any(
        one.reference(reference) != replace(one, way={"mode": "ntp"}).reference(reference)
        for one in requests
    )


@pytest.mark.parametrize("kind", ["nano", "gated:qwen3", "chained:llama", "lora:llama"])
def test_kernels(engine, model, kind):
    requests = mixed(model(kind), 32, BRANCHES + SLIDING)
    assert kind == "nano" or shows_blocks(requests, model(kind))
    agree(engine(kind, compiled=KERNELS, **FUSED), model(kind), requests)


@pytest.mark.parametrize("kind", ["llama", "gated:llama", "gated:qwen2", "gated:mistral"])
def test_without_the_next_blocks_begun(engine, model, kind):
    agree(engine(kind, compiled=TRACED), model(kind), mixed(model(kind), 16))


@pytest.mark.parametrize("kind", FAMILIES)
def test_gated_adapters_of_families(engine, model, kind):
    gated = f"gated:{kind}"
    agree(engine(gated, compiled=TRACED), model(gated), mixed(model(gated), 8))


def test_the_base_of_a_gated_adapter_says_what_it_did(engine, model):
    """What the kernels add to a token that is none of a block is nothing at all."""
    [request] = mixed(model("llama"), 1, [{"mode": "ntp"}])
    prompt = {"prompt_token_ids": list(request.ids)}
    params = request.params()
    params.logprobs = 3

    def told(kind):
        [found] = engine(kind, compiled=TRACED).generate([prompt], params, use_tqdm=False)
        [answer] = found.outputs
        return [{token: one.logprob for token, one in place.items()} for place in answer.logprobs]

    assert told("gated:llama") == told("llama")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["nano", "gated:llama"])
def test_what_vllm_warms_up_with_on_a_gpu(engine, model, kind, fused):
    """Requests of its own, of which it forwards more tokens than they are asked to take."""
    served = engine(kind, fused=fused)
    captured.warm_up(served)
    agree(served, model(kind), mixed(model(kind), 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU does of itself")
def test_graphs(engine, folder, monkeypatch, tmp_path):
    """Also by kernels of a cache, which other weights may have, but none of other shapes."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    captured.install(monkeypatch)
    place = folder("gated:llama")
    before, said = {path: path.read_bytes() for path in place.iterdir()}, []

    def loaded() -> bool:
        """Whether the kernels were there."""
        graphs = captured.Graphs
        graphs.pieces = graphs.captured = graphs.replayed = 0
        served = engine("gated:llama", compiled={"cudagraph_mode": "PIECEWISE"}, **FUSED)
        captured.warm_up(served)
        captured.capture(served)
        assert graphs.captured == graphs.pieces * len(captured.SIZES) > 0
        reference = load(str(place), dtype="float32")
        requests = mixed(reference, 16, BRANCHES + SLIDING)
        assert shows_blocks(requests, reference)
        agree(served, reference, requests)
        said.append([one.reference(reference) for one in requests])
        assert graphs.replayed > graphs.captured
        found = captured.runner_of(served).model.model.was_aot_compile_fn_loaded_from_disk
        engine("nano")  # the other is over
        return found

    try:
        assert not loaded()
        for rank, there in ((4, True), (6, False)):
            torch.manual_seed(rank)  # an engine begins at the seed of the first adapter
            _write_adapter(place, folder("llama"), "gated", rank=rank)
            write_settings(place, mask_token_id=3, trained=True, block_size=16)
            assert json.loads((place / "adapter_config.json").read_text())["r"] == rank
            assert loaded() is there
        assert said[0] != said[1] != said[2]
    finally:
        for path, own in before.items():
            path.write_bytes(own)


def test_stock_kernels_are_refused(engine, monkeypatch):
    captured.install(monkeypatch, "NONE")
    with pytest.raises(ValueError, match="no compilation mode 1"):
        engine("nano", compiled={**KERNELS, "mode": 1})


def test_graphs_without_kernels_are_refused(engine, monkeypatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    captured.install(monkeypatch)
    with pytest.raises(ValueError, match="VLLM_USE_BREAKABLE_CUDAGRAPH must be 0, got 1"):
        engine("nano", compiled={"cudagraph_mode": "PIECEWISE"})


def test_graphs_of_whole_forwards_are_refused(engine, monkeypatch):
    captured.install(monkeypatch, "FULL")
    with pytest.raises(ValueError, match="without CUDA graphs of whole forwards"):
        engine("nano", compiled={"cudagraph_mode": "FULL"})
