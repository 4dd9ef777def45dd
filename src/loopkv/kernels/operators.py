"""The operators on CUDA: what serving calls once a step and once a cell.

All buffers are allocated at construction and have fixed addresses, grids depend on the device and on host-known maxima
only, and nothing is copied to the host: a decode step can be captured in a CUDA graph. Two implementations of attention
share the interface: the fused one (bf16: one launch a cell, the newest token's append included) and a scalar one (fp32
and fp16 engines, ablations: an append and two launches).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loopkv.errors import UnsupportedError
from loopkv.kernels.build import MIXED_TILES
from loopkv.kernels.descriptor import (
    MIXED_COLUMNS,
    MIXED_SPLITS,
    AppendArgs,
    AttendArgs,
    AttendWorkspace,
    CacheView,
    CellDescriptor,
    CodeArgs,
    ExpandArgs,
    SeedMode,
    cache_geometry,
    cell_descriptors,
    check_row,
    check_served,
    max_parts,
)
from loopkv.kernels.library import load_library
from loopkv.layout import Layout

TIMED_SECONDS = 4e-6
MAX_ROWS = 1024
_CODE_BLOCKS_DECODE, _CODE_BLOCKS_MIXED = 4, 12  # of a multiprocessor: few pages leave in a decode step, if any
_SCALAR_QUERIES = 64  # of one launch of the scalar path: bounds its workspace


@dataclass(frozen=True, slots=True)
class StepView:
    """The cache in one step. Tables are [>= B, N] int32 block ids by position; block 0 is the null block.

    Args:
        pool: [blocks, block_bytes] uint8.
        history_table: entry i holds the pages of tokens ``[i * bh, (i + 1) * bh)``.
        window_table: entry i holds the exact KV of tokens ``[i * bw, (i + 1) * bw)``.
        seq_lens: [>= B] int32, tokens of each row after the step; 0 is padding.
        query_start: [>= B + 1] int32, first new token of each row; None: every row has one (a decode step).
        rows: B.
    """

    pool: Tensor
    history_table: Tensor
    window_table: Tensor
    seq_lens: Tensor
    query_start: Tensor | None
    rows: int


class CudaOperators:
    """Operators of one worker over its own heads.

    Args:
        layout: the layout served.
        dtype: the engine's (and cache's) dtype.
        max_rows: most rows of a step; sizes the workspaces.
        device: a CUDA device.
        seed: where V precision takes its first maximum from.
        count_hot: count hot (token, kv head) pairs into ``hot_values`` (one atomic per split).
        fused: False takes the scalar path in bf16 too (ablations).

    Attributes:
        hot_values: [1] int64, hot pairs so far.
        code_counters: [2] int64, pages coded (a page of all cells once) and values that were NaN or beyond fp16.
        more_counters: [2] int64, the same of launches whose pages are counted already.

    Raises:
        UnsupportedError: a layout, dtype or device that the kernels do not serve.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        *,
        max_rows: int,
        device: torch.device,
        seed: SeedMode = SeedMode.SINK,
        count_hot: bool = False,
        fused: bool = True,
    ) -> None:
        check_served(layout, dtype)
        if not 1 <= max_rows <= MAX_ROWS:
            raise UnsupportedError("rows of a step", got=max_rows, wanted=f"1 to {MAX_ROWS}")
        geometry = layout.geometry
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.layout, self.dtype, self.device, self.max_rows = layout, dtype, torch.device("cuda", index), max_rows
        self.seed = seed
        self.fused = fused and dtype == torch.bfloat16
        self.library = load_library(geometry.head_dim, geometry.group_queries, index)
        properties = torch.cuda.get_device_properties(index)
        self.blocks = properties.multi_processor_count  # one attention block fills a multiprocessor
        self._geometry = cache_geometry(layout, dtype)
        self._cells = cell_descriptors(layout)
        self._precision = tuple(map(layout.has_precision, range(len(layout.cells))))
        self._timed_cycles = int(TIMED_SECONDS * getattr(properties, "clock_rate", 1_980_000) * 1e3)
        heads, group, dim = geometry.kv_heads, geometry.group_queries, geometry.head_dim

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.tile_queries = MIXED_COLUMNS // group
        decode_rows = max_rows if self.fused else max(max_rows, _SCALAR_QUERIES)
        decode_parts = max_parts(layout.policy)
        mixed_parts = max_parts(layout.policy, self.tile_queries, MIXED_SPLITS)
        partials = heads * max(
            decode_rows * decode_parts * group, MIXED_TILES * mixed_parts * MIXED_COLUMNS if self.fused else 0
        )
        self.scalar_queries = decode_rows
        self.partial_o = zeros(partials, dim, dtype=torch.float32)
        self.partial_ml = zeros(partials, 2, dtype=torch.float32)
        self.seeds = zeros(max_rows, heads, group, dtype=torch.int64)
        self.arrivals = zeros(max(max_rows, MIXED_TILES), heads, dtype=torch.int32)
        self.control = zeros(4, dtype=torch.int32)
        self.hot_values = zeros(1, dtype=torch.int64)
        self.code_counters, self.more_counters = zeros(2, dtype=torch.int64), zeros(2, dtype=torch.int64)
        self._one_each = torch.arange(max_rows + 1, dtype=torch.int32, device=self.device)
        table = (CellDescriptor * len(self._cells))(*self._cells)
        self._cell_table = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(self.device)
        self._decode_workspace, self._mixed_workspace = (
            AttendWorkspace(
                partial_o=self.partial_o.data_ptr(),
                partial_ml=self.partial_ml.data_ptr(),
                seeds=self.seeds.data_ptr(),
                arrivals=self.arrivals.data_ptr(),
                control=self.control.data_ptr(),
                hot_values=self.hot_values.data_ptr() if count_hot else None,
                max_parts=parts,
            )
            for parts in (decode_parts, mixed_parts)
        )

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of the buffers."""
        buffers = (self.partial_o, self.partial_ml, self.seeds, self.arrivals)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def code_leaving_pages(self, step: StepView, cells: slice | None = None, *, more: bool = False) -> None:
        """Code, for all cells and rows, every page that the step pushes out of the window and that holds tokens of
        earlier steps only (with at most W new tokens of a row that is every page). One launch; returns at once on the
        device where nothing leaves.

        Args:
            step: the step.
            cells: consecutive ones, if not all.
            more: the pages are counted by another launch, for other cells.
        """
        self._check_size(step)
        first, end, _ = (cells or slice(None)).indices(len(self._cells))
        counters = self.more_counters if more else self.code_counters
        self._code(step, first, end - first, None, None, counters)

    def attend(
        self,
        cell: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        step: StepView,
        *,
        max_queries: int = 1,
        precision: bool = True,
        tau: float | None = None,
    ) -> None:
        """Append a cell's new keys and values to the window blocks, then attend under the policy.

        Args:
            cell: index of the cell.
            q, out: [T, Hq, D]; padded rows are neither read nor written.
            k, v: [T, H, D] after RoPE.
            step: the step; without ``query_start`` T is B.
            max_queries: most new tokens of a row; beyond W, pages that hold tokens of the step itself are coded here.
            precision: False reads both value planes whatever the plan says.
            tau: replaces the layout's threshold (tests).
        """
        self._check_size(step)
        for x in (q, k, v, out):
            assert x.stride(2) == 1 and x.stride(1) == x.shape[2], "heads of a token must lie together"
        assert k.stride(0) == v.stride(0)
        args = self._attend_args(cell, q, k, v, out, step)
        threshold = self.layout.tau if tau is None else tau
        args.tau = math.inf if threshold is None else threshold
        stream = torch.cuda.current_stream(self.device).cuda_stream
        decode = step.query_start is None
        by_choice = decode and precision and self._precision[cell]
        if self.fused and decode:
            self.library.attend_decode(args, precision=by_choice, blocks=self.blocks, stream=stream)
            return
        self._store(cell, k, v, step, max_queries, stream)
        if self.fused:
            self._attend_tiles(args, q.shape[0] // self.tile_queries + step.rows, stream)
        else:
            for first in range(0, q.shape[0], self.scalar_queries):
                args.first_tile, args.max_tiles = first, min(self.scalar_queries, q.shape[0] - first)
                self.library.attend_scalar(args, precision=by_choice, stream=stream)

    def store(self, cell: int, k: Tensor, v: Tensor, step: StepView, *, max_queries: int) -> None:
        """The first half of ``attend`` in a mixed step: append, and code pages that hold tokens of the step itself."""
        self._check_size(step)
        assert k.stride(0) == v.stride(0)
        self._store(cell, k, v, step, max_queries, torch.cuda.current_stream(self.device).cuda_stream)

    def attend_stored(
        self, cell: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: StepView, *, queries: int
    ) -> None:
        """The second half, for some rows: ``rows`` is a step cut to them (``query_start`` still counts from the batch's
        first token) with ``queries`` new tokens in all. Fused operators only.
        """
        args = self._attend_args(cell, q, k, v, out, rows)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._attend_tiles(args, queries // self.tile_queries + rows.rows, stream)

    @property
    def expands(self) -> bool:
        """Whether ``expand`` serves this head size and dtype."""
        return self.layout.geometry.head_dim % 128 == 0 and self.dtype == torch.bfloat16

    def expand(
        self,
        cell: CellDescriptor,
        k: Tensor,
        v: Tensor,
        step: StepView,
        tasks: Tensor,
        info: Tensor,
        coded: tuple[Tensor, Tensor],
        exact: tuple[Tensor, Tensor],
    ) -> None:
        """Expand a cell's history: see ``prefill.Expansion``, and ``expand_kernel`` for the tasks."""
        view = self._view(step)
        args = ExpandArgs.of(self._geometry, cell, view, k, v, tasks=tasks, info=info, coded=coded, exact=exact)
        self.library.expand(args, stream=torch.cuda.current_stream(self.device).cuda_stream)

    def _store(self, cell: int, k: Tensor, v: Tensor, step: StepView, max_queries: int, stream: int) -> None:
        self._append(cell, k, v, step, stream)
        if max_queries > self.layout.policy.window_tokens and self._cells[cell].owns_history:
            self._code(step, cell, 1, k, v, self.code_counters)

    def _attend_tiles(self, args: AttendArgs, most: int, stream: int) -> None:
        """Mixed attention over at most ``most`` tiles: one in part for every row."""
        args.workspace, args.geometry.max_splits = self._mixed_workspace, MIXED_SPLITS
        for first in range(0, most, MIXED_TILES):
            args.first_tile, args.max_tiles = first, min(MIXED_TILES, most - first)
            self.library.attend_mixed(args, blocks=self.blocks, stream=stream)

    def _check_size(self, step: StepView) -> None:
        if step.rows > self.max_rows:
            raise UnsupportedError("rows of a step", got=step.rows, wanted=f"<= {self.max_rows}")
        check_row(step.history_table.shape[1] * self.layout.pages_per_block, self.layout.policy)

    def _view(self, step: StepView) -> CacheView:
        return CacheView(
            pool=step.pool.data_ptr(),
            history_table=step.history_table.data_ptr(),
            window_table=step.window_table.data_ptr(),
            seq_lens=step.seq_lens.data_ptr(),
            history_table_stride=step.history_table.stride(0),
            window_table_stride=step.window_table.stride(0),
        )

    def _attend_args(self, cell: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, step: StepView) -> AttendArgs:
        return AttendArgs(
            geometry=self._geometry,
            cell=self._cells[cell],
            cache=self._view(step),
            workspace=self._decode_workspace,
            query_start=None if step.query_start is None else step.query_start.data_ptr(),
            q=q.data_ptr(),
            k_new=k.data_ptr(),
            v_new=v.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            kv_stride=k.stride(0),
            out_stride=out.stride(0),
            scale_log2=q.shape[2] ** -0.5 * math.log2(math.e),
            tau=math.inf,
            rows=step.rows,
            seed_mode=int(self.seed),
            timed_cycles=self._timed_cycles,
        )

    def _append(self, cell: int, k: Tensor, v: Tensor, step: StepView, stream: int) -> None:
        start = self._one_each if step.query_start is None else step.query_start
        args = AppendArgs(
            geometry=self._geometry,
            cell=self._cells[cell],
            cache=self._view(step),
            query_start=start.data_ptr(),
            k_new=k.data_ptr(),
            v_new=v.data_ptr(),
            kv_stride=k.stride(0),
            rows=step.rows,
        )
        self.library.append(args, queries=k.shape[0], stream=stream)

    def _code(
        self, step: StepView, first: int, count: int, k: Tensor | None, v: Tensor | None, counters: Tensor
    ) -> None:
        args = CodeArgs(
            geometry=self._geometry,
            cache=self._view(step),
            cells=self._cell_table[first * ctypes.sizeof(CellDescriptor) :].data_ptr(),
            query_start=None if step.query_start is None else step.query_start.data_ptr(),
            k_new=None if k is None else k.data_ptr(),
            v_new=None if v is None else v.data_ptr(),
            counters=counters.data_ptr(),
            kv_stride=0 if k is None else k.stride(0),
            cell_count=count,
            rows=step.rows,
        )
        stream = torch.cuda.current_stream(self.device).cuda_stream
        each = _CODE_BLOCKS_DECODE if step.query_start is None else _CODE_BLOCKS_MIXED
        self.library.code_pages(args, blocks=each * self.blocks, stream=stream)
