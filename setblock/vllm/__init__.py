"""Set block decoding on vLLM, out of tree: the entry point of group `vllm.general_plugins`."""

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PREFIX = "SetBlock"  # of the names under which ours are registered


def register() -> None:
    """Make our models known to vLLM, in each of its processes; a second call changes nothing."""
    from vllm import ModelRegistry  # type: ignore

    from setblock.vllm import requests

    for name in ARCHITECTURES:
        ModelRegistry.register_model(f"{PREFIX}{name}", f"setblock.vllm.models:{PREFIX}{name}")
    requests.install()
