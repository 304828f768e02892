"""Products of a few tokens with a layer's weight on a GPU, by a kernel of Triton's.

Such a product is a reading of the weight, which takes as long for one token as for sixteen. The
library's kernels for one token and for a few are different ones, and the latter take longer; here
both are the same, so that a token's product does not depend on how many others there are either.
"""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

FEW = 32  # tokens
# Of a tile of the weight: outputs, inputs; warps that work on it, tiles on their way at a time.
OUTPUTS, INPUTS, WARPS, STAGES = 16, 256, 4, 4


@triton.jit(do_not_specialize=["tokens"])  # one kernel for one token and for several
def _product(
    hidden,
    weight,
    bias,
    result,
    tokens,
    width,
    depth: tl.constexpr,
    has_bias: tl.constexpr,
    most: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """result [tokens, width] = hidden [tokens, depth] @ weight [width, depth].T + bias; so many
    outputs a program.
    """
    column = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row = tl.arange(0, most)
    place = tl.arange(0, inputs)
    there, inside = (row < tokens)[:, None], column < width
    total = tl.zeros((most, outputs), tl.float32)
    for first in range(0, depth, inputs):
        within = first + place < depth
        part = tl.load(
            weight + column[:, None].to(tl.int64) * depth + (first + place)[None, :],
            mask=inside[:, None] & within[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        given = tl.load(
            hidden + row[:, None] * depth + (first + place)[None, :],
            mask=there & within[None, :],
            other=0.0,
            eviction_policy="evict_last",
        )
        total = tl.dot(given, part.T, total)
    if has_bias:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = result + row[:, None] * width + column[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=there & inside[None, :])


def linear(
    hidden: Float[Tensor, "... depth"],
    weight: Float[Tensor, "width depth"],
    bias: Float[Tensor, " width"] | None,
) -> Float[Tensor, "... width"]:
    """torch.nn.functional.linear of at most FEW tokens."""
    width, depth = weight.shape
    flat = hidden.reshape(-1, depth).contiguous()
    result = flat.new_empty(len(flat), width)
    most = 16 if len(flat) <= 16 else FEW
    _product[(triton.cdiv(width, OUTPUTS),)](
        flat,
        weight,
        weight if bias is None else bias,
        result,
        len(flat),
        width,
        depth,
        bias is not None,
        most,
        OUTPUTS,
        INPUTS,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return result.view(*hidden.shape[:-1], width)
