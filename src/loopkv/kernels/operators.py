"""The operators on CUDA: what serving calls once a step and once a cell.

All buffers are allocated at construction and have fixed addresses, grids depend on nothing but the device, and nothing
is copied to the host: every call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loopkv.errors import UnsupportedError
from loopkv.kernels.descriptor import (
    CacheView,
    DecodeArgs,
    DecodeWorkspace,
    SeedMode,
    cache_geometry,
    cell_descriptors,
    check_served,
    max_parts,
)
from loopkv.kernels.library import load_library
from loopkv.layout import Layout
from loopkv.options import INT4

TIMED_SECONDS = 4e-6
MAX_ROWS = 1024


class CudaOperators:
    """Operators of one worker over its own heads.

    Args:
        layout: the layout served.
        dtype: the engine's (and cache's) dtype.
        max_rows: most rows of a decode step; sizes the workspaces.
        device: a CUDA device.
        seed: where V precision takes its first maximum from.
        count_hot: count hot values into ``hot_values`` (one atomic per split).

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
    ) -> None:
        check_served(layout, dtype)
        if not 1 <= max_rows <= MAX_ROWS:
            raise UnsupportedError("rows of a decode step", got=max_rows, wanted=f"1 to {MAX_ROWS}")
        geometry = layout.geometry
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.layout, self.dtype, self.device, self.max_rows = layout, dtype, torch.device("cuda", index), max_rows
        self.library = load_library(geometry.head_dim, geometry.group_queries, index)
        properties = torch.cuda.get_device_properties(index)
        self.blocks = properties.multi_processor_count  # one block fills a multiprocessor
        self._geometry = cache_geometry(layout, dtype)
        self._cells = cell_descriptors(layout)
        self._precision = tuple(
            layout.tau is not None and layout.cells[place.holder].option == INT4 for place in layout.cells
        )
        self.seed = seed
        self._timed_cycles = int(TIMED_SECONDS * getattr(properties, "clock_rate", 1_980_000) * 1e3)
        heads, group, dim, parts = (
            geometry.kv_heads,
            geometry.group_queries,
            geometry.head_dim,
            max_parts(layout.policy),
        )

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.partial_o = zeros(max_rows, heads, parts, group, dim, dtype=torch.float32)
        self.partial_ml = zeros(max_rows, heads, parts, group, 2, dtype=torch.float32)
        self.seeds = zeros(max_rows, heads, group, dtype=torch.int64)
        self.arrivals = zeros(max_rows, heads, dtype=torch.int32)
        self.control = zeros(4, dtype=torch.int32)
        self.hot_values = zeros(1, dtype=torch.int64)
        self._workspace = DecodeWorkspace(
            partial_o=self.partial_o.data_ptr(),
            partial_ml=self.partial_ml.data_ptr(),
            seeds=self.seeds.data_ptr(),
            arrivals=self.arrivals.data_ptr(),
            control=self.control.data_ptr(),
            hot_values=self.hot_values.data_ptr() if count_hot else None,
            max_parts=parts,
        )

    def attend_decode(
        self,
        cell: int,
        q: Tensor,
        k_new: Tensor | None,
        v_new: Tensor | None,
        out: Tensor,
        *,
        pool: Tensor,
        history_table: Tensor,
        window_table: Tensor,
        seq_lens: Tensor,
        precision: bool = True,
        tau: float | None = None,
    ) -> None:
        """Attention of one cell for a step of one new token per row, which is also written to its window block.

        Args:
            cell: index of the cell.
            q, out: [B, Hq, D]; rows whose ``seq_lens`` is 0 are neither read nor written.
            k_new, v_new: [B, H, D] of the newest token; None where the window blocks hold it already.
            pool: [blocks, block_bytes] uint8.
            history_table, window_table: [>= B, N] int32 block ids by position.
            seq_lens: [>= B] int32, tokens of each row, the newest included.
            precision: False reads both value planes whatever the plan says.
            tau: replaces the layout's threshold (tests).
        """
        rows = q.shape[0]
        if rows > self.max_rows:
            raise UnsupportedError("rows of a decode step", got=rows, wanted=f"<= {self.max_rows}")
        assert q.stride(1) == q.shape[2] and q.stride(2) == 1 and out.stride(1) == out.shape[2]
        fresh = k_new is not None and v_new is not None
        if fresh:
            assert k_new is not None and v_new is not None
            assert k_new.stride(0) == v_new.stride(0) and k_new.stride(2) == 1 and k_new.stride(1) == k_new.shape[2]
        threshold = self.layout.tau if tau is None else tau
        args = DecodeArgs(
            geometry=self._geometry,
            cell=self._cells[cell],
            cache=CacheView(
                pool=pool.data_ptr(),
                history_table=history_table.data_ptr(),
                window_table=window_table.data_ptr(),
                seq_lens=seq_lens.data_ptr(),
                history_table_stride=history_table.stride(0),
                window_table_stride=window_table.stride(0),
            ),
            workspace=self._workspace,
            q=q.data_ptr(),
            k_new=k_new.data_ptr() if k_new is not None else None,
            v_new=v_new.data_ptr() if v_new is not None else None,
            out=out.data_ptr(),
            q_stride=q.stride(0),
            kv_stride=k_new.stride(0) if k_new is not None else 0,
            out_stride=out.stride(0),
            scale_log2=q.shape[2] ** -0.5 * math.log2(math.e),
            tau=math.inf if threshold is None else threshold,
            rows=rows,
            seed_mode=int(self.seed),
            timed_cycles=self._timed_cycles,
        )
        self.library.attend_decode(
            args,
            precision=precision and self._precision[cell],
            blocks=self.blocks,
            stream=torch.cuda.current_stream(self.device).cuda_stream,
        )
