"""Kernels that torch.compile makes: the same tokens. In processes without run-time type checks."""

import json
import subprocess
import sys

import pytest
from conftest import copied, gated_adapter

from setblock.loading import load
from setblock.names import ModelError

DECODE = """
import json, sys
import setblock
from setblock import graphs
from setblock.packed import SMALLEST
SMALLEST.update(dict.fromkeys(SMALLEST, 0))  # the layers of a small model too
folder, prompts, words, pack, layered = json.load(sys.stdin)
if layered:  # as on a GPU
    graphs.on_cuda = lambda network: True
ways = [{"mode": "ntp"}, {"mode": "sbd"}, {"mode": "verified", "branches": 2},
    {"mode": "verified", "branches": 1, "lookup": 3}]  # copies alone shut an adapter's gate
for compile, pack in ((False, False), (True, pack)):
    how = compile and "kernels"
    model = setblock.load(folder, dtype="float32", device="cpu", compile=how, pack=pack)
    for way in ways:
        found = setblock.generate(model, prompts, block_size=4, max_new_tokens=12, **way, **words)
        print(json.dumps([[one.token_ids, one.nfe] for one in found]))
from torch._dynamo.utils import counters
print(json.dumps([counters["stats"]["unique_graphs"], len(counters["graph_break"])]))
"""


TWO = """
import json, sys
import setblock
from setblock import kernels as module
asked, kept = [], []
def counted(guards, filter=module.looked_at_again):
    asked.append(len(guards))
    kept.append(filter(guards))
    return kept[-1]
module.looked_at_again = counted
def said(model):
    ways = {"mode": "verified", "block_size": 4, "branches": 1, "ignore_eos": True}
    return setblock.generate(model, [[5, 9, 30]], max_new_tokens=12, **ways)[0].token_ids
models = [setblock.load(folder, dtype="float32", device="cpu") for folder in json.load(sys.stdin)]
print(json.dumps([said(model) for model in models]))
for model in models:
    model.compile()
print(json.dumps([said(model) for model in models]))
print(json.dumps([len(asked), sum(asked), sum(map(sum, kept))]))
"""


BARE = """
import json, sys
import setblock
from setblock.benchmark import compare, forward_costs
from setblock.contenders import contenders
from setblock.profiling import profiled
from torch._dynamo.utils import counters
model = setblock.load(json.load(sys.stdin), dtype="float32", device="cpu", compile=True)
running = contenders(1, block_sizes=[4], modes=["verified"], transformers=False)
for run in running.values():
    run(model, [[5, 9, 30]], 12)
kinds = [counters["stats"]["unique_graphs"]]
lines = list(compare(model, [[5, 9, 30]], 1, 12, 1, running))
assert len(list(forward_costs(model, [16], [4, 8], 1, 1))) == 3
kinds.append(counters["stats"]["unique_graphs"])
profile = profiled(model, [[5, 9, 30]], 1, mode="verified", block_size=4, max_new_tokens=12)
print(json.dumps([kinds, [line["ceiling"] for line in lines], profile["shares"]["compiled"]]))
"""


def test_bare_forwards_run_in_the_kernels_of_decoding(checkpoint):
    told = json.dumps(str(checkpoint("llama")))
    done = subprocess.run([sys.executable, "-c", BARE], input=told, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [before, after], ceilings, profiled = json.loads(done.stdout.splitlines()[-1])
    assert before == after > 1
    assert all(ceilings)
    assert profiled > 0


def test_two_models_that_differ_in_a_function(checkpoint, tmp_path):
    """The same layers, sizes and weights: neither's kernels are taken for the other's."""
    other = copied(checkpoint("llama"), tmp_path / "other", "config.json", hidden_act="relu")
    told = json.dumps([str(checkpoint("llama")), str(other)])
    done = subprocess.run([sys.executable, "-c", TWO], input=told, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, compiled, counts = map(json.loads, done.stdout.splitlines())
    assert plain == compiled
    assert plain[0] != plain[1]
    kinds, asked, kept = counts
    assert kinds >= 2
    assert 0 < kept < asked / 2


# pack: None where that is possible. layered: kernels of one layer for all, as on a GPU.
@pytest.mark.parametrize(
    ("kind", "pack", "adapter", "layered"),
    [
        ("qwen3-window", False, False, False),
        ("llama", None, True, False),
        ("gemma3", False, False, True),
        ("llama", False, True, True),
    ],
)
# peft asks for it on every wrap.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_tokens_are_the_same(checkpoint, tmp_path, kind, pack, adapter, layered):
    prompts, words = [[5, 9, 30], [7, 7, 12, 40, 8]], {"ignore_eos": True}
    if adapter:
        gated_adapter(load(checkpoint(kind)), tmp_path, chain_width=8)
    folder = str(tmp_path if adapter else checkpoint(kind))
    told = json.dumps([folder, prompts, words, pack, layered])
    done = subprocess.run(
        [sys.executable, "-c", DECODE], input=told, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, counts = done.stdout.splitlines()
    assert len(lines) == 8
    assert lines[:4] == lines[4:]
    assert lines[0] != lines[1]
    graphs, breaks = json.loads(counts)
    assert 1 < graphs < 5, "of one token and of more, of one row and of more, and of a line of rows"
    assert breaks == 0


def test_without_a_compiler(checkpoint, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "none-such")
    with pytest.raises(ModelError, match=r"compile needs a C\+\+ compiler: none of .*none-such"):
        load(checkpoint("llama"), compile=True)
