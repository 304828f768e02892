"""The blocks of the requests that vLLM's model runner holds, and the step that moves them on.

A request's step is one of three: a chunk of its prompt; a forward of its block, which is
bidirectional and reveals some of it; or the block's commit, which is causal and leaves the keys and
values that stay. What a commit emits has its keys in the cache, so a request's last block is
committed too. In verified decoding a commit's logits are the next-token ones: the block is kept as
far as next-token decoding would have said it, and the token after that begins the next one.

Where drafts come from branches, every step commits: the block holds a token that is final and as
many drafted ones as are probably right, and behind it stand masks, whose predictions are the next
draft if all of these are. (Behind fewer, as `branches.BranchDrafts` has it, no branch can stand:
the slots of vLLM's cache are those of one text.) Blocks that slide are the same but for this: what
the solver revealed is final, and so all of it is kept.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import envs  # type: ignore
from vllm.config import CompilationMode  # pyright: ignore[reportMissingImports]
from vllm.utils.torch_utils import async_tensor_h2d  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.attn_utils import (  # pyright: ignore[reportMissingImports]
    build_attn_metadata,
)
from vllm.v1.worker.gpu.model_states.interface import (  # pyright: ignore[reportMissingImports]
    ModelState,
)

from setblock.vllm.requests import (
    MOST_STOPS,
    Decoding,
    decoding_of,
    ends_of,
    mask_of,
    seed_of,
    settings_of,
)
from setblock.vllm.sampler import BlockSampler


class BlockState(ModelState):
    """What vLLM's runner asks about its requests; tensors are [slots of the runner, ...].

    block       tokens of the block at hand, the mask token where nothing is revealed
    prompted    whether the prompt is encoded, so that the next forward is one of the block
    stops       end tokens, -1 for none
    limit       the first position that may not be generated
    seeds       of the sampling noise
    causal      of the step's requests, by their place: whether its forward is causal
    taken       where every forward commits, (tokens of the block that are to be verified, or final;
                all tokens of the next forward)
    copied      and whether these were copied from the text
    adaptive: every request's blocks may be cut as the load demands; then their first token is the
    next-token one, so that a block of one token is next-token decoding.
    """

    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        if vllm_config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE:
            raise ValueError("set block decoding on vLLM has no compilation mode 1, only 2 and 3")
        graphs = vllm_config.compilation_config.cudagraph_mode
        if graphs.has_full_cudagraphs():
            raise ValueError(
                "set block decoding on vLLM runs without CUDA graphs of whole forwards, which know "
                "one kind of attention: setblock serve --compile on, or --compilation-config "
                '\'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager'
            )
        if envs.VLLM_USE_BREAKABLE_CUDAGRAPH and graphs.has_piecewise_cudagraphs():
            raise ValueError(
                "set block decoding on vLLM has CUDA graphs of compiled kernels alone: "
                "VLLM_USE_BREAKABLE_CUDAGRAPH must be 0, got 1"
            )
        if vllm_config.lora_config is not None:
            raise ValueError("serve an adapter by its name, without vLLM's own --enable-lora")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("set block decoding on vLLM does not run in a pipeline of machines")
        self.defaults = settings_of(self.model_config)
        self.adaptive = self.defaults.get("adaptive") == "all"
        self.fused: bool = self.defaults.get("fused", False)
        self.canvas: int = self.model_config.hf_config.canvas_length
        widest = self.canvas * (2 if self.fused else 1)
        if (budget := vllm_config.scheduler_config.max_num_batched_tokens) < widest:
            raise ValueError(
                f"--max-num-batched-tokens must be at least {widest}, the widest forward of one "
                f"request, got {budget}"
            )
        # Which would cut them short as often as more than one request runs.
        longest = vllm_config.scheduler_config.long_prefill_token_threshold
        if 0 < longest < widest:
            raise ValueError(
                f"--long-prefill-token-threshold must be 0 or at least {widest}, the widest "
                f"forward of one request, got {longest}"
            )
        self.mask_token_id = mask = mask_of(self.model_config)
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
        self.told = np.full(count, -1)  # of how many of the likeliest it tells; -1 of none
        self.commits = np.zeros(count, dtype=bool)  # whether every forward of it does
        self.taken = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self._taken = HostCopy(self.taken)
        self.copied = torch.zeros(count, dtype=torch.bool, device=device)
        self.slots: dict[str, int] = {}
        self.formed = np.zeros(count, dtype=bool)  # whether the scheduler fits its drafts to a form
        self.forms: Any = None  # vLLM's GrammarOutput of the step
        _follow_forms()
        _stay_within(self.model_config.get_vocab_size())

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
        self.commits[req_index] = how.commits
        self.told[req_index] = -1 if how.told is None else how.told
        self.formed[req_index] = how.commits and params.structured_outputs is not None
        self.copied[req_index] = False
        prompt = len(new_req_data.prompt_token_ids)
        self.limit[req_index] = prompt + (params.max_tokens or self.max_model_len)
        self.seeds[req_index] = seed_of(params, new_req_data.req_id)
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
            self.commits[slot] = self.formed[slot] = False
            self.told[slot] = -1

    def prepare_inputs_embeds(self, *_: Any) -> None:
        return None

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Effects: what stands behind a block, of which no step takes anything, is a token: of the
        requests that vLLM warms up with, it forwards that as well.
        """
        input_batch.input_ids.clamp_(min=0)
        return {}

    def prepare_dummy_inputs(self, *_: Any) -> dict[str, Any]:
        return {}

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, slot_mappings: Any,
        attn_groups: Any, kv_cache_config: Any, for_capture: bool = False, ubatch_idx: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """vLLM's attention metadata, each request causal or not: a prompt's chunk and a commit are.

        A block is committed by a forward in which nothing of it is open, and some of it by every
        forward of drafts from branches and of blocks that slide.
        """
        count = input_batch.num_reqs
        slots = input_batch.idx_mapping[:count].long()
        commits = self.sent(self.commits[input_batch.idx_mapping_np[:count]])
        widths = np.minimum(input_batch.num_scheduled_tokens[:count], self._sizes(input_batch))
        widths = self.sent(widths)
        first = input_batch.positions[input_batch.query_start_loc[:count].long()].long()
        offset = torch.arange(self.canvas, device=self.device)
        open_slots = self.open_slots(self.block[slots], slots, first)
        open_slots &= offset < widths[:, None]
        causal = ~self.prompted[slots] | ~open_slots.any(dim=1) | commits
        self.causal[:count] = causal.int()
        parts = {
            "num_reqs": count,
            "query_start_loc_gpu": input_batch.query_start_loc,
            "query_start_loc_cpu": torch.from_numpy(input_batch.query_start_loc_np),
            "max_query_len": int(input_batch.num_scheduled_tokens.max()),
            "seq_lens": input_batch.seq_lens,
            "block_tables": block_tables,
            "causal": self.causal[:count],
        }
        if (ahead := self.ahead(input_batch)).any():
            parts |= self._in_two(input_batch, ahead, block_tables)
        if self.model.gate is not None:
            self.model.tell(self._noisy(input_batch, parts))
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

    def ahead(self, input_batch: Any) -> np.ndarray:
        """Of each request, how many tokens of the next block this forward begins, if it does.

        Where every forward commits, these are all behind what it commits or verifies.
        """
        count, sizes = input_batch.num_reqs, self._sizes(input_batch)
        if not self.fused:
            return np.zeros(count, dtype=np.int64)
        slots = input_batch.idx_mapping_np[:count]
        widths = np.diff(input_batch.cu_num_logits_np[: count + 1])
        whole = np.where((widths == 2 * sizes) & (sizes > 1), sizes, 0)
        if not (commits := self.commits[slots]).any():
            return whole
        masks = np.maximum(widths - self._taken.read()[slots, 0], 0)
        return np.where(commits, masks, whole)

    def asked(self, slots: np.ndarray) -> np.ndarray:
        """How many tokens the forwards of these requests, each of which commits, are to take."""
        return self._taken.read()[slots, 1]

    def keep_taken(self, slots: Tensor, held: Tensor, masks: Tensor) -> None:
        """So many tokens of the next forwards of these requests are to be verified, or final, and
        so many masks stand behind them.
        """
        self.taken[slots] = torch.stack([held, held + masks], dim=1)
        self._taken.update()

    def fit(self, scheduled: dict[str, list[int]], drafts: Tensor) -> None:
        """Take the blocks of answers of a given form as the scheduler has fitted them.

        scheduled: tokens of each request's forward. drafts: the runner's, which it forwards.
        """
        names = [name for name in scheduled if self.formed[self.slots[name]]]
        if not names:
            return
        lines = np.full((len(names), drafts.shape[1]), -1)
        for line, name in zip(lines, names, strict=True):
            line[: len(scheduled[name])] = scheduled[name]
        count = (lines != -1).sum(axis=1)
        text = ((lines != -1) & (lines != self.mask_token_id)).cumprod(axis=1)
        slots, taken = [self.slots[name] for name in names], np.stack([text.sum(axis=1), count], 1)
        rows, fitted = self.sent(slots), self.sent(lines)
        blocks = np.where(text, lines, self.mask_token_id)[:, : self.canvas]
        drafts[rows], self.block[rows] = fitted.to(drafts.dtype), self.sent(blocks)
        self.taken[rows] = self.sent(taken)
        self._taken.read()[slots] = taken

    def _sizes(self, input_batch: Any) -> np.ndarray:
        """The block size of each request; 0 of those that vLLM makes up to measure a step."""
        return self.size[input_batch.idx_mapping_np[: input_batch.num_reqs]]

    def _in_two(self, input_batch: Any, ahead: np.ndarray, block_tables: Any) -> dict[str, Any]:
        """The attention's sequences where requests have two, on the same cache: their block,
        causal, and behind it `ahead` tokens of the next one, which are not.
        """
        count, places = input_batch.num_reqs, np.flatnonzero(ahead)
        lengths = input_batch.num_scheduled_tokens[:count].astype(np.int64)
        copies = np.ones(count, dtype=np.int64)
        copies[places] = 2
        owner = np.repeat(np.arange(count), copies)
        ends = np.cumsum(copies) - 1  # the place of each request's last sequence
        behind = np.zeros(len(owner), dtype=np.int64)  # query tokens of a request behind a sequence
        behind[ends[places] - 1] = ahead[places]
        sizes = lengths[owner]
        sizes[ends[places]] = ahead[places]
        sizes[ends[places] - 1] -= ahead[places]
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


def _follow_forms() -> None:
    """Let vLLM's runner leave forms of answers to the sampler, where the model is ours: it knows
    which of a step's logits they are for; and let it forward the drafts that were fitted to them.
    """
    from vllm.v1.worker.gpu.model_runner import (  # pyright: ignore[reportMissingImports]
        GPUModelRunner,
    )

    theirs, updated = GPUModelRunner.sample, GPUModelRunner.update_requests
    if getattr(theirs, "of_setblock", False):
        return

    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        if isinstance(self.model_state, BlockState):
            self.model_state.forms, grammar_output = grammar_output, None
        return theirs(self, hidden_states, input_batch, grammar_output)

    def update_requests(self: Any, scheduler_output: Any) -> None:
        updated(self, scheduler_output)
        if isinstance(self.model_state, BlockState):
            drafts = self.req_states.draft_tokens
            self.model_state.fit(scheduler_output.scheduled_spec_decode_tokens, drafts)

    sample.of_setblock = True  # type: ignore[attr-defined]
    GPUModelRunner.sample, GPUModelRunner.update_requests = sample, update_requests


def _stay_within(vocab_size: int) -> None:
    """Let the tokens that vLLM judges a prompt by be tokens: it looks for the one behind the last
    position as well, which a block's commit may take and next-token decoding never does.
    """
    from vllm.v1.worker.gpu.sample import (  # pyright: ignore[reportMissingImports]
        prompt_logprob,
    )

    theirs = prompt_logprob.get_prompt_logprobs_token_ids
    theirs = getattr(theirs, "of_vllm", theirs)

    def known(*words: Any) -> Tensor:
        ids = theirs(*words)
        return ids.where((ids >= 0) & (ids < vocab_size), 0)

    known.of_vllm = theirs  # type: ignore[attr-defined]
    prompt_logprob.get_prompt_logprobs_token_ids = known


class HostCopy:
    """A device's tensor as the host knows it: of the last step, which was over when the scheduler
    asked for this one, so that reading it waits for nothing.
    """

    def __init__(self, source: Tensor) -> None:
        self.source = source
        pinned = source.device.type != "cpu"
        self.host = torch.zeros(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        self.copied = torch.Event(source.device) if pinned else None

    def update(self) -> None:
        self.host.copy_(self.source, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def read(self) -> np.ndarray:
        if self.copied is not None:
            self.copied.synchronize()
        return self.host.numpy()
