"""Prefill steps of few tokens as CUDA graphs: a chunk of 256 tokens is thousands of launches and little work.

A graph is captured for a shape: most decode rows, rows with several new tokens, new tokens and history tokens. A step
that is no larger copies its tokens, tables and lengths into buffers of fixed addresses and replays it. What is not
there has no length: a padded row gets no tokens, a padded token belongs to no row, so neither is stored nor read.

Capturing computes nothing, so a graph may be captured whenever its kernels are loaded; they are loaded by a step in
which every row is padding.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopkv.kernels.int_arrays import FixedArrays, Ints
from loopkv.kernels.prefill import Prefill, PrefillPlan
from loopkv.kernels.prefill_plan import (
    HISTORY_ROOMS,
    MOST_FIXED_TOKENS,
    Room,
    Rows,
    boundaries,
    fixed_arrays,
    history_room,
)
from loopkv.policy import Policy
from loopkv.vllm_plugin.operators_cuda import CudaStepOperators
from loopkv.vllm_plugin.step import Step
from loopkv.vllm_plugin.step_parts import StepParts, decode_part, view_of

logger = logging.getLogger("vllm.loopkv")

NEW_TOKENS = (256, 512, MOST_FIXED_TOKENS)
"""New tokens of rows with several: beyond these the device is busy for longer than the host needs to launch."""
DECODE_ROWS = (0, 8, 64, 256)
ROW_TOKENS = 64
"""A shape has a row for so many new tokens."""
SPARED_ROWS = 4
"""Rows of a step that no shape has for decode."""
MOST_GRAPHS = 16

Run = Callable[[Step, Tensor, Tensor], Tensor]
"""The model: a step, [T] token ids and [T] positions to [T, E] hidden states."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one graph holds: ``decode_rows`` rows of one token each, then the rows of ``room``."""

    decode_rows: int
    room: Room

    @property
    def rows(self) -> int:
        """Of the step."""
        return self.decode_rows + self.room.rows

    @property
    def tokens(self) -> int:
        """Of the step."""
        return self.decode_rows + self.room.new_tokens


@dataclass(frozen=True, slots=True)
class Buffers:
    """Inputs of all graphs, sized for the largest shape."""

    ids: Tensor
    positions: Tensor
    history_table: Tensor
    window_table: Tensor


@dataclass(slots=True)
class StepGraph:
    """A graph, once it has been captured, and the integers that it reads."""

    shape: Shape
    arrays: FixedArrays
    step: Step
    parts: StepParts
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """A step that a shape holds: its first ``decode`` rows have one new token each, ``rows`` have several."""

    shape: Shape
    decode: int
    rows: Rows

    @property
    def new_tokens(self) -> int:
        """Of the rows with several."""
        return int(self.rows.new.sum())


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of one worker.

    Args:
        policy: of the layout.
        max_rows: most requests of a step.
        max_tokens: most new tokens of a step.
        coded_tokens: that the coded scratch holds.
    """

    policy: Policy
    max_rows: int
    max_tokens: int
    coded_tokens: int

    def fit(self, step: Step) -> Fit | None:
        """The smallest shape that holds a step; None where none does, or no row has several new tokens."""
        if step.seq_lens_cpu is None:
            return None
        starts: Ints = step.query_start_cpu.numpy()
        new = np.diff(starts)
        there = int(np.count_nonzero(new))  # padded rows come last
        decode = int(np.argmax(new[:there] != 1)) if bool((new[:there] != 1).any()) else there
        lens: Ints = step.seq_lens_cpu[decode:there].numpy()
        new = new[decode:there]
        if not len(new) or int(new.min()) < 2 or bool((lens < new).any()):  # or rows come in another order
            return None
        for decode_rows in self.decode_rows:
            for tokens in NEW_TOKENS:
                room = self.room(decode_rows, tokens, 0)
                if decode_rows < decode or room is None or room.rows < len(new) or tokens < int(new.sum()):
                    continue
                table_rows = np.arange(decode_rows, decode_rows + len(new), dtype=np.int32)
                first = (starts[decode:there] + (decode_rows - starts[decode])).astype(np.int32)
                rows = boundaries(self.policy, table_rows, first, lens - new, new)
                room = self.room(decode_rows, tokens, rows.scratch_tokens(self.policy))
                assert room is not None
                return Fit(Shape(decode_rows, room), decode, rows) if room.holds(self.policy, rows) else None
        return None

    @property
    def decode_rows(self) -> tuple[int, ...]:
        """Sizes of the decode part."""
        return tuple(sorted({max(0, min(rows, self.max_rows - SPARED_ROWS)) for rows in DECODE_ROWS}))

    def room(self, decode_rows: int, new_tokens: int, coded_tokens: int) -> Room | None:
        """Of a shape; None where a step cannot be that large."""
        rows = min(new_tokens // ROW_TOKENS, self.max_rows - decode_rows)
        if rows < 1 or new_tokens > self.max_tokens:
            return None
        return Room(rows, new_tokens, min(history_room(coded_tokens), self.coded_tokens))


class StepGraphs:
    """The graphs of one worker.

    Args:
        operators: of the worker; their prefill must exist.
        run: the model.
        max_rows: most requests of a step.
        max_tokens: most new tokens of a step.
        max_model_tokens: most tokens of a request.
        device: of the worker.
    """

    def __init__(
        self,
        operators: CudaStepOperators,
        run: Run,
        *,
        max_rows: int,
        max_tokens: int,
        max_model_tokens: int,
        device: torch.device,
    ) -> None:
        assert operators.prefill is not None and operators.kernels.fused
        self.operators, self.run, self.device = operators, run, device
        self.prefill: Prefill = operators.prefill
        self.policy = self.prefill.policy
        self.max_rows, self.max_model_tokens = max_rows, max_model_tokens
        self.shapes = Shapes(self.policy, max_rows, max_tokens, self.prefill.coded_tokens)
        self.replays = 0
        self._graphs: dict[Shape, StepGraph] = {}  # the least recently used first
        self._buffers: Buffers | None = None
        self._loaded: set[tuple[int, int]] = set()  # decode rows and new tokens whose kernels are loaded
        self._stream: torch.cuda.Stream | None = None
        self._memory: Any = None  # of all graphs

    # -- running -------------------------------------------------------------------------------------------------------

    def forward(self, step: Step, ids: Tensor, positions: Tensor) -> Tensor | None:
        """Hidden states [T, E] of a step, or None where no shape holds it; what padded tokens get is undefined.

        Args:
            step: as the engine has it.
            ids, positions: [T].
        """
        fit = self.shapes.fit(step)
        if fit is None:
            return None
        graph = self._graph(fit.shape, step, ids, positions)
        self._fill(graph, fit, step, ids, positions)
        assert graph.graph is not None and graph.hidden is not None
        graph.graph.replay()
        self.replays += 1
        d, n, first = fit.decode, fit.new_tokens, fit.shape.decode_rows
        hidden = graph.hidden.new_empty(ids.shape[0], graph.hidden.shape[1])
        if d:
            hidden[:d].copy_(graph.hidden[:d])
        hidden[d : d + n].copy_(graph.hidden[first : first + n])
        return hidden

    def prepare(self, step: Step, ids: Tensor, positions: Tensor) -> None:
        """Capture the graphs of single requests, so that none waits for them; the step only gives dtypes, widths."""
        longest = min(self.max_model_tokens + self.policy.page_tokens, self.prefill.coded_tokens)
        for coded in HISTORY_ROOMS:
            room = self.shapes.room(0, NEW_TOKENS[0], coded)
            if room is None:
                return
            self._graph(Shape(0, room), step, ids, positions)
            if coded >= longest:
                break

    @property
    def count(self) -> int:
        """Graphs that exist."""
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs: they hold the pool's address."""
        if self._graphs:
            torch.cuda.synchronize(self.device)
            self._graphs.clear()
            self._memory = None  # went with the last graph

    def _graph(self, shape: Shape, step: Step, ids: Tensor, positions: Tensor) -> StepGraph:
        graph = self._graphs.pop(shape, None)
        if graph is None:
            started, free = time.monotonic(), torch.cuda.mem_get_info(self.device)[0]
            graph = self._make(shape, self._buffers_like(step, ids, positions), step.pool)
            self._capture(graph)
            logger.info(
                "LoopKV: prefill graph %d for %d decode rows, %d new and %d history tokens: %.0f ms, %.0f MiB",
                len(self._graphs) + 1,
                shape.decode_rows,
                shape.room.new_tokens,
                shape.room.coded_tokens,
                1e3 * (time.monotonic() - started),
                (free - torch.cuda.mem_get_info(self.device)[0]) / 2**20,
            )
            if len(self._graphs) >= MOST_GRAPHS:
                torch.cuda.synchronize(self.device)  # before the oldest, which may still run, is destroyed
                del self._graphs[next(iter(self._graphs))]
        self._graphs[shape] = graph
        return graph

    def _buffers_like(self, step: Step, ids: Tensor, positions: Tensor) -> Buffers:
        """The inputs of all graphs, made when dtypes and the tables' widths are first seen."""
        if self._buffers is None:
            tokens = DECODE_ROWS[-1] + NEW_TOKENS[-1]

            def table(like: Tensor) -> Tensor:
                return torch.zeros(self.max_rows, like.shape[1], dtype=like.dtype, device=self.device)

            self._buffers = Buffers(
                ids=torch.zeros(tokens, dtype=ids.dtype, device=self.device),
                positions=torch.zeros(tokens, dtype=positions.dtype, device=self.device),
                history_table=table(step.history_table),
                window_table=table(step.window_table),
            )
        return self._buffers

    def _make(self, shape: Shape, buffers: Buffers, pool: Tensor) -> StepGraph:
        policy, rows = self.policy, shape.rows
        arrays = FixedArrays([(rows,), (rows + 1,), *shape.room.shapes(policy)], self.device)
        group = self.prefill.fixed_group(shape.room, shape.decode_rows, arrays.views[2:])
        step = Step(
            pool=pool,
            history_table=buffers.history_table[:rows],
            window_table=buffers.window_table[:rows],
            seq_lens=arrays.views[0],
            query_start=arrays.views[1],
            query_start_cpu=torch.zeros(rows + 1, dtype=torch.int32),
            max_query_tokens=max(2, group.max_new),
            max_seq_tokens=self.max_model_tokens,
            tokens=shape.tokens,
        )
        decode = (decode_part(view_of(step), shape.decode_rows),) if shape.decode_rows else ()
        parts = StepParts(decode=decode, mixed=(), plan=PrefillPlan((group,), (), False), most_stored=1)
        return StepGraph(shape, arrays, step, parts)

    def _capture(self, graph: StepGraph) -> None:
        """Capture; kernels that may not be loaded yet run on a step of padding before."""
        buffers, shape = self._buffers, graph.shape
        assert buffers is not None
        ids, positions = buffers.ids[: shape.tokens], buffers.positions[: shape.tokens]
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        self._fill_nothing(graph)
        self._stream.wait_stream(current)
        self.operators.take(graph.step, graph.parts)
        collects = gc.isenabled()
        gc.disable()  # freeing another graph or event while this one is captured would end it
        try:
            with torch.cuda.stream(self._stream):
                if (shape.decode_rows, shape.room.new_tokens) not in self._loaded:
                    self.run(graph.step, ids, positions)
                    self._loaded.add((shape.decode_rows, shape.room.new_tokens))
                made = torch.cuda.CUDAGraph()
                # other threads of the engine may call CUDA meanwhile
                made.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    graph.hidden = self.run(graph.step, ids, positions)
                finally:
                    made.capture_end()
                graph.graph = made
        finally:
            if collects:
                gc.enable()
            current.wait_stream(self._stream)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _fill(self, graph: StepGraph, fit: Fit, step: Step, ids: Tensor, positions: Tensor) -> None:
        """Everything that a replay reads."""
        buffers, shape = self._buffers, graph.shape
        assert buffers is not None
        d, n, first, count = fit.decode, fit.new_tokens, shape.decode_rows, len(fit.rows.row)
        graph.arrays.fill(step_arrays(self.policy, shape, fit.rows, d))
        if d:
            graph.step.seq_lens[:d].copy_(step.seq_lens[:d])
        pairs = (
            (buffers.ids, ids, n),
            (buffers.positions, positions, n),
            (buffers.history_table, step.history_table, count),
            (buffers.window_table, step.window_table, count),
        )
        for to, source, size in pairs:
            if d == first:
                to[: d + size].copy_(source[: d + size])
            else:
                if d:
                    to[:d].copy_(source[:d])
                to[first : first + size].copy_(source[d : d + size])

    def _fill_nothing(self, graph: StepGraph) -> None:
        none = np.zeros(0, np.int32)
        nothing = boundaries(self.policy, none, none, none, none)
        graph.arrays.fill(step_arrays(self.policy, graph.shape, nothing, 0))


def step_arrays(policy: Policy, shape: Shape, rows: Rows, decode: int) -> list[Ints]:
    """Lengths and first tokens of a shape's rows, and the arrays of its room.

    Decode rows have length 0 here: theirs are known on the device.

    Args:
        policy: of the layout.
        shape: of the graph.
        rows: that have several new tokens.
        decode: rows before them that have one.
    """
    first, count = shape.decode_rows, len(rows.row)
    lens = np.zeros(shape.rows, np.int32)
    lens[first : first + count] = rows.computed + rows.new
    starts = np.full(shape.rows + 1, first + int(rows.new.sum()), np.int32)
    starts[:decode] = np.arange(decode)
    starts[decode:first] = decode  # tokens up to ``first`` are the last of these rows', whose length is 0
    starts[first : first + count] = rows.start
    return [lens, starts, *fixed_arrays(policy, rows, shape.room)]
