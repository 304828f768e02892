"""Copies: what followed a text's last tokens before is likely to follow them again."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

MOST_MATCHED = 16  # tokens of a text's end that are looked for before it


def chance_of_copy(matched: Any) -> Any:
    """That the next token is the one copied, where so many tokens before it matched; of arrays."""
    return matched / (matched + 2)


def looked_up(
    tokens: Int[ndarray, "batch length"], end: Int[ndarray, " batch"], count: int
) -> tuple[Int[ndarray, "batch count"], Int[ndarray, " batch"]]:
    """(the tokens behind the best match of each text's end, tokens that match there, 0 for none).

    end: where each row's text ends. The best match is the longest, up to MOST_MATCHED tokens, and
    of these the latest. What was copied beyond the text's end is copied on.
    """
    match, run = np.zeros_like(end), np.zeros_like(end)
    for row, (line, last) in enumerate(zip(tokens, end.tolist(), strict=True)):
        # Places behind a match of `matched` tokens, in ascending order.
        places, matched = np.arange(1, last), 0
        while matched < MOST_MATCHED:
            same = line[places - 1 - matched] == line[last - 1 - matched]
            longer = places[same & (places > matched)]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        if matched:
            match[row], run[row] = places[-1], matched
    period = np.maximum(end - match, 1)[:, None]
    place = match[:, None] + np.arange(count) % period
    return tokens[np.arange(len(tokens))[:, None], place], run


def looked_up_there(
    tokens: Int[Tensor, "batch length"], end: Int[Tensor, " batch"], count: int
) -> tuple[Int[Tensor, "batch count"], Int[Tensor, " batch"]]:
    """As `looked_up`, on the tokens' device and without a wait for it: (the tokens behind the best
    match of each text's end, tokens that match there, 0 for none).

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


def backing(
    text: Int[Tensor, "batch length"],
    end: Int[Tensor, " batch"],
    drafted: Int[Tensor, "batch slots"],
    known: Int[Tensor, " batch"],
) -> Float[Tensor, "batch slots"]:
    """The chance that a copy is right about each slot, where it has the token drafted there; 0
    elsewhere. Without a wait for the device.

    end: where each row's text ends. known: how many of the slots, the first ones, are in the text.
    A copy that disagrees about a slot says nothing about those behind it.
    """
    copied, run = looked_up_there(text, end, drafted.shape[1])
    behind = torch.arange(drafted.shape[1], device=text.device) - known[:, None]
    there = behind >= 0
    behind = behind.clamp(min=0)
    same = ((copied.gather(1, behind) == drafted) | ~there).long().cumprod(dim=1).bool()
    chance = chance_of_copy((run[:, None] + behind).float())
    return torch.where(same & there & (run > 0)[:, None], chance, 0.0)
