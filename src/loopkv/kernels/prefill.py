"""Prefill through a library's attention: its buffers, and the launches around it.

With window W and pages of P tokens, a query at position p reads keys from ``p - W + 1`` on exact, keys before
``p + 2 - W - P`` coded, and the P - 1 keys between either way, by its own boundary. So three parts make a result:
causal attention over the history expanded to plain keys and values, causal attention over a sliding window of exact
ones, and two half pages, which the kernel that joins the parts reads itself. Pages that leave the window inside their
own chunk are coded here too.

The attention over the first two parts is a function argument: nothing here knows whose it is. ``prefill_plan`` decides
which rows come here, and in which groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from loopkv.kernels.descriptor import CellDescriptor, cell_descriptors
from loopkv.kernels.encode import encode_kernel
from loopkv.kernels.expand import expand_kernel, heads_together
from loopkv.kernels.int_arrays import Ints, send
from loopkv.kernels.join import add_kernel, join_kernel
from loopkv.kernels.launch import Branch, Launcher
from loopkv.kernels.operators import StepView
from loopkv.kernels.prefill_plan import (
    INFO_COLUMNS,
    MOST_FIXED_TOKENS,
    GroupArrays,
    Room,
    Rows,
    batches,
    group_arrays,
    rows_taken,
    rows_there,
    runs_of,
    splits,
    tiles,
)
from loopkv.layout import Layout

_FIRST = -5  # of stream priorities: the window's attention waits for whole multiprocessors that others would take
_EXACT_ROWS = 16  # rows whose earlier window fits beside a full step's tokens; more are divided


class VarlenAttention(Protocol):
    """Attention of rows packed one after the other, as FlashAttention has it."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        window: int | None,
        splits: int,
        out: Tensor,
    ) -> Tensor:
        """Write ``out``, return the log-sum-exp.

        Args:
            q, out: [T, Hq, D].
            k, v: [N, H, D].
            cu_q, cu_k: [R + 1] int32, first token of each row.
            max_q, max_k: most tokens of a row.
            window: keys that a query sees, itself included; None: all. The last query sees the last key, the one
                before it one key less; a query that sees none may get anything.
            splits: most pieces that a row's keys are divided into, for few queries to fill the device.

        Returns:
            [Hq, T] fp32, natural logarithm.
        """
        ...


class Expansion(Protocol):
    """What expands a cell's history instead of Triton's kernel: see ``expand_kernel``."""

    def __call__(
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
        """Write ``coded`` and ``exact``, keys and values each, [N, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive rows that are expanded together.

    Args:
        first, last: its tokens [first, last) of the batch.
        max_new, max_coded, max_exact: most tokens of a row: new ones, history before every boundary, exact buffer.
        splits: pieces that attention over the history divides its keys into.
        copies: whether the exact buffer is a copy; else no row has earlier tokens and the step's own k, v serve.
        fixed: whether the arrays keep their places, as those of a CUDA graph do.
        history_tasks: of the expand tasks, those before the ones of exact tokens; known where ``fixed``.
        info: [R, 16] int32, see ``expand``.
        cu_new, cu_coded, cu_exact: [R + 1] int32.
        expand_tasks, encode_tasks, join_tasks: [N, 2] int32; may be empty.
    """

    first: int
    last: int
    max_new: int
    max_coded: int
    max_exact: int
    splits: int
    copies: bool
    fixed: bool
    history_tasks: int
    info: Tensor
    cu_new: Tensor
    cu_coded: Tensor
    cu_exact: Tensor
    expand_tasks: Tensor
    encode_tasks: Tensor
    join_tasks: Tensor


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One step.

    Args:
        groups: rows with many new tokens.
        others: runs [first, last) of all other rows that have any.
        others_leave: whether one of these has pages that leave the window inside their own chunk.
    """

    groups: tuple[Group, ...]
    others: tuple[tuple[int, int], ...]
    others_leave: bool

    @property
    def fixed(self) -> bool:
        """Whether the plan is part of a CUDA graph."""
        return any(group.fixed for group in self.groups)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Buffers of one worker, [N, H, D] each but the last two, [N, Hq, D] of which ``near_o`` is fp32."""

    coded_k: Tensor
    coded_v: Tensor
    exact_k: Tensor
    exact_v: Tensor
    coded_o: Tensor
    near_o: Tensor

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)


class Prefill:
    """Prefill of one worker over its own heads; buffers are allocated here.

    Args:
        layout: the layout served.
        dtype: the engine's dtype.
        attention: what attends over plain keys and values.
        max_tokens: most new tokens of a step.
        coded_tokens: history tokens that are expanded at once; a row with more is not taken.
        device: where the pool lies.
        multiprocessors: of the device.
        counters: [2] int64, the second counts values that were NaN or beyond fp16 when coded; None: not wanted.
        expansion: instead of Triton's kernel.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        attention: VarlenAttention,
        *,
        max_tokens: int,
        coded_tokens: int,
        device: torch.device,
        multiprocessors: int = 1,
        counters: Tensor | None = None,
        expansion: Expansion | None = None,
    ) -> None:
        geometry, policy = layout.geometry, layout.policy
        self.layout, self.policy, self.attention, self.device = layout, policy, attention, device
        self.heads, self.group, self.dim = geometry.kv_heads, geometry.group_queries, geometry.head_dim
        self.coded_tokens, self.multiprocessors = coded_tokens, multiprocessors
        self.exact_tokens = max_tokens + _EXACT_ROWS * (policy.window_tokens + policy.page_tokens)

        def buffer(tokens: int, heads: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(tokens, heads, self.dim, dtype=dtype, device=device)

        coded, exact = ((buffer(n, self.heads), buffer(n, self.heads)) for n in (coded_tokens, self.exact_tokens))
        queries = self.heads * self.group
        near = buffer(MOST_FIXED_TOKENS, queries, torch.float32)
        self.scratch = Scratch(*coded, *exact, buffer(max_tokens, queries), near)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device) if counters is None else counters
        self.branch = Branch(device, priority=_FIRST)
        self._cells: tuple[CellDescriptor, ...] = cell_descriptors(layout)
        shape: dict[str, int] = {"H": self.heads, "D": self.dim}
        blocks = {
            "BLOCK_BYTES": layout.block_bytes,
            "PAGE_BYTES": layout.page_bytes,
            "PAGES": layout.pages_per_block,
            "WINDOW": layout.window_block_tokens,
        }
        every = sorted({cell.bits for cell in self._cells})
        together = heads_together(self.heads)
        self._expand_programs = self.heads // together
        self._expand = {
            b: Launcher(expand_kernel, BITS=b, **shape, SINK=policy.sink_tokens, **blocks, HEADS=together)
            for b in every
        }
        self._encode = {b: Launcher(encode_kernel, BITS=b, **shape, **blocks) for b in every}
        self.expansion = expansion
        sizes = {"H": self.heads, "G": self.group, "D": self.dim, "WINDOW": policy.window_tokens}
        self._join, self._join_near = (Launcher(join_kernel, **sizes, FAR=far) for far in (1, 0))
        self._add = Launcher(add_kernel, HEADS=self.heads * self.group, D=self.dim, WINDOW=policy.window_tokens)

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, lens: Ints, starts: Ints) -> PrefillPlan | None:
        """Divide a step; None where no row has enough new tokens, or all of them too little work.

        Args:
            lens: [B] tokens of each row after the step; exact for rows with several new tokens.
            starts: [B + 1] first new token of each row.
        """
        new = np.diff(starts)
        channels = self.heads * self.group * self.dim
        taken = rows_taken(self.policy, lens, new, coded_tokens=self.coded_tokens, channels=channels)
        if taken is None:
            return None
        rows = list(
            batches(self.policy, lens, starts, taken, exact_tokens=self.exact_tokens, coded_tokens=self.coded_tokens)
        )
        arrays = [group_arrays(self.policy, group, copies=group.copies) for group in rows]
        sent = send([array for group in arrays for array in group], self.device)
        each = len(GroupArrays._fields)
        groups = tuple(self._group(group, sent[each * i : each * (i + 1)]) for i, group in enumerate(rows))
        others = rows_there(lens, new) & ~taken
        leave = bool((new[others] > self.policy.window_tokens).any())
        return PrefillPlan(groups, tuple(runs_of(others)), leave)

    def _group(self, rows: Rows, sent: list[Tensor]) -> Group:
        return Group(
            int(rows.start[0]),
            int(rows.start[-1] + rows.new[-1]),
            int(rows.new.max()),
            int(rows.coded.max()),
            int(rows.exact.max()),
            self._splits(tiles(rows.new), rows.scratch_tokens(self.policy)),
            rows.copies,
            False,
            0,
            *sent,
        )

    def _splits(self, tiles_a_head: int, coded_tokens: int) -> int:
        return splits(tiles_a_head * self.heads * self.group, coded_tokens, self.multiprocessors)

    def fixed_group(self, room: Room, first: int, arrays: list[Tensor]) -> Group:
        """A group whose arrays are filled before each step: see ``prefill_plan.fixed_arrays``.

        Args:
            room: what the arrays hold.
            first: its first token of the batch.
            arrays: of the room's shapes, on the device.
        """
        new = room.new_tokens
        assert new <= len(self.scratch.near_o)
        most = min(new, self.policy.max_exact_chunk_tokens)
        return Group(
            first,
            first + new,
            most,
            room.coded_tokens,
            most + self.policy.window_tokens + self.policy.page_tokens,
            self._splits(tiles(np.array([new], np.int32)), room.coded_tokens),
            True,
            True,
            room.history_tasks(self.policy),
            *arrays,
        )

    def compile(self) -> None:
        """Compile the kernels that the cells need now, so that no step waits for it; computes nothing."""
        nothing = torch.full((1, 2), -1, dtype=torch.int32, device=self.device)
        info = torch.zeros(1, INFO_COLUMNS, dtype=torch.int32, device=self.device)
        one = torch.zeros(4, dtype=torch.int32, device=self.device)
        group = Group(0, 1, 1, 1, 1, 1, True, False, 0, info, one, one, one, nothing, nothing, nothing)
        table = torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        step = StepView(self.scratch.coded_k.view(torch.uint8).view(-1), table, table, one, one, 1)
        k, v, q = self.scratch.exact_k, self.scratch.exact_v, self.scratch.coded_o
        for cell in {cell.bits: cell for cell in self._cells}.values():
            self._write_history(cell, k, v, step, group)
        lse = torch.zeros(self.heads * self.group, 1, dtype=torch.float32, device=self.device)
        for join in (self._join, self._join_near):
            self._launch_join(join, q, q, group, k, v, lse, lse)
        self._add_coded(q, group, lse, lse)

    # -- launches ------------------------------------------------------------------------------------------------------

    def attend(
        self, cell: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, step: StepView, plan: PrefillPlan
    ) -> None:
        """Attention of the plan's groups, whose pages of this chunk are coded here; its keys and values are stored.

        Args:
            cell: index of the cell.
            q, out: [T, Hq, D].
            k, v: [T, H, D] after RoPE.
            step: the step.
            plan: of the step.
        """
        for group in plan.groups:
            self._attend(self._cells[cell], q, k, v, out, step, group)

    def _attend(
        self, cell: CellDescriptor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, step: StepView, group: Group
    ) -> None:
        scratch = self.scratch
        span = slice(group.first, group.last)
        exact_k, exact_v = (scratch.exact_k, scratch.exact_v) if group.copies else (k, v)

        def over_window() -> Tensor:
            return self.attention(
                q[span],
                exact_k if group.copies else k[span],
                exact_v if group.copies else v[span],
                cu_q=group.cu_new,
                cu_k=group.cu_exact,
                max_q=group.max_new,
                # beyond the window whatever the rows: a window of all keys would be attention of another kind
                max_k=max(group.max_exact, self.policy.window_tokens + self.policy.page_tokens),
                window=self.policy.window_tokens,
                splits=1,
                out=out[span],
            )

        window_lse: Tensor | None = None
        if group.fixed:
            # Inside a graph all that is exact, and the page in between, runs beside the history, whose attention
            # divides a short one's keys so that it leaves multiprocessors free.
            with self.branch.beside():
                self._expand_tasks(cell, k, v, step, group, group.expand_tasks[group.history_tasks :])
                window_lse = over_window()
            self._expand_tasks(cell, k, v, step, group, group.expand_tasks[: group.history_tasks])
            with self.branch.beside():  # reads what was just expanded
                self._launch_join(self._join_near, q, out, group, exact_k, exact_v, window_lse, window_lse)
        else:
            self._write_history(cell, k, v, step, group)
        coded_lse: Tensor | None = None
        if group.max_coded:
            coded_lse = self.attention(
                q[span],
                scratch.coded_k,
                scratch.coded_v,
                cu_q=group.cu_new,
                cu_k=group.cu_coded,
                max_q=group.max_new,
                max_k=group.max_coded,
                window=None,
                splits=group.splits,
                out=scratch.coded_o[: group.last - group.first],
            )
        if window_lse is None:  # second: what it reads and writes is what the join reads next
            window_lse = over_window()
        self.branch.join()
        if group.fixed:
            assert coded_lse is not None
            self._add_coded(out, group, coded_lse, window_lse)
        elif len(group.join_tasks):
            coded_lse = window_lse if coded_lse is None else coded_lse
            self._launch_join(self._join, q, out, group, exact_k, exact_v, coded_lse, window_lse)

    def _write_history(self, cell: CellDescriptor, k: Tensor, v: Tensor, step: StepView, group: Group) -> None:
        """Scratch of the group, and its pages that leave the window inside their own chunk."""
        if len(group.encode_tasks):
            # With more new tokens than the window no cell shares: prefill mode "fast" is not served on a GPU.
            assert cell.owns_history
            scratch, (tables, places) = self.scratch, _in_pool(cell, k, step)
            self._encode[cell.bits](
                (self.heads, len(group.encode_tasks), 1),
                *tables,
                group.encode_tasks,
                group.info,
                k,
                v,
                scratch.coded_k,
                scratch.coded_v,
                self.counters,
                *places,
            )
        self._expand_tasks(cell, k, v, step, group, group.expand_tasks)

    def _expand_tasks(
        self, cell: CellDescriptor, k: Tensor, v: Tensor, step: StepView, group: Group, tasks: Tensor
    ) -> None:
        """History decoded and exact tokens copied, as the tasks say."""
        if not len(tasks):
            return
        scratch = self.scratch
        if self.expansion is not None:
            coded, exact = (scratch.coded_k, scratch.coded_v), (scratch.exact_k, scratch.exact_v)
            self.expansion(cell, k, v, step, tasks, group.info, coded, exact)
            return
        tables, places = _in_pool(cell, k, step)
        self._expand[cell.bits](
            (self._expand_programs, len(tasks), 1),
            *tables,
            tasks,
            group.info,
            k,
            v,
            scratch.coded_k,
            scratch.coded_v,
            scratch.exact_k,
            scratch.exact_v,
            *places,
        )

    def _launch_join(
        self,
        launch: Launcher,
        q: Tensor,
        out: Tensor,
        group: Group,
        exact_k: Tensor,
        exact_v: Tensor,
        coded_lse: Tensor,
        window_lse: Tensor,
    ) -> None:
        """``_join``: all parts, ``out`` holds the window's. ``_join_near``: the window's, in ``out``, and the page in
        between, both in the scratch; ``window_lse`` is updated and ``coded_lse`` not read."""
        scratch = self.scratch
        launch(
            (self.heads * self.group, len(group.join_tasks), 1),
            q,
            out,
            group.join_tasks,
            group.info,
            scratch.coded_k,
            scratch.coded_v,
            exact_k,
            exact_v,
            scratch.coded_o,
            coded_lse,
            window_lse,
            scratch.near_o,
            q.stride(0),
            exact_k.stride(0),
            out.stride(0),
            group.first,
            group.last - group.first,
            1.0 / math.sqrt(self.dim),
        )

    def _add_coded(self, out: Tensor, group: Group, coded_lse: Tensor, near_lse: Tensor) -> None:
        """Write ``out``: the history's part and the others, which are joined in the scratch."""
        self._add(
            (self.heads * self.group, len(group.join_tasks), 1),
            out,
            group.join_tasks,
            group.info,
            self.scratch.coded_o,
            coded_lse,
            near_lse,
            self.scratch.near_o,
            out.stride(0),
            group.first,
            group.last - group.first,
        )


def _in_pool(cell: CellDescriptor, k: Tensor, step: StepView) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Pool and tables as the kernels take them, and last among their arguments the distances and offsets in these."""
    tables = step.pool, step.history_table, step.window_table
    strides = step.history_table.stride(0), step.window_table.stride(0)
    return tables, (k.stride(0), cell.history_offset_bytes, cell.window_offset_bytes, *strides)
