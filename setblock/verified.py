"""Lossless decoding: blocks are drafted, and only what next-token decoding would say is kept.

The causal pass over a draft gives the next-token distribution behind each of its tokens. The draft
is accepted up to its first token that next-token decoding would not have produced, and the token
that it would have produced there comes on top. Drafts only decide how many tokens a forward yields,
never which. With lenience below 1 they do: a drafted token that is nearly as likely as the one that
next-token decoding would say stays in its place.

Every forward encodes `[final tokens without keys, draft]` causally. Where drafts come from:

    branches.BranchDrafts   blocks of masks in the same forward, one behind every length of the
                            draft that may be accepted, or what once followed the text's last
                            tokens: one forward a cycle
    SolverDrafts            a block that a solver fills in forwards of its own

Sampling noise belongs to (seed, row, position), so that a draft can guess sampled tokens too.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from setblock.grammar import Grammar
from setblock.masks import decoding_layout
from setblock.model import Model
from setblock.sampling import Sampler, Samplers
from setblock.settings import Settings
from setblock.solvers import Predictions, check_revealed, entropy, revealed_by
from setblock.state import Rows, taken
from setblock.transfer import to_device, to_host

LIKELY = 16  # tokens that a slot might have, of which one may be allowed by a grammar


class VerifiedRows(Rows):
    """Rows with a draft.

    draft   [batch, width] tokens proposed for `start` and after, the mask token where none
    length  [batch] how many of them there are; never more than could be of use
    copied  [batch] whether they were copied from earlier in the text
    likely  [batch, width, LIKELY] where answers follow a grammar, the tokens that the model finds
            likeliest in a draft's places; the mask token where none
    All final tokens but the last are in the cache; of the prompt none before the first forward.
    """

    PER_ROW = (*Rows.PER_ROW, "draft", "length", "copied", "likely")

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        settings: Settings,
        scratch: int,
        width: int,
        room: int | None = None,
    ) -> None:
        """width: tokens of a draft at most."""
        super().__init__(model, prompts, rows, settings, scratch, room)
        self.block_size = min(settings.block_size, settings.max_new_tokens)
        self.draft = np.full((len(prompts), width), model.mask_token_id)
        self.length = np.zeros_like(self.start)
        self.copied = np.zeros(self.start.shape, dtype=bool)
        self.likely = np.full((*self.draft.shape, LIKELY), model.mask_token_id)

    def follow(self, grammars: Sequence[Grammar | None]) -> None:
        super().follow(grammars)
        self.fit()

    def fit(self, which: Bool[ndarray, " batch"] | None = None) -> Bool[ndarray, "batch width"]:
        """Fit the drafts of these rows, or of all, to their grammars, if any: with the likeliest of
        a place instead of a token that is not allowed, cut where none of them is, and with those in
        place that have no alternative; True at the latter.
        """
        forced = np.zeros(self.draft.shape, dtype=bool)
        bounded = self.bounded if which is None else self.bounded & which
        for row in bounded.nonzero()[0].tolist():
            drafted = self.draft[row, : self.length[row]].tolist()
            likely = self.likely[row].tolist()
            try:
                tokens, only = self.grammars[row].fitted(drafted, self.draft.shape[1], likely)
            except Exception as error:  # of this row alone
                self.errors[row] = error
                continue
            self.draft[row, : len(tokens)], forced[row, : len(only)] = tokens, only
            self.length[row] = min(len(tokens), int(self._useful(self.draft)[row]))
        return forced

    def _texts(self, end: Int[ndarray, " batch"]) -> tuple[ndarray, ndarray]:
        """(tokens, positions) of each row's text without keys, its draft included, up to `end`."""
        cached = self.cache.lengths
        width = int((end - cached).max())
        position = cached[:, None] + np.arange(width)
        tokens = self._tokens_at(position)
        if self.draft.shape[1]:
            offset = position - self.start[:, None]
            drafted = taken(self.draft, np.minimum(np.maximum(offset, 0), self.draft.shape[1] - 1))
            tokens = np.where(offset >= 0, drafted, tokens)
        # Padding is the same whatever was drafted before.
        return np.where(position < end[:, None], tokens, self.model.mask_token_id), position

    def _places(self, count: int) -> Int[ndarray, "batch count"]:
        """The positions start, start + 1, ..."""
        return self.start[:, None] + np.arange(count)

    def _verify(
        self, logits: Float[Tensor, "batch verified vocab"], verifying: Bool[ndarray, " batch"]
    ) -> tuple[Int[ndarray, " batch"], Bool[ndarray, "batch length"]]:
        """(accepted tokens of each row's draft, positions that are final now).

        logits: next-token ones for the positions start, start + 1, ..., one more than the longest
        draft.
        Effects: final tokens and `start`; keys of accepted tokens stay in the cache.
        """
        longest = logits.shape[1] - 1
        places = self._places(longest + 1)
        said, nats, likely = self._said(logits, places)
        offset = np.arange(longest + 1)
        same = (said[:, :-1] == self.draft[:, :longest]) & (offset[:-1] < self.length[:, None])
        accepted = same.cumprod(axis=1).sum(axis=1)
        final = (offset <= accepted[:, None]) & verifying[:, None]
        revealed = self._reveal(final, places, said, nats, likely)
        kept = np.where(verifying, self.start - self.cache.lengths + accepted, 0)
        self.cache.keep(kept)
        self.start = np.where(verifying, self.start + accepted + 1, self.start)
        return accepted, revealed

    def _said(
        self, logits: Float[Tensor, "batch verified vocab"], places: Int[ndarray, "batch verified"]
    ) -> tuple[ndarray, ndarray, list[ndarray]]:
        """(the tokens of next-token decoding, or with lenience drafted ones that are nearly as
        likely; the entropies of their distributions; what `_likely` tells of them), on the host.

        With lenience l a drafted token takes the place of another if its probability, sampling's
        temperature and noise included, is at least l times that one's. Two things stay as they are:
        where either of the two is an end token, and drafts that were copied: those are nearly right
        wherever a text could repeat itself, and it would. Stop texts are found in what was said.
        Source: arXiv:2211.17192, "Lenience" in its appendix, for argmax.
        """
        sampler, longest = self.sampler, logits.shape[1] - 1
        logits, counts = self._next(logits, self.draft[:, :longest], self.length)
        self.length = np.minimum(self.length, counts - 1)  # as far as something may follow it
        rows, there, seeds = map(torch.from_numpy, (self.rows, places, self.seeds))
        exact, nats = sampler.pick(logits, rows, there, seeds), entropy(logits)
        likely = self._likely(logits, exact)
        if self.settings.lenience == 1 or not longest:
            exact, nats, *likely = to_host(exact, nats, *likely)
            return exact, nats, likely
        draft = self.draft[:, :longest]
        [drafted] = to_device(logits.device, draft)
        before, lenience = there[:, :-1], self.settings.lenience
        near = nearly(sampler, logits[:, :-1], rows, before, drafted, lenience, seeds)
        others = self._likely(logits[:, :-1], drafted)[:1]
        exact, nats, near, *told = to_host(exact, nats, near, *likely, *others)
        own = exact[:, :-1]
        near = near & (np.arange(longest) < self.length[:, None])
        near &= ~self.copied[:, None]
        near &= ~self._is_end(draft) & ~self._is_end(own)
        said = np.concatenate([np.where(near, draft, own), exact[:, -1:]], axis=1)
        if told:
            logprob, top, top_logprob, of_drafts = told
            logprob[:, :-1] = np.where(near, of_drafts, logprob[:, :-1])
            told = [logprob, top, top_logprob]
        return said, nats, told

    def _useful(self, draft: Int[ndarray, "batch draft"]) -> Int[ndarray, " batch"]:
        """How many tokens of a draft behind `start` are worth a query.

        The token after the last accepted one is free, and nothing comes behind an EOS.
        """
        room = np.maximum(self.limit - self.start - 1, 0)
        ends = self._is_end(draft)
        before_end = (ends.cumsum(axis=1) - ends == 0).sum(axis=1)  # that EOS included
        return np.minimum(room, before_end)


class SolverDrafts(VerifiedRows):
    """Rows whose drafts a solver makes.

    The block is [last final token, masks]; its forwards leave nothing in the cache.
    drafting  [batch] whether the row's next forward drafts
    steps     [batch] forwards that the row's block has had
    """

    PER_ROW = (*VerifiedRows.PER_ROW, "drafting", "steps")

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        settings: Settings,
        room: int | None = None,
    ) -> None:
        size = min(settings.block_size, settings.max_new_tokens)
        super().__init__(model, prompts, rows, settings, size, size - 1, room)
        self.drafting = np.zeros(self.start.shape, dtype=bool)
        self.steps = np.zeros_like(self.start)

    def step(self) -> Bool[ndarray, "batch length"]:
        cached = self.cache.lengths
        drafting, verifying = self.drafting, ~self.drafting
        block_end = np.minimum(self.start + self.block_size - 1, self.limit)
        end = np.where(drafting, block_end, self.start + self.length)
        queries, position = self._texts(end)
        layout = decoding_layout(position, np.where(drafting, cached, end), end)
        # A mask predicts itself, a clean token the next one.
        count = np.where(drafting, self.block_size - 1, self.length + 1)
        predicting = (self.start - verifying)[:, None] + np.arange(int(count.max()))
        predicting = np.minimum(predicting, (end - 1)[:, None])
        logits, _, context = self._forward(queries, layout, predicting - cached[:, None])
        self.nfe = self.nfe + 1

        if drafting.any():
            size = self.block_size - 1
            own = logits[:, :size].clone() if verifying.any() else logits[:, :size]
            self._fill(own, context[:, :size])  # a solver of one's own may change them in place
        longest = int(np.where(verifying, self.length, 0).max())
        _, revealed = self._verify(logits[:, : longest + 1], verifying)
        self.draft = np.where(verifying[:, None], self.model.mask_token_id, self.draft)
        self.steps = np.where(drafting, self.steps + 1, 0)
        self.drafting = self._open().any(axis=1)
        done = drafting & ~self.drafting
        self.length = np.where(done, self._useful(self.draft), 0)
        self.fit(done)
        return revealed

    def _open(self) -> Bool[ndarray, "batch draft"]:
        """Masked slots of the draft that are worth a forward."""
        offset = np.arange(self.draft.shape[1])
        masked = self.draft == self.model.mask_token_id
        return masked & (offset < self._useful(self.draft)[:, None])

    def _fill(
        self,
        logits: Float[Tensor, "batch draft vocab"],
        context: Float[Tensor, "batch draft width"],
    ) -> None:
        """What the solver reveals in the blocks of rows that draft."""
        places = self._places(self.draft.shape[1])
        logits = self._chained(logits, context, places, self.draft)
        open_slots = self._open() & self.drafting[:, None]
        [masked] = to_device(logits.device, open_slots)
        predictions = Predictions(logits, places - self.prompt_end[:, None], self.steps)
        rows, there, seeds = map(torch.from_numpy, (self.rows, places, self.seeds))
        chosen = self.sampler.pick(logits, rows, there, seeds)
        reveal = revealed_by(self.settings.solver, predictions, masked)
        reveal, chosen = to_host(reveal, chosen)
        check_revealed(self.settings.solver, reveal, open_slots)
        self.draft = np.where(reveal, chosen, self.draft)


def nearly(
    sampler: Sampler | Samplers,
    logits: Float[Tensor, "batch draft vocab"],
    rows: Int[Tensor, " batch"],
    places: Int[Tensor, "batch draft"],
    drafted: Int[Tensor, "batch draft"],
    lenience: float | int,
    seeds: Int[Tensor, " batch"] | None = None,
) -> Bool[Tensor, "batch draft"]:
    """Which drafted tokens are at least `lenience` times as likely as the ones that are picked,
    sampling's temperature and noise included. Source: see `VerifiedRows._said`.
    """
    scores = sampler.perturbed(logits, rows, places, seeds).float()
    least = scores.amax(dim=-1) + math.log(lenience)
    return scores.gather(-1, drafted[..., None])[..., 0] >= least
