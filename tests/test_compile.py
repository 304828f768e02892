"""Kernels that torch.compile makes: the same tokens. In processes without run-time type checks."""

import json
import subprocess
import sys

import pytest
from conftest import copied, gated_adapter

from setblock.loading import load
from setblock.model import ModelError

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

FLEX = """
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from setblock.masks import PADDING, WholeRows, flex_block_mask, training_layout, visible
from setblock.objective import document_places
compiled = torch.compile(flex_attention, dynamic=False)
for lengths in ([[300]], [[140, 20, 90]]):
    position, document = document_places(torch.tensor(lengths), 300)
    layout = training_layout(position, document, 8)
    query, key, value = torch.randn(3, 1, 2, 600, 16)
    dense = visible(layout, layout)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=dense)
    tiles = flex_block_mask(layout, layout)
    torch.testing.assert_close(compiled(query, key, value, block_mask=tiles), expected)
    tiles.kv_num_blocks.zero_()
    assert not torch.allclose(compiled(query, key, value, block_mask=tiles), expected)
    print("same")
position, document = document_places(torch.tensor([[300], [170], [9]]), 300)
layout = training_layout(position, document, 8)
query, key, value = torch.randn(3, 3, 2, 600, 16)
expected = scaled_dot_product_attention(query, key, value, attn_mask=visible(layout, layout))
tiles = flex_block_mask(layout, layout, rows=WholeRows(300, 8))
found = compiled(query, key, value, block_mask=tiles)
real = layout.document != PADDING
torch.testing.assert_close(found.transpose(1, 2)[real], expected.transpose(1, 2)[real])
assert not found.isnan().any()
print("same")
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


def test_flex_attention_visits_the_tiles_that_it_needs():
    """Compiled, it reads no tile that the BlockMask does not list; eager, it asks the rule only."""
    done = subprocess.run([sys.executable, "-c", FLEX], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["same", "same", "same"]


# pack: None where that is possible. layered: kernels of one layer for all, as on a GPU.
@pytest.mark.parametrize(
    ("kind", "pack", "adapter", "layered"),
    [
        ("llama", None, False, False),
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
    assert 1 < graphs < 4, "of one token and of more, of one row and of more, and of both layers"
    assert breaks == 0


ADD = """
import sys
sys.path.insert(0, "tests")
import torch
from test_adapters import adapted
from setblock.gated import FEW, Addition, Gate
layer = adapted().base_model.model.model.layers[0].self_attn.q_proj
for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
    layer.base_layer.to(dtype)
    add = Addition(layer, "default")
    compiled = torch.compile(add.forward, dynamic=True)
    for count in (3, FEW, FEW + 1):
        hidden = torch.randn(1, count, layer.in_features, dtype=dtype)
        hidden[0, 0] = torch.inf
        noisy = torch.arange(count)[None, :, None] > 0
        said = torch.randn(1, count, layer.out_features, dtype=dtype)
        expected = add(said.clone(), hidden, Gate(noisy))
        for told in (noisy, noisy[:, 1:].clone()):  # of all tokens, of the last ones alone
            for run in (compiled, add):
                result = run(said.clone(), hidden, Gate(told))
                assert torch.equal(result[0, 0], said[0, 0]), "a clean token"
                assert not torch.allclose(result[0, 1:], said[0, 1:], atol=0.1)
                torch.testing.assert_close(result, expected, rtol=close, atol=close)
        print("same")
"""


def test_additions_of_a_gated_adapter_are_the_same():
    done = subprocess.run([sys.executable, "-c", ADD], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["same"] * 6


TRAIN = """
import json, sys
from pathlib import Path
from setblock.cli import main
folder, rows, method, backend, out = json.load(sys.stdin)
words = ["--data", rows, "--max-steps", "3", "--logging-steps", "1", "--learning-rate", "1e-3",
    "--per-device-train-batch-size", "2", "--method", method, "--bf16", "no", "--seed", "3"]
losses = []
for how in (["no"], ["yes", "--torch-compile-backend", backend]):
    sys.argv = ["setblock", "train", "--model", folder, *words, "--torch-compile", *how,
        "--output-dir", out + how[0]]
    main()
    lines = map(json.loads, Path(out + how[0], "log.jsonl").read_text().splitlines())
    losses.append([line["loss"] for line in lines if "loss" in line])
from torch._dynamo.utils import counters
print(json.dumps([*losses, counters["stats"]["unique_graphs"], len(counters["graph_break"])]))
"""


# aot_eager makes the same graphs, and no kernels of them, which takes a while.
@pytest.mark.parametrize(
    ("method", "backend", "kinds"),
    [("full", "aot_eager", 1), ("lora", "aot_eager", 1), ("gated", "inductor", 2)],
)
def test_training_is_the_same(checkpoint, tmp_path, method, backend, kinds):
    """In kernels of one layer for both, made once; a gated adapter has two halves."""
    rows = tmp_path / "rows.jsonl"
    texts = ("a b c d e f", "g h i", "a c e g i k m o", "b d f h")
    rows.write_text("".join(json.dumps({"prompt": "a b", "completion": t}) + "\n" for t in texts))
    folder = checkpoint("llama", mask_token="<mask>")
    told = json.dumps([str(folder), str(rows), method, backend, str(tmp_path / "out")])
    done = subprocess.run([sys.executable, "-c", TRAIN], input=told, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, compiled, *counts = json.loads(done.stdout.splitlines()[-1])
    assert len(plain) == 3
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert counts == [kinds, 0]


def test_without_a_compiler(checkpoint, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "none-such")
    with pytest.raises(ModelError, match=r"compile needs a C\+\+ compiler: none of .*none-such"):
        load(checkpoint("llama"), compile=True)
