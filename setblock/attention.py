"""Attention of a few query tokens over a cache, where several query heads share keys and values.

transformers' own copies keys and values once for each query head wherever a mask is given to more
than one token. A block has a mask, and its copy is the whole cache, in every layer: here none is
made. It is scaled_dot_product_attention all the same.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "setblock"  # for set_attn_implementation
# Query tokens of a forward; a longer one is bound by arithmetic.
MOST_ON_CPU, MOST = 2048, 64


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
    [batch, shared heads, cache, width]; a mask [batch, 1, length, cache] is True where seen.

    What is none of its business goes to transformers' own: training on a GPU or with dropout, long
    forwards, other masks.
    """
    _, heads, length, _ = query.shape
    known = attention_mask is not None and attention_mask.shape[1] == 1
    if (
        heads == key.shape[1]
        or length > (MOST_ON_CPU if query.device.type == "cpu" else MOST)
        or not (known or (attention_mask is None and length == 1))
        or (torch.is_grad_enabled() and query.device.type != "cpu")
        or more.get("position_bias") is not None
        or more.get("dropout")
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )
    # Elsewhere its kernels with a mask are slow, and none has a backward pass.
    if length > 1 and query.device.type == "cpu" and not torch.is_grad_enabled():
        result = scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scaling, enable_gqa=True
        )
    else:
        result = folded(query, key, value, attention_mask, scaling)
    return result.transpose(1, 2).contiguous(), None


def folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention where query heads that share a key are queries of one head, [batch, heads, length,
    width].
    """
    batch, heads, length, width = query.shape
    shared = key.shape[1]
    if mask is not None and length > 1:
        mask = mask.repeat(1, 1, heads // shared, 1)
    query = query.reshape(batch, shared, -1, width)
    result = scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return result.reshape(batch, heads, length, -1)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
