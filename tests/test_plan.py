"""What pays where, by arithmetic."""

import json
from dataclasses import asdict

import pytest

from setblock.machines import MODELS, device, find_model
from setblock.plan import (
    LARGEST_BATCH,
    Assumptions,
    beside_measured,
    choices,
    measured_dispatch_s,
    paying_batches,
    right_size,
)
from setblock.roofline import best_spending, forward_s, speedup

LLAMA = MODELS["llama-3.1-8b"]
H100 = device("h100")
RATES = {4: 2.0, 8: 2.5, 16: 3.0, 32: 3.1}
BARE = Assumptions(tokens_per_forward=RATES, acceptance=0.8, cached=1024, dispatch_s=0.0)


def by_mode(lines):
    return {line["mode"]: line for line in lines}


def test_choices_follow_from_the_roofline():
    lines = choices(LLAMA, H100, 4, BARE)
    assert [line["ms_per_token"] for line in lines] == sorted(
        line["ms_per_token"] for line in lines
    )
    found = by_mode(lines)
    one = forward_s(LLAMA, H100, 1, 4, 1024)
    assert found["ntp"]["ms_per_token"] == pytest.approx(1000 * one)
    assert found["ntp"]["speedup"] == 1
    gains = {k: speedup(LLAMA, H100, k, k / rate, 4, 1024) for k, rate in RATES.items()}
    assert found["sbd"]["speedup"] == pytest.approx(max(gains.values()))
    assert gains[found["sbd"]["block_size"]] == max(gains.values())
    spent = best_spending(LLAMA, H100, 32, 4, 1024, 0.8, dispatch_s=0.0)
    assert found["verified"]["block_size"] == spent.block_size
    assert found["verified"]["speedup"] == pytest.approx(one / spent.seconds_per_token)


def test_dispatch_brings_the_speed_up_closer_to_the_tokens_per_forward():
    """A fixed cost of each forward makes wide forwards relatively cheap."""
    one = {**vars(BARE), "tokens_per_forward": {16: 3.0}}
    slow, bare = Assumptions(**{**one, "dispatch_s": 1.0}), Assumptions(**one)
    gain = by_mode(choices(LLAMA, H100, 64, slow))["sbd"]["speedup"]
    assert gain == pytest.approx(3.0, rel=0.05)
    assert gain > by_mode(choices(LLAMA, H100, 64, bare))["sbd"]["speedup"]


def test_the_largest_batch_is_where_the_gain_ends():
    """Behind a long cache there may be none: reading it is what a forward takes."""
    short = Assumptions(**{**vars(BARE), "cached": 16})
    for mode, pays in paying_batches(LLAMA, H100, short).items():
        assert pays is not None
        least, batch = pays
        assert least == 1 <= batch < LARGEST_BATCH
        assert by_mode(choices(LLAMA, H100, batch, short))[mode]["speedup"] > 1
        assert by_mode(choices(LLAMA, H100, 2 * batch, short))[mode]["speedup"] <= 1
    useless = Assumptions(
        tokens_per_forward={16: 1.0}, acceptance=0.001, cached=1024, dispatch_s=0.0
    )
    assert paying_batches(LLAMA, H100, useless) == {"sbd": None, "verified": None}


def test_a_mixture_of_experts_gains_in_batches_alone():
    """Alone, a block's tokens go through ten times as many experts as one token; in a batch most
    are read in any case."""
    mixture = MODELS["qwen3-30b-a3b"]
    for mode, pays in paying_batches(mixture, H100, BARE).items():
        assert pays is not None
        least, most = pays
        assert 1 < least < most
        for batch, gains in ((least // 2, False), (least, True), (most, True)):
            assert (by_mode(choices(mixture, H100, batch, BARE))[mode]["speedup"] > 1) == gains


def test_right_sizing_ranks_models_and_modes():
    lines = right_size(H100, 1, BARE, target_ms=5.0)
    assert {line["model"] for line in lines} == set(MODELS) - {"paper"}
    for line in lines:
        assert line["meets"] == (line["ms_per_token"] <= 5.0)
    meets = {(line["model"], line["mode"]): line["meets"] for line in lines}
    assert meets["smollm2-135m", "ntp"]
    assert not meets["llama-3.1-70b", "ntp"]
    # 16 GB at 3.35 TB/s is 4.8 ms; the 32B model needs fewer forwards to come near.
    assert not meets["qwen3-32b", "ntp"]


def test_the_time_of_dispatch_is_what_the_roofline_does_not_account_for():
    lines = [
        {
            "batch_size": 1,
            "cached": 64,
            "queries": 1,
            "seconds": wall + forward_s(LLAMA, H100, 1, 1, 64),
        }
        for wall in (0.1, 0.2, 3.0)
    ]
    lines += [{"batch_size": 1, "cached": 64, "queries": 16, "seconds": 9.0}]
    assert measured_dispatch_s(LLAMA, H100, lines) == pytest.approx(0.2 / LLAMA.layers)
    assert measured_dispatch_s(LLAMA, H100, lines[3:]) == 0
    assert measured_dispatch_s(LLAMA, H100, [lines[0] | {"seconds": 0.0}]) == 0


def test_predictions_stand_beside_what_was_measured():
    lines = [
        {"batch_size": 2, "cached": 64, "queries": queries, "seconds": 1.0, "ratio": 1.5}
        for queries in (1, 16)
    ]
    one, many = beside_measured(LLAMA, H100, lines, dispatch_s=0.0)
    assert one["predicted_ratio"] == 1
    expected = forward_s(LLAMA, H100, 16, 2, 64)
    assert many["predicted_seconds"] == pytest.approx(expected)
    assert many["predicted_ratio"] == pytest.approx(expected / forward_s(LLAMA, H100, 1, 2, 64))
    assert many["ratio"] == 1.5


WORDS = (
    *("llama-3.1-8b", "--device", "h200", "--weights", "fp8", "--cache", "bf16", "--batch", "2"),
    *("--batch", "8", "--prompt-length", "512", "--block-size", "8", "--block-size", "16"),
    *("--tokens-per-forward", "3", "--tokens-per-forward", "4"),
    *("--acceptance", "0.9", "--dispatch-ms", "0", "--latency", "3"),
)


def test_command(run, tmp_path):
    record = tmp_path / "bench.json"
    forwards = [
        {"batch_size": 1, "cached": 64, "queries": n, "seconds": 0.1, "ratio": n / 10}
        for n in (1, 16)
    ]
    made = {"dimensions": asdict(LLAMA), "machine": {"cuda": "NVIDIA H200"}, "forwards": forwards}
    record.write_text(json.dumps({**made, "forwards": []}))  # interrupted before them
    message = f"--measured {record} holds no timed forwards, as of a benchmark that was interrupted"
    assert run("plan", *WORDS, "--measured", record).error == message
    record.write_text(json.dumps(made))
    other = ("plan", "qwen3-8b", "--measured", record)
    assert "with a model of other dimensions" in run(*other).error
    record.write_text(json.dumps({**made, "machine": {"cuda": None}}))
    assert "was measured on cpu, and --device is h200" in run("plan", *WORDS, *other[2:]).error
    record.write_text(json.dumps(made))
    found = run("plan", *WORDS, "--measured", record, "--json").json
    assert found["device"]["name"] == "h200"
    assert found["assumptions"] == {
        "tokens_per_forward": {"8": 3, "16": 4}, "acceptance": 0.9, "cached": 512, "dispatch_s": 0
    }  # fmt: skip
    assert [
        (line["batch"], line["mode"]) for line in found["choices"] if line["mode"] == "ntp"
    ] == [
        (2, "ntp"),
        (8, "ntp"),
    ]
    assert {line["block_size"] for line in found["choices"] if line["mode"] == "sbd"} <= {8, 16}
    assert found["paying_batches"].keys() == {"sbd", "verified"}
    assert found["right_size"]
    assert found["forwards"][1]["predicted_ratio"] > 0
    text = run("plan", *WORDS, "--measured", record).out
    for word in (
        "the quickest first",
        "assumed, not measured: in mode sbd",
        "0 ms a layer",
        "pays up to a batch of",
        "that of sbd may be another",
        "3 ms per token",
        "predicted",
    ):
        assert word in text
    text = " ".join(
        run("plan", "llama-3.1-8b", "--device", "h200", "--measured", record).out.split()
    )
    assert f"(--acceptance). From {record}: in each forward" in text
    assert "right_size" not in run("plan", "qwen3-8b", "--json").json


def test_a_bundled_model_and_its_own_forwards(run, tmp_path):
    """What a layer costs by itself comes from the record."""
    record = tmp_path / "bench.json"
    lines = [{"batch_size": 1, "cached": 8, "queries": 1, "seconds": 1.0, "ratio": 1.0}]
    made = {"dimensions": asdict(find_model("nano")), "machine": {"cuda": "NVIDIA H100"}}
    record.write_text(json.dumps({**made, "forwards": lines}))
    found = run("plan", "nano", "--measured", record, "--json").json
    assert found["assumptions"]["dispatch_s"] == pytest.approx(1.0 / 5, rel=1e-3)  # five layers
    assert found["forwards"][0]["predicted_seconds"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dispatch-ms", "nan"), "--dispatch-ms must be at least 0, got nan"),
        (("--batch", "0"), "--batch must be at least 1, got 0"),
        (("--block-size", "1"), "--block-size must be at least 2"),
        (("--prompt-length", "0"), "--prompt-length must be at least 1"),
        (("--tokens-per-forward", "0.5"), "--tokens-per-forward must lie in 1..16, the block size"),
        (("--tokens-per-forward", "17"), "--tokens-per-forward must lie in 1..16, the block size"),
        (("--tokens-per-forward", "nan"), "--tokens-per-forward must lie in 1..16, the block size"),
        (("--block-size", "8", "--block-size", "16"), "give it once for each --block-size"),
        (("--acceptance", "1"), "--acceptance must lie between 0 and 1, got 1"),
        (("--dispatch-ms", "-1"), "--dispatch-ms must be at least 0, got -1"),
        (("--latency", "0"), "--latency must be above 0, got 0"),
        (("--measured", "README.md"), "is no record of `setblock benchmark`"),
        (("--device", "abacus"), "device must be one of"),
    ],
)
def test_bad_values(run, words, message):
    assert message in run("plan", "qwen3-8b", *words).error
