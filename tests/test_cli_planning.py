"""The commands that predict: roofline and plan."""

import pytest

from setblock.cli import common

# roofline


def test_roofline_of_the_paper(run):
    answer = run("roofline", "--paper", "--json").json
    assert answer["model"] == "paper"
    assert {cell["kv"] for cell in answer["table3"]} == {2**n for n in range(4, 23)}
    assert {cell["batch"] for cell in answer["table4"]} == {1, 4, 8, 16}
    for table, place, value in (
        ("table3", {"batch": 16, "kv": 16, "block_size": 64}, 3.799),
        ("table4", {"batch": 8, "kv": 16, "block_size": 32, "nfe_speedup": 8}, 6.294),
    ):
        [cell] = [cell for cell in answer[table] if place.items() <= cell.items()]
        assert cell["value"] == pytest.approx(value, abs=1e-3)


def test_roofline_of_another_model_and_machine(run):
    words = ["roofline", "qwen3-8b", "--device", "l4", "--weights", "int4", "--cache", "fp8"]
    words += ["--batch", "2", "--kv", "100", "--block-size", "16", "--nfe-speedup", "3"]
    answer = run(*words, "--json").json
    assert (answer["model"], answer["device"]["name"]) == ("qwen3-8b", "l4")
    assert answer["device"]["bytes_per_weight"] == 0.5
    assert (len(answer["table3"]), len(answer["table4"])) == (1, 1)
    assert "is more than a block of 16 holds" in run(*words, "--nfe-speedup", "17").error
    narrow = run("roofline", "--block-size", "4", "--nfe-speedup", "2").error
    assert narrow == "--nfe-speedup is for blocks of at least 8, got blocks of [4]"
    assert "Wall-clock speed-up" not in run("roofline", "--block-size", "4").out
    twice = [*words, "--batch", "2", "--kv", "100", "--block-size", "16", "--nfe-speedup", "3"]
    assert run(*twice, "--json").json == answer, "once each"
    shown = run(*words).out
    assert f"{answer['table4'][0]['value']:.3f}" in shown
    assert "are left out" not in shown
    assert "blocks under 8 are left out" in run("roofline", "--nfe-speedup", "2").out
    assert "qwen3-8b on l4" in shown


def test_the_checkpoint_s_own_acceptance_is_assumed(run, checkpoint):
    folder = checkpoint("llama", settings={"trained": True, "acceptance": 0.9})
    for model, acceptance, whose in (
        (folder, 0.9, f"0.9 of the drafted tokens accepted ({folder}'s own; --acceptance)"),
        ("llama-3.1-8b", 0.8, "0.8 of the drafted tokens accepted (--acceptance)"),
    ):
        words = ["plan", model, "--device", "h100"]
        assert run(*words, "--json").json["assumptions"]["acceptance"] == acceptance
        assert whose in " ".join(run(*words).out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "toaster"], "device must be one of"),
        (["--weights", "fp1"], "weights must be one of"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--kv", "-1"], "--kv must be at least 1, got -1"),
        (["nowhere"], "no model 'nowhere'"),
        (["--paper", "--device", "l4"], "--paper has its own model and machine; leave out --dev"),
        (["qwen3-8b", "--paper", "--cache", "fp8"], "leave out MODEL and --cache"),
    ],
)
def test_wrong_words_of_roofline(run, words, message):
    assert message in run("roofline", *words).error


def test_a_narrow_terminal_has_whole_tables(run, monkeypatch):
    words = ("plan", "llama-3.1-8b", "--device", "h200", "--batch", "1")
    monkeypatch.setattr(common.out, "width", 80)
    table = run(*words).out.partition("└")[0]
    assert "tokens per" in table
    for columns in (40, 1):
        monkeypatch.setattr(common.out, "width", columns)
        assert run(*words).out.startswith(table)
