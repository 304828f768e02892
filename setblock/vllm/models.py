"""vLLM's own model classes, decoded by blocks.

SetBlockLlamaForCausalLM and so on, each made when it is first asked for.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from setblock.vllm import ARCHITECTURES, PREFIX


class Blocks:
    """In front of a model class: its requests are decoded by `state.BlockState`."""

    last_hidden: Any = None  # of the latest forward: the first token of verified decoding needs it
    gate: Any = None  # of an adapter that acts on blocks alone: which tokens are theirs
    noisy: Any = None  # the same where the network is compiled, always at one address, [most, 1]
    joining: Any = None  # the chain of that adapter, if it has one

    @staticmethod
    def get_model_state_cls() -> type:
        from setblock.vllm.state import BlockState

        return BlockState

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        from setblock.vllm.adapter import where_compiled, with_adapter

        own: Any = self
        if adapter := getattr(own.config, "setblock", {}).get("adapter"):
            weights, self.gate, self.joining = with_adapter(self, adapter, weights)
            if self.gate is not None:
                self.noisy = where_compiled(own, self.gate)
        return super().load_weights(weights)  # type: ignore[misc]

    def tell(self, noisy: Tensor) -> None:
        """Which tokens of the next forward are of blocks, [tokens, 1]."""
        if self.noisy is None:
            self.gate.noisy = noisy
        else:
            self.noisy[: len(noisy)] = noisy

    def __call__(self, *args: Any, **given: Any) -> Any:
        """A forward. Not of that name, which in some classes of vLLM's is what it compiles."""
        if self.noisy is not None:
            # What is compiled always reads it, of as many tokens as there are.
            self.gate.noisy = self.noisy[: given["positions"].shape[-1]]
            torch._dynamo.mark_dynamic(self.gate.noisy, 0)
        self.last_hidden = super().__call__(*args, **given)  # type: ignore[misc]
        if self.gate is not None:
            self.gate.noisy = None
        return self.last_hidden


def __getattr__(name: str) -> Any:
    """The class of this name, on vLLM's of the name without PREFIX."""
    own = name.removeprefix(PREFIX)
    if own == name or own not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm import ModelRegistry  # type: ignore

    base = ModelRegistry.models[own].load_model_cls()
    made = type(name, (Blocks, base), {"__module__": __name__})
    globals()[name] = made
    return made
