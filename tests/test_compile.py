"""Kernels that torch.compile makes: the same tokens. In processes without run-time type checks."""

import json
import subprocess
import sys

import pytest

from setblock.loading import load
from setblock.model import ModelError

DECODE = """
import json, sys
import setblock
folder, prompts, words = json.load(sys.stdin)
ways = [{"mode": "ntp"}, {"mode": "sbd"}, {"mode": "verified", "branches": 2}]
for compile in (False, True):
    model = setblock.load(folder, dtype="float32", device="cpu", compile=compile)
    for way in ways:
        found = setblock.generate(model, prompts, block_size=4, max_new_tokens=12, **way, **words)
        print(json.dumps([[one.token_ids, one.nfe] for one in found]))
from torch._dynamo.utils import counters
print(json.dumps([counters["stats"]["unique_graphs"], len(counters["graph_break"])]))
"""


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tokens_are_the_same(checkpoint, kind):
    prompts, words = [[5, 9, 30], [7, 7, 12, 40, 8]], {"ignore_eos": True}
    done = subprocess.run(
        [sys.executable, "-c", DECODE], input=json.dumps([str(checkpoint(kind)), prompts, words]),
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, counts = done.stdout.splitlines()
    assert len(lines) == 6
    assert lines[:3] == lines[3:]
    assert lines[0] != lines[1]
    graphs, breaks = json.loads(counts)
    assert 1 < graphs < 9, "one or more tokens and rows, some or all of the logits"
    assert breaks == 0


def test_without_a_compiler(checkpoint, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "none-such")
    with pytest.raises(ModelError, match=r"compile needs a C\+\+ compiler: none of .*none-such"):
        load(checkpoint("llama"), compile=True)
