"""A network of a family that the tests do not know is tried before it decodes.

Many of transformers' networks would run under our masks and be wrong without a word: they may make
masks of their own, look at other tokens than attention does, or count positions by themselves.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from setblock.architectures import TESTED
from setblock.logits import after_head, changes, left_alone
from setblock.masks import CLEAN, Layout, causal_layout
from setblock.model import Model
from setblock.names import ModelError

CLEAN_TOKENS, NOISY_TOKENS, START = 8, 4, 4  # of the trial's text, and where its block stands


def try_out(model: Model) -> None:
    """Some forwards of few tokens, unless the tests know the network's family.

    Raises: ModelError if they fail, or if what the rules of masks.py hide changes a prediction, or
    what they show does not, or if a cache does, or if a text's next-token predictions are not those
    that the network makes by itself.
    """
    kind = model.network.config.model_type
    if kind in TESTED:
        return
    try:
        wrong = next(_wrong(model), None)
    except ModelError:
        raise
    except Exception as error:
        wrong = f"its forwards fail with them: {' '.join(str(error).split())[:200]}"
    if wrong is not None:
        raise ModelError(f"{kind}, which the tests do not know, can't run under our masks: {wrong}")


@torch.no_grad()
def check_head(model: Model, chain: bool = False) -> None:
    """One forward of few tokens more, for who trains such a network, or one whose settings say that
    it changes its logits: another family's may say so, and its network does not.

    chain: the output layer must read what the layers before it give, as well.
    Raises: ModelError if the network changes its logits behind the output layer in a way that
    logits.py does not know.
    """
    network: Any = model.network
    kind = network.config.model_type
    if kind in TESTED and not changes(network.config):
        return
    changed = after_head(network.config)
    given = {"input_ids": _text(model)[:, :CLEAN_TOKENS].to(model.device), "use_cache": False}
    head, made = network.get_output_embeddings(), []
    hook = head.register_forward_hook(lambda layer, read, logits: made.append(logits))
    logits = network(**given).logits.float()
    hook.remove()
    with left_alone(network):
        alone = network(**given).logits.float()
    unknown = ", which the tests do not know," if kind not in TESTED else ""
    wrong = f"{kind}{unknown} can't be trained: its logits are not"
    if not (
        made
        and _same(model, changed(made[0]).float(), logits)
        and _same(model, made[0].float(), alone)
    ):
        raise ModelError(f"{wrong} its output layer's")
    if chain:
        apart = head(network.get_decoder()(**given).last_hidden_state)
        if not _same(model, changed(apart).float(), logits):
            raise ModelError(f"{wrong} as a chain takes them")


@torch.no_grad()
def _wrong(model: Model) -> Iterator[str]:
    """What is wrong, one thing after the other."""
    text = _text(model)
    clean = text[:, :CLEAN_TOKENS]
    here = model.forward(clean, causal_layout(torch.arange(CLEAN_TOKENS).expand_as(clean)))
    plain = model.network(input_ids=clean.to(model.device), use_cache=False).logits.float()
    if not _same(model, here, plain):
        yield "next tokens are other ones than the network's own"

    position = torch.cat([torch.arange(CLEAN_TOKENS), START + torch.arange(NOISY_TOKENS)])
    position = position.expand(len(text), -1)
    noisy = (torch.arange(position.shape[1]) >= CLEAN_TOKENS).expand_as(position)
    horizon = torch.where(noisy, START, position + 1)
    block = torch.where(noisy, START, CLEAN)
    layout = Layout(position, horizon, block, torch.zeros_like(position))

    def predicted(text: Tensor) -> Float[Tensor, "rows noisy vocab"]:
        return model.forward(text, layout)[:, CLEAN_TOKENS:]

    def changed(place: int) -> Float[Tensor, "rows noisy vocab"]:
        other = text.clone()
        other[:, place] = text[:, place - 1]
        return predicted(other)

    before = predicted(text)
    if torch.equal(changed(START - 1), before):
        yield "a block does not see the text before it"
    if torch.equal(changed(-1)[:, 0], before[:, 0]):
        yield "a block's slots do not see each other"
    later = range(START, CLEAN_TOKENS)
    if not all(_same(model, changed(place), before, shapes=False) for place in later):
        yield "a block sees the tokens that it is to predict"

    cache = model.new_cache(len(text), position.shape[1])
    known = layout.map(lambda tensor: tensor[:, :START])
    model.forward(text[:, :START], known, cache)
    cache.keep(np.array([START] * len(text)))
    rest = layout.map(lambda tensor: tensor[:, CLEAN_TOKENS:])
    if not _same(model, model.forward(text[:, CLEAN_TOKENS:], rest, cache), before):
        yield "predictions behind a cache are other ones than without"


def _text(model: Model) -> Tensor:
    """[2, tokens], none of them special or as its neighbours; one row is the other backwards."""
    usual = [
        token
        for token in range(min(model.vocab_size, 1000))
        if token not in model.eos_token_ids and token != model.mask_token_id
    ]
    count = CLEAN_TOKENS + NOISY_TOKENS
    step = max(len(usual) // count, 1)
    tokens = (usual[::step] * count)[:count]
    return torch.tensor([tokens, tokens[::-1]])


def _same(model: Model, one: Tensor, other: Tensor, shapes: bool = True) -> bool:
    """Up to rounding: of the logits' mean difference as a share of their spread.

    shapes: the two came of forwards of different shapes, which round differently, in 16 bits and
    where a GPU multiplies 32 bits with fewer a good deal.
    """
    keep = torch.arange(one.shape[-1], device=one.device) != model.mask_token_id
    one, other = one[..., keep], other[..., keep]
    most = 0.01 if model.dtype == torch.float32 else 0.2
    if not shapes:
        most /= 10
    return bool((one - other).abs().mean() <= most * other.std())
