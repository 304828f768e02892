"""The words of `train` and `merge`: configuration files, refusals, estimates, ranks."""

import json
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from safetensors.torch import load_file
from trainings import QUICK, one_line, run, train, write
from trl import SFTConfig  # pyright: ignore[reportPrivateImportUsage]

from setblock.cli import training
from setblock.config import SBDConfig
from setblock.loading import load
from setblock.run import TrainingRun, parse_config
from setblock.train import SBDTrainer
from setblock.watch import DecodeProbe

# trl's own defaults use a name that transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


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
        ("json: true\nmodel: m\n", "json says how the command answers: give --json beside"),
        ("method: half\nmodel: m\ndata: d.jsonl\noutput_dir: o\n", "one of full, lora, qlora, ga"),
    ],
)
def test_bad_config_files(tmp_path, monkeypatch, capsys, content, message) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", "--config", file)
    assert message in capsys.readouterr().err


def test_decoding_while_training(checkpoint, rows, tmp_path, monkeypatch, capsys, caplog) -> None:
    where = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    probe = ("--decode-data", rows, "--decode-every", "2", "--decode-limit", "3")
    options = ("--decode-solver", "fixed:4", "--answer-tokens", "8", "--chat", "--split", "train")
    summary = train(monkeypatch, capsys, *where, *probe, *options)
    assert [result["step"] for result in summary["decode"]] == [0, 2, 3]
    assert "never trained" not in caplog.text, "which goes without saying before the first step"
    modes = {
        (tmp_path / "out" / name).stat().st_mode for name in ("model.safetensors", "README.md")
    }
    assert len(modes) == 1, "weights may be read by whoever may read the card"
    for result in summary["decode"]:
        assert result["decode_n"] == 3
        assert 1 < result["decode_tokens_per_forward"] <= 4
        assert 0 <= result["decode_score"] <= 1
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines if "decode_n" in line] == summary["decode"]


def test_chats_are_decoded_while_training(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    """Their last answers, to the messages before: as the same rows in two parts."""
    asked = [{"role": role, "content": text} for role, text in (("user", "ab"), ("assistant", "b"))]
    asked += [{"role": "user", "content": "cab"}]
    answer = {"role": "assistant", "content": "abc"}
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    whole.write_text(json.dumps({"messages": [*asked, answer]}) + "\n")
    parts.write_text(json.dumps({"prompt": asked, "completion": [answer]}) + "\n")
    found = []
    for number, file in enumerate((whole, parts)):
        where = (
            "--model",
            checkpoint("llama"),
            "--data",
            rows,
            "--output-dir",
            tmp_path / f"{number}",
        )
        probe = ("--decode-data", file, "--decode-every", "2", "--answer-tokens", "8")
        found.append(train(monkeypatch, capsys, *where, *probe)["decode"])
    assert found[0] == found[1]
    assert found[0][0]["decode_n"] == 1


def test_lines_of_a_run(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    """Of each logged step and each decoding; no bars and no dictionaries where nobody watches."""
    words = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    words += ("--max-steps", "4", "--logging-steps", "2", "--use-cpu", "--bf16", "no")
    words += ("--eval-data", rows, "--eval-strategy", "steps", "--eval-steps", "4")
    probe = ("--decode-data", rows, "--decode-every", "4", "--answer-tokens", "4")
    capsys.readouterr()  # what making the checkpoint said
    run(monkeypatch, "train", *words, *probe)
    printed = capsys.readouterr()
    assert printed.out == f"trained 4 steps, saved to {tmp_path / 'out'}\n"
    lines = printed.err.splitlines()
    logged = [line for line in lines if line.startswith("step ")]
    assert [line.partition(":")[0] for line in logged] == [
        "step 0", "step 2 of 4", "step 4 of 4", "step 4 of 4", "step 4"
    ]  # fmt: skip
    number = r"\d+\.\d{3}"
    losses = (
        rf"next-token loss {number}, masked-token loss {number}, \d+\.\d% of masked tokens right"
    )
    assert re.fullmatch(rf"step 2 of 4: {losses}, \d+ tokens a second, \d+ s left", logged[1])
    assert "held-out masked-token loss" in logged[3]
    assert re.fullmatch(
        r"step 4: 4 answers at \d\.\d\d tokens per forward, \d of them right", logged[4]
    )
    assert "it/s" not in printed.err
    assert "{" not in printed.err


def test_help_names_every_field_of_ours() -> None:
    ours = {field.name for field in fields(SBDConfig)} - {field.name for field in fields(SFTConfig)}
    text = " ".join(str(training.train.__doc__).split())
    for name in ours - {"mask_token_id"}:  # an option of its own
        assert "--" + name.replace("_", "-") in text


def test_held_out_losses(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    words = ("--model", checkpoint("llama"), "--data", rows, "--eval-data", rows)
    words += ("--output-dir", tmp_path / "out", "--eval-strategy", "steps", "--eval-steps", "3")
    train(monkeypatch, capsys, *words)
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    [judged] = [line for line in map(json.loads, lines) if "eval_matp_loss" in line]
    assert judged["eval_ntp_loss"] > 0


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
    monkeypatch.setattr("setblock.finetune.estimate", lambda trainer, done: cost)
    again = train(monkeypatch, capsys, *where, "--output-dir", tmp_path / "b")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert again["train_loss"] == summary["train_loss"]


@pytest.mark.parametrize(("word", "again"), [("yes", True), ("no", False)])
def test_what_is_tried_keeps_as_much_as_training(
    checkpoint, rows, tmp_path, monkeypatch, capsys, word, again
) -> None:
    """Layers that are computed anew in the backward pass are in the trial too."""
    seen: list[int] = []
    compute_loss = SBDTrainer.compute_loss

    def noted(self: Any, model: Any, *words: Any, **options: Any) -> Any:
        layers = [getattr(one, "gradient_checkpointing", False) for one in model.modules()]
        seen.append(sum(map(bool, layers)))
        return compute_loss(self, model, *words, **options)

    monkeypatch.setattr(SBDTrainer, "compute_loss", noted)
    where = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "a")
    train(monkeypatch, capsys, *where, "--gradient-checkpointing", word)
    assert len(seen) == 4
    assert len(set(seen)) == 1, "the trial is as the steps"
    assert bool(seen[0]) is again


def test_a_batch_that_does_not_fit(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    def full(*words: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 342.00 MiB.")

    monkeypatch.setattr(SBDTrainer, "compute_loss", full)
    where = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "a")
    with pytest.raises(SystemExit):
        train(monkeypatch, capsys, *where)
    told = one_line(capsys)
    assert "per_device_train_batch_size=2 does not fit: a micro-batch of" in told
    assert "raise gradient_accumulation_steps" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-length", "300"], "max_length=300 is more than"),
        (["--max-length", "1"], "none of the 4 rows .* has a token to learn within max_length=1"),
        (["--chat", "--model", "{no chat}"], "prompts go into a chat template, and the model's"),
        (["--mask-token-id", "999999"], "mask token 999999"),
        (["--decode-every", "2"], "decode_every and decode_data need each other"),
        (["--decode-solver", "guess:1"], "guess"),
        (["--method", "gated", "--objective", "ntp"], "objective must be 'sbd'"),
        (["--resume-from-checkpoint", "x"], "use --resume"),
        (["--data", "{missing}"], "no file"),
        (["--data", "~nobody-is-called-so/t.jsonl"], "no file '~nobody-is-called-so/t.jsonl'"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--answers", "mine"], "answers must be one of data, model, got 'mine'"),
        (["--lora-dropout", "1"], "lora_dropout must lie in 0..1"),
        (["--chain-width", "-1"], "chain_width must be at least 0, got -1"),
        (["--chain-width", "8"], "chain_width is for method gated, got 8 with full"),
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
        (
            ["--max-step", "3"],
            "option '--max-step', and no field of SFTConfig; did you mean --max-steps or",
        ),
        (["--matp-wieght", "1"], "did you mean --matp-weight?"),
        (["--max-steps", "many"], "max_steps"),
        (["--objective", "diffusion"], "objective"),
        (["--max-block-size", "1"], "max_block_size=1"),
        (["--full-mask-share", "2"], "full_mask_share must lie in 0..1, got 2.0"),
        (
            ["--first-slot-loss", "no", "--min-block-size", "1"],
            "first_slot_loss no needs min_block_size of at least 2, got 1",
        ),
        (["--suffix-mask-share", "1.5"], "suffix_mask_share must lie in 0..1"),
        (["--suffix-mask-share", "0.6", "--full-mask-share", "0.5"], "sum to at most 1"),
        (["--self-distill", "-1"], "self_distill must lie in 0..1"),
        (["--matp-weight", "0"], "matp_weight must be a number above 0, got 0.0"),
        (["--matp-weight", "nan"], "matp_weight"),
        (["--idle-blocks", "keep", "--objective", "ntp"], "idle_blocks 'keep' is for objective"),
        (["--idle-blocks", "hide"], "idle_blocks must be one of|invalid choice: 'hide'"),
        (["--max-minutes", "0"], "max_minutes must be a number above 0, got 0.0"),
        (["--max-minutes", "inf"], "max_minutes must be a number above 0, got inf"),
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
        parse_config(TrainingRun("nano", ["rows.jsonl"], tmp_path), words)


def test_the_learning_rate_is_the_method_s_own(tmp_path) -> None:
    for method, words, rate in (
        ("full", [], 2e-5), ("lora", [], 5e-4), ("gated", [], 5e-4), ("qlora", [], 5e-4),
        ("gated", ["--learning-rate", "1e-3"], 1e-3), ("full", ["--learning_rate=1e-4"], 1e-4),
    ):  # fmt: skip
        run = TrainingRun("nano", ["rows.jsonl"], tmp_path, method)
        assert parse_config(run, words).learning_rate == rate


def test_several_gpus_in_one_process_are_refused_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(SBDConfig, "n_gpu", property(lambda config: 2))
    told = "one process sees 2 GPUs, .* CUDA_VISIBLE_DEVICES=0, or start 2 of them with torchrun or"
    with pytest.raises(ValueError, match=told):
        parse_config(TrainingRun("nano", ["rows.jsonl"], tmp_path), ["--bf16", "no"])


def launch(ranks: int, *words: object) -> tuple[str, str]:
    """What `setblock` says on stdout and on stderr, under torchrun."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *start, "-m", "setblock", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FutureWarning" not in done.stderr
    assert "gemm" not in done.stderr, "bitsandbytes says at import that it has no CPU kernels"
    return done.stdout, " ".join(done.stderr.split())


def two_ranks(*words: object) -> str:
    """What `setblock` says on stdout, on two ranks that torchrun could have started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    command = ["setblock", *map(str, words)]
    running = [
        forked.Running(command, Path.cwd(), **world, MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank)
        for rank in "01"
    ]
    ended = [one.wait() for one in running]
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr[-3000:]
    return "".join(one.stdout for one in ended)


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
        told, said = launch(ranks, *words, *per_step)
        assert told.count(f"trained 3 steps, saved to {folder}") == 1, "the first rank tells"
        assert len(re.findall(r"about [\d,]+ tokens a second, 3 steps in about", said)) == 1
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        logs.append([line["matp_loss"] for line in lines if "matp_loss" in line])
        assert load(folder).trained
    assert logs[0] == pytest.approx(logs[1], abs=1e-4)
    again = tmp_path / "again"
    for name in ("checkpoint-2", "_run"):
        shutil.copytree(tmp_path / "2" / name, again / name)
    resumed = ["--gradient-accumulation-steps", "2", "--output-dir", again, "--resume", "--json"]
    assert json.loads(two_ranks(*words, *resumed))["steps"] == 3
    whole, resumed = (load_file(tmp_path / f / "model.safetensors") for f in ("2", "again"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    last = [json.loads(line) for line in (again / "log.jsonl").read_text().splitlines()]
    assert [line["matp_loss"] for line in last if "matp_loss" in line] == logs[1][2:]
    # nothing left to train: the last decoding is made, and written by one of them
    words += ["--decode-data", rows, "--decode-every", "1"]
    two_ranks(*words, "--gradient-accumulation-steps", "2", "--output-dir", again, "--resume")
    last = [json.loads(line) for line in (again / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in last if "decode_n" in line] == [3]


def test_two_ranks_go_on_within_a_later_epoch(checkpoint, tmp_path) -> None:
    """In the order by length, of which each of them has its part."""
    texts = [{"text": chr(97 + n) * (3 + 5 * n % 23)} for n in range(12)]
    words = ["train", "--model", checkpoint("llama"), "--data", write(tmp_path / "d.jsonl", texts)]
    words += ["--train-sampling-strategy", "group_by_length", *QUICK.split(), "--max-steps", "10"]
    words += ["--per-device-train-batch-size", "1", "--save-steps", "8", "--logging-steps", "1"]
    straight, again = tmp_path / "straight", tmp_path / "again"
    two_ranks(*words, "--output-dir", straight)
    for name in ("checkpoint-8", "_run"):
        shutil.copytree(straight / name, again / name)
    alone = ["setblock", *map(str, words), "--output-dir", str(again), "--resume"]
    refused = forked.Running(alone, Path.cwd()).wait()
    assert (refused.returncode, "processes was 2, now 1" in refused.stderr) == (1, True)
    two_ranks(*alone[1:])
    whole, resumed = (load_file(f / "model.safetensors") for f in (straight, again))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


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
