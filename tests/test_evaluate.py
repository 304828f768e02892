"""Scores: right sums, right intervals, and records that say how they came about."""

import hashlib
import io
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import TableModel
from rich.console import Console

from setblock import evaluate, nano
from setblock.generation import Generation, generate, settings_for
from setblock.model import Model, load
from setblock.tasks import TASKS, Item, Task, load_items

SBD: dict[str, Any] = {
    "mode": "sbd", "solver": "entropy:1.5", "block_size": 6, "max_new_tokens": 12,
}  # fmt: skip
NTP: dict[str, Any] = {"mode": "ntp", "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model(checkpoint) -> Model:
    return load(checkpoint("llama"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def problems() -> list[nano.Problem]:
    return nano.problems("lists", "test", 9)


@pytest.fixture
def right(monkeypatch) -> set[str]:
    """Keys of the problems whose answers count as right: a random model gets nothing right."""
    keys: set[str] = set()
    monkeypatch.setattr(nano, "check", lambda problem, text: problem.key in keys)
    return keys


def no_progress(score: evaluate.Score) -> None:
    pass


# wilson_interval


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # Roots x of n (share - x)^2 = z^2 x (1 - x), by numpy.
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (0, 1, 0.0, 0.793451),
        (1, 1, 0.206549, 1.0),
        (5, 10, 0.236593, 0.763407),
        (80, 100, 0.711171, 0.866633),
        (1, 1000, 0.000177, 0.005643),
    ],
)
def test_wilson_interval(correct, n, low, high):
    assert evaluate.wilson_interval(correct, n) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_the_interval_holds_the_share_and_mirrors(n):
    for correct in range(n + 1):
        low, high = evaluate.wilson_interval(correct, n)
        assert 0 <= low < high <= 1
        assert low - 1e-12 <= correct / n <= high + 1e-12
        assert evaluate.wilson_interval(n - correct, n) == pytest.approx((1 - high, 1 - low))


def test_more_problems_narrow_the_interval():
    widths = [
        high - low for low, high in (evaluate.wilson_interval(n // 2, n) for n in (4, 40, 400))
    ]
    assert widths == sorted(widths, reverse=True)


# families


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (["nano"], ["arithmetic", "word", "json", "code", "lists"]),
        (["json"], ["json"]),
        (["lists", "json", "lists"], ["lists", "json"]),
        (["json", "nano"], ["json", "arithmetic", "word", "code", "lists"]),
        ([], []),
    ],
)
def test_families(tasks, expected):
    assert evaluate.families(tasks) == expected


def test_unknown_task():
    with pytest.raises(ValueError, match=r"task must be one of nano, arithmetic, .*, got 'poetry'"):
        evaluate.families(["json", "poetry"])
    with pytest.raises(ValueError, match="task gsm8k needs its rows: --data FILE"):
        evaluate.families(["json", "gsm8k"])


# evaluate, Score


@pytest.mark.parametrize("options", [NTP, SBD])
def test_the_sums_are_those_of_the_generations(model, problems, right, options):
    right |= {problem.key for problem in problems[:4]}
    score = evaluate.evaluate(model, problems, 4, **options)
    prompts = [problem.prompt for problem in problems]
    expected = generate(model, prompts, chat=True, **options)
    scored = {one.problem.key: one for one in score.scored}
    assert len(scored) == len(score.scored) == 9
    for problem, generation in zip(problems, expected, strict=True):
        one = scored[problem.key]
        assert one.correct == (problem.key in right)
        assert one.generation.token_ids == generation.token_ids
        assert one.generation.reveal_step == generation.reveal_step
    line = score.result()
    tokens, nfe = (sum(getattr(one, name) for one in expected) for name in ("num_tokens", "nfe"))
    assert line == {
        "n": 9,
        "correct": 4,
        "score": 4 / 9,
        "interval": evaluate.wilson_interval(4, 9),
        "tokens": tokens,
        "nfe": nfe,
        "prefill_forwards": 9,
        "tokens_per_forward": tokens / nfe,
        "tokens_per_forward_eos": 0.0,
        "eos_share": 0.0,
        "entropy_nats": pytest.approx(sum(sum(one.entropy) for one in expected) / tokens),
        "wall_s": score.wall_s,
    }
    assert score.accuracy == 4 / 9
    assert 0 < score.wall_s < 600


def test_tokens_per_forward_of_ntp_is_exactly_1(model, problems):
    line = evaluate.evaluate(model, problems, 4, **NTP).result()
    assert line["tokens_per_forward"] == 1
    assert line["nfe"] == line["tokens"] == 9 * 12


def test_sbd_takes_fewer_forwards(model, problems):
    options: dict[str, Any] = {**SBD, "solver": "fixed:3"}
    line = evaluate.evaluate(model, problems, 4, **options).result()
    assert (line["tokens"], line["nfe"]) == (9 * 12, 9 * 4)
    assert line["tokens_per_forward"] == 3


@pytest.mark.parametrize("options", [NTP, SBD])
def test_the_batch_size_changes_no_token(model, problems, options):
    answers = []
    for batch_size in (1, 8):
        score = evaluate.evaluate(model, problems, batch_size, **options)
        answers.append(
            {
                one.problem.key: (one.generation.token_ids, one.generation.reveal_step)
                for one in score.scored
            }
        )
    assert answers[0] == answers[1]


def test_rows_that_end_by_eos_are_counted_apart(model, problems, monkeypatch):
    """The token that the first answer holds fifth becomes EOS."""
    prompts = [problem.prompt for problem in problems]
    free = generate(model, prompts, chat=True, **NTP)
    eos = free[0].token_ids[4]
    monkeypatch.setattr(model, "eos_token_ids", frozenset([eos]))
    lengths = [
        one.token_ids.index(eos) + 1 if eos in one.token_ids else len(one.token_ids) for one in free
    ]
    ended = sum(eos in one.token_ids for one in free)
    line = evaluate.evaluate(model, problems, 9, **NTP).result()
    assert line["tokens"] == sum(lengths) < 9 * 12
    assert line["eos_share"] == ended / 9 > 0
    assert line["tokens_per_forward_eos"] == 1.0


def test_progress_is_reported_after_every_answer(model, problems, right):
    right |= {problem.key for problem in problems}
    seen: list[tuple[int, float]] = []
    evaluate.evaluate(
        model, problems, 4, lambda score: seen.append((len(score.scored), score.accuracy)), **NTP
    )
    assert seen == [(number, 1.0) for number in range(1, 10)]


def test_no_answer_yet_is_no_accuracy():
    assert evaluate.Score().accuracy == 0


def test_checking_is_not_timed(model, problems, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: float(next(clock)))

    def slow(problem: nano.Problem, text: str) -> bool:
        for _ in range(50):
            next(clock)
        return False

    monkeypatch.setattr(nano, "check", slow)
    reveals = len(list(evaluate.stream(model, ["x"] * 2, chat=True, **NTP)))
    clock = iter(range(1000))
    score = evaluate.evaluate(model, problems[:2], 2, **NTP)
    # One tick a step, and those that decoding itself reads in between; but none of the 100.
    assert reveals < score.wall_s < 100


# run


def test_a_line_of_the_record(model, problems):
    line = evaluate.run(model, "lists", problems[:3], 2, no_progress, **SBD, seed=5, stop="@@")
    assert list(line)[:4] == ["task", "model", "mode", "solver"]
    assert (line["task"], line["model"], line["mode"]) == ("lists", model.name, "sbd")
    assert line["solver"] == "entropy:1.5"
    assert (line["n"], line["batch_size"], line["dtype"]) == (3, 2, "float32")
    assert line["settings"] == {
        "mode": "sbd",
        "solver": "entropy:1.5",
        "block_size": 6,
        "max_new_tokens": 12,
        "sampler": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 5},
        "stop": ("@@",),
        "ignore_eos": False,
        "next_token_seed": False,
        "fallback": None,
        "draft": "branches",
        "branches": None,
        "seeds": 0,
    }
    assert json.loads(json.dumps(line))["interval"] == list(line["interval"])


def test_ntp_has_no_solver(model, problems):
    line = evaluate.run(model, "lists", problems[:1], 1, no_progress, **NTP)
    assert line["solver"] is None


def test_describe_is_json():
    settings = settings_for(TableModel.random(), solver="fixed:2", temperature=0.5)
    described = evaluate.describe(settings)
    assert described["solver"] == "fixed:2"
    assert json.loads(json.dumps(described))["sampler"]["temperature"] == 0.5


# benchmark tasks


@pytest.fixture
def sums(tmp_path) -> Path:
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_items_are_put_in_their_form_and_judged(model, sums, monkeypatch):
    task = TASKS["gsm8k"]
    items = load_items(task, sums)
    right = Task(**{**vars(task), "check": lambda item, text: int(item.target) % 2 == 0})
    form = evaluate.Form(right, chat=False, examples=tuple(items[:2]), data=sums)
    asked: list[str] = []
    encode = model.encode
    monkeypatch.setattr(
        model, "encode", lambda text, chat: asked.append(text) or encode(text, chat)
    )
    line = evaluate.run(model, "gsm8k", items[2:], 3, no_progress, form, **NTP)
    assert asked == [right.prompt(item, items[:2], False) for item in items[2:]]
    assert (line["n"], line["correct"]) == (3, 1)
    assert (line["task_version"], line["chat"], line["shots"]) == (1, False, 2)
    assert line["data"] == "sums.jsonl"
    assert line["data_sha256"] == hashlib.sha256(sums.read_bytes()).hexdigest()


def test_prompts_without_a_right_answer_have_no_score(model):
    form = evaluate.Form(TASKS["prompts"])
    line = evaluate.run(model, "prompts", [Item("1", "Hi", "", None)], 1, no_progress, form, **NTP)
    assert (line["correct"], line["score"], line["interval"]) == (None, None, None)
    assert line["tokens"] == 12
    assert "prompts" in "".join(shown([line], width=160))


# records


def test_a_new_record_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/setblock", "evaluate", "my model", "--json"])
    record = evaluate.new_record()
    assert record["command"] == "setblock evaluate 'my model' --json"
    assert record["results"] == []
    assert set(record["versions"]) == {"setblock", "torch", "transformers", "python"}
    assert all(record["versions"].values())
    assert set(record["machine"]) == {"cpu", "cores", "threads", "cuda"}
    assert record["machine"]["cpu"]
    assert record["date"].endswith("+00:00")
    assert json.loads(json.dumps(record)) == record


def repository(folder: Path, tracked: bool) -> str:
    """A checkout that holds an evaluate.py; its commit."""
    folder.mkdir()
    name = "evaluate.py" if tracked else "other.py"
    (folder / "evaluate.py").write_text("")
    (folder / name).write_text("")
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for words in (["init", "-q"], ["add", name], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    head = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(
        head, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("tracked", [True, False])
def test_the_commit_is_that_of_the_package(tmp_path, monkeypatch, tracked):
    """None where the package is only installed below somebody's checkout."""
    commit = repository(tmp_path / "checkout", tracked)
    file = tmp_path / "checkout" / "evaluate.py"
    monkeypatch.setattr(evaluate, "__file__", str(file))
    assert evaluate._commit() == (commit if tracked else None)
    file.write_text("changed")
    assert evaluate._commit() == (f"{commit}+" if tracked else None)


def test_no_commit_outside_a_checkout_or_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "__file__", str(tmp_path / "evaluate.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert evaluate._commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert evaluate._commit() is None


def test_a_record_replaces_the_file_at_once(tmp_path):
    path = tmp_path / "new" / "folder" / "record.json"
    evaluate.save_record({"results": [1]}, path)
    before = path.stat().st_ino
    evaluate.save_record({"results": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"results": [1, 2]}
    assert path.read_text().endswith("}\n")
    assert path.stat().st_ino != before, "written in place: a reader could see half of it"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_record(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    evaluate.save_record({"results": [1]}, path)

    def full(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        evaluate.save_record({"results": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"results": [1]}


# table


def shown(results: Sequence[dict], width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(evaluate.table(results))
    return console.export_text().splitlines()


def line(**changes) -> dict:
    return {
        "task": "json", "model": "runs/nano", "mode": "sbd", "solver": "entropy:0.35", "n": 200,
        "score": 0.915, "interval": (0.868, 0.946), "tokens_per_forward": 3.257, "wall_s": 12.34,
        **changes,
    }  # fmt: skip


def test_the_table_has_a_row_for_every_line():
    rows = shown([line(), line(mode="ntp", solver=None, task="code")], width=160)[3:-1]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    expected = [
        "runs/nano",
        "sbd",
        "entropy:0.35",
        "200",
        "91.5%",
        "86.8% to 94.6%",
        "3.26",
        "12.3",
    ]
    assert cells[0] == ["json", *expected]
    assert cells[1] == ["code", "runs/nano", "ntp", "", *expected[3:]]


def test_a_narrow_table_loses_nothing():
    rows = "\n".join(shown([line(model="runs/a-long-name-of-a-checkpoint")], width=80))
    column = "".join(row.split("│")[2].strip() for row in rows.splitlines() if row.startswith("│"))
    assert column == "runs/a-long-name-of-a-checkpoint"
    assert "…" not in rows


def test_generations_are_kept_for_a_closer_look(model, problems):
    score = evaluate.evaluate(model, problems[:1], 1, **NTP)
    assert isinstance(score.scored[0].generation, Generation)
    assert score.scored[0].problem is problems[0]
