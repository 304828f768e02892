"""lm-eval's own harness, offline, on local tasks: its numbers follow from our tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import lm_eval
import pytest
import torch
from conftest import LONGROPE, copied
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from setblock.generation import generate
from setblock.lm_eval import SetBlockLM
from setblock.loading import load

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own

GENERATION = """\
task: echo
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["{until}"], do_sample: false, max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""
CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["one", "two"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
PROMPTS = ("two and two", "a bird sings", "x")
UNTIL = "zz"


@pytest.fixture(scope="module")
def folder(checkpoint) -> Path:
    return checkpoint("llama", settings={"trained": True, "block_size": 4})


@pytest.fixture
def tasks(folder, tmp_path) -> Path:
    """A generation task whose right answers are the next-token ones, and one of likelihood."""
    answers = generate(load(folder), PROMPTS, mode="ntp", max_new_tokens=12, stop=UNTIL)
    rows = [{"prompt": p, "answer": a.text} for p, a in zip(PROMPTS, answers, strict=True)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "echo.yaml").write_text(GENERATION.format(data=data, until=UNTIL))
    (tmp_path / "choice.yaml").write_text(CHOICE.format(data=data))
    return tmp_path


def evaluate(model: SetBlockLM, tasks: Path, name: str) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    harness: Any = lm_eval  # its names are filled in lazily
    return harness.simple_evaluate(
        model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_verified_answers_are_the_next_token_ones(folder, tasks, batch_size):
    model = SetBlockLM(str(folder), mode="verified", branches=2, batch_size=batch_size)
    results = evaluate(model, tasks, "echo")
    assert results["results"]["echo"]["exact_match,none"] == 1
    found = results["config"]["setblock"]
    assert (found["mode"], found["solver"]) == ("verified", None)
    assert (found["draft"], found["branches"]) == ("branches", 2)
    assert found["tokens_per_forward"] == found["tokens"] / found["nfe"] >= 1


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sbd", "solver": "fixed:2", "block_size": 6},
        {"mode": "verified", "block_size": 6, "branches": 1, "lookup": 3, "lenience": 0.01},
        {"mode": "verified", "block_size": 6, "branches": 1, "regex": "[a-f ]+"},
    ],
)
def test_block_answers_are_ours(folder, tasks, options: Any):
    results = evaluate(SetBlockLM(str(folder), **options, batch_size=2), tasks, "echo")
    expected = generate(load(folder), PROMPTS, **options, max_new_tokens=12, stop=UNTIL)
    texts = {one["doc"]["prompt"]: one["resps"][0][0] for one in results["samples"]["echo"]}
    assert [texts[prompt] for prompt in PROMPTS] == [one.text for one in expected]
    found = results["config"]["setblock"]
    assert options.items() <= found.items()
    assert found["tokens"] == sum(one.num_tokens for one in expected)
    assert found["nfe"] == sum(one.nfe for one in expected)


def test_likelihoods_are_those_of_the_causal_half(folder, tasks):
    results = evaluate(SetBlockLM(str(folder), batch_size=2), tasks, "choice")
    model = load(folder)
    for sample in results["samples"]["choice"]:
        for choice, (found, _) in zip((" one", " two"), sample["filtered_resps"], strict=True):
            prompt = model.encode(sample["doc"]["prompt"])
            ids = model.encode(sample["doc"]["prompt"] + choice)
            with torch.no_grad():
                logits = model.network(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            expected = sum(
                float(logits[place - 1, ids[place]]) for place in range(len(prompt), len(ids))
            )
            assert found == pytest.approx(expected, abs=1e-3)
    assert results["config"]["setblock"]["tokens_per_forward"] is None


def test_sampling_and_options_of_a_task(folder):
    model = SetBlockLM(str(folder), mode="ntp", seed=3)
    options = {"until": ["zz"], "max_gen_toks": 8, "do_sample": True, "temperature": 0.9}
    [text] = model.generate_until([Instance("generate_until", {}, ("a b", options), 0)])
    [expected] = generate(
        load(folder), ["a b"], mode="ntp", max_new_tokens=8, stop="zz", temperature=0.9, seed=3
    )
    assert text == expected.text
    ask = [Instance("generate_until", {}, ("a b", options), 0)]
    repeats = [model.generate_until(ask)[0] for _ in range(3)]
    assert len({text, *repeats}) == 4  # the same request again is another sample
    plain = {name: value for name, value in options.items() if name != "temperature"}
    again = [model.generate_until([Instance("generate_until", {}, ("a b", plain), 0)])[0]]
    assert again != model.generate_until([Instance("generate_until", {}, ("a b", plain), 0)])
    wrong = {"until": ["zz"], "max_gen_toks": 8, "num_beams": 4}
    with pytest.raises(ValueError, match="generation option num_beams is not one of do_sample"):
        model.generate_until([Instance("generate_until", {}, ("a", wrong), 0)])


def test_a_prompt_that_fills_the_context_loses_its_front(folder):
    """lm-eval cuts it to what its own limit leaves; a whole block more has to fit here."""
    model = SetBlockLM(str(folder), mode="sbd", solver="fixed:2", block_size=6)
    options = {"until": ["zz"], "max_gen_toks": 8, "do_sample": False}
    text = "abc" * 200
    [found] = model.generate_until([Instance("generate_until", {}, (text, options), 0)])
    ids = load(folder).encode(text)[-(256 - 12) :]
    [expected] = generate(
        load(folder), [ids], mode="sbd", solver="fixed:2", block_size=6, max_new_tokens=8, stop="zz"
    )
    assert found == expected.text


@pytest.mark.parametrize("length", [256, 300])
def test_an_answer_that_fills_the_context_is_refused(folder, length):
    """No room, or less: not the prompt whole, nor cut at its end."""
    model = SetBlockLM(str(folder), mode="sbd", solver="fixed:2", block_size=4)
    told = f"max_gen_toks={length} leaves no room for a prompt in the model's context of 256 tokens"
    with pytest.raises(ValueError, match=told):
        model._model_generate(torch.tensor([[5, 9, 30]]), length + 3, [])


def test_a_context_may_be_shorter_than_the_configuration_says(folder, tmp_path):
    short = copied(folder, tmp_path / "short", "config.json", rope_parameters=LONGROPE)
    assert (SetBlockLM(str(folder)).max_length, SetBlockLM(str(short)).max_length) == (256, 32)
    assert SetBlockLM(str(short), max_length=16).max_length == 16


def test_a_special_token_among_the_stop_texts_ends_the_answer(folder):
    model = SetBlockLM(str(folder), mode="ntp")
    [plain] = generate(load(folder), ["a b"], mode="ntp", max_new_tokens=12)
    place = next(i for i, token in enumerate(plain.token_ids) if i and token < 256)
    name = model.loaded.tokenizer.convert_ids_to_tokens(plain.token_ids[place])
    model.loaded.special_tokens = (*model.loaded.special_tokens, str(name))
    options = {"until": [name], "max_gen_toks": 12, "do_sample": False}
    model.generate_until([Instance("generate_until", {}, ("a b", options), 0)])
    first = plain.token_ids.index(plain.token_ids[place]) + 1
    assert model.generated == first
    assert model.loaded.eos_token_ids == load(folder).eos_token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode must be one of"),
        ({"solver": "best"}, "solver must be one of"),
        ({"sovler": "fixed:2"}, "model argument sovler is not one of pretrained, dtype"),
        ({"peft": "x"}, "model argument peft is not one of"),
        ({"regex": "("}, "regex can't be used: unclosed group"),
    ],
)
def test_bad_values_are_refused_before_the_first_task(folder, options, message):
    with pytest.raises(ValueError, match=message):
        SetBlockLM(str(folder), **options)


def test_command(folder, tasks):
    """The real command line, in a process of its own."""
    words = ["python", "-m", "setblock.lm_eval", "run", "--model", "setblock", "--tasks", "echo"]
    arguments = f"pretrained={folder},mode=verified,dtype=float32,mask_token_id=7"
    words += [
        "--model_args",
        arguments,
        "--include_path",
        str(tasks),
        "--batch_size",
        "2",
    ]
    out = tasks / "out"
    done = forked.run([*words, "--output_path", str(out)], Path.cwd())
    assert done.returncode == 0, done.stderr[-3000:]
    [record] = [json.loads(file.read_text()) for file in out.rglob("results*.json")]
    assert record["results"]["echo"]["exact_match,none"] == 1
    assert record["config"]["setblock"]["nfe"] > 0
    assert torch.cuda.is_available() or "no CUDA here for device cuda" in done.stderr
    words[words.index(arguments)] = f"pretrained={folder},modee=x"
    wrong = forked.run(words, Path.cwd())
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith("error: model argument modee is not one of")
    assert "Traceback" not in wrong.stderr


def test_without_lm_eval_it_says_what_to_install(tmp_path):
    """In one line; a module that fails to import stands for one that is not there."""
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise ImportError('none here')")
    words = [sys.executable, "-m", "setblock.lm_eval", "run"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: lm-eval can't be used (none here): pip")
    assert "Traceback" not in done.stderr
