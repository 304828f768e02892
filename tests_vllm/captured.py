"""Compiled in pieces and replayed, as vLLM does on a GPU, by a CPU: of a graph a replay computes
what was captured again, from tensors that must lie where they lay then.
"""

from contextlib import nullcontext
from typing import Any

import torch
from vllm.compilation.passes.utility import fix_functionalization
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu import cudagraph_utils, warmup

SIZES = [1, 2, 4, 8, 16, 32, 64]  # tokens of the forwards that are captured


class Graphs:
    """In the place of vLLM's CUDAGraphWrapper: the graphs of one piece, by their tokens."""

    pieces = captured = replayed = 0

    def __init__(self, runnable: Any, runtime_mode: Any, **_: Any) -> None:
        Graphs.pieces += 1
        self.runnable, self.mode = runnable, runtime_mode
        self.graphs: dict[int, tuple[list[int], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.mode:
            return self.runnable(*args)
        size = context.batch_descriptor.num_tokens
        places = [one.data_ptr() for one in args if isinstance(one, torch.Tensor)]
        if size not in self.graphs:
            Graphs.captured += 1
            self.graphs[size] = places, self.runnable(*args)
            return self.graphs[size][1]
        Graphs.replayed += 1
        before, output = self.graphs[size]
        assert places == before, "a graph would read what was there when it was captured"
        for kept, new in zip(_tensors(output), _tensors(self.runnable(*args)), strict=True):
            kept.copy_(new)
        return output


def _tensors(output: Any) -> list[torch.Tensor]:
    output = [output] if isinstance(output, torch.Tensor) else output
    return [one for one in output if isinstance(one, torch.Tensor)]


def install(monkeypatch: Any, mode: str = "PIECEWISE") -> None:
    """Let engines from now on compile so. mode: of the graphs, as vLLM names it."""
    theirs = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        told = config.compilation_config
        own = told.mode
        theirs(cls, config)
        told.mode, told.backend, told.compile_sizes = own, "inductor", []
        told.cudagraph_capture_sizes, told.max_cudagraph_capture_size = list(SIZES), SIZES[-1]
        told.cudagraph_mode = CUDAGraphMode[mode]

    name = f"{Graphs.__module__}.{Graphs.__qualname__}"
    patch = monkeypatch.setattr
    patch(CpuPlatform, "check_and_update_config", classmethod(checked))
    patch(CpuPlatform, "get_static_graph_wrapper_cls", classmethod(lambda cls: name))
    patch(CpuPlatform, "get_global_graph_pool", lambda *_: None)
    # What it puts right is of kernels that a CPU lacks.
    patch(fix_functionalization.FixFunctionalizationPass, "__call__", lambda *_: None)
    patch(cudagraph_utils, "graph_capture", lambda **_: nullcontext())


def runner_of(engine: Any) -> Any:
    """vLLM's model runner in it."""
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def warm_up(engine: Any) -> None:
    """Forward requests of vLLM's own, as it does on a GPU before it captures."""
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    warmup.warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)


def capture(engine: Any) -> None:
    """Capture the graphs of an engine, which vLLM does not do for a CPU."""
    runner = runner_of(engine)
    with torch.inference_mode():
        runner.cudagraph_manager.capture(
            runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors,
            runner.block_tables, runner.attn_groups, runner.kv_cache_config,
        )  # fmt: skip
