"""From a model to a faster one: what is learned, what is kept back, where a stop leaves it."""

import json
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import copied
from trainings import run, write

from setblock.cli import speeding
from setblock.cli.speeding import DECIDED
from setblock.config import SBDConfig
from setblock.evaluate import evaluate
from setblock.generation import generate
from setblock.loading import load
from setblock.run import TrainingRun, parse_config
from setblock.signals import Stopped
from setblock.speedup import RECIPE, as_learned, learn, with_recipe

# trl's own defaults use a name that transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
STEPS = ("--max-steps", "2", "--bf16", "no", "--disable-tqdm", "yes")
CHOSEN = {"mode": "verified", "solver": None, "block_size": 3, "branches": 1, "seeds": 0}
CHOSEN |= {"lookup": 8, "lossless": True, "rounding": False, "proven": True}
CHOSEN |= {"score": 1.0, "drop": 0.0, "drop_bounds": (0.0, 0.4), "tokens_per_forward": 2.5}
CHOSEN |= {"speed": 1.75}


@pytest.fixture
def prompts(tmp_path) -> Path:
    rows = [{"question": f"question {n}?", "answer": 3} for n in range(9)]
    return write(tmp_path / "prompts.jsonl", [*rows, rows[0]])


@pytest.fixture
def words(checkpoint, prompts, tmp_path) -> tuple[str, ...]:
    """The command's, for a random model."""
    said = ("--model", checkpoint("llama"), "--data", prompts, "--prompt-field", "question")
    said += ("--output-dir", tmp_path / "fast", "--held-out", "3", "--answer-tokens", "6")
    return tuple(map(str, (*said, *STEPS)))


@pytest.fixture
def chooses(monkeypatch):
    """chooses(**changes): every search ends in CHOSEN but for these.

    was: the acceptance that the model said it had, None for nothing.
    """

    def use(was=None, **changes):
        line = CHOSEN | changes
        found = {"chosen": line, "finalists": [line], "acceptance": 0.7, "by": "clock"}
        found |= {"judged": False, "before": {"acceptance": was}, "max_drop": 0.005}
        found |= {"confidence": 0.95, "confirmed_on": 1}
        monkeypatch.setattr(speeding, "search", lambda *args: found)

    return use


def test_one_command(words, prompts, checkpoint, tmp_path, monkeypatch, capsys) -> None:
    """A model that says what its base says; the prompts that choose were not learned."""
    more = ("--lora-rank", "4", "--answer-batch-size", "2", "--batch-size", "2")
    more += ("--dtype", "float32", "--compile", "off", "--limit", "8")
    run(monkeypatch, "speedup", *words, *more, "--json")
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    folder = tmp_path / "fast"
    assert json.loads((folder / "speedup.json").read_text()) == record
    assert (record["training"]["steps"], record["training"]["rows"]) == (2, 5), "8 but 3 held out"
    own = folder / "_run"
    learned, held_out = (
        [json.loads(line)["prompt"] for line in (own / name).read_text().splitlines()]
        for name in ("learned.jsonl", "held_out.jsonl")
    )
    assert held_out == ["question 0?", "question 2?", "question 5?"]
    assert sorted(learned + held_out) == [f"question {n}?" for n in range(8)]
    [line] = record["results"]
    assert line["batch_size"] == 2
    assert (line["picked_on"], line["confirmed_on"]) == (2, 1)
    adapter = json.loads((folder / "adapter_config.json").read_text())
    assert adapter["r"] == 4
    model, base = load(folder, dtype="float32"), load(checkpoint("llama"), dtype="float32")
    assert model.gated
    assert model.defaults["mode"] == line["chosen"]["mode"]
    assert model.acceptance == line["acceptance"]
    ids = [base.encode(text, chat=True) for text in held_out]
    said = generate(model, ids, mode="verified", max_new_tokens=12)
    asked = generate(base, ids, mode="ntp", max_new_tokens=12)
    assert [one.token_ids for one in said] == [one.token_ids for one in asked]
    items, form = as_learned(own / "held_out.jsonl", base, chat=True)
    assert [form.prompt(one) for one in items] == ids

    monkeypatch.setattr("setblock.speedup.finetune", None)
    monkeypatch.setattr(speeding, "search", None)
    run(monkeypatch, "speedup", *words, *more, "--json")
    assert json.loads(capsys.readouterr().out) == record, "nothing is left to do"


def test_a_model_that_can_have_no_chain(
    words, checkpoint, tmp_path, monkeypatch, capsys, chooses
) -> None:
    chooses()
    llama = checkpoint("llama")
    scaled = copied(llama, tmp_path / "scaled", "config.json", dim_model_base=16)
    run(monkeypatch, "speedup", *(str(scaled) if word == str(llama) else word for word in words))
    told = "no chain: the output layer of a llama with dim_model_base=16 reads other states than"
    assert told in " ".join(capsys.readouterr().err.split())
    assert load(tmp_path / "fast").chain is None
    assert load(tmp_path / "fast").gated


def test_the_folder_of_another_command(words, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "fast" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words)
    left = f"{tmp_path / 'fast'} holds a run of another command (checkpoint-3): choose another out"
    assert left in capsys.readouterr().err
    assert [one.name for one in (tmp_path / "fast").iterdir()] == ["checkpoint-3"]


def test_without_prompts(tmp_path, monkeypatch, capsys, chooses) -> None:
    """The model makes them up; what is wrong is told before that."""
    chooses()
    folder = tmp_path / "fast"
    words = ("--model", "nano", "--data", "own:6", "--output-dir", folder, "--held-out", "2")
    words += ("--answer-tokens", "24", "--seed", "5", *STEPS)
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words, "--lerning-rate", "1")
    assert "did you mean --learning-rate" in capsys.readouterr().err
    for option, why in DECIDED.items():
        with pytest.raises(SystemExit):
            run(monkeypatch, "speedup", *words, f"--{option}", "1")
        assert f"--{option} is no option of speedup: {why}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words, "--decode-every", "1")
    assert "--decode-every is no option of speedup: `setblock train` ta" in capsys.readouterr().err
    assert not folder.exists()
    run(monkeypatch, "speedup", *words)
    out = (first := capsys.readouterr()).out
    where = "timed on 1 of the prompts held out"
    said = f"{folder} says what nano says token by token, 1.75 times as fast, {where}\n"
    assert f"{said}now: setblock serve {folder}\n" in out
    run(monkeypatch, "speedup", *words)
    again = capsys.readouterr()
    assert again.out == out
    assert "finished already; what" in again.err
    assert "nano is trained for set block decoding already; speeds here are over" in first.err
    lines = (folder / "_run" / "prompts.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == 6
    assert len((folder / "_run" / "learned.jsonl").read_text().splitlines()) == 4
    model = load(folder)
    assert (model.defaults["mode"], model.acceptance) == ("verified", 0.7)
    assert model.drafting == {"block_size": 3, "branches": 1, "seeds": 0, "lookup": 8}
    card = (folder / "README.md").read_text()
    chosen = "verified, blocks of 3, 1 branch, lookup 8: 1.75 times as\nfast as"
    assert f"on prompts held out, {chosen}" in card
    assert f'setblock generate {folder.name} --chat --prompt "..."' in card
    assert "measures how many of its drafts" not in card


def test_what_the_search_chose_is_told(words, tmp_path, monkeypatch, capsys, chooses) -> None:
    chooses(mode="ntp", speed=1.0)
    run(monkeypatch, "speedup", *words)
    out = capsys.readouterr().out
    assert "decodes token by token: nothing else is faster on this machine yet. More steps" in out
    assert "no setting is written" not in out
    assert load(tmp_path / "fast").defaults["mode"] == "ntp", "else it would draft"
    card = (tmp_path / "fast" / "README.md").read_text()
    assert "It decodes token by token: `setblock speedup` found nothing faster (" in card
    assert "By default it decodes verified" not in card
    assert "acceptance of drafted tokens: 0.70\n" in out
    chooses(was=0.6, lossless=False, rounding=True, proven=False)
    monkeypatch.setattr("setblock.speedup.finetune", None)
    record = json.loads((tmp_path / "fast" / "speedup.json").read_text())
    (tmp_path / "fast" / "speedup.json").write_text(json.dumps(record | {"results": []}))
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    run(monkeypatch, "speedup", *words)
    out, told = capsys.readouterr()
    assert "this machine is busy (load 99.0 on" in told
    assert "llama" in out
    assert "says token by token, but for rounding, 1.75 times as fast" in out
    assert "rounding: verified, whose text differs" in out
    assert "acceptance of drafted tokens: 0.70, was 0.60\n" in out
    card = (tmp_path / "fast" / "README.md").read_text()
    chosen = "verified, blocks of 3, 1 branch, lookup 8: 1.75 times as\nfast as"
    assert f"{chosen} token by token (" in card
    assert ", batch size 1, timed on 1 prompt of up to 6 new tokens). `setblock tune" in card
    assert "It decodes token by token" not in card
    assert load(tmp_path / "fast").defaults["mode"] == "verified"


@pytest.mark.parametrize("where", ["answers", "steps", "settings"])
def test_a_stop_loses_nothing(words, tmp_path, monkeypatch, capsys, chooses, where) -> None:
    def stop(*args):
        if where == "answers":
            raise Stopped("SIGTERM")
        os.kill(os.getpid(), signal.SIGTERM)  # while timing

    trained = []
    finetune = sys.modules["setblock.speedup"].finetune

    def stopped(one, *rest):
        if where == "answers":
            stop()
        summary = finetune(one, *rest)
        trained.append(one.resume)
        return summary | {"stopped_by": "SIGINT"} if where == "steps" else summary

    monkeypatch.setattr("setblock.speedup.finetune", stopped)
    monkeypatch.setattr(speeding, "search", stop)
    monkeypatch.setattr(sys, "argv", ["setblock", "speedup", *words])
    monkeypatch.setattr("setblock.records._commit", lambda: "stopped")
    with pytest.raises(SystemExit) as code:
        run(monkeypatch, "speedup", *words)
    said = " ".join(capsys.readouterr().err.split())
    assert code.value.code == {"answers": 143, "steps": 130, "settings": 143}[where]
    assert "the same command goes on" in said
    where = "done"
    chooses()
    monkeypatch.setattr("setblock.records._commit", lambda: "timed")
    run(monkeypatch, "speedup", *words)
    assert "1.75 times as fast" in capsys.readouterr().out
    record = json.loads((tmp_path / "fast" / "speedup.json").read_text(encoding="utf-8"))
    assert record["commit"] == "timed", "the code that made the result"
    # Stopped between two steps it goes on from its checkpoint; what is trained stays as it is.
    assert trained in ([False], [False, True])


@pytest.fixture
def state(words, tmp_path, monkeypatch, chooses) -> Path:
    """The trainer's in the one checkpoint of a run that ended before its model was saved."""
    chooses()
    run(monkeypatch, "speedup", *words)
    for one in (tmp_path / "fast").iterdir():
        if one.is_file():
            one.unlink()
    return tmp_path / "fast" / "checkpoint-2" / "trainer_state.json"


def test_a_first_checkpoint_that_a_stop_cut_short(words, state, monkeypatch, capsys) -> None:
    """Prompts and answers stay, and the training begins anew."""
    state.unlink()
    answers = state.parents[1] / "_run" / "answers.jsonl"
    written = answers.stat().st_mtime_ns
    capsys.readouterr()
    run(monkeypatch, "speedup", *words)
    assert f"{state.parent} is of a run that ended while it" in " ".join(
        capsys.readouterr().err.split()
    )
    assert state.exists()
    assert answers.stat().st_mtime_ns == written


def test_a_checkpoint_of_another_version_is_not_begun_anew(
    words, state, monkeypatch, capsys
) -> None:
    state.write_text(json.dumps(json.loads(state.read_text()) | {"of_the_future": 1}))
    weights = sorted(file.name for file in state.parent.iterdir())
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words)
    said = " ".join(capsys.readouterr().err.split())
    assert "no trainer_state.json that this version of transformers reads" in said
    assert sorted(file.name for file in state.parent.iterdir()) == weights


def test_a_longer_run_goes_on(words, tmp_path, monkeypatch, capsys, chooses) -> None:
    chooses()
    run(monkeypatch, "speedup", *words)
    run(monkeypatch, "speedup", *words, "--max-steps", "3", "--json")
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["training"]["steps"] == 3
    lines = (tmp_path / "fast" / "log.jsonl").read_text().splitlines()
    assert len(lines) >= 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--held-out", "9"),
            "held_out must be at least 2, and less than 9, the number of prompts",
        ),
        (("--held-out", "1"), "held_out must be at least 2, got 1"),
        (("--batch-size", "0"), "--batch-size must be at least 1, got 0"),
        (("--split", "test"), "split is for hub datasets, got 'test' with files alone"),
        (("--prompt-field", "q"), "has question, answer (--prompt-field names another column)"),
        (("--limit", "0"), "limit must be at least 1, got 0"),
        (("--answer-tokens", "0"), "answer_tokens must be at least 1, got 0"),
        (("--data", "own:4", "--plain"), "are users' turns that the model makes up"),
    ],
)
def test_refusals(words, tmp_path, monkeypatch, capsys, more, message) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words, *more)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fast").exists()


def test_other_prompts_in_the_same_folder(words, prompts, monkeypatch, capsys, chooses) -> None:
    chooses()
    run(monkeypatch, "speedup", *words)
    write(prompts, [{"question": f"another {n}"} for n in range(9)])
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words, "--max-steps", "3")
    assert "was made of other prompts, or with another held_out" in capsys.readouterr().err


def test_prompts_without_room_are_in_neither_part(checkpoint, tmp_path) -> None:
    rows = [{"prompt": "x" * (240 if n % 2 else 3) + str(n)} for n in range(8)]
    rows += [rows[0]] * 2
    file = write(tmp_path / "long.jsonl", rows)
    asked = TrainingRun(
        str(checkpoint("llama")), [str(file)], tmp_path / "out", method="gated", answers="model",
        answer_tokens=16,
    )  # fmt: skip
    told: list[str] = []
    assert learn(asked, [*STEPS, "--use-cpu"], 2, told.append)["rows"] == 2
    assert told[0].startswith("4 of 10 prompts are left out of the data: they have more than 240")
    assert told[1] == "2 of 6 prompts are left out of the data: they are there already"
    kept = (tmp_path / "out" / "_run" / "held_out.jsonl").read_text()
    assert [json.loads(line)["prompt"] for line in kept.splitlines()] == ["xxx0", "xxx4"]


def test_what_is_wrong_is_told_before_prompts_are_made(tmp_path, monkeypatch, capsys) -> None:
    words = ("--model", "nano", "--data", "own:6", "--output-dir", tmp_path / "fast")
    for number in ("1", "6"):
        with pytest.raises(SystemExit):
            run(monkeypatch, "speedup", *words, "--held-out", number)
        assert "held_out must be at least 2, and less than 6" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words, "--data", "none.jsonl", "--held-out", "2")
    assert "no file 'none.jsonl'" in capsys.readouterr().err
    assert not (tmp_path / "fast").exists()


@pytest.mark.parametrize("content", ["[1", "[]", "{}"])
def test_what_is_no_record(words, tmp_path, monkeypatch, capsys, content) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "speedup.json").write_text(content)
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words)
    assert "speedup.json is no record of speedup: move it away" in capsys.readouterr().err


def test_timing_goes_on_in_a_folder_that_was_moved(words, tmp_path, monkeypatch, capsys) -> None:
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(speeding, "search", stop)
        with pytest.raises(SystemExit):
            run(patch, "speedup", *words)
    (tmp_path / "fast").rename(tmp_path / "moved")
    monkeypatch.setattr("setblock.speedup.finetune", None)
    moved = [str(tmp_path / "moved") if one == str(tmp_path / "fast") else one for one in words]
    run(monkeypatch, "speedup", *moved)
    assert "chosen: " in capsys.readouterr().out


def test_one_process(words, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        run(monkeypatch, "speedup", *words)
    assert "speedup runs in one process" in capsys.readouterr().err


def test_plain_text_and_messages(checkpoint, tmp_path) -> None:
    """Prompts of messages go through the template; plain ones are continued as they are."""
    said = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    turns = [[*said, {"role": "user", "content": f"ask {n}"}] for n in range(4)]
    talks = [{"messages": [*some, said[-1]]} for some in turns]
    texts = [{"prompt": f"begin {n}"} for n in range(4)]
    base = load(checkpoint("llama"), dtype="float32")
    for name, rows, chat in (("talks", talks, True), ("texts", texts, False)):
        file = write(tmp_path / f"{name}.jsonl", rows)
        asked = TrainingRun(
            str(checkpoint("llama")), [str(file)], tmp_path / name, method="gated", chat=chat,
            answers="model", answer_tokens=4,
        )  # fmt: skip
        learn(asked, [*STEPS, "--use-cpu"], 2, lambda line: None)
        ids = [base.encode(f"begin {n}") for n in range(4)]
        if chat:
            whole: list[Any] = [
                base.tokenizer.apply_chat_template(some, add_generation_prompt=True, tokenize=False)
                for some in turns
            ]
            ids = [base.tokenizer.encode(text, add_special_tokens=False) for text in whole]
        items, form = as_learned(tmp_path / name / "_run" / "held_out.jsonl", base, chat)
        assert [form.prompt(one) for one in items] == [ids[0], ids[2]]
        score = evaluate(load(tmp_path / name), items, 2, form=form, mode="ntp", max_new_tokens=4)
        asked = generate(base, [ids[0], ids[2]], mode="ntp", max_new_tokens=4)
        assert [one.token_ids for one in score.samples] == [one.token_ids for one in asked]
        answers = (tmp_path / name / "_run" / "answers.jsonl").read_text().splitlines()
        learned = sorted(json.loads(line)["prompt_ids"] for line in answers)
        assert learned == sorted([ids[1], ids[3]])


def test_the_recipe_is_what_is_not_typed(tmp_path) -> None:
    known = {field.name for field in fields(SBDConfig)}
    assert set(RECIPE) <= known
    asked = TrainingRun("nano", ["a.jsonl"], tmp_path, method="gated", answers="model")
    config = parse_config(asked, with_recipe(["--max-block-size=6", "--bf16", "no"]))
    values = {name: getattr(config, name) for name in RECIPE}
    assert values.pop("max_block_size") == 6
    assert values.pop("first_slot_loss") is False
    wanted = {name: value for name, value in RECIPE.items() if name in values}
    assert {name: getattr(value, "value", value) for name, value in values.items()} == wanted
    assert torch.is_grad_enabled()
