"""Tiny random checkpoints on disk, made once per test run."""

import gc
import io
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read at import: no test may wait for the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell's job in the background begins deaf to Ctrl-C, and so would the commands that tests run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jaxtyping
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

CHAT = (
    "{% for message in messages %}<user>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Ten times the usual: with small weights every prediction would be flat and hide mistakes.
    "initializer_range": 0.2,
}
# Rotary embeddings, of heads of 8, that change beyond the first 32 tokens of a context.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "short_factor": [1.0, 1.2, 1.3, 1.5],
    "long_factor": [1.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 32,
}
SHORT = ["--max-new-tokens", "8"]  # words of a command
MIXED = ["sliding_attention", "full_attention"]
# Files that decode or train with many networks and settings, or run long commands. To look at types
# and shapes of arguments would take half of their time; other files do so for the same functions.
UNCHECKED = {
    *(
        "answers",
        "architectures",
        "benchmark",
        "biases",
        "calls",
        "calls_refusals",
        "chain",
        "cli_tune",
    ),
    *("decode", "finetune", "graphs", "plan", "penalties", "prompt_cache", "serve", "speedup"),
    *("train_families", "transfer", "tune", "verified"),
}
KINDS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    # bitsandbytes' CPU kernels want rows of at least 64.
    "llama-wide": transformers.LlamaConfig(
        **{**SIZES, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    ),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2-window": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, layer_types=MIXED
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3-window": transformers.Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=4, layer_types=MIXED
    ),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": transformers.MistralConfig(**SIZES, sliding_window=4),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, sliding_window=4, layer_types=MIXED, query_pre_attn_scalar=16
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def make_tokenizer(
    bos: bool = True,
    chat: bool = True,
    mask_token: str | None = None,
    pad_token: str | None = "<pad>",
    specials: tuple[str, ...] = (),
) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, so that every text has tokens; then the special ones."""
    names = ["<s>", "</s>", "<pad>", "<user>", "<model>", *specials]
    names += [mask_token] if mask_token else []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *names])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    roles = {"eos_token": "</s>", "pad_token": pad_token, "mask_token": mask_token}
    roles["bos_token"] = "<s>" if bos else None
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{role: token for role, token in roles.items() if token}
    )
    made.add_special_tokens({"extra_special_tokens": ["<user>", "<model>", *specials]})
    made.chat_template = CHAT if chat else None
    return made


def save_checkpoint(
    folder: Path,
    kind: str = "llama",
    free_rows: int = 0,
    settings: dict | None = None,
    seed: int = 0,
    **tokenizer_options,
) -> Path:
    """Write a random checkpoint of that architecture with its tokenizer; returns the folder.

    free_rows: rows of the embedding past the tokenizer's last token.
    settings: the "setblock" entry of generation_config.json.
    """
    tokenizer = make_tokenizer(**tokenizer_options)
    config = type(KINDS[kind]).from_dict(KINDS[kind].to_dict())
    config.vocab_size = len(tokenizer) + free_rows
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if settings is not None:
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "setblock": settings}))
    return folder


def pytest_collection_finish() -> None:
    """What was imported so far stays: collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, **options): the folder of `save_checkpoint`, written once per run."""
    made: dict[str, Path] = {}

    def get(kind: str = "llama", **options) -> Path:
        key = repr((kind, sorted(options.items(), key=str)))
        if key not in made:
            made[key] = save_checkpoint(tmp_path_factory.mktemp(kind), kind, **options)
        return made[key]

    return get


@dataclass
class Result:
    """What one call of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The object on stdout, which must hold nothing else."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        assert self.out.endswith("}\n")
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The message of a call that failed in one line and printed no result."""
        assert self.code != 0
        assert self.out == ""
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        return self.err.removeprefix("error: ").strip()


@pytest.fixture
def run(monkeypatch, capsys):
    """run("generate", folder, ...): the command's main() with these words, in this process."""

    from setblock import cli

    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # whatever else runs here

    def call(*words: object, stdin: io.StringIO | None = None) -> Result:
        monkeypatch.setattr(sys, "argv", ["setblock", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", stdin or io.StringIO())
        capsys.readouterr()
        code, ending = 0, signal.getsignal(signal.SIGTERM)
        try:
            cli.main()
        except SystemExit as error:
            code = error.code
        finally:
            signal.signal(signal.SIGTERM, ending)
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module", autouse=True)
def shape_checks(request) -> Iterator[None]:
    """Types and shapes of arguments are looked at, but in the files of UNCHECKED.

    To hash functions whose arguments are checked takes seconds: what is made of a dataset gets a
    name at random, where the library is there.
    """
    with pytest.MonkeyPatch.context() as patch:
        if datasets := sys.modules.get("datasets.arrow_dataset"):
            patch.setattr(datasets, "update_fingerprint", lambda *_: secrets.token_hex(8))
        unchecked = request.module.__name__.removeprefix("test_") in UNCHECKED
        patch.setattr(jaxtyping.config, "jaxtyping_disable", unchecked)
        yield


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of rows to train on."""
    from trainings import ROWS, write

    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def untrained(checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture
def trained(checkpoint) -> Path:
    """A checkpoint that says it was trained, so that stderr stays empty of warnings."""
    return checkpoint("llama", settings={"trained": True})


@pytest.fixture
def answering(monkeypatch):
    """answering(model): every name loads this model, which has room for an answer."""

    from setblock import loading, names

    def use(model):
        model.context_length = 1024
        monkeypatch.setattr(names, "check", lambda name: None)
        monkeypatch.setattr(loading, "load", lambda name, **options: model)
        return model

    return use


@pytest.fixture
def short_demo(monkeypatch) -> None:
    """`demo` has no option for it: four tokens are enough of a random model's answers."""
    import setblock

    original = setblock.stream

    def short(*words: Any, **options: Any) -> Any:
        return original(*words, **options | {"max_new_tokens": 4})

    monkeypatch.setattr("setblock.live.stream", short)


@pytest.fixture(scope="module")
def nano():
    from setblock import load

    return load("nano")


@pytest.fixture(scope="module")
def app(nano):
    from setblock.serve import build

    return build(nano, "nano")


@pytest.fixture(scope="module")
def address(app) -> Iterator[str]:
    """Where the bundled model is served meanwhile."""
    from servers import serving

    with serving(app) as place:
        yield place


@pytest.fixture(scope="module")
def client(address) -> Iterator[Any]:
    """OpenAI's, of that server."""
    from servers import client_of

    with client_of(address) as made:
        yield made


@pytest.fixture(scope="module")
def speaker(checkpoint, tmp_path_factory) -> Iterator[Any]:
    """A Speaker whose network is Qwen's, of random weights."""
    from servers import client_of, serving
    from speakers import TEMPLATE, Speaker

    from setblock import load
    from setblock.serve import build

    saved = checkpoint("qwen3", bos=False, specials=("<|im_start|>", "<|im_end|>"))
    folder = tmp_path_factory.mktemp("speaker") / "qwen"
    model = load(copied(saved, folder, "config.json", max_position_embeddings=2048))
    model.tokenizer.chat_template = TEMPLATE
    model.eos_token_ids |= {*model.tokenizer("<|im_end|>")["input_ids"]}
    with serving(build(model, "qwen")) as address, client_of(address) as client:
        yield Speaker(model, client, address)


def gated_adapter(base: Any, folder: Path, chain_width: int = 0) -> Any:
    """The peft model of a gated adapter on this model's network, as saved in the folder."""
    from setblock.adapters import attach
    from setblock.checkpoint import write_settings

    words = (base.network, base.name, "gated", base.mask_token_id)
    made = attach(*words, rank=4, alpha=8, chain_width=chain_width)
    for weight in made.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    made.save_pretrained(str(folder))
    if chain_width:
        write_settings(folder, chain_width=chain_width)
    return made


def copied(checkpoint: Path, folder: Path, file: str, **changes: Any) -> Path:
    """A copy of a checkpoint with changes in one of its JSON files."""
    shutil.copytree(checkpoint, folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes))
    return folder


def api(folder: Path, prompt: Any, chat: bool = False, **options: Any) -> Any:
    """What the Python interface answers."""
    import setblock

    return setblock.generate(setblock.load(folder), [prompt], chat=chat, **options)[0]


@pytest.fixture
def fake_vllm(monkeypatch) -> list[Any]:
    """A vLLM whose engines answer as mode "ntp" does; the engines that were started."""
    import types

    from setblock import contenders, generation, loading

    engines: list[Any] = []

    class LLM:
        def __init__(self, **given: Any) -> None:
            self.given, self.environment, self.ended = given, dict(os.environ), False
            self.limits: list[int] = []
            self.served = loading.load(given["model"], dtype=given["dtype"], device="cpu")
            core = types.SimpleNamespace(shutdown=lambda: setattr(self, "ended", True))
            self.llm_engine = types.SimpleNamespace(engine_core=core)
            engines.append(self)

        def generate(self, prompts: Any, settings: Any, use_tqdm: bool) -> Any:
            assert settings.temperature == 0
            assert settings.logit_bias == {self.served.mask_token_id: -100.0}
            self.served.eos_token_ids = frozenset(settings.stop_token_ids)
            assert settings.ignore_eos == (not settings.stop_token_ids)
            self.limits.append(settings.max_tokens)
            ids = [one["prompt_token_ids"] for one in prompts]
            found = generation.generate(
                self.served, ids, mode="ntp", max_new_tokens=settings.max_tokens
            )
            return [types.SimpleNamespace(outputs=[one]) for one in found]

    made: Any = types.ModuleType("vllm")
    made.LLM, made.SamplingParams = LLM, types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setattr(contenders, "find_spec", lambda name: name)
    return engines


@pytest.fixture
def simulated_graphs(monkeypatch) -> list[Any]:
    """CUDA graphs on the CPU; what has been recorded so far."""
    import tape

    from setblock import graphs, roofline
    from setblock.model import Model

    recorded: list[Any] = []

    def record(function: Any, pool: Any, device: Any) -> Any:
        recorded.append(tape.record(function))
        return recorded[-1]

    monkeypatch.setattr(graphs, "on_cuda", lambda network: True)
    monkeypatch.setattr(graphs, "new_pool", object)
    monkeypatch.setattr(graphs, "record", record)
    # As there: padding stays, and a further token costs nothing.
    monkeypatch.setattr(Model, "leaves_padding_out", False)
    monkeypatch.setattr(roofline, "worth", lambda *given, **more: 0.0)
    return recorded
