"""`setblock serve --engine vllm`: what is run, and what is refused before it is."""

import json
import os
import shutil

import pytest
import torch

from setblock import solvers
from setblock.checkpoint import write_settings
from setblock.names import BUNDLED
from setblock.vllm import command


@pytest.fixture
def environments() -> list[dict[str, str]]:
    """Of the programs that ran."""
    return []


@pytest.fixture
def ran(monkeypatch, environments) -> list[list[str]]:
    """The programs that took this one's place, as if vLLM was installed."""
    programs: list[list[str]] = []

    def execute(path: str, words: list[str], environment: dict[str, str]) -> None:
        programs.append(words)
        environments.append(environment)

    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(os, "execve", execute)
    monkeypatch.setattr("uvicorn.Server.run", lambda *words, **given: None)
    return programs


def after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_vllm_is_told_what_the_checkpoint_says(run, ran, environments):
    run("serve", "nano", "--engine", "vllm", "--port", "0")
    [words] = ran
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert after(words, "--model") == str(BUNDLED["nano"])
    assert after(words, "--served-model-name") == "nano"
    assert (after(words, "--host"), after(words, "--port")) == ("127.0.0.1", "0")
    assert after(words, "--dtype") == "float32"
    assert json.loads(after(words, "--diffusion-config")) == {"canvas_length": 32}  # two blocks
    own = {"mode": "sbd", "solver": "prefix:0.99", "verified": {}, "slide": True}
    assert json.loads(after(words, "--hf-overrides")) == {
        "architectures": ["SetBlockLlamaForCausalLM"],
        "canvas_length": 16,
        "mask_token_id": 3,
        "setblock": {**own, "fused": True, "adaptive": "exact"},
    }
    assert after(words, "--scheduler-cls") == "setblock.vllm.scheduler.scheduler"
    assert "--enforce-eager" in words
    assert "--no-async-scheduling" in words
    assert after(words, "--middleware") == "setblock.vllm.fields.Fields"
    assert environments[0]["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "VLLM_API_KEY" not in environments[0]
    assert "--attention-backend" not in words


@pytest.mark.parametrize(
    "typed",
    [
        ["--attention-backend", "FLASH_ATTN"],
        ["--attention_backend=FLASH_ATTN"],
        ["--attention-config.flash_attn_version", "4"],
        ["-ac", '{"backend": "FLASH_ATTN"}'],
    ],
)
def test_on_cuda_the_backend_is_one_that_takes_both_kinds_of_requests(run, ran, monkeypatch, typed):
    """FlashAttention 2 and 3 and FlashInfer do not; whoever names another one gets it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    run("serve", "nano", "--engine", "vllm")
    run("serve", "nano", "--engine", "vllm", "--", *typed)
    assert after(ran[0], "--attention-backend") == "TRITON_ATTN"
    assert "TRITON_ATTN" not in ran[1]
    assert ran[1][-len(typed) :] == typed
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's: vLLM has others there
    run("serve", "nano", "--engine", "vllm")
    assert "--attention-backend" not in ran[2]


@pytest.mark.parametrize(
    ("cuda", "typed", "graphs"),
    [
        (False, ["--compile", "kernels"], "NONE"),
        (False, ["--compile", "on"], "NONE"),
        (True, ["--compile", "kernels"], "NONE"),
        (True, ["--compile", "on"], "PIECEWISE"),
    ],
)
def test_compiled(run, ran, monkeypatch, cuda, typed, graphs):
    """A whole forward as one graph would hold one kind of attention."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    run("serve", "nano", "--engine", "vllm", *typed)
    for own in (["--compilation-config", "{}"], ["-cc.mode", "0"], ["--compilation_config={}"]):
        run("serve", "nano", "--engine", "vllm", *typed, "--", *own)
        assert ran[-1][-len(own) :] == own
        assert "cudagraph_mode" not in " ".join(ran[-1]), "theirs is taken"
    words = ran[0]
    assert json.loads(after(words, "--compilation-config")) == {"cudagraph_mode": graphs}
    assert not any("--enforce-eager" in words for words in ran)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--", "-cc.mode=3"], "-cc.mode=3 compiles nothing without --compile on or kernels"),
        (["--compile", "on", "--", "--enforce_eager"], "can't be used with --enforce-eager"),
    ],
)
def test_compiled_and_not(run, ran, typed, said):
    assert said in run("serve", "nano", "--engine", "vllm", *typed).error
    assert not ran


def test_every_option(run, ran, checkpoint, environments):
    folder = checkpoint("qwen3", free_rows=3)
    result = run(
        *("serve", folder, "--engine", "vllm", "--allow-untrained", "--mask-token-id", "9"),
        *("--mode", "verified", "--solver", "fixed:2", "--block-size", "8", "--dtype", "bfloat16"),
        *("--host", "0.0.0.0", "--port", "81", "--api-key", "secret", "--adaptive", "--fused"),
        *("--", "--max-num-seqs", "4"),
    )
    assert result.err == ""
    [words] = ran
    assert "secret" not in words, "ps shows them"
    assert environments[0]["VLLM_API_KEY"] == "secret"
    assert after(words, "--max-num-seqs") == "4"
    assert (after(words, "--host"), after(words, "--port")) == ("0.0.0.0", "81")
    assert after(words, "--dtype") == "bfloat16"
    overrides = json.loads(after(words, "--hf-overrides"))
    assert overrides["architectures"] == ["SetBlockQwen3ForCausalLM"]
    assert (overrides["canvas_length"], overrides["mask_token_id"]) == (8, 9)
    assert overrides["setblock"] == {
        "mode": "verified", "solver": "fixed:2", "verified": {}, "draft": "solver",
        "adaptive": "all", "fused": True, "slide": False,
    }  # fmt: skip
    assert json.loads(after(words, "--diffusion-config")) == {"canvas_length": 16}  # two blocks
    assert "--no-async-scheduling" in words


def test_apart(run, ran):
    """Forwards of always one block, which vLLM's asynchronous scheduler can run."""
    run("serve", "nano", "--engine", "vllm", "--no-fused", "--no-slide", "--no-adaptive")
    [words] = ran
    assert json.loads(after(words, "--diffusion-config")) == {"canvas_length": 16}
    assert not {"adaptive", "fused"} & json.loads(after(words, "--hf-overrides"))["setblock"].keys()
    assert "--no-async-scheduling" not in words


def test_blocks_that_slide(run, ran, checkpoint):
    """What is served says whether the checkpoint's slide, of which requests in mode sbd hear."""
    settings = {"trained": True, "mask_token_id": 9, "slide": True, "mode": "sbd"}
    folder = checkpoint("qwen3", free_rows=3, settings={**settings, "solver": "prefix:0.9"})
    words = ("serve", folder, "--engine", "vllm")
    for typed, hindrance in (
        (("--solver", "fixed:2"), "on vLLM with solver fixed:2, which may leave gaps (prefix:TAU "),
        (("--slide", "--no-fused"), "on vLLM with --no-fused: --no-slide serves "),
    ):
        error = run(*words, *typed).error
        assert f"decodes in blocks that slide, which they can't {hindrance}" in error
    for typed, slides in (
        ((), True),
        (("--slide",), True),
        (("--no-slide", "--no-fused", "--solver", "fixed:2"), False),
        (("--mode", "verified", "--no-fused"), True),
    ):
        run(*words, *typed)
        assert json.loads(after(ran[-1], "--hf-overrides"))["setblock"]["slide"] is slides


@pytest.mark.parametrize(("words", "mode"), [([], "ntp"), (["--mode", "sbd"], "sbd")])
def test_an_untrained_model_is_decoded_token_by_token(run, ran, checkpoint, words, mode):
    folder = checkpoint("qwen3", free_rows=3)
    typed = ("--engine", "vllm", "--allow-untrained", "--mask-token-id", "9", *words)
    assert run("serve", folder, *typed).err == ""
    assert json.loads(after(ran[0], "--hf-overrides"))["setblock"]["mode"] == mode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "was never trained for set block decoding"),
        (["--allow-untrained"], "names no mask token within its"),
        (
            ["--allow-untrained", "--mask-token-id", "9999"],
            "--mask-token-id must lie in 0..260, the",
        ),
        (
            ["--allow-untrained", "--mask-token-id", "9", "--mode", "verified", "--slide"],
            "slide is for mode sbd, got True in mode verified",
        ),
        (
            ["--allow-untrained", "--mask-token-id", "9", "--slide"],
            "slide is for mode sbd, got True in mode ntp",
        ),
        (["--allow-untrained", "--mask-token-id", "9", "--solver", "best"], "solver must be one"),
        (["--allow-untrained", "--mask-token-id", "9", "--block-size", "0"], "block_size must be"),
    ],
)
def test_refused_before_anything_runs(run, ran, untrained, words, message):
    assert message in run("serve", untrained, "--engine", "vllm", *words).error
    assert not ran


def test_models_that_vllm_can_not_serve(run, ran, checkpoint, tmp_path):
    refused = run("serve", checkpoint("gemma3"), "--engine", "vllm").error
    assert "is a Gemma3ForCausalLM; on vLLM only ApertusForCausalLM, Er" in refused
    windows = checkpoint("mistral-window")
    assert "has sliding-window" in run("serve", windows, "--engine", "vllm").error
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    broken = run("serve", tmp_path / "adapter", "--engine", "vllm").error
    assert "adapter' names no base_model_name_or_path" in broken
    for base, message in (
        ("runs/nowhere", "is an adapter on 'runs/nowhere', which vLLM can't read"),
        (str(tmp_path / "base.gguf"), "its base must be a whole checkpoint"),
        (str(tmp_path / "adapter"), "its base must be a whole checkpoint"),
    ):
        words = json.dumps({"base_model_name_or_path": base})
        (tmp_path / "adapter" / "adapter_config.json").write_text(words)
        assert message in run("serve", tmp_path / "adapter", "--engine", "vllm").error
    assert "no model 'nowhere/at-all'" in run("serve", "nowhere/at-all", "--engine", "vllm").error
    assert not ran


def test_an_adapter_is_put_on_its_base(run, ran, checkpoint, tmp_path):
    base, folder = checkpoint("llama"), tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    drafting = {"block_size": 2, "branches": 1, "seeds": 0, "lookup": 3}
    write_settings(
        folder, mask_token_id=7, trained=True, block_size=4, mode="verified", verified=drafting
    )
    run("serve", folder, "--engine", "vllm")
    assert after(ran[0], "--model") == str(base)
    assert after(ran[0], "--served-model-name") == str(folder)
    overrides = json.loads(after(ran[0], "--hf-overrides"))
    assert (overrides["mask_token_id"], overrides["canvas_length"]) == (7, 4)
    own = {
        "fused": True,
        "adaptive": "exact",
        "mode": "verified",
        "solver": "entropy:0.1",
        "adapter": str(folder.resolve()),
    }
    assert overrides["setblock"] == {**own, "verified": drafting, "slide": False}
    run("serve", folder, "--engine", "vllm", "--block-size", "3")
    overrides = json.loads(after(ran[1], "--hf-overrides"))
    assert overrides["canvas_length"] == 3
    assert overrides["setblock"]["verified"] == {"branches": 1, "seeds": 0, "lookup": 3}


def test_without_vllm(run, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "vLLM is not installed" in run("serve", "nano", "--engine", "vllm").error


def test_an_export_names_its_mask_token(checkpoint, tmp_path, run, ran):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    write_settings(folder, mask_token_id=7, trained=True)
    run("serve", folder, "--engine", "vllm")
    assert json.loads(after(ran[0], "--hf-overrides"))["mask_token_id"] == 7


def test_rules_of_one_s_own_are_not_known_there(run, ran, untrained, monkeypatch):
    monkeypatch.setattr(solvers, "FORMS", {**solvers.FORMS, "mine": solvers.FORMS["fixed"]})
    monkeypatch.setattr(solvers.FixedCount, "__str__", lambda self: f"mine:{self.n}")
    words = ["--allow-untrained", "--mask-token-id", "9", "--solver", "mine:2"]
    error = run("serve", untrained, "--engine", "vllm", *words).error
    assert error == "vLLM knows the built-in solvers alone, got 'mine:2'"
    assert not ran
