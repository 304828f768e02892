"""The `train` and `merge` commands: rows in, a MODEL out that every other command takes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file

from setblock import adapters, cli
from setblock.checkpoint import BUNDLED
from setblock.finetune import Run, finetune, parse_config
from setblock.generation import generate
from setblock.loading import load
from setblock.masks import causal_layout
from setblock.model import Model
from setblock.roofline import ACCEPTANCE
from setblock.train import SBDTrainer
from setblock.watch import SIGNALS, DecodeProbe, final_answer

# trl's own defaults use a name that transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

PAIRS = [("a b ", "c d e"), ("b ", "a c"), ("x y z ", "z y x x"), ("q ", "r s t u v")]
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
QUICK = "--max-steps 3 --per-device-train-batch-size 2 --use-cpu --bf16 no --disable-tqdm yes"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["setblock", *map(str, words)])
    cli.main()


def train(monkeypatch, capsys, *words: str | Path) -> dict[str, Any]:
    """The JSON summary of a quick run."""
    run(monkeypatch, "train", *words, *QUICK.split(), "--json")
    out = capsys.readouterr().out
    assert out.count("\n") == 1, "stdout holds one JSON object and nothing else"
    return json.loads(out)


def next_token_logits(model, ids=(5, 6, 7, 8)):
    tokens = torch.tensor([ids])
    return model.forward(tokens, causal_layout(torch.arange(len(ids))[None]))


@pytest.mark.parametrize("method", ["full", "lora", "gated"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
def test_every_method_gives_a_model(
    checkpoint, rows, tmp_path, monkeypatch, capsys, method, kind
) -> None:
    base, folder = checkpoint(kind), tmp_path / "out"  # no mask token: one is added
    trained = []
    save = SBDTrainer.save_model

    def noted(self, *words, **options):
        trained[:] = [self.model]
        save(self, *words, **options)

    monkeypatch.setattr(SBDTrainer, "save_model", noted)
    options = ["--lora-rank", "4", "--lora-alpha", "64", "--lora-dropout", "0.0"]
    options = options if method != "full" else []
    summary = train(
        monkeypatch,
        capsys,
        *("--model", base, "--data", rows, "--output-dir", folder, "--method", method),
        *(*options, "--learning-rate", "0.05", "--warmup-steps", "0"),
    )
    assert (summary["steps"], summary["rows"], summary["method"]) == (3, 4, method)
    before, after = load(base), load(folder)
    assert after.trained
    assert after.mask_token_id == summary["mask_token_id"] == before.mask_token_id
    assert after.adapted == (method != "full")
    assert after.gated == (method == "gated")
    both = [next_token_logits(model)[..., : before.mask_token_id] for model in (after, before)]
    assert all(logits.isfinite().all() for logits in both)
    change = (both[0] - both[1]).abs().max()
    assert (change == 0) if method == "gated" else (change > 1e-3)
    block = [
        generate(model, [[5, 6, 7]], max_new_tokens=24, mode="sbd")[0] for model in (before, after)
    ]
    assert block[0].token_ids != block[1].token_ids, "nothing was learned"
    # what the trainer held is what was saved
    [held] = trained
    held.eval()
    wrapped = Model(held, after.tokenizer, settings={"mask_token_id": after.mask_token_id})
    [answer], [again] = (
        generate(model, [[5, 6, 7]], max_new_tokens=24, mode="sbd", solver="fixed:3")
        for model in (wrapped, after)
    )
    assert answer.token_ids == again.token_ids
    card = (folder / "README.md").read_text()
    assert "None" not in card.split("## Set block decoding")[0]
    assert f"# {folder.name}\n" in card
    assert f"library_name: {'transformers' if method == 'full' else 'peft'}" in card
    assert after.defaults["mode"] == ("verified" if method == "gated" else "sbd")
    assert ("drafts, the base verifies" in card) == (method == "gated")
    assert str(rows) in card
    assert "matp_loss" in card
    assert '"max_block_size": 16' in card


# bitsandbytes looks for a CUDA library that a CPU machine has none of.
@pytest.mark.filterwarnings("ignore::UserWarning:bitsandbytes", "ignore::FutureWarning")
def test_qlora_trains_on_a_base_of_4_bits(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    """On the CPU: bitsandbytes' own CPU kernels, not those that a GPU runs."""
    from bitsandbytes.nn.modules import Linear4bit

    seen = []
    attach = "setblock.adapters.attach"
    monkeypatch.setattr(attach, lambda net, *a, f=adapters.attach: seen.append(net) or f(net, *a))
    base, folder = checkpoint("llama-wide", mask_token="<mask>"), tmp_path / "out"
    held = []
    save = SBDTrainer.save_model
    saving = lambda self, *words, **options: held.append(self.model) or save(self, *words)  # noqa: E731
    monkeypatch.setattr(SBDTrainer, "save_model", saving)
    where = ("--model", base, "--data", rows, "--output-dir", folder, "--method", "qlora")
    where += ("--learning-rate", "0.05", "--warmup-steps", "0", "--save-steps", "2")
    train(monkeypatch, capsys, *where)
    assert isinstance(seen[0].model.layers[0].self_attn.q_proj.base_layer, Linear4bit)
    before, after = load(base), load(folder)
    assert after.trained
    assert after.adapted
    assert not (next_token_logits(after) == next_token_logits(before)).all()
    # The adapter that was trained is what was saved; it goes on a base in its own precision.
    first = load_file(folder / "adapter_model.safetensors")
    weights = dict(held[-1].named_parameters())
    for name, saved in first.items():
        [own] = [weights[one] for one in weights if one.replace(".default", "") == name]
        assert own.dtype == torch.float32
        assert torch.equal(own, saved)
    # On a base of 4 bits it says what it said in training.
    four_bit = load(base, four_bit=True, mask_token_id=after.mask_token_id)
    again = adapters.attach_again(four_bit.network, folder).eval()
    settings = {"mask_token_id": after.mask_token_id}
    both = [Model(net.eval(), after.tokenizer, settings=settings) for net in (held[-1], again)]
    options = {"max_new_tokens": 24, "solver": "fixed:3", "ignore_eos": True}
    texts = [generate(one, [[5, 6, 7]], **options)[0].token_ids for one in both]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    # Neither a resume nor a forward in evaluation on the way changes it, on any processor.
    layers = [one for one in again.modules() if isinstance(one, Linear4bit)]
    assert layers
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    for name in ("adapter_model.safetensors", "checkpoint-3"):
        (shutil.rmtree if name == "checkpoint-3" else Path.unlink)(folder / name)
    train(monkeypatch, capsys, *where, "--resume")
    probe = ("--decode-data", rows, "--decode-every", "1", "--answer-tokens", "4")
    watched = tmp_path / "watched"
    train(monkeypatch, capsys, *where, *probe, "--output-dir", watched)
    for one in (folder, watched):
        found = load_file(one / "adapter_model.safetensors")
        assert all(torch.equal(first[name], found[name]) for name in first)
    # Folded into a base in its own precision.
    run(monkeypatch, "merge", folder, tmp_path / "merged", "--dtype", "float32")
    capsys.readouterr()
    assert not load(tmp_path / "merged").adapted
    folded = next_token_logits(load(tmp_path / "merged"))
    torch.testing.assert_close(folded, next_token_logits(after))


def test_a_bundled_adapter_can_be_trained_further(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    """Its name is neither a folder nor one on the hub."""
    first, more = tmp_path / "first", tmp_path / "more"
    words = ("--model", checkpoint("llama", mask_token="<mask>"), "--data", rows)
    train(monkeypatch, capsys, *words, "--output-dir", first, "--method", "gated")
    monkeypatch.setitem(BUNDLED, "mine", first)
    train(
        monkeypatch,
        capsys,
        "--model",
        "mine",
        *words[2:],
        "--output-dir",
        more,
        "--method",
        "gated",
    )
    assert load(more).gated
    own, base = ((one / "adapter_config.json").read_text() for one in (more, first))
    name = "base_model_name_or_path"
    assert json.loads(own)[name] == json.loads(base)[name]


def test_a_finished_run_keeps_its_best_model(checkpoint, rows, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", folder)
    words += ("--eval-data", rows, "--eval-strategy", "steps", "--eval-steps", "1")
    words += ("--save-steps", "1", "--load-best-model-at-end", "yes", "--learning-rate", "0.3")
    # the lowest accuracy is the best one: that of a step before the last
    words += ("--metric-for-best-model", "eval_ntp_accuracy", "--greater-is-better", "no")
    train(monkeypatch, capsys, *words, "--lr-scheduler-type", "constant", "--optim", "sgd")
    first = load_file(folder / "model.safetensors")
    last = load_file(folder / "checkpoint-3" / "model.safetensors")
    assert any(not torch.equal(first[name], last[name]) for name in first)
    moved = folder.rename(tmp_path / "moved")
    (moved / "model.safetensors").unlink()
    words += ("--lr-scheduler-type", "constant", "--optim", "sgd", "--output-dir", moved)
    train(monkeypatch, capsys, *words, "--resume")
    again = load_file(moved / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    shutil.rmtree(moved / "checkpoint-1")
    with pytest.raises(SystemExit):
        train(monkeypatch, capsys, *words, "--resume")
    assert "the best model's checkpoint is gone" in one_line(capsys)


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_gated_adapter_in_stock_peft_leaves_next_tokens_alone(
    checkpoint, rows, tmp_path, monkeypatch, capsys, kind
) -> None:
    from peft import AutoPeftModelForCausalLM

    base, folder = checkpoint(kind, mask_token="<mask>"), tmp_path / "out"
    where = ("--model", base, "--data", rows, "--output-dir", folder)
    train(monkeypatch, capsys, *where, "--method", "gated", "--learning-rate", "0.05")
    stock = AutoPeftModelForCausalLM.from_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert torch.equal(stock(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_full_model_in_stock_transformers(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    base, folder = checkpoint("qwen3"), tmp_path / "out"
    where = ("--model", base, "--data", rows, "--output-dir", folder)
    train(monkeypatch, capsys, *where)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = load(folder)
    with torch.no_grad():
        logits = stock(input_ids=torch.tensor([[5, 6, 7, 8]])).logits
    logits[..., model.mask_token_id] = -torch.inf
    assert torch.allclose(logits, next_token_logits(model), atol=1e-5)


def test_merge(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    base, folder, whole = checkpoint("qwen3"), tmp_path / "out", tmp_path / "whole"
    where = ("--model", base, "--data", rows, "--output-dir", folder)
    train(monkeypatch, capsys, *where, "--method", "lora", "--learning-rate", "0.05")
    run(monkeypatch, "merge", folder, whole, "--dtype", "float32", "--json")
    assert json.loads(capsys.readouterr().out)["output_dir"] == str(whole)
    assert not (whole / "adapter_config.json").exists()
    adapted, merged = load(folder), load(whole)
    assert (merged.trained, merged.adapted, merged.dtype) == (True, False, torch.float32)
    assert merged.mask_token_id == adapted.mask_token_id
    assert torch.equal(next_token_logits(merged), next_token_logits(adapted))
    answers = [generate(one, [[5, 6]], max_new_tokens=20)[0].token_ids for one in (adapted, merged)]
    assert answers[0] == answers[1]
    run(monkeypatch, "merge", folder, tmp_path / "half")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    with pytest.raises(SystemExit):
        run(monkeypatch, "merge", folder, whole)
    assert "is not empty" in capsys.readouterr().err
    run(monkeypatch, "merge", whole, tmp_path / "again", "--dtype", "float32")
    again = load(tmp_path / "again")
    assert again.trained
    assert torch.equal(next_token_logits(again), next_token_logits(merged))


def test_merge_refuses_gated(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    where = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    train(monkeypatch, capsys, *where, "--method", "gated")
    with pytest.raises(SystemExit):
        run(monkeypatch, "merge", tmp_path / "out", tmp_path / "whole")
    assert "acts on masked positions alone" in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", "--model", tmp_path / "out", *where[2:4], "--output-dir", "x")
    assert "train on its base" in capsys.readouterr().err


def test_config_file_and_typed_options(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {checkpoint('llama')}\ndata: {rows}\noutput_dir: {tmp_path / 'out'}\n"
        "limit: 3\nfull-mask-share: 0.5\nself_distill: 0.25\nmatp_weight: 2.0\nmax_block_size: 7\n"
    )
    summary = train(monkeypatch, capsys, "--config", file, "--limit", "2")
    assert summary["rows"] == 2, "typed options win"
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ('"full_mask_share": 0.5', '"self_distill": 0.25', '"matp_weight": 2.0'):
        assert line in card
    assert load(tmp_path / "out").defaults["block_size"] == 7
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert all(len(line["matp_accuracy_by_offset"]) == 7 for line in lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "needs names and values, got list"),
        ("a: [", "run.yaml: while parsing"),
        ("model: m\n", "missing: --data, --output-dir"),
        ("no_such: 1\nmodel: m\ndata: d.jsonl\noutput_dir: o\n", "unknown training option"),
        ("model: 3\ndata: d.jsonl\noutput_dir: o\n", "model must be str, got 3"),
        ("model: m\ndata: 7\noutput_dir: o\n", "data must be list[str], got 7"),
        ("model: m\ndata: [a, 7]\noutput_dir: o\n", "data must be list[str], got ['a', 7]"),
        ("limit: many\nmodel: m\ndata: d\noutput_dir: o\n", "limit must be int | None, got 'many'"),
        ("limit: yes\nmodel: m\ndata: d\noutput_dir: o\n", "limit must be int | None, got True"),
        ("chat: 1\nmodel: m\ndata: d\noutput_dir: o\n", "chat must be bool, got 1"),
        ("lora_dropout: low\nmodel: m\ndata: d\noutput_dir: o\n", "lora_dropout must be float"),
        ("max_steps: 1\nmax-steps: 2\n", "max_steps: given more than once"),
        ("method: half\nmodel: m\ndata: d.jsonl\noutput_dir: o\n", "one of full, lora, qlora, ga"),
    ],
)
def test_bad_config_files(tmp_path, monkeypatch, capsys, content, message) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", "--config", file)
    assert message in capsys.readouterr().err


def test_decoding_while_training(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    where = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    probe = ("--decode-data", rows, "--decode-every", "2", "--decode-limit", "3")
    options = ("--decode-solver", "fixed:4", "--answer-tokens", "8", "--chat", "--split", "train")
    summary = train(monkeypatch, capsys, *where, *probe, *options)
    assert [result["step"] for result in summary["decode"]] == [0, 2, 3]
    for result in summary["decode"]:
        assert result["decode_n"] == 3
        assert 1 < result["decode_tokens_per_forward"] <= 4
        assert 0 <= result["decode_score"] <= 1
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines if "decode_n" in line] == summary["decode"]


def test_resume_after_a_kill_that_cut_files_short(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    """In the middle of a checkpoint and of a line of the log."""
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", folder)
    words += ("--save-steps", "3", "--logging-steps", "2", "--num-train-epochs", "3")
    words += ("--decode-data", rows, "--decode-every", "2", "--answer-tokens", "4")
    words += tuple(QUICK.replace("--max-steps 3", "").split())  # six steps
    run(monkeypatch, "train", *words, "--json")
    straight = json.loads(capsys.readouterr().out)
    (folder / "checkpoint-6" / "trainer_state.json").unlink()
    whole = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(whole[:-20])
    run(monkeypatch, "train", *words, "--resume", "--json")
    shown = capsys.readouterr()
    said = "checkpoint-3: checkpoint-6 has no whole trainer_state.json: a stop cut it short"
    assert said in " ".join(shown.err.split())
    resumed = json.loads(shown.out)
    assert resumed["steps"] == 6
    assert resumed["train_loss"] == pytest.approx(straight["train_loss"], rel=1e-5)
    assert [one["step"] for one in straight["decode"]] == [0, 2, 4, 6]
    assert resumed["decode"] == straight["decode"]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [json.loads(line)["step"] for line in whole.splitlines()]
    assert [line["step"] for line in lines] == steps
    # killed in the very last decoding, with nothing left to train
    (folder / "log.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert "decode_n" not in (folder / "log.jsonl").read_text().splitlines()[-1]
    run(monkeypatch, "train", *words, "--resume", "--json")
    last = json.loads(capsys.readouterr().out)["decode"]
    assert [one["step"] for one in last] == [0, 2, 4, 6]
    assert last == straight["decode"]


def test_decodings_of_a_resumed_run_are_of_the_same_rows(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    words += ("--save-steps", "1", "--answer-tokens", "4", *QUICK.split())
    probe = ("--decode-data", rows, "--decode-every", "2")
    run(monkeypatch, "train", *words, *probe, "--decode-limit", "3")
    run(monkeypatch, "train", *words, "--resume")  # without any it changes none
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *words, *probe, "--decode-limit", "2", "--resume")
    assert re.search("decode_rows was '3 rows, sha256 .*', now '2 rows, sha256", one_line(capsys))
    run(monkeypatch, "train", *words, *probe, "--decode-limit", "3", "--resume")


def test_training_on_own_answers(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    rows = write(tmp_path / "r.jsonl", [{"q": p, "a": c} for p, c in PAIRS])
    # an end token that is likely anywhere: half of the answers end
    base = ending(checkpoint("llama", mask_token="<mask>"), tmp_path / "base")
    where = ("--model", base, "--data", rows, "--output-dir", tmp_path / "out")
    names = ("--prompt-field", "q", "--completion-field", "a")
    own = ("--answers", "model", "--answer-tokens", "40", "--answer-batch-size", "2")
    summary = train(monkeypatch, capsys, *where, *names, *own, "--save-strategy", "no")
    lines = (tmp_path / "out" / "_run" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    ended = [a for a in answers if a["finish_reason"] == "eos" and a["text"]]
    assert len(answers) == 4
    assert 0 < len(ended) == summary["rows"]
    model = load(base)
    for answer in answers:
        [again] = generate(model, [answer["prompt_ids"]], mode="ntp", max_new_tokens=40)
        assert again.text == answer["text"]


def test_answers_go_on_where_they_stopped(checkpoint, tmp_path, monkeypatch) -> None:
    from datasets import Dataset

    from setblock import answers

    model = load(ending(checkpoint("llama", mask_token="<mask>"), tmp_path / "base"))
    rows, file = Dataset.from_list(ROWS), tmp_path / "answers.jsonl"
    whole = answers.regenerate(model, rows, file, 40, 2).to_list()
    lines = file.read_text().splitlines(keepends=True)
    asked = []
    stream = answers.stream

    def counting(model, prompts, **options):
        asked.append(len(prompts))
        return stream(model, prompts, **options)

    monkeypatch.setattr(answers, "stream", counting)
    file.write_text(lines[0] + lines[1] + lines[2][:20])  # killed while it wrote the third
    assert answers.regenerate(model, rows, file, 40, 2).to_list() == whole
    assert asked == [2]
    assert answers.regenerate(model, rows, file, 40, 2).to_list() == whole
    with pytest.raises(ValueError, match="max_new_tokens of answer"):
        answers.regenerate(model, rows, file, 41, 2)
    with pytest.raises(ValueError, match="prompt_ids of answer"):
        answers.regenerate(model, rows.select([3, 2, 1, 0]), file, 40, 2)
    file.write_text('{"foo": 1}')
    with pytest.raises(ValueError, match=r"answers\.jsonl:1: no answer of ours"):
        answers.regenerate(model, rows, file, 40, 2)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_while_the_model_answers_says_how_to_go_on(
    checkpoint, rows, tmp_path, monkeypatch, capsys, name
) -> None:
    monkeypatch.setattr("setblock.answers.stream", lambda *a, **k: signal.raise_signal(number))
    number, handlers = signal.Signals[name], [signal.getsignal(n) for n in SIGNALS]
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    words += ("--answers", "model", "--answer-tokens", "40")
    with pytest.raises(SystemExit) as code:
        run(monkeypatch, "train", *words, *QUICK.split())
    assert code.value.code == 128 + number
    said = f"stopped by {name} while the model answered; the same command goes on with the answers"
    assert said in one_line(capsys)
    assert [signal.getsignal(n) for n in SIGNALS] == handlers


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"answers": "model"}, "^answers 'model' needs rows of prompt and completion$"),
        ({"decode_every": 2}, "^decode_data needs rows of prompt and completion$"),
    ],
)
@pytest.mark.parametrize("row", [{"text": "a b"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_only_prompts_can_be_answered(tmp_path, more, message, row) -> None:
    file = str(write(tmp_path / "rows.jsonl", [row]))
    if "decode_every" in more:
        more["decode_data"] = file
    with pytest.raises(ValueError, match=message):
        finetune(Run("no model is read", [file], tmp_path / "o", **more), [])


def test_resume_while_answering_says_what_to_do(checkpoint, rows, tmp_path) -> None:
    (tmp_path / "o" / "_run").mkdir(parents=True)
    (tmp_path / "o" / "_run" / "answers.jsonl").touch()
    with pytest.raises(ValueError, match="without --resume the same command goes on"):
        finetune(Run(str(checkpoint("llama")), [str(rows)], tmp_path / "o", resume=True), [])


def ending(source: Path, folder: Path) -> Path:
    """The checkpoint with an end token that is likelier than before."""
    model = load(source)
    [end] = model.eos_token_ids
    weight = model.network.get_output_embeddings().weight.data
    weight[end] *= 3
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def test_parquet_and_hub_names(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    where = ("--model", checkpoint("llama"), "--output-dir", tmp_path / "out")
    assert train(monkeypatch, capsys, *where, "--data", tmp_path / "rows.parquet")["rows"] == 4
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *where[:2], "--output-dir", "x", "--data", "no-one/nothing")
    assert "can't read data 'no-one/nothing'" in capsys.readouterr().err


def test_resume_is_as_if_nothing_had_happened(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    base = ("--model", checkpoint("llama"), "--data", rows, "--method", "lora")
    base += ("--save-steps", "1", "--logging-steps", "1")
    straight = train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "straight")
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *base, "--output-dir", tmp_path / "straight")
    assert "go on with --resume" in capsys.readouterr().err
    # a finished run without checkpoints is not written over either
    for file in (tmp_path / "straight").glob("checkpoint-*"):
        shutil.rmtree(file)
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *base, "--output-dir", tmp_path / "straight")
    assert "holds an earlier run (adapter_config.json, log.jsonl)" in one_line(capsys)
    # stopped by a signal after its first step
    stop = threading.Event()
    monkeypatch.setattr("setblock.watch.SaveOnSignal.on_step_begin", lambda *a, **k: kill(stop))
    with pytest.raises(SystemExit) as code:
        train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "stopped")
    assert code.value.code == 128 + signal.SIGTERM
    err = capsys.readouterr()
    assert "stopped by SIGTERM with a checkpoint" in err.err
    assert json.loads(err.out)["steps"] == 1
    monkeypatch.undo()
    resumed = train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "stopped", "--resume")
    assert resumed["steps"] == 3
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("straight", "stopped")]
    first, second = map(load_file, files)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name])
    losses = [
        [line["matp_loss"] for line in one["log"] if "matp_loss" in line]
        for one in (straight, resumed)
    ]
    assert losses[0] == losses[1]
    assert resumed["train_loss"] == pytest.approx(straight["train_loss"])
    # finished: nothing is left to do, and nothing is done
    log = (tmp_path / "stopped" / "log.jsonl").read_text()
    ends = [line for line in map(json.loads, log.splitlines()) if "train_runtime" in line]
    assert [end["step"] for end in ends] == [3]
    assert ends[0]["train_loss"] == resumed["train_loss"]
    done = train(monkeypatch, capsys, *base, "--output-dir", tmp_path / "stopped", "--resume")
    assert (done["steps"], done["train_loss"]) == (3, pytest.approx(straight["train_loss"]))
    assert (tmp_path / "stopped" / "log.jsonl").read_text() == log
    after = load_file(tmp_path / "stopped" / "adapter_model.safetensors")
    assert all(torch.equal(first[name], after[name]) for name in first)


@pytest.mark.parametrize(("kind", "mask"), [("llama", "<mask>"), ("llama-tied", None)])
@pytest.mark.parametrize("method", ["lora", "gated"])
def test_an_adapter_is_trained_further(
    checkpoint, rows, tmp_path, monkeypatch, capsys, kind, mask, method
) -> None:
    """Without a mask token in the base its adapter has added one."""
    first, second = tmp_path / "first", tmp_path / "second"
    base = checkpoint(kind, mask_token=mask)
    words = ("--data", rows, "--method", method, "--learning-rate", "0.05", "--warmup-steps", "0")
    rank = ("--lora-rank", "4", "--lora-alpha", "8")
    train(monkeypatch, capsys, *words, *rank, "--model", base, "--output-dir", first)
    # without a step's worth of learning it stays what it is
    still = [word if word != "0.05" else "0" for word in words]
    train(monkeypatch, capsys, *still, "--model", first, "--output-dir", tmp_path / "still")
    before, same = (load_file(f / "adapter_model.safetensors") for f in (first, tmp_path / "still"))
    assert before.keys() == same.keys()
    assert all(torch.equal(before[name], same[name]) for name in before)
    prompts = ("--decode-data", rows, "--decode-every", "9", "--answer-tokens", "20")
    ended = ("--save-steps", "2", "--model", first, "--output-dir", second)
    summary = train(monkeypatch, capsys, *words, *prompts, *ended)
    after = load_file(second / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "lora" in name)
    config = json.loads((second / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert '"lora_rank": 4' in (second / "README.md").read_text()
    one, two = load(first), load(second)
    assert (two.adapted, two.gated, two.trained) == (True, method == "gated", True)
    assert two.mask_token_id == one.mask_token_id
    assert len(summary["decode"]) == 2
    ids = next_token_logits(two)[..., : two.mask_token_id]
    if method == "gated":
        assert torch.equal(ids, next_token_logits(load(base))[..., : two.mask_token_id])
    # stopped behind its second step, it ends the same
    shutil.rmtree(second / "checkpoint-3")
    train(monkeypatch, capsys, *words, *prompts, *ended, "--resume")
    resumed = load_file(second / "adapter_model.safetensors")
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    if mask is None:
        return
    other = "gated" if method == "lora" else "lora"
    for wrong, message in (
        (("--method", other), f"go on training it with --method {method}, or train on its base"),
        (("--method", method, "--lora-rank", "5"), f"lora_rank of {first} is 4, got 5"),
        (("--method", method, "--mask-token-id", "9"), "no trained embedding of mask token 9"),
    ):
        with pytest.raises(SystemExit):
            train(
                monkeypatch,
                capsys,
                *("--model", first, "--data", rows, "--output-dir", tmp_path / "no", *wrong),
            )
        assert message in one_line(capsys)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-window"])
def test_all_weights_of_a_folded_adapter_are_trained(
    checkpoint, rows, tmp_path, monkeypatch, capsys, kind
) -> None:
    names = ("--data", rows, "--learning-rate", "0.05", "--warmup-steps", "0")
    lora = ("--model", checkpoint(kind), "--method", "lora", "--output-dir", tmp_path / "lora")
    train(monkeypatch, capsys, *names, *lora)
    full = ("--model", tmp_path / "lora", "--method", "full", "--output-dir", tmp_path / "full")
    cost = train(monkeypatch, capsys, *names, *full)["estimate"]
    assert cost["trained_parameters"] == cost["parameters"]
    before, after = load(tmp_path / "lora"), load(tmp_path / "full")
    assert (after.trained, after.adapted) == (True, False)
    assert after.mask_token_id == before.mask_token_id
    weights = dict(after.network.named_parameters())
    for name, weight in before.network.named_parameters():
        assert not torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("method", ["full", "gated"])
def test_resume_in_bfloat16_after_a_crash(
    checkpoint, rows, tmp_path, monkeypatch, capsys, method
) -> None:
    """Killed behind a checkpoint, with lines in the log of steps that come again; packed rows."""
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama-tied"), "--data", rows, "--method", method)
    words += ("--output-dir", folder, "--save-steps", "2", "--logging-steps", "1")
    words += ("--packing", "yes", "--max-length", "64")
    words += tuple(word if word != "no" else "yes" for word in QUICK.split())  # bf16
    run(monkeypatch, "train", *words)
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    straight = load_file(folder / name)
    (folder / name).unlink()
    shutil.rmtree(folder / "checkpoint-3")
    run(monkeypatch, "train", *words, "--resume")
    resumed = load_file(folder / name)
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "matp_loss" in line] == [1, 2, 3]


def test_resume_keeps_its_settings(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "out"
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", folder)
    words += ("--method", "lora", "--lora-rank", "4", "--save-steps", "1")
    train(monkeypatch, capsys, *words)
    for change, message in (
        (("--seed", "7", "--matp-weight", "3"), "matp_weight was 1.0, now 3.0; seed was 42, now 7"),
        (("--lora-rank", "8"), "lora_rank was 4, now 8"),
        (("--limit", "2"), "limit was None, now 2"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, "train", *words, *change, *QUICK.split(), "--resume")
        shown = one_line(capsys)
        for part in message.split("; "):
            assert part in shown
    longer = [word if word != "3" else "4" for word in QUICK.split()]
    run(monkeypatch, "train", *words, *longer, "--resume", "--logging-steps", "1", "--json")
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    with rows.open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *words, *longer, "--resume")
    assert re.search("rows was '4 rows, sha256 .*', now '5 rows, sha256", one_line(capsys))
    # a run of an earlier version, which told nothing of its rows and kept no sum of its losses
    settings = json.loads((folder / "_run" / "settings.json").read_text())
    del settings["rows"]
    (folder / "_run" / "settings.json").write_text(json.dumps(settings))
    shutil.rmtree(folder / "checkpoint-4")
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["setblock"]
    (folder / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
    run(monkeypatch, "train", *words, *longer, "--resume", "--json")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["train_loss"]) == (4, None)
    assert not any("train_loss" in line for line in summary["log"])


def test_a_model_that_could_not_be_saved_is_refused_first(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    base = shutil.copytree(checkpoint("llama"), tmp_path / "base")
    settings = json.loads((base / "generation_config.json").read_text())
    settings |= {"temperature": 0.6, "do_sample": False}
    (base / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(SystemExit):
        train(monkeypatch, capsys, "--model", base, "--data", rows, "--output-dir", tmp_path / "o")
    assert "can't be saved as it is, because of its generation_config.json" in one_line(capsys)
    assert not (tmp_path / "o").exists()


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


def test_held_out_losses(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    words = ("--model", checkpoint("llama"), "--data", rows, "--eval-data", rows)
    words += ("--output-dir", tmp_path / "out", "--eval-strategy", "steps", "--eval-steps", "3")
    train(monkeypatch, capsys, *words)
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    [judged] = [line for line in map(json.loads, lines) if "eval_matp_loss" in line]
    assert judged["eval_ntp_loss"] > 0


@pytest.mark.parametrize("objective", ["sbd", "ntp"])
def test_the_result_says_what_it_was_trained_for(
    checkpoint, rows, tmp_path, monkeypatch, capsys, objective
) -> None:
    settings = {"trained": True, "mode": "ntp", "acceptance": 0.9, "mask_token_id": 7}
    words = ("--model", checkpoint("llama", settings=settings), "--data", rows)
    words += ("--output-dir", tmp_path / "out", "--objective", objective)
    train(monkeypatch, capsys, *words)
    model = load(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (model.trained, model.defaults["mode"]) == (objective == "sbd", objective)
    assert ("next-token prediction alone" in card) == (objective == "ntp")
    if objective == "sbd":
        assert model.acceptance == ACCEPTANCE, "measured on other weights"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("x = 10-5", "5"), ("5.0", "5"), ("-5.50", "-5.5"), ("1,234.00 in all", "1234"),
        ("2024-01-05", "05"), ("none ", "none"), ("it is -3.", "-3"),
    ],
)  # fmt: skip
def test_final_answer(text, number) -> None:
    assert final_answer(text) == number


def test_decoding_takes_no_time_from_the_tokens_per_second(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    """The clock stands still but for an hour in each decoding and a second in each loss."""
    now = 0.0
    decode, loss = DecodeProbe.decode, SBDTrainer.compute_loss

    def later(seconds: float, function: Any) -> Any:
        def slow(*words: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*words, **options)

        return slow

    monkeypatch.setattr(DecodeProbe, "decode", later(3600, decode))
    monkeypatch.setattr(SBDTrainer, "compute_loss", later(1, loss))
    monkeypatch.setattr("setblock.totals.time.perf_counter", lambda: now)
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    words += ("--decode-data", rows, "--decode-every", "1", "--logging-steps", "1")
    train(monkeypatch, capsys, *words, "--answer-tokens", "4")
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    rates = [line["tokens_per_second"] for line in map(json.loads, lines) if "matp_loss" in line]
    assert len(rates) == 3
    assert min(rates) > 10, "two short rows in a second"


def one_line(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def kill(once: threading.Event) -> None:
    if not once.is_set():
        once.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


def test_resume_needs_a_checkpoint(checkpoint, rows, tmp_path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint to go on from"):
        finetune(Run(str(checkpoint("llama")), [str(rows)], tmp_path / "o", resume=True), [])


def test_estimate_is_printed_and_leaves_no_trace(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    where = ("--model", checkpoint("llama"), "--data", rows)
    summary = train(monkeypatch, capsys, *where, "--output-dir", tmp_path / "a")
    cost = summary["estimate"]
    assert cost["steps"] == 3
    assert cost["seconds"] > 0
    assert cost["parameters"] == cost["trained_parameters"]
    assert cost["weight_bytes"] == 4 * cost["parameters"]
    assert cost["peak_bytes"] > cost["weight_bytes"]
    monkeypatch.setattr("setblock.finetune.estimate", lambda trainer: cost)
    again = train(monkeypatch, capsys, *where, "--output-dir", tmp_path / "b")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert again["train_loss"] == summary["train_loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-length", "300"], "max_length=300 is more than"),
        (["--max-length", "1"], "none of the 4 rows .* has a token to learn within max_length=1"),
        (["--chat", "--model", "{no chat}"], "messages need a chat template"),
        (["--mask-token-id", "999999"], "mask token 999999"),
        (["--decode-every", "2"], "decode_every and decode_data need each other"),
        (["--decode-solver", "guess:1"], "guess"),
        (["--method", "gated", "--objective", "ntp"], "objective must be 'sbd'"),
        (["--resume-from-checkpoint", "x"], "use --resume"),
        (["--data", "{missing}"], "no file"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--answers", "mine"], "answers must be one of data, model, got 'mine'"),
        (["--lora-dropout", "1"], "lora_dropout must lie in 0..1"),
        (["--attention", "eager"], "attention must be one of sdpa, flex_attention, got 'eager'"),
        (["--attention", "flex_attention"], "can't train on a CPU"),
        (["--eos-token", "x"], "eos_token: give the model's tokenizer this setting"),
        (["--lora-alpha", "8"], "lora_alpha is for methods lora, qlora and gated, got 8 with full"),
        (["--split", "test"], "split is for hub datasets, got 'test' with files alone"),
        (["--mask_token_id", "7"], "--mask_token_id: write it --mask-token-id, with hyphens"),
        (["--report-to", "tensorboard"], "TensorBoardCallback requires tensorboard"),
        (["--activation-offloading", "yes"], "activation_offloading needs a GPU"),
        (["--dataloader-drop-last", "yes", "--limit", "1"], "leaves no batch"),
        (
            ["--eval-data", "f"],
            "eval_data and eval_strategy .* got eval_data='f'",
        ),
        (["--run-name", "max_length", "--data", "{missing}"], "no file"),
        (
            "--method gated --gradient-checkpointing yes --decode-data f --decode-every 2".split(),
            "gradient_checkpointing must be no with a gated adapter and eval_data or decode_every",
        ),
    ],
)
def test_bad_runs_are_refused(checkpoint, rows, tmp_path, monkeypatch, capsys, words, message):
    places = {
        "{no chat}": str(checkpoint("llama", chat=False)),
        "{missing}": str(tmp_path / "missing.jsonl"),
    }
    start = ["train", "--data", rows, "--output-dir", tmp_path / "out", *QUICK.split()]
    start += ["--model", checkpoint("llama")] if "--model" not in words else []
    if "--data" in words:
        del start[1:3]
    with pytest.raises(SystemExit):
        run(monkeypatch, *start, *(places.get(word, str(word)) for word in words))
    err = one_line(capsys)
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-such-option", "1"], "unknown training option '--no-such-option'"),
        (["--max-steps", "many"], "max_steps"),
        (["--objective", "diffusion"], "objective"),
        (["--max-block-size", "1"], "max_block_size=1"),
        (["--full-mask-share", "2"], "full_mask_share must lie in 0..1, got 2.0"),
        (["--suffix-mask-share", "1.5"], "suffix_mask_share must lie in 0..1"),
        (["--suffix-mask-share", "0.6", "--full-mask-share", "0.5"], "sum to at most 1"),
        (["--self-distill", "-1"], "self_distill must lie in 0..1"),
        (["--matp-weight", "0"], "matp_weight must be a number above 0, got 0.0"),
        (["--matp-weight", "nan"], "matp_weight"),
        (["--idle-blocks", "keep", "--objective", "ntp"], "idle_blocks 'keep' is for objective"),
        (["--idle-blocks", "hide"], "idle_blocks must be one of|invalid choice: 'hide'"),
        (["--logits-chunk-size", "0"], "logits_chunk_size must be at least 1"),
        (["--end-fill", "-1"], "end_fill must be at least 0"),
        (["--gradient-accumulation-steps", "0"], "gradient_accumulation_steps must be at least 1"),
        (["--max-length", "-5"], "max_length must be at least 1, got -5"),
        (
            ["--max-steps", "-1", "--num-train-epochs", "0"],
            "num_train_epochs must be above 0, got 0",
        ),
        (["--max-steps", "0"], "max_steps must be at least 1, or -1 to go by num_train_epochs, g"),
        (["--max-steps", "-2"], "max_steps must be .*, got -2"),
        (["--eval-strategy", "steps"], "need each other, got eval_data=None, eval_strategy='ste"),
    ],
)
def test_bad_options_are_named(tmp_path, words, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(Run("nano", ["rows.jsonl"], tmp_path), words)


def test_every_option_is_typed_in_this_file():
    typed = Path(__file__).read_text()
    app: Any = typer.main.get_command(cli.app)
    for name in ("train", "merge"):
        for parameter in app.commands[name].params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                if option.startswith("-"):
                    assert f'"{option}"' in typed, f"no test types {option} of {name}"


def launch(ranks: int, *words: object) -> str:
    """What `setblock` says on stderr, under torchrun."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *start, "-m", "setblock", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FutureWarning" not in done.stderr
    assert "gemm" not in done.stderr, "bitsandbytes says at import that it has no CPU kernels"
    return " ".join(done.stderr.split())


def test_two_ranks_from_the_command_line(checkpoint, rows, tmp_path) -> None:
    """What torchrun starts: one folder, one model, the same losses as one process; and resumed."""
    where = ["train", "--model", checkpoint("llama"), "--data", rows, "--lr-scheduler-type"]
    words = [*where, "constant", "--optim", "sgd", *QUICK.split(), "--logging-steps", "1"]
    words[words.index("--per-device-train-batch-size") + 1] = "1"
    words += ["--save-steps", "2", "--answer-tokens", "4"]
    logs = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        per_step = ["--gradient-accumulation-steps", str(4 // ranks), "--output-dir", folder]
        said = launch(ranks, *words, *per_step)
        assert len(re.findall(r"about [\d,]+ tokens a second, 3 steps in about", said)) == 1
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        logs.append([line["matp_loss"] for line in lines if "matp_loss" in line])
        assert load(folder).trained
    assert logs[0] == pytest.approx(logs[1], abs=1e-4)
    again = tmp_path / "again"
    for name in ("checkpoint-2", "_run"):
        shutil.copytree(tmp_path / "2" / name, again / name)
    launch(2, *words, "--gradient-accumulation-steps", "2", "--output-dir", again, "--resume")
    whole, resumed = (load_file(tmp_path / f / "model.safetensors") for f in ("2", "again"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    last = [json.loads(line) for line in (again / "log.jsonl").read_text().splitlines()]
    assert [line["matp_loss"] for line in last if "matp_loss" in line] == logs[1][2:]
    # nothing left to train: the last decoding is made, and written by one of them
    words += ["--decode-data", rows, "--decode-every", "1"]
    launch(2, *words, "--gradient-accumulation-steps", "2", "--output-dir", again, "--resume")
    last = [json.loads(line) for line in (again / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in last if "decode_n" in line] == [3]


def test_push_to_hub(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    """The hub itself is not reached: what would be sent is."""
    from huggingface_hub import HfApi, RepoUrl

    sent = []

    def upload(self, *, folder_path, ignore_patterns, **kwargs):
        names = (str(f.relative_to(folder_path)) for f in Path(folder_path).rglob("*"))
        sent.append([n for n in names if not any(fnmatch(n, one) for one in ignore_patterns)])

    address = RepoUrl("https://huggingface.co/me/mine")
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *args, **kwargs: address)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    where = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    hub_words = ("--push-to-hub", "yes", "--hub-model-id", "me/mine", "--save-strategy", "no")
    train(monkeypatch, capsys, *where, "--method", "gated", *hub_words)
    assert {"README.md", "adapter_model.safetensors", "generation_config.json"} <= set(sent[-1])
    assert (tmp_path / "out" / "_run" / "settings.json").is_file()
    assert not any(name.startswith("_run") for name in sent[-1])
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("## Set block decoding") == 1
    assert "# me/mine\n" in card
    assert "base_model" not in card.split("# me/mine")[0], "a local base is no hub name"
    assert "matp_loss" in card
