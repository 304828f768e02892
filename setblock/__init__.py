"""Set block decoding: several tokens per forward from an ordinary causal language model."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from setblock.generation import generate, stream
    from setblock.loading import load
    from setblock.model import Model
    from setblock.names import ModelError
    from setblock.prompt_cache import PromptCache
    from setblock.results import Generation, Reveal, TokenLogprob

__all__ = [
    "Generation",
    "Model",
    "ModelError",
    "PromptCache",
    "Reveal",
    "TokenLogprob",
    "generate",
    "load",
    "stream",
]

_HOMES = {
    "Generation": "results",
    "Model": "model",
    "ModelError": "names",
    "PromptCache": "prompt_cache",
    "Reveal": "results",
    "TokenLogprob": "results",
    "generate": "generation",
    "load": "loading",
    "stream": "generation",
}


# peft and trl import it, and nobody can act on what it says of kernels that a CPU has none of.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: transformers takes seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module 'setblock' has no attribute {name!r}")
    value = getattr(import_module(f"setblock.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
