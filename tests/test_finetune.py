"""The `train` and `merge` commands: rows in, a MODEL out that every other command takes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from trainings import ROWS, next_token_logits, one_line, run, train

from setblock import adapters, loading
from setblock.checkpoint import write_settings
from setblock.generation import generate
from setblock.loading import load
from setblock.model import Model
from setblock.names import BUNDLED
from setblock.roofline import ACCEPTANCE
from setblock.train import SBDTrainer

DRAFTED = {"block_size": 3, "branches": 2, "seeds": 1}

# trl's own defaults use a name that transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


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
    assert ("Decoded verified, the adapter drafts" in card) == (method == "gated")
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
    whole = load(tmp_path / "merged")
    assert not whole.adapted
    assert not whole.acceptance_is_known, "as that of the adapter"
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


@pytest.mark.parametrize("chain", [(), ("--chain-width", "8")])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_gated_adapter_in_stock_peft_leaves_next_tokens_alone(
    checkpoint, rows, tmp_path, monkeypatch, capsys, kind, chain
) -> None:
    from peft import AutoPeftModelForCausalLM

    base, folder = checkpoint(kind, mask_token="<mask>"), tmp_path / "out"
    where = ("--model", base, "--data", rows, "--output-dir", folder)
    train(monkeypatch, capsys, *where, "--method", "gated", "--learning-rate", "0.05", *chain)
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
    write_settings(folder, acceptance=0.7, verified=DRAFTED)
    run(monkeypatch, "merge", folder, whole, "--dtype", "float32", "--json")
    assert json.loads(capsys.readouterr().out)["output_dir"] == str(whole)
    assert not (whole / "adapter_config.json").exists()
    adapted, merged = load(folder), load(whole)
    assert (merged.acceptance, merged.drafting) == (0.7, DRAFTED)
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


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_merge_rounds_once(checkpoint, rows, tmp_path, monkeypatch, capsys, kind) -> None:
    """Whatever the base is stored in; in memory it is float32 only where it has to be."""
    stored, folder, whole = tmp_path / "base", tmp_path / "out", tmp_path / "whole"
    shutil.copytree(checkpoint("qwen3"), stored)
    network = transformers.AutoModelForCausalLM.from_pretrained(stored, dtype=kind)
    network.save_pretrained(stored)
    where = ("--model", stored, "--data", rows, "--output-dir", folder)
    train(monkeypatch, capsys, *where, "--method", "lora", "--learning-rate", "0.05")
    asked, plain = [], loading.load
    monkeypatch.setattr(
        loading, "load", lambda *a, **b: (asked.append(b["dtype"]), plain(*a, **b))[1]
    )
    run(monkeypatch, "merge", folder, whole, "--dtype", "bfloat16")
    assert asked == ["auto"] + ["float32"] * (kind != "bfloat16")
    exact = plain(folder, dtype="float32", pack=False).network.state_dict()
    found = load_file(whole / "model.safetensors")
    assert all(torch.equal(exact[name].to(torch.bfloat16), found[name]) for name in found)


def test_merge_refuses_gated(checkpoint, rows, tmp_path, monkeypatch, capsys) -> None:
    where = ("--model", checkpoint("llama"), "--data", rows, "--output-dir", tmp_path / "out")
    train(monkeypatch, capsys, *where, "--method", "gated")
    with pytest.raises(SystemExit):
        run(monkeypatch, "merge", tmp_path / "out", tmp_path / "whole")
    assert "acts on masked positions alone" in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", "--model", tmp_path / "out", *where[2:4], "--output-dir", "x")
    assert "go on training it with setblock train --method gated, or train on its base" in (
        one_line(capsys)
    )


def test_parquet_and_hub_names(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    from datasets import Dataset

    columns = Dataset.from_list(ROWS).rename_columns({"prompt": "q", "completion": "a"})
    columns.to_parquet(str(tmp_path / "rows.parquet"))
    where = ("--model", checkpoint("llama"), "--output-dir", tmp_path / "out")
    names = ("--prompt-field", "q", "--completion-field", "a")
    data = ("--data", tmp_path / "rows.parquet")
    assert train(monkeypatch, capsys, *where, *data, *names)["rows"] == 4
    with pytest.raises(SystemExit):
        run(monkeypatch, "train", *where[:2], "--output-dir", "x", "--data", "no-one/nothing")
    assert "can't read data 'no-one/nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["lora", "gated"])
def test_an_adapter_on_a_base_of_fewer_embeddings_than_tokens(
    checkpoint, rows, tmp_path, monkeypatch, capsys, method
) -> None:
    """Its mask token lies behind all of them, as it did in training."""
    base = checkpoint("llama", free_rows=-2, specials=("<one>", "<other>", "<third>"))
    words = ("--data", rows, "--method", method, "--model", base, "--output-dir", tmp_path)
    train(monkeypatch, capsys, *words, "--learning-rate", "0.05", "--lora-rank", "4")
    asked, model = load(base), load(tmp_path)
    assert asked.mask_token_id == model.mask_token_id == len(asked.tokenizer) - 1
    assert model.vocab_size == asked.vocab_size == len(asked.tokenizer)
    tuned = load_file(tmp_path / "adapter_model.safetensors")
    row = next(value for name, value in tuned.items() if "trainable_tokens_delta" in name)
    embedding = model.network.get_input_embeddings()
    seen = embedding(torch.tensor([model.mask_token_id]))
    assert torch.allclose(seen[0], row[0], atol=1e-6)
    assert (
        generate(model, [[5, 6]], mode="verified", max_new_tokens=4, ignore_eos=True)[0].num_tokens
        == 4
    )


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
        (
            ("--method", other),
            f"go on training it with setblock train --method {method}, or train on its base",
        ),
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


def test_a_folder_that_another_process_writes_to_is_refused(
    checkpoint, rows, tmp_path, monkeypatch, capsys
) -> None:
    """By whatever path it is named; and not once that process has ended."""
    folder, base = tmp_path / "out", checkpoint("llama")
    script = "from pathlib import Path\nfrom setblock.files import lock\n"
    script += f"lock(Path({str(folder)!r}))\nprint(1, flush=True)\ninput()\n"
    words = ["--model", base, "--data", rows, "--output-dir", tmp_path / "x" / ".." / "out"]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        for command in ("train", "speedup"):
            with pytest.raises(SystemExit):
                run(monkeypatch, command, *words)
            assert one_line(capsys).endswith(f"error: another command is writing to {words[-1]}")
        other.communicate("\n")
    assert not folder.exists()
    assert train(monkeypatch, capsys, *words)["steps"] == 3


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


@pytest.mark.parametrize("objective", ["sbd", "ntp"])
def test_the_result_says_what_it_was_trained_for(
    checkpoint, rows, tmp_path, monkeypatch, capsys, objective
) -> None:
    settings = {"trained": True, "mode": "ntp", "acceptance": 0.9, "mask_token_id": 7}
    settings["verified"] = DRAFTED
    words = ("--model", checkpoint("llama", settings=settings), "--data", rows)
    words += ("--output-dir", tmp_path / "out", "--objective", objective)
    train(monkeypatch, capsys, *words)
    model = load(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (model.trained, model.defaults["mode"]) == (objective == "sbd", objective)
    assert ("next-token prediction alone" in card) == (objective == "ntp")
    if objective == "sbd":
        assert model.acceptance == ACCEPTANCE, "measured on other weights"
        assert model.drafting == {}, "chosen for other weights"
