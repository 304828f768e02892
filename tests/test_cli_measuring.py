"""The commands that measure: evaluate, benchmark and profile."""

import io
import json
import os
import shutil
import signal
from itertools import pairwise
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from stops import STOPS
from transformers import GenerationMixin

from setblock import benchmark, contenders, evaluate, live, nano, packed, records
from setblock.cli import benchmarking
from setblock.model import Model

SHORT = ["--max-new-tokens", "8"]
KEPT = "what is done is kept, go on with --resume"


# evaluate


def test_evaluate_every_option(run, trained, tmp_path):
    path = tmp_path / "new" / "record.json"
    words = [
        "--task", "lists", "--task", "json", "--split", "validation", "--held-out", "--limit", "2",
        "--batch-size", "2", "--mode", "sbd", "--mode", "ntp", "--solver", "fixed:2", "--solver",
        "fixed:4", "--block-size", "4", "--max-new-tokens", "8", "--mask-token-id", "9", "--dtype",
        "float32", "--device", "cpu", "--out", path,
    ]  # fmt: skip
    result = run("evaluate", trained, *words, "--json")
    record = result.json
    assert record == json.loads(path.read_text())
    assert record["command"].startswith("setblock evaluate ")
    lines = record["results"]
    settings = [("ntp", None), ("sbd", "fixed:2"), ("sbd", "fixed:4")]
    expected = [(*one, task) for one in settings for task in ("lists", "json")]
    assert [(one["mode"], one["solver"], one["task"]) for one in lines] == expected
    for one in lines:
        assert (one["split"], one["held_out"]) == ("validation", True)
        assert (one["n"], one["batch_size"], one["dtype"]) == (2, 2, "float32")
        assert (one["settings"]["block_size"], one["settings"]["max_new_tokens"]) == (4, 8)
    assert {one["tokens_per_forward"] for one in lines if one["mode"] == "ntp"} == {1}
    assert all(one["peak_bytes"] > one["least_bytes"] and one["logprob_nats"] < 0 for one in lines)
    compared = [(one["second"]["solver"], one["task"]) for one in record["comparisons"]]
    assert compared == [one[1:] for one in expected[2:]]
    assert {one["first"]["mode"] for one in record["comparisons"]} == {"ntp"}
    samples = path.with_suffix(".samples.jsonl").read_text().splitlines()
    assert [json.loads(one)["run"] for one in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert result.err == ""
    again = run("evaluate", trained, *words)
    assert again.error == f"{path} is there already: go on with --resume, or name another"
    assert run("evaluate", trained, *words, "--resume", "--json").json == record


def test_evaluate_in_verified_mode(run, trained):
    words = ["--task", "lists", "--limit", "2", "--max-new-tokens", "8", "--json"]
    modes = ["--mode", "ntp", "--mode", "verified", "--mode", "sbd"]
    options = ["--branches", "2", "--seeds", "1", "--next-token-seed", "--fallback", "3"]
    options += ["--lookup", "5", "--lenience", "0.5"]
    lines = run("evaluate", trained, *words, *modes, *options).json["results"]
    assert [(one["mode"], one["solver"]) for one in lines] == [
        ("ntp", None), ("sbd", "entropy:0.1"), ("verified", None)
    ]  # fmt: skip
    sbd, verified = (one["settings"] for one in lines[1:])
    assert (sbd["next_token_seed"], sbd["fallback"]) == (True, 3)
    assert (verified["branches"], verified["seeds"], verified["lookup"]) == (2, 1, 5)
    assert verified["lenience"] == 0.5
    assert lines[2]["acceptance"] is None, "of copied drafts too"
    drafted = ["--mode", "verified", "--draft", "solver", "--solver", "fixed:2"]
    [line] = run("evaluate", trained, *words, *drafted).json["results"]
    assert (line["mode"], line["solver"]) == ("verified", "fixed:2")
    assert line["settings"]["draft"] == "solver"
    for word, slides in (("--slide", True), ("--no-slide", False)):
        [line] = run("evaluate", trained, *words, "--mode", "sbd", word).json["results"]
        assert line["settings"]["slide"] is slides


def test_evaluate_a_benchmark_task(run, trained, tmp_path):
    data, examples = tmp_path / "test.jsonl", tmp_path / "train.jsonl"
    row = {"question": "2 + 3?", "answer": "#### 5"}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    examples.write_text(json.dumps(row) + "\n")
    words = ["--task", "gsm8k", "--data", data, "--limit", "2", "--mode", "ntp", *SHORT]
    [line] = run("evaluate", trained, *words, "--json").json["results"]
    assert (line["task"], line["n"], line["chat"], line["shots"]) == ("gsm8k", 2, True, 0)
    few = ["--plain", "--shots", "1", "--shots-data", examples, "--json"]
    [line] = run("evaluate", trained, *words, *few).json["results"]
    assert (line["chat"], line["shots"]) == (False, 1)
    assert line["shots_data"] == examples.name
    assert len(line["shots_data_sha256"]) == 64
    assert line["settings"]["stop"] == ["\nQuestion:", "\n\n\n"]
    for wrong, message in (
        (["--task", "svamp"], "--data is for one --task of gsm8k, svamp"),
        (["--shots", "1"], "--shots and --shots-data need each other; got 1 and None"),
        (["--shots", "2", "--shots-data", examples], f"--shots 2: {examples} has 1 rows"),
        (["--shots", "1", "--shots-data", data], "holds the very rows of --data"),
        (["--held-out"], "--held-out is for the nano tasks"),
        (["--split", "test"], "a file is one split"),
    ):
        assert message in run("evaluate", trained, *words, *wrong).error
    assert "--plain are for benchmark tasks" in run("evaluate", trained, "--plain").error
    assert "--data is for one --task" in run("evaluate", trained, "--data", data).error
    assert "No such file" in run("evaluate", trained, *words[:2], "--data", "none.jsonl").error
    idle = run("evaluate", trained, "--mode", "ntp", "--block-size", "4").error
    assert idle == "--block-size is for modes sbd and verified, got 4 in mode ntp"


@pytest.mark.parametrize(("own", "expected"), [("verified", "verified"), ("ntp", "sbd")])
def test_evaluate_takes_the_mode_of_the_model(run, checkpoint, own, expected):
    model = checkpoint("llama", settings={"trained": True, "mode": own, "block_size": 4})
    words = ["--task", "lists", "--limit", "1", *SHORT]
    lines = run("evaluate", model, *words, "--json").json["results"]
    assert [line["mode"] for line in lines] == ["ntp", expected]
    if own == "verified":
        refused = run("evaluate", model, *words, "--solver", "fixed:2").error
        assert "the modes are ntp, verified; got ['fixed:2']" in refused


def test_evaluate_shows_a_table(run, trained, checkpoint):
    """All five families, by default token by token and by blocks, of both models."""
    other = checkpoint("qwen3", settings={"trained": True})
    words = ["--limit", "1", "--max-new-tokens", "2"]
    result = run("evaluate", trained, other, *words, "--task", "nano")
    rows = [line.split("│") for line in result.out.splitlines() if line.startswith("│")]
    tasks = [row[1].strip() for row in rows if row[1].strip()]
    assert tasks == [*nano.FAMILIES] * (4 + 3)  # the lines, and three of each against the first
    assert result.out.count("McNemar") == 1
    assert max(map(len, result.out.splitlines())) <= 80
    assert result.err == ""


def test_progress_tells_how_many_runs_there_are(run, trained, monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", 0)
    words = ["--task", "lists", "--task", "json", "--limit", "1", "--mode", "ntp", "--mode", "sbd"]
    result = run("evaluate", trained, *words, "--solver", "fixed:2", *SHORT)
    place, lines = str(trained), result.err.replace("\n", " ").split("1 of 1")
    told = [line.strip().partition(place)[::2] for line in lines if place in line]
    expected = ["ntp lists", "ntp json", "sbd fixed:2 lists", "sbd fixed:2 json"]
    for number, ((before, after), words) in enumerate(zip(told, expected, strict=True), start=1):
        assert before == f"{number}/4 "
        assert after.startswith(f" {words}  ")


@STOPS
def test_an_interrupt_keeps_the_lines_before_it(run, trained, tmp_path, monkeypatch, number, how):
    path = tmp_path / "record.json"
    original = evaluate.run

    def interrupted(model: Any, family: str, *words: Any, **options: Any) -> Any:
        if family == "json":
            signal.raise_signal(number)
        return original(model, family, *words, **options)

    monkeypatch.setattr(evaluate, "run", interrupted)
    nothing = run("evaluate", trained, "--task", "json", "--out", tmp_path / "nothing.json", *SHORT)
    assert (nothing.code, nothing.error) == (128 + number, how)
    words = ["--task", "lists", "--task", "json", "--limit", "1", "--mode", "ntp", *SHORT]
    result = run("evaluate", trained, *words, "--out", path)
    assert (result.code, result.error) == (128 + number, f"{how}: {KEPT}")
    assert [line["task"] for line in json.loads(path.read_text())["results"]] == ["lists"]


def test_evaluate_with_sampling(run, trained):
    """Verified decoding has token by token's samples; other noise gives others."""
    words = ["--task", "lists", "--limit", "3", "--batch-size", "2", "--dtype", "float32", *SHORT]
    words += ["--mode", "ntp", "--mode", "verified", "--json"]
    noise = ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "50", "--seed", "3"]
    record = run("evaluate", trained, *words, *noise).json
    wanted = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "seed": 3}
    for line in record["results"]:
        assert {name: line["settings"]["sampler"][name] for name in wanted} == wanted
    [compared] = record["comparisons"]
    assert compared["identical_share"] == 1
    texts = [
        run("evaluate", trained, *words, "--temperature", "1.5", "--seed", n).json for n in "34"
    ]
    first, second = (one["results"][0]["logprob_nats"] for one in texts)
    assert first != second
    for useless in noise[2:]:
        if useless.startswith("--"):
            value = noise[noise.index(useless) + 1]
            error = run("evaluate", trained, *words[:-1], useless, value).error
            assert error == f"{useless} is for sampling: give a --temperature above 0"


@pytest.mark.parametrize("noise", [[], ["--temperature", "0.8"]])
def test_a_stopped_evaluation_goes_on(run, trained, tmp_path, monkeypatch, noise):
    """Killed after any answer, it ends with the record of one that was never stopped."""
    words = ["--task", "lists", "--task", "json", "--limit", "3", "--batch-size", "2", *SHORT]
    words += noise
    whole = run("evaluate", trained, *words, "--out", tmp_path / "whole.json", "--json").json
    add, count = records.Journal.add, 0

    def killed(self: records.Journal, number: int, sample: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise KeyboardInterrupt
        add(self, number, sample)

    monkeypatch.setattr(records.Journal, "add", killed)
    path = tmp_path / "stopped.json"
    more: list[str] = []
    while (result := run("evaluate", trained, *words, "--out", path, *more)).code:
        there = f"{path} holds {2 * (count // 3 - 1)} answers\n" if more else ""
        assert result.err == f"{there}error: interrupted: {KEPT}\n"
        more = ["--resume"]
    assert count == 12 + 5
    stopped = json.loads(path.read_text())
    for one, other in zip(whole["results"], stopped["results"], strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"wall_s", "peak_bytes"}:
            assert one[name] == other[name], name
    samples = [
        [
            json.loads(line) | {"wall_s": None}
            for line in file.with_suffix(".samples.jsonl").read_text().splitlines()
        ]
        for file in (tmp_path / "whole.json", path)
    ]
    assert samples[0] == samples[1]
    other = run("evaluate", trained, *words, "--limit", "2", "--out", path, "--resume")
    assert 'made by another request: {"limit": 3}, now {"limit": 2}' in other.error
    assert "no record to go on with" in run("evaluate", trained, *words, "--resume").error


def test_a_changed_model_is_another_one(run, trained, tmp_path):
    folder, path = shutil.copytree(trained, tmp_path / "model"), tmp_path / "record.json"
    words = ["--task", "lists", "--limit", "2", "--mode", "ntp", *SHORT, "--out", path]
    assert run("evaluate", folder, *words).code == 0
    assert run("evaluate", folder, *words, "--resume").code == 0
    os.utime(folder / "model.safetensors", (0, 0))  # as if other weights were put there
    assert (
        'made by another request: {"weights"' in run("evaluate", folder, *words, "--resume").error
    )


def test_evaluate_perplexity(run, trained, checkpoint, tmp_path, monkeypatch):
    data, plain = tmp_path / "texts.jsonl", tmp_path / "plain.txt"
    data.write_text("".join(json.dumps({"text": f"text {n} " * n}) + "\n" for n in range(1, 5)))
    plain.write_text("one text, and more of it")
    words = ["--task", "perplexity", "--limit", "3", "--out", tmp_path / "record.json"]
    other = checkpoint("qwen3", settings={"trained": True})
    lines = run("evaluate", trained, other, *words, "--data", data, "--json").json["results"]
    assert [line["model"] for line in lines] == [str(trained), str(other)]
    for line in lines:
        assert (line["n"], line["mode"], line["settings"]["window"]) == (3, "ntp", 256)
        assert line["interval"][0] < line["score"] < line["interval"][1]
    shown = run("evaluate", trained, other, *words, "--data", data, "--resume")
    assert shown.code == 0
    assert shown.out.count(" - ") == 2, "tokens per forward: nothing is decoded"
    assert "score: perplexity per token" in shown.out
    before = data.read_text()
    data.write_text(before.replace("text ", "word "))
    again = run("evaluate", trained, other, *words, "--data", data, "--resume")
    assert "was made by another request" in again.error
    data.write_text(before)
    for useless in (["--limit", "0"], ["--split", "test"], ["--held-out"], ["--shots-data", "x"]):
        assert useless[0] in run("evaluate", trained, *words[:2], "--data", data, *useless).error
    words = words[:2]
    table = tmp_path / "texts.parquet"
    Dataset.from_json(str(data)).to_parquet(str(table))
    scores = [
        run("evaluate", trained, *words, "--data", file, "--json").json["results"][0]["score"]
        for file in (data, table)
    ]
    assert scores[0] == scores[1]
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return [{"text": "some text"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    hub = (*words, "--data", "owner/name:raw", "--split", "train")
    assert run("evaluate", trained, *hub, "--json").json["results"][0]["data"] == "owner/name:raw"
    assert asked == [("owner/name", "raw", "train")]
    [line] = run("evaluate", trained, *words, "--data", plain, "--window", "9", "--json").json[
        "results"
    ]
    assert (line["n"], line["interval"], line["settings"]["window"]) == (1, None, 9)
    assert (
        f"{line['score']:.3f}"
        in run(*("evaluate", trained, *words, "--data", plain, "--window", "9")).out
    )
    for content, message in (
        ("{", "neither JSON nor JSONL"),
        ('{"text": "a"}\n[]', "texts.jsonl, row 2: a row needs a text, named text"),
        ('{"text": ""}', "no text of at least two tokens"),
    ):
        data.write_text(content)
        assert message in run("evaluate", trained, *words, "--data", data).error
    for wrong, message in (
        (["--mode", "ntp"], "--mode: perplexity reads text and decodes none"),
        (["--shots", "1"], "--shots: perplexity reads"),
        (["--data", plain, "--window", "1"], "window must lie in 2..256, got 1"),
        ([], "task perplexity needs its text: --data FILE"),
    ):
        assert message in run("evaluate", trained, *words, *wrong).error
    assert "--window is for --task perp" in run("evaluate", trained, "--window", "4").error


def test_bad_values_are_refused_before_the_first_problem(run, trained, monkeypatch):
    monkeypatch.setattr(evaluate, "run", lambda *words, **options: pytest.fail("ran"))
    result = run("evaluate", trained, "--solver", "fixed:2", "--solver", "entropy:-1")
    assert "got 'entropy:-1'" in result.error


# benchmark


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
