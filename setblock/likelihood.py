"""What a model's causal half thinks of given texts: next-token log-probabilities and perplexity."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from setblock.masks import causal_layout
from setblock.model import Model
from setblock.transfer import to_device, to_host

QUERIES = 256  # tokens of a forward: its logits are all that is held at a time


class NextTokens(NamedTuple):
    """Of each token judged: its log-probability in nats, and whether it was the likeliest."""

    logprobs: Float[Tensor, " tokens"]
    likeliest: Bool[Tensor, " tokens"]


@dataclass(frozen=True)
class Perplexity:
    """How a text was predicted: nats over all of its tokens but the first, in so many forwards."""

    nats: float
    tokens: int
    forwards: int


def next_tokens(model: Model, ids: Sequence[int], first: int) -> NextTokens:
    """Next-token scores of ids[first:], each token given all before it; on the CPU.

    ids: a text of at most the model's context; first: at least 1.
    Raises: ValueError for a text that is too long, and for `first` outside of 1 .. len(ids).
    """
    if not 1 <= first <= len(ids):
        raise ValueError(f"first must lie in 1..{len(ids)}, the text's length, got {first}")
    if len(ids) > model.context_length:
        raise ValueError(
            f"a text of {len(ids)} tokens exceeds the model's context of {model.context_length}"
        )
    tokens = torch.tensor([list(ids)])
    cache = model.new_cache(1, len(ids))
    logprobs, likeliest = [np.zeros(0, np.float32)], [np.zeros(0, bool)]
    for begin in range(0, len(ids) - 1, QUERIES):
        end = min(begin + QUERIES, len(ids) - 1)
        position = torch.arange(begin, end)
        judged = (position >= first - 1).nonzero()[:, 0]
        # The last token's logits are wanted at least: no index at all would mean all of them.
        wanted = judged if len(judged) else torch.tensor([end - begin - 1])
        logits = model.forward(
            tokens[:, begin:end], causal_layout(position[None]), cache, logits_at=wanted
        )
        cache.keep(np.array([end - begin]))
        if len(judged):
            [target] = to_device(logits.device, tokens[0, position[judged] + 1])
            found = logits[0].log_softmax(dim=-1).gather(1, target[:, None])[:, 0]
            found, right = to_host(found, logits[0].argmax(dim=-1) == target)
            logprobs.append(found)
            likeliest.append(right)
    return NextTokens(*(torch.from_numpy(np.concatenate(one)) for one in (logprobs, likeliest)))


def perplexity(model: Model, ids: Sequence[int], window: int | None = None) -> Perplexity:
    """Perplexity of a text of any length under next-token prediction.

    window: tokens that a forward sees at most, default the model's context. Windows overlap by
    half, so that each token but those of the first window is judged after at least half a window.
    Raises: ValueError for a text of fewer than two tokens, and for a window out of range.
    """
    window = model.context_length if window is None else window
    if not 2 <= window <= model.context_length:
        raise ValueError(f"window must lie in 2..{model.context_length}, got {window}")
    if len(ids) < 2:
        raise ValueError(f"perplexity needs a text of at least 2 tokens, got {len(ids)}")
    nats, judged, forwards = 0.0, 1, 0
    while judged < len(ids):
        start = 0 if judged == 1 else judged - window // 2
        end = min(start + window, len(ids))
        nats -= float(next_tokens(model, ids[start:end], judged - start).logprobs.double().sum())
        forwards += -(-(end - start - 1) // QUERIES)
        judged = end
    return Perplexity(nats, len(ids) - 1, forwards)
