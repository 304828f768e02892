"""Training on a model's own answers: what is asked, what is kept, what a stop leaves."""

import json
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import copied
from datasets import Dataset
from fakes import TableModel
from trainings import PAIRS, QUICK, ROWS, ending, one_line, run, train, write

from setblock import packed
from setblock.answers import regenerate
from setblock.corpus import make_up_prompts, own_answers
from setblock.data import prepare
from setblock.finetune import finetune
from setblock.generation import finished, generate
from setblock.loading import load
from setblock.prompts import Sampling, sample_prompts
from setblock.rows import load_rows
from setblock.run import TrainingRun
from setblock.signals import SIGNALS
from setblock.train import SBDTrainer
from setblock.watch import prompts_of

# trl's own defaults use a name that transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


TALK = {"messages": [{"role": "user", "content": "a"}]}
OWN: Any = {"chat": True, "answers": "model"}


def test_training_onown_answers(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    """Rows need no more than a prompt; what is trained on are the very ids of the answers."""
    rows = write(tmp_path / "r.jsonl", [{"q": p} for p, _ in PAIRS])
    # an end token that is likely anywhere: some of the answers end
    base = ending(checkpoint("llama", mask_token="<mask>"), tmp_path / "base")
    where = ("--model", base, "--data", rows, "--output-dir", tmp_path / "out")
    own = ("--answers", "model", "--answer-tokens", "40", "--answer-batch-size", "2")
    own += ("--prompt-field", "q", "--max-block-size", "4")
    seen: dict[tuple[int, ...], list[int]] = {}

    class Noted(SBDTrainer):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            rows: Any = self.train_dataset
            for row in rows:
                seen[tuple(row["input_ids"])] = row["labels"]

    monkeypatch.setattr("setblock.finetune.SBDTrainer", Noted)
    said: list[str] = []
    monkeypatch.setattr("setblock.cli.common.err.print", lambda line, **how: said.append(line))
    summary = train(monkeypatch, capsys, *where, *own, "--save-strategy", "no")
    lines = (tmp_path / "out" / "_run" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert len(answers) == summary["rows"] == len(seen) == 4
    assert {a["finish_reason"] for a in answers} == {"eos", "length"}
    cut = sum(a["finish_reason"] == "length" for a in answers)
    assert any(one.endswith(f"tokens; {cut} were cut at answer_tokens=40") for one in said)
    assert any(one.startswith("answering 4 prompts with the model itself; ") for one in said)
    model = load(base)
    [end] = model.eos_token_ids
    for answer in answers:
        [again] = generate(model, [answer["prompt_ids"]], mode="ntp", max_new_tokens=40)
        assert list(again.token_ids) == answer["token_ids"]
        # the fill of the last block behind an end, and nothing behind an answer that was cut
        fill = 3 * [end] if answer["finish_reason"] == "eos" else []
        prompt, told = answer["prompt_ids"], answer["token_ids"] + fill
        assert seen[tuple(prompt + told)] == [-100] * len(prompt) + told


@pytest.mark.parametrize("method", ["full", "gated"])
def test_on_a_cpu_answers_come_from_weights_laid_out(checkpoint, tmp_path, monkeypatch, method):
    """They are written in less time, by a copy, which is made if any is missing."""
    writers = []

    def note(model: Any, *words: Any, **options: Any) -> Any:
        writers.append(model.packed)
        return finished(model, *words, **options)

    monkeypatch.setattr("setblock.answers.finished", note)
    rows = str(write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    words = ["--use-cpu", "--bf16", "no", "--max-steps", "1", "--save-strategy", "no"]
    said: list[str] = []
    how: Any = {"method": method, "answer_tokens": 8, **OWN}
    for name in ("first", "second"):
        finetune(
            TrainingRun(str(checkpoint("llama")), [rows], tmp_path / name, **how),
            words,
            said.append,
        )
        (tmp_path / "second" / "_run").mkdir(parents=True, exist_ok=True)
        answers = tmp_path / "first" / "_run" / "answers.jsonl"
        shutil.copy(answers, tmp_path / "second" / "_run")
    assert writers == [packed.missing(torch.device("cpu"), torch.float32) is None]
    assert sum(one.startswith("answering 2 prompts with the model") for one in said) == 1


def test_prompts_alone_needown_answers(tmp_path) -> None:
    rows = str(write(tmp_path / "rows.jsonl", [{"prompt": "a"}]))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .* has prompt \(prompts alone: --ans"):
        finetune(TrainingRun("no model is read", [rows], tmp_path / "out"), [])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_chats_ask_for_their_last_answer(tmp_path, suffix) -> None:
    """Of messages all is a prompt but an answer that comes last."""
    ask, told, more = ({"role": role, "content": role} for role in ("system", "assistant", "user"))
    rows = Dataset.from_list(
        [{"messages": [ask, more, told, more, told]}, {"messages": [ask, more]}]
    )
    file = tmp_path / f"chats.{suffix}"
    rows.to_parquet(file) if suffix == "parquet" else rows.to_json(file)
    for name in ("prompt", "messages"):
        read = load_rows([str(file)], prompt_field=name, prompts_only=True)
        assert read["prompt"] == [[ask, more, told, more], [ask, more]]
        assert set(read.column_names) == {"prompt", "where"}
    rows = Dataset.from_list([{"messages": [told]}])
    rows.to_parquet(file) if suffix == "parquet" else rows.to_json(file)
    with pytest.raises(ValueError, match=r"chats.* messages ask nothing: there is an answer alone"):
        load_rows([str(file)], prompts_only=True)


def test_prompts_of_several_forms_are_answered_together(checkpoint, tmp_path) -> None:
    """Their completions, or that there are none, make no difference."""
    talk = {"prompt": "a ", "messages": [], "level": 3}
    parts = [[{"prompt": "x y "}, talk], [{"prompt": "q ", "completion": "r"}]]
    files = [str(write(tmp_path / f"{n}.jsonl", part)) for n, part in enumerate(parts)]
    rows = load_rows(files, prompts_only=True).remove_columns("where").to_list()
    assert rows == [{"prompt": "x y "}, {"prompt": "a "}, {"prompt": "q "}]
    model = load(checkpoint("llama", mask_token="<mask>"))
    asked = prepare(load_rows(files, prompts_only=True), model.tokenizer, chat=True)
    ids = [model.encode(row["prompt"], chat=True) for row in rows]
    assert prompts_of(model, asked) == ids


def test_a_model_whose_answers_are_all_empty_has_none_to_learn(tmp_path, monkeypatch) -> None:
    model = TableModel.spelling("", start=1)
    monkeypatch.setattr("setblock.answers.prompts_of", lambda model, rows: [[3], [4]])
    rows = Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ValueError, match="all of the model's 2 answers are empty"):
        regenerate(model, rows, tmp_path / "answers.jsonl", 8, 2)


def test_prompts_and_answers_of_its_own(tmp_path, monkeypatch, capsys) -> None:
    """No data at all: and a resumed run takes the prompts that are there."""
    words = ("--model", "nano", "--data", "own:3", "--chat", "--answers", "model")
    words += ("--method", "gated", "--answer-tokens", "24", "--answer-batch-size", "2")
    words += ("--seed", "5", "--save-steps", "1", "--output-dir", tmp_path / "out")
    summary = train(monkeypatch, capsys, *words)
    file = tmp_path / "out" / "_run" / "prompts.jsonl"
    told = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    model = load("nano", dtype="float32")
    assert told == [text for _, text in sample_prompts(model, 3, Sampling(seed=5))]
    lines = (tmp_path / "out" / "_run" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert 0 < summary["rows"] == sum(bool(answer["text"]) for answer in answers)
    asked = sorted(answer["prompt_ids"] for answer in answers)
    assert asked == sorted(model.encode(prompt, chat=True) for prompt in told)
    monkeypatch.setattr("setblock.corpus.write_prompts", None)
    run(monkeypatch, "train", *words, *QUICK.split(), "--max-steps", "4", "--resume", "--json")
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    (tmp_path / "new" / "_run").mkdir(parents=True)
    shutil.copy(file, tmp_path / "new" / "_run")
    monkeypatch.undo()
    fewer = TrainingRun("nano", ["own:2"], tmp_path / "new", chat=True, answers="model")
    with pytest.raises(ValueError, match=r"prompts.jsonl holds 3 prompts, more than own:2: move"):
        finetune(fewer, ["--max-steps", "1", "--bf16", "no", "--seed", "5"])


@pytest.mark.parametrize(
    ("known", "told"),
    [(0, ["making up 2 prompts with the model itself; "]), (1, [", 1 of them before; "]), (2, [])],
)
def test_making_up_prompts_says_how_many_are_there(tmp_path, monkeypatch, known, told) -> None:
    run = TrainingRun("nano", ["own:2"], tmp_path, chat=True, answers="model")
    run.prompts_file.parent.mkdir(parents=True)
    run.prompts_file.write_text('{"prompt": "a"}\n' * known)
    monkeypatch.setattr("setblock.corpus.write_prompts", lambda model, file, count, *rest: count)
    said: list[str] = []
    make_up_prompts(run, TableModel.spelling("", start=1), 5, said.append)
    assert len(said) == len(told)
    assert all(part in line for part, line in zip(told, said, strict=True))


def test_other_machines_must_see_what_the_first_rank_wrote(tmp_path, monkeypatch) -> None:
    """Else each of their ranks would write all of it again, into the same file."""
    here = SimpleNamespace(is_main_process=False, main_process_first=nullcontext)
    monkeypatch.setattr("setblock.corpus.PartialState", lambda: here)
    monkeypatch.setattr("setblock.corpus.write_prompts", None)
    monkeypatch.setattr("setblock.answers.prompts_of", lambda model, rows: [[3], [4]])
    run, model = (
        TrainingRun("nano", ["own:2"], tmp_path, answer_tokens=8, **OWN),
        TableModel.spelling("b", start=1),
    )
    told = "{} has {} of the 2 lines that the first rank wrote: output_dir must be in a folder that"
    run.prompts_file.parent.mkdir()
    run.prompts_file.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=told.format("prompts.jsonl", 1)):
        make_up_prompts(run, model, 5, print)
    rows, file = Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "_run"
    with pytest.raises(ValueError, match=told.format("answers.jsonl", 0)):
        own_answers(run, model, rows, print)
    assert not (file / "answers.jsonl").exists()
    regenerate(model, rows, file / "answers.jsonl", run.answer_tokens, 2)  # what it would find
    assert len(own_answers(run, model, rows, print)) == 2


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        (["own:2"], {}, "are users' turns that .* give chat and answers 'model' as well"),
        (["own:2"], {"chat": True}, "give chat and answers 'model' as well"),
        (["own:2"], {"answers": "model"}, "give chat and answers 'model' as well"),
        (["own:x"], {}, "data 'own:x' must be own:COUNT, such as own:2000"),
        (["own:0"], {}, "data 'own:0' must be own:COUNT"),
        (["own:2", "a.jsonl", "own:3"], {}, "data 'own:3': 'own:2' is there already"),
        (["own:2"], {**OWN, "split": "test"}, "split is for hub datasets, got 'test'"),
        (["own:2"], {**OWN, "eval_data": "own:3"}, "^eval_data can't be own:COUNT, which is for"),
        (["own:2"], {**OWN, "decode_data": "own:3", "decode_every": 1}, "^decode_data can't be"),
    ],
)
def test_what_own_prompts_need(tmp_path, data, more, message) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingRun("nano", data, tmp_path, **more)


@pytest.mark.parametrize(
    ("rows", "more", "words", "message"),
    [
        (None, {}, (), "no file '.*more.jsonl'"),
        ([{"text": "a"}], {}, (), "a row needs prompt or messages; this one has text"),
        (
            [{"prompt": [{"role": "user", "content": "a"}]}],
            {},
            (),
            "own:2 are prompts of text, which do not mix with data whose prompts are messages: ",
        ),
        (
            [{"prompt": "a"}],
            {"answer_tokens": 1020},
            (),
            "answer_tokens=1020 leaves no room for a prompt in the model's context of 1024 tokens",
        ),
        ([{"prompt": "a"}], {}, ("--report_to", "nobody"), "nobody is not supported, only"),
    ],
)
def test_what_is_wrong_is_said_before_prompts_are_made_up(
    tmp_path, monkeypatch, rows, more, words, message
) -> None:
    monkeypatch.setattr("setblock.corpus.write_prompts", None)
    file = tmp_path / "more.jsonl"
    if rows is not None:
        write(file, rows)
    run = TrainingRun("nano", ["own:2", str(file)], tmp_path / "out", **OWN, **more)
    with pytest.raises(ValueError, match=message):
        finetune(run, ["--bf16", "no", *words])


def test_own_prompts_beside_other_data(tmp_path) -> None:
    """The other data's columns may have other names."""
    file = write(tmp_path / "more.jsonl", [{"q": "What is 2 + 2?", "prompt": "not this"}])
    run = TrainingRun(
        "nano", ["own:2", str(file)], tmp_path / "out", method="gated", prompt_field="q",
        answer_tokens=16, **OWN,
    )  # fmt: skip
    finetune(run, ["--max-steps", "1", "--bf16", "no", "--use_cpu"])
    lines = (tmp_path / "out" / "_run" / "answers.jsonl").read_text().splitlines()
    asked = [json.loads(line)["prompt"] for line in lines]
    assert len(asked) == 3
    assert [{"role": "user", "content": "What is 2 + 2?"}] in asked


def test_answers_hold_where_the_template_tells_the_date(checkpoint, tmp_path) -> None:
    from datasets import Dataset

    model = load(checkpoint("llama"))
    turns = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}])
    found = []
    for day in ("Monday", "Tuesday"):
        model.tokenizer.chat_template = f"{day}: {turns}"
        found.append(regenerate(model, rows, tmp_path / "answers.jsonl", 8, 1).to_list())
    assert found[0] == found[1]


def test_answers_go_on_where_they_stopped(checkpoint, tmp_path, monkeypatch) -> None:
    from datasets import Dataset

    from setblock import answers

    model = load(ending(checkpoint("llama", mask_token="<mask>"), tmp_path / "base"))
    rows, file = Dataset.from_list(ROWS), tmp_path / "answers.jsonl"
    whole = answers.regenerate(model, rows, file, 40, 2).to_list()
    lines = file.read_text().splitlines(keepends=True)
    asked = []
    finished = answers.finished

    def counting(model, prompts, **options):
        asked.append(len(prompts))
        return finished(model, prompts, **options)

    monkeypatch.setattr(answers, "finished", counting)
    file.write_text(lines[0] + lines[1] + lines[2][:20])  # killed while it wrote the third
    assert answers.regenerate(model, rows, file, 40, 2).to_list() == whole
    assert asked == [2]
    assert answers.regenerate(model, rows, file, 40, 2).to_list() == whole
    with pytest.raises(ValueError, match="max_new_tokens of answer"):
        answers.regenerate(model, rows, file, 41, 2)
    with pytest.raises(ValueError, match="prompt of answer"):
        answers.regenerate(model, rows.select([3, 2, 1, 0]), file, 40, 2)
    known = {"index": 0, "prompt": "a", "prompt_ids": [5], "token_ids": [6], "text": "b"}
    for damaged in ({"foo": 1}, {**known, "index": "x"}, {**known, "token_ids": "zz"}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"answers\.jsonl:1: no answer of ours"):
            answers.regenerate(model, rows, file, 40, 2)


@pytest.mark.parametrize(("method", "whose"), [("gated", "base"), ("lora", "adapter")])
def test_answers_of_a_base_are_those_of_a_gated_adapter_on_it(
    checkpoint, rows, tmp_path, monkeypatch, capsys, method, whose
) -> None:
    """What was answered for the base may be copied into the folder of a run that goes on."""
    base = ending(checkpoint("llama", mask_token="<mask>"), tmp_path / "base")
    words = ("--data", rows, "--answers", "model", "--answer-tokens", "40", "--method", method)
    words += (*QUICK.split(), "--lora-rank", "4", "--max-steps", "1")
    first, second = tmp_path / "first", tmp_path / "second"
    train(monkeypatch, capsys, "--model", base, "--output-dir", first, *words)
    assert load(first).author == str({"base": base, "adapter": first}[whose])
    (second / "_run").mkdir(parents=True)
    shutil.copy(first / "_run" / "answers.jsonl", second / "_run")
    monkeypatch.setattr(
        "setblock.answers.finished", lambda *_, **__: [None]
    )  # no answer of any use
    if whose == "base":
        train(monkeypatch, capsys, "--model", first, "--output-dir", second, *words)
    else:
        with pytest.raises(SystemExit):
            run(monkeypatch, "train", "--model", first, "--output-dir", second, *words)
        assert "answers of another run: model of answer" in one_line(capsys)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_while_the_model_answers_says_how_to_go_on(
    checkpoint, rows, tmp_path, monkeypatch, capsys, name
) -> None:
    monkeypatch.setattr("setblock.answers.finished", lambda *a, **k: signal.raise_signal(number))
    number, handlers = signal.Signals[name], [signal.getsignal(n) for n in SIGNALS]
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    words += ("--answers", "model", "--answer-tokens", "40")
    with pytest.raises(SystemExit) as code:
        run(monkeypatch, "train", *words, *QUICK.split())
    assert code.value.code == 128 + number
    said = f"stopped by {name}; answers and checkpoints that there are, are kept: the same command "
    assert said in one_line(capsys)
    assert [signal.getsignal(n) for n in SIGNALS] == handlers


def test_a_chain_that_can_not_be_is_refused_before_any_answer(checkpoint, rows, tmp_path) -> None:
    model = copied(checkpoint("llama"), tmp_path / "scaled", "config.json", dim_model_base=16)
    run = TrainingRun(str(model), [str(rows)], tmp_path / "o", method="gated")
    with pytest.raises(ValueError, match=r"^chain_width must be 0, got 8: the output layer of a "):
        finetune(replace(run, answers="model", chain_width=8), [*QUICK.split()])
    assert not (tmp_path / "o" / "_run" / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "row", "message"),
    [
        (
            {"answers": "model"},
            {"text": "a"},
            r"rows.jsonl:1: a row needs prompt or messages; this",
        ),
        (
            {"decode_every": 2},
            {"text": "a"},
            r"rows.jsonl:1: a text holds no prompt to be answered$",
        ),
        (
            {"decode_every": 2},
            TALK,
            r"rows.jsonl:1: messages must end with the assistant's answer$",
        ),
        (
            {"decode_every": 2},
            {"messages": [*TALK["messages"], {"role": "assistant", "content": " "}]},
            r"rows.jsonl:1: messages hold an empty message of the assistant's$",
        ),
    ],
)
def test_only_prompts_can_be_answered(tmp_path, more, message, row) -> None:
    file = str(write(tmp_path / "rows.jsonl", [row]))
    if "decode_every" in more:
        more["decode_data"] = file
    with pytest.raises(ValueError, match=message):
        finetune(TrainingRun("no model is read", [file], tmp_path / "o", **more), [])


def test_resume_while_answering_says_what_to_do(checkpoint, rows, tmp_path) -> None:
    (tmp_path / "o" / "_run").mkdir(parents=True)
    (tmp_path / "o" / "_run" / "answers.jsonl").touch()
    with pytest.raises(ValueError, match="without --resume the same command goes on"):
        finetune(
            TrainingRun(str(checkpoint("llama")), [str(rows)], tmp_path / "o", resume=True), []
        )


def test_prompts_too_long_to_answer_are_left_out(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    long = {"prompt": "a" * 230, "completion": "b"}
    rows = write(tmp_path / "rows.jsonl", [*ROWS, long])
    base = ending(checkpoint("llama", mask_token="<mask>"), tmp_path / "base")
    words = ("--model", base, "--data", rows, "--decode-data", rows, "--decode-every", "9")
    words += ("--answers", "model", "--answer-tokens", "40", "--output-dir", tmp_path / "out")
    run(monkeypatch, "train", *words, *QUICK.split(), "--json")
    shown = capsys.readouterr()
    said = " ".join(shown.err.split())
    assert "1 of 5 prompts are left out of the training data: they have more than 208" in said
    assert "1 of 5 prompts are left out of the held-out decoding" in said
    assert json.loads(shown.out)["decode"][0]["decode_n"] == 4
    only = write(tmp_path / "only.jsonl", [long])
    words = ("--model", base, "--data", only, "--output-dir", tmp_path / "none")
    words += ("--answers", "model", "--answer-tokens", "40")
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *words, *QUICK.split())
    assert "no prompt of the training data leaves room" in one_line(capsys)
