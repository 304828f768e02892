"""The cost of a forward: the paper's printed tables, and what its true dimensions say."""

import pytest
import transformers

from setblock.roofline import (
    DEVICES,
    LLAMA_8B,
    PAPER,
    PAPER_H100,
    Device,
    Dimensions,
    dimensions_of,
    forward_s,
    speedup,
)

# arXiv:2509.04185 table 3: a forward of k tokens against one of 1, by batch size.
TABLE_3 = {
    1: {2: 1.000, 4: 1.001, 8: 1.002, 16: 1.004, 32: 1.008, 64: 1.015},
    8: {2: 1.002, 4: 1.006, 8: 1.014, 16: 1.029, 32: 1.060, 64: 1.903},
    16: {2: 1.004, 4: 1.012, 8: 1.027, 16: 1.058, 32: 1.899, 64: 3.799},
}
# Table 4: wall-clock speed-up of blocks of 8, 16, 32, 64, by batch size and NFE speed-up.
TABLE_4 = {
    (1, 2): (1.996, 1.992, 1.984, 1.969),
    (1, 4): (3.989, 3.982, 3.966, 3.936),
    (1, 8): (7.971, 7.955, 7.925, 7.864),
    (8, 2): (1.966, 1.936, 1.797, 1.019),
    (8, 4): (3.916, 3.857, 3.431, 1.978),
    (8, 8): (7.773, 7.657, 6.294, 3.736),
}


@pytest.mark.parametrize("batch", TABLE_3)
def test_table_3(batch) -> None:
    one = forward_s(PAPER, PAPER_H100, 1, batch, cached=16)
    found = {k: forward_s(PAPER, PAPER_H100, k, batch, cached=16) / one for k in TABLE_3[batch]}
    assert found == pytest.approx(TABLE_3[batch], abs=6e-4)


@pytest.mark.parametrize(("batch", "fewer"), TABLE_4)
def test_table_4(batch, fewer) -> None:
    found = [speedup(PAPER, PAPER_H100, k, k / fewer, batch, cached=16) for k in (8, 16, 32, 64)]
    assert found == pytest.approx(TABLE_4[batch, fewer], abs=6e-4)


def test_the_true_model_stops_gaining_at_large_batches() -> None:
    gains = [speedup(LLAMA_8B, PAPER_H100, 16, 4, batch, 1024) for batch in (1, 8, 32, 64)]
    assert gains == pytest.approx([3.97, 3.78, 1.9, 1.2], abs=0.04)


def test_more_bandwidth_helps_next_token_decoding_more() -> None:
    """An H200 reads weights faster, so the point where arithmetic costs more comes earlier."""
    slow, fast = (
        forward_s(LLAMA_8B, DEVICES[name], 256) / forward_s(LLAMA_8B, DEVICES[name], 1)
        for name in ("H100", "H200")
    )
    assert fast > slow


def test_a_configuration_has_its_dimensions() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    assert dimensions_of(config) == LLAMA_8B
    narrow = transformers.Qwen3Config(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=5,
    )
    linears = ((8, 32), (8, 16), (8, 16), (32, 8), (8, 12), (8, 12), (12, 8))
    assert dimensions_of(narrow) == Dimensions(2, linears, 32, 16, (8, 5))


def test_an_operation_takes_the_longer_of_computing_and_moving() -> None:
    """One linear layer of 10 x 20: 200 weights; two tokens move 60 values and do 800 flops."""
    layer = Dimensions(3, ((10, 20),), attention=0, cache=0)
    moving = Device("moves slowly", 1e9, 1e9, bandwidth=10.0)
    computing = Device("computes slowly", 10.0, 1e9, bandwidth=1e9)
    assert forward_s(layer, moving, queries=1, batch=2) == 3 * 260 / 10
    assert forward_s(layer, computing, queries=2) == 3 * 800 / 10
    halves = Device("", 1e9, 1e9, 10.0, bytes_per_weight=2.0, bytes_per_value=0.5)
    assert forward_s(layer, halves, queries=2) == 3 * (400 + 30) / 10


def test_attention_reads_the_cache() -> None:
    """Two rows of 3 queries behind 5 tokens: queries and outputs of width 4, keys of 2."""
    attention = Dimensions(7, (), attention=4, cache=2)
    moving = Device("", 1e9, 1e9, bandwidth=10.0)
    expected = 7 * (2 * 6 * 4 + 2 * 2 * 5 * 2) / 10
    assert forward_s(attention, moving, 3, batch=2, cached=5) == pytest.approx(expected)
    computing = Device("", 1e9, 10.0, bandwidth=1e9)
    expected = 7 * 4 * 6 * 5 * 4 / 10
    assert forward_s(attention, computing, 3, batch=2, cached=5) == pytest.approx(expected)
