"""The CUDA kernels run on the host: built with g++ from the same sources, called with the same structs."""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
import tempfile
from pathlib import Path

import torch

import loopkv.kernels
from loopkv.kernels.cases import Case
from loopkv.kernels.descriptor import (
    MIXED_COLUMNS,
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
    max_parts,
)

_SOURCES = Path(loopkv.kernels.__file__).parent / "csrc"


@functools.cache
def emulated(head_dim: int, group_queries: int, bulk_copy: bool = True) -> ctypes.CDLL:
    """The kernels for one head size, compiled for the host."""
    flags = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    defines = [
        f"-DLOOPKV_HEAD_DIM={head_dim}",
        f"-DLOOPKV_QUERY_TILES={-(-group_queries // 8)}",
        f"-DLOOPKV_SINGLE={int(group_queries == 1)}",
        f"-DLOOPKV_BULK_COPY={int(bulk_copy)}",
    ]
    with tempfile.TemporaryDirectory(prefix="loopkv-emulated-") as folder:  # a loaded library needs its file no more
        target = Path(folder) / "kernels.so"
        subprocess.run(["g++", *flags, *defines, "-o", str(target), str(_SOURCES / "emulated.cpp")], check=True)
        return ctypes.CDLL(str(target))


class EmulatedKernels:
    """The kernels on host memory for one case, workspaces kept between launches as on a device."""

    def __init__(self, case: Case, *, blocks: int = 2, bulk_copy: bool = True) -> None:
        spec = case.spec
        self.library = emulated(spec.head_dim, spec.group_queries, bulk_copy)
        self.case, self.blocks = case, blocks
        self.geometry = cache_geometry(case.layout, spec.dtype)
        self.cells = cell_descriptors(case.layout)
        heads, group, dim = spec.kv_heads, spec.group_queries, spec.head_dim
        tile_queries = MIXED_COLUMNS // group
        tiles = max(len(spec.tokens), 64)
        parts = max_parts(case.layout.policy, tile_queries)
        self.tiles = tiles
        self.partial_o = torch.full((tiles, heads, parts, MIXED_COLUMNS, dim), math.nan)
        self.partial_ml = torch.full((tiles, heads, parts, MIXED_COLUMNS, 2), math.nan)
        self.seeds = torch.zeros(tiles, heads, group, dtype=torch.int64)
        self.arrivals = torch.zeros(tiles, heads, dtype=torch.int32)
        self.control = torch.zeros(4, dtype=torch.int32)
        self.hot_values = torch.zeros(1, dtype=torch.int64)
        self.counters = torch.zeros(2, dtype=torch.int64)
        self.workspace = AttendWorkspace(
            partial_o=self.partial_o.data_ptr(),
            partial_ml=self.partial_ml.data_ptr(),
            seeds=self.seeds.data_ptr(),
            arrivals=self.arrivals.data_ptr(),
            control=self.control.data_ptr(),
            hot_values=self.hot_values.data_ptr(),
            max_parts=parts,
        )

    def _view(self, pool: torch.Tensor, seq_lens: torch.Tensor, rows: slice = slice(None)) -> CacheView:
        case = self.case
        self._tables = (case.history_table[rows].contiguous(), case.window_table[rows].contiguous(), seq_lens)
        history, window, _ = self._tables
        return CacheView(
            pool=pool.data_ptr(),
            history_table=history.data_ptr(),
            window_table=window.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            history_table_stride=history.stride(0),
            window_table_stride=window.stride(0),
        )

    def decode(
        self,
        cell: int,
        *,
        pool: torch.Tensor | None = None,
        seed: SeedMode = SeedMode.SINK,
        tau: float | None = None,
        precision: bool | None = None,
        rows: slice = slice(None),
    ) -> torch.Tensor:
        """o [B, Hq, D] of one cell; ``tau`` and ``precision`` replace the layout's."""
        case = self.case
        q, k, v = (x[cell, rows].contiguous() for x in (case.q, case.k_new, case.v_new))
        use = case.layout.has_precision(cell) if precision is None else precision
        tau = case.layout.tau if tau is None else tau
        out = torch.full_like(q, math.nan)
        view = self._view(case.pool if pool is None else pool, case.seq_lens[rows].contiguous(), rows)
        args = self._args(cell, q, k, v, out, view)
        args.seed_mode, args.tau = int(seed), math.inf if tau is None else tau
        assert self.library.loopkv_attend_decode(ctypes.byref(args), int(use), self.blocks, None) == 0
        return out

    def mixed(
        self,
        cell: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        pool: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        first_tile: int = 0,
    ) -> torch.Tensor:
        """o [T, Hq, D] of one cell of a step with several new tokens per row."""
        out = torch.full_like(q, math.nan)
        args = self._args(cell, q, k, v, out, self._view(pool, seq_lens))
        args.query_start, args.first_tile, args.max_tiles = query_start.data_ptr(), first_tile, self.tiles
        assert self.library.loopkv_attend_mixed(ctypes.byref(args), self.blocks, None) == 0
        return out

    def scalar(
        self,
        cell: int,
        *,
        pool: torch.Tensor,
        seed: SeedMode = SeedMode.SINK,
        precision: bool | None = None,
    ) -> torch.Tensor:
        """o [B, Hq, D] of one cell of the decode step by the scalar kernels."""
        case = self.case
        q, k, v = (x[cell].contiguous() for x in (case.q, case.k_new, case.v_new))
        use = case.layout.has_precision(cell) if precision is None else precision
        out = torch.full_like(q, math.nan)
        args = self._args(cell, q, k, v, out, self._view(pool, case.seq_lens))
        args.seed_mode, args.max_tiles = int(seed), len(case.seq_lens)
        args.tau = math.inf if case.layout.tau is None else case.layout.tau
        assert self.library.loopkv_attend_scalar(ctypes.byref(args), int(use), None) == 0
        return out

    def append(
        self,
        cell: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        pool: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
    ) -> None:
        """Write a step's keys and values to the window blocks."""
        args = AppendArgs(
            geometry=self.geometry,
            cell=self.cells[cell],
            cache=self._view(pool, seq_lens),
            query_start=query_start.data_ptr(),
            k_new=k.data_ptr(),
            v_new=v.data_ptr(),
            kv_stride=k.stride(0),
            rows=len(seq_lens),
        )
        assert self.library.loopkv_append(ctypes.byref(args), len(k), None) == 0

    def expand(
        self,
        cell: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        tasks: torch.Tensor,
        info: torch.Tensor,
        coded: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Expand a cell's history: see ``loopkv.kernels.prefill.Expansion``."""
        view = self._view(self.case.pool, self.case.seq_lens)
        args = ExpandArgs.of(
            self.geometry, self.cells[cell], view, k, v, tasks=tasks, info=info, coded=coded, exact=exact
        )
        assert self.library.loopkv_expand(ctypes.byref(args), None) == 0

    def code_pages(
        self,
        *,
        pool: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor | None = None,
        late: tuple[int, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Code leaving pages: of all cells, or with ``late`` (cell, k, v) those a cell codes after its append."""
        first, count = (0, len(self.cells)) if late is None else (late[0], 1)
        cells = (CellDescriptor * count)(*self.cells[first : first + count])
        args = CodeArgs(
            geometry=self.geometry,
            cache=self._view(pool, seq_lens),
            cells=ctypes.addressof(cells),
            query_start=None if query_start is None else query_start.data_ptr(),
            k_new=None if late is None else late[1].data_ptr(),
            v_new=None if late is None else late[2].data_ptr(),
            counters=self.counters.data_ptr(),
            kv_stride=0 if late is None else late[1].stride(0),
            cell_count=count,
            rows=len(seq_lens),
        )
        assert self.library.loopkv_code_pages(ctypes.byref(args), self.blocks, None) == 0

    def _args(
        self, cell: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, view: CacheView
    ) -> AttendArgs:
        return AttendArgs(
            geometry=self.geometry,
            cell=self.cells[cell],
            cache=view,
            workspace=self.workspace,
            q=q.data_ptr(),
            k_new=k.data_ptr(),
            v_new=v.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            kv_stride=k.stride(0),
            out_stride=out.stride(0),
            scale_log2=self.case.scale * math.log2(math.e),
            tau=math.inf,
            rows=len(self._tables[2]),
            timed_cycles=8000,
        )
