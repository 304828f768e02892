"""Scores: right sums, right intervals, and records that say how they came about."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import TableModel
from rich.console import Console

from setblock import evaluate, likelihood, nano
from setblock.generation import generate, settings_for
from setblock.loading import load
from setblock.model import Model
from setblock.scores import Score, ratio_interval, repetition, wilson_interval
from setblock.tasks import TASKS, Item, Task, load_items, read_rows

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


def no_progress(score: Score) -> None:
    pass


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
    samples = {one.index: one for one in score.samples}
    assert len(samples) == len(score.samples) == 9
    for index, (problem, generation) in enumerate(zip(problems, expected, strict=True)):
        one = samples[index]
        assert (one.key, one.correct) == (problem.key, problem.key in right)
        assert (one.token_ids, one.text) == (generation.token_ids, generation.text)
        assert (one.nfe, one.finish_reason) == (generation.nfe, generation.finish_reason)
        ids = [*model.encode(problem.prompt, chat=True), *generation.token_ids]
        judged = likelihood.next_tokens(model, ids, generation.prompt_tokens).logprobs
        assert one.logprob_nats == pytest.approx(float(judged.sum()), abs=1e-4)
    line = score.result()
    tokens, nfe = (sum(getattr(one, name) for one in expected) for name in ("num_tokens", "nfe"))
    assert line == {
        "n": 9,
        "correct": 4,
        "score": 4 / 9,
        "interval": wilson_interval(4, 9),
        "tokens": tokens,
        "nfe": nfe,
        "prefill_forwards": 9,
        "tokens_per_forward": tokens / nfe,
        "tokens_per_forward_interval": ratio_interval(
            [(one.num_tokens, one.nfe) for one in expected]
        ),
        "tokens_per_forward_eos": 0.0,
        "eos_share": 0.0,
        "repetition": pytest.approx(sum(repetition(one.token_ids) for one in expected) / 9),
        "entropy_nats": pytest.approx(sum(sum(one.entropy) for one in expected) / tokens),
        "logprob_nats": pytest.approx(sum(one.logprob_nats for one in score.samples) / tokens),
        "wall_s": score.wall_s,
    }
    assert score.accuracy == 4 / 9
    assert 0 < score.wall_s < 600


LIKELIER: list[dict[str, Any]] = [
    {**NTP, "repetition_penalty": 1.3}, {**NTP, "mode": "verified", "regex": "[0-9]{2,6}"},
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [NTP, {**NTP, "mode": "verified", "lenience": 0.1}, SBD, *LIKELIER]
)
def test_next_token_decoding_tells_the_likelihood_of_its_text(
    model, problems, monkeypatch, options
):
    """A text of mode sbd, with penalties or of a form takes a forward of its own."""
    judged = []
    score = likelihood.next_tokens

    def counted(*given: Any) -> Any:
        judged.append(given)
        return score(*given)

    monkeypatch.setattr(likelihood, "next_tokens", counted)
    found = evaluate.evaluate(model, problems, 4, temperature=1.0, **options)
    own = options == SBD or options in LIKELIER
    assert len(judged) == (len(problems) if own else 0)
    prompts = evaluate.prompt_ids(model, problems, None)
    for one in found.samples:
        ids = prompts[one.index]
        expected = score(model, [*ids, *one.token_ids], len(ids)).logprobs.double().sum()
        assert one.logprob_nats == pytest.approx(float(expected), abs=1e-3)


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
        answers.append({one.index: (one.token_ids, one.nfe) for one in score.samples})
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
    seen: list[tuple[int, float | None]] = []
    evaluate.evaluate(
        model, problems, 4, lambda score: seen.append((len(score.samples), score.accuracy)), **NTP
    )
    assert seen == [(number, 1.0) for number in range(1, 10)]


def test_no_answer_yet_is_no_accuracy():
    assert Score().accuracy == 0


def test_checking_is_not_timed(model, problems, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: float(next(clock)))

    def slow(problem: nano.Problem, text: str) -> bool:
        for _ in range(50):
            next(clock)
        return False

    monkeypatch.setattr(nano, "check", slow)
    steps = generate(model, ["x"] * 2, chat=True, **NTP)[0].nfe
    clock = iter(range(1000))
    score = evaluate.evaluate(model, problems[:2], 2, **NTP)
    # One tick a step, and those that decoding itself reads in between; but none of the 100.
    assert steps < score.wall_s < 100


# run


def test_a_line_of_the_record(model, problems):
    line, _ = evaluate.run(model, "lists", problems[:3], 2, no_progress, **SBD, seed=5, stop="@@")
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
        "slide": False,
        "next_token_seed": False,
        "fallback": None,
        "draft": "branches",
        "branches": None,
        "seeds": 0,
        "lookup": 0,
        "lenience": 1.0,
    }
    assert json.loads(json.dumps(line))["interval"] == list(line["interval"])


def test_ntp_has_no_solver(model, problems):
    line, _ = evaluate.run(model, "lists", problems[:1], 1, no_progress, **NTP)
    with pytest.raises(ValueError, match="problems must be at least one, got none of task lists"):
        evaluate.run(model, "lists", [], 1, no_progress, **NTP)
    assert line["solver"] is None


def test_describe_is_json():
    settings = settings_for(TableModel.random(), solver="fixed:2", temperature=0.5)
    described = settings.described
    assert described["solver"] == "fixed:2"
    unused = settings_for(TableModel.random(), mode="ntp", solver="fixed:2")
    assert unused.described["solver"] is None
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
    rows = read_rows(sums)
    items = load_items(task, rows)
    right = Task(**{**vars(task), "check": lambda item, text: int(item.target) % 2 == 0})
    form = evaluate.Form(right, chat=False, examples=tuple(items[:2]), data=rows)
    asked: list[str] = []
    encode = model.encode
    monkeypatch.setattr(
        model, "encode", lambda text, chat: asked.append(text) or encode(text, chat)
    )
    line, _ = evaluate.run(model, "gsm8k", items[2:], 3, no_progress, form, **NTP)
    assert asked == [right.prompt(item, items[:2], False) for item in items[2:]]
    assert (line["n"], line["correct"]) == (3, 1)
    assert (line["task_version"], line["chat"], line["shots"]) == (6, False, 2)
    assert line["data"] == "sums.jsonl"
    assert line["data_sha256"] == hashlib.sha256(sums.read_bytes()).hexdigest()


def test_prompts_without_a_right_answer_have_no_score(model):
    form = evaluate.Form(TASKS["prompts"])
    line, _ = evaluate.run(
        model, "prompts", [Item("1", "Hi", "", None)], 1, no_progress, form, **NTP
    )
    assert (line["correct"], line["score"], line["interval"]) == (None, None, None)
    assert line["tokens"] == 12
    assert "prompts" in "".join(shown([line], width=160))


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


def test_the_table_says_in_what_blocks_verified_decoding_drafts():
    drafting = {"mode": "verified", "solver": None, "settings": {"block_size": 5}}
    assert "k=5" in "".join(shown([line(**drafting)], width=100))
    assert "k=" not in "".join(shown([line(mode="verified", solver=None)], width=100))


def test_the_table_has_a_row_for_every_line():
    numbers = ["91.5%", "86.8-94.6", "3.26", "12.3"]
    for other, model in (("runs/nano", ""), ("nano", "runs/nano ")):
        lines = [line(), line(mode="ntp", solver=None, task="code", model=other)]
        lines.append(line(settings={"slide": True}))
        rows = [row for row in shown(lines, width=160) if row.startswith("│")]
        cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
        assert cells[0] == ["json", f"{model}sbd entropy:0.35", *numbers]
        assert cells[1] == ["code", f"{'nano ' if model else ''}ntp", *numbers]
        assert cells[2] == ["json", f"{model}sbd entropy:0.35 sliding", *numbers]


@pytest.mark.parametrize(
    ("batch_sizes", "models", "title"),
    [
        ((4, 4), ("nano", "nano"), "nano, batch size 4"),
        ((4, 8), ("nano", "nano"), "nano"),
        ((4, None), ("nano", "[b]"), "batch size 4"),
        ((4, 8), ("nano", "[b]"), "┏"),
    ],
)
def test_the_title_says_what_all_lines_share(batch_sizes, models, title):
    pairs = zip(batch_sizes, models, (1, 2), strict=True)
    lines = [line(batch_size=size, model=model, n=n) for size, model, n in pairs]
    assert shown(lines, width=100)[0].strip().rstrip("━┳┓") == title


def test_numbers_of_items():
    assert "20 items of each task" in shown([line(n=20)], width=100)[0]
    assert "1 item of each task" in shown([line(n=1)], width=100)[0]
    rows = shown([line(n=20), line(n=30)], width=100)
    assert [row.split("│")[3].strip() for row in rows if row.startswith("│")] == ["20", "30"]


def test_a_solver_stays_whole_in_80_columns():
    lines = [line(solver="confidence-bound:0.35", score=1.0, interval=(0.97, 1.0), wall_s=1234.5)]
    assert any("confidence-bound:0.35" in row for row in shown(lines, width=80))


def test_comparisons():
    """What the first setting is, once where it is the same in all lines."""
    pair = {
        "task": "json", "first": line(mode="ntp", solver=None), "second": line(), "p_value": 0.25,
        "only_first": 3, "only_second": 1, "identical_share": 0.97, "wall_clock_ratio": 1.5,
    }  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(evaluate.comparison_table([pair]))
    text = console.export_text()
    assert "Against ntp" in text.splitlines()[0]
    row = next(row for row in text.splitlines() if row.startswith("│"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["json", "sbd entropy:0.35", "1 : 3", "0.25", "97.0%", "1.50x"]
    assert "right alone: problems that only this setting got right" in text
    console.print(evaluate.comparison_table([pair, pair | {"first": line(), "p_value": None}]))
    text = " ".join(console.export_text().split())
    assert "Against the first setting of the task" in text
    assert "sbd entropy:0.35 against ntp" in text


def test_a_narrow_table_loses_nothing():
    name = "runs/a-long-name-of-a-checkpoint"
    rows = "\n".join(shown([line(model=name), line(model="nano")], width=80))
    cells = [row.split("│") for row in rows.splitlines() if row.startswith("│")]
    column = "".join(row[2].strip() for row in cells).replace(" ", "")
    assert column.startswith(name + "sbdentropy:0.35")
    assert all(len(row) <= 80 for row in rows.splitlines())
    assert "…" not in rows
    cells = [row for row in shown([line()], width=80) if row.startswith("│")]
    assert len(cells) == 1, "one model's settings fit on a line"
