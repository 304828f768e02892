"""Adapters on a frozen base, by peft: low-rank (lora, qlora) and gated.

A gated adapter acts on noisy tokens alone: peft's activated LoRA, told for every row where its
noisy tokens begin, and a mask embedding that only the input side reads. Clean tokens go through the
base's own weights, so that its next-token logits stay what they were, bit for bit.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from setblock import chain
from setblock.chain import Chain
from setblock.masks import CLEAN, Layout

if TYPE_CHECKING:
    from peft import PeftModel

METHODS = ("full", "lora", "qlora", "gated")
CONFIG = "adapter_config.json"
FEW = 32  # tokens of a forward


def attach(
    network: PreTrainedModel,
    base_name: str,
    method: str,
    mask_token_id: int,
    rank: int,
    alpha: int,
    dropout: float = 0.0,
    chain_width: int = 0,
) -> "PeftModel":
    """The network with a new adapter on all of its linear layers but the head, and a trained mask.

    base_name: the MODEL that the adapter will be put on again when it is loaded. chain_width: of a
    Chain beside it, 0 for none.
    Effects: freezes the network and puts the adapter's layers into it.
    """
    from peft import LoraConfig, get_peft_model  # here: decoding without an adapter does without

    gated = method == "gated"
    embedding, head = (
        next(name for name, module in network.named_modules() if module is part).split(".")[-1]
        for part in (network.get_input_embeddings(), network.get_output_embeddings())
    )
    tokens = {embedding: [mask_token_id]}
    tied = network.config.tie_word_embeddings
    if gated and tied:
        # peft ties what it trains of a tied embedding to the head, unless the lists differ. Here
        # the head must stay as it is: it gets a list of its own, and that row is frozen below.
        tokens[head] = [mask_token_id, mask_token_id]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear",
        trainable_token_indices=tokens,
        alora_invocation_tokens=[mask_token_id] if gated else None,
        modules_to_save=_with_chain(network, chain_width),
    )
    adapted: Any = get_peft_model(network, config)
    config.base_model_name_or_path = base_name
    return _to_train(adapted)


def attach_again(network: PreTrainedModel, folder: str | Path, chain_width: int = 0) -> "PeftModel":
    """The base network with the adapter of this folder, to go on training it.

    chain_width: as for `attach`; a new one if the adapter had none.
    Effects: as those of `attach`.
    """
    from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    config: Any = PeftConfig.from_pretrained(str(folder))
    saved = config.modules_to_save or []
    if not chain_width:
        _check_chain(config, folder, chain_width)
    _with_chain(network, chain_width)
    if not chain_width or chain.NAME in saved:
        return _to_train(PeftModel.from_pretrained(network, folder, is_trainable=True))
    # peft reads no adapter that lacks a part: the new chain's first values stand in for it.
    weights = load_peft_weights(str(folder), device=str(network.device))
    fresh: Any = chain_of(network)
    for name, weight in fresh.state_dict().items():
        weights[f"base_model.model.{chain.NAME}.{name}"] = weight.clone()
    config.modules_to_save, config.inference_mode = [*saved, chain.NAME], False
    base_name, config.base_model_name_or_path = config.base_model_name_or_path, None
    adapted = get_peft_model(network, config)
    config.base_model_name_or_path = base_name
    set_peft_model_state_dict(adapted, weights)
    return _to_train(adapted)


def _check_chain(config: Any, folder: str | Path, width: int) -> None:
    """Raises: ValueError if an adapter and its settings do not agree about a chain."""
    has = chain.NAME in (config.modules_to_save or [])
    if has != bool(width):
        raise ValueError(
            f"{folder}: the adapter has {'a' if has else 'no'} chain, but chain_width in its "
            f"generation_config.json is {width}"
        )


def _with_chain(network: Any, width: int) -> list[str] | None:
    """What peft shall train whole and save: a new chain, if it is to have a width.

    Effects: the network has it.
    """
    if not width:
        return None
    network.setblock_chain = Chain(network.config.hidden_size, width).to(network.device)
    return [chain.NAME]


def chain_of(network: Any) -> Chain | None:
    """The chain of a network, that which is trained where peft has wrapped it; None without one."""
    found: Any = getattr(network, chain.NAME, None)
    trained = getattr(found, "modules_to_save", None)
    return found if trained is None else trained[found.active_adapter]


def _to_train(adapted: Any) -> "PeftModel":
    # peft would store all of an embedding that got a row for the mask token: its delta is enough.
    adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    if is_gated(adapted) and adapted.config.tie_word_embeddings:
        adapted.get_output_embeddings().requires_grad_(False)
    return adapted


@dataclass
class Gate:
    """Which of the last tokens of the forward under way are noisy, [batch, last, 1].

    None: none of them. With more than one row, all tokens are told of.
    whole: each token told of is noisy, known of a single row alone.
    """

    noisy: torch.Tensor | None = None
    whole: bool = False


class Addition(torch.nn.Module):
    """What an adapter adds to the output of a linear layer: a product of two thin matrices."""

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
        # As products want them, [in, rank] and [rank, out].
        self.down = Parameter(down.weight.detach().t().to(kind).contiguous(), requires_grad=False)
        self.up = Parameter(scaled.t().to(kind).contiguous(), requires_grad=False)

    def forward(
        self,
        result: Float[Tensor, "... width"],
        hidden: Float[Tensor, "... hidden"],
        noisy: Bool[Tensor, "... 1"],
        whole: bool = False,
    ) -> Float[Tensor, "... width"]:
        """`result`, to which the additions of noisy tokens were added in place; see `Gate`."""
        kind, gate = self.down.dtype, noisy.reshape(-1, 1)
        tokens = hidden.reshape(-1, hidden.shape[-1])[-len(gate) :]
        flat = result.view(-1, result.shape[-1])[-len(gate) :]
        # For a few tokens loops of the compiler's are quicker than calls of a library's: for the
        # first, thin product, and in 16 bits for both.
        compiling = torch.compiler.is_compiling() and hidden.device.type == "cpu"
        loops = compiling and len(tokens) <= FEW
        if loops and kind.itemsize < 4:
            thin = torch.where(gate, (tokens[:, :, None].float() * self.down).sum(dim=1), 0.0)
            flat += (thin[:, :, None] * self.up).sum(dim=1)
            return result
        tokens = tokens.to(kind)
        thin = (tokens[:, :, None] * self.down).sum(dim=1) if loops else torch.mm(tokens, self.down)
        if not whole:
            thin = torch.where(gate, thin, 0.0)
        if flat.dtype == thin.dtype:
            flat.addmm_(thin, self.up)
        else:
            flat += torch.mm(thin, self.up)
        return result


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
        # Compiled, telling the two apart would gain nothing and take kernels of their own.
        whole = not torch.compiler.is_compiling() and self.gate.whole
        return self.addition(result, hidden, self.gate.noisy, whole)


class MaskEmbedding(torch.nn.Module):
    """A hook for an embedding layer: the mask token's row that an adapter has trained."""

    trained: torch.Tensor

    def __init__(self, mask_token_id: int, trained: torch.Tensor) -> None:
        super().__init__()
        self.mask_token_id = mask_token_id
        self.register_buffer("trained", trained, persistent=False)

    def forward(self, layer: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return with_row(output, args[0] == self.mask_token_id, self.trained)


def with_row(
    output: Float[Tensor, "... width"],
    masked: Bool[Tensor, "..."],
    trained: Float[Tensor, " width"],
) -> Float[Tensor, "... width"]:
    """An embedding's output with the trained row at masked tokens."""
    return torch.where(masked[..., None], trained.to(output), output)


def is_gated(network: Any) -> bool:
    """Whether the network carries an adapter that acts on noisy tokens alone."""
    if getattr(network, "setblock_gate", None) is not None:
        return True
    configs = getattr(network, "peft_config", {})  # stock networks have none
    return any(config.alora_invocation_tokens is not None for config in configs.values())


@contextmanager
def gated(network: Any, layout: Layout) -> Iterator[dict[str, Any]]:
    """What a forward of these tokens must be told besides, for a gated adapter that `put_on` put
    on, for one that is trained, or for none.
    """
    opened: Gate | None = getattr(network, "setblock_gate", None)
    if opened is None:
        yield gate(network, layout)
        return
    noisy, first = layout.block != CLEAN, 0
    if len(noisy) > 1:
        some = bool(noisy.any())
    else:
        [told] = noisy.tolist()
        some = True in told
        first = told.index(True) if some else 0
        opened.whole = all(told[first:])
    # A tensor of its own: torch.compile would make kernels for each place that a view begins at.
    opened.noisy = noisy[:, first:, None].clone() if some else None
    try:
        yield {}
    finally:
        opened.noisy, opened.whole = None, False


def gate(network: Any, layout: Layout) -> dict[str, Any]:
    """What peft must be told of a forward: for each row, how many tokens at its end count.

    They begin with the row's first noisy token: noisy tokens are a suffix, but for padding. Nothing
    for a network without a gated adapter.
    """
    if not is_gated(network):
        return {}
    noisy = layout.block != CLEAN
    length = noisy.shape[1]
    before = (noisy.long().cumsum(dim=1) == 0).sum(dim=1)
    return {"alora_offsets": (length - before).tolist()}


def has_halves(network: Any) -> bool:
    """Whether `half` knows the network's adapter: it is one that `attach` made, and at work."""
    from peft.tuners.lora import LoraLayer

    tokens = getattr(network.get_input_embeddings(), "token_adapter", None)
    if tokens is None or len(tokens.active_adapters) != 1 or tokens.disable_adapters:
        return False
    [adapter] = tokens.active_adapters
    config = network.peft_config[adapter]
    return (
        config.alora_invocation_tokens is not None
        and len(tokens.token_indices[adapter]) == 1
        and all(
            layer.active_adapters == [adapter]
            and adapter in layer.lora_A
            and layer.lora_B[adapter].bias is None
            for layer in network.modules()
            if isinstance(layer, LoraLayer)
        )
    )


@contextmanager
def half(network: Any, noisy: bool) -> Iterator[None]:
    """Forwards of a network that `has_halves`: of noisy tokens alone, or of clean ones alone, which
    have no logits then.

    What peft's own layers compute, but for the last bits, without their work for forwards that hold
    both: they would pick the noisy tokens out in every layer, and copy the whole embedding to put
    one row into it.
    """
    from peft.tuners.lora import LoraLayer

    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    forwards: dict[Any, Any] = {}
    for module in network.modules():
        if isinstance(module, LoraLayer):
            forwards[module] = partial(_added if noisy else _bare, module)
    forwards[embedding] = partial(_embedded, embedding) if noisy else unwrapped(embedding).forward
    forwards[head] = unwrapped(head).forward if noisy else lambda hidden: hidden
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _bare(layer: Any, hidden: Tensor, **_: Any) -> Tensor:
    """The output of peft's layer where the adapter acts on no token."""
    return layer.base_layer(hidden)


def _added(layer: Any, hidden: Tensor, **_: Any) -> Tensor:
    """The output of peft's layer where the adapter acts on every token."""
    [adapter] = layer.active_adapters
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    result = layer.base_layer(hidden)
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(down.weight.dtype)
    thin = down(layer.lora_dropout[adapter](hidden))
    return result + up(thin * layer.scaling[adapter]).to(result.dtype)


def _embedded(wrapper: Any, tokens: Int[Tensor, "batch length"]) -> Tensor:
    """Input embeddings, the trained row in them."""
    embedding, adapter = unwrapped(wrapper), wrapper.token_adapter.active_adapters[0]
    [token] = wrapper.token_adapter.token_indices[adapter]
    [trained] = wrapper.token_adapter.trainable_tokens_delta[adapter] * scale_of(embedding)
    return with_row(embedding(tokens), tokens == token, trained)


def scale_of(embedding: Any) -> Any:
    """What an embedding's rows are multiplied by on their way into a network; 1 for most."""
    return getattr(embedding, "embed_scale", 1.0)


def put_on(
    network: PreTrainedModel, folder: str | Path, mask_token_id: int, chain_width: int = 0
) -> Any:
    """The network with the adapter of this folder or hub repository, ready to decode.

    chain_width: of the chain that was trained with it, 0 for none.

    A low-rank adapter is folded into the weights; a gated one stays beside them, in layers of our
    own and with its mask embedding put in by a hook: in every forward peft would build masks in
    every layer, and copy the whole embedding.
    """
    _with_chain(network, chain_width)
    with _quiet():
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer

        adapted: Any = PeftModel.from_pretrained(network, folder)
    _check_chain(adapted.peft_config[adapted.active_adapter], folder, chain_width)
    if not is_gated(adapted):
        return adapted.merge_and_unload()
    wrapper: Any = network.get_input_embeddings()
    [trained] = wrapper.token_adapter.trainable_tokens_delta[adapted.active_adapter].detach()
    embedding = unwrapped(wrapper)
    network.set_input_embeddings(embedding)
    network.setblock_mask = MaskEmbedding(mask_token_id, trained * scale_of(embedding))
    embedding.register_forward_hook(network.setblock_mask)
    head: Any = network.get_output_embeddings()
    if network.config.tie_word_embeddings:
        network.set_output_embeddings(unwrapped(head))
    adapted.requires_grad_(False)
    gate = Gate()
    for name, module in list(network.named_modules()):
        if isinstance(module, LoraLayer):
            network.set_submodule(name, GatedLinear(module, gate, adapted.active_adapter))
    network.setblock_gate = gate  # type: ignore[assignment]
    if (trained_chain := chain_of(network)) is not None:
        network.setblock_chain = trained_chain.to(network.dtype)
    return network


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what libraries say of each other, which nobody here can act on."""
    bits = logging.getLogger("bitsandbytes")  # of kernels for a CPU that it does not find
    level = bits.level
    bits.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # peft asks a network for a name that transformers is giving up.
            warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
            yield
    finally:
        bits.setLevel(level)


def unwrapped(embedding: Any) -> Any:
    """The embedding or head itself, where peft has wrapped it to train one of its rows."""
    adapter = getattr(embedding, "token_adapter", None)
    return embedding if adapter is None else adapter.base_layer
