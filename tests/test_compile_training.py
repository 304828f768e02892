"""Kernels that torch.compile makes of a training step: the same losses, additions and attention."""

import json
import subprocess
import sys

import pytest

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


def test_flex_attention_visits_the_tiles_that_it_needs():
    """Compiled, it reads no tile that the BlockMask does not list; eager, it asks the rule only."""
    done = subprocess.run([sys.executable, "-c", FLEX], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["same", "same", "same"]


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
    ("method", "backend", "kinds"), [("full", "aot_eager", 1), ("gated", "inductor", 2)]
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
