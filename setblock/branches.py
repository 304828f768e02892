"""Drafts made while others are verified, in one forward a cycle, and copies of earlier text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor, nn

from setblock.chain import Chain, joined
from setblock.masks import branches_layout, decoding_layout
from setblock.model import Model
from setblock.sampling import Sampler, Samplers
from setblock.settings import Settings
from setblock.state import taken
from setblock.transfer import to_device, to_host
from setblock.verified import VerifiedRows

MOST_MATCHED = 16  # tokens of a text's end that are looked for before it
WORTH = 0.2  # chance of being accepted from which on a copied token is worth a query, at least
SURE = 0.6  # chance of a copy's first token from which on no branches stand behind the copy


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
        sampler, joining = self.sampler, None
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
            likely = scores.topk(min(self.likely.shape[-1], scores.shape[-1]), dim=-1).indices
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
        Of a copy there are as many tokens as are worth their time in a forward of so many rows.
        """
        copied, run = looked_up(self.tokens, self.start, self.lookup)
        run = run[:, None] + np.arange(self.lookup)
        chance = np.where(run[:, :1] > 0, chance_of_copy(run), 0).astype(np.float32)
        reached = chance.cumprod(axis=1)
        offset = np.arange(self.draft.shape[1])
        own = np.where(offset < self.length[:, None], self.confidence, 0).cumprod(axis=1)
        better = reached.sum(axis=1) > own.sum(axis=1)
        # With lenience drafts decide about tokens, which shall be the same whatever is beside them.
        least = self.model.worth(len(better)) if self.settings.lenience == 1 else 0.0
        pays = better[:, None] & (reached >= max(least, WORTH))
        if not self.model.leaves_padding_out:  # a token widens all rows
            pays &= np.where(pays, reached, 0).mean(axis=0) >= least
        better = pays[:, 0]
        self.copied, self.sure = better, better & (chance[:, 0] >= SURE)
        self.draft[better, : self.lookup] = copied[better]
        self.confidence[better, : self.lookup] = chance[better]
        self.runners[better] = self.model.mask_token_id
        length = np.minimum(self._useful(self.draft), pays.sum(axis=1))
        self.length = np.where(better, length, self.length)


def drafts_of(
    sampler: Sampler | Samplers,
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


def chance_of_copy(matched: Any) -> Any:
    """That the next token is the one copied, where so many tokens before it matched; of arrays.

    As measured of what SmolLM2-135M answers to questions of many kinds.
    """
    return matched / (matched + 2 + 1 * (matched == 1))


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
