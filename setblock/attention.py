"""Attention of a few query tokens over a cache, where several query heads share keys and values.

transformers' own copies keys and values once for each query head wherever a mask is given to more
than one token. A block has a mask, and its copy is the whole cache, in every layer: here none is
made. On a GPU a long cache of one row is looked at in pieces. It is torch's
scaled_dot_product_attention, or a kernel of it, all the same; but for networks whose scores are
capped or have sinks, which that knows nothing of.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from setblock.unpadded import under_way

NAME = "setblock"  # for set_attn_implementation
# Queries of a key that are taken at once, on a CPU tokens; longer forwards are bound by arithmetic.
MOST_ON_CPU, MOST = 2048, 2048
# (slots of a cache, the pieces that it is cut into at most from so many on), the first that fits.
PIECES = ((4096, 16), (1024, 8))
MOST_BLOCKS = 256  # pieces of work; an H100 has 132 processors for them
QUERIES = 64  # of a piece of work
# A cache that is cut has a multiple of so many slots, as those of graphs have: pieces are aligned
# then, and torch.compile meets few kinds.
GRAIN = 512
MOST_SCORES = 2**26  # of a layer that exist at a time, where they are written out


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """[batch, length, heads, width] of query [batch, heads, length, width] and key and value
    [batch, shared heads, cache, width]; a mask [batch, 1, length, cache] is True where seen, or
    `bias_of` one.

    more: softcap and s_aux are those of `scored`. What is none of its business goes to
    transformers' own: training on a GPU or with dropout, long forwards, other masks.
    Queries of a line of rows, [1, heads, tokens, width], are parted into its rows, and what becomes
    of them is a line again.
    """
    line = under_way() if query.device.type == "cpu" else None  # elsewhere there are none
    if line is None:
        return _attended(module, query, key, value, attention_mask, scaling, **more), None
    result = _attended(module, line.rows(query), key, value, attention_mask, scaling, **more)
    return line.line(result), None


def _attended(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    **more: Any,
) -> Tensor:
    """What `attend` says of rows."""
    softcap, sinks = more.pop("softcap", None), more.pop("s_aux", None)
    if softcap is not None or sinks is not None:
        if attention_mask is None and query.shape[2] > 1 and module.is_causal:
            shape = query.shape[2], key.shape[2]
            attention_mask = torch.ones(1, 1, *shape, dtype=torch.bool, device=query.device).tril()
        dropout = more.get("dropout", 0.0)
        given = query, key, value, attention_mask, scaling, softcap, sinks, dropout
        return scored(*given).transpose(1, 2).contiguous()
    _, heads, length, _ = query.shape
    shared, on_cpu = key.shape[1], query.device.type == "cpu"
    lines = 0 if attention_mask is None else attention_mask.shape[2]
    known = attention_mask is not None and attention_mask.shape[1] == 1
    ready = known and 1 < length < lines == heads // shared * length
    if not ready and (
        heads == shared
        or (length > MOST_ON_CPU if on_cpu else heads // shared * length > MOST)
        or not (known or (attention_mask is None and length == 1))
        or (torch.is_grad_enabled() and not on_cpu)
        or more.get("position_bias") is not None
        or more.get("dropout")
    ):
        if attention_mask is not None and lines > length:  # of heads that this layer does not have
            attention_mask = attention_mask[:, :, :length]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )[0]
    # Elsewhere its kernels with a mask are slow, and none has a backward pass.
    if length > 1 and on_cpu and not ready and not torch.is_grad_enabled():
        result = scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scaling, enable_gqa=True
        )
        return result.transpose(1, 2).contiguous()
    count = 1
    if attention_mask is not None and can_be_cut(query, key, value):
        count = num_pieces(shared, heads // shared * length, key.shape[2])
    if attention_mask is None or count == 1:
        result = folded(query, key, value, attention_mask, scaling)
    else:
        result = in_pieces(query, key, value, attention_mask, scaling, count)
    return result.transpose(1, 2).contiguous()


def bias_of(mask: Tensor, heads: int, shared: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores where a mask [batch, 1, length, cache] is True where seen, for the
    queries of all heads that share a key: [batch, 1, heads / shared * length, cache], or of one
    query [batch, 1, 1, cache].

    Made once for all layers of a forward, each of which would make it anew of the mask.
    """
    # Not minus infinity, of which a piece of a cache that is all unseen would make no number.
    unseen = max(torch.finfo(dtype).min / 2, -1e30)
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, unseen)
    return bias.repeat(1, 1, heads // shared, 1) if mask.shape[2] > 1 else bias


def folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention where query heads that share a key are queries of one head, [batch, heads, length,
    width].

    mask: a mask or `bias_of` one.
    """
    batch, heads, length, width = query.shape
    shared = key.shape[1]
    if mask is not None and 1 < mask.shape[2] == length:
        mask = mask.repeat(1, 1, heads // shared, 1)
    query = query.reshape(batch, shared, -1, width)
    result = scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return result.reshape(batch, heads, length, -1)


def scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """As `folded`, with its scores written out, a part of the queries at a time if there are many.

    softcap: scores are kept within -softcap and softcap, smoothly. sinks: [heads], a score more in
    each softmax, of a key that has no value.
    """
    batch, heads, length, width = query.shape
    shared, seen = key.shape[1:3]
    most = max(1, MOST_SCORES // (batch * heads * seen))
    if length > most and (mask is None or mask.shape[2] == length):
        parts = [slice(first, first + most) for first in range(0, length, most)]
        masks = [None if mask is None else mask[:, :, part] for part in parts]
        rest = scaling, softcap, sinks, dropout
        each = [
            scored(query[:, :, part], key, value, one, *rest)
            for part, one in zip(parts, masks, strict=True)
        ]
        return torch.cat(each, dim=2)
    folds = query.reshape(batch, shared, -1, width)
    scores = (folds @ key.mT).float() * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is not None:
        if 1 < mask.shape[2] == length:
            mask = mask.repeat(1, 1, heads // shared, 1)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    if sinks is not None:
        each = sinks.float().repeat_interleave(length).view(1, shared, -1, 1)
        scores = torch.cat([scores, each.expand(batch, -1, -1, -1)], dim=-1)
    weights = torch.nn.functional.dropout(scores.softmax(dim=-1)[..., :seen], dropout)
    result = weights.to(value.dtype) @ value
    return result.reshape(batch, heads, length, -1)


def can_be_cut(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a kernel of a GPU takes pieces of this cache, which is one row's.

    It is called by its name: what scaled_dot_product_attention does where it is not allowed, or has
    no such kernel, or under autocast, it does by itself.
    """
    return (
        query.device.type == "cuda"
        and len(key) == 1
        and query.dtype == key.dtype == value.dtype
        and not torch.is_autocast_enabled("cuda")
        and query.shape[3] % 8 == value.shape[3] % 8 == 0
        and kernel_is_there(query.dtype == torch.bfloat16)
    )


@torch.compiler.assume_constant_result
def kernel_is_there(bfloat16: bool) -> bool:
    """Whether torch's kernel for masks is allowed, and made for such numbers on this GPU."""
    allowed = torch.backends.cuda.mem_efficient_sdp_enabled()
    return allowed and (not bfloat16 or torch.cuda.is_bf16_supported(False))


def num_pieces(shared: int, queries: int, seen: int) -> int:
    """Pieces of one row's cache of so many slots that are looked at side by side.

    queries: of each of `shared` heads.
    The kernels that take a mask go through a cache with one of a GPU's processors for each head of
    a row and QUERIES of its queries. Of one row that leaves most of a large GPU idle.
    """
    if seen % GRAIN:
        return 1
    blocks = shared * -(-queries // QUERIES)
    count = next((count for slots, count in PIECES if seen >= slots), 1)
    while count > 1 and count * blocks > MOST_BLOCKS:
        count //= 2
    return count


def in_pieces(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, count: int
) -> Tensor:
    """As `folded`, of one row whose cache is `count` rows of as many slots each; what they say is
    joined by how much of the whole softmax each of them has.
    """
    _, heads, length, width = query.shape
    shared, size = key.shape[1], key.shape[2] // count
    bias = bias_of(mask, heads, shared, query.dtype) if mask.dtype == torch.bool else mask
    key, value = (one[0].unflatten(1, (count, size)).transpose(0, 1) for one in (key, value))
    query = query.reshape(1, shared, -1, width).expand(count, -1, -1, -1)
    rows = query.shape[2]
    bias = bias[0].unflatten(2, (count, size)).permute(2, 0, 1, 3).expand(count, shared, rows, size)
    result, logsumexp = efficient(query, key, value, bias, scaling)
    share = logsumexp[:, :, :rows].softmax(dim=0)[..., None]
    return (result * share).sum(dim=0).to(query.dtype).reshape(1, heads, length, -1)


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """(what torch's kernel for masks says, the log of each softmax's sum)."""
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, True, scale=scaling)[:2]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
