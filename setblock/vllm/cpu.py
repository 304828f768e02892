"""What vLLM's second model runner lacks on a CPU without Triton: a few kernels, in numpy.

For trying the plugin on a machine without a GPU. `install()` must run in each process of vLLM's
before it builds an engine. Each function says what the kernel of the same name in
vllm/v1/worker/gpu does, for one rank.
"""

import ctypes
from typing import Any

import numpy as np


def _at(pointer: int, count: int) -> np.ndarray:
    """The 32-bit integers at an address."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(pointer))


def apply_write(
    output: Any, stride: Any, indices: Any, starts: Any, contents: Any, ends: Any, groups: Any,
    BLOCK_SIZE: int, MULTI_GROUP: bool,
) -> None:  # fmt: skip
    begin = 0
    contents, flat = contents.numpy(), None if MULTI_GROUP else output.view(-1).numpy()
    for number, end in enumerate(ends.tolist()):
        row, start, values = int(indices[number]), int(starts[number]), contents[begin:end]
        if flat is None:
            group = int(groups[number])
            first = row * int(stride[group]) + start
            _at(int(output[group]) + 4 * first, len(values))[:] = values
        else:
            first = row * stride + start
            flat[first : first + len(values)] = values
        begin = end


def gather_block_tables(
    rows: Any, sources: Any, targets: Any, strides: Any, num_blocks: Any, stride: int,
    num_reqs: int, *of_windows: Any, BLOCK_SIZE: int, MASK_SLIDING_WINDOW: bool = False,
) -> None:  # fmt: skip
    assert not MASK_SLIDING_WINDOW
    rows = rows.tolist()
    for group in range(len(sources)):
        width, source, target = int(strides[group]), int(sources[group]), int(targets[group])
        for place, row in enumerate(rows[:num_reqs]):
            count = int(num_blocks[group, row])
            found = _at(source + 4 * row * width, width)[:count]
            _at(target + 4 * place * width, width)[:count] = found


def compute_slot_mappings(
    max_num_tokens: int, rows: Any, starts: Any, positions: Any, tables: Any, strides: Any,
    sizes: Any, enabled: Any, sharded: Any, slots: Any, stride: int, rank: int, CP_SIZE: int,
    CP_INTERLEAVE: int, PAD_ID: int, TRITON_BLOCK_SIZE: int,
) -> None:  # fmt: skip
    assert CP_SIZE == 1
    starts, positions, slots = starts.tolist(), positions.numpy(), slots.numpy()
    for group in range(len(tables)):
        width, size = int(strides[group]), int(sizes[group])
        for place, row in enumerate(rows.tolist()):
            begin, end = starts[place], starts[place + 1]
            if row < 0 or not bool(enabled[group]):
                slots[group, begin:end] = PAD_ID
                continue
            table = _at(int(tables[group]) + 4 * row * width, width)
            where = positions[begin:end]
            slots[group, begin:end] = table[where // size].astype(np.int64) * size + where % size
        slots[group, starts[len(rows)] : max_num_tokens] = PAD_ID


def prepare_prefill_inputs(
    input_ids: Any, ahead: Any, ahead_stride: int, num_lookahead: int, rows: Any, starts: Any,
    all_ids: Any, stride: int, prefill_lens: Any, computed: Any, BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:  # fmt: skip
    input_ids, starts, all_ids = input_ids.numpy(), starts.tolist(), all_ids.numpy()
    ahead = ahead.view(num_lookahead, -1).numpy()
    for place, row in enumerate(rows.tolist()):
        done, length = int(computed[row]), int(prefill_lens[row])
        if done >= length:
            continue
        begin, end = starts[place], starts[place + 1]
        input_ids[begin:end] = all_ids[row, done : done + end - begin]
        for offset in range(num_lookahead):
            where = done + end - begin + offset
            ahead[offset, row] = all_ids[row, where] if where < length else 0


def prepare_pos_seq_lens(
    positions: Any, seq_lens: Any, rows: Any, starts: Any, computed: Any, most: int, BLOCK_SIZE: int
) -> None:
    positions, seq_lens, starts = positions.numpy(), seq_lens.numpy(), starts.tolist()
    seq_lens[len(rows) : most] = 0
    for place, row in enumerate(rows.tolist()):
        begin, end, done = starts[place], starts[place + 1], int(computed[row])
        seq_lens[place] = done + end - begin
        positions[begin:end] = np.arange(done, done + end - begin)


def combine_sampled_and_draft_tokens(
    input_ids: Any, rows: Any, last_sampled: Any, starts: Any, seq_lens: Any, prefill_lens: Any,
    drafts: Any, stride: int, cu_num_logits: Any, logits_indices: Any, BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:  # fmt: skip
    input_ids, indices, drafts = input_ids.numpy(), logits_indices.numpy(), drafts.numpy()
    ends, cu = starts.tolist()[1:], cu_num_logits.tolist()
    for place, row in enumerate(rows.tolist()):
        count, end = cu[place + 1] - cu[place], ends[place]
        indices[cu[place] : cu[place + 1]] = np.arange(end - count, end)
        length, prefill = int(seq_lens[place]), int(prefill_lens[row])
        if length <= prefill:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and length - count >= prefill:
            input_ids[end - count] = int(last_sampled[row])
        drafted = count - NUM_NEW_SAMPLED_TOKENS
        if drafted > 0:
            input_ids[end - drafted : end] = drafts[row, :drafted]


def post_update(
    rows: Any, computed: Any, last_sampled: Any, bin_counts: Any, bin_stride: int, sampled: Any,
    stride: int, num_sampled: Any, num_rejected: Any, starts: Any, all_ids: Any, all_stride: int,
    total_len: Any, drafts: Any = None, drafts_out: Any = None, num_drafts: int = 0,
    num_warps: int = 1,
) -> None:  # fmt: skip
    assert drafts is None
    computed, all_ids, total = computed.numpy(), all_ids.numpy(), total_len.numpy()
    last, sampled = last_sampled.view(-1).numpy(), sampled.numpy()
    begins = None if starts is None else starts.tolist()
    for place, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        count, length = int(num_sampled[place]), int(total[row])
        if count > 0:
            last[row] = sampled[place, count - 1]
            all_ids[row, length : length + count] = sampled[place, :count]
            total[row] = length + count
        assert bin_counts is None
        queries = 0 if begins is None else begins[place + 1] - begins[place]
        computed[row] += queries - int(num_rejected[place])


def expand_idx_mapping(
    rows: Any, expanded: Any, local: Any, cu_num_logits: Any, BLOCK_SIZE: int
) -> None:
    expanded, local, cu = expanded.numpy(), local.numpy(), cu_num_logits.tolist()
    for place, row in enumerate(rows.tolist()):
        expanded[cu[place] : cu[place + 1]] = row
        local[cu[place] : cu[place + 1]] = np.arange(cu[place + 1] - cu[place])


def topk_log_softmax(
    output: Any, logits: Any, stride: int, ids: Any, ids_stride: int, topk: int, vocab_size: int,
    BLOCK_SIZE: int, TOPK_BLOCK_SIZE: int,
) -> None:  # fmt: skip
    scores = logits.float()
    output[:] = scores.gather(-1, ids) - scores.logsumexp(dim=-1, keepdim=True)


def ranks(
    output: Any, logits: Any, stride: int, ids: Any, vocab_size: int, BLOCK_SIZE: int
) -> None:
    output[:] = (logits >= logits.gather(-1, ids.long()[:, None])).sum(dim=-1)


def prompt_logprobs_token_ids(
    output: Any, starts: Any, rows: Any, computed: Any, all_ids: Any, stride: int, BLOCK_SIZE: int
) -> None:
    starts = starts.tolist()
    for place, row in enumerate(rows.tolist()):
        begin, end, first = starts[place], starts[place + 1], int(computed[row]) + 1
        found = all_ids[row, first : first + end - begin]
        output[begin : begin + len(found)] = found
        output[begin + len(found) : end] = 0


KERNELS = {
    "buffer_utils._apply_write_kernel": apply_write,
    "block_table._gather_block_tables_kernel": gather_block_tables,
    "block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    "input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    "input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
    "input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
    "input_batch._post_update_kernel": post_update,
    "input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
    "sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
    "sample.logprob._ranks_kernel": ranks,
    "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids,
}


def install() -> None:
    """Let the second model runner start on a CPU, with these kernels."""
    import importlib

    import vllm.config.vllm  # pyright: ignore[reportMissingImports]
    from vllm import triton_utils  # type: ignore
    from vllm.triton_utils.dispatcher import (  # pyright: ignore[reportMissingImports]
        register_kernels,
    )

    vllm.config.vllm.HAS_TRITON = True
    triton: Any = triton_utils.triton
    triton.next_power_of_2 = lambda count: 1 << max(count - 1, 0).bit_length()
    # Only now: these modules look at HAS_TRITON and at Triton's functions as they are imported.
    for name in {name.rpartition(".")[0] for name in KERNELS}:
        importlib.import_module(f"vllm.v1.worker.gpu.{name}")
    worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
    worker.HAS_TRITON = True  # in vLLM 0.33 it looks once more
    register_kernels({f"vllm.v1.worker.gpu.{name}": kernel for name, kernel in KERNELS.items()})
