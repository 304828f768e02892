"""Set block decoding and next-token decoding on one code path.

`DecodeState` adds stages to `Rows`: `step()` runs one forward for all of them. A text is final
before `start`; in mode "sbd" a block of `block_size` slots stands behind it, in mode "ntp" nothing.
A forward takes the final tokens that are not in the cache yet (the prompt, the block just finished,
or the last token), then the block; the keys of the former are kept, the block's are not.
Source: arXiv:2509.04185 algorithms 2 and 3; of blocks that slide, arXiv:2509.24007.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from setblock.masks import decoding_layout
from setblock.model import Model
from setblock.settings import Settings
from setblock.solvers import Certain, Predictions, check_revealed, revealed_by
from setblock.state import Rows
from setblock.transfer import to_device, to_host


class DecodeState(Rows):
    """Rows in modes "sbd" and "ntp".

    by_token_until  [batch] positions before this are decoded token by token: all in mode "ntp", in
                    mode "sbd" the rest of a block that fell back.
    steps           [batch] forwards that the row's block has had
    """

    PER_ROW = (*Rows.PER_ROW, "by_token_until", "steps")

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        settings: Settings,
        room: int | None = None,
    ) -> None:
        self.block_size = settings.block_size if settings.mode == "sbd" else 0
        # The last forward of a row starts k tokens before the end and may hold 2k, to go with
        # another row's.
        super().__init__(model, prompts, rows, settings, self.block_size, room)
        self.by_token_until = np.zeros_like(self.start) if self.block_size else self.limit + 1
        self.steps = np.zeros_like(self.start)

    def step(self) -> Bool[ndarray, "batch length"]:
        cached, sliding = self.cache.lengths, self.settings.slide
        prefill = (self.nfe == 0) & (cached < self.prompt_end) & (not sliding)
        by_token = self.start < self.by_token_until
        end = np.where(prefill | by_token, self.start, self.start + self.block_size)
        end = np.minimum(end, self.limit) if sliding else end
        num_queries = int((end - cached).max())
        position = cached[:, None] + np.arange(num_queries)
        layout = decoding_layout(position, self.start, end)
        queries = self._tokens_at(position)
        slots = self.start[:, None] + np.arange(max(self.block_size, 1))
        # A masked slot predicts itself, no shift; the last final token predicts the next one.
        exact = (by_token | self.settings.seeds_blocks) & (cached < self.start)
        predicting = slots.copy()
        predicting[:, 0] -= exact
        wanted = np.maximum(np.minimum(predicting, (end - 1)[:, None]) - cached[:, None], 0)
        logits, _, context = self._forward(queries, layout, wanted)
        self.cache.keep(self.start - cached)

        first = np.zeros(slots.shape, dtype=bool)
        first[:, 0] = exact  # slots whose next-token distribution is known
        blocks = ~(prefill | by_token)
        yields = blocks | exact
        self.nfe = self.nfe + yields
        masked = self._eligible(slots) & yields[:, None]
        reveal = masked & first
        rows, there, seeds = map(torch.from_numpy, (self.rows, slots, self.seeds))
        if blocks.any():
            logits = self._chained(logits, context, slots, self._tokens_at(slots), first)
        else:
            logits, _ = self._next(logits, self.tokens[:, :0], np.zeros_like(self.start))
        predictions = Predictions(logits, slots - self.prompt_end[:, None], self.steps)
        # A rule may change in place what it is given.
        chosen = self.sampler.pick(logits, rows, there, seeds)
        nats = predictions.entropy.clone()
        likely = self._likely(logits, chosen)
        if blocks.any():
            open_slots = masked & ~first & blocks[:, None]
            if self.settings.fallback is not None:
                [known] = to_host(nats)
                open_slots = self._fall_back(known, open_slots, self.settings.fallback)
            certain = reveal & blocks[:, None]
            candidates, known = to_device(logits.device, open_slots | certain, certain)
            told = Certain(predictions, known) if certain.any() else predictions
            solved = revealed_by(self.settings.solver, told, candidates)
            chosen, nats, solved, *likely = to_host(chosen, nats, solved, *likely)
            check_revealed(self.settings.solver, solved, open_slots | certain, reveal)
            reveal |= solved
        else:
            chosen, nats, *likely = to_host(chosen, nats, *likely)
        revealed, begun = self._reveal(reveal, slots, chosen, nats, likely), self.start
        self._move_on(slots, yields)
        self.steps = np.where(self.start == begun, self.steps + blocks, 0)
        return revealed

    def _fall_back(
        self,
        nats: Float[ndarray, "batch slots"],
        open_slots: Bool[ndarray, "batch slots"],
        bound: float | int,
    ) -> Bool[ndarray, "batch slots"]:
        """The slots that the solver may still choose from; a collapsed block has none."""
        sure = open_slots & (nats <= bound)
        collapsed = np.any(open_slots, axis=1) & ~np.any(sure, axis=1)
        until = self.start + self.block_size
        self.by_token_until = np.where(collapsed, until, self.by_token_until)
        return open_slots & ~collapsed[:, None]

    def _move_on(self, slots: Int[ndarray, "batch slots"], yields: Bool[ndarray, " batch"]) -> None:
        """Move `start` behind a finished block, and behind each final token where blocks slide or
        decoding is token by token.
        """
        if not self.block_size:  # every row has its next one
            self.start = self.start + yields
            return
        known = self._tokens_at(slots) != self.model.mask_token_id
        if self.settings.slide:
            self.start = self.start + known.cumprod(axis=1).sum(axis=1)
            return
        finished = yields & ~self._eligible(slots).any(axis=1)
        by_token = self.start < self.by_token_until
        known &= slots < np.maximum(self.by_token_until, self.start + 1)[:, None]
        run = known.cumprod(axis=1).sum(axis=1)
        step = np.where(by_token, run, np.where(finished, slots.shape[1], 0))
        self.start = self.start + step
        # The next token's distribution comes from the last final one, which must be a query.
        behind = (self.start < self.by_token_until) & (self.cache.lengths == self.start)
        if behind.any():
            self.cache.forget(behind.astype(np.int64))

    def _eligible(self, slots: Int[ndarray, "batch slots"]) -> Bool[ndarray, "batch slots"]:
        """Masked slots worth a forward: before the limit and before any EOS of the block."""
        tokens = self._tokens_at(slots)
        past_eos = np.logical_or.accumulate(self._is_end(tokens), axis=1)
        return (tokens == self.model.mask_token_id) & (slots < self.limit[:, None]) & ~past_eos
