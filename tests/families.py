"""A small random network of each family that transformers knows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MIXED, SIZES, make_tokenizer
from networks import load
from packaging.version import Version

from setblock.model import Model

WHAT_PEFT_SAYS = [  # of some families, and of itself
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*(target_parameters|_pattern keys)"),
]
ROLES = ("bos", "eos", "pad")

# What a small network has, under whatever name its configuration knows it by.
SMALL: dict[str, Any] = {
    **SIZES,
    **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("n_inner", "d_ff", "dff", "ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads"), 4),
    **dict.fromkeys(("n_positions", "max_seq_len"), 256),
    "partial_rotary_factor": 1.0,
    "rotary_dim": 8,
    "logits_scaling": 4.0,
    "logit_scale": 0.25,
    "final_logit_softcapping": 8.0,
    "attn_logit_softcapping": 2.0,
    # Of mixtures of experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "expert_ffn_hidden_size": 32,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "zero_expert_num": 0,
    # Of latent attention.
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    # Of windows.
    "sliding_window": 4,
    "use_sliding_window": True,
    "query_pre_attn_scalar": 16,
}


# What only one family knows.
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [*MIXED, *MIXED, "full_attention"],
    "num_kv_shared_layers": 3,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
}
OWN = {"gemma4_text": GEMMA4, "gemma4_unified_text": GEMMA4}


def small(family: str) -> transformers.PretrainedConfig:
    """A configuration of this family, its layers of both kinds where they may be."""
    kind: Any = transformers.CONFIG_MAPPING[family]
    usual = kind().to_dict()
    tokenizer = make_tokenizer(mask_token="<mask>")
    own = {name: value for name, value in SMALL.items() if name in usual}
    own |= {name: None for name in ("mlp_layer_types", "attn_layer_indices") if usual.get(name)}
    if usual.get("layer_types"):
        own["layer_types"] = MIXED if "sliding_window" in usual else ["full_attention"] * 2
    if "kv_lora_rank" in usual:  # every head has keys of its own
        own["num_key_value_heads"] = 4
    if not usual.get("num_experts", True):
        del own["num_experts"]
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ROLES}
    own |= OWN.get(family, {})
    if "vocab_size_per_layer_input" in usual:
        own["vocab_size_per_layer_input"] = len(tokenizer)
    # With a tied embedding a random network says the same token again and again.
    return kind(**own, **ids, vocab_size=len(tokenizer), tie_word_embeddings=False)


def known(families: tuple[str, ...]) -> list[Any]:
    """Those that this version of transformers has; the others are shown as left out."""
    lacking = set(families) - set(transformers.CONFIG_MAPPING)
    if Version(transformers.__version__) < Version("5.24"):
        lacking |= {"codegen", "gptj"}  # whose attention took no mask of ours
    newer = pytest.mark.skip(reason="of a newer transformers")
    return [pytest.param(one, marks=[newer] * (one in lacking)) for one in families]


def made(family: str, folder: Path) -> Model:
    config = small(family)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in network.parameters():
        # Some families have small weights, which make every prediction flat and hide mistakes.
        if weight.dim() > 1 and weight.std() < 0.1:
            torch.nn.init.normal_(weight, std=0.2)
    network.save_pretrained(folder)
    make_tokenizer(mask_token="<mask>").save_pretrained(folder)
    return load(folder)
