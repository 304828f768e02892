"""The only module that knows transformers: load a causal language model, run it under our masks.

    load()            a hub name, a folder, a GGUF file or a bundled name -> Model
    Model             one forward over any mix of clean and noisy tokens; text to tokens and back
    attention_mask()  the visibility rule in the form that a network's attention takes

The model classes are transformers' own: masks and positions are handed in, no class is copied.
"""

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils.hub import cached_file

from setblock import adapters, machines, roofline
from setblock.cache import PrefixCache
from setblock.masks import Layout, flex_block_mask, visible

BUNDLED = {name: Path(__file__).parent / "demo" / name for name in ("nano", "nano-twin")}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULTS = {"mode": "sbd", "solver": "entropy:0.1", "block_size": 16}
SETTINGS = {
    "mask_token_id": int,
    "block_size": int,
    "solver": str,
    "mode": str,
    "trained": bool,
    "dtype": str,
    "device": str,
    "acceptance": float,  # of drafted tokens, see roofline.best_spending
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# Files and hub; contents; shapes; no gguf or accelerate package; tokenizer files; weights.
LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError)
BACKENDS = {"sdpa": visible, "flex_attention": flex_block_mask}

# Classes whose forward takes one mask per layer type; the tests run each of them.
TAKES_MASK_PER_LAYER_TYPE = ("gemma3_text", "qwen2", "qwen3")
# Settings that change attention in ways which a boolean mask given to SDPA can't express.
REFUSED_SETTINGS = (
    "alibi", "attention_chunk_size", "attn_logit_softcapping", "use_bidirectional_attention",
)  # fmt: skip
# Tokens that no training text held, each with the tokens that tell whose tokenizer it is: Llama 3,
# Gemma, SmolLM2. In SmolLM2-135M <gh_stars> still has the one embedding that all its never-seen
# tokens share, while <repo_name>, <reponame> and <filename> have moved away from it.
NEVER_TRAINED = (
    ("<|reserved_special_token_0|>", ()),
    ("<unused0>", ()),
    ("<gh_stars>", ("<repo_name>", "<reponame>")),
)


class ModelError(ValueError):
    """What was asked for can't be loaded or run; one line that names it and what is allowed."""


def attention_mask(network: Any, queries: Layout, keys: Layout) -> Any:
    """What to pass to this network as `attention_mask`; a dict by layer type where layers differ.

    A bool tensor for scaled_dot_product_attention, a BlockMask for FlexAttention.
    Raises: ModelError for other backends, which misread both without a word (eager adds 1 and 0 to
    the scores).
    """
    backend = network.config._attn_implementation
    if backend not in BACKENDS:
        raise ModelError(
            f"attn_implementation {backend!r} misreads our masks; use {_any(BACKENDS)}"
        )
    windows = _windows(network.config)
    masks = {kind: BACKENDS[backend](queries, keys, width) for kind, width in windows.items()}
    return masks if len(masks) > 1 else masks.popitem()[1]


def _windows(config: PretrainedConfig) -> dict[str, int | None]:
    """Each layer type of the network with its sliding window, None for full attention."""
    # getattr with a default here and below: every architecture has settings of its own.
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # transformers' own rule: then all layers are alike
        kinds = ["sliding_attention" if windows["sliding_attention"] else "full_attention"]
    if unknown := set(kinds) - set(windows):
        raise ModelError(
            f"{config.model_type} has layers of type {_any(unknown)}; only {_any(windows)} can run"
        )
    if len(set(kinds)) > 1 and config.model_type not in TAKES_MASK_PER_LAYER_TYPE:
        raise ModelError(
            f"{config.model_type} mixes full and sliding-window layers but takes one mask for all; "
            f"of such models only {_any(TAKES_MASK_PER_LAYER_TYPE)} can run"
        )
    return {kind: windows[kind] for kind in sorted(set(kinds))}


class Model:
    """A causal language model, its tokenizer and its mask token, ready to decode."""

    def __init__(
        self,
        network: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "model",
        mask_token_id: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Wrap a network that is already loaded: a PreTrainedModel, or peft's wrapper of one.

        settings: the checkpoint's own, see SETTINGS.
        Effects: switches the network to eval mode; adds a mask token to both where neither has one.
        Raises: ModelError.
        """
        _check_architecture(network.config)
        self.gated = adapters.is_gated(network)
        self.adapted = False  # whether load() put an adapter on
        settings = _checked_settings(settings or {})
        self.network, self.tokenizer, self.name = network.eval(), tokenizer, name
        generation: Any = network.generation_config
        self.eos_token_ids = _ids(generation.eos_token_id) | _ids(tokenizer.eos_token_id)
        self.bos_token_id: int | None = min(_ids(tokenizer.bos_token_id), default=None)
        pad = _ids(tokenizer.pad_token_id) or _ids(network.config.pad_token_id)
        taken = self.eos_token_ids | _ids(tokenizer.bos_token_id) | pad
        self.mask_token_id, self.mask_token_source = _resolve_mask_token(
            network, tokenizer, mask_token_id, settings.get("mask_token_id"), taken
        )
        self.vocab_size = len(_rows(network.get_input_embeddings()))
        # Any id that the embedding holds will do where there is no padding token.
        self.pad_token_id = min((i for i in pad if 0 <= i < self.vocab_size), default=0)
        self.context_length: int = network.config.max_position_embeddings
        self.trained: bool = settings.get("trained", False)
        self.defaults = {key: settings.get(key, value) for key, value in DEFAULTS.items()}
        self.acceptance: float = settings.get("acceptance", roofline.ACCEPTANCE)

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    def new_cache(self, batch: int, capacity: int) -> PrefixCache:
        """An empty cache for `batch` rows of up to `capacity` tokens, a forward's own included."""
        return PrefixCache(self.network.config.num_hidden_layers, batch, capacity, self.device)

    @torch.no_grad()  # not inference_mode: nobody outside could change its tensors in place
    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        layout: Layout,
        cache: PrefixCache | None = None,
        logits_at: Int[Tensor, " picked"] | None = None,
    ) -> Float[Tensor, "batch picked vocab"]:
        """Logits in float32, the mask token's own at -inf: it is never generated, in any mode.

        layout: the places of `tokens`; with a cache the tokens follow each row's prefix.
        logits_at: indices of the query tokens whose logits are wanted, for all rows; None for all.
        Effects: writes the tokens' keys and values to the cache as scratch.
        Raises: ValueError if they do not fit into the cache.
        """
        keys = layout
        if cache is not None:
            keys = cache.keys_layout(layout)
            cache.stage(layout)
        output = self.network(
            input_ids=tokens,
            position_ids=layout.position,
            attention_mask=attention_mask(self.network, layout, keys),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=0 if logits_at is None else logits_at,
            **adapters.gate(self.network, layout),
        )
        logits = output.logits.float()
        logits[..., self.mask_token_id] = -torch.inf
        return logits

    def best_spending(self, block_size: int, rows: int, **fixed: Any) -> roofline.Spending:
        """Block length and branches of verified decoding that cost least on such a machine."""
        return roofline.best_spending(
            machines.dimensions_of(self.network.config),
            machines.device_of(self.device, self.dtype),
            block_size,
            rows,
            acceptance=self.acceptance,
            **fixed,
        )

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a prompt, never empty; with `chat`, of a user's turn and the model's cue.

        Raises: ModelError without a chat template, or for an empty text without a BOS token.
        """
        if chat:
            if self.tokenizer.chat_template is None:
                raise ModelError(f"{self.name} has no chat template; only plain prompts work")
            turns = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )  # type: ignore[assignment]
        # A chat template writes the BOS token itself.
        ids = list(self.tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])
        if ids:
            return ids
        if self.bos_token_id is None:
            raise ModelError(f"an empty prompt needs a BOS token, and {self.name} has none")
        return [self.bos_token_id]

    def decode(self, ids: list[int]) -> str:
        """The text of these tokens, special ones left out."""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def load(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    mask_token_id: int | None = None,
    four_bit: bool = False,
) -> Model:
    """The model of that name: bundled, a checkpoint folder, a GGUF file, or owner/name on the hub.

    A folder or hub repository that holds an adapter loads the base that it names and puts it on.

    dtype: None for the checkpoint's setting, else float32 on a CPU and bfloat16 elsewhere; "auto"
    for the type that the weights are stored in.
    device: None for the checkpoint's setting, else cuda where there is one, else cpu.
    mask_token_id: instead of the one that would be found, see Model.mask_token_source.
    four_bit: linear layers in 4 bits (NF4, by bitsandbytes), to train an adapter on.
    Raises: ModelError.
    """
    name = str(name_or_path)
    source, origin = _locate(name)
    if "gguf_file" in origin:
        return _load_whole(name, source, origin, {}, dtype, device, mask_token_id, four_bit)
    try:
        settings = _checked_settings(_read_settings(source))
        base_name = _base_of(source)
    except LOAD_ERRORS as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"can't load {name!r}: {_one_line(error)}") from error
    if base_name is None:
        return _load_whole(name, source, origin, settings, dtype, device, mask_token_id, four_bit)
    try:
        base_source, origin = _locate(base_name)
        base = _load_whole(
            base_name, base_source, origin, settings, dtype, device, mask_token_id, four_bit
        )
    except ModelError as error:
        raise ModelError(f"{name!r} is an adapter on {base_name!r}: {error}") from error
    try:
        network = adapters.put_on(base.network, source, base.mask_token_id)
    except LOAD_ERRORS as error:
        raise ModelError(f"can't load {name!r}: {_one_line(error)}") from error
    settings["mask_token_id"] = base.mask_token_id
    model = Model(network, base.tokenizer, name, settings=settings)
    model.adapted = True
    return model


def _load_whole(
    name: str,
    source: str,
    origin: dict[str, Any],
    settings: dict[str, Any],
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    mask_token_id: int | None,
    four_bit: bool,
) -> Model:
    """A checkpoint that is no adapter; settings: its own, or those of the adapter to come on it."""
    origin["trust_remote_code"] = False
    try:
        device = _device(device or settings.get("device"))
        dtype = _dtype(dtype or settings.get("dtype"), device)
        config = AutoConfig.from_pretrained(source, **origin)
        _check_architecture(config)
        tokenizer = AutoTokenizer.from_pretrained(source, **origin)
        network, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            **(_four_bit(dtype, device) if four_bit else {}),
            **origin,
        )  # type: ignore[misc]
    except ModelError:
        raise
    except Exception as error:
        # The tokenizers library raises the bare class for broken contents.
        if not isinstance(error, LOAD_ERRORS) and type(error) is not Exception:
            raise
        raise ModelError(f"can't load {name!r}: {_one_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{name!r} lacks {len(missing)} weights, among them {missing[0]!r}")
    if "gguf_file" in origin:
        network = _without_gguf(network, config)
    if not four_bit:
        network.to(device)  # pyright: ignore[reportArgumentType]  # decorated by transformers
    return Model(network, tokenizer, name, mask_token_id, settings)


def _base_of(source: str) -> str | None:
    """The MODEL that an adapter's folder or repository names, None for a whole checkpoint."""
    path = cached_file(source, adapters.CONFIG, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(path).read_text())["base_model_name_or_path"] if path else None


def lasting(name: str) -> str:
    """A MODEL name that holds from any working folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in BUNDLED and path.exists() else name


def write_settings(folder: str | Path, **settings: Any) -> None:
    """Put these settings into a checkpoint's generation_config.json, where `load` finds them.

    Effects: replaces the file; other keys stay.
    Raises: ModelError for a setting that `load` would refuse.
    """
    path = Path(folder) / "generation_config.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    content["setblock"] = _checked_settings(content.get("setblock", {}) | settings)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _four_bit(dtype: torch.dtype | str, device: torch.device) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(device).type == "meta":
            raise ModelError("device 'meta' holds no values; use cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: a torch built without CUDA
        raise ModelError(f"device {str(device)!r} can't be used: {_one_line(error)}") from error
    return torch.device(device)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {_any([*DTYPES, 'auto'])}")
    return DTYPES[dtype]


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """The folder or hub name to read, and the GGUF file in it, if it is one, as an argument."""
    path = BUNDLED.get(name, Path(name).expanduser())
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if name and path.is_dir():
        is_adapter = (path / adapters.CONFIG).is_file()
        for files in () if is_adapter else (("config.json",), TOKENIZER_FILES):
            if not any((path / file).is_file() for file in files):
                raise ModelError(f"folder {name!r} has no {' or '.join(files)}: not a checkpoint")
        return str(path), {}
    if name in BUNDLED:
        raise ModelError(f"the bundled model {name!r} is not part of this installation")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise ModelError(
            f"no model {name!r}: it is not a checkpoint folder, a GGUF file (.gguf), a bundled "
            f"model ({_any(BUNDLED)}), or of the form owner/name (on the hub)"
        )
    return name, {}


def _check_architecture(config: PretrainedConfig) -> None:
    """Refuse what can't run under our masks, before any weights are read."""
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    refused = [setting for setting in REFUSED_SETTINGS if getattr(config, setting, None)]
    needed = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep"}
    if config.is_encoder_decoder:
        problem = "is an encoder-decoder"
    elif config.get_text_config() is not config:
        problem = "is multimodal"
    elif network is None:
        problem = "has no causal language model class in transformers"
    elif config.architectures and network.__name__ not in config.architectures:
        problem = f"is here a {_any(config.architectures)}, not a {network.__name__}"
    elif refused:
        problem = f"sets {_any(refused)}, which our masks can't express"
    elif network._is_stateful or not network._supports_sdpa:
        problem = "has no attention that takes a mask for each token"
    elif lacking := needed - set(inspect.signature(network.forward).parameters):
        problem = f"takes no {_any(lacking)}"
    else:
        _windows(config)  # refuses layer types
        return
    raise ModelError(
        f"{config.model_type} {problem}; a decoder-only causal language model is needed"
    )


def _without_gguf(loaded: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """The same weights in a network that is not flagged as quantized (no save, no cast)."""
    if torch.equal(_rows(loaded.get_input_embeddings()), _rows(loaded.get_output_embeddings())):
        config.tie_word_embeddings = True
    with no_init_weights():
        network = AutoModelForCausalLM.from_config(
            config, dtype=loaded.dtype, attn_implementation="sdpa"
        )
    network.load_state_dict(loaded.state_dict(), assign=True)
    network.tie_weights()
    return network


def _read_settings(source: str) -> dict[str, Any]:
    """The "setblock" entry of the checkpoint's generation_config.json, {} without one.

    Read from the file: transformers drops every key it does not know, without a word, where the
    file says "_from_model_config": true.
    """
    name = "generation_config.json"
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    content = json.loads(Path(path).read_text()) if path else {}
    settings = content.get("setblock") if isinstance(content, dict) else content
    if settings is not None and not (isinstance(content, dict) and isinstance(settings, dict)):
        raise ModelError(f"{name} must hold an object, and one by the name setblock if any")
    return settings or {}


def _checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    for key, value in settings.items():
        if key not in SETTINGS:
            raise ModelError(f"setblock setting {key!r} is not one of {_any(SETTINGS)}")
        in_range, limits = {
            "block_size": (lambda value: value >= 1, " of at least 1"),
            "acceptance": (lambda value: 0 < value < 1, " between 0 and 1"),
        }.get(key, (lambda value: True, ""))
        if type(value) is not SETTINGS[key] or not in_range(value):
            raise ModelError(
                f"setblock setting {key} must be a {SETTINGS[key].__name__}{limits}, got {value!r}"
            )
    return settings


def _resolve_mask_token(
    network: Any,
    tokenizer: Any,
    explicit: int | None,
    own: int | None,
    taken: frozenset[int],
) -> tuple[int, str]:
    """The mask token and how it was found, the same in every mode.

    taken: EOS, BOS and padding, which it must not be.
    Effects: adds one to network and tokenizer where neither has one.
    """
    found: Any
    num_rows = len(_rows(network.get_input_embeddings()))
    vocabulary = tokenizer.get_vocab()
    free = max(vocabulary.values()) + 1
    reserved = [
        token
        for token, companions in NEVER_TRAINED
        if vocabulary.keys() >= {token, *companions}
        and vocabulary[token] not in taken
        and token not in str(tokenizer.chat_template)
    ]
    if explicit is not None:
        found, source = explicit, "given explicitly"
    elif own is not None:
        found, source = own, "the checkpoint's own setting"
    elif tokenizer.mask_token_id is not None:
        found, source = tokenizer.mask_token_id, f"the tokenizer's {tokenizer.mask_token}"
    elif reserved:
        found, source = vocabulary[reserved[0]], f"the reserved token {reserved[0]}"
    elif free < num_rows and free not in taken:
        found, source = free, "the embedding's first row that has no token"
    else:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        found, source = tokenizer.mask_token_id, "a new token <|mask|>"
        num_rows = max(num_rows, found + 1)
        _grow_embeddings(network, num_rows)
    if found == own == free == num_rows:  # an adapter's, whose base has no row for it yet
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        num_rows += 1
        _grow_embeddings(network, num_rows)
    if not 0 <= found < num_rows:
        raise ModelError(
            f"mask token {found} ({source}) is not among the {num_rows} embeddings: give a "
            "mask_token_id below that, or none"
        )
    if found in taken:
        raise ModelError(
            f"mask token {found} ({source}) is also an EOS, BOS or padding token: give another "
            "mask_token_id"
        )
    return found, source


def _grow_embeddings(network: Any, num_rows: int) -> None:
    """Resize both embeddings, new rows the mean of the old."""
    old = len(_rows(network.get_input_embeddings()))
    network.resize_token_embeddings(num_rows, mean_resizing=False)
    for embedding in (network.get_input_embeddings(), network.get_output_embeddings()):
        weight = _rows(embedding)
        weight[old:] = weight[:old].float().mean(dim=0).to(weight.dtype)


def _rows(embedding: Any) -> Float[Tensor, "vocab hidden"]:
    return adapters.unwrapped(embedding).weight.data


def _ids(value: Any) -> frozenset[int]:
    """Token ids out of a setting that may be one, a list of them, or None."""
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)


def _any(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _one_line(error: BaseException) -> str:
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())[:300]
