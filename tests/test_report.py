"""Records -> tables, plots and a page; the page itself is opened in tests_browser/."""

import copy
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import SHORT
from matplotlib.figure import Figure

from setblock import evaluate, measured, nano, report
from setblock.loading import load
from setblock.records import new_record, save_record

HOSTILE = "a </script> <!-- <script> <!--DATA--> <!--PLOTS--> b"
FEW: dict[str, Any] = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def folder(checkpoint) -> Path:
    return checkpoint("llama", settings={"trained": True, "block_size": 4})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Where `records` are made, once."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture
def records(run, folder, made, tmp_path, short_demo, monkeypatch) -> dict[str, Path]:
    """One file of each kind, made by the commands."""
    names = ("scores", "bench", "tuned", "demo")
    if not (made / f"{names[-1]}.json").exists():  # the last one
        _make(run, folder, {name: made / f"{name}.json" for name in names}, monkeypatch)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return {name: tmp_path / f"{name}.json" for name in names}


def _make(run, folder, files, monkeypatch) -> None:
    few = ("--limit", "4", "--max-new-tokens", "8")
    modes = ("--mode", "ntp", "--mode", "verified", "--branches", "2", "--block-size", "4")
    run(
        "evaluate",
        folder,
        "--task",
        "json",
        "--task",
        "code",
        *modes,
        *few,
        "--out",
        files["scores"],
    )
    run(
        *("benchmark", folder, "--limit", "1", "--repeats", "1", "--max-new-tokens", "4"),
        *("--cached", "8", "--out", files["bench"]),
    )
    monkeypatch.setattr(nano, "check", lambda problem, text: True)  # a random model is never right
    solver = ("--solver", "fixed:2", "--by", "forwards", "--no-write")
    run("tune", folder, "--task", "json", *few, *solver, "--out", files["tuned"])
    answer = run("demo", "--model", folder, "--prompt", HOSTILE, "--prompt", "c", "--json")
    files["demo"].write_text(answer.out)


def test_seeds_of_what_is_never_right_have_no_scores(run, folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = ["--task", "prompts", "--data", tmp_path / "rows.jsonl", "--mode", "ntp"]
    words += ["--temperature", "1", "--seed", "1", "--seed", "2", *SHORT]
    run("evaluate", folder, *words, "--out", tmp_path / "a.json")
    run("report", tmp_path / "a.json", "--out", tmp_path / "report")
    assert "| 1, 2 | 2 |  |  |  | 1.00 |" in (tmp_path / "report" / "report.md").read_text()


def test_a_finalist_that_differs_by_rounding_alone(run, records, tmp_path):
    tuned = json.loads(records["tuned"].read_text())
    tuned["results"][0]["finalists"][0] |= {"proven": False, "rounding": True, "lossless": False}
    (tmp_path / "tuned.json").write_text(json.dumps(tuned))
    run("report", tmp_path / "tuned.json", "--out", tmp_path / "report")
    assert "| rounding |" in (tmp_path / "report" / "report.md").read_text()


def test_everything_is_shown(run, folder, records, tmp_path):
    out = tmp_path / "report"
    found = run("report", *records.values(), "--out", out, "--json").json["files"]
    names = [Path(file).name for file in found]
    plots = ["score.png", "tokens.png", "forwards.png"]
    assert [name for name in names if name != "acceptance.png"] == [
        "report.md", *plots, "index.html"
    ]  # fmt: skip
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in plots)
    text = (out / "report.md").read_text()
    for title in (
        "Scores",
        "On the same problems",
        "Wall clock against",
        "One forward",
        "Tuning of",
    ):
        assert f"\n## {title}" in text
    scores = json.loads(records["scores"].read_text())
    assert scores["comparisons"]
    for one in scores["comparisons"]:
        bounds = [f"{100 * end:.1f}" for end in one["score_difference_interval"]]
        assert f"| {100 * one['score_difference']:.1f} | {' to '.join(bounds)} |" in text
    for line in scores["results"]:
        assert f"| {line['score']:.1%} |" in text
        bounds = line["tokens_per_forward_interval"]
        shown = " to ".join(f"{end:.2f}" for end in bounds)
        assert f"| {line['tokens_per_forward']:.2f} | {shown} |" in text
    assert scores["commit"] is None or scores["commit"] in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    page = (out / "index.html").read_text()
    for title in ("Scores", "One forward"):
        assert f"<h2>{title}</h2>" in page
    assert page.count("data:image/png;base64,") == len(names) - 2
    assert not re.search(r'(src|href)="(?!data:)', page)  # needs nothing else
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert [one["prompt"] for one in data] == [HOSTILE, "c"]
    for one in data:
        assert [answer["mode"] for answer in one["answers"]] == ["ntp", "sbd"]
        for answer in one["answers"]:
            assert len(answer["tokens"]) == len(answer["reveal_step"]) == len(answer["entropy"])
            assert max(answer["reveal_step"]) <= answer["nfe"]
            assert answer["name"].startswith(f"{folder.name}, ")


def test_a_curve_is_one_decoder_s(records) -> None:
    """Its lines differ in the parameter of the solver alone."""
    line = json.loads(records["scores"].read_text())["results"][0] | {"mode": "sbd", "model": "m"}
    ways = [("entropy:0.1", 16, 3.0), ("entropy:0.2", 16, 2.0), ("entropy:0.1", 8, 2.0)]
    ways += [("prefix:0.9", 16, 2.0)]
    lines = [
        line | {"solver": s, "settings": {"block_size": k}, "tokens_per_forward": rate}
        for s, k, rate in ways
    ]
    lines.append(lines[3] | {"solver": "prefix:0.5", "dtype": "bfloat16"})
    found = {
        name: [lines.index(one) for one in some] for name, some in report.curves(lines).items()
    }
    task = line["task"]
    assert found == {
        f"{task}, m sbd entropy k=16": [1, 0],
        f"{task}, m sbd entropy k=8": [2],
        f"{task}, m sbd prefix k=16 dtype=float32": [3],
        f"{task}, m sbd prefix k=16 dtype=bfloat16": [4],
    }


def test_one_kind_alone(run, records, tmp_path):
    shown = run("report", records["demo"], "--out", tmp_path / "demo").out
    assert shown.split() == [str(tmp_path / "demo" / name) for name in ("report.md", "index.html")]


def test_acceptance_by_offset(folder, tmp_path):
    """From samples made up: forwards of 3, 2, 1 and 3 tokens between the first and the last."""
    model = load(folder)
    line, score = evaluate.run(
        model,
        "json",
        nano.problems("json", "test", 1),
        1,
        mode="verified",
        block_size=4,
        branches=4,
        **FEW,
    )
    steps = [1, 2, 2, 2, 3, 3, 4, 5, 5, 5, 6]
    sample = asdict(score.samples[0]) | {"reveal_step": steps}
    record = new_record() | {"results": [line]}
    save_record(record, tmp_path / "some.json")
    older = {name: value for name, value in sample.items() if name != "reveal_step"}
    rows = [json.dumps({"run": 0, **one}) for one in (sample, older)]
    (tmp_path / "some.samples.jsonl").write_text("\n".join([*rows, rows[0][:20]]))
    [(found, shares)] = measured.read([tmp_path / "some.json"]).accepted
    assert report.name_of(found) == f"{folder.name} verified k=4 4+0"
    assert shares == [
        3 / 4,
        2 / 3,
    ]  # of four forwards three took one drafted token, two of those two
    assert "acceptance.png" in [
        file.name for file in report.write([tmp_path / "some.json"], tmp_path)
    ]


def test_models_of_the_same_name_are_told_apart(run, records, tmp_path):
    """By their whole paths; a record that is named twice counts once."""
    record = json.loads(records["scores"].read_text())
    record["comparisons"] = []
    for line in record["results"]:
        line["model"] = "elsewhere/" + Path(line["model"]).name
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    found = measured.read([records["scores"], other, records["scores"], records["bench"]])
    assert len(found.scores) == 2 * len(record["results"])
    names = {line["model"] for line in found.scores}
    assert len(names) == 2
    assert all("/" in name for name in names)
    assert {line["model"] for line in found.forwards} < names
    assert {line["model"] for line in measured.read([other]).scores} == {Path(min(names)).name}


@pytest.mark.parametrize(
    ("place", "value"),
    [("interval", [0.5]), ("model", None), ("settings", None), ("tokens_per_forward", None)],
)
def test_records_with_broken_lines(run, records, tmp_path, place, value):
    record = json.loads(records["scores"].read_text())
    record["results"][-1][place] = value
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(record))
    assert f"{broken} is no record" in run("report", broken, "--out", tmp_path / "out").error


@pytest.mark.parametrize(
    ("place", "value"),
    [("score", 7), ("interval", [0.9, 0.1]), ("n", 0), ("tokens_per_forward", -1)],
)
def test_numbers_that_no_command_measures(run, records, tmp_path, place, value):
    record = json.loads(records["scores"].read_text())
    record["results"][1][place] = value
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(record))
    error = run("report", edited, "--out", tmp_path / "out").error
    assert error.startswith(f"{edited}: results[1].{'score' if place == 'interval' else place} ")
    assert str(value) in error
    assert not (tmp_path / "out").exists()


def test_lines_that_would_have_one_name_say_wherein_they_differ(run, records, tmp_path):
    record = json.loads(records["scores"].read_text())
    del record["comparisons"]
    line = record["results"][-1] | {"mode": "sbd", "solver": "fixed:2"}
    lines = []
    for told, settings in (
        ({"dtype": "float32"}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "float32"}, {"max_new_tokens": 7}),
        ({"dtype": "float32"}, {"slide": True}),
        ({"dtype": "float32"}, {"fallback": 0.5, "next_token_seed": True}),
        ({"dtype": "float32"}, {"sampler": line["settings"]["sampler"] | {"temperature": 0.5}}),
    ):
        own = line["settings"] | {"slide": False, "max_new_tokens": 9} | settings
        lines.append({**line, **told, "settings": own})
    names = [
        "dtype=float32 max_new_tokens=9", "dtype=bfloat16 max_new_tokens=9",
        "dtype=float32 max_new_tokens=7", "sliding", "next-token seed fallback 0.5",
        "temperature 0.5",
    ]  # fmt: skip
    (tmp_path / "several.json").write_text(json.dumps(record | {"results": lines}))
    found = measured.read([tmp_path / "several.json"])
    start = measured.name_of(line | {"model": found.scores[0]["model"]})
    assert [measured.name_of(one) for one in found.scores] == [f"{start} {one}" for one in names]
    assert run("report", tmp_path / "several.json", "--out", tmp_path / "out").code == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(f"{start} {name} |" in text for name in names)


def test_bounds_that_rounding_put_beside_the_score(run, records, tmp_path):
    """As earlier versions wrote them where all answers were right."""
    record = json.loads(records["scores"].read_text())
    record["results"][1] |= {"score": 1.0, "interval": [0.51, 1 - 1e-15]}
    older = tmp_path / "older.json"
    older.write_text(json.dumps(record))
    assert run("report", older, "--out", tmp_path / "out").code == 0


def test_answers_are_paired_across_records(run, folder, tmp_path):
    """The same problems one and two at a time; other problems are left alone."""
    files = [tmp_path / f"{name}.json" for name in ("one", "two", "other")]
    for file, size, task in zip(files, ("1", "2", "1"), ("json", "json", "lists"), strict=True):
        words = ("--task", task, "--limit", "2", "--max-new-tokens", "8", "--batch-size", size)
        run("evaluate", folder, *words, "--mode", "sbd", "--out", file)
    found = measured.read(files)
    [pair] = found.comparisons
    assert (pair["task"], pair["n"], pair["identical_share"]) == ("json", 2, 1.0)
    assert pair["wall_clock_ratio"] is None
    name = f"{folder.name} sbd entropy:0.1 k=4"
    assert report.name_of(pair["second"]) == f"{name} batch_size=2"
    text = "\n".join(one.markdown() for one in report.tables(found))
    assert f"json: {name} batch_size=2 against {name} batch_size=1" in text


def test_sampled_answers_are_paired_with_those_of_their_seed(run, folder, tmp_path):
    """Or with greedy ones, where there are none of it."""
    files = [tmp_path / f"{name}.json" for name in ("ntp", "verified", "other")]
    words = ["--task", "json", "--limit", "2", "--max-new-tokens", "8", "--temperature", "1.5"]
    seeds = ["--seed", "3", "--seed", "4"], ["--seed", "4", "--seed", "3"], ["--seed", "5"]
    modes = "ntp", "verified", "ntp"
    for file, mode, some in zip(files, modes, seeds, strict=True):
        run("evaluate", folder, *words, "--mode", mode, *some, "--out", file)
    found = measured.read(files)
    for pair in found.comparisons:
        seeds = [pair[side]["settings"]["sampler"]["seed"] for side in ("first", "second")]
        assert seeds[0] == seeds[1]
        assert (pair["first"]["mode"], pair["second"]["mode"]) == ("ntp", "verified")
        assert pair["identical_share"] == 1.0
    assert len(found.comparisons) == 2
    greedy = tmp_path / "greedy.json"
    run("evaluate", folder, *words[:-2], "--mode", "ntp", "--out", greedy)
    for both in ([greedy, files[2]], [files[2], greedy]):
        pairs = measured.read(both).comparisons
        assert [one["first"]["settings"]["sampler"]["temperature"] for one in pairs] == [0]


def test_problems_of_one_name_are_told_apart(run, folder, tmp_path):
    """Held out or not; after examples of one file or another, which are not compared either."""
    short = ["--mode", "ntp", "--limit", "2", "--max-new-tokens", "8"]
    made = []
    for number, words in enumerate(([], ["--held-out"])):
        made.append(tmp_path / f"{number}.json")
        run("evaluate", folder, "--task", "json", *short, *words, "--out", made[-1])
    names = [measured.name_of(line) for line in measured.read(made).scores]
    assert names == [f"{folder.name} ntp held_out={told}" for told in (False, True)]
    rows = [{"question": f"{n} + 1?", "answer": f"So #### {n + 1}"} for n in range(6)]
    files = [tmp_path / f"{name}.jsonl" for name in ("asked", "some", "others")]
    for file, first in zip(files, (0, 2, 4), strict=True):
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows[first : first + 2]))
    made = []
    for shots in files[1:]:
        made.append(shots.with_suffix(".json"))
        words = ("--task", "gsm8k", "--data", files[0], "--shots", "1", "--shots-data", shots)
        run("evaluate", folder, *short, *words, "--out", made[-1])
    found = measured.read(made)
    names = [measured.name_of(line).rpartition("=")[2] for line in found.scores]
    assert [Path(name).name for name in names] == ["some.jsonl", "others.jsonl"]
    assert found.comparisons == []


def test_lines_and_comparisons_of_one_name_say_the_same(run, folder, tmp_path):
    """Of two records, each with a comparison of its own."""
    files = [tmp_path / f"{name}.json" for name in ("one", "two")]
    for file, size in zip(files, ("1", "2"), strict=True):
        words = ("--task", "json", "--limit", "2", "--max-new-tokens", "8", "--batch-size", size)
        run("evaluate", folder, *words, "--mode", "ntp", "--mode", "sbd", "--out", file)
    found = measured.read(files)
    names = [measured.name_of(line) for line in found.scores]
    assert len(set(names)) == 4
    for pair, first, second in zip(found.comparisons, (0, 2), (1, 3), strict=False):
        assert measured.name_of(pair["first"]) == names[first]
        assert measured.name_of(pair["second"]) == names[second]


def test_records_without_right_answers(run, folder, tmp_path):
    """Prompts that have none, other prompts, and a perplexity beyond all numbers."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        file.write_text('{"prompt": "a b"}\n{"prompt": "c d"}\n')
        words = ("--task", "prompts", "--data", file, "--max-new-tokens", "8", "--mode", "sbd")
        run("evaluate", folder, *words, "--mode", "ntp", "--out", file.with_suffix(".json"))
    made = [file.with_suffix(".json") for file in files]
    run("report", *made, "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    for name in ("a.jsonl", "b.jsonl"):
        assert f"ntp data={name} |" in text
    line = json.loads(made[0].read_text())
    line["results"] = [line["results"][0] | {"task": "perplexity", "interval": [None, None]}]
    line["comparisons"] = []
    made[0].write_text(json.dumps(line))
    assert run("report", made[0], "--out", tmp_path / "beyond").code == 0


def test_the_records_of_this_repository_can_be_read():
    read = 0
    for file in (Path(__file__).parent.parent / "benchmarks" / "records").glob("*.json"):
        record = json.loads(file.read_text())
        if all(
            {"mode", "solver", "score"} <= line.keys() for line in record.get("results") or [{}]
        ):
            read += 1
            measured.read([file], lambda one: report.page(one, report.tables(one), ()))
    assert read > 100


def test_samples_keep_the_forward_of_each_token(folder):
    _, score = evaluate.run(
        load(folder), "json", nano.problems("json", "test", 1), 1, mode="sbd", **FEW
    )
    [sample] = score.samples
    assert len(sample.reveal_step) == len(sample.token_ids)
    assert max(sample.reveal_step) <= sample.nfe


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": [{}]}', '{"answers": [{}]}'])
def test_files_that_are_no_record(run, tmp_path, content):
    file = tmp_path / "wrong.json"
    file.write_text(content)
    error = run("report", file, "--out", tmp_path / "out").error
    assert f"{file} is no record; those are the records of `setblock evaluate`" in error
    assert not (tmp_path / "out").exists()


def test_damaged_records_are_named(records, tmp_path, monkeypatch):
    """Whatever stands in the place of any number or text, or is missing: a line, no traceback."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **given: path.touch())
    file, named = tmp_path / "damaged.json", 0
    for kind in ("scores", "bench", "tuned", "demo"):
        whole = json.loads(records[kind].read_text())
        for part in ("results", "comparisons", "forwards", "answers"):
            lines = whole.get(part, [])[:1]
            for name in [name for line in lines for name in line]:
                for value in ("gone", "a text", [], {}):
                    damaged = copy.deepcopy(whole)
                    damaged[part][0][name] = value
                    if value == "gone":
                        del damaged[part][0][name]
                    file.write_text(json.dumps(damaged))
                    try:
                        report.write([file], tmp_path / "out")
                    except ValueError as error:
                        assert str(error).startswith(str(file)), (kind, name, value)  # noqa: PT017
                        named += 1
    assert named > 100


def test_damaged_samples_are_named(run, records, tmp_path):
    file = records["scores"].with_suffix(".samples.jsonl")
    first, *rest = file.read_text().splitlines()
    sample = json.loads(first)
    for name in ("run", "index", "token_ids", "nfe"):
        less = {key: value for key, value in sample.items() if key != name}
        file.write_text("\n".join([*rest, json.dumps(less)]))
        error = run("report", records["scores"], "--out", tmp_path / "out").error
        assert error.startswith(f"{file}, line {len(rest) + 1}, is no sample: "), name


def test_a_missing_file(run, tmp_path):
    assert "No such file" in run("report", tmp_path / "none", "--out", tmp_path).error
