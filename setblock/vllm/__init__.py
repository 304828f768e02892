"""Set block decoding on vLLM, out of tree: the entry point of group `vllm.general_plugins`."""

import os

# The tests serve a small random network of each.
ARCHITECTURES = (
    "ApertusForCausalLM", "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "GemmaForCausalLM",
    "Glm4ForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
    "LlamaForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
    "NemotronForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "StableLmForCausalLM",
)  # fmt: skip
PREFIX = "SetBlock"  # of the names under which ours are registered


def register() -> None:
    """Make our models known to vLLM, in each of its processes; a second call changes nothing."""
    from vllm import ModelRegistry  # type: ignore
    from vllm.platforms import current_platform  # type: ignore

    from setblock.vllm import cpu, requests

    # Diffusion models need the second model runner, which vLLM itself has for GPUs alone.
    if current_platform.is_cpu() and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        cpu.install()

    for name in ARCHITECTURES:
        ModelRegistry.register_model(f"{PREFIX}{name}", f"setblock.vllm.models:{PREFIX}{name}")
    requests.install()
