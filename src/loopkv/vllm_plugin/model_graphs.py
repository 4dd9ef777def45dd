"""The model as ``step_graphs`` runs it: inside vLLM's forward context, for engines that allow CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available, override_forward_context
from vllm.logger import init_logger
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader

from loopkv.vllm_plugin.cells import CellCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from loopkv.vllm_plugin.step import Step
    from loopkv.vllm_plugin.step_graphs import StepGraphs

logger = init_logger("vllm.loopkv")

Model = Callable[[Tensor, Tensor, None, None], Tensor]
"""[T] token ids and [T] positions to [T, E]; no intermediate tensors, no embeddings."""


class ModelGraphs:
    """Prefill steps of few tokens, replayed.

    Args:
        model: the model without its head.
        cache: of the worker.
        graphs: made for the cache's operators.
    """

    def __init__(self, model: Model, cache: CellCache, graphs: Callable[[Callable[..., Tensor]], StepGraphs]) -> None:
        self.model, self.cache = model, cache
        self.graphs: StepGraphs | None = graphs(self._run)
        self._pool: int | None = None

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor | None:
        """Hidden states [T, E] of the engine's step, or None where it is not for a graph."""
        if self.graphs is None or not is_forward_context_available() or torch.cuda.is_current_stream_capturing():
            return None
        step = self.cache.context_step()
        if step is None:
            return None
        try:
            if self._pool != step.pool.data_ptr():  # vLLM may try its own graphs on a small pool first
                self._pool = step.pool.data_ptr()
                self.graphs.clear()
                self.graphs.prepare(step, ids, positions)
            return self.graphs.forward(step, ids, positions)
        except torch.cuda.OutOfMemoryError:
            logger.warning("LoopKV: no memory for prefill graphs, serving without; set prefill_graphs to false")
            self.graphs = None
            return None

    def _run(self, step: Step, ids: Tensor, positions: Tensor) -> Tensor:
        context = dataclasses.replace(
            get_forward_context(), cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=None
        )
        with override_forward_context(context), self.cache.given_step(step):
            return self.model(ids, positions, None, None)  # as vLLM compiled it


def make_model_graphs(model: Model, cache: CellCache, vllm_config: VllmConfig) -> ModelGraphs | None:
    """Graphs for a worker; None where they are turned off, or where the engine or its device does not allow them.

    Tensor parallelism needs its all-reduce registered with each graph, and LoRA the adapter of each padded token.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if (
        not cache.served.prefill_graphs
        or vllm_config.device_config.device_type != "cuda"
        or vllm_config.model_config.enforce_eager
        or mode is None
        or mode == CUDAGraphMode.NONE
        or vllm_config.parallel_config.tensor_parallel_size > 1
        or vllm_config.lora_config is not None
        or not isinstance(get_offloader(), NoopOffloader)
    ):
        return None
    from loopkv.vllm_plugin.operators_cuda import CudaStepOperators
    from loopkv.vllm_plugin.step_graphs import StepGraphs

    operators = cache.operators
    if not isinstance(operators, CudaStepOperators) or operators.prefill is None:
        return None
    scheduler = vllm_config.scheduler_config
    return ModelGraphs(
        model,
        cache,
        lambda run: StepGraphs(
            operators,
            run,
            max_rows=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            max_model_tokens=vllm_config.model_config.max_model_len,
            device=operators.kernels.device,
        ),
    )
