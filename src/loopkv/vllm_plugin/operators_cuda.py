"""The operators on CUDA: what the engine's step looks like to the kernels, and counters that cost no wait.

Counters stay on the device; now and then a copy to pinned memory is started, and read once it has arrived.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor

from loopkv.kernels.descriptor import SeedMode, cell_descriptors
from loopkv.kernels.launch import Branch
from loopkv.kernels.operators import CudaOperators, StepView
from loopkv.layout import Layout
from loopkv.vllm_plugin.metrics import Counters
from loopkv.vllm_plugin.prefill_cuda import make_prefill
from loopkv.vllm_plugin.step import HistoryPages, Step
from loopkv.vllm_plugin.step_parts import StepParts, divide, view_of

COPY_SECONDS = 0.25
"""Least time between two copies of the device counters."""

SEED_MODES = {"sink": SeedMode.SINK, "timed": SeedMode.TIMED, "none": SeedMode.NONE}


class CudaStepOperators:
    """See ``Operators``.

    Args:
        layout: the worker's layout.
        dtype: exact dtype of the engine.
        seed: seed mode of V precision.
        max_rows, max_tokens: most requests and new tokens of a step.
        max_model_tokens: most tokens of a request.
        device: of the worker.
        counters: where counts are published.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        *,
        seed: str,
        max_rows: int,
        max_tokens: int,
        max_model_tokens: int,
        device: torch.device,
        counters: Counters,
    ) -> None:
        self.counters = counters
        self.kernels = CudaOperators(
            layout, dtype, max_rows=max_rows, device=device, seed=SEED_MODES[seed], count_hot=layout.tau is not None
        )
        self.prefill = make_prefill(
            layout,
            dtype,
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_model_tokens=max_model_tokens,
            device=device,
            counters=self.kernels.code_counters,
            expansion=self.kernels.expand if self.kernels.expands else None,
        )
        self._branch, self._coding = Branch(device), Branch(device)
        first_loop = cell_descriptors(layout)[: layout.geometry.layers]
        shares = not all(cell.owns_history for cell in first_loop)  # reads pages of the final loop
        self._early_cells = len(layout.cells) if shares else len(first_loop)
        self._view: tuple[Step, StepView] | None = None
        self._parts: StepParts | None = None
        cells = sum(map(layout.has_precision, range(len(layout.cells))))
        self._values_per_page = layout.policy.page_tokens * layout.geometry.kv_heads * cells
        self._decode_values = self._copied_values = 0
        self._host = torch.zeros(5, dtype=torch.int64, device="cpu", pin_memory=True)
        self._arrived: torch.cuda.Event | None = None
        self._copied_at = 0.0

    def code_leaving_pages(self, step: Step) -> None:
        """See ``Operators.code_leaving_pages``."""
        view = self._step_view(step)
        if not self._fixed:
            self.kernels.code_leaving_pages(view)
            return
        # Inside a graph the first loop waits for its own pages alone; those of the others are coded beside it.
        self.kernels.code_leaving_pages(view, slice(0, self._early_cells))
        if self._early_cells < len(self.kernels.layout.cells):
            with self._coding.beside():
                self.kernels.code_leaving_pages(view, slice(self._early_cells, None), more=True)

    def attend(self, cell: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, step: Step) -> None:
        """See ``Operators.attend``."""
        view, parts = self._step_view(step), self._parts
        if cell == self._early_cells:
            self._coding.join()
        if k.stride(0) != v.stride(0):  # the kernels know one distance between tokens
            k, v = k.contiguous(), v.contiguous()
        if parts is None:
            self.kernels.attend(cell, q, k, v, out, view)
            return
        if self.kernels.fused:
            with self._branch.beside() if self._fixed else nullcontext():  # what it writes is not read in this cell
                self.kernels.store(cell, k, v, view, max_queries=parts.most_stored)
            if self.prefill is not None and parts.plan is not None:
                self.prefill.attend(cell, q, k, v, out, view, parts.plan)
            self._branch.join()
            for part in parts.mixed:
                self.kernels.attend_stored(cell, q, k, v, out, part.view, queries=part.count)
        else:  # every row, those with one new token too: what follows replaces their results
            self.kernels.attend(cell, q, k, v, out, view, max_queries=step.max_query_tokens)
        for part in parts.decode:
            t = part.tokens
            self.kernels.attend(cell, q[t], k[t], v[t], out[t], part.view)

    def take(self, step: Step, parts: StepParts) -> None:
        """Use these parts for ``step`` from now on, instead of dividing it (a step of ``step_graphs``)."""
        self._view, self._parts = (step, view_of(step)), parts

    def publish(self, pages: HistoryPages | None) -> None:
        """See ``Operators.publish``. Runs before a step is launched, never inside a graph."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._copy_counters(pages)
        if self._values_per_page and pages is not None:
            self._decode_values += pages.count()[1] * self._values_per_page

    def _copy_counters(self, pages: HistoryPages | None) -> None:
        """Publish the counters that have arrived; now and then ask the device for those of the steps before this."""
        if self._arrived is not None:
            if not self._arrived.query():
                return
            coded, clamped, hot, _, more_clamped = self._host.tolist()
            self._arrived = None
            if pages is not None:
                self.counters.set("history_pages", pages.count()[0])
            self.counters.set("pages_coded", coded)
            self.counters.set("clamped_values", clamped + more_clamped)
            self.counters.set("hot_values", hot)
            self.counters.set("decode_values", self._copied_values)
            self.counters.flush()
        now = time.monotonic()
        if now - self._copied_at >= COPY_SECONDS:
            self._copied_at, self._copied_values = now, self._decode_values
            self._host[:2].copy_(self.kernels.code_counters, non_blocking=True)
            self._host[2:3].copy_(self.kernels.hot_values, non_blocking=True)
            self._host[3:].copy_(self.kernels.more_counters, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def _fixed(self) -> bool:
        """Whether the step at hand is that of a graph."""
        return self._parts is not None and self._parts.plan is not None and self._parts.plan.fixed

    def _step_view(self, step: Step) -> StepView:
        if self._view is None or self._view[0] is not step:
            view = view_of(step)
            self._view = (step, view)
            self._parts = None if view.query_start is None else divide(step, view, self.prefill)
        return self._view[1]
