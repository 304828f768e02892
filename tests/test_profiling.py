"""Shares of a run: to whom an operation belongs, and that watching leaves no trace."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import made

from setblock import cache, packed, profiling, solvers
from setblock.loading import load
from setblock.sampling import Sampler
from setblock.solvers import EntropyBound


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::add"], "other"),
        (["aten::copy_", "cache"], "cache"),
        (["aten::addmm", "aten::linear"], "linears"),
        (["aten::addmm", "aten::linear", "head"], "head"),
        (["aten::mm", "aten::matmul", "solver", "aten::x"], "solver"),
        (["aten::bmm", "aten::scaled_dot_product_attention"], "attention"),
        (["aten::_softmax", "aten::scaled_dot_product_attention"], "attention"),
        (["aten::exp", "solver", "head"], "solver"),
    ],
)
def test_an_operation_belongs_to_the_innermost(names, kind):
    event: Any = None
    for name in reversed(names):
        event = SimpleNamespace(name=name, cpu_parent=event)
    assert profiling._kind_of(event) == kind


def test_kernels_without_an_operation_are_compiled_ones():
    """On a GPU they are found by what the device did, on a CPU by the call of their graph."""

    def event(name, micros, device=0.0, on="CPU"):
        told: Any = {"name": name, "self_cpu_time_total": micros, "cpu_parent": None}
        told |= {"self_device_time_total": device, "device_type": SimpleNamespace(name=on)}
        return SimpleNamespace(**told, is_user_annotation=False)

    launches = [
        event("aten::linear", 3e6, 2e6),
        event("## Call CompiledFxGraph fab ##", 4e6),
        event("Torch-Compiled Region: 0/0", 9e6),  # its own time is Python's
        event("triton_poi_fused_add_0", 0.0, 1e6),
    ]
    spent = profiling._seconds_by_kind(launches, cuda=False)
    assert {kind: spent[kind] for kind in spent if spent[kind]} == {"linears": 3, "compiled": 4}
    kernels = [event(name, 0.0, 2e6, on="CUDA") for name in ("gemm", "triton", "in a graph")]
    marked = event("head", 0.0, 9e6, on="CUDA")
    marked.is_user_annotation = True
    spent = profiling._seconds_by_kind([*launches, *kernels, marked], cuda=True)
    assert {kind: spent[kind] for kind in spent if spent[kind]} == {"linears": 2, "compiled": 4}


@pytest.mark.skipif(
    packed.missing(torch.device("cpu"), torch.float32) is not None, reason="no packed weights here"
)
@pytest.mark.parametrize("intel", [True, False])
def test_packed_layers_have_their_share(checkpoint, monkeypatch, intel):
    """Whoever's kernels they call."""
    if intel and not torch.backends.mkl.is_available():
        pytest.skip("no MKL here")
    monkeypatch.setattr(packed, "intel", lambda: intel)
    monkeypatch.setattr(packed, "SMALLEST", dict.fromkeys(packed.SMALLEST, 0))
    model = load(checkpoint("llama"), dtype="float32", device="cpu", pack=True)
    line = profiling.profiled(model, [[5, 9]], 1, ignore_eos=True, mode="ntp", max_new_tokens=8)
    assert line["shares"]["linears"] > 0
    assert line["shares"]["head"] > 0


def replaceable() -> tuple[Any, ...]:
    """Some of what a profile puts its own in place of, for a while."""
    return cache.PrefixCache.keep, Sampler.pick, EntropyBound.reveal, solvers.entropy_of


def test_shares_of_a_run(checkpoint):
    model = load(checkpoint("llama"), dtype="float32", device="cpu")
    before = replaceable()
    head = model.network.get_output_embeddings().forward
    options: dict[str, Any] = {"mode": "sbd", "block_size": 4, "max_new_tokens": 8}
    line = profiling.profiled(model, [[5, 9, 30], [7, 7]], 2, ignore_eos=True, **options)
    assert (line["n"], line["tokens"]) == (2, 16)
    assert line["wall_s"] > 0
    assert line["overhead"] > 0
    assert line["tokens_per_forward"] == line["tokens"] / line["nfe"]
    assert list(line["shares"]) == [*profiling.KINDS, profiling.REST]
    assert sum(line["shares"].values()) == pytest.approx(1)
    assert all((share > 0) == (kind != "compiled") for kind, share in line["shares"].items())
    assert before == replaceable()
    assert head == model.network.get_output_embeddings().forward


def test_attention_whose_scores_are_written_out_has_its_share(tmp_path):
    model = made("gemma2", tmp_path)
    line = profiling.profiled(model, [[5, 9]], 1, ignore_eos=True, mode="ntp", max_new_tokens=8)
    assert line["shares"]["attention"] > 0
