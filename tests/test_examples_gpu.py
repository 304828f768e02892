"""The scripts for a GPU under examples/, on few steps and a CPU."""

import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
import typer
from fakes import in_full
from test_examples import imported, run

from setblock.masks import causal_layout


def test_the_gpu_benchmark(tmp_path, monkeypatch):
    """As it would run on a GPU, at a tiny shape."""
    path = tmp_path / "record.json"
    words = [
        "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--queries", 1, "--queries", 16,
        "--queries", 32, "--cached", 8, "--cached", 64, "--rows", 1, "--rows", 2, "--prompt", 24,
        "--new-tokens", 16, "--repeats", 1, "--copy-bytes", 4096, "--out", path,
    ]  # fmt: skip
    assert "Speed-up for so many tokens per forward" in run("gpu_benchmark.py", *words)
    record = json.loads(path.read_text())
    cells = [(one["batch_size"], one["cached"], one["queries"]) for one in record["forwards"]]
    assert cells == [(b, n, q) for b in (1, 2) for n in (8, 64) for q in (1, 16, 32)]
    assert len(record["bandwidth"]) == len(record["speedups"]) == 4
    whole = {one["contender"]: one for one in record["answers"]}
    for rate in (1, 2, 4, 8):
        assert whole[f"sbd fixed:{rate}"]["tokens_per_forward"] == rate
    assert whole["ntp"]["tokens"] == whole["transformers"]["tokens"] == 16
    assert whole["verified"]["tokens"] == 16
    assert sum(whole["shares of sbd"]["shares"].values()) == pytest.approx(1)
    # t tokens per forward: a block's first forward of 32 tokens, and 16 / t - 1 of 16.
    first = {one["queries"]: one["seconds"] for one in record["forwards"][:3]}
    expected = 16 * first[1] / (first[32] + 3 * first[16])
    assert record["speedups"][0]["speedup"]["4"] == pytest.approx(expected)
    run("gpu_benchmark.py", *words, "--part", "answers")
    record = json.loads(path.read_text())
    assert record["answers"]
    assert not record["forwards"]
    run("gpu_benchmark.py", *words, "--part", "forwards")
    record = json.loads(path.read_text())
    assert record["forwards"]
    assert not record["answers"]
    told = run("gpu_benchmark.py", *words, "--part", "kernels")
    assert "32 tokens behind 64: " in told
    lines = json.loads(path.read_text())["kernels"]
    products = [one for one in lines if "mm" in one["kernel"] and one["queries"] == 16]
    assert products
    assert all(one["calls"] > 0 and one["microseconds"] > 0 for one in products)
    _, run_here = imported(monkeypatch, "gpu_benchmark")
    assert "--shape must be one of" in run_here("--shape", "huge", code=2)
    assert "--part must be one of" in run_here("--part", "x", code=2)
    assert "no CUDA GPU is here" in run_here(code=2)


def test_the_gpu_benchmark_has_no_graphs_on_a_cpu(monkeypatch):
    _, run_here = imported(monkeypatch, "gpu_benchmark")
    words = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--compile", "graphs"]
    assert "the model is on cpu" in " ".join(run_here(*words, code=2).replace("│", "").split())


def test_the_gpu_benchmark_with_others_kernels(monkeypatch, tmp_path):
    gpu_benchmark, run_here = imported(monkeypatch, "gpu_benchmark")
    path = tmp_path / "record.json"
    few = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--liger"]
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    told = " ".join(run_here(*few, code=2).replace("│", "").split())
    assert "--liger needs: pip install liger-kernel" in told
    given: list[Any] = []
    taken = SimpleNamespace(apply_liger_kernel_to_llama=lambda **words: given.append(words))
    monkeypatch.setattr(gpu_benchmark, "import_module", lambda name: taken)
    few += ["--part", "forwards", "--queries", "1", "--cached", "8", "--rows", "1"]
    run_here(*few, "--repeats", "1", "--copy-bytes", "64", "--out", path)
    [words] = given
    assert words["fused_linear_cross_entropy"] is False
    assert words["model"].config.model_type == "llama"
    assert json.loads(path.read_text())["liger"] is True


def test_the_gpu_benchmark_with_joined_layers(monkeypatch, tmp_path):
    gpu_benchmark, run_here = imported(monkeypatch, "gpu_benchmark")
    model = gpu_benchmark.random_model("tiny", 64, "cpu", "float32")
    tokens, clean = torch.tensor([[5, 9, 30]]), causal_layout(torch.arange(3)[None])
    expected = model.forward(tokens, clean)
    count = model.num_parameters
    gpu_benchmark.with_joined_layers(model.network)
    torch.testing.assert_close(model.forward(tokens, clean), expected)
    layers = [type(one).__name__ for one in model.network.get_decoder().layers.modules()]
    assert layers.count("PackedPart") == 2 * 5, "of q, k, v, gate and up"
    assert sum(one.numel() for one in set(model.network.parameters())) == count, "none twice"
    path = tmp_path / "record.json"
    few = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--joined"]
    few += ["--part", "kernels", "--queries", "1", "--cached", "8", "--copy-bytes", "64"]
    run_here(*few, "--repeats", "1", "--out", path)
    record = json.loads(path.read_text())
    assert record["joined"] is True
    [products] = [one for one in record["kernels"] if one["kernel"].endswith("mm")]
    assert products["calls"] == 2 * 4 + 1


def test_the_gpu_benchmark_by_graphs(monkeypatch, tmp_path, simulated_graphs):
    gpu_benchmark, run_here = imported(monkeypatch, "gpu_benchmark")
    path = tmp_path / "record.json"
    few = ["--shape", "tiny", "--device", "cpu", "--queries", "1", "--cached", "8", "--rows", "1"]
    few += ["--prompt", "4", "--new-tokens", "32", "--repeats", "1", "--copy-bytes", "64"]
    run_here(*few, "--dtype", "float32", "--compile", "graphs", "--out", path)
    record = json.loads(path.read_text())
    assert record["compile"] == "graphs"
    assert not any("shares" in line for line in record["answers"])
    assert len(simulated_graphs) >= 3, "1, k and 2k tokens"
    told = []
    monkeypatch.setattr(gpu_benchmark.Model, "compile", lambda model, how: told.append(how))
    run_here(*few, "--dtype", "float32", "--compile", "kernels")
    assert told == ["kernels"]


class Forked(forked.Running):
    """A `subprocess.Popen` whose process needs no imports of its own."""

    def __init__(self, words: list[str], stdout: Any, stderr: Any, env: dict[str, str]) -> None:
        python, *own = words
        assert (python, stdout) == (sys.executable, stderr)
        super().__init__(["python", *own], Path.cwd(), **env)

    def poll(self) -> int | None:
        if self.returncode is not None:
            self.kept.cleanup()
        return self.returncode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()


def test_the_three_models_of_a_gpu(tmp_path, monkeypatch) -> None:
    """Stopped at once, gone on with to the end, and nothing left to train then."""
    prompts, dev = tmp_path / "prompts.jsonl", tmp_path / "dev.jsonl"
    asked = [f"What is 1 + {count}?" for count in range(6)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    questions = [{"question": text, "answer": "#### 4"} for text in asked]
    dev.write_text("".join(json.dumps(row) + "\n" for row in questions))
    out = tmp_path / "out"
    words = [
        "--prompts", prompts, "--dev", f"gsm8k={dev}", "--base", "nano", "--output-dir", out,
        "--steps", 2, "--adapter-steps", 2, "--batch-size", 2, "--adapter-batch-size", 3,
        "--answer-tokens", 12, "--answer-batch-size", 6, "--writers", 2, "--rate", 1e-4,
        "--adapter-rate", 1e-3, "--questions", 1, "--minutes",
    ]  # fmt: skip
    told = run("smollm2_gpu.py", *words, 0.001)
    assert "stopped before answers-0, answers-1 was done: the same goes on" in told
    smollm2_gpu, run_script = imported(monkeypatch, "smollm2_gpu")
    monkeypatch.setattr(smollm2_gpu, "subprocess", SimpleNamespace(Popen=Forked))

    def run_here(*words: Any, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["smollm2_gpu.py", *map(str, words)])
        return run_script(*words, code=code)

    assert f"all is trained, in {out}" in run_here(*words, 9, "--measuring", 0)
    assert not [*out.glob("*-gsm8k-*")]
    assert f"all is in {out}" in run_here(*words, 9, "--measuring", 2)
    modes = {}
    for name in ("base", "gated", "sbd", "twin"):
        results = json.loads((out / f"{name}-gsm8k-dev.json").read_text())["results"]
        modes[name] = [one["mode"] for one in results]
        assert all(one["n"] == 1 for one in results)
    assert modes["base"] == modes["twin"] == ["ntp"]
    assert modes["gated"] == modes["sbd"] == ["ntp", *["sbd"] * 4, "verified"]
    answers = (out / "answers.jsonl").read_text().splitlines()
    assert all((out / way / "_run" / "answers.jsonl").read_text().splitlines() == answers
               for way in ("gated", "sbd", "twin"))  # fmt: skip
    assert sorted(json.loads(line)["index"] for line in answers) == list(range(6))
    with prompts.open("a") as more:
        more.write(json.dumps({"prompt": "And now?"}) + "\n")
    told = " ".join(run_here(*words, 9, code=2).replace("│", "").split())
    assert "has not the answers to all prompts of" in told
    logs = [(out / way / "log.jsonl").read_text() for way in ("gated", "sbd", "twin")]
    assert all('"step": 2' in log for log in logs)


def test_the_attention_of_a_gpu(monkeypatch, tmp_path, simulated_graphs):
    gpu_attention, run_here = imported(monkeypatch, "gpu_attention")
    monkeypatch.setattr(gpu_attention.attention, "efficient", in_full)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        synchronize = record

        def elapsed_time(self, other: Any) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    path = tmp_path / "record.json"
    few = ["--slots", "128", "--queries", "1", "--queries", "4"]
    assert "error: no CUDA GPU is here" in run_here(*few, code=1)
    monkeypatch.setattr(gpu_attention, "DEVICE", "cpu")
    run_here(*few, "--rows", "1", "--rows", "2", "--out", str(path))
    results = json.loads(path.read_text())["results"]
    cells = [(one["batch_size"], one["queries"], one["pieces"]) for one in results]
    whole = [(batch, count, 1) for batch in (1, 2) for count in (1, 4)]
    assert sorted(cells) == sorted([*whole, *((1, q, n) for q in (1, 4) for n in (8, 16))])
    assert all(one["microseconds"] == pytest.approx(150) for one in results)
    assert len(simulated_graphs) == 8
    assert all(0 < one["error"] < 0.02 for one in results)


def test_the_adapter_of_a_gpu_may_be_one_that_is_there(monkeypatch, tmp_path) -> None:
    smollm2_gpu, run_here = imported(monkeypatch, "smollm2_gpu")
    started: dict[str, list[str]] = {}

    class Together:
        def __init__(self, folder: Path, until: float) -> None:
            self.until = until

        def start(self, name: str, words: list[str]) -> None:
            started[name] = words

        def wait(self, *names: str) -> bool:
            return "gated" not in names

        def stop(self) -> None:
            pass

    monkeypatch.setattr(smollm2_gpu, "Together", Together)
    monkeypatch.setattr(smollm2_gpu, "join_parts", lambda files, out: out.write_text(""))
    monkeypatch.setattr(smollm2_gpu, "check_answers", lambda answers, prompts: None)
    words = ["--prompts", tmp_path / "p", "--output-dir", tmp_path, "--dev"]
    wrong = run_here(*words, "gsm8k", "--minutes", 9, code=2)
    assert "--dev must be TASK=FILE, got 'gsm8k'" in " ".join(wrong.split())
    words = [*words, "gsm8k=d"]
    assert "--prompts: no file" in run_here(*words, "--minutes", 9, code=2)
    (tmp_path / "p").write_text("")
    run_here(*words, "--adapter", "mine", "--base", "b", "--minutes", 9, "--writers", 1)
    trained = {name: words for name, words in started.items() if "--model" in words}
    models = {name: words[words.index("--model") + 1] for name, words in trained.items()}
    assert models == {"sbd": "b", "twin": "b", "gated": "mine"}
    for name in models:
        limit = started[name][started[name].index("--max-minutes") + 1]
        assert float(limit) == pytest.approx(9 - 1.5 - 0.7, abs=0.1)
    # What came to its end is not trained again; what was told to stop is.
    for name, stopped in (("sbd", "SIGTERM"), ("twin", None)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "summary.json").write_text(json.dumps({"stopped_by": stopped}))
    started.clear()
    told = run_here(*words, "--adapter", "mine", "--minutes", 1)
    assert not started
    assert "no time is left to train gated, sbd: the same goes on" in told
    run_here(*words, "--adapter", "mine", "--minutes", 9)
    assert set(started) == {"gated", "sbd"}
    assert not any("--torch-compile" in own for own in started.values())
    run_here(*words, "--adapter", "mine", "--minutes", 9, "--compile")
    told = [own[own.index("--torch-compile") + 1] for own in started.values()]
    assert told == ["yes", "yes"]


def test_commands_that_run_together_end_gently_when_interrupted(monkeypatch, tmp_path) -> None:
    smollm2_gpu, _ = imported(monkeypatch, "smollm2_gpu")
    jobs = smollm2_gpu.Together(tmp_path, time.monotonic() + 60)
    jobs.start("long", ["-c", "import time; time.sleep(60)"])

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        smollm2_gpu, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=interrupt)
    )
    with pytest.raises(typer.Exit) as stopped:
        jobs.wait("long")
    assert stopped.value.exit_code == 130
    assert jobs.running["long"].returncode == -signal.SIGTERM
