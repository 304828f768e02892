"""Adapters on a frozen base, by peft: low-rank (lora, qlora) and gated.

A gated adapter acts on noisy tokens alone: peft's activated LoRA, told for every row where its
noisy tokens begin, and a mask embedding that only the input side reads. Clean tokens go through the
base's own weights, so that its next-token logits stay what they were, bit for bit.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from setblock import chain
from setblock.chain import Chain
from setblock.masks import CLEAN, Layout

if TYPE_CHECKING:
    from peft import PeftModel

METHODS = ("full", "lora", "qlora", "gated")
# Layers that peft takes for parts of experts, in some mixtures of them, wherever they stand.
EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
SCALE_BEFORE_HEAD = "dim_model_base"  # a setting by which an architecture changes what it reads
MISSING = "Found missing adapter keys"  # a warning of peft's, of what `check_all_taken` refuses
# Of latent attention: it reads the whole cache in every forward, where no gate knows which tokens
# were masks.
OF_CACHE = "kv_b_proj"


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
        target_modules=_gated_layers(network) if gated else "all-linear",
        exclude_modules=_left_out(network, gated) or None,
        trainable_token_indices=tokens,
        alora_invocation_tokens=[mask_token_id] if gated else None,
        modules_to_save=with_chain(network, chain_width),
    )
    adapted: Any = get_peft_model(network, config)
    config.base_model_name_or_path = base_name
    return _to_train(adapted)


def _gated_layers(network: PreTrainedModel) -> str | list[str]:
    """The linear layers in which a gate can part masks from other tokens, as peft takes them.

    All of them, but in mixtures of experts whose weights in one piece peft would adapt as well: it
    has no such adapters for these. There, attention's and those of layers without a mixture.
    """
    mixtures = {
        name.partition(".experts")[0]
        for name, weight in network.named_parameters()
        if ".experts" in name and weight.ndim == 3
    }
    if not mixtures or _takes_all(network):
        return "all-linear"
    head = network.get_output_embeddings()
    layers = {
        name.split(".")[-1]
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head
        if not name.startswith(tuple(f"{mixture}." for mixture in mixtures))
    }
    return sorted(layers - EXPERTS)


def _left_out(network: PreTrainedModel, gated: bool) -> list[str]:
    """Linear layers that no adapter can be on, as peft takes them: a router of experts that is one
    and gives more than a product, or whose weight alone is read, and what a gate can't part.
    """
    names = {
        name.rpartition(".")[2]: type(module).__name__
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear)
    }
    return sorted(
        name
        for name, kind in names.items()
        if kind.endswith("Router") or name == "classifier" or (gated and name == OF_CACHE)
    )


def _takes_all(network: PreTrainedModel) -> bool:
    """Whether peft can put a gated adapter on all that it takes for linear layers, tried without
    memory.
    """
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        twin = type(network)(network.config)
    trial = LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", alora_invocation_tokens=[0]
    )
    try:
        get_peft_model(twin, trial)
    except ValueError:
        return False
    return True


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
        check_chain(config, folder, chain_width)
    with_chain(network, chain_width)
    if not chain_width or chain.NAME in saved:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", MISSING, UserWarning)
            adapted: Any = PeftModel.from_pretrained(network, folder, is_trainable=True)
        check_all_taken(adapted, folder)
        return _to_train(adapted)
    # peft reads no adapter that lacks a part: the new chain's first values stand in for it.
    weights = load_peft_weights(str(folder), device=str(network.device))
    fresh: Any = chain_of(network)
    for name, weight in fresh.state_dict().items():
        weights[f"base_model.model.{chain.NAME}.{name}"] = weight.clone()
    config.modules_to_save, config.inference_mode = [*saved, chain.NAME], False
    base_name, config.base_model_name_or_path = config.base_model_name_or_path, None
    adapted = get_peft_model(network, config)
    config.base_model_name_or_path = base_name
    _check_told(set_peft_model_state_dict(adapted, weights))
    return _to_train(adapted)


def check_all_taken(adapted: Any, folder: str | Path) -> None:
    """Raises: ValueError if the adapter in this folder holds weights that the network took not, or
    none for some of its layers, about which peft says nothing.
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    # Once more, as the first time says nothing; it knows names that it writes in another way.
    _check_told(set_peft_model_state_dict(adapted, load_peft_weights(str(folder), device="cpu")))


def _check_told(told: Any) -> None:
    """told: what peft answers to weights."""
    if left := sorted(told.unexpected_keys):
        raise ValueError(
            f"the adapter holds {len(left)} weights that have no place on this base by its "
            f"adapter_config.json, {left[0]} the first of them"
        )
    if missing := sorted(name for name in told.missing_keys if ".lora_" in name):
        raise ValueError(
            f"the adapter lacks {len(missing)} weights, {missing[0]} the first of them"
        )


def check_chain(config: Any, folder: str | Path, width: int) -> None:
    """Raises: ValueError if an adapter and its settings do not agree about a chain."""
    has = chain.NAME in (config.modules_to_save or [])
    if has != bool(width):
        raise ValueError(
            f"{folder}: the adapter has {'a' if has else 'no'} chain, but chain_width in its "
            f"generation_config.json is {width}"
        )


def with_chain(network: Any, width: int) -> list[str] | None:
    """What peft shall train whole and save: a new chain, if it is to have a width.

    Effects: the network has it.
    Raises: ValueError if the network's head does not read what its layers give.
    """
    if not width:
        return None
    check_no_chain(network.config, width)
    network.setblock_chain = Chain(network.config.hidden_size, width).to(network.device)
    return [chain.NAME]


def no_chain(config: Any) -> str | None:
    """Why a chain can't be beside such a network, None if it can."""
    if (scale := getattr(config, SCALE_BEFORE_HEAD, None)) not in (None, config.hidden_size):
        return (
            f"the output layer of a {config.model_type} with {SCALE_BEFORE_HEAD}={scale} reads "
            "other states than those of its layers"
        )
    projected = getattr(config, "word_embed_proj_dim", config.hidden_size)
    if projected != config.hidden_size:
        return (
            f"the output layer of a {config.model_type} with word_embed_proj_dim={projected} reads "
            f"other states than the {config.hidden_size} wide ones of its layers"
        )
    return None


def check_no_chain(config: Any, width: int) -> None:
    """Raises: ValueError for a chain that can't be beside such a network."""
    if width and (why := no_chain(config)):
        raise ValueError(f"chain_width must be 0, got {width}: {why}")


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
    # Of peft's kinds of adapters only LoRA's settings know the word.
    return any(
        getattr(one, "alora_invocation_tokens", None) is not None for one in configs.values()
    )


def told(network: Any, layout: Layout) -> dict[str, Any]:
    """What peft must be told of a forward: which tokens its adapter acts on, the noisy ones.

    Nothing for a network without a gated adapter.
    Effects: the adapter's layers know what to do with it.
    """
    if not is_gated(network):
        return {}
    _take_masks(network)
    return {"alora_offsets": layout.block != CLEAN}


def _take_masks(network: Any) -> None:
    """From now on a gated adapter's layers take a mask of the tokens for peft's offsets as well."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.variants import ALoraLinearVariant

    for module in network.modules():
        if isinstance(module, LoraLayer):
            variants: list[Any] = list(module.lora_variant.values())
            for variant in variants:
                if isinstance(variant, ALoraLinearVariant):
                    variant.forward = _where_noisy  # pyright: ignore[reportAttributeAccessIssue]


def _where_noisy(
    module: Any, active_adapter: str, x: Tensor, result: Tensor, alora_offsets: Any = None
) -> Tensor:
    """`result`, to which the adapter's additions for the tokens of a mask were added in place.

    peft would count them from the ends of rows, in [batch, length, width]: layers that read all
    rows as one, as OPT's and those beside experts do, have no such ends.
    alora_offsets: [batch, length], or what peft makes of a forward that is told nothing.
    """
    if not isinstance(alora_offsets, Tensor):
        from peft.tuners.lora.variants import ALoraLinearVariant

        return ALoraLinearVariant.forward(
            module, active_adapter, x, result, alora_offsets=alora_offsets
        )
    down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
    noisy = alora_offsets.reshape(-1)
    hidden = x.reshape(-1, x.shape[-1])[noisy].to(down.weight.dtype)
    thin = down(module.lora_dropout[active_adapter](hidden))
    result.view(-1, result.shape[-1])[noisy] += up(thin) * module.scaling[active_adapter]
    return result


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
            forwards[module] = MethodType(_added if noisy else _bare, module)
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


def unwrapped(embedding: Any) -> Any:
    """The embedding or head itself, where peft has wrapped it to train one of its rows."""
    adapter = getattr(embedding, "token_adapter", None)
    return embedding if adapter is None else adapter.base_layer
