"""What followed a text's last tokens before, looked up on the device."""

import torch
from jaxtyping import Int
from torch import Tensor

from setblock.branches import MOST_MATCHED


def looked_up(
    tokens: Int[Tensor, "batch length"], end: Int[Tensor, " batch"], count: int
) -> tuple[Int[Tensor, "batch count"], Int[Tensor, " batch"]]:
    """As `branches.looked_up`, without a wait for the device: (the tokens behind the best match of
    each text's end, tokens that match there, 0 for none).

    end: where each row's text ends.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)  # the one behind a match
    run = torch.zeros_like(tokens, dtype=torch.int8)
    alive, short = place < end[:, None], tokens.int()
    for matched in range(MOST_MATCHED):
        last = (end - 1 - matched).clamp(min=0)[:, None]
        alive[:, : matched + 1] = False
        # The token so far before each place.
        alive[:, matched + 1 :] &= short[:, : -matched - 1] == short.gather(1, last)
        if alive.device.type == "cpu" and not alive.any():  # elsewhere asking is a wait
            break
        run += alive
    # The longest match, and of these the latest.
    best = (run.long() * tokens.shape[1] + place).argmax(dim=1, keepdim=True)
    run = run.gather(1, best)[:, 0].long()
    match = torch.where(run > 0, best[:, 0], 0)
    period = (end - match).clamp(min=1)[:, None]
    copied = match[:, None] + torch.arange(count, device=tokens.device) % period
    return tokens.gather(1, copied), run
