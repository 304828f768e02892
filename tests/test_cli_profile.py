"""profile, and what other commands that decode have in common with it: compile, pack, slide."""

import json
from typing import Any

import pytest

from setblock import packed
from setblock.model import Model


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """How each model was told to compile; test_compile.py does it."""
    told: list[Any] = []
    monkeypatch.setattr(Model, "compile", lambda model, how: told.append(how))
    return told


def test_profile_every_option(run, trained, tmp_path, compiled):
    path = tmp_path / "record.json"
    words = [
        "--limit", "2", "--prompt-length", "8", "--max-new-tokens", "4", "--repeats", "1",
        "--mode", "ntp", "--mode", "sbd", "--solver", "fixed:2", "--block-size", "4",
        "--mask-token-id", "9", "--dtype", "float32", "--device", "cpu", "--compile", "on",
        "--pack", "off",
    ]  # fmt: skip
    record = run("profile", trained, *words, "--out", path, "--json").json
    assert record == json.loads(path.read_text())
    assert [line["mode"] for line in record["results"]] == ["ntp", "sbd"]
    assert record["results"][1]["nfe"] < record["results"][0]["nfe"]
    assert (record["dtype"], record["request"]["compile"], len(compiled)) == ("float32", "on", 1)
    assert (record["packed"], record["request"]["pack"]) == (False, "off")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    few = ["--task", "gsm8k", "--data", data, "--repeats", "1", "--max-new-tokens", "2"]
    shown = run("profile", trained, *few).out
    for text in ("attention", "linears", "verified", "longer for being watched"):
        assert text in shown
    assert len(compiled) == 1
    for wrong, message in (
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--prompt-length", "0"], "--prompt-length must be at least 1, got 0"),
        (["--mode", "ntp", "--solver", "fixed:1"], "--solver is for mode sbd"),
        (
            ["--mode", "ntp", "--no-slide"],
            "--no-slide is for mode sbd, and the mode is ntp",
        ),
        (
            ["--mode", "ntp", "--block-size", "4"],
            "--block-size is for modes sbd and verified, got 4 in mode ntp",
        ),
        (["--task", "gsm8k"], "task gsm8k needs its rows: --data FILE"),
    ):
        assert message in run("profile", trained, *wrong).error


@pytest.mark.parametrize("slides", [False, True])
def test_slide_reaches_benchmark_and_profile(run, checkpoint, slides):
    """Without a word the checkpoint says it."""
    own = {"trained": True, "mask_token_id": 9, "slide": slides, "block_size": 4}
    folder = checkpoint("qwen3", free_rows=3, settings=own)
    few = ["--limit", "2", "--max-new-tokens", "12", "--repeats", "1", "--solver", "fixed:3"]
    few += ["--mode", "sbd", "--json"]
    alone = ["--no-transformers", "--no-vllm", "--cached", "0", "--ignore-eos"]
    for command, more in (("benchmark", alone), ("profile", [])):
        found = {}
        for words in ((), ("--slide",), ("--no-slide",)):
            record = run(command, folder, *few, *more, *words).json
            found[words] = record["results"][-1]
            assert record["slide"] is (("--slide",) == words or (not words and slides))
            assert record["request"]["slide"] is (None if not words else words == ("--slide",))
            settings = found[words]["settings"]
            assert (settings["solver"], settings["block_size"]) == ("fixed:3", 4)
            assert settings["slide"] is record["slide"]
        if command == "benchmark":  # whose answers are as long as each other
            whole, sliding = (
                found[(word,)]["tokens_per_forward"] for word in ("--no-slide", "--slide")
            )
            assert found[()]["tokens_per_forward"] == (sliding if slides else whole)
            assert sliding != whole


def test_compile_reaches_every_command_that_decodes(run, trained, compiled, tmp_path):
    few = ["--limit", "1", "--max-new-tokens", "2", "--json"]
    generated = run("generate", trained, "--prompt-ids", "5,6", *few[2:], "--compile", "on").json
    assert generated["num_tokens"] <= 2
    run("evaluate", trained, "--task", "lists", *few, "--compile", "on")
    run("benchmark", trained, *few, "--repeats", "1", "--cached", "0", "--compile", "on")
    assert compiled == ["on"] * 3
    run("evaluate", trained, "--task", "lists", *few, "--compile", "off")
    assert len(compiled) == 3
    for how in ("graphs", "kernels"):
        record = run("evaluate", trained, "--task", "lists", *few, "--compile", how).json
        assert (compiled.pop(), record["request"]["compile"]) == (how, how)
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    words = ["--task", "perplexity", "--data", text, "--compile", "on"]
    assert "--compile: perplexity reads text" in run("evaluate", trained, *words).error


def test_pack_reaches_every_command_that_decodes(run, trained, monkeypatch, tmp_path):
    """On unless it is off; test_packed.py does it."""
    told: list[Model] = []

    def pack(model: Model) -> None:
        told.append(model)
        model.packed = True

    monkeypatch.setattr(Model, "pack", pack)
    monkeypatch.setattr(packed, "missing", lambda *_: None)
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    few = ["--limit", "1", "--max-new-tokens", "2", "--json"]
    calls = [
        ["generate", trained, "--prompt-ids", "5,6", *few[2:]],
        ["evaluate", trained, "--task", "lists", *few],
        ["evaluate", trained, "--task", "perplexity", "--data", text, "--json"],
        ["benchmark", trained, *few, "--repeats", "1", "--cached", "0"],
        ["profile", trained, *few, "--repeats", "1", "--mode", "ntp"],
    ]
    for count, words in enumerate(calls, start=1):
        for given in ([], ["--pack", "on"]):
            found = run(*words, *given).json
        assert len(told) == 2 * count, words
        assert _packed(found), words
        assert not _packed(run(*words, "--pack", "off").json), words
        assert len(told) == 2 * count, words
    run("info", trained)
    assert len(told) == 2 * len(calls)
    monkeypatch.undo()
    monkeypatch.setattr(packed, "missing", lambda *_: "no kernels")
    assert "pack: no kernels" in run(*calls[0], "--pack", "on").error


def _packed(found: dict[str, Any]) -> bool:
    """What a command's JSON says of it."""
    return found["packed"] if "packed" in found else found["results"][0]["packed"]
