"""Next-token logits as a request's sampling parameters have them, in vLLM's order: its answer's
form, what may be said at all, biases, the least length, penalties, bad words.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from setblock.sampling import penalised, without_ends
from setblock.vllm.requests import NO_PENALTIES, NO_WISHES, Decoding, Wishes


class Scores:
    """Of the requests of a step.

    forms: (which tokens may come, 32 a number, on the device; of each request of the step the first
    line of these, -1 without a form; and how many there are); None without any.
    """

    def __init__(self, state: Any, req_states: Any) -> None:
        self.state, self.req_states = state, req_states
        self.forms: tuple[Tensor, np.ndarray, np.ndarray] | None = None

    def begin(self, input_batch: Any) -> None:
        """A step: what the scheduler says of its forms. That is for the places behind each token of
        a block, see `Blocks.get_grammar_bitmask`, and behind a prompt for one.
        """
        self.forms = None
        if (told := self.state.forms) is None:
            return
        counts = np.maximum(np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1]), 1)
        first, begin = np.full(len(counts), -1), 0
        place_of = {name: place for place, name in enumerate(input_batch.req_ids)}
        for name in told.structured_output_request_ids:
            first[place_of[name]] = begin
            begin += counts[place_of[name]]
        self.forms = self.state.sent(told.grammar_bitmask), first, counts

    def of(
        self, how: Decoding, logits: Tensor, places: np.ndarray, slots: Tensor, last: int,
        starts: Tensor, block: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(these logits within the forms of the requests' answers, which vLLM calls raw; what a
        token is picked from) behind each token of their blocks, the first of which stand at
        `starts`, or without any behind the text before.

        places: of the requests in the step. last: the largest of `starts`, or more.
        """
        raw = self._allowed(logits, places)
        wishes, penalties = how.wishes, how.penalties
        if wishes == NO_WISHES and penalties == NO_PENALTIES:
            return raw, raw
        if block is None:
            text = self.req_states.all_token_ids.gpu[slots, :last].long()
            drafts = text[:, :0]
        else:
            text, drafts = self.text(slots, last, starts, block), block[:, 1:]
            starts = starts + 1
        prompts = self.req_states.prompt_len.gpu[slots].long()
        there = starts[:, None] + torch.arange(logits.shape[1], device=logits.device)
        scores = self._wished(wishes, raw, there - prompts[:, None])
        if penalties != NO_PENALTIES:
            each = self.state.sent(np.array([penalties], dtype=np.float32))
            each = each.expand(len(slots), -1)
            scores = penalised(scores, text, prompts, starts, drafts, each)
        if wishes.unsaid:
            scores = without(wishes.unsaid, scores, text, prompts, there)
        return raw, scores

    def text(self, slots: Tensor, last: int, starts: Tensor, block: Tensor) -> Tensor:
        """What vLLM holds of the texts of these requests, and from `starts` on these tokens.

        last: the largest of `starts`, or more.
        """
        text = self.req_states.all_token_ids.gpu[slots, : last + 1].long()
        text = torch.nn.functional.pad(text, (0, self.state.canvas))
        offset = torch.arange(block.shape[1], device=text.device)
        return text.scatter(1, starts[:, None] + offset, block)

    def _allowed(self, scores: Tensor, places: np.ndarray) -> Tensor:
        """-inf for what a request's form does not allow."""
        if self.forms is None:
            return scores
        bits, first, counts = self.forms
        bounded = np.flatnonzero(first[places] >= 0)
        if not bounded.size:
            return scores
        here, offset = places[bounded, None], np.arange(scores.shape[1])
        lines = bits[self.state.sent(first[here] + np.minimum(offset, counts[here] - 1))]
        bit = torch.arange(32, dtype=torch.int32, device=scores.device)
        allowed = ((lines[..., None] >> bit) & 1).flatten(-2)[..., : scores.shape[-1]].bool()
        some = self.state.sent(bounded)
        return scores.index_copy(0, some, scores[some].masked_fill(~allowed, -torch.inf))

    def _wished(self, wishes: Wishes, scores: Tensor, said: Tensor) -> Tensor:
        """said: how many tokens of the answer stand before each place."""
        if wishes.only:
            kept, ids = torch.full_like(scores, -torch.inf), self._ids(wishes.only)
            scores = kept.index_copy(-1, ids, scores[..., ids])
        if wishes.biases:
            ids, values = zip(*wishes.biases, strict=True)
            added = self.state.sent(np.array(values, dtype=np.float32))
            scores = scores.index_add(-1, self._ids(ids), added.expand(*scores.shape[:-1], -1))
        if wishes.least:
            ends = tuple(end for end in wishes.ends if end < scores.shape[-1])
            scores = without_ends(scores, self._ids(ends), said < wishes.least)
        return scores

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return self.state.sent(np.array(ids, dtype=np.int64))


def without(
    words: tuple[tuple[int, ...], ...], scores: Tensor, text: Tensor, prompts: Tensor, there: Tensor
) -> Tensor:
    """-inf for what would end one of these words, behind the rest of it.

    text: known before each of the places [requests, places] that `there` tells of; the answers
    begin at `prompts`.
    """
    for *before, last in words:
        ends = torch.ones_like(there, dtype=torch.bool)
        for back, token in enumerate(reversed(before), start=1):
            at = there - back
            ends &= (at >= prompts[:, None]) & (text.gather(1, at.clamp(min=0)) == token)
        barred = torch.where(ends, -torch.inf, scores[..., last])
        scores = scores.index_copy(
            -1, torch.tensor([last], device=scores.device), barred[..., None]
        )
    return scores
