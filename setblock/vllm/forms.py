"""What vLLM's grammars of answers say of drafts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LONG = 16  # characters that few tokens have


def fitted(
    grammar: Any,
    encode: Callable[[str], list[int]],
    ends: Callable[[], int | None],
    held: Sequence[int],
    most: int,
) -> list[int]:
    """A block's tokens as far as its answer's form allows them, with what the form leaves no choice
    of in their places and behind them, at most so many. The first is the answer's already.

    grammar: vLLM's, at the token before; it is left there. encode: a text's tokens.
    ends: the end token, if nothing else may come next.
    """
    tokens: list[int] = []

    def say(some: Sequence[int]) -> bool:
        """Whether the first of these may come next; all are said up to the first that may not."""
        before = len(tokens)
        for token in some[: most - before]:
            if grammar.is_terminated() or not grammar.validate_tokens([token]):
                break
            grammar.accept_tokens("", [token])
            tokens.append(token)
        return len(tokens) > before

    try:
        going = say(held[:1])
        while going and len(tokens) < most and not grammar.is_terminated():
            only = _only(grammar, encode, most)
            drafted = held[len(tokens) : len(tokens) + 1]
            # Where a forced text ends, its last token may be part of a longer one.
            going = say(only[:-1]) or say(drafted) or say(only)
            if not going and (end := ends()) is not None:
                going = say([end])
    finally:
        if tokens:
            grammar.rollback(len(tokens))
    return tokens or list(held[:1])


def _only(grammar: Any, encode: Callable[[str], list[int]], most: int) -> list[int]:
    """Tokens that the form leaves no choice of, as far as vLLM's backend tells of them: about so
    many if there are more.
    """
    if (guidance := getattr(grammar, "ll_matcher", None)) is not None:
        return list(guidance.compute_ff_tokens())
    matcher = getattr(grammar, "matcher", None)
    find = getattr(matcher, "find_jump_forward_string", None)
    try:
        text = find() if find is not None else ""
    except UnicodeDecodeError as error:  # it begins or ends within a character
        text = error.object[: error.start].decode()
    return encode(text[: LONG * (most + 1)]) if text else []


def only_end(grammar: Any, bits: Any, ends: Sequence[int]) -> int | None:
    """The first of these end tokens if nothing but they may come next; None otherwise.

    bits: room for one line of a bitmask.
    """
    grammar.fill_bitmask(bits, 0)
    line = bits[0].numpy().view(np.uint32)
    there = [end for end in ends if end < 32 * len(line) and line[end // 32] >> (end % 32) & 1]
    return there[0] if there and int(np.bitwise_count(line).sum()) == len(there) else None
