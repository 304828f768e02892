"""Adapters on vLLM: folded in while the weights are loaded, or, gated, beside them.

A gated adapter acts on the tokens of blocks alone: prompts and commits are the base's. vLLM's
layers stay as they are; what the adapter adds hangs on them as hooks.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import (  # pyright: ignore[reportMissingImports]
    CompilationMode,
    get_current_vllm_config,
)
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_world_size,
)

from setblock import chain
from setblock.adapters import scale_of
from setblock.chain import Chain
from setblock.gated import Addition, Gate, GatedLinear
from setblock.loading import load

Weights = Iterable[tuple[str, Tensor]]

# Layers of vLLM's that are several of a checkpoint's, where a model of its does not say so.
JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Joining:
    """A chain, and the embedding that it reads. No module, whose weights vLLM would look for in the
    checkpoint.
    """

    def __init__(self, chain: Chain, model: Any, network: Any) -> None:
        self.chain = chain
        self.own = model.get_submodule("model.embed_tokens")
        # vLLM scales what its embedding says, transformers what the chain was trained on.
        self.scale = float(scale_of(network.get_input_embeddings()))

    def embedding(self, ids: Tensor) -> Tensor:
        return self.own(ids) * self.scale


def with_adapter(
    model: Any, name: str, weights: Weights
) -> tuple[Weights, Gate | None, Joining | None]:
    """`weights` of the base as its checkpoint names them, with the adapter of this name folded in.

    Gate and chain are those of an adapter which acts on blocks alone. Its additions hang on the
    model's layers then, and wait for a gate that is open.
    Raises: ModelError; ValueError for a gated one on several devices.
    """
    own = next(model.parameters())
    adapted = load(name, dtype=own.dtype, device="cpu", mask_token_id=model.config.mask_token_id)
    network: Any = adapted.network
    if not adapted.gated:
        folded = {
            name: tensor
            for name, tensor in network.state_dict().items()
            if not name.startswith(chain.NAME)
            and not (name.startswith("lm_head.") and network.config.tie_word_embeddings)
        }
        return revert_weight_conversion(network, folded).items(), None, None
    if get_tensor_model_parallel_world_size() > 1:
        raise ValueError(
            f"{name} is a gated adapter, which runs on one device: --tensor-parallel-size 1"
        )
    _hang(model, network, own)
    if adapted.chain is None:
        return weights, network.setblock_gate, None
    joining = Joining(adapted.chain.to(own.device, own.dtype), model, network)
    return weights, network.setblock_gate, joining


def where_compiled(model: Any, gate: Gate) -> Tensor | None:
    """Room to say of every token of a forward whether it is noisy, [most, 1], where vLLM compiles
    the network: kernels and graphs read it at one address. None where it does not.

    Effects: vLLM's caches of what it compiled know what hangs on the network.
    """
    config = get_current_vllm_config()
    if config.compilation_config.mode == CompilationMode.NONE:
        return None
    hanging = [
        (name, [tuple(weight.shape) for weight in hook.parameters()])
        for name, layer in model.named_modules()
        for hook in layer._forward_hooks.values()
        if isinstance(hook, Additions)
    ]
    gate.few = 0
    # Of this they make their keys; of the adapter it holds the name alone.
    model.config.setblock_additions = repr(hanging)
    most, device = config.scheduler_config.max_num_batched_tokens, next(model.parameters()).device
    return torch.zeros(most, 1, dtype=torch.bool, device=device)


def _hang(model: Any, network: Any, own: Tensor) -> None:
    """The additions of this network's layers as hooks on those of vLLM's, several of which are
    several of the network's in one.

    own: one of vLLM's weights; on a GPU the additions get its type, which they lack on a CPU.
    """
    device, kind = own.device, None if own.device.type == "cpu" else own.dtype
    joined = getattr(model, "packed_modules_mapping", JOINED)
    inside = {part: whole for whole, parts in joined.items() for part in parts}
    found: dict[str, dict[str, Addition]] = {}
    for name, module in network.named_modules():
        if isinstance(module, GatedLinear):
            owner, _, part = name.rpartition(".")
            found.setdefault(f"{owner}.{inside.get(part, part)}", {})[part] = module.addition
    for name, parts in found.items():
        last = name.rpartition(".")[-1]
        # One layer there too, whatever vLLM could make it of.
        order = [last] if set(parts) == {last} else joined.get(last, [last])
        if set(parts) != set(order):
            raise ValueError(f"a gated adapter must have all parts of {name}: {', '.join(order)}")
        hook = Additions([parts[part] for part in order], network.setblock_gate)
        hook.to(device, kind)
        model.get_submodule(name).register_forward_hook(hook)
    gate, mask = network.setblock_gate, network.setblock_mask.to(device)
    # vLLM scales what its embedding says.
    mask.trained = mask.trained / scale_of(network.get_input_embeddings())

    def embed(layer: Any, args: tuple, output: Tensor) -> Tensor:
        if gate.noisy is None:
            return output
        return torch.where(gate.noisy, mask(layer, args, output), output)

    model.get_submodule("model.embed_tokens").register_forward_hook(embed)


class Additions(torch.nn.Module):
    """A hook for one of vLLM's linear layers, which answers with its output and its bias."""

    def __init__(self, parts: list[Addition], gate: Gate) -> None:
        super().__init__()
        self.parts, self.gate = torch.nn.ModuleList(parts), gate
        self.widths = [part.up.shape[1] for part in parts]

    def forward(self, layer: Any, args: tuple, output: Any) -> Any:
        if self.gate.noisy is None:
            return output
        result, _ = output
        for part, own in zip(self.parts, result.split(self.widths, dim=-1), strict=True):
            part(own, args[0], self.gate)
        return output
