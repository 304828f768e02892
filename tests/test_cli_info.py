"""What commands say of a model: info, its own defaults, and that it was never trained."""

import pytest
from conftest import SHORT, api

from setblock import loading
from setblock.adapters import attach
from setblock.checkpoint import write_settings


@pytest.mark.parametrize("command", ["generate", "demo", "evaluate"])
@pytest.mark.usefixtures("short_demo")
def test_an_untrained_model_warns_once_and_goes_on(run, untrained, command, caplog):
    words = {
        "generate": [untrained, "--prompt", "hi", "--mode", "sbd", *SHORT],
        "demo": ["--model", untrained, "--prompt", "hi"],
        "evaluate": [untrained, "--task", "lists", "--limit", "1", *SHORT],
    }[command]
    result = run(command, *words, "--json")
    assert isinstance(result.json, dict)
    assert result.err.startswith(f"warning: {untrained} was never trained for set block decoding")
    assert result.err.count("\n") == 1
    assert not caplog.messages, "which Python is told"


def test_an_untrained_model_decodes_token_by_token_by_default(run, untrained):
    words = [untrained, "--prompt", "hi", "--json", *SHORT]
    told = run("generate", *words)
    assert told.json["mode"] == "ntp"
    assert told.json["token_ids"] == run("generate", *words, "--mode", "ntp").json["token_ids"]
    assert told.err.startswith(f"{untrained} was never trained for set block decoding: token by to")
    assert told.err.count("\n") == 1
    answer = api(untrained, "hi", max_new_tokens=8)
    assert list(answer.token_ids) == told.json["token_ids"]


def test_no_warning_where_it_does_not_matter(run, untrained, trained):
    words = ["--prompt", "hi", "--json", *SHORT]
    assert run("generate", untrained, "--mode", "ntp", *words).err == ""
    copies = ["--mode", "verified", "--block-size", "1", "--lookup", "4"]
    assert run("generate", untrained, *copies, *words).err == ""
    assert run("generate", trained, *words).err == ""
    words = ["--task", "lists", "--limit", "1", "--mode", "ntp", "--json", *SHORT]
    assert run("evaluate", untrained, *words).err == ""


def test_defaults_come_from_the_checkpoint(run, checkpoint):
    settings = {
        "mode": "ntp", "solver": "fixed:2", "block_size": 5, "dtype": "bfloat16", "device": "cpu",
        "trained": True, "mask_token_id": 7,
    }  # fmt: skip
    folder = checkpoint("llama", settings=settings)
    words = [folder, "--prompt", "hi", "--json", *SHORT]
    answer = run("generate", *words).json
    assert (answer["mode"], answer["dtype"], answer["device"]) == ("ntp", "bfloat16", "cpu")
    assert answer["mask_token_id"] == 7
    answer = run("generate", *words, "--mode", "sbd").json
    assert (answer["solver"], answer["block_size"]) == ("fixed:2", 5)
    options = [
        "--mode", "sbd", "--solver", "prefix:0.5", "--block-size", "4", "--dtype", "float32",
        "--device", "cpu", "--mask-token-id", "9", "--compile", "off", "--pack", "off",
    ]  # fmt: skip
    answer = run("generate", *words, *options).json
    assert answer["packed"] is False
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("sbd", "prefix:0.5", 4)
    assert (answer["dtype"], answer["mask_token_id"]) == ("float32", 9)
    assert run("generate", *words, "--dtype", "float16").json["dtype"] == "float16"


def test_other_defaults_are_those_that_help_states(run, trained):
    answer = run("generate", trained, "--prompt", "hi", "--json", *SHORT).json
    assert (answer["mode"], answer["solver"], answer["block_size"]) == ("sbd", "entropy:0.1", 16)
    shown = " ".join(run("generate", "--help").out.replace("│", " ").split())
    for words in (
        "Default: the checkpoint's, else sbd, or ntp where a model was never trained for blocks "
        "and no option of blocks is given.",
        "Default: the checkpoint's, else entropy:0.1.",
        "Default: the checkpoint's, else 16.",
        "Default: the checkpoint's, else float32 on a CPU and bfloat16 elsewhere, float16 on GPUs",
        "Default: the checkpoint's, else cuda if there is one.",
    ):
        assert words in shown
    assert (answer["dtype"], answer["device"]) in (("float32", "cpu"), ("bfloat16", "cuda:0"))


@pytest.mark.parametrize("as_json", [True, False])
def test_info(run, checkpoint, as_json):
    settings = {"solver": "fixed:2", "trained": True, "acceptance": 0.9}
    folder = checkpoint("qwen3", settings=settings)
    options = ["--dtype", "bfloat16", "--device", "cpu", "--mask-token-id", "8"]
    result = run("info", folder, *options, *["--json"] * as_json)
    facts = {
        "architecture": "Qwen3ForCausalLM", "layers": 2, "context_length": 256,
        "dtype": "bfloat16", "device": "cpu", "mask_token_id": 8,
        "mask_token_source": "given explicitly", "eos_token_ids": [257], "sbd_trained": True,
        "default_mode": "sbd", "default_solver": "fixed:2", "default_block_size": 16,
        "base": None, "adapter": None, "acceptance": 0.9, "acceptance_source": "the checkpoint's",
    }  # fmt: skip
    assert result.err == ""
    if as_json:
        assert {name: result.json[name] for name in facts} == facts
        assert result.json["parameters"] > 10_000
        return
    rows = [line.split(None, 1) for line in result.out.splitlines()]
    shown = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert {name: shown[name] for name in facts if name in shown} == {
        name: {"acceptance": "0.90", "dtype": "bfloat16, to compute in"}.get(name, str(value))
        for name, value in facts.items()
        if value is not None
    }
    assert "base" not in shown
    assert shown["verified"] == "chosen by arithmetic; setblock tune measures"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
@pytest.mark.parametrize("method", ["lora", "gated"])
def test_info_tells_what_an_adapter_is_on(run, checkpoint, tmp_path, method):
    base, adapter = str(checkpoint("llama")), tmp_path / method
    bare = loading.load(base, mask_token_id=8)
    attach(bare.network, base, method, 8, rank=2, alpha=4).save_pretrained(adapter)
    facts = run("info", adapter, "--mask-token-id", "8", "--json").json
    assert (facts["base"], facts["adapter"]) == (base, method)
    assert facts["acceptance_source"] == "assumed"
    # Its settings say that it was trained, as those of `setblock train` do.
    write_settings(adapter, trained=True, mask_token_id=8)
    told = run("generate", adapter, "--prompt", "hi", "--mode", "sbd", "--json", *SHORT).err
    unfit = f"warning: {adapter} is a gated adapter, made to draft: in mode sbd nothing corrects"
    assert told.startswith(unfit) == (method == "gated")
    assert (
        run("generate", adapter, "--prompt", "hi", "--mode", "verified", "--json", *SHORT).err == ""
    )


def test_info_loses_no_part_of_a_long_name(run, checkpoint, tmp_path):
    folder = tmp_path / ("[long]" * 20)
    folder.symlink_to(checkpoint("llama"))
    result = run("info", folder)
    assert str(folder) in "".join(line[20:].strip() for line in result.out.splitlines())
