"""The cache as the engine owns it and as the model uses it: two virtual layers, and one attention call per cell.

vLLM asks every object of ``static_forward_context`` that has a cache spec for its backend and gives it a tensor. Two
such objects stand for all cells: one for the coded history, one for the exact window. Both tensors are the same pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import direct_register_custom_op

from loopkv.layout import Layout
from loopkv.vllm_plugin.backend import LoopKVBackend
from loopkv.vllm_plugin.cache import history_spec, request_in_flight_tokens, window_spec
from loopkv.vllm_plugin.compat import add_splitting_op
from loopkv.vllm_plugin.metadata import GroupMetadata, make_step
from loopkv.vllm_plugin.metrics import Counters, counters_path
from loopkv.vllm_plugin.operators import Operators, make_operators
from loopkv.vllm_plugin.served import ServedPlan, lay_out_for_worker
from loopkv.vllm_plugin.step import HistoryPages, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger("vllm.loopkv")

HISTORY_LAYER = "loopkv.0.history"  # vLLM wants exactly one integer in a layer's name
WINDOW_LAYER = "loopkv.1.window"


class VirtualLayer(AttentionLayerBase):
    """Owns one cache group of all cells; computes nothing itself.

    Args:
        spec: the group's cache spec.
        owner: the cache it is a part of.
        leads: whether its metadata announces a step to the owner.
    """

    def __init__(self, spec: KVCacheSpec, owner: CellCache, *, leads: bool) -> None:
        self.spec, self.owner, self.leads = spec, owner, leads
        self._kv_cache = torch.empty(0, dtype=torch.uint8)

    @property
    def kv_cache(self) -> Tensor:
        """The pool [blocks, ...]; empty until the engine has made it."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, tensor: Tensor) -> None:
        self._kv_cache = tensor
        self.owner.on_bind(self)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that names the cache's shape."""
        return LoopKVBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """The group's spec."""
        return self.spec


class CellCache:
    """The cache of all cells of one worker: layout, operators and the two virtual layers.

    Args:
        served: the plan, as the config hook admitted it.
        vllm_config: registers the virtual layers in its forward context.
        device: where the pool will lie.
    """

    def __init__(self, served: ServedPlan, vllm_config: VllmConfig, device: torch.device) -> None:
        parallel = vllm_config.parallel_config
        self.served = served
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)  # resolved by vLLM before any model is built
        self.dtype = dtype
        self.layout = lay_out_for_worker(served.plan, parallel.tensor_parallel_size, self.dtype)
        self.counters = Counters(counters_path(vllm_config.instance_id, parallel.data_parallel_index, parallel.rank))
        self.operators: Operators = make_operators(
            self.layout,
            served,
            dtype,
            max_rows=vllm_config.scheduler_config.max_num_seqs,
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_model_tokens=vllm_config.model_config.max_model_len,
            device=device,
            counters=self.counters,
        )
        window = window_spec(
            self.layout,
            self.dtype,
            in_flight_tokens=request_in_flight_tokens(vllm_config),
            null_leaving=served.chunk_tokens > self.layout.policy.max_exact_chunk_tokens,
        )
        self.history = VirtualLayer(history_spec(self.layout, self.dtype), self, leads=True)
        self.window = VirtualLayer(window, self, leads=False)
        self._max_model_len = vllm_config.model_config.max_model_len
        self._speaks = parallel.rank == 0
        self._given: Step | None = None
        self._step: Step | None = None
        self._step_metadata: object = None
        context = vllm_config.compilation_config.static_forward_context
        for name, layer in ((HISTORY_LAYER, self.history), (WINDOW_LAYER, self.window)):
            if name in context:
                raise ValueError(f"duplicate layer name {name}")
            context[name] = layer

    @property
    def pool(self) -> Tensor:
        """Every block of the engine's pool: [blocks, block_bytes] uint8."""
        return self.history.kv_cache.view(torch.uint8)

    def on_bind(self, layer: VirtualLayer) -> None:
        """Note the size of the pool and write the start-up line once the engine has made it."""
        if layer is not self.history or not layer.kv_cache.numel():
            return
        blocks = int(self.pool.shape[0]) - 1  # block 0 is the null block
        self.counters.set("pool_blocks", blocks)
        self.counters.flush()
        if self._speaks:
            logger.info(startup_line(self.served, self.layout, self.dtype, blocks, self._max_model_len))

    def on_step(self, tokens: Tensor | None, query_start: Tensor) -> None:
        """Called by the metadata builder once a step, on the host: publish counts.

        Args:
            tokens: [>= B] on the host, tokens of the rows after the step (upper bounds), or None if unknown.
            query_start: [B + 1] on the host, first new token of each row.
        """
        self.operators.publish(None if tokens is None else HistoryPages(self.layout.policy, tokens, query_start))

    def attend(self, cell: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """One cell of the current step; the first cell also codes the pages that leave.

        Args:
            cell: index of the cell.
            q, out: [T, Hq, D].
            k, v: [T, H, D].
        """
        if cell == 0:
            self._step = self._given if self._given is not None else self.context_step()
            self._step_metadata = get_forward_context().attn_metadata
            if self._step is not None:
                self.operators.code_leaving_pages(self._step)
        assert self._step_metadata is get_forward_context().attn_metadata, "a step begins with cell 0"
        if self._step is None:
            out.zero_()
        else:
            self.operators.attend(cell, q, k, v, out, self._step)

    def context_step(self) -> Step | None:
        """The engine's step; None in profiling and dummy runs, when the cache may not even exist."""
        metadata = get_forward_context().attn_metadata
        if not metadata:
            return None
        assert isinstance(metadata, dict)
        history, window = metadata[HISTORY_LAYER], metadata[WINDOW_LAYER]
        assert isinstance(history, GroupMetadata) and isinstance(window, GroupMetadata)
        return make_step(self.pool, history, window)

    @contextmanager
    def given_step(self, step: Step) -> Iterator[None]:
        """Inside, a forward pass computes this step instead of the engine's."""
        self._given = step
        try:
            yield
        finally:
            self._given = None


def startup_line(served: ServedPlan, layout: Layout, dtype: torch.dtype, blocks: int, max_model_len: int) -> str:
    """What is being served, in one line: plan, bytes per token beside BF16, concurrency, prefill mode."""
    plan = served.plan
    mine = plan.footprint_at(layout.exact_itemsize)
    exact = 2 * plan.fingerprint.geometry.kv_heads * plan.fingerprint.geometry.head_dim * layout.exact_itemsize
    exact *= len(plan.fingerprint.geometry.cells)
    lengths = sorted({n for n in (2048, 8192, 32768) if n < max_model_len} | {max_model_len})
    fits = ", ".join(f"{blocks // max(1, layout.request_bytes(n) // layout.block_bytes)} of {n:,}" for n in lengths)
    precision = "both value planes" if plan.tau is None else f"V precision tau {plan.tau:g} ({served.seed} seed)"
    return (
        f"LoopKV plan {plan.name!r} ({plan.sha256[:12]}): history stores {mine.stored_bytes:,} and reads "
        f"{mine.read_bytes:,} bytes a token ({mine.stored_bytes / exact:.1%} and {mine.read_bytes / exact:.1%} of "
        f"{str(dtype).removeprefix('torch.')} KV), {precision}; {blocks:,} blocks of {layout.block_bytes:,} bytes "
        f"({layout.history_block_tokens} history or {layout.window_block_tokens} exact tokens): requests resident at "
        f"once: {fits} tokens; prefix hits end at multiples of {layout.residency.grid_tokens} tokens; "
        f"prefill {served.describe_prefill}"
    )


def loopkv_attend(query: Tensor, key: Tensor, value: Tensor, output: Tensor, cell: int) -> None:
    """Attention of one cell, opaque to the compiler: q and output [T, Hq, D], k and v [T, H, D]."""
    layer = get_forward_context().no_compile_layers[HISTORY_LAYER]
    layer.owner.attend(cell, query, key, value, output)


def _loopkv_attend_fake(query: Tensor, key: Tensor, value: Tensor, output: Tensor, cell: int) -> None:
    return


def register_attend_op() -> None:
    """Register ``vllm::loopkv_attend``, which also splits piecewise CUDA graphs; safe to call again."""
    if not hasattr(torch.ops.vllm, "loopkv_attend"):
        direct_register_custom_op(
            op_name="loopkv_attend",
            op_func=loopkv_attend,
            mutates_args=["output"],
            fake_impl=_loopkv_attend_fake,
        )
    add_splitting_op("vllm::loopkv_attend")


register_attend_op()
