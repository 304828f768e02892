"""The blocks of the requests that vLLM's model runner holds, and the step that moves them on.

A request's step is one of three: a chunk of its prompt; a forward of its block, which is
bidirectional and reveals some of it; or the block's commit, which is causal and leaves the keys and
values that stay. What a commit emits has its keys in the cache, so a request's last block is
committed too. In verified decoding a commit's logits are the next-token ones: the block is kept as
far as next-token decoding would have said it, and the token after that begins the next one.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.attn_utils import (  # pyright: ignore[reportMissingImports]
    build_attn_metadata,
)
from vllm.v1.worker.gpu.model_states.interface import (  # pyright: ignore[reportMissingImports]
    ModelState,
)
from vllm.v1.worker.gpu.sample.output import (  # pyright: ignore[reportMissingImports]
    SamplerOutput,
)

from setblock.solvers import Predictions
from setblock.vllm.requests import MOST_STOPS, Decoding, decoding_of, ends_of, seed_of, settings_of

NO_PENALTIES = SimpleNamespace(output_bin_counts=None)
# Logits that are float32 at a time, 256 MiB. Picking and revealing hold a few tensors as large, and
# vLLM, which measures a step without them, leaves them a share of the memory that does not grow.
MOST_LOGITS = 2**26


class BlockState(ModelState):
    """What vLLM's runner asks about its requests; tensors are [slots of the runner, ...].

    block       tokens of the block at hand, the mask token where nothing is revealed
    prompted    whether the prompt is encoded, so that the next forward is one of the block
    stops       end tokens, -1 for none
    limit       the first position that may not be generated
    seeds       of the sampling noise
    causal      of the step's requests, by their place: whether its forward is causal
    adaptive: blocks may be cut as the load demands; then their first token is the next-token one,
    so that a block of one token is next-token decoding.
    """

    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        if not self.model_config.enforce_eager:
            raise ValueError("set block decoding on vLLM runs without CUDA graphs: --enforce-eager")
        if vllm_config.lora_config is not None:
            raise ValueError("serve an adapter by its name, without vLLM's own --enable-lora")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("set block decoding on vLLM does not run in a pipeline of machines")
        self.defaults = settings_of(self.model_config)
        self.adaptive: bool = self.defaults.get("adaptive", False)
        self.fused: bool = self.defaults.get("fused", False)
        self.canvas: int = self.model_config.hf_config.canvas_length
        widest = self.canvas * (2 if self.fused else 1)
        if (budget := vllm_config.scheduler_config.max_num_batched_tokens) < widest:
            raise ValueError(
                f"--max-num-batched-tokens must be at least {widest}, the widest forward of one "
                f"request, got {budget}"
            )
        mask = self.defaults.get("mask_token_id", None)
        mask = getattr(self.model_config.hf_config, "mask_token_id", mask)
        if mask is None:
            raise ValueError(
                "the checkpoint names no mask token: export it with setblock, or give "
                "--hf-overrides '{\"mask_token_id\": N}'"
            )
        self.mask_token_id: int = mask
        count = self.max_num_reqs
        self.block = torch.full((count, self.canvas), mask, dtype=torch.int64, device=device)
        self.prompted = torch.zeros(count, dtype=torch.bool, device=device)
        self.stops = torch.full((count, MOST_STOPS), -1, dtype=torch.int64, device=device)
        self.limit = torch.zeros(count, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(count, dtype=torch.int64, device=device)
        self.causal = torch.zeros(count, dtype=torch.int32, device=device)
        # The noise of a request is that of the first row.
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self.kinds: list[Decoding] = []  # of decoding that requests have asked for
        self.kind = np.full(count, -1)  # which of them each slot's is; -1 without a request
        self.size = np.zeros(count, dtype=np.int64)  # its block size; 0 without one
        self.slots: dict[str, int] = {}

    def get_supported_generation_tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("generate",)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        return BlockSampler(self, sampler.req_states), None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A new request, or one that comes back after it was preempted."""
        self.slots[new_req_data.req_id] = req_index
        self.prompted[req_index] = False
        params = new_req_data.sampling_params
        how = decoding_of(params, self.defaults, self.canvas)
        self.kind[req_index], self.size[req_index] = self._kind_of(how), how.block_size
        prompt = len(new_req_data.prompt_token_ids)
        self.limit[req_index] = prompt + (params.max_tokens or self.max_model_len)
        self.seeds[req_index] = seed_of(params)
        ends = sorted(ends_of(params))
        row = ends + [-1] * (MOST_STOPS - len(ends))
        self.stops[req_index] = self.sent(row)

    def sent(self, values: list[int] | np.ndarray) -> Tensor:
        """These on the device, which is not waited for."""
        return async_tensor_h2d(values, self.device)

    def _kind_of(self, how: Decoding) -> int:
        """Its number, which another kind had if no request asks for that one any more."""
        if how in self.kinds:
            return self.kinds.index(how)
        free = set(range(len(self.kinds))) - set(self.kind.tolist())
        number = min(free, default=len(self.kinds))
        self.kinds[number : number + 1] = [how]
        return number

    def remove_request(self, req_id: str) -> None:
        slot = self.slots.pop(req_id, None)
        if slot is not None:
            self.kind[slot], self.size[slot] = -1, 0

    def prepare_inputs_embeds(self, *_: Any) -> None:
        return None

    def prepare_inputs(self, *_: Any) -> dict[str, Any]:
        return {}

    def prepare_dummy_inputs(self, *_: Any) -> dict[str, Any]:
        return {}

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, slot_mappings: Any,
        attn_groups: Any, kv_cache_config: Any, for_capture: bool = False, ubatch_idx: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """vLLM's attention metadata, each request causal or not: a prompt's chunk and a commit are.

        A block is committed by a forward in which nothing of it is open.
        """
        count = input_batch.num_reqs
        slots = input_batch.idx_mapping[:count].long()
        widths = np.minimum(input_batch.num_scheduled_tokens[:count], self._sizes(input_batch))
        widths = self.sent(widths)
        first = input_batch.positions[input_batch.query_start_loc[:count].long()].long()
        offset = torch.arange(self.canvas, device=self.device)
        open_slots = self.open_slots(self.block[slots], slots, first)
        open_slots &= offset < widths[:, None]
        self.causal[:count] = (~self.prompted[slots] | ~open_slots.any(dim=1)).int()
        parts = {
            "num_reqs": count,
            "query_start_loc_gpu": input_batch.query_start_loc,
            "query_start_loc_cpu": torch.from_numpy(input_batch.query_start_loc_np),
            "max_query_len": int(input_batch.num_scheduled_tokens.max()),
            "seq_lens": input_batch.seq_lens,
            "block_tables": block_tables,
            "causal": self.causal[:count],
        }
        if self.fused and (places := np.flatnonzero(self.begins_next(input_batch))).size:
            parts |= self._in_two(input_batch, places, block_tables)
        if self.model.gate is not None:
            self.model.gate.noisy = self._noisy(input_batch, parts)
        return build_attn_metadata(
            attn_groups=attn_groups,
            num_tokens=input_batch.num_tokens,
            max_seq_len=self.max_model_len,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            **parts,
        )

    def _noisy(self, input_batch: Any, parts: dict[str, Any]) -> Tensor:
        """Which tokens of this forward are of blocks that are not committed by it, [tokens, 1]."""
        count = parts["num_reqs"]
        lengths = parts["query_start_loc_gpu"][: count + 1].diff().long()
        total = int(parts["query_start_loc_cpu"][count])
        noisy = (parts["causal"] == 0).repeat_interleave(lengths, output_size=total)
        padding = input_batch.num_tokens_after_padding - total
        return torch.nn.functional.pad(noisy, (0, padding))[:, None]

    def begins_next(self, input_batch: Any) -> np.ndarray:
        """Of each request, whether this forward commits its block and begins the next."""
        count = input_batch.num_reqs
        widths = np.diff(input_batch.cu_num_logits_np[: count + 1])
        return (widths > 1) & (widths == 2 * self._sizes(input_batch))

    def _sizes(self, input_batch: Any) -> np.ndarray:
        """The block size of each request; 0 of those that vLLM makes up to measure a step."""
        return self.size[input_batch.idx_mapping_np[: input_batch.num_reqs]]

    def _in_two(self, input_batch: Any, places: np.ndarray, block_tables: Any) -> dict[str, Any]:
        """The attention's sequences where these requests have two each, on the same cache: their
        block, causal, and behind it the next one, which is not.
        """
        count = input_batch.num_reqs
        lengths = input_batch.num_scheduled_tokens[:count].astype(np.int64)
        copies = np.ones(count, dtype=np.int64)
        copies[places] = 2
        owner = np.repeat(np.arange(count), copies)
        ends = np.cumsum(copies) - 1  # the place of each request's last sequence
        behind = np.zeros(len(owner), dtype=np.int64)  # query tokens of a request behind a sequence
        behind[ends[places] - 1] = lengths[places] // 2
        sizes = lengths[owner]
        sizes[ends[places]] //= 2
        sizes[ends[places] - 1] //= 2
        begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        rows = self.sent(owner)
        causal = self.causal[:count][rows]
        causal[self.sent(ends[places])] = 0
        lens = input_batch.seq_lens[rows] - self.sent(behind)
        return {
            "num_reqs": len(owner),
            "query_start_loc_gpu": self.sent(begins),
            "query_start_loc_cpu": torch.from_numpy(begins),
            "max_query_len": int(sizes.max()),
            "seq_lens": lens.to(input_batch.seq_lens.dtype),
            "block_tables": tuple(table[rows] for table in block_tables),
            "causal": causal,
        }

    def open_slots(self, block: Tensor, slots: Tensor, first: Tensor) -> Tensor:
        """Which tokens of these blocks, the first of each at `first`, are still to be revealed."""
        position = first[:, None] + torch.arange(block.shape[1], device=self.device)
        masked = (block == self.mask_token_id) & (position < self.limit[slots][:, None])
        return masked & (self.ends(block, slots).long().cumsum(dim=1) == 0)

    def ends(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Which of these tokens end their request."""
        return (tokens[..., None] == self.stops[slots][:, None]).any(dim=-1)


class BlockSampler:
    """Moves the requests of a step on, from the logits of their forwards."""

    penalties_state = NO_PENALTIES

    def __init__(self, state: BlockState, req_states: Any) -> None:
        self.state, self.req_states = state, req_states

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """The state has read them."""

    def apply_staged_writes(self) -> None:
        """There are none."""

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Any = None) -> Any:
        state, count = self.state, input_batch.num_reqs
        input_batch.has_structured_output_reqs |= state.fused  # then the scheduler reads drafts
        num_logits = np.diff(input_batch.cu_num_logits_np[: count + 1])
        slots = input_batch.idx_mapping_np[:count]
        sampled = torch.zeros(count, state.canvas, dtype=torch.int32, device=logits.device)
        num_sampled = torch.zeros(count, dtype=torch.int32, device=logits.device)
        # Rejected are all tokens of a forward that leaves nothing in the cache.
        rejected = state.sent(num_logits.astype(np.int32))
        self._begin(input_batch, np.flatnonzero(num_logits == 0))
        begins_next = state.begins_next(input_batch) & state.fused
        # Without a kind are requests that vLLM makes up to measure a step.
        kinds = np.where(num_logits > 0, state.kind[slots], -1)
        for kind in np.unique(kinds[kinds >= 0]):
            how, places = state.kinds[kind], np.flatnonzero(kinds == kind)
            # A block that vLLM's budget cut short is forwarded again; one at the model's last
            # positions is as short as they are.
            room = state.max_model_len - input_batch.num_computed_tokens_np[places]
            widths = np.minimum(num_logits[places], how.block_size)
            whole = state.adaptive | (widths == np.minimum(how.block_size, room))
            both = begins_next[places]
            for width, fused in {*zip(widths[whole].tolist(), both[whole].tolist(), strict=True)}:
                alike = places[whole & (widths == width) & (both == fused)]
                most = max(MOST_LOGITS // (logits.shape[-1] * width * (1 + fused)), 1)
                for some in np.split(alike, range(most, len(alike), most)):
                    self._move_on(
                        how, width, fused, some, logits, input_batch, sampled, num_sampled
                    )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=None,
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
            seeded, sampler, width = how.verified or state.adaptive, how.sampler, how.block_size
            rows = state.sent(slots[some].astype(np.int64))
            begins = state.sent(ends[some].astype(np.int64))
            state.prompted[rows] = True
            first = torch.full_like(rows, state.mask_token_id)
            if seeded:
                last = input_batch.query_start_loc_np[places[some] + 1].astype(np.int64) - 1
                hidden = state.model.last_hidden[state.sent(last)]
                logits = self._clean(state.model.compute_logits(hidden))
                noise = state.row.expand(len(rows)), begins[:, None], state.seeds[rows]
                first = sampler.pick(logits[:, None], *noise)[:, 0]
            self._keep(rows, self._new_blocks(first), width, begins)

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
        # A slot of a block predicts itself, the last committed token the one behind it; in verified
        # decoding every committed one does.
        seeded = how.verified or state.adaptive
        predicted = position + (causal & seeded).long()[:, None]
        chosen = how.sampler.pick(scores, rows, predicted, seeds)
        open_slots = state.open_slots(block, slots, starts) & ~causal[:, None]
        if width > 1 or not seeded:
            reveal = how.solver.reveal(Predictions(scores), open_slots) & open_slots
            drafted = torch.where(reveal, chosen, block)
        else:  # the one token is known
            drafted = block

        if how.verified:
            known = block[:, 1:] != state.mask_token_id
            agree = (chosen[:, :-1] == block[:, 1:]) & known
            emitted = 1 + agree.long().cumprod(dim=1).sum(dim=1)
        else:
            emitted = torch.full_like(slots, width)
        if seeded:
            first = chosen.gather(1, emitted[:, None] - 1)[:, 0]
        else:
            first = torch.full_like(slots, state.mask_token_id)
        # vLLM would cut an answer behind its end itself, but count what it cut.
        going = ~state.ends(block, slots) & (position < state.limit[slots][:, None] - 1)
        answer = 1 + going[:, :-1].long().cumprod(dim=1).sum(dim=1)
        num_sampled[places_on] = torch.where(causal, torch.minimum(emitted, answer), 0).int()
        sampled[places_on, :width] = torch.where(causal[:, None], block, 0).int()
        # A committed block makes room for the next; another goes on, or to its commit.
        blocks = self._new_blocks(first)
        fresh = blocks[:, :width]
        if fused:  # which was begun behind the whole block: another start has another future
            begun = state.open_slots(fresh, slots, starts + width)
            begun &= how.solver.reveal(Predictions(ahead[0]), begun) & (emitted == width)[:, None]
            guess = how.sampler.pick(ahead[0], rows, position + width, seeds)
            fresh = torch.where(begun, guess, fresh)
        blocks[:, :width] = torch.where(causal[:, None], fresh, drafted)
        self._keep(slots, blocks, how.block_size, torch.where(causal, starts + emitted, starts))

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

    def _clean(self, logits: Tensor) -> Tensor:
        """In float32, the mask token's own at -inf: it is never said.

        Effects: on logits that are float32 already.
        """
        logits = logits.float()
        logits[..., self.state.mask_token_id] = -torch.inf
        return logits
