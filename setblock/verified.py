"""Lossless decoding: blocks are drafted, and only what next-token decoding would say is kept.

The causal pass over a draft gives the next-token distribution behind each of its tokens. The draft
is accepted up to its first token that next-token decoding would not have produced, and the token
that it would have produced there comes on top. Drafts only decide how many tokens a forward yields,
never which. With lenience below 1 they do: a drafted token that is nearly as likely as the one that
next-token decoding would say stays in its place.

Every forward encodes `[final tokens without keys, draft]` causally. Where drafts come from:

    BranchDrafts   blocks of masks in the same forward, one behind every length of the draft that
                   may be accepted, or what once followed the text's last tokens: one forward a
                   cycle
    SolverDrafts   a block that a solver fills in forwards of its own

Sampling noise belongs to (seed, row, position), so that a draft can guess sampled tokens too.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor, nn

from setblock.chain import Chain, joined
from setblock.decode import Rows, taken
from setblock.grammar import Grammar
from setblock.masks import branches_layout, decoding_layout
from setblock.model import Model
from setblock.sampling import Sampler
from setblock.settings import Settings
from setblock.solvers import Predictions, check_revealed, entropy, revealed_by
from setblock.transfer import to_device, to_host

MOST_MATCHED = 16  # tokens of a text's end that are looked for before it
LIKELY = 16  # tokens that a slot might have, of which one may be allowed by a grammar
WORTH = 0.2  # chance of being accepted from which on a copied token is worth a query
SURE = 0.6  # chance of a copy's first token from which on no branches stand behind the copy


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
            tokens, only = self.grammars[row].fitted(drafted, self.draft.shape[1], likely)
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
        sampler, longest = self.settings.sampler, logits.shape[1] - 1
        logits = self._penalised(logits, self.draft[:, :longest])
        drafts = zip(self.draft.tolist(), self.length.tolist(), strict=True)
        logits, counts = self._allowed(logits, [draft[:length] for draft, length in drafts])
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
        chosen = self.settings.sampler.pick(logits, rows, there, seeds)
        reveal = revealed_by(self.settings.solver, predictions, masked)
        reveal, chosen = to_host(reveal, chosen)
        check_revealed(self.settings.solver, reveal, open_slots)
        self.draft = np.where(reveal, chosen, self.draft)


class BranchDrafts(VerifiedRows):
    """Rows whose next draft is made while the current one is verified, or looked up.

    Behind each accepted length stands a branch: a block of masks that sees the text up to there. It
    does not see the token that verification will put behind the accepted ones; seeded branches
    guess it, by the draft's next likeliest tokens. A branch behind fewer tokens than were accepted
    still has predictions for what comes after these.
    confidence  [batch, width] probability of each drafted token, by whatever drafted it
    runners     [batch, width, seeds] its next likeliest tokens, the mask token where none
    sure        [batch] whether the draft is such a copy that the next one will be a copy as well
    """

    PER_ROW = (*VerifiedRows.PER_ROW, "confidence", "runners", "sure")

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        settings: Settings,
        room: int | None = None,
    ) -> None:
        size = min(settings.block_size, settings.max_new_tokens)
        self.lookup = min(settings.lookup, settings.max_new_tokens - 1)
        width = max(size - 1, self.lookup)
        lengths = width + 1 if settings.branches is None else min(settings.branches, width + 1)
        self.num_lengths = lengths if size > 1 else 0  # blocks of one token draft nothing
        scratch = width + 1 + size * self.num_lengths * (1 + settings.seeds)
        super().__init__(model, prompts, rows, settings, scratch, width, room)
        self.confidence = np.zeros(self.draft.shape, dtype=np.float32)
        self.sure = np.zeros(self.start.shape, dtype=bool)
        self.runners = np.full((*self.draft.shape, settings.seeds), model.mask_token_id)

    def step(self) -> Bool[ndarray, "batch length"]:
        cached = self.cache.lengths
        end = self.start + self.length
        texts, position = self._texts(end)
        layout = decoding_layout(position, end, end)
        accepted, seeds, used = self._plan()
        first = self.start[:, None] + accepted
        last = np.where(used, np.minimum(first + self.block_size, self.limit[:, None]), first)
        size = int((last - first).max()) if used.any() else 0
        queries = texts
        if size:
            masks = np.full((*seeds.shape, size), self.model.mask_token_id)
            masks[:, :, 0] = seeds
            queries = np.concatenate([texts, masks.reshape(len(masks), -1)], axis=1)
            layout = layout.cat(branches_layout(first, last, size))
        offset = np.arange(int(self.length.max()) + 1)
        predicting = self.start[:, None] - 1 + np.minimum(offset, self.length[:, None])
        # Of a branch all slots but the first, where verification itself puts a token.
        drafting = np.arange(texts.shape[1], queries.shape[1])
        drafting = drafting.reshape(-1, max(size, 1))[:, 1:].ravel()
        at = predicting - cached[:, None]
        exact, drafts, context = self._forward(queries, layout, at, drafting)
        self.nfe = self.nfe + 1

        counts, revealed = self._verify(exact, np.ones(len(self.start), dtype=bool))
        new = self._tokens_at((self.start - 1)[:, None])
        before = counts[:, None] - accepted
        blind = (seeds == self.model.mask_token_id) & (before >= 0)
        # How many of a branch's predictions are of use, and one more if it saw the new token. A
        # branch that ends before other accepted tokens has predicted them too.
        worth = np.where(used & blind, np.maximum(size - 1 - before, 0), 0)
        worth = np.where(used & (before == 0) & (seeds == new), size, worth)
        self._redraft(drafts, context, worth, before)
        if self.lookup:
            self._look_up()
        self.fit()
        return revealed

    def fit(self, which: Bool[ndarray, " batch"] | None = None) -> Bool[ndarray, "batch width"]:
        forced = super().fit(which)
        self.confidence[forced] = 1
        self.runners[forced] = self.model.mask_token_id
        return forced

    def _plan(self) -> tuple[ndarray, ndarray, ndarray]:
        """(accepted length, token in the first slot, whether in use) of branches [batch, count].

        The likeliest lengths, as if each drafted token were accepted with the probability that
        drafting gave it, independently of the others; none that would end the row, and none for a
        row with a sure copy.
        """
        offset, length = np.arange(self.draft.shape[1] + 1), self.length[:, None]
        drafted = offset[:-1] < length
        # The chance that so many are accepted, and no more.
        chance = np.ones((len(self.start), len(offset)), dtype=np.float32)
        right = np.where(drafted, self.confidence, 0)
        chance[:, 1:] = right.cumprod(axis=1)
        chance[:, :-1] *= 1 - right
        possible = offset <= np.minimum(length, (self.limit - self.start)[:, None] - 2)
        possible &= ~self.sure[:, None]
        possible[:, 1:] &= ~(self._is_end(self.draft) & drafted)
        chance[~possible] = -1
        accepted = np.argsort(-chance, axis=1, kind="stable")[:, : self.num_lengths]
        used = taken(possible, accepted)
        columns = [(accepted, np.full_like(accepted, self.model.mask_token_id), used)]
        if self.settings.seeds and self.num_lengths:
            at = np.minimum(accepted, self.draft.shape[1] - 1)
            for runner in np.moveaxis(taken(self.runners, at), 2, 0):
                known = used & (accepted < length) & (runner != self.model.mask_token_id)
                columns.append((accepted, runner, known))
        parts = zip(*columns, strict=True)
        accepted, seeds, used = (np.concatenate(part, axis=1) for part in parts)
        needed, seeds = used.any(axis=0), np.where(used, seeds, self.model.mask_token_id)
        return accepted[:, needed], seeds[:, needed], used[:, needed]

    def _redraft(
        self,
        logits: Float[Tensor, "batch slots vocab"],
        context: Float[Tensor, "batch slots width"],
        worth: Int[ndarray, "batch branches"],
        before: Int[ndarray, "batch branches"],
    ) -> None:
        """Take the next draft from each row's best branch; rows without one have no draft.

        logits, context: on the device. context: what a chain's scores depend on, if the model has
        one; it then joins the tokens.
        before: how many accepted tokens stand behind a branch's first position.
        """
        self.length = np.zeros_like(self.length)
        self.likely[:] = self.model.mask_token_id
        if not logits.shape[1]:
            return
        branch = worth.argmax(axis=1)[:, None]
        size = logits.shape[1] // worth.shape[1]
        first = np.maximum(taken(before, branch), 0)
        slots = branch * size + np.minimum(first + np.arange(size), size - 1)
        last = self._tokens_at((self.start - 1)[:, None])[:, 0]
        slots, last, rows, places, seeds = to_device(
            logits.device, slots, last, self.rows, self._places(size), self.seeds
        )
        logits = logits.gather(1, slots[..., None].expand(-1, -1, logits.shape[-1]))
        sampler, joining = self.settings.sampler, None
        if self.model.chain is not None:
            context = context.gather(1, slots[..., None].expand(-1, -1, context.shape[-1]))
            embedding = self.model.network.get_input_embeddings()
            joining = self.model.chain, embedding, context, last
        drafted, at, logits, ids = drafts_of(sampler, logits, rows, places, joining, seeds)
        confidence = logits.softmax(dim=-1).gather(-1, at[..., None])[..., 0]
        runners = drafted[..., None][..., :0]
        if self.settings.seeds:
            # Whatever verification may say here: nothing is left out for being unlikely.
            others = sampler.perturbed(logits, rows, places, seeds, ids, truncate=False)
            others = others.scatter(-1, at[..., None], -torch.inf)
            ranked = others.topk(min(self.settings.seeds, others.shape[-1]), dim=-1)
            runners = ranked.indices if ids is None else ids.gather(-1, ranked.indices)
            runners = runners.masked_fill(ranked.values == -torch.inf, self.model.mask_token_id)
        likely = drafted[..., None][..., :0]
        if self.bounded.any():
            scores = sampler.perturbed(logits, rows, places, seeds, ids, truncate=False)
            likely = scores.topk(min(LIKELY, scores.shape[-1]), dim=-1).indices
            likely = likely if ids is None else ids.gather(-1, likely)
        drafted, confidence, runners, likely = to_host(drafted, confidence, runners, likely)
        self.draft[:, :size], self.confidence[:, :size] = drafted, confidence
        self.runners[:, :size] = self.model.mask_token_id
        self.runners[:, :size, : runners.shape[-1]] = runners
        best = np.minimum(worth.max(axis=1), size)
        self.likely[best > 0, :size, : likely.shape[-1]] = likely[best > 0]
        self.length = np.minimum(self._useful(self.draft), best)

    def _look_up(self) -> None:
        """Copy what followed the text's last tokens before, where that promises more.

        Where the last n tokens stood before, the longest n and the latest place, the next one is
        taken to be the same with the chance of a copy, and so are those behind it, with n growing.
        """
        copied, run = looked_up(self.tokens, self.start, self.lookup)
        run = run[:, None] + np.arange(self.lookup)
        chance = np.where(run[:, :1] > 0, chance_of_copy(run), 0).astype(np.float32)
        reached = chance.cumprod(axis=1)
        offset = np.arange(self.draft.shape[1])
        own = np.where(offset < self.length[:, None], self.confidence, 0).cumprod(axis=1)
        better = reached.sum(axis=1) > own.sum(axis=1)
        self.copied, self.sure = better, better & (chance[:, 0] >= SURE)
        self.draft[better, : self.lookup] = copied[better]
        self.confidence[better, : self.lookup] = chance[better]
        self.runners[better] = self.model.mask_token_id
        length = np.minimum(self._useful(self.draft), (reached >= WORTH).sum(axis=1))
        self.length = np.where(better, length, self.length)


def drafts_of(
    sampler: Sampler,
    logits: Float[Tensor, "batch slots vocab"],
    rows: Int[Tensor, " batch"],
    places: Int[Tensor, "batch slots"],
    joining: tuple[Chain, nn.Module, Tensor, Tensor] | None = None,
    seeds: Int[Tensor, " batch"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(the tokens drafted in these slots, where they stand among the slots' logits; these logits;
    ids that they are of, None for the whole vocabulary). All on the device.

    joining: a chain, the input embedding, [batch, slots, width] what the chain's scores depend on,
    and the token before each row's first slot. It joins the tokens: each slot's given the token
    drafted before it.
    rows, places, seeds: as for `Sampler.pick`.
    """
    ids = None
    if joining is not None:
        chain, embedding, context, before = joining

        def pick(scores: Tensor, ids: Tensor, slot: int) -> Tensor:
            return sampler.pick(scores, rows, places[:, slot : slot + 1], seeds, ids)

        logits, ids = joined(chain, embedding, logits, context, before, pick)
    drafted = sampler.pick(logits, rows, places, seeds, ids)
    at = drafted if ids is None else torch.searchsorted(ids, drafted[..., None])[..., 0]
    return drafted, at, logits, ids


def nearly(
    sampler: Sampler,
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
    return taken(tokens, match[:, None] + np.arange(count) % period), run
