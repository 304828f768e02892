"""The cost of a forward: the paper's printed tables, and what its true dimensions say."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from conftest import copied, gated_adapter

from setblock.loading import load
from setblock.machines import (
    DEVICES,
    MODELS,
    SHEETS,
    device,
    device_of,
    dimensions_of,
    find_model,
)
from setblock.roofline import (
    ACCEPTANCE,
    DISPATCH_S,
    HITS,
    PAPER,
    PAPER_H100,
    Device,
    Dimensions,
    Experts,
    best_spending,
    driven_s,
    expected_tokens,
    fitted_acceptance,
    forward_s,
    speedup,
    tables,
    worth,
)

LLAMA_8B = MODELS["llama-3.1-8b"]

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
        forward_s(LLAMA_8B, device(name), 512) / forward_s(LLAMA_8B, device(name), 1)
        for name in ("h100", "h200")
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
    halves = Device("", 1e9, 1e9, 10.0, 2.0, 0.5, bytes_per_cached=9.0)
    assert forward_s(layer, halves, queries=2) == 3 * (400 + 30) / 10


def test_attention_reads_the_cache() -> None:
    """Two rows of 3 queries behind 5 tokens: queries and outputs of width 4, keys of 2."""
    attention = Dimensions(7, (), attention=4, cache=2)
    moving = Device("", 1e9, 1e9, bandwidth=10.0)
    expected = 7 * (2 * 6 * 4 + 2 * 2 * 5 * 2) / 10
    assert forward_s(attention, moving, 3, batch=2, cached=5) == pytest.approx(expected)
    moving = Device("", 1e9, 1e9, 10.0, bytes_per_weight=9.0, bytes_per_cached=0.5)
    expected = 7 * (2 * 6 * 4 + 2 * 2 * 5 * 2 / 2) / 10
    assert forward_s(attention, moving, 3, batch=2, cached=5) == pytest.approx(expected)
    computing = Device("", 1e9, 10.0, bandwidth=1e9)
    expected = 7 * 4 * 6 * 5 * 4 / 10
    assert forward_s(attention, computing, 3, batch=2, cached=5) == pytest.approx(expected)


def test_tables_hold_every_cell() -> None:
    cells = tables(PAPER, PAPER_H100, [1, 8], [16, 1024], [4, 8, 16], [2, 4])
    assert len(cells["table3"]) == 2 * 2 * 3
    assert len(cells["table4"]) == 2 * 2 * 2 * 2, "blocks of 4 have no line in table 4"
    [cell] = [
        cell
        for cell in cells["table4"]
        if (cell["batch"], cell["kv"], cell["block_size"], cell["nfe_speedup"]) == (8, 16, 16, 4)
    ]
    assert cell["value"] == pytest.approx(3.857, abs=1e-3)


def test_types_of_weights_and_cache() -> None:
    narrow, wide = device("h100", "fp8", "fp8"), device("h100")
    assert narrow.linear_flops == SHEETS["h100"].fp8
    assert wide.linear_flops == wide.attention_flops == narrow.attention_flops
    assert (wide.bytes_per_weight, wide.bytes_per_value, wide.bytes_per_cached) == (2, 2, 2)
    mixed = device("l4", "int4", "fp8")
    assert (mixed.bytes_per_weight, mixed.bytes_per_value, mixed.bytes_per_cached) == (0.5, 2, 1)
    assert mixed.linear_flops == SHEETS["l4"].bf16, "int4 weights are widened"
    assert device("a100", "fp8").linear_flops == SHEETS["a100"].bf16, "it has no FP8 arithmetic"
    assert device("h100-paper") == PAPER_H100


@pytest.mark.parametrize(("kind", "size"), [("fp32", 4), ("bf16", 2)])
def test_this_machine_is_measured_once(kind, size) -> None:
    here = device("cpu", kind, kind)
    assert here is device("cpu", kind, kind)
    assert here is device("cpu", kind) is device("cpu", cache=kind)
    assert device("cpu") is device("cpu", "fp32"), "what a CPU computes in unless told otherwise"
    assert 1e8 < here.linear_flops < 1e15
    assert 1e8 < here.bandwidth < 1e14
    assert here.bytes_per_weight == here.bytes_per_cached == size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("h300",), "device must be one of h100-paper, h100, .*, cpu, got 'h300'"),
        (("h100", "fp4"), "weights must be one of fp8, bf16, int4, fp32, got 'fp4'"),
        (("h100", "bf16", "x"), "cache must be one of fp8, bf16, int4, fp32, got 'x'"),
        (("h100", "fp32"), "fp32 are for device cpu, got device 'h100'"),
        (("cpu", "fp8", "fp8"), "in bf16 or in fp32, got fp8 and fp8"),
        (("h100-paper", "bf16"), "device h100-paper has fp8 weights and cache, got bf16"),
    ],
)
def test_wrong_machines(words, message) -> None:
    with pytest.raises(ValueError, match=message):
        device(*words)


def test_models_are_found_by_name_and_by_folder(checkpoint) -> None:
    assert find_model("paper") == PAPER
    folder = checkpoint("qwen3")
    assert find_model(str(folder)) == dimensions_of(transformers.AutoConfig.from_pretrained(folder))
    with pytest.raises(ValueError, match=r"no model 'nowhere': not one of llama-3\.1-8b, "):
        find_model("nowhere")
    assert find_model("smollm2") == find_model("smollm2-base") == MODELS["smollm2-135m"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_costs_what_its_base_does(checkpoint, tmp_path) -> None:
    base = load(checkpoint("llama", mask_token="<mask>"))
    gated_adapter(base, tmp_path / "adapter")
    assert find_model(str(tmp_path / "adapter")) == find_model(base.name)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None}, {"intermediate_size": "x"}, {"num_attention_heads": 0},
        {"num_hidden_layers": -2}, {"vocab_size": 0},
    ],
)  # fmt: skip
def test_a_damaged_configuration_is_no_model(checkpoint, tmp_path, changes) -> None:
    folder = copied(checkpoint("llama"), tmp_path / "damaged", "config.json", **changes)
    with pytest.raises(ValueError, match=f"no model '{folder}'"):
        find_model(str(folder))


def test_a_mixture_of_experts_by_its_configuration(checkpoint, tmp_path) -> None:
    found = find_model(str(checkpoint("mixtral")))
    assert found.experts == Experts(4, 2, ((32, 48), (32, 48), (48, 32)))
    assert found.linears[4:] == ((32, 4),), "the router alone: all feed-forward layers are experts"
    shared = transformers.Qwen2MoeConfig(
        hidden_size=32, num_attention_heads=4, moe_intermediate_size=8, num_experts=6,
        num_experts_per_tok=3, shared_expert_intermediate_size=24,
    )  # fmt: skip
    found = dimensions_of(shared)
    assert found.experts == Experts(6, 3, ((32, 8), (32, 8), (8, 32)))
    assert found.linears[4:] == ((32, 24), (32, 24), (24, 32), (32, 6))
    latent = transformers.DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, moe_intermediate_size=8, n_routed_experts=6,
        num_experts_per_tok=3, n_shared_experts=2,
    )  # fmt: skip
    assert dimensions_of(latent).linears[4:] == ((32, 16), (32, 16), (16, 32), (32, 6))
    changed = {"num_experts_per_tok": 0}
    unsaid = copied(checkpoint("mixtral"), tmp_path / "unsaid", "config.json", **changed)
    with pytest.raises(ValueError, match="a mixture of experts must have one of num_experts_per_t"):
        find_model(str(unsaid))


def test_how_many_experts_tokens_meet() -> None:
    """Against every way in which so many tokens can choose."""
    experts = Experts(count=4, active=2, linears=())
    for tokens in (1, 2, 3):
        pairs = list(itertools.combinations(range(experts.count), experts.active))
        ways = list(itertools.product(pairs, repeat=tokens))
        met = [len(set(itertools.chain(*way))) for way in ways]
        assert experts.met(tokens) == pytest.approx(sum(met) / len(ways))


def test_a_forward_reads_the_experts_that_its_tokens_meet() -> None:
    """Bound by bytes, as few tokens on a GPU are, and with all experts met as one wide layer."""
    one, wide = ((64, 32),), ((64, 32 * 8),)
    slow = Device("slow", 1e30, 1e30, 1.0, bytes_per_value=0.0, bytes_per_cached=0.0)
    mixture = Dimensions(1, (), 0, 0, experts=Experts(8, 2, one))
    assert forward_s(mixture, slow, 1) == pytest.approx(2 * 64 * 32)
    assert forward_s(mixture, slow, 2) == pytest.approx((2 + 2 * 6 / 8) * 64 * 32)
    dense = Dimensions(1, wide, 0, 0)
    assert forward_s(mixture, slow, 1000) == pytest.approx(forward_s(dense, slow, 1))
    # Bound by flops, a token costs as many layers as it goes through.
    quick = Device("quick", 1.0, 1.0, 1e30)
    assert forward_s(mixture, quick, 5) == pytest.approx(5 * 2 * 2 * 64 * 32)


@pytest.mark.parametrize("name", sorted(set(DEVICES) - {"cpu"}))
def test_large_models_pay_on_every_gpu_at_batch_1(name) -> None:
    for model in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b"):
        assert 3.8 < speedup(MODELS[model], device(name), 16, 4, 1, 1024) < 4


# ------------------------------------------------------------------ how much to draft


def test_spending_where_query_tokens_cost_nothing() -> None:
    """Whole blocks, a branch behind every length, all the seeds."""
    free = Device("", 1e30, 1e30, bandwidth=1.0, bytes_per_value=0.0)
    best = best_spending(Dimensions(1, ((4096, 4096),), 1, 1), free, 8)
    assert (best.block_size, best.branches, best.seeds) == (8, 8, max(HITS))
    assert best.tokens_per_forward == expected_tokens(8, 8, max(HITS), ACCEPTANCE)[0]


def test_spending_where_each_query_token_costs_as_much_as_a_forward() -> None:
    slow = Device("", 1.0, 1.0, bandwidth=1e30)
    layer = Dimensions(1, ((8, 8),), 0, 0)
    best = best_spending(layer, slow, 16)
    assert (best.block_size, best.tokens_per_forward) == (1, 1.0), "drafting would never pay"
    best = best_spending(layer, slow, 16, fixed_size=True, one_forward=True)
    assert (best.block_size, best.branches, best.seeds) == (16, 1, 0), "all but what is given"
    best = best_spending(layer, slow, 16, fixed_size=True)
    assert (best.block_size, best.branches) == (16, 0), "no branch costs least"


@pytest.mark.parametrize("given", [{"branches": 3}, {"seeds": 2}, {"branches": 40, "seeds": 0}])
def test_spending_keeps_what_is_given(given) -> None:
    best = best_spending(LLAMA_8B, device("h200"), 8, **given)
    assert best.branches == min(given.get("branches", best.branches), best.block_size)
    assert best.seeds == given.get("seeds", best.seeds)
    assert best.block_size > 1


@pytest.mark.parametrize("given", [{"branches": 2}, {"seeds": 1}, {"one_forward": True}, {}])
def test_a_checkpoint_with_blocks_of_one(given) -> None:
    assert best_spending(LLAMA_8B, device("h100"), 1, **given).block_size == 1


def test_two_forwards_a_cycle_where_query_tokens_are_dear() -> None:
    """A large batch computes: the form with the fewest query tokens wins, if it is allowed."""
    machine = device("h100")
    best = best_spending(LLAMA_8B, machine, 16, 64, 16, 0.95)
    assert best.branches == 0
    chances = [0.95**n * (0.05 if n < best.block_size - 1 else 1) for n in range(best.block_size)]
    tokens = 1 + sum(n * chance for n, chance in enumerate(chances))
    assert best.tokens_per_forward == pytest.approx(tokens / 2)
    drafts = 2 * (DISPATCH_S * 32 + forward_s(LLAMA_8B, machine, best.block_size, 64, 16))
    assert best.seconds_per_token == pytest.approx(drafts / tokens)
    held = best_spending(LLAMA_8B, machine, 16, 64, 16, 0.95, one_forward=True)
    assert held.branches > 0
    assert held.seconds_per_token > 1.1 * best.seconds_per_token
    assert best_spending(LLAMA_8B, machine, 16, 64, 16, 0.95, seeds=0).branches > 0
    assert best_spending(LLAMA_8B, machine, 16).branches > 0, "one row has query tokens to spare"
    close = best_spending(LLAMA_8B, machine, 16, 64, 16)
    assert close.branches > 0, "less than a tenth is not worth the bound on forwards"


def test_copies_alone_beside_no_drafts() -> None:
    """Without pairs a batch that computes is decoded token by token."""
    middling = Device("", 1e11, 1e11, 2e10, 4.0, 4.0, 4.0, overlapping=False)
    small = MODELS["smollm2-135m"]
    assert best_spending(small, middling, 8, 1, pairs=False).branches == 1
    assert best_spending(small, middling, 8, 8, pairs=False).block_size == 1
    machine = device("h100")
    assert best_spending(LLAMA_8B, machine, 16, 64, 16, 0.95, pairs=False).branches > 0


def test_a_token_has_to_be_surer_in_a_batch_that_computes() -> None:
    """By what a second token in each row adds to a forward, as a part of it."""
    middling = Device("", 1e11, 1e11, 2e10, 4.0, 4.0, 4.0, overlapping=False)
    small = MODELS["smollm2-135m"]
    chances = [worth(small, middling, rows) for rows in (1, 2, 4, 8, 16)]
    assert chances == pytest.approx([0.09, 0.16, 0.27, 0.42, 0.58], abs=0.01)
    one, two = (driven_s(small, middling, count, 4, 512, DISPATCH_S) for count in (1, 2))
    assert one * (1 + worth(small, middling, 4) / 1.3) == pytest.approx(two)
    assert worth(small, middling, 4, dispatch_s=0.0) > worth(small, middling, 4)
    chances = [worth(LLAMA_8B, device("h200"), rows) for rows in (1, 16, 512)]
    assert chances[0] < chances[1] < 0.07
    assert chances[2] > 0.2


def test_additions_of_a_gated_adapter_are_weighed() -> None:
    """Where they take as long as the layers, masks do not pay; nothing else is any dearer."""
    middling = Device("", 1e11, 1e11, 2e10, 4.0, 4.0, 4.0, overlapping=False)
    small = MODELS["smollm2-135m"]
    free, dear = (
        best_spending(small, middling, 8, pairs=pairs, additions_s=seconds)
        for pairs, seconds in ((False, 0.0), (True, 2e-3))
    )
    assert free.block_size > 1
    assert dear == best_spending(small, middling, 1)
    held: Any = {"fixed_size": True, "branches": 1, "seeds": 0}
    plain = best_spending(small, middling, 4, **held)
    more = best_spending(small, middling, 4, additions_s=1e-3, **held)
    _, drafted = expected_tokens(4, 1, 0, ACCEPTANCE)
    added = (more.seconds_per_token - plain.seconds_per_token) * plain.tokens_per_forward
    assert added == pytest.approx(drafted * 1e-3 * small.layers)


def test_a_better_drafter_gets_longer_blocks_and_a_larger_batch_shorter_ones() -> None:
    machine = device("h100")
    good, bad = (
        best_spending(LLAMA_8B, machine, 16, acceptance=share).block_size for share in (0.95, 0.5)
    )
    assert good > bad
    few, many = (best_spending(LLAMA_8B, machine, 16, batch).block_size for batch in (1, 64))
    assert few > many


@pytest.mark.parametrize(
    ("branches", "seeds", "rate"),
    [(1, 0, 0.8), (1, 0, 0.7), (2, 1, 0.8), (5, 4, 0.9), (5, 0, 0.6), (3, 2, 0.5)],
)
def test_expected_tokens_are_those_of_a_simulation(branches, seeds, rate) -> None:
    """Drafts of 4 more tokens, each accepted if those before it were; cycles without a draft."""
    rng, size, forwards = random.Random(0), 5, 100_000
    rates = {"seen": rate, "blind": max(0.0, 1 - 1.45 * (1 - rate))}

    def covered(kind: str) -> list[int]:
        """The likeliest numbers of accepted tokens of such a draft."""
        right = rates[kind]
        likely = {n: right**n * (1 - right) for n in range(size - 1)}
        likely[size - 1] = right ** (size - 1)
        return sorted(likely, key=lambda n: -likely[n])[:branches]

    behind = {kind: covered(kind) for kind in rates}
    tokens, drafted, kind = 0, 0, "none"
    for _ in range(forwards):
        accepted = 0
        while kind != "none" and accepted < size - 1 and rng.random() < rates[kind]:
            accepted += 1
        tokens, drafted = tokens + accepted + 1, drafted + (kind != "none")
        if kind == "none":
            kind = "blind"
        elif accepted not in behind[kind]:
            kind = "none"
        else:
            guessed = accepted < size - 1 and rng.random() < HITS[seeds]
            kind = "seen" if guessed else "blind"
    expected = expected_tokens(size, branches, seeds, rate)
    assert expected == pytest.approx((tokens / forwards, drafted / forwards), rel=0.01)


@pytest.mark.parametrize("spent", [(3, 1, 0), (6, 1, 0), (6, 2, 0), (16, 3, 0)])
def test_a_better_drafter_never_yields_less(spent) -> None:
    """Where other branches become the likeliest as well, so that what is measured has one fit.

    With seeds it may, by a percent: the branch behind a draft accepted to its end has none.
    """
    found = [expected_tokens(*spent, rate / 500)[0] for rate in range(1, 500)]
    assert found == sorted(found)


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.97])
@pytest.mark.parametrize("spent", [(16, 16, 0), (8, 2, 2)])
def test_acceptance_is_found_again(spent, rate) -> None:
    size, branches, seeds = spent
    tokens, _ = expected_tokens(size, branches, seeds, rate)
    for measured, found in ((tokens, rate), (99.0, 0.999)):
        fitted = fitted_acceptance(size, branches, seeds, measured)
        assert fitted == pytest.approx(found, abs=1e-6)
    none = fitted_acceptance(size, branches, seeds, 1.0)
    assert expected_tokens(size, branches, seeds, none)[0] == pytest.approx(1, abs=1e-2)


def test_the_machine_of_a_model(monkeypatch) -> None:
    """Known GPUs by whole words of their names; a CPU by a fixed sheet, so that runs repeat."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    cpu = device_of(torch.device("cpu"), torch.float32)
    assert cpu == device_of(torch.device("cpu"), torch.float32)
    assert cpu.linear_flops == 1.3e11
    for has_tiles, flops in ((False, 2.6e11), (True, 5e11)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has_tiles: has)
        assert device_of(torch.device("cpu"), torch.float32) == cpu
        assert device_of(torch.device("cpu"), torch.bfloat16).linear_flops == flops
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 1)
        assert device_of(torch.device("cpu"), torch.float32).linear_flops == 0.65e11
    place = torch.device("cuda")
    measured = Device("measured", 1.0, 1.0, 1.0)
    monkeypatch.setattr("setblock.machines._measured", lambda place, dtype: measured)
    for said, expected in (
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("AMD Instinct MI300X", "mi300x"), ("NVIDIA GH200 480GB", "measured"),
        ("NVIDIA L40S", "measured"), ("NVIDIA H100 PCIe", "measured"), ("Tesla T4", "measured"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, said=said: said)
        assert device_of(place, torch.bfloat16).name == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_of(place, torch.float32) == measured, "the sheet has no float32 matrix rate"


def test_a_cpu_moves_and_computes_one_after_the_other() -> None:
    cpu, model = device_of(torch.device("cpu"), torch.float32), MODELS["smollm2-135m"]
    whole, moving, computing = (
        forward_s(model, replace(cpu, **without), 6, cached=128)
        for without in (
            {},
            {"linear_flops": math.inf, "attention_flops": math.inf},
            {"bandwidth": math.inf},
        )
    )
    assert whole == pytest.approx(moving + computing)
    overlapping = forward_s(model, replace(cpu, overlapping=True), 6, cached=128)
    assert max(moving, computing) <= overlapping < whole
    two_cores = replace(cpu, linear_flops=1e11, attention_flops=1e11)
    best = best_spending(model, two_cores, 6, acceptance=0.71)
    assert (best.block_size, best.branches, best.seeds) == (3, 1, 0), "as the clock says, too"
