"""vLLM's own model classes, decoded by blocks.

SetBlockLlamaForCausalLM and so on, each made when it is first asked for.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from setblock.vllm import ARCHITECTURES, PREFIX


class Blocks:
    """In front of a model class: its requests are decoded by `state.BlockState`."""

    last_hidden: Any = None  # of the latest forward: the first token of verified decoding needs it
    gate: Any = None  # of an adapter that acts on blocks alone: which tokens are theirs
    joining: Any = None  # the chain of that adapter, if it has one

    @staticmethod
    def get_model_state_cls() -> type:
        from setblock.vllm.state import BlockState

        return BlockState

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        from setblock.vllm.adapter import with_adapter

        own: Any = self
        if adapter := getattr(own.config, "setblock", {}).get("adapter"):
            weights, self.gate, self.joining = with_adapter(self, adapter, weights)
        return super().load_weights(weights)  # type: ignore[misc]

    def forward(self, *args: Any, **given: Any) -> Any:
        self.last_hidden = super().forward(*args, **given)  # type: ignore[misc]
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
