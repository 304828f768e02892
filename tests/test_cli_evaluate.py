"""evaluate: tasks, records, resuming, and perplexity."""

import json
import math
import os
import shutil
import signal
from typing import Any

import pytest
from conftest import SHORT
from datasets import Dataset
from stops import STOPS

from setblock import evaluate, live, nano, records
from setblock.loading import load

KEPT = "what is done is kept, go on with --resume"


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
    missing = run("evaluate", trained, *words[:2], "--data", "none.jsonl").error
    assert "--data none.jsonl can't be read: No such file" in missing
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
    said = f"{how}: nothing was done by then that could be kept"
    assert (nothing.code, nothing.error) == (128 + number, said)
    words = ["--task", "lists", "--task", "json", "--limit", "1", "--mode", "ntp", *SHORT]
    result = run("evaluate", trained, *words, "--out", path)
    assert (result.code, result.error) == (128 + number, f"{how}: {KEPT}")
    assert [line["task"] for line in json.loads(path.read_text())["results"]] == ["lists"]


def test_evaluate_with_sampling(run, trained):
    """Verified decoding has token by token's samples; other noise gives others."""
    words = ["--task", "lists", "--limit", "3", "--batch-size", "2", "--dtype", "float32", *SHORT]
    words += ["--mode", "ntp", "--mode", "verified", "--json"]
    noise = ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "50", "--seed", "3"]
    noise += ["--min-p", "0.01"]
    record = run("evaluate", trained, *words, *noise).json
    wanted = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3}
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


def test_evaluate_under_several_seeds(run, trained, tmp_path, monkeypatch):
    """Each setting is compared with the first of the same seed, and scored over all seeds."""
    chance = iter([True, False, True] * 20)
    monkeypatch.setattr(nano, "check", lambda problem, text: next(chance))
    words = ["--task", "lists", "--limit", "3", "--temperature", "1", "--seed", "4", "--seed", "0"]
    words += ["--mode", "ntp", "--mode", "sbd", "--solver", "fixed:2", *SHORT]
    out = tmp_path / "scores.json"
    shown = run("evaluate", trained, *words, "--out", out).out
    record = json.loads(out.read_text())
    lines, compared = record["results"], record["comparisons"]
    seeds = [line["settings"]["sampler"]["seed"] for line in lines]
    assert seeds == [4, 0, 4, 0]
    pairs = [[one[who]["settings"]["sampler"]["seed"] for who in ("first", "second")]
             for one in compared]  # fmt: skip
    assert pairs == [[4, 4], [0, 0]]
    assert [one["seeds"] for one in record["pooled"]] == [[4, 0], [4, 0]]
    assert [one["mode"] for one in record["pooled"]] == ["ntp", "sbd"]
    assert [one["score"] for one in record["pooled"]] == [pytest.approx(2 / 3)] * 2
    for text in ("sbd fixed:2 seed 4", "ntp seed 0", "All answers of seeds 4, 0", "Against ntp"):
        assert text in " ".join(shown.split())
    report = run("report", out, "--out", tmp_path / "report").out
    assert report
    text = (tmp_path / "report" / "report.md").read_text()
    assert "## Over several seeds" in text
    assert "| 4, 0 | 3 | 66.7% |" in text
    for number in range(1, 5):
        del record["results"][-number:], record["comparisons"][-1:]
    out.write_text(json.dumps(record | {"results": lines[:3], "pooled": []}))
    again = run("evaluate", trained, *words, "--out", out, "--resume", "--json").json
    assert [one["seeds"] for one in again["pooled"]] == [[4, 0], [4, 0]]
    error = run("evaluate", trained, *words, "--seed", "4").error
    assert error == "--seed must be given once for each, got [4, 0, 4]"
    twice = ["--solver", "entropy:0.1", "--solver", "entropy:1e-1", "--mode", "sbd"]
    message = "--solver must be given once for each, got ['entropy:0.1', 'entropy:1e-1']"
    for command in ("evaluate", "benchmark", "tune"):
        assert run(command, trained, *twice).error == message
    assert run("evaluate", "a", "a").error == "MODEL must be given once for each, got ['a', 'a']"


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
    out = ["--out", path] if noise else [f"--out={path}"]
    while (result := run("evaluate", trained, *words, *out, *more)).code:
        there = f"{path} holds {2 * (count // 3 - 1)} answers\n" if more else ""
        assert result.err == f"{there}error: interrupted: {KEPT}\n"
        more = ["--resume"]
    assert count == 12 + 5
    stopped = json.loads(path.read_text())
    samples = [
        sorted(
            map(json.loads, file.with_suffix(".samples.jsonl").read_text().splitlines()), key=str
        )
        for file in (tmp_path / "whole.json", path)
    ]
    both = [*zip(whole["results"], stopped["results"], strict=True), *zip(*samples, strict=True)]
    for one, other in both:  # rows beside a row decide its last bits
        assert one.keys() == other.keys()
        for name in one.keys() - {"wall_s", "peak_bytes"}:
            expected = pytest.approx(one[name]) if name.endswith("_nats") else one[name]
            assert other[name] == expected, name
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


@pytest.mark.parametrize("factor", [math.nan, 1e6])
def test_perplexities_that_are_no_numbers(run, trained, tmp_path, factor):
    model, folder, data = load(trained), tmp_path / "model", tmp_path / "text.txt"
    model.network.model.norm.weight.data *= factor
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    data.write_text("some text")
    words = ("evaluate", folder, "--task", "perplexity", "--data", data, "--dtype", "float32")
    words = (*words, "--mask-token-id", model.mask_token_id, "--out", tmp_path / "record.json")
    result = run(*words)
    if math.isnan(factor):
        assert result.error == f"the logits of {folder} are not numbers: look at its weights"
        assert not (tmp_path / "record.json").exists()
    else:
        assert result.code == 0
        assert json.loads((tmp_path / "record.json").read_text())["results"][0]["score"] is None


def test_the_perplexity_of_a_text_with_the_mask_token(run, trained, tmp_path):
    model, data = load(trained), tmp_path / "texts.jsonl"
    mask = str(model.tokenizer.convert_ids_to_tokens(model.mask_token_id))
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", f"two {mask}")))
    error = run("evaluate", trained, "--task", "perplexity", "--data", data).error
    assert f"text 2 of at least two tokens holds the mask token {mask!r}, which is never" in error


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
        (["--batch-size", "8"], "--batch-size: perplexity reads a text at a time"),
        (["--max-new-tokens", "8"], "--max-new-tokens: perplexity reads a text at a time"),
        (["--data", plain, "--window", "1"], "window must lie in 2..256, got 1"),
        ([], "task perplexity needs its text: --data FILE"),
    ):
        assert message in run("evaluate", trained, *words, *wrong).error
    assert "--window is for --task perp" in run("evaluate", trained, "--window", "4").error


def test_bad_values_are_refused_before_the_first_problem(run, trained, monkeypatch):
    monkeypatch.setattr(evaluate, "run", lambda *words, **options: pytest.fail("ran"))
    result = run("evaluate", trained, "--solver", "fixed:2", "--solver", "entropy:-1")
    assert "got 'entropy:-1'" in result.error
