"""The step that moves vLLM's requests on, from the logits of their forwards: see `state`."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.output import (  # pyright: ignore[reportMissingImports]
    SamplerOutput,
)

from setblock.branches import SURE, WORTH, chance_of_copy, drafts_of
from setblock.chain import conditioned
from setblock.solvers import Certain, Predictions
from setblock.verified import nearly
from setblock.vllm.copies import looked_up
from setblock.vllm.requests import Decoding, cuts
from setblock.vllm.scores import Scores
from setblock.vllm.told import Telling, Told, told_of

NONE_OF_VLLM = SimpleNamespace(output_bin_counts=None)
# Logits that are float32 at a time, 256 MiB. Picking and revealing hold a few tensors as large, and
# vLLM, which measures a step without them, leaves them a share of the memory that does not grow.
MOST_LOGITS = 2**26
# Probability from which on a drafted token is verified, so that the next draft begins behind it. A
# higher one makes shorter drafts, a lower one more of them wrong somewhere, so that the next draft
# is of no use. SmolLM2 has 2.1 tokens per forward with 0.3 to 0.5, 2.0 with 0.65.
LIKELY = 0.4


class BlockSampler:
    """Moves the requests of a step on, from the logits of their forwards."""

    penalties_state = NONE_OF_VLLM

    def __init__(self, state: Any, req_states: Any) -> None:
        self.state, self.req_states = state, req_states
        self.scores, self.telling = Scores(state, req_states), Telling(state)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """The state has read them."""

    def apply_staged_writes(self) -> None:
        """There are none."""

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Any = None) -> Any:
        state, count = self.state, input_batch.num_reqs
        self.scores.begin(input_batch)
        input_batch.has_structured_output_reqs |= state.fused  # then the scheduler reads drafts
        num_logits = np.diff(input_batch.cu_num_logits_np[: count + 1])
        slots = input_batch.idx_mapping_np[:count]
        self.telling.begin(state.told[slots])
        sampled = torch.zeros(count, state.canvas, dtype=torch.int32, device=logits.device)
        num_sampled = torch.zeros(count, dtype=torch.int32, device=logits.device)
        # Rejected are all tokens of a forward that leaves nothing in the cache.
        rejected = state.sent(num_logits.astype(np.int32))
        # Asked before anything new is put there, which reading would wait for.
        ahead = state.ahead(input_batch)
        asked = state.asked(slots) if state.commits[slots].any() else num_logits
        self._begin(input_batch, np.flatnonzero(num_logits == 0))
        # Without a kind are requests that vLLM makes up to measure a step.
        kinds = np.where(num_logits > 0, state.kind[slots], -1)
        for kind in np.unique(kinds[kinds >= 0]):
            how, places = state.kinds[kind], np.flatnonzero(kinds == kind)
            if how.commits:
                if how.slide and not state.adaptive:  # what was cut short is forwarded again
                    places = places[num_logits[places] == asked[places]]
                widest = max(how.block_size, 1 + how.lookup) + how.block_size
                most = max(MOST_LOGITS // (logits.shape[-1] * widest), 1)
                for some in np.split(places, range(most, len(places), most)) if len(places) else ():
                    self._redraft(how, some, ahead, logits, input_batch, sampled, num_sampled)
                continue
            # A block that vLLM's budget alone can cut short is forwarded again; one at the model's
            # last positions is as short as they are.
            room = state.max_model_len - input_batch.num_computed_tokens_np[places]
            widths = np.minimum(num_logits[places], how.block_size)
            whole = cuts(state.defaults, how) | (widths == np.minimum(how.block_size, room))
            both = ahead[places] > 0
            for width, fused in {*zip(widths[whole].tolist(), both[whole].tolist(), strict=True)}:
                alike = places[whole & (widths == width) & (both == fused)]
                most = max(MOST_LOGITS // (logits.shape[-1] * width * (1 + fused)), 1)
                for some in np.split(alike, range(most, len(alike), most)):
                    self._move_on(
                        how, width, fused, some, logits, input_batch, sampled, num_sampled
                    )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=self.telling.tensors(),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=rejected - num_sampled,
        )

    def _begin(self, input_batch: Any, places: np.ndarray) -> None:
        """The first block of the requests whose prompt is encoded now."""
        state = self.state
        ends = input_batch.num_computed_tokens_np[places] + input_batch.num_scheduled_tokens[places]
        slots = input_batch.idx_mapping_np[places]
        whole = (state.kind[slots] >= 0) & (ends >= input_batch.prefill_len_np[places])
        places, slots, ends = places[whole], slots[whole], ends[whole]
        for kind in np.unique(state.kind[slots]):
            how, some = state.kinds[kind], np.flatnonzero(state.kind[slots] == kind)
            seeded, sampler, width = self._seeded(how), how.sampler, how.block_size
            rows = state.sent(slots[some].astype(np.int64))
            begins = state.sent(ends[some].astype(np.int64))
            state.prompted[rows] = True
            first = torch.full_like(rows, state.mask_token_id)
            if seeded:
                last = input_batch.query_start_loc_np[places[some] + 1].astype(np.int64) - 1
                hidden = state.model.last_hidden[state.sent(last)]
                logits = self._clean(state.model.compute_logits(hidden))[:, None]
                last = int(ends[some].max())
                raw, logits = self.scores.of(how, logits, places[some], rows, last, begins)
                noise = state.row.expand(len(rows)), begins[:, None], state.seeds[rows]
                picked = sampler.pick(logits, *noise)
                if how.told is not None:
                    told, every = self._told(how, raw, logits, picked), torch.ones_like(picked)
                    self.telling.keep(rows, told, every.bool())
                first = picked[:, 0]
            blocks = self._new_blocks(first)
            if how.commits:
                chance = torch.zeros_like(blocks[:, 1:], dtype=torch.float32)
                text = None
                if how.lookup:
                    text = self.scores.text(rows, int(ends[some].max()), begins, first[:, None])
                self._keep_likely(how, rows, blocks, chance, begins, text)
            else:
                self._keep(rows, blocks, width, begins)

    def _told(self, how: Decoding, raw: Tensor, picked: Tensor, tokens: Tensor) -> Told:
        """How likely these tokens are, in a request that is to be told."""
        assert how.told is not None
        mode = self.state.model_config.logprobs_mode
        return told_of(raw, picked, how.sampler, tokens, how.told, mode)

    def _know(
        self, how: Decoding, slots: Tensor, logits: Tensor, tokens: Tensor, where: Tensor,
        begin: int = 0,
    ) -> None:  # fmt: skip
        """Keep how likely tokens of the slots' blocks are, from `begin` on, where they are final by
        what is predicted in their places.
        """
        if how.told is not None and not how.verified:
            self.telling.keep(slots, self._told(how, logits, logits, tokens), where, begin)

    def _tell(
        self, how: Decoding, places: np.ndarray, slots: Tensor, raw: Tensor, picked: Tensor,
        block: Tensor, first: Tensor, emitted: Tensor, causal: Tensor,
    ) -> None:  # fmt: skip
        """Tell how likely the tokens of these blocks are, and keep it of those that come next.

        raw, picked: logits behind the tokens of the blocks. first: token behind those emitted.
        causal: whether the block is committed.
        """
        if how.told is None:
            return
        at = emitted[:, None] - 1
        following = torch.cat([block[:, 1:], first[:, None]], dim=1).scatter(1, at, first[:, None])
        told = self._told(how, raw, picked, following)
        self.telling.say(places, slots, block.shape[1], told if how.verified else None)
        last = (one.take_along_dim(at[..., None], dim=1) for one in told)
        self.telling.keep(slots, Told(*last), causal[:, None])

    def _seeded(self, how: Decoding) -> bool:
        """Whether a block's first token is the next-token one, known when it begins."""
        return how.verified or how.slide or self.state.adaptive

    def _move_on(
        self, how: Decoding, width: int, fused: bool, places: np.ndarray, logits: Tensor,
        input_batch: Any, sampled: Tensor, num_sampled: Tensor,
    ) -> None:  # fmt: skip
        """Requests that decode alike, all with `width` tokens of their block in this forward.

        fused: and behind them as many of the next block.
        """
        state = self.state
        begins = input_batch.cu_num_logits_np[places]
        index = state.sent(begins[:, None] + np.arange(2 * width if fused else width))
        scores, *ahead = self._clean(logits[index]).split(width, dim=1)
        places_on = state.sent(places.astype(np.int64))
        slots = input_batch.idx_mapping[places_on].long()
        offset = torch.arange(width, device=logits.device)
        starts = input_batch.positions[input_batch.query_start_loc[places_on].long()].long()
        position = starts[:, None] + offset
        block = state.block[slots, :width]
        causal = state.causal[places_on].bool()
        rows, seeds = state.row.expand(len(places)), state.seeds[slots]
        last = int(input_batch.num_computed_tokens_np[places].max())
        raw, verified = self.scores.of(how, scores, places, slots, last, starts, block)
        # A slot of a block predicts itself, the last committed token the one behind it; in verified
        # decoding every committed one does.
        seeded = self._seeded(how)
        predicted = position + (causal & seeded).long()[:, None]
        chosen = how.sampler.pick(verified, rows, predicted, seeds)
        open_slots = state.open_slots(block, slots, starts) & ~causal[:, None]
        at = state.sent(input_batch.query_start_loc_np[places, None] + np.arange(index.shape[1]))
        if width > 1 or not seeded:
            before = self.req_states.all_token_ids.gpu[slots, starts - 1].long()
            joined = self._joined(how, scores, at[:, :width], before, block, position, seeds)
            reveal = how.solver.reveal(Predictions(joined), open_slots) & open_slots
            drafted = torch.where(reveal, how.sampler.pick(joined, rows, position, seeds), block)
            self._know(how, slots, joined, drafted, reveal)
        else:  # the one token is known
            drafted = block

        if how.verified:
            known = block[:, 1:] != state.mask_token_id
            agree = known & self._agree(how, verified, chosen, block, slots, predicted)
            emitted = 1 + agree.long().cumprod(dim=1).sum(dim=1)
        else:
            emitted = torch.full_like(slots, width)
        if seeded:
            first = chosen.gather(1, emitted[:, None] - 1)[:, 0]
        else:
            first = torch.full_like(slots, state.mask_token_id)
        self._tell(how, places, slots, raw, verified, block, first, emitted, causal)
        answer = self._answer(block, slots, position)
        num_sampled[places_on] = torch.where(causal, torch.minimum(emitted, answer), 0).int()
        sampled[places_on, :width] = torch.where(causal[:, None], block, 0).int()
        # A committed block makes room for the next; another goes on, or to its commit.
        blocks = self._new_blocks(first)
        fresh = blocks[:, :width]
        if fused:  # which was begun behind the whole block: another start has another future
            begun, on = state.open_slots(fresh, slots, starts + width), position + width
            before = block[:, -1]
            joined = self._joined(how, ahead[0], at[:, width:], before, fresh, on, seeds)
            begun &= how.solver.reveal(Predictions(joined), begun) & (emitted == width)[:, None]
            fresh = torch.where(begun, how.sampler.pick(joined, rows, on, seeds), fresh)
            self._know(how, slots, joined, fresh, begun & causal[:, None])
        blocks[:, :width] = torch.where(causal[:, None], fresh, drafted)
        self._keep(slots, blocks, how.block_size, torch.where(causal, starts + emitted, starts))

    def _redraft(
        self, how: Decoding, places: np.ndarray, ahead: np.ndarray, logits: Tensor,
        input_batch: Any, sampled: Tensor, num_sampled: Tensor,
    ) -> None:  # fmt: skip
        """Requests that decode alike, each forward of which commits: the tokens of its block are
        verified, or final where blocks slide, and where `ahead` tells of masks behind them, these
        predict the next ones.
        """
        state, size = self.state, how.block_size
        begins = input_batch.cu_num_logits_np[places]
        width = input_batch.cu_num_logits_np[places + 1] - begins - ahead[places]
        longest = int(width.max())
        index = begins[:, None] + np.minimum(np.arange(longest), width[:, None] - 1)
        scores = self._clean(logits[state.sent(index)])
        places_on, widths = state.sent(places.astype(np.int64)), state.sent(width.astype(np.int64))
        slots = input_batch.idx_mapping[places_on].long()
        starts = input_batch.positions[input_batch.query_start_loc[places_on].long()].long()
        offset = torch.arange(longest, device=logits.device)
        position = starts[:, None] + offset
        block = state.block[slots, :longest]
        rows, seeds = state.row.expand(len(places)), state.seeds[slots]
        last = int(input_batch.num_computed_tokens_np[places].max())
        raw, scores = self.scores.of(how, scores, places, slots, last, starts, block)
        chosen = how.sampler.pick(scores, rows, position + 1, seeds)
        agree = offset[1:] < widths[:, None]
        if how.branches:
            agree = agree & self._agree(how, scores, chosen, block, slots, position + 1)
        emitted = 1 + agree.long().cumprod(dim=1).sum(dim=1)
        first = chosen.gather(1, emitted[:, None] - 1)
        every = torch.ones_like(slots, dtype=torch.bool)
        self._tell(how, places, slots, raw, scores, block, first[:, 0], emitted, every)
        answer = self._answer(block, slots, position)
        num_sampled[places_on] = torch.minimum(emitted, answer).int()
        sampled[places_on, :longest] = block.int()

        blocks = self._new_blocks(first[:, 0])
        chance = torch.zeros_like(blocks[:, 1:], dtype=torch.float32)
        if (drafting := np.flatnonzero(ahead[places])).size:
            open_slots = ahead[places[drafting], None]
            offset = np.arange(1, size)
            behind = width[drafting, None] + np.minimum(offset, open_slots - 1)
            at = state.sent(input_batch.query_start_loc_np[places[drafting], None] + behind)
            guesses = self._clean(logits[state.sent(begins[drafting, None] + behind)])
            some = state.sent(drafting)
            there = starts[some, None] + state.sent(behind)
            find = self._revealed if how.slide else self._drafted
            drafted, right, by = find(how, guesses, at, first[some, 0], there, seeds[some])
            blocks[some, 1:size] = drafted
            self._know(how, slots[some], by, drafted, torch.ones_like(drafted, dtype=torch.bool), 1)
            # Behind other tokens than these the text goes on in another way.
            of_use = (emitted == widths)[some, None] & state.sent(offset < open_slots)
            chance[some, : size - 1] = right * of_use
        starts_on, text = starts + emitted, None
        if how.lookup:
            text = self.scores.text(slots, last, starts, block)
            text = text.scatter(1, starts_on[:, None], first)
        self._keep_likely(how, slots, blocks, chance, starts_on, text)

    def _drafted(
        self, how: Decoding, logits: Tensor, at: Tensor, first: Tensor, places: Tensor,
        seeds: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(the tokens of the slots with these logits, their probabilities, the logits that they are
        picked from), by the model's chain if it has one.

        at: where the slots are among the tokens of the step. first: the token before them.
        """
        model, joining = self.state.model, None
        if (by := model.joining) is not None:
            context = by.chain.context(model.last_hidden[at])
            joining = by.chain, by.embedding, context, first
        rows = self.state.row.expand(len(first))
        drafted, at, logits, _ = drafts_of(how.sampler, logits, rows, places, joining, seeds)
        return drafted, logits.softmax(dim=-1).gather(-1, at[..., None])[..., 0], logits

    def _revealed(
        self, how: Decoding, logits: Tensor, at: Tensor, first: Tensor, places: Tensor,
        seeds: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(the tokens of the slots with these logits, 1 where the solver reveals them and else 0,
        the logits that they are picked from).

        at: where the slots are among the tokens of the step. first: the token before them, which
        is a slot of the block to the solver, and certain.
        """
        masks = torch.full_like(places, self.state.mask_token_id)
        logits = self._joined(how, logits, at, first, masks, places, seeds)
        predictions = Predictions(torch.cat([logits[:, :1], logits], dim=1))
        block = torch.ones(predictions.logits.shape[:2], dtype=torch.bool, device=logits.device)
        certain = block.clone()
        certain[:, 1:] = False
        reveal = how.solver.reveal(Certain(predictions, certain), block)[:, 1:]
        rows = self.state.row.expand(len(first))
        return how.sampler.pick(logits, rows, places, seeds), reveal.float(), logits

    def _joined(
        self, how: Decoding, logits: Tensor, at: Tensor, before: Tensor, known: Tensor,
        places: Tensor, seeds: Tensor,
    ) -> Tensor:  # fmt: skip
        """What a block's slots predict by the model's chain, if it has one; see `Rows._chained`.

        at: where the slots are among the tokens of the step. before: the token before them.
        known: their tokens, the mask token where none is revealed.
        """
        model, by = self.state.model, self.state.model.joining
        if by is None:
            return logits
        rows = self.state.row.expand(len(before))

        def pick(logits: Tensor, slot: int) -> Tensor:
            here = known[:, slot : slot + 1]
            said = how.sampler.pick(logits, rows, places[:, slot : slot + 1], seeds)
            return torch.where(here == self.state.mask_token_id, said, here)

        context = by.chain.context(model.last_hidden[at])
        exact = torch.zeros_like(known, dtype=torch.bool)
        return conditioned(by.chain, by.embedding, logits, context, before, exact, pick)

    def _agree(
        self, how: Decoding, scores: Tensor, chosen: Tensor, block: Tensor, slots: Tensor,
        predicted: Tensor,
    ) -> Tensor:  # fmt: skip
        """Which tokens behind a block's first may stay: those chosen there, and with lenience
        others that are nearly as likely, by the rules of `VerifiedRows._said`.
        """
        state, drafted, said = self.state, block[:, 1:], chosen[:, :-1]
        agree = said == drafted
        if how.lenience == 1:
            return agree
        rows, seeds = state.row.expand(len(slots)), state.seeds[slots]
        sampler, places = how.sampler, predicted[:, :-1]
        near = nearly(sampler, scores[:, :-1], rows, places, drafted, how.lenience, seeds)
        near &= ~state.ends(drafted, slots) & ~state.ends(said, slots)
        return agree | (near & ~state.copied[slots, None])

    def _answer(self, block: Tensor, slots: Tensor, position: Tensor) -> Tensor:
        """How many tokens of a block may belong to the answer: vLLM would cut it behind its end
        itself, but count what it cut.
        """
        state = self.state
        going = ~state.ends(block, slots) & (position < state.limit[slots][:, None] - 1)
        return 1 + going[:, :-1].long().cumprod(dim=1).sum(dim=1)

    def _new_blocks(self, first: Tensor) -> Tensor:
        """Blocks of masks but for the first token where it is known."""
        blocks = torch.full_like(first, self.state.mask_token_id)[:, None]
        blocks = blocks.repeat(1, self.state.canvas)
        blocks[:, 0] = first
        return blocks

    def _keep(self, slots: Tensor, blocks: Tensor, width: int, first: Tensor) -> None:
        """Make these the blocks of the next forwards, `width` tokens each, from `first` on.

        Fused, the scheduler reads how many tokens that forward takes: those before the first -1.
        One that commits a block takes the next one along, if there is to be one and room for it.
        """
        state, drafts = self.state, self.req_states.draft_tokens
        state.block[slots] = blocks
        if not state.fused:
            drafts[slots] = blocks.to(drafts.dtype)
            return
        block = blocks[:, :width]
        behind = first + width
        both = ~state.open_slots(block, slots, first).any(dim=1) & (width > 1)
        both &= ~state.ends(block, slots).any(dim=1) & (behind < state.limit[slots])
        both &= behind + width <= state.max_model_len
        rows = torch.full(
            (len(slots), drafts.shape[1]), -1, dtype=drafts.dtype, device=state.device
        )
        rows[:, :width] = block
        rows[:, width : 2 * width] = torch.where(both, state.mask_token_id, -1)[:, None]
        drafts[slots] = rows

    def _keep_likely(
        self, how: Decoding, slots: Tensor, blocks: Tensor, chance: Tensor, first: Tensor,
        text: Tensor | None,
    ) -> None:  # fmt: skip
        """Make these the blocks of the next forwards, as far as their drafts are probably right, or
        what followed the text's last tokens before if that promises more; masks stand behind them
        if there is to be another draft.

        chance: of each token behind the first, 0 where there is none. first: position of the first.
        text: what is known of each text, up to there; None where nothing is copied.
        """
        state, drafts = self.state, self.req_states.draft_tokens
        likely = (chance >= LIKELY).long().cumprod(dim=1).sum(dim=1)
        better = sure = torch.zeros_like(slots, dtype=torch.bool)
        if text is not None:
            copied, run = looked_up(text, first + 1, how.lookup)
            run = run[:, None] + torch.arange(how.lookup, device=run.device)
            guess = torch.where(run[:, :1] > 0, chance_of_copy(run), 0)
            reached = guess.cumprod(dim=1)
            better = reached.sum(dim=1) > chance.cumprod(dim=1).sum(dim=1)
            sure = better & (guess[:, 0] >= SURE)
            there = slice(1, 1 + how.lookup)
            blocks[:, there] = torch.where(better[:, None], copied, blocks[:, there])
            likely = torch.where(better, (reached >= WORTH).sum(dim=1), likely)
        ends = state.ends(blocks, slots).long()
        useful = (ends.cumsum(dim=1) - ends == 0)[:, 1:].sum(dim=1)  # an end itself is
        room = state.limit[slots].clamp(max=state.max_model_len) - first - 1
        masked = blocks == state.mask_token_id  # copied from a prompt, and never accepted
        useful = torch.minimum(useful, (~masked).long().cumprod(dim=1)[:, 1:].sum(dim=1))
        count = torch.minimum(torch.minimum(likely, useful), room).clamp(min=0)
        offset = torch.arange(drafts.shape[1], device=drafts.device)
        held = offset <= count[:, None]
        state.block[slots] = torch.where(held[:, : state.canvas], blocks, state.mask_token_id)
        state.copied[slots] = better
        # Nothing is drafted behind a copy that is sure to be followed by another. Nor do masks for
        # a single token pay: it is the next-token one.
        goes_on = ~sure & ~(ends.bool() & held[:, : state.canvas]).any(dim=1)
        masks = torch.where(goes_on, (room - count).clamp(max=how.block_size), 0)
        masks = torch.where(masks > 1, masks, 0)
        state.keep_taken(slots, count + 1, masks)
        rows = torch.where(offset <= (count + masks)[:, None], state.mask_token_id, -1)
        wide = torch.nn.functional.pad(blocks, (0, rows.shape[1] - state.canvas))
        drafts[slots] = torch.where(held, wide, rows).to(drafts.dtype)

    def _clean(self, logits: Tensor) -> Tensor:
        """In float32, the mask token's own at -inf: it is never said.

        Effects: on logits that are float32 already.
        """
        logits = logits.float()
        logits[..., self.state.mask_token_id] = -torch.inf
        return logits
