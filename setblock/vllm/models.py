"""vLLM's own model classes, decoded by blocks."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.models.llama import LlamaForCausalLM  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.mistral import (  # pyright: ignore[reportMissingImports]
    MistralForCausalLM,
)
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM  # pyright: ignore[reportMissingImports]


class Blocks:
    """In front of a model class: its requests are decoded by `state.BlockState`."""

    last_hidden: Any = None  # of the latest forward: the first token of verified decoding needs it
    gate: Any = None  # of an adapter that acts on blocks alone: which tokens are theirs
    chain: Any = None  # of that adapter, if it has one

    @staticmethod
    def get_model_state_cls() -> type:
        from setblock.vllm.state import BlockState

        return BlockState

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        from setblock.vllm.adapter import weights_and_adapter

        own: Any = self
        if adapter := getattr(own.config, "setblock", {}).get("adapter"):
            weights, self.gate, chain = weights_and_adapter(self, adapter)
            # Not as a module of vLLM's, which would look for its weights in the checkpoint.
            object.__setattr__(self, "chain", chain)
        return super().load_weights(weights)  # type: ignore[misc]

    def forward(self, *args: Any, **given: Any) -> Any:
        self.last_hidden = super().forward(*args, **given)  # type: ignore[misc]
        if self.gate is not None:
            self.gate.noisy = None
        return self.last_hidden


class SetBlockLlamaForCausalLM(Blocks, LlamaForCausalLM):
    pass


class SetBlockMistralForCausalLM(Blocks, MistralForCausalLM):
    pass


class SetBlockQwen2ForCausalLM(Blocks, Qwen2ForCausalLM):
    pass


class SetBlockQwen3ForCausalLM(Blocks, Qwen3ForCausalLM):
    pass
