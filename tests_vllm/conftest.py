"""Real vLLM engines in this process, one for each checkpoint and setting, on a GPU or a CPU."""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
os.environ |= {"HF_HUB_OFFLINE": "1"}

import pytest
import torch
import transformers

if not torch.cuda.is_available():
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1"}

from setblock.adapters import attach
from setblock.checkpoint import write_settings
from setblock.loading import load
from setblock.model import Model
from setblock.names import BUNDLED

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Served as well; of each a small network with random weights.
FAMILIES = (
    "apertus", "ernie4_5", "exaone4", "gemma", "glm4", "granite", "granitemoe",
    "ministral3", "mixtral", "nemotron", "olmoe", "phi3", "qwen2_moe", "qwen3_moe", "stablelm",
)  # fmt: skip
OWN: dict[str, Any] = {
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "logits_scaling": 4.0,
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
}


def _small(family: str) -> transformers.PretrainedConfig:
    kind: Any = transformers.CONFIG_MAPPING[family]
    usual = kind().to_dict()
    own = {name: value for name, value in (SIZES | OWN).items() if name in usual}
    if not usual.get("num_experts", True):
        del own["num_experts"]
    if "head_dim" not in usual:  # heads of 32 all the same
        own["num_attention_heads"] = 2
    if usual.get("layer_types"):
        own["layer_types"] = ["full_attention"] * SIZES["num_hidden_layers"]
    return kind(**own, tie_word_embeddings=False)


KINDS = {
    "llama": transformers.LlamaConfig(**SIZES),
    # Heads of 32 without a head_dim, which this class has not.
    "qwen2": transformers.Qwen2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_attention_heads": 2}
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    **{family: _small(family) for family in FAMILIES},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    """folder(kind): a checkpoint, "nano" or a random one with nano's tokenizer, whose blocks are
    whole unless a request says otherwise. "gated:llama" and "lora:llama" are random adapters on a
    random base, "chained:llama" a gated one with a chain. "thinking" is nano, whose first line
    is what it thinks.
    """
    whole = tmp_path_factory.mktemp("nano") / "nano"
    shutil.copytree(BUNDLED["nano"], whole)
    write_settings(whole, slide=None)
    made: dict[str, Path] = {"nano": whole}

    def get(kind: str) -> Path:
        if kind in made:
            return made[kind]
        if kind == "thinking":
            made[kind] = _thinking(whole, tmp_path_factory.mktemp(kind) / kind)
            return made[kind]
        method, _, base = kind.rpartition(":")
        place = made[kind] = tmp_path_factory.mktemp(kind.replace(":", "-"))
        torch.manual_seed(0)
        if method:
            width = 8 if method == "chained" else 0
            _write_adapter(place, get(base), "gated" if width else method, width)
            write_settings(place, chain_width=width or None)
        else:
            config = KINDS[kind]
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
            load("nano").tokenizer.save_pretrained(place)
        write_settings(place, mask_token_id=3, trained=True, block_size=16)
        return place

    return get


def _thinking(nano: Path, place: Path) -> Path:
    """nano, in which a prompt's last token begins what it thinks, and the first end of a line ends
    that.
    """
    shutil.copytree(nano, place)
    model = load(str(nano), dtype="float32")
    [line] = model.encode("\n")
    begin, end = (model.encode(f"<|{name}|>")[0] for name in ("assistant", "system"))
    assert begin != end
    output: Any = model.network.get_output_embeddings()
    with torch.no_grad():
        output.weight[end] = 1.5 * output.weight[line]
    model.network.save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (place / name).read_text(encoding="utf-8")
        text = text.replace("<|assistant|>", "<think>").replace("<|system|>", "</think>")
        (place / name).write_text(text, encoding="utf-8")
    return place


def _write_adapter(
    place: Path, base: Path, method: str, chain_width: int = 0, rank: int = 4
) -> None:
    model = load(str(base), dtype="float32")
    adapted = attach(model.network, str(base), method, 3, rank, 8, chain_width=chain_width)
    for weight in adapted.parameters():
        if weight.requires_grad:  # as made, what an adapter adds is nothing
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(str(place))


@pytest.fixture(scope="session")
def model(folder) -> Callable[[str], Model]:
    """model(kind): the same checkpoint as the reference decoder has it."""
    made: dict[str, Model] = {}

    def get(kind: str) -> Model:
        if kind not in made:
            made[kind] = load(str(folder(kind)), dtype="float32")
        return made[kind]

    return get


@pytest.fixture(scope="session")
def engine(folder) -> Iterator[Callable[..., Any]]:
    """engine(kind, **settings): a vLLM of that checkpoint; the last one is kept.

    compiled: vLLM's compilation_config; without one, nothing is compiled.
    """
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    running: dict[str, Any] = {}

    def stop() -> None:
        for one in running.values():
            one.llm_engine.engine_core.shutdown()
        running.clear()
        gc.collect()

    def get(kind: str, **settings: Any) -> Any:
        key = repr((kind, sorted(settings.items())))
        if key not in running:
            stop()
            method, _, base = kind.rpartition(":")
            config = transformers.AutoConfig.from_pretrained(folder(base))
            overrides: dict[str, Any] = {
                "architectures": [f"SetBlock{config.architectures[0]}"],
                "setblock": {"adaptive": settings.pop("adaptive", None)},
            }
            if method:
                overrides["setblock"]["adapter"] = str(folder(kind))
            overrides["setblock"]["fused"] = fused = settings.pop("fused", False)
            if fused:
                settings["async_scheduling"] = False
            compiled = settings.pop("compiled", None)
            if compiled is not None:
                settings["compilation_config"] = compiled
            given = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
            running[key] = LLM(
                model=str(folder(base)),
                dtype="float32",
                enforce_eager=compiled is None,
                disable_log_stats=False,
                hf_overrides={**overrides, "canvas_length": 16, "mask_token_id": 3},
                diffusion_config={"canvas_length": 32 if fused else 16},
                scheduler_cls="setblock.vllm.scheduler.scheduler",
                **{**given, **settings},
            )
        return running[key]

    yield get
    stop()


@pytest.fixture
def width(monkeypatch) -> Callable[..., None]:
    """width(choose): the widths of the steps, in place of what was measured."""
    from setblock.vllm.adaptive import Width, Widths

    def put(choose: Callable[[], int | tuple[int, bool]]) -> None:
        def chosen(*_: Any) -> Width:
            found = choose()
            return Width(*found) if isinstance(found, tuple) else Width(found)

        monkeypatch.setattr(Widths, "choose", chosen)

    return put
