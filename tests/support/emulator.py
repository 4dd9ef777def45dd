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
from loopkv.kernels.cases import Case, reads_low_plane_by_choice
from loopkv.kernels.descriptor import (
    CacheView,
    DecodeArgs,
    DecodeWorkspace,
    SeedMode,
    cache_geometry,
    cell_descriptors,
    max_parts,
)

_SOURCES = Path(loopkv.kernels.__file__).parent / "csrc"


@functools.cache
def emulated(head_dim: int, query_tiles: int, bulk_copy: bool = True) -> ctypes.CDLL:
    """The kernels for one head size, compiled for the host."""
    target = Path(tempfile.mkdtemp(prefix="loopkv-emulated-")) / "kernels.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    defines = [
        f"-DLOOPKV_HEAD_DIM={head_dim}",
        f"-DLOOPKV_QUERY_TILES={query_tiles}",
        f"-DLOOPKV_BULK_COPY={int(bulk_copy)}",
    ]
    subprocess.run(["g++", *flags, *defines, "-o", str(target), str(_SOURCES / "emulated.cpp")], check=True)
    return ctypes.CDLL(str(target))


class EmulatedDecode:
    """The decode kernel on host memory, workspaces kept between launches as on a device."""

    def __init__(self, case: Case, *, blocks: int = 2, bulk_copy: bool = True) -> None:
        spec = case.spec
        self.library = emulated(spec.head_dim, -(-spec.group_queries // 8), bulk_copy)
        self.case, self.blocks = case, blocks
        rows, heads, group, dim = len(spec.tokens), spec.kv_heads, spec.group_queries, spec.head_dim
        parts = max_parts(case.layout.policy)
        self.partial_o = torch.full((rows, heads, parts, group, dim), math.nan)
        self.partial_ml = torch.full((rows, heads, parts, group, 2), math.nan)
        self.seeds = torch.zeros(rows, heads, group, dtype=torch.int64)
        self.arrivals = torch.zeros(rows, heads, dtype=torch.int32)
        self.control = torch.zeros(4, dtype=torch.int32)
        self.hot_values = torch.zeros(1, dtype=torch.int64)
        self.workspace = DecodeWorkspace(
            partial_o=self.partial_o.data_ptr(),
            partial_ml=self.partial_ml.data_ptr(),
            seeds=self.seeds.data_ptr(),
            arrivals=self.arrivals.data_ptr(),
            control=self.control.data_ptr(),
            hot_values=self.hot_values.data_ptr(),
            max_parts=parts,
        )

    def __call__(
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
        case, spec = self.case, self.case.spec
        pool = case.pool if pool is None else pool
        seq_lens, history, window = (
            x[rows].contiguous() for x in (case.seq_lens, case.history_table, case.window_table)
        )
        q, k, v = (x[cell, rows].contiguous() for x in (case.q, case.k_new, case.v_new))
        out = torch.full_like(q, math.nan)
        tau = case.layout.tau if tau is None else tau
        args = DecodeArgs(
            geometry=cache_geometry(case.layout, spec.dtype),
            cell=cell_descriptors(case.layout)[cell],
            cache=CacheView(
                pool=pool.data_ptr(),
                history_table=history.data_ptr(),
                window_table=window.data_ptr(),
                seq_lens=seq_lens.data_ptr(),
                history_table_stride=history.stride(0),
                window_table_stride=window.stride(0),
            ),
            workspace=self.workspace,
            q=q.data_ptr(),
            k_new=k.data_ptr(),
            v_new=v.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            kv_stride=k.stride(0),
            out_stride=out.stride(0),
            scale_log2=case.scale * math.log2(math.e),
            tau=math.inf if tau is None else tau,
            rows=len(seq_lens),
            seed_mode=int(seed),
            timed_cycles=8000,
        )
        use = reads_low_plane_by_choice(case.layout, cell) if precision is None else precision
        assert self.library.loopkv_attend_decode(ctypes.byref(args), int(use), self.blocks, None) == 0
        return out
