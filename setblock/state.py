"""What every way of decoding keeps of a batch, each row at its own length.

It lies on the host, in arrays: the device has the network, the cache and logits, and a step waits
for it to choose tokens.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from setblock.chain import conditioned
from setblock.grammar import Grammar
from setblock.masks import Layout, decoding_layout
from setblock.model import Model
from setblock.sampling import Sampler, Samplers, of_rows, penalised, without_ends
from setblock.settings import PENALTIES, Settings
from setblock.transfer import to_device

CHUNK = 1024  # tokens of a prompt that one forward takes at most


class Rows:
    """Rows being decoded, each at its own length.

    tokens      [batch, capacity] prompt, final tokens, then masks
    start       [batch] all before is final
    prompt_end  [batch] length of the prompt
    limit       [batch] first position that may not be generated: the context's end at the latest
    rows        [batch] index of the row in the user's input
    seeds       [batch] of the row's sampling noise
    samplers    [batch] how its tokens are picked, but for the seed
    penalties   [batch, 3] of tokens that its text has, in the order of settings.PENALTIES
    biases      [batch] (token, what is added to its logit) of each that has one
    least       [batch] first position of an end token
    nfe         [batch] forwards counted so far
    revealed_at, entropy  [batch, capacity] forward and entropy of each generated token
    logprob     [batch, capacity] its log-probability, where settings.logprobs asks for it
    top, top_logprob  [batch, capacity, logprobs] the likeliest tokens of its place, and theirs
    grammars    [batch] which tokens may come next in a row's answer; None for any
    cached      [batch] tokens of the prompt that a prompt cache knew
    errors      [batch] why a row can't go on, as where its grammar allows nothing, or its logits
                are no numbers; None if it can
    beyond      query tokens of a forward that stand behind a text at most
    The cache knows how many positions of each row it holds: `cache.lengths`.
    """

    # Arrays with a line for each row, and those of them that have a column for each position.
    PER_ROW: ClassVar[tuple[str, ...]] = (
        *("tokens", "start", "prompt_end", "limit"),
        *("rows", "seeds", "samplers", "penalties", "biases", "least", "grammars", "errors"),
        *("nfe", "prefill_forwards", "cached"),
        *("revealed_at", "entropy", "logprob", "top", "top_logprob"),
    )
    BY_POSITION: ClassVar = {
        *("tokens", "revealed_at", "entropy"),
        *("logprob", "top", "top_logprob"),
    }

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        settings: Settings,
        scratch: int,
        room: int | None = None,
    ) -> None:
        """scratch: query tokens of a forward that stand behind the longest text.

        room: how many rows it may come to by `join`, 0 for rows that are to join others; None for
        these alone.
        """
        self.model, self.settings = model, settings
        lengths = [len(prompt) for prompt in prompts]
        # A forward may look at a whole block or draft from any position on.
        block = min(max(settings.block_size, settings.lookup + 1), settings.max_new_tokens)
        capacity = max(lengths) + settings.num_slots + block
        self.beyond = block + scratch
        self.tokens = np.full((len(prompts), capacity), model.mask_token_id)
        for slot, prompt in enumerate(prompts):
            self.tokens[slot, : len(prompt)] = prompt
        self.start = np.array(lengths)
        self.prompt_end = self.start.copy()
        left = settings.room(model.context_length - self.start)
        self.limit = self.start + np.minimum(settings.max_new_tokens, left)
        self.rows = np.array(rows)
        self.seeds = np.full_like(self.start, settings.sampler.seed)
        self.samplers = np.full(len(prompts), None)
        self.samplers[:] = settings.sampler.seedless
        penalties = [getattr(settings, name) for name in PENALTIES]
        self.penalties = np.array([penalties] * len(prompts), dtype=np.float32)
        self.biases = np.full(len(prompts), None)
        for row in range(len(prompts)):
            self.biases[row] = settings.logit_bias
        self.least = self.start + settings.min_new_tokens
        self.nfe = np.zeros_like(self.start)
        self.revealed_at = np.zeros_like(self.tokens)
        self.entropy = np.zeros(self.tokens.shape, dtype=np.float32)
        likeliest = min(settings.logprobs or 0, model.vocab_size)
        self.logprob = np.zeros_like(self.entropy)
        self.top_logprob = np.zeros((*self.tokens.shape, likeliest), dtype=np.float32)
        self.top = np.zeros(self.top_logprob.shape, dtype=np.int64)
        self.grammars = np.full(len(prompts), None)
        self.errors = np.full(len(prompts), None)
        self.ends = [] if settings.ignore_eos else sorted(model.eos_token_ids)
        self.cache = model.new_cache(len(prompts), capacity + scratch, room)
        self.prefill_forwards, self.cached = np.ones_like(self.start), np.zeros_like(self.start)

    @property
    def longest(self) -> int:
        """Positions of the longest text that there may be, in whole blocks where blocks are."""
        stride = self.settings.stride
        return int((self.prompt_end - (self.prompt_end - self.limit) // stride * stride).max())

    @property
    def sampler(self) -> Sampler | Samplers:
        """How tokens of all rows are picked."""
        return of_rows(self.samplers.tolist())

    def follow(self, grammars: Sequence[Grammar | None]) -> None:
        """Have the answers, of which nothing is there yet, follow these grammars, if any."""
        for row, grammar in enumerate(grammars):
            self.grammars[row] = None if grammar is None else grammar.copy()

    @property
    def bounded(self) -> Bool[ndarray, " batch"]:
        """Which of the answers follow a grammar and can go on."""
        pairs = zip(self.grammars, self.errors, strict=True)
        return np.array([form is not None and error is None for form, error in pairs], dtype=bool)

    def encode(self) -> bool:
        """Put CHUNK tokens of long prompts into the cache, unless none is left but their last CHUNK
        tokens, which are the first step's; whether it did.

        So no mask has more than a line for each of CHUNK tokens, and of the first blocks.
        """
        cached = self.cache.lengths
        count = (self.prompt_end - cached - CHUNK).clip(0, CHUNK)
        width = int(count.max())
        if width == 0:
            return False
        position = cached[:, None] + np.arange(width)
        put(self.model, self.cache, self._tokens_at(position), count)
        self.prefill_forwards = self.prefill_forwards + 1
        return True

    def step(self) -> Bool[ndarray, "batch length"]:
        """One forward for all rows; True at the positions revealed by it.

        A row that has ended, or can't go on, must be dropped by `select` first: nothing here stops
        it at its limit.
        Effects: tokens, counts and cache change.
        """
        raise NotImplementedError

    def committed(self, slot: int, known: int = 0) -> tuple[list[int], bool]:
        """Ids of a batch slot's gapless answer behind its first `known`, which have not ended it,
        and whether EOS or the limit does.
        """
        last, first = int(self.limit[slot]), int(self.prompt_end[slot]) + known
        masks = min(last, int(self.start[slot]) + self.settings.block_size)
        answer = self.tokens[slot, first:masks].tolist()
        if self.model.mask_token_id in answer:
            answer = answer[: answer.index(self.model.mask_token_id)]
        if ends := [answer.index(token) for token in self.ends if token in answer]:
            return answer[: min(ends) + 1], True
        return answer, len(answer) == last - first

    def join(self, other: "Rows") -> None:
        """Take in the rows of another state of its model, whose settings have the same `shared`;
        behind their first step. The other state is of no use then.
        """
        assert self.settings.shared == other.settings.shared, "rows of different settings"
        fits = self.cache.widen(other.longest + self.beyond)
        assert fits, "no room for these rows"
        self.cache.join(other.cache)  # first: memory may be lacking
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        for name in self.PER_ROW:
            parts = [getattr(one, name) for one in (self, other)]
            if name in self.BY_POSITION:
                none = self.model.mask_token_id if name == "tokens" else 0
                parts = [_widened(part, width, none) for part in parts]
            setattr(self, name, np.concatenate(parts))

    def select(self, slots: list[int]) -> None:
        """Drop all rows but these batch slots."""
        index = np.array(slots, dtype=np.int64)
        for name in self.PER_ROW:
            setattr(self, name, getattr(self, name)[index])
        self.cache.select(index)

    def _forward(
        self,
        queries: Int[ndarray, "batch length"],
        layout: Layout,
        wanted: Int[ndarray, "batch wanted"],
        others: Int[ndarray, " others"] | None = None,
    ) -> tuple[
        Float[Tensor, "batch wanted vocab"],
        Float[Tensor, "batch others vocab"],
        Float[Tensor, "batch _ width"],
    ]:
        """Logits of each row's wanted query tokens, and of some that all rows want; of these, or of
        the former where there are none, also what a chain's scores depend on. All on the device.
        """
        needed = wanted[0] if len(wanted) == 1 else np.unique(wanted)
        columns = needed if others is None else np.concatenate([needed, others])
        given = torch.from_numpy(queries), layout, self.cache, torch.from_numpy(columns)
        if self.model.chain is None:
            logits = self.model.forward(*given)
            context = logits[..., :0]
        else:
            logits, context = self.model.forward_to_draft(*given)
        own, first = logits[:, : len(needed)], len(needed)
        if len(wanted) > 1:
            [index] = to_device(logits.device, np.searchsorted(needed, wanted))
            own = own.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
            if others is None:
                context = context.gather(1, index[..., None].expand(-1, -1, context.shape[-1]))
        return own, logits[:, first:], context if others is None else context[:, first:]

    def _chained(
        self,
        logits: Float[Tensor, "batch slots vocab"],
        context: Float[Tensor, "batch slots width"],
        places: Int[ndarray, "batch slots"],
        known: Int[ndarray, "batch slots"],
        exact: Bool[ndarray, "batch slots"] | None = None,
    ) -> Float[Tensor, "batch slots vocab"]:
        """What a block's slots predict, given the token in the slot before; as it is without a
        chain.

        places: where the slots are. known: their tokens, the mask token where none is drafted or
        revealed. exact: slots whose distribution is not a mask's.
        """
        chain, mask = self.model.chain, self.model.mask_token_id
        if chain is None:
            return logits
        exact = np.zeros_like(known, dtype=bool) if exact is None else exact
        before = self._tokens_at((self.start - 1)[:, None])[:, 0]
        rows, seeds, at, tokens, fixed, last = to_device(
            logits.device, self.rows, self.seeds, places, known, exact, before
        )

        sampler = self.sampler

        def pick(logits: Tensor, slot: int) -> Tensor:
            here = slice(slot, slot + 1)
            said = sampler.pick(logits, rows, at[:, here], seeds)
            return torch.where(tokens[:, here] == mask, said, tokens[:, here])

        embedding = self.model.network.get_input_embeddings()
        return conditioned(chain, embedding, logits, context, last, fixed, pick)

    def _reveal(
        self,
        where: Bool[ndarray, "batch slots"],
        slots: Int[ndarray, "batch slots"],
        chosen: Int[ndarray, "batch slots"],
        nats: Float[ndarray, "batch slots"],
        likely: Sequence[ndarray],
    ) -> Bool[ndarray, "batch length"]:
        """Write the chosen tokens, their entropies and what `_likely` tells at these positions;
        True there.
        """
        for slot in self.bounded.nonzero()[0].tolist():
            try:
                self.grammars[slot].say(chosen[slot][where[slot]].tolist())
            except Exception as error:  # of this row, whatever it is
                self.errors[slot] = error
        broken = np.any(where & np.isnan(nats), axis=1)
        for slot in np.flatnonzero(broken).tolist():
            why = f"the logits of {self.model.name} are not numbers: look at its weights"
            self.errors[slot] = ValueError(why)
        row, column = where.nonzero()
        place = row, slots[row, column]
        self.tokens[place] = chosen[row, column]
        self.revealed_at[place] = self.nfe[row]
        self.entropy[place] = nats[row, column]
        for mine, told in zip((self.logprob, self.top, self.top_logprob), likely, strict=False):
            mine[place] = told[row, column]
        revealed = np.zeros(self.tokens.shape, dtype=bool)
        revealed[place] = True
        return revealed

    def _likely(
        self, logits: Float[Tensor, "batch places vocab"], tokens: Int[Tensor, "batch places"]
    ) -> tuple[Tensor, ...]:
        """(log-probabilities of these tokens; the likeliest of each place; theirs), if they are
        asked for. On the device.
        """
        if self.settings.logprobs is None:
            return ()
        logits = logits.float()
        total = logits.logsumexp(dim=-1, keepdim=True)
        top = logits.topk(self.top.shape[-1], dim=-1)
        own = logits.gather(-1, tokens[..., None]) - total
        return own[..., 0], top.indices, top.values - total

    def _next(
        self,
        logits: Float[Tensor, "batch places vocab"],
        drafts: Int[ndarray, "batch drafted"],
        lengths: Int[ndarray, " batch"],
    ) -> tuple[Float[Tensor, "batch places vocab"], Int[ndarray, " batch"]]:
        """(next-token logits of the place behind each row's text, and behind each of so many tokens
        drafted there, as its settings have them; for how many places, see `_allowed`).

        drafts: the tokens of all places but the last, the mask token for none.
        """
        logits = self._penalised(self._biased(logits), drafts)
        pairs = zip(drafts.tolist(), lengths.tolist(), strict=True)
        logits, counts = self._allowed(logits, [draft[:length] for draft, length in pairs])
        early = self.start[:, None] + np.arange(logits.shape[1]) < self.least[:, None]
        known = {end for end in self.model.eos_token_ids if end < logits.shape[-1]}
        if early.any() and (ends := sorted(known)):
            logits = without_ends(logits, *to_device(logits.device, np.array(ends), early))
        return logits, counts

    def _biased(
        self, logits: Float[Tensor, "batch places vocab"]
    ) -> Float[Tensor, "batch places vocab"]:
        """Each row's logits with its biases added."""
        each = [(row, *pair) for row, pairs in enumerate(self.biases) for pair in pairs]
        if not each:
            return logits
        rows, tokens, added = map(np.array, zip(*each, strict=True))
        bits = added.astype(np.float32).view(np.int32)
        rows, tokens, bits = to_device(logits.device, rows, tokens, bits)
        logits = logits.float().clone()
        logits[rows, :, tokens] += bits.to(torch.int32).view(torch.float32)[:, None]
        return logits

    def _allowed(
        self, logits: Float[Tensor, "batch places vocab"], drafts: Sequence[Sequence[int]]
    ) -> tuple[Float[Tensor, "batch places vocab"], Int[ndarray, " batch"]]:
        """(next-token logits of the place behind each row's text, and behind each token of its
        draft: -inf for tokens that its grammar does not allow there; for how many places).

        Places behind these are never reached: behind a draft, what ends it, or a dead end.
        """
        counts = np.array([len(draft) + 1 for draft in drafts])
        if not (bounded := self.bounded).any():
            return logits, counts
        vocab, count = logits.shape[-1], -(-logits.shape[-1] // 8)
        bits = np.full((*logits.shape[:2], -(-vocab // 64)), -1)  # 64 tokens a number
        for row in bounded.nonzero()[0].tolist():
            try:
                found = self.grammars[row].allowed(drafts[row])
            except Exception as error:
                self.errors[row], found = error, [np.full(count, 255, dtype=np.uint8)]
            counts[row] = len(found)
            for place, told in enumerate(found):
                bits.view(np.uint8)[row, place, :count] = told[:count]
        [packed] = to_device(logits.device, bits)
        eights = torch.arange(8, dtype=torch.uint8, device=logits.device)
        unpacked = (packed.view(torch.uint8)[..., None] >> eights) & 1
        forbidden = unpacked.flatten(-2)[..., :vocab] == 0
        return logits.masked_fill(forbidden, -torch.inf), counts

    def _penalised(
        self,
        logits: Float[Tensor, "batch places vocab"],
        drafts: Int[ndarray, "batch drafted"],
    ) -> Float[Tensor, "batch places vocab"]:
        """Next-token logits of the places behind each row's text, with the penalties of tokens that
        it has, and of those drafted before a place.

        drafts: the tokens of all places but the last, the mask token for none.
        """
        if (self.penalties == list(PENALTIES.values())).all():
            return logits
        text, bits = self.tokens[:, : int(self.start.max())], self.penalties.view(np.int32)
        text, prompt_end, start, before, bits = to_device(
            logits.device, text, self.prompt_end, self.start, drafts, bits
        )
        penalties = bits.to(torch.int32).view(torch.float32)
        return penalised(logits, text, prompt_end, start, before, penalties)

    def _tokens_at(self, position: Int[ndarray, "batch some"]) -> Int[ndarray, "batch some"]:
        """Each row's tokens at these positions; any token behind the last."""
        return taken(self.tokens, np.minimum(position, self.tokens.shape[1] - 1))

    def _is_end(self, tokens: Int[ndarray, "batch some"]) -> Bool[ndarray, "batch some"]:
        """Which of the tokens end a row."""
        ending = np.zeros(tokens.shape, dtype=bool)
        for token in self.ends:
            ending |= tokens == token
        return ending


def put(
    model: Model, cache: Any, tokens: Int[ndarray, "rows length"], count: Int[ndarray, " rows"]
) -> None:
    """A forward that puts the first so many of each row's tokens into a cache, behind its own."""
    position = cache.lengths[:, None] + np.arange(tokens.shape[1])
    end = cache.lengths + count
    layout = decoding_layout(position, end, end)
    none = torch.empty(0, dtype=torch.long)
    model.forward(torch.from_numpy(tokens), layout, cache, logits_at=none)
    cache.keep(count)


def _widened(values: ndarray, width: int, fill: Any) -> ndarray:
    """values with so many columns, new ones filled."""
    more = [(0, 0), (0, width - values.shape[1]), *[(0, 0)] * (values.ndim - 2)]
    return np.pad(values, more, constant_values=fill)


def taken(values: ndarray, columns: Int[ndarray, "batch some"]) -> ndarray:
    """values[row, columns[row]] of each row."""
    return values[np.arange(len(values))[:, None], columns]
