"""A gated adapter as it decodes: what it adds to the outputs of layers, for noisy tokens alone.

put_on()     the network with a trained adapter
opened()     tells its layers which tokens of a forward are noisy
Addition     what an adapter adds to one linear layer, vLLM's included
share()      layers that read the same tokens have their first products in common
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from setblock.adapters import (
    MISSING,
    OF_CACHE,
    chain_of,
    check_all_taken,
    check_chain,
    is_gated,
    scale_of,
    told,
    unwrapped,
    with_chain,
    with_row,
)
from setblock.chain import NAME as CHAIN
from setblock.masks import CLEAN, Layout
from setblock.shared import Once, groups

FEW = 32  # tokens of a forward
# Ways of peft's to begin an adapter; the others take something from the base's weights.
OWN_WEIGHTS = (True, False, "gaussian", "eva", "orthogonal")
INSTALL = "pip install '.[smollm2]' in the checkout, or make setup"


@dataclass
class Gate:
    """Which of the last tokens of the forward under way are noisy, [batch, last, 1].

    None: none of them. With more than one row, all tokens are told of.
    whole: each token told of is noisy, known of a single row alone.
    few: up to how many tokens are a loop's, compiled for a CPU; none in kernels for any number.
    lock: held by the thread whose forward it is.
    """

    noisy: torch.Tensor | None = None
    whole: bool = False
    few: int = FEW
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __reduce__(self) -> tuple[type["Gate"], tuple]:
        return Gate, ()  # a copy's own: between forwards there is nothing else to copy


class Down(torch.nn.Module):
    """The first, thin products of additions to layers that read the same tokens, all in one.

    weight  [hidden, thin], as products want it
    """

    def __init__(self, weights: list[Float[Tensor, "thin hidden"]], kind: torch.dtype) -> None:
        super().__init__()
        joined = torch.cat([weight.detach().t().to(kind) for weight in weights], dim=1)
        self.weight = Parameter(joined.contiguous(), requires_grad=False)

    def forward(self, hidden: Float[Tensor, "... hidden"], gate: Gate) -> Float[Tensor, "n thin"]:
        """Of the tokens that the gate tells of; 0 for those of them that are clean."""
        assert gate.noisy is not None
        noisy = gate.noisy.reshape(-1, 1)
        tokens = hidden.reshape(-1, hidden.shape[-1])[-len(noisy) :]
        # For a few tokens a loop of the compiler's is quicker than a library's call.
        if loops(tokens, gate.few):
            thin = (tokens[:, :, None].float() * self.weight).sum(dim=1)
        else:
            thin = torch.mm(tokens.to(self.weight.dtype), self.weight)
        # Compiled, telling the two apart would gain nothing and take kernels of their own.
        if torch.compiler.is_compiling() or not gate.whole:
            thin = torch.where(noisy, thin, 0.0)
        return thin


class Addition(torch.nn.Module):
    """What an adapter adds to the output of a linear layer: a product of two thin matrices.

    product  makes the thin product, by `down`, of which `thin` are this layer's columns
    up  [rank, width]
    """

    def __init__(self, layer: Any, adapter: str) -> None:
        super().__init__()
        base: Tensor = layer.base_layer.weight
        # Training keeps float32 beside a smaller base, and so do a CPU's libraries, whose calls for
        # products of 16 bits take longer than such products. Four bits are packed into bytes.
        narrow = base.dtype.is_floating_point and base.device.type != "cpu"
        kind = base.dtype if narrow else torch.float32
        down, up = layer.lora_A[adapter], layer.lora_B[adapter]
        if up.bias is not None:
            raise ValueError("a gated adapter has no biases: lora_bias must be false")
        scaled = up.weight.detach() * layer.scaling[adapter]
        self.down = Down([down.weight], kind)
        self.product = Once(self.down, 1)
        self.thin = slice(0, len(down.weight))
        self.up = Parameter(scaled.t().to(kind).contiguous(), requires_grad=False)

    def forward(
        self, result: Float[Tensor, "... width"], hidden: Float[Tensor, "... hidden"], gate: Gate
    ) -> Float[Tensor, "... width"]:
        """`result`, to which the additions of noisy tokens were added in place."""
        thin = self.product(hidden, gate)[:, self.thin]
        flat = result.view(-1, result.shape[-1])[-len(thin) :]
        if loops(flat, gate.few) and self.up.dtype.itemsize < 4:
            flat += (thin[:, :, None] * self.up).sum(dim=1)
        elif flat.dtype == self.up.dtype:
            flat.addmm_(thin, self.up)
        else:
            flat += torch.mm(thin, self.up)
        return result


def share(additions: list[Addition]) -> None:
    """From now on the first products of these additions, which read the same tokens, are one."""
    weights = [addition.down.weight.t() for addition in additions]
    down, end = Down(weights, weights[0].dtype), 0
    product = Once(down, len(additions))
    for addition in additions:
        rank = addition.down.weight.shape[1]
        addition.down, addition.product, addition.thin = down, product, slice(end, end + rank)
        end += rank


def loops(tokens: Tensor, few: int) -> bool:
    """Whether so few tokens are being compiled for a CPU: loops of the compiler's, which read what
    they need, are quicker there than a library's calls for thin products.
    """
    return torch.compiler.is_compiling() and tokens.device.type == "cpu" and len(tokens) <= few


def to_compile(network: Any) -> None:
    """Additions of a network on a CPU in its type: what torch.compile makes of them there reads
    fewer bytes then, and calls no library.
    """
    for module in network.modules():
        if isinstance(module, Addition):
            module.to(network.dtype)


class GatedLinear(torch.nn.Module):
    """A linear layer with an addition for the tokens that its gate names.

    What peft's own layer computes, without its work for each row and layer of a forward; clean
    tokens get what the layer itself says.
    """

    def __init__(self, layer: Any, gate: Gate, adapter: str) -> None:
        super().__init__()
        self.base, self.gate, self.addition = layer.base_layer, gate, Addition(layer, adapter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.base(hidden)
        if self.gate.noisy is None:
            return result
        return self.addition(result, hidden, self.gate)


class MaskEmbedding(torch.nn.Module):
    """A hook for an embedding layer: the mask token's row that an adapter has trained."""

    trained: torch.Tensor

    def __init__(self, mask_token_id: int, trained: torch.Tensor) -> None:
        super().__init__()
        self.mask_token_id = mask_token_id
        self.register_buffer("trained", trained, persistent=False)

    def forward(self, layer: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return with_row(output, args[0] == self.mask_token_id, self.trained)


def noisy_part(layout: Layout) -> tuple[int | None, bool]:
    """(from which token on a gate is told which are noisy, None where none is; Gate.whole).

    layout: on the host.
    """
    noisy = layout.block.numpy() != CLEAN
    if len(noisy) > 1:
        return (0 if noisy.any() else None), False
    [line] = noisy.tolist()
    first = line.index(True) if True in line else None
    return first, first is not None and all(line[first:])


@contextmanager
def opened(network: Any, layout: Layout, there: Layout) -> Iterator[dict[str, Any]]:
    """What a forward of these tokens must be told besides, for a gated adapter that `put_on` put
    on, for one that is trained, or for none. Threads that decode with the first take turns.

    layout: on the host; there: the same on the device.
    """
    gate: Gate | None = getattr(network, "setblock_gate", None)
    if gate is None:
        yield told(network, there)
        return
    first, whole = noisy_part(layout)
    noisy = None if first is None else there.block[:, first:, None] != CLEAN
    with gate.lock:
        gate.noisy, gate.whole = noisy, whole
        try:
            yield {}
        finally:
            gate.noisy, gate.whole = None, False


def put_on(
    network: PreTrainedModel, folder: str | Path, mask_token_id: int, chain_width: int = 0
) -> Any:
    """The network with the adapter of this folder or hub repository, ready to decode.

    chain_width: of the chain that was trained with it, 0 for none.

    A low-rank adapter is folded into the weights; a gated one stays beside them, in layers of our
    own and with its mask embedding put in by a hook: in every forward peft would build masks in
    every layer, and copy the whole embedding.
    Raises: ValueError for adapters of other kinds, and for one that lacks weights.
    """
    with_chain(network, chain_width)
    adapted = _wrapped(network, folder)
    check_chain(adapted.peft_config[adapted.active_adapter], folder, chain_width)
    check_all_taken(adapted, folder)
    if not is_gated(adapted):
        return adapted.merge_and_unload()
    _check_gate(network, adapted.peft_config[adapted.active_adapter])
    wrapper: Any = network.get_input_embeddings()
    rows = getattr(getattr(wrapper, "token_adapter", None), "token_indices", {})
    if [len(own) for own in rows.values()] != [1]:
        raise ValueError("a gated adapter must have trained one row of the input embedding")
    [trained] = wrapper.token_adapter.trainable_tokens_delta[adapted.active_adapter].detach()
    embedding = unwrapped(wrapper)
    network.set_input_embeddings(embedding)
    network.setblock_mask = MaskEmbedding(mask_token_id, trained * scale_of(embedding))
    embedding.register_forward_hook(network.setblock_mask)
    head: Any = network.get_output_embeddings()
    if network.config.tie_word_embeddings:
        network.set_output_embeddings(unwrapped(head))
    adapted.requires_grad_(False)
    from peft.tuners.lora import LoraLayer

    gate = Gate()
    adapted_layers = [n for n, one in network.named_modules() if isinstance(one, LoraLayer)]
    if any(name.rpartition(".")[2] == OF_CACHE for name in adapted_layers):
        raise ValueError(
            f"a gated adapter can't act on {OF_CACHE}, which reads the whole cache in every forward"
        )
    for names in groups(adapted_layers):
        layers = [
            GatedLinear(network.get_submodule(name), gate, adapted.active_adapter) for name in names
        ]
        for name, layer in zip(names, layers, strict=True):
            network.set_submodule(name, layer)
        share([layer.addition for layer in layers])
    network.setblock_gate = gate  # type: ignore[assignment]
    if (trained_chain := chain_of(network)) is not None:
        network.setblock_chain = trained_chain.to(network.dtype)
    return network


def _check_gate(network: PreTrainedModel, config: Any) -> None:
    """Raises: ValueError for what would change the base on tokens that are no masks."""
    from peft.tuners.lora import LoraLayer

    head: Any = network.get_output_embeddings()
    has_rows = unwrapped(head) is not head and not network.config.tie_word_embeddings
    if isinstance(head, LoraLayer) or has_rows:
        raise ValueError("a gated adapter must leave the output layer as it is")
    more = [name for name in config.modules_to_save or [] if name != CHAIN]
    own = config.init_lora_weights
    if own not in OWN_WEIGHTS:
        raise ValueError(
            "a gated adapter leaves its base as it is where no mask stands, which one with "
            f"init_lora_weights {own!r} does not; {', '.join(map(repr, OWN_WEIGHTS))} are allowed"
        )
    for name, value, only in (
        ("bias", config.bias, "none"),
        ("modules_to_save", more, []),
        ("layer_replication", config.layer_replication, None),
    ):
        if value != only:
            raise ValueError(
                "a gated adapter leaves its base as it is where no mask stands, which one with "
                f"{name} {value!r} does not; only {only!r} is allowed"
            )


def _wrapped(network: PreTrainedModel, folder: str | Path) -> Any:
    """The network in peft's layers, with the adapter's weights in them."""
    try:
        from peft import LoraConfig, PeftConfig, PeftModel
    except ModuleNotFoundError as error:
        raise ImportError(f"an adapter needs the package {error.name}: {INSTALL}") from None

    with warnings.catch_warnings():
        # peft asks a network for a name that transformers is giving up.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(f"an adapter of peft's type {kind}, where only LORA can be put on")
        names = ("adapter_model.safetensors", "adapter_model.bin")
        if Path(folder).is_dir() and not any(Path(folder, name).is_file() for name in names):
            raise ValueError(f"the adapter's folder has no {names[0]}")
        warnings.filterwarnings("ignore", MISSING, UserWarning)
        return PeftModel.from_pretrained(network, folder)
