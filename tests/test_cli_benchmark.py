"""benchmark: who takes part, its rounds, its table and its record."""

import io
import json
import signal
from itertools import pairwise
from typing import Any

import pytest
import torch
from rich.console import Console
from stops import STOPS
from transformers import GenerationMixin

from setblock import benchmark, contenders, packed, records
from setblock.cli import benchmarking


def test_benchmark_every_option(run, trained, tmp_path):
    path = tmp_path / "record.json"
    words = [
        "--limit", "2", "--batch-size", "1", "--batch-size", "2", "--prompt-length", "8",
        "--prompt-length", "20", "--max-new-tokens", "4", "--repeats", "1", "--cached", "16",
        "--solver", "fixed:2", "--block-size", "4", "--mask-token-id", "9", "--dtype", "float32",
        "--device", "cpu", "--no-vllm", "--ignore-eos",
    ]  # fmt: skip
    record = run("benchmark", trained, *words, "--out", path, "--json").json
    assert record == json.loads(path.read_text())
    cells = [(one["prompt_tokens"], one["batch_size"]) for one in record["results"]]
    assert cells == [(n, b) for n in (8, 20) for b in (1, 2) for _ in range(5 if b == 1 else 4)]
    for line in record["results"]:
        assert line["tokens"] == 2 * 4
        assert line["identical_share"] == 1 or line["contender"] == "sbd"
        assert line["tokens_per_forward"] == {"ntp": 1, "sbd": 2}.get(
            line["contender"], line["tokens_per_forward"]
        )
    assert [(one["batch_size"], one["cached"], one["queries"]) for one in record["forwards"]] == [
        (b, 16, q) for b in (1, 2) for q in (1, 4, 8)
    ]
    again = run("benchmark", trained, *words, "--out", path)
    assert again.error == f"{path} is there already: name another file"  # it never goes on
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    few = ["--task", "gsm8k", "--data", data, "--repeats", "1", "--max-new-tokens", "2"]
    result = run("benchmark", trained, *few)
    assert "transformers" in result.out
    assert "lookup" in result.out
    assert "…" not in result.out
    assert "against one token" in result.out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--mode", "verified"], ["ntp", "verified", "transformers", "transformers-lookup"]),
        (["--mode", "verified", "--mode", "ntp", "--no-transformers"], ["ntp", "verified"]),
        (["--mode", "sbd", "--no-transformers"], ["ntp", "sbd"]),
        (["--mode", "ntp", "--transformers"], ["ntp", "transformers", "transformers-lookup"]),
    ],
)
def test_who_takes_part_in_a_benchmark(run, trained, words, names):
    few = ["--limit", "1", "--repeats", "1", "--max-new-tokens", "4", "--cached", "0", "--no-vllm"]
    record = run("benchmark", trained, *few, *words, "--json").json
    assert [line["contender"] for line in record["results"]] == names
    for line in record["results"]:
        own = line["contender"] in ("ntp", "sbd", "verified")
        assert (line["settings"] or {}).get("mode") == (line["contender"] if own else None)
    assert record["request"]["transformers"] == ("--no-transformers" not in words)
    given = [after for word, after in pairwise(words) if word == "--mode"]
    assert record["request"]["mode"] == given


@STOPS
def test_an_interrupted_benchmark_keeps_its_rounds(
    run, trained, tmp_path, monkeypatch, number, how
):
    path = tmp_path / "record.json"
    original: Any = benchmark.compare
    turns: list[str] = []

    def compare(*words: Any) -> Any:
        *given, begun = words

        def at(repeat: int, name: str) -> None:
            begun(repeat, name)
            turns.append(name)
            if repeat == 2:
                signal.raise_signal(number)

        return original(*given, at)

    monkeypatch.setattr(benchmark, "compare", compare)
    words = ["--limit", "1", "--max-new-tokens", "2", "--no-vllm", "--out", path]
    result = run("benchmark", trained, *words)
    said = f"{how}: the rounds that were whole are in {path}"
    assert (result.code, result.error) == (128 + number, said)
    results = json.loads(path.read_text())["results"]
    assert [(line["contender"], line["repeats"]) for line in results] == [
        (name, 1) for name in turns[: len(results)]
    ]
    assert len(turns) == 2 * len(results) + 1


def test_the_table_of_a_benchmark_cuts_nothing_off():
    """In 80 columns, with wide ranges and a long solver."""
    line = {
        "contender": "sbd confidence-bound:1e-05", "batch_size": 1, "prompt_tokens": 8.0,
        "tokens_per_forward": 10.5, "tokens_per_second": 1234.5, "speedup": 11.0,
        "speedup_range": [9.9, 112.1], "total_speedup": 10.5, "total_speedup_range": [10.1, 12.1],
        "share_of_ceiling": 1.12, "identical_share": 1.0,
    }  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(benchmarking._contenders([line, line | {"contender": "transformers-lookup"}]))
    text = console.export_text()
    assert "…" not in text
    for part in ("10.1-12.1", "9.90-112", "1234.5", "batch 1,"):
        assert part in text
    first = "".join(row.split("│")[1].strip() for row in text.splitlines() if row.startswith("│"))
    assert "sbdconfidence-bound:1e-05" in first
    assert "transformers lookup" in first.replace("transformerslookup", "transformers lookup")


def test_transformers_decodes_with_layers_of_its_own(run, trained, monkeypatch):
    """Ours are packed in the same benchmark."""
    seen = []

    def generate(network: Any, *words: Any, **given: Any) -> Any:
        kinds = {type(layer) for layer in network.modules()}
        seen.append(torch.nn.Linear in kinds and packed.PackedLinear not in kinds)
        return own(network, *words, **given)

    stock: Any = GenerationMixin
    own = stock.generate
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    monkeypatch.setattr(packed, "SMALLEST", dict.fromkeys(packed.SMALLEST, 0))
    words = ["--limit", "1", "--max-new-tokens", "4", "--repeats", "1", "--cached", "0"]
    record = run("benchmark", trained, *words, "--device", "cpu", "--no-vllm", "--json").json
    assert record["packed"] == (packed.missing(torch.device("cpu"), torch.float32) is None)
    assert len(seen) >= 8  # two contenders, a first round and one more, to the first token and all
    assert all(seen)


def test_several_solvers_and_block_sizes_in_one_run(run, trained):
    words = ["--limit", "1", "--max-new-tokens", "4", "--repeats", "1", "--cached", "0"]
    words += [
        "--solver",
        "fixed:1",
        "--solver",
        "fixed:2",
        "--block-size",
        "2",
        "--block-size",
        "4",
    ]
    record = run("benchmark", trained, *words, "--no-vllm", "--json").json
    names = [line["contender"] for line in record["results"]]
    assert "sbd fixed:2 k=4" in names
    assert names.count("verified k=2") == 1
    assert [line["queries"] for line in record["forwards"]] == [1, 2, 4, 8]


def test_vllm_takes_part_where_it_is_installed(run, trained, fake_vllm):
    few = ["--limit", "1", "--repeats", "1", "--max-new-tokens", "2", "--prompt-length", "9"]
    few += ["--cached", "0", "--json"]
    lines = run("benchmark", trained, *few, "--vllm").json["results"]
    assert lines[-1]["contender"] == "vllm"
    assert lines[-1]["identical_share"] == 1
    assert run("benchmark", trained, *few).json["results"][-1]["contender"] == "vllm"
    assert len(fake_vllm) == 2
    assert all(engine.ended for engine in fake_vllm)
    assert fake_vllm[0].given["max_model_len"] == 11
    record = run("benchmark", trained, *few, "--no-vllm", "--lenience", "0.5").json
    assert record["request"]["lenience"] == [0.5]
    assert record["results"][3]["contender"] == "verified lenience=0.5"
    copying = ["--mode", "verified", "--no-transformers", "--lookup", "0", "--lookup", "3"]
    lines = run("benchmark", trained, *few, "--no-vllm", *copying).json["results"]
    names = ["verified lookup=0", "verified lookup=3"]
    assert [line["contender"] for line in lines] == ["ntp", *names]
    few += ["--no-vllm", "--lenience", "0.5", "--block-size", "4", "--block-size", "1"]
    assert "got 0.5 with block_size 1" in run("benchmark", trained, *few).error
    assert [line["contender"] for line in record["results"]][-1] == "transformers-lookup"
    assert "vllm" not in record


def test_vllm_is_missed(run, trained, monkeypatch):
    monkeypatch.setattr(contenders, "find_spec", lambda name: None)
    few = ["--limit", "1", "--repeats", "1", "--max-new-tokens", "2", "--prompt-length", "9"]
    message = "--vllm: vLLM can't take part, it is not installed"
    assert run("benchmark", trained, *few, "--vllm").error == message
    record = run("benchmark", trained, *few, "--cached", "0", "--json").json
    assert record["vllm"] == "left out: it is not installed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--batch-size", "2", "--batch-size", "2"], "--batch-size must be given once for each"),
        (["--cached", "2", "--cached", "2"], "--cached must be given once for each, got [2, 2]"),
        (["--prompt-length", "-1"], "--prompt-length must be at least 1, got -1"),
        (["--cached", "-1"], "--cached must be at least 0, got -1"),
        (["--task", "gsm8k"], "task gsm8k needs its rows: --data FILE"),
        (["--data", "y"], "--data is for one --task of gsm8k, svamp"),
        (["--task", "x", "--data", "y"], "--task must be one of gsm8k, svamp"),
        (["--prompt-length", "400"], "exceeds the model's context of 256 tokens"),
        (["--cached", "250"], "--cached 250 with 32 tokens behind it exceeds the model's context"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["--solver", "best"], "solver must be one of entropy:GAMMA"),
        (
            ["--mode", "verified", "--solver", "fixed:2"],
            "--solver is for mode sbd, and the mode is verified",
        ),
        (
            ["--mode", "sbd", "--mode", "ntp", "--lenience", "0.5"],
            "--lenience is for mode verified, and the modes are sbd, ntp",
        ),
        (
            ["--mode", "sbd", "--lookup", "5"],
            "--lookup is for mode verified, and the mode is sbd",
        ),
        (["--lookup", "-1"], "lookup must be an integer of at least 0, got -1"),
        (
            ["--mode", "verified", "--slide"],
            "--slide is for mode sbd, and the mode is verified",
        ),
        (
            ["--mode", "ntp", "--block-size", "4"],
            "--block-size is for modes sbd and verified, got 4 in mode ntp",
        ),
    ],
)
def test_wrong_words_of_benchmark(run, trained, words, message):
    assert message in run("benchmark", trained, *words).error


def test_a_batch_of_more_prompts_than_there_are(run, trained, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = ("--task", "prompts", "--data", data, "--batch-size", "3")
    error = run("benchmark", trained, *words).error
    assert error == "--batch-size 3 is more than the 2 prompts there are"


def test_a_record_names_a_gpu_only_where_it_computed(run, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    assert records.new_record()["machine"]["cuda"] == "a GPU"
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "abc"}\n')
    few = ("--device", "cpu", "--limit", "1", "--json")
    for words in (
        (
            "evaluate",
            trained,
            "--task",
            "arithmetic",
            "--mode",
            "ntp",
            "--max-new-tokens",
            "8",
            *few,
        ),
        ("evaluate", trained, "--task", "perplexity", "--data", text, *few),
    ):
        machine = run(*words).json["machine"]
        assert machine["cuda"] is None
        assert machine["cpu"]
