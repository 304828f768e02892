"""The scripts under examples/, on few steps: every option of each is typed."""

import functools
import importlib
import json
import re
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import forked
import httpx
import pytest
import torch
import trainers
import typer
from fakes import TableModel
from safetensors.torch import load_file
from typer.testing import CliRunner

from setblock import batches, nano, solvers
from setblock.checkpoint import read_settings
from setblock.cli import main
from setblock.generation import generate
from setblock.loading import load
from setblock.roofline import ACCEPTANCE

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *words: object, code: int = 0) -> str:
    """What a script printed; its errors, where it is to fail with that code."""
    command = ["python", str(EXAMPLES / name), *map(str, words)]
    done = forked.run(command, Path.cwd(), MPLBACKEND="agg")
    assert done.returncode == code, done.stderr[-2000:]
    return done.stderr if code else done.stdout


def test_every_option_is_typed_by_a_test():
    # The load example needs a server: it is run where there is one.
    files = ("test_examples.py", "test_examples_gpu.py", "test_serve_command.py")
    typed = "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in files)
    for script in EXAMPLES.glob("*.py"):
        source = script.read_text()
        names = (f'"{script.name}"', f'"{script.stem}"')  # in a process, or imported
        assert any(name in typed for name in names), f"no test runs {script.name}"
        main = source.partition("def main(")[2]
        for name in re.findall(r"^    (\w+): Annotated\[[^=]*?typer\.Option", main, re.M):
            option = "--" + name.replace("_", "-")
            assert f'"{option}"' in typed, f"no test types {option} of {script.name}"


def imported(monkeypatch, name: str):
    """(a script as a module of this process, a function that runs it with these words)."""
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module(name)
    app = typer.Typer()
    app.command()(module.main)

    def run_here(*words: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output

    return module, run_here


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_nano_recipe(tmp_path, monkeypatch):
    recipe, run_here = imported(monkeypatch, "train_demo")
    build = recipe.build_tokenizer
    monkeypatch.setattr(recipe, "build_tokenizer", functools.cache(lambda: build(2000)))
    shorter = functools.partial(recipe.measure_acceptance, max_new_tokens=16)
    monkeypatch.setattr(recipe, "measure_acceptance", shorter)
    stages, bundle = tmp_path / "stages", tmp_path / "bundle"
    where = ("--output-dir", stages, "--batch-size", 4, "--base-steps", 2, "--steps", 2)
    run_here(*where, "--only", "base")
    assert not (stages / "sbd").exists()
    shipped = ("--solver", "entropy:0.3", "--acceptance-limit", 1)
    run_here(*where, "--bundle-dir", bundle, *shipped)
    model = load(bundle / "nano")
    assert model.trained
    assert 0 < model.acceptance < ACCEPTANCE
    assert model.defaults["solver"] == "entropy:0.3"
    assert not load(bundle / "nano-twin").trained
    weights = load_file(bundle / "nano" / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) < 4_000_000
    assert "must be one of" in run_here(*where, "--only", "none", code=2)


def test_nano_table(tmp_path, monkeypatch):
    """Three of its settings on two families, in seconds; the whole has over two hundred runs."""
    table, run_here = imported(monkeypatch, "nano_table")
    monkeypatch.setattr(nano, "FAMILIES", dict([*nano.FAMILIES.items()][:2]))
    # Worker processes would spend their time on imports; test_nano_lossless starts one.
    threads = SimpleNamespace(Pool=lambda workers: ThreadPool(1))
    monkeypatch.setattr(table.multiprocessing, "get_context", lambda method: threads)
    monkeypatch.setattr(table.torch, "set_num_threads", lambda count: None)
    three = {name: table.SETTINGS[name] for name in (table.TWIN, table.NTP, table.DEFAULT)}
    monkeypatch.setattr(table, "SETTINGS", three)
    monkeypatch.setattr(table, "BLOCKS", {table.DEFAULT: three[table.DEFAULT]})
    few = ["--validation-limit", 2, "--limit", 3, "--held-out-limit", 1, "--latency-limit", 1]
    run_here("--out", tmp_path, *few, "--batch-size", 2, "--workers", 2)
    sizes = {"validation": 2, "test": 3, "held-out": 1, "latency": 1}
    for name, size in sizes.items():
        lines = json.loads((tmp_path / f"nano-{name}.json").read_text())["results"]
        assert [line["n"] for line in lines] == [size] * (3 * len(nano.FAMILIES))
        assert all(line["held_out"] == (name == "held-out") for line in lines)
    text = (tmp_path / "nano-summary.md").read_text()
    assert all(f"| {family} | " in text for family in nano.FAMILIES)
    assert all(f"| {name} | " in text for name in three)
    # A record that goes on at another commit says which lines are of that one.
    path = tmp_path / "nano-test.json"
    record = json.loads(path.read_text())
    assert "later" not in record
    record |= {
        "commit": "0123456789",
        "results": [line for line in record["results"] if line["setting"] != table.DEFAULT],
    }
    path.write_text(json.dumps(record))
    run_here("--out", tmp_path, *few, "--batch-size", 2, "--workers", 2)
    record = json.loads(path.read_text())
    assert record["commit"] == "0123456789"
    assert [one["settings"] for one in record["later"]] == [[table.DEFAULT]]
    text = (tmp_path / "nano-summary.md").read_text()
    assert f"The rows `{table.DEFAULT}`: at commit {record['later'][0]['commit'][:7]} on " in text
    # One that had nothing left to measure was made by no other.
    path = tmp_path / "nano-validation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": "0123456789"}))
    run_here("--out", tmp_path, *few, "--batch-size", 2, "--workers", 2)
    assert "later" not in json.loads(path.read_text())


def test_task_prompts(tmp_path):
    """The tasks take turns; each question is put as `setblock evaluate` puts it."""
    sums = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    code = {"task_id": 1, "text": "Write f.", "code": "def f(): pass", "test_list": ["assert f()"]}
    files = {"gsm8k": tmp_path / "g.jsonl", "mbpp": tmp_path / "m.jsonl"}
    files["gsm8k"].write_text("\n".join(map(json.dumps, sums)))
    files["mbpp"].write_text(json.dumps(code))
    sources = [f"{name}={file}" for name, file in files.items()]
    out = tmp_path / "prompts.jsonl"
    run("task_prompts.py", *sources, "--out", out, "--each", 2)
    prompts = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    assert [prompt.split("\n")[0] for prompt in prompts] == ["0 + 1?", "Write f.", "1 + 1?"]
    assert prompts[0].endswith("behind ####.")
    for words, said in (
        ((sources[0], "--out", out), "exists already"),
        (("chess=x.jsonl", "--out", "x"), "'chess' is none of"),
        (("gsm8k=none.jsonl", "--out", "x"), "No such file"),
    ):
        error = re.sub(r"[\s│]", "", run("task_prompts.py", *words, code=2))  # wrapped in a box
        assert said.replace(" ", "") in error


def test_structured(tmp_path, monkeypatch):
    script, run_here = imported(monkeypatch, "structured")
    out = tmp_path / "record.json"
    few = ("--model", "nano", "--limit", 2, "--max-new-tokens", 120, "--out", out)
    table = run_here(*few)
    lines = json.loads(out.read_text())["results"]
    assert [(one["format"], one["mode"]) for one in lines] == [
        *(("free", mode) for mode in script.MODES),
        *(("schema", mode) for mode in script.MODES),
        *(("schema, compact", mode) for mode in script.MODES),
    ]
    assert all(one["identical_share"] == 1 for one in lines)
    assert [one["fitting_share"] for one in lines] == [0, 0, 1, 1, 1, 1]
    for one, row in zip(lines, table.splitlines()[-6:], strict=True):
        assert (one["nfe"] == one["num_tokens"]) == (one["mode"] == "ntp")
        assert f"| {one['format']} | {one['mode']} |" in row
        assert f"| {one['num_tokens'] / one['nfe']:.2f} |" in row
        assert ("json_schema" in one["settings"]) == (one["format"] != "free")
        assert (one["settings"]["mode"], one["settings"]["block_size"] > 0) == (one["mode"], True)
    assert script.tells_age('{"age": 31}', "Anna is 31.")
    assert not script.tells_age('{"age": 312}', "Anna is 31.")
    person = '{"name": "A", "age": 3, "city": "B", "hobbies": ["c"]}'
    assert script.fits(person)
    for text in ("", "[]", person[:-1], person.replace("3", "true"), person.replace('"c"', "1")):
        assert not script.fits(text)


def test_structured_answers_of_a_server(tmp_path, monkeypatch):
    script, run_here = imported(monkeypatch, "structured")
    person = '{"name": "A", "age": 3, "city": "B", "hobbies": ["c"]}'
    asked, out = [], tmp_path / "record.json"

    def answered(url: str, json: Any, timeout: float) -> httpx.Response:
        asked.append((url, json))
        forwards = 12 if json["vllm_xargs"] == {"mode": "ntp"} else 4
        message = {"content": person if "response_format" in json else "A is 3."}
        told = {
            "choices": [{"message": message, "token_ids": list(range(12))}],
            "metrics": {"speculative_decoding": {"num_spec_steps": forwards}},
        }
        return httpx.Response(200, json=told)

    monkeypatch.setattr(script.httpx, "post", answered)
    place = "http://localhost:8123/v1"
    table = run_here("--url", place, "--model", "nano", "--limit", 2, "--out", out)
    assert {url for url, _ in asked} == {f"{place}/chat/completions"}
    assert len(asked) == 3 * 4
    forms = [one["response_format"]["json_schema"] for _, one in asked if "response_format" in one]
    assert {str(one["schema"]) for one in forms} == {str(script.PERSON)}
    lines = json.loads(out.read_text())["results"]
    assert [one["tokens_per_forward"] for one in lines] == [1, 3, 1, 3]
    assert [one["fitting_share"] for one in lines] == [0, 0, 1, 1]
    assert all(one["answer_s"] >= one["median_forward_s"] > 0 for one in lines)
    assert [one["settings"]["mode"] for one in lines] == ["ntp", "verified"] * 2
    assert "| schema | verified | 100.0% |" in table
    refused = lambda *_, **__: httpx.Response(400, text="no such model")  # noqa: E731
    monkeypatch.setattr(script.httpx, "post", refused)
    with pytest.raises(typer.BadParameter, match="400: no such model"):
        script.asked_there(place, "nano", [], {"max_new_tokens": 3, "mode": "ntp"})


def test_conversation(tmp_path, monkeypatch):
    script, run_here = imported(monkeypatch, "conversation")
    out = tmp_path / "record.json"
    few = ("--model", "nano", "--turns", 2, "--tokens", 100, "--max-new-tokens", 20)
    table = run_here(*few, "--repeats", 2, "--out", out)
    lines = json.loads(out.read_text())["results"]
    assert [one["turn"] for one in lines] == [1, 2]
    assert lines[0]["cached_tokens"] == 0
    assert 100 < lines[0]["prompt_tokens"] <= lines[1]["cached_tokens"] < lines[1]["prompt_tokens"]
    for one, row in zip(lines, table.splitlines()[-2:], strict=True):
        assert all(len(one[f"{way}_prefill_s"]) == 2 for way in script.WAYS)
        assert f"| {one['prompt_tokens']} | {one['cached_tokens']} |" in row

    def shorter(*given, prompt_cache: Any, max_new_tokens: int) -> Any:
        return generate(*given, max_new_tokens=max_new_tokens if prompt_cache is None else 3)

    monkeypatch.setattr(script.setblock, "generate", shorter)
    told = run_here(*few, "--repeats", 1, code=1)
    assert "an answer with a prompt cache had other tokens than without" in told


def test_nano_lossless(tmp_path):
    """One problem of two families is enough for every setting to run."""
    few = ("--limit", 1, "--latency-limit", 1, "--batch-size", 1, "--workers", 1)
    name = "nano_lossless"
    source = (
        f"import sys, typer; sys.path.insert(0, {str(EXAMPLES)!r}); import {name} as script; "
        "script.nano.FAMILIES = dict([*script.nano.FAMILIES.items()][:2]); "
        f"sys.argv[1:] = {[*map(str, ('--out', tmp_path, *few))]!r}; typer.run(script.main)"
    )
    done = forked.run(["python", "-c", source], Path.cwd())
    assert done.returncode == 0, done.stderr[-2000:]
    lines = json.loads((tmp_path / "nano-lossless.json").read_text())["results"]
    verified = [line for line in lines if line["mode"] == "verified"]
    assert len(verified) == 2 * 7
    assert {line["dtype"] for line in verified} == {"float32", "bfloat16"}
    exact = [line["identical_share"] for line in verified if line["dtype"] == "float32"]
    assert set(exact) == {1}
    assert all(line["queries_per_forward"] > line["tokens_per_forward"] for line in verified)
    table = (tmp_path / "nano-lossless.md").read_text()
    assert "| token by token | " in table
    assert "| 100.0% | 1.00 | 1 | " in table


def test_own_rule(monkeypatch):
    """The cosine schedule: of a block of 8 in 4 forwards 1, 2, 2 and 3 positions."""
    monkeypatch.setattr(solvers, "FORMS", dict(solvers.FORMS))
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module("own_rule")
    options: Any = {"mode": "sbd", "block_size": 8, "max_new_tokens": 24, "ignore_eos": True}
    [found] = generate(TableModel.random(), [[5]], solver="cosine:4", **options)
    counts = Counter(found.reveal_step)
    assert [counts[forward] for forward in sorted(counts)] == [1, 2, 2, 3] * 3
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        solvers.parse("cosine:0")


def test_own_loop(monkeypatch, tmp_path):
    """Its loss is the trainer's; what it saves is a MODEL."""
    own_loop, run_here = imported(monkeypatch, "own_loop")
    rows = [{name: [*ids, 2] for name, ids in row.items()} for row in trainers.samples(4)]
    run = trainers.trainer(tmp_path, rows, max_steps=1, train_sampling_strategy="sequential")
    network = trainers.network()
    run.train()
    filled = [batches.fill_behind_end(row, [2], 15) for row in rows]
    batch = batches.Collator(0)([row | {"sample_id": n} for n, row in enumerate(filled)])
    loss = own_loop.step_loss(network, batch, run.mask_token_id, [2], 0, run.args.seed)
    assert [loss.item()] == pytest.approx(trainers.logged(run, "loss"), abs=1e-5)
    told = run_here("--output-dir", tmp_path / "loop", "--steps", 1)
    assert re.search(r"step 1: \d\.\d+ nats per label\n", told)
    assert f"saved to {tmp_path / 'loop'}\n" in told
    settings = read_settings(str(tmp_path / "loop"))
    assert settings["block_size"] == 16
    assert not {"slide", "acceptance"} & settings.keys(), "measured for other weights"
    assert load(tmp_path / "loop").trained


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_smollm2_recipe(checkpoint, tmp_path, monkeypatch, capsys):
    """On a tiny model and three rows; every other setting is the recipe's."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    row = {"question": "How many are two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    recipe = ["train", "--config", EXAMPLES / "smollm2_gated.yaml", "--data", data]
    small = ["--model", checkpoint("llama", mask_token="<mask>"), "--max-steps", 2]
    less = ["--max-length", 64, "--per-device-train-batch-size", 1, "--output-dir", out]
    monkeypatch.setattr("sys.argv", ["setblock", *map(str, [*recipe, *small, *less]), "--json"])
    main()
    summary = json.loads(capsys.readouterr().out)
    assert (summary["method"], summary["rows"], summary["steps"]) == ("gated", 3, 2)
    trained, bundle = load(out), tmp_path / "bundle"
    assert trained.gated
    words = ("--block-size", 6, "--acceptance", 0.62, "--lookup", 5, "--output-dir", bundle)
    run("smollm2_ship.py", out, *words)
    tensors = load_file(bundle / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((bundle / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "smollm2-base"
    config["base_model_name_or_path"] = str(checkpoint("llama", mask_token="<mask>"))
    (bundle / "adapter_config.json").write_text(json.dumps(config))
    shipped = load(bundle)
    assert shipped.gated
    assert shipped.mask_token_id == trained.mask_token_id
    assert (shipped.defaults["mode"], shipped.defaults["block_size"]) == ("verified", 6)
    assert shipped.acceptance == 0.62
    assert shipped.drafting == {"lookup": 5}
    assert (shipped.slides, shipped.defaults["solver"]) == (True, "prefix:0.8")


def test_plot_log(tmp_path):
    lines = [{"step": step, "ntp_loss": 2.0, "matp_loss": 3.0 / step} for step in (1, 2, 3)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("plot_log.py", log, "--out", tmp_path / "losses.svg")
    assert "<svg" in (tmp_path / "losses.svg").read_text()


def test_demo_svg(monkeypatch, tmp_path):
    module, run_here = imported(monkeypatch, "demo_svg")
    out = tmp_path / "demo.svg"
    words = ("--model", "nano", "--prompt", "What is 2 + 3?", "--solver", "confidence:0.9")
    said = run_here(*words, "--tick-ms", 100, "--out", out)
    [exact] = generate(load("nano"), "What is 2 + 3?", chat=True, mode="ntp")
    solver = {"solver": "confidence:0.9", "slide": False}
    [ours] = generate(load("nano"), "What is 2 + 3?", chat=True, **solver)
    assert said.strip().endswith(f"{out}: {exact.nfe} forwards, {ours.nfe} forwards")
    drawn = ElementTree.fromstring(out.read_text())
    words = [
        ("".join(one.itertext()), float(one.get("x", 0)), [*one])
        for one in drawn.iter("{http://www.w3.org/2000/svg}text")
    ]
    titles = [text for text, _, moves in words if not moves]
    assert titles == ["token by token", "set block decoding"]
    middle = float(drawn.get("width", 0)) / 2
    for answer, here in (
        (exact, [one for one in words if one[1] < middle]),
        (ours, [one for one in words if one[1] > middle]),
    ):
        told = f"{answer.num_tokens} tokens, {answer.nfe} forwards"
        *shown, (last, _, _) = [one for one in here if one[2]]
        assert last == told
        assert "".join(text for text, _, _ in shown).replace(" ", "") == "".join(
            answer.text.split()
        )
        # As many different moments as forwards that revealed words.
        moments = {one[2][0].get("keyTimes") for one in shown}
        assert 1 < len(moments) <= answer.nfe
    assert module.appearing(0.5, 100) in module.words(0, 0, "a", "red", module.appearing(0.5, 100))


@pytest.mark.filterwarnings("ignore")  # as in a process of its own
def test_train_cost(checkpoint, tmp_path, monkeypatch):
    """One row in a process of its own; the others in this one, where imports take no time. Those
    of compiled networks in the same graphs, without the kernels that take half a minute each.
    """
    where = ("--model", checkpoint("llama", mask_token="<mask>"), "--steps", 1)
    result = json.loads(run("train_cost.py", *where, "--only", "sbd gated:8").split("\n")[-2])
    assert result.keys() == {"step_s", "peak_bytes"}
    cost, run_here = imported(monkeypatch, "train_cost")

    def here(command: list[str], **_: object) -> SimpleNamespace:
        words = dict(zip(command[2::2], command[3::2], strict=True))
        row, length = words["--only"].split(":")
        seed, steps = int(words["--seed"]), int(words["--steps"])
        found = cost.measure(words["--model"], row, int(length), steps, seed)
        return SimpleNamespace(stdout=json.dumps(found))

    monkeypatch.setattr(cost, "subprocess", SimpleNamespace(run=here))
    names = "trl full, ntp full, sbd full, sbd full kept, sbd lora, sbd gated, sbd full compiled, "
    names += "sbd lora compiled, sbd gated compiled"
    assert ", ".join(cost.ROWS) == names
    compiled = []
    training = cost.kernels.training

    def in_graphs(network, backend):
        compiled.append(backend)
        return training(network, "eager")

    monkeypatch.setattr(cost, "kernels", SimpleNamespace(training=in_graphs))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "cost.json"
    run_here(*where, "--lengths", "8", "--repeats", 1, "--seed", 3, "--out", out)
    *lines, mask = json.loads(out.read_text())["results"]
    assert (mask["row"], mask["length"]) == ("BlockMask", 8)
    assert mask["seconds"] > 0
    assert mask["cached_seconds"] > 0
    assert [line["row"] for line in lines] == list(cost.ROWS)
    assert compiled == ["inductor"] * 3
    for line in lines:
        assert line["ratio"] == pytest.approx(line["step_s"] / lines[0]["step_s"])
        assert line["peak_bytes"] > 1e8


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_cpu_weights(monkeypatch, tmp_path):
    cpu_weights, run_here = imported(monkeypatch, "cpu_weights")
    torch.manual_seed(0)
    weight, tokens = torch.randn(24, 16), torch.randn(5, 16)
    kinds = [kind for kind in cpu_weights.KINDS if cpu_weights.missing(kind) is None]
    for kind in kinds:
        dtype, make = cpu_weights.KINDS[kind]
        layer = make(weight.to(dtype))
        found, exact = layer(tokens.to(dtype)).float(), tokens @ weight.T
        assert (found - exact).norm() < 0.02 * exact.norm(), kind
        alone = layer(tokens[:1].to(dtype)).float()
        same = torch.allclose(alone, found[:1], atol=1e-5 if dtype == torch.float32 else 0.05)
        assert same == ("all tokens" not in kind), kind
    out = tmp_path / "record.json"
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    words = ["--model", "nano", "--queries", 1, "--queries", 2, "--threads", 1, "--repeats", 1]
    run_here(*words, "--out", out)
    assert told == [1]
    record = json.loads(out.read_text())
    lines = record["results"]
    assert [(line["queries"], line["weights"]) for line in lines] == [
        (count, kind) for count in (1, 2) for kind in kinds
    ]
    assert record["left_out"].keys() == cpu_weights.KINDS.keys() - set(kinds)
    no_bfloat16 = {torch.bfloat16: "no kernels for bfloat16"}
    monkeypatch.setattr(cpu_weights.packed, "missing", lambda device, dtype: no_bfloat16.get(dtype))
    assert "left out: bfloat16, oneDNN: no kernels for bfloat16" in run_here(*words)
    assert {line["faster_than_float32"] for line in lines if line["weights"] == "float32"} == {1}
    monkeypatch.setattr(cpu_weights.packed, "missing", lambda device, dtype: "no kernels")
    assert "nothing to compare here: no kernels" in run_here(*words, code=2)


def test_host_time(monkeypatch, tmp_path):
    host_time, run_here = imported(monkeypatch, "host_time")
    out = tmp_path / "record.json"
    words = ["nano", "--rows", 1, "--rows", 2, "--max-new-tokens", 24, "--repeats", 1]
    assert "copies too" in run_here(*words, "--out", out)
    lines = json.loads(out.read_text())["results"]
    assert [(line["rows"], line["way"]) for line in lines] == [
        (rows, way) for rows in (1, 2) for way in host_time.WAYS
    ]
    assert all(0 < line["range"][0] <= line["microseconds"] for line in lines)


def test_what_takes_the_networks_place_says_one_text(monkeypatch):
    """So that all of a draft is right, whoever made it."""
    host_time, _ = imported(monkeypatch, "host_time")
    model = load("nano", device="cpu")
    model._run = host_time.Told(model, 80)  # type: ignore[method-assign]
    answers = [
        generate(model, [[5, 6]], max_new_tokens=41, ignore_eos=True, **way)[0]
        for way in host_time.WAYS.values()
        if way["mode"] != "sbd"
    ]
    assert len({one.token_ids for one in answers}) == 1
    assert [one.nfe for one in answers[:2]] == [41, 1 + 40 // 8]


def test_copied_tokens(tmp_path, monkeypatch):
    """Tokens behind the first of an answer; those that match nothing are left out."""
    copied_tokens, run_here = imported(monkeypatch, "copied_tokens")
    prompt, answer = [5, 6, 7, 5], (6, 7, 8, 5, 9)
    counts = {(2, True): 1, (3, False): 1, (1, False): 1}
    assert copied_tokens.found(prompt, answer) == counts
    file, out = tmp_path / "rows.jsonl", tmp_path / "record.json"
    rows = [{"question": f"Add {n} and 2.", "answer": f"#### {n + 2}"} for n in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["nano", f"gsm8k={file}", "--each", 3, "--max-new-tokens", 12, "--batch-size", 2]
    text = run_here(*words, "--dtype", "float32", "--out", out)
    record = json.loads(out.read_text())
    assert record["tasks"]["gsm8k"]["questions"] == 3
    assert record["results"]
    for line in record["results"]:
        assert f"| {line['matched']} | {line['looked_up']} | {line['right']:.2f} |" in text
        assert line["assumed"] == pytest.approx(
            0.25 if line["matched"] == 1 else line["matched"] / (line["matched"] + 2)
        )
    for wrong in ("gsm9k=rows", f"gsm8k={tmp_path}/none"):
        run("copied_tokens.py", "nano", wrong, "--out", out, code=2)
    run("copied_tokens.py", "no/model", f"gsm8k={file}", code=2)


def test_padding_cost(tmp_path, checkpoint):
    out = tmp_path / "record.json"
    words = [
        "--model",
        "nano",
        "--rows",
        "3,1",
        "--cached",
        8,
        "--repeats",
        2,
        "--dtype",
        "float32",
    ]
    text = run("padding_cost.py", *words, "--out", out)
    [line] = json.loads(out.read_text())["results"]
    assert line["rows"] == [3, 1]
    assert f"| 3,1 | {line['padded_s'] * 1e3:.1f} | {line['without_s'] * 1e3:.1f} |" in text
    low, high = line["speedup_range"]
    assert low <= line["speedup"] <= high
    for wrong in ("3;1", "3,0"):
        run("padding_cost.py", "--model", "nano", "--rows", wrong, code=2)
    words[1] = str(checkpoint())
    run("padding_cost.py", *words, "--compile", "--out", out)
    assert json.loads(out.read_text())["compile"]


def test_long_prompt(tmp_path, monkeypatch):
    long_prompt, run_here = imported(monkeypatch, "long_prompt")
    started = SimpleNamespace(run=lambda words, **_: forked.run(words, Path.cwd()))
    monkeypatch.setattr(long_prompt, "subprocess", started)
    out = tmp_path / "record.json"
    text = run_here("--tokens", 64, "--chunks", "16,0", "--new-tokens", 4, "--out", out)
    assert "64 tokens, 16 at a time" in text
    first, second = json.loads(out.read_text())["results"]
    assert (first["prefill_forwards"], second["prefill_forwards"]) == (4, 1)
    assert first["peak_bytes"] > first["weights_bytes"] + first["cache_bytes"]
    assert '"chunk": 64' in run("long_prompt.py", "--tokens", 64, "--only", 0)
