"""Which networks can run under our masks, and the mask that each takes.

text_part()           the settings of what reads and writes text
check_architecture()  refuses the others, before any weights are read
own_attention()       what transformers itself would run one with
context_of()          how long a text may be for its tokens to have one meaning
attention_mask()      the visibility rule in the form that a network's attention takes
decoding_mask()       the same, of queries behind a cache
"""

import inspect
from collections.abc import Callable
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PretrainedConfig,
)

from setblock import attention
from setblock.cache import CACHE, PrefixCache
from setblock.masks import Layout, WholeRows, flex_block_mask, visible
from setblock.names import ModelError, any_of

BACKENDS = {"sdpa": visible, attention.NAME: visible, "flex_attention": flex_block_mask}

# The tests decode with a small network of each, in windows where it can have them, and where its
# layers may differ with layers of both kinds. Others are tried when they are loaded: trial.py.
TESTED = (
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "beam", "biogpt",
    "bitnet", "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v2",
    "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4",
    "exaone_moe", "falcon", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text",
    "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "llama",
    "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip

# Multimodal models whose text part the tests take out, to run it alone.
WITH_TEXT = (
    "aria", "aya_vision", "cohere2_vision", "deepseek_vl", "exaone4_5", "gemma3", "gemma4",
    "gemma4_unified", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "lighton_ocr",
    "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "smolvlm",
    "video_llava", "vipllava",
)  # fmt: skip

ENCODERS = ("bert-generation",)  # besides those that transformers lists for masked tokens
LOOKING = ("dynamic", "longrope")  # types of rotary embeddings

# Settings that change attention in ways which a boolean mask can't express; what is "vision" is
# for pictures alone.
REFUSED_SETTINGS = ("alibi", "attention_chunk_size", "use_bidirectional_attention")


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Of a multimodal model the configuration of its language model; of others their own.

    Raises: ModelError if it can't be had alone.
    """
    text: Any = config.get_text_config()
    if text is config or config.is_encoder_decoder:
        return config
    if config.model_type not in WITH_TEXT:
        raise ModelError(
            f"{config.model_type} is multimodal; of such models only the text part of "
            f"{any_of(WITH_TEXT)} can run"
        )
    if any(getattr(one, "quantization_config", None) for one in (config, text)):
        raise ModelError(f"{config.model_type} is multimodal and quantized, which can't run")
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse what can't run under our masks, before any weights are read."""
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    refused = [
        setting
        for setting in REFUSED_SETTINGS
        if getattr(config, setting, None) not in (None, False, 0, "vision")
    ]
    needed = {"attention_mask", "position_ids", CACHE, "logits_to_keep"}
    if config.is_encoder_decoder:
        problem = "is an encoder-decoder"
    elif not getattr(config, "is_decoder", False) and (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type in ENCODERS
    ):
        problem = "is an encoder"
    elif config.get_text_config() is not config:
        problem = "is multimodal"
    elif network is None:
        problem = "has no causal language model class in transformers"
    elif config.architectures and network.__name__ not in config.architectures:
        problem = f"is here a {any_of(config.architectures)}, not a {network.__name__}"
    elif refused:
        problem = f"sets {any_of(refused)}, which our masks can't express"
    elif network._is_stateful or not (network._supports_sdpa or config.model_type in TESTED):
        problem = "has no attention that takes a mask for each token"
    elif lacking := needed - set(inspect.signature(network.forward).parameters):
        problem = f"takes no {any_of(lacking)}"
    else:
        windows_of(config)  # refuses layer types
        return
    raise ModelError(
        f"{config.model_type} {problem}; a decoder-only causal language model is needed"
    )


def own_attention(config: PretrainedConfig) -> str:
    """What transformers runs a network of ours with, to set_attn_implementation: it has no sdpa for
    those whose scores are capped or have sinks.
    """
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "sdpa" if network._supports_sdpa else "eager"


def ropes_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The settings of rotary embeddings, of each layer type where these differ."""
    rotary = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [one for one in rotary.values() if isinstance(one, dict)]
    return by_layer_type or [rotary]


def looks_at_positions(config: PretrainedConfig) -> set[str]:
    """Types of its rotary embeddings that depend on a forward's largest position."""
    return {
        rotary["rope_type"] for rotary in ropes_of(config) if rotary.get("rope_type") in LOOKING
    }


def context_of(config: PretrainedConfig) -> int:
    """Tokens of a text at most.

    Of type longrope the embeddings of all positions change once a forward reaches beyond the
    length of the first training. Keys that are cached would be of one kind and later ones of
    another, and a row's tokens depend on the rows beside it; so texts end at that length.
    """
    context = config.max_position_embeddings
    for rotary in ropes_of(config):
        if rotary.get("rope_type") == "longrope":
            context = min(context, rotary["original_max_position_embeddings"])
    return context


def attention_mask(
    network: Any,
    queries: Layout,
    keys: Layout,
    windows: dict[str, int | None] | None = None,
    rows: WholeRows | None = None,
) -> Any:
    """What to pass to this network as `attention_mask`; a dict by layer type where layers differ.

    A bool tensor for scaled_dot_product_attention, a BlockMask for FlexAttention.
    windows: those of the network, where they are known already.
    rows: as for flex_block_mask; a bool tensor needs none.
    Raises: ModelError for other backends, which misread both without a word (eager adds 1 and 0 to
    the scores).
    """
    rule = _rule(network)
    windows = windows or windows_of(network.config)
    more = {} if rows is None or rule is visible else {"rows": rows}
    return _by_layers({kind: rule(queries, keys, width, **more) for kind, width in windows.items()})


def decoding_mask(
    network: Any, queries: Layout, cache: PrefixCache, windows: dict[str, int | None]
) -> Any:
    """As `attention_mask`, where the keys are what the cache looks at once the queries are staged;
    on a GPU, for a few queries, `attention.bias_of` it.

    queries: on the device.
    """
    if _rule(network) is not visible:
        return attention_mask(network, queries, cache.keys_layout(queries), windows)
    masks = {kind: cache.visible(queries, width) for kind, width in windows.items()}
    config: Any = network.config
    alike = not config.is_heterogeneous  # the heads of layers
    ours = config._attn_implementation == attention.NAME
    if cache.there.device.type == "cuda" and ours and alike:
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        few = heads // shared * queries.position.shape[1] <= attention.MOST
        for kind, mask in masks.items() if few else ():
            masks[kind] = attention.bias_of(mask, heads, shared, network.dtype)
    return _by_layers(masks)


def _rule(network: Any) -> Callable[..., Any]:
    """What makes a mask in the form that the network's attention takes."""
    backend = network.config._attn_implementation
    if backend not in BACKENDS:
        raise ModelError(
            f"attn_implementation {backend!r} misreads our masks; use {any_of(BACKENDS)}"
        )
    return BACKENDS[backend]


def _by_layers(masks: dict[str, Any]) -> Any:
    """The mask of all layers, or where layers differ those of each kind."""
    return masks if len(masks) > 1 else masks.popitem()[1]


def windows_of(config: PretrainedConfig) -> dict[str, int | None]:
    """Each layer type of the network with its sliding window, None for full attention."""
    # getattr with a default here and below: every architecture has settings of its own.
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # transformers' own rule: then all layers are alike
        kinds = ["sliding_attention" if windows["sliding_attention"] else "full_attention"]
    if unknown := set(kinds) - set(windows):
        raise ModelError(
            f"{config.model_type} has layers of type {any_of(unknown)}; "
            f"only {any_of(windows)} can run"
        )
    if any(windows[kind] for kind in kinds) and config.model_type not in TESTED:
        raise ModelError(
            f"{config.model_type} has sliding windows, and nobody has tested how it follows them"
        )
    return {kind: windows[kind] for kind in sorted(set(kinds))}
