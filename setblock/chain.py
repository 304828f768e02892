"""What joins the tokens of a draft: predictions that know the token before.

The slots of a block of masks are predicted at once, each by itself, so that two neighbours may be
the likeliest words of two different sentences. A chain is a small network beside a gated adapter.
It reads what a slot's logits are made of and the token before it, final or drafted, and scores the
slot's likeliest tokens anew, one slot after the other. As it acts on drafts alone, what verified
decoding says stays the model's own.

Source: the sampler head of arXiv:2507.11851.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

NAME = "setblock_chain"  # of the module in a network
CANDIDATES = 64  # likeliest tokens of a slot that are scored anew


class Chain(nn.Module):
    """Scores that are added to the logits of a slot's candidates, given the token before it.

    For a slot with hidden state h (the head's input) and a token before with embedding e the
    candidate with embedding c gets `c @ out(silu(slot(norm h) + before(norm e)))`: 0 in the
    beginning.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.slot = nn.Linear(hidden_size, width)
        self.before = nn.Linear(hidden_size, width, bias=False)
        self.out = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.out.weight)

    def context(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... width"]:
        """What of a slot's hidden state its scores depend on."""
        return self.slot(_norm(hidden))

    def forward(
        self,
        context: Float[Tensor, "slots width"],
        before: Float[Tensor, "slots hidden"],
        candidates: Float[Tensor, "slots candidates hidden"],
    ) -> Float[Tensor, "slots candidates"]:
        """What to add to the candidates' logits. before, candidates: input embeddings."""
        direction = self.out(silu(context + self.before(_norm(before))))
        return (candidates.to(direction.dtype) @ direction[..., None])[..., 0].float()


def _norm(hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
    return rms_norm(hidden, hidden.shape[-1:])


def candidates_of(
    logits: Float[Tensor, "... vocab"],
) -> tuple[Float[Tensor, "... candidates"], Int[Tensor, "... candidates"]]:
    """(logits, ids) of each slot's likeliest tokens."""
    likeliest = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
    return likeliest.values, likeliest.indices


def joined(
    chain: Chain,
    embedding: Callable[[Tensor], Tensor],
    logits: Float[Tensor, "batch slots vocab"],
    context: Float[Tensor, "batch slots width"],
    before: Int[Tensor, " batch"],
    pick: Callable[[Tensor, Tensor, int], Int[Tensor, "batch 1"]],
) -> tuple[Float[Tensor, "batch slots candidates"], Int[Tensor, "batch slots candidates"]]:
    """(logits, ids) of the slots' candidates, ids ascending, given the token in the slot before.

    before: the token before the first slot. pick: the token for such logits and ids, [batch, 1,
    candidates] each, of the slot of this number.
    """
    values, ids = candidates_of(logits)
    ids, order = ids.sort(dim=-1)
    # A mask token's own logit stays at -inf, were it ever a candidate.
    scores, words = values.gather(-1, order), embedding(ids)
    context = context.to(words.dtype)
    for slot in range(logits.shape[1]):
        scores[:, slot] += chain(context[:, slot], embedding(before), words[:, slot])
        here = slice(slot, slot + 1)
        before = pick(scores[:, here], ids[:, here], slot)[:, 0]
    return scores, ids


def conditioned(
    chain: Chain,
    embedding: Callable[[Tensor], Tensor],
    logits: Float[Tensor, "batch slots vocab"],
    context: Float[Tensor, "batch slots width"],
    before: Int[Tensor, " batch"],
    exact: Bool[Tensor, "batch slots"],
    pick: Callable[[Tensor, int], Int[Tensor, "batch 1"]],
) -> Float[Tensor, "batch slots vocab"]:
    """The slots' logits, in float32, given the token in the slot before.

    A chain learns which of a slot's candidates it is, if any: they have the same probability
    together as before, and it divides that anew.
    before: the token before the first slot. exact: slots whose logits stay. pick: the token in the
    slot of this number, whose logits are [batch, 1, vocab].
    """
    logits = logits.to(torch.float32, copy=True)

    def divide(scores: Tensor, ids: Tensor, slot: int) -> Tensor:
        own = logits[:, slot : slot + 1]
        mass = own.gather(-1, ids).logsumexp(dim=-1, keepdim=True)
        divided = own.scatter(-1, ids, scores.log_softmax(dim=-1) + mass)
        own.copy_(torch.where(exact[:, slot, None, None], own, divided))
        return pick(own, slot)

    joined(chain, embedding, logits, context, before, divide)
    return logits
