"""The operators in PyTorch, for the CPU engine: correctness first, and no Python work per token of context.

They are the policy's definition applied to paged memory: the codec, the page struct and the attention primitives are
those of the reference; this module only finds the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loopkv.codec import decode_keys, decode_values, encode_keys, encode_values, sanitize
from loopkv.codec.pages import PageStruct, pack_page, page_struct, unpack_page
from loopkv.engine.attention import KV, cold_attention, masked_attention
from loopkv.layout import Layout
from loopkv.vllm_plugin.metrics import Counters
from loopkv.vllm_plugin.step import HistoryPages, Step

DECODED_BYTES = 64 << 20
"""Rows are decoded together up to this many bytes of fp32 history per cell."""


class Places(NamedTuple):
    """Blocks and positions inside them, [N] int64 each: of tokens in window blocks, or of pages in history blocks."""

    block: Tensor
    inside: Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """The plan of one row's step: queries at positions ``first .. last - 1``, from token ``start`` of the batch on.

    Exact tokens below ``first`` come from window blocks (``sink``, ``recent``), the others from the activations.

    Args:
        sink: tokens [0, min(S, first)).
        recent: tokens [recent_start, first), where the first query's history ends.
        history: pages [S, history_end) that a cell with codes of its own reads.
        shared_pages: how many of them a shared cell reads; fewer only where a ``fast`` chunk is longer than the window.
        leaving: pages to code before the step; all their tokens lie below ``first``.
        leaving_tokens: their tokens.
        late: pages with tokens of this very chunk, which each cell codes for itself (chunks longer than the window).
        late_start: first token of ``late``.
        mask, shared_mask: [T, N] which joined (sink, history, recent, new) tokens a query reads; None: all.
    """

    start: int
    first: int
    last: int
    sink: Places
    recent: Places
    recent_start: int
    history: Places
    history_end: int
    shared_pages: int
    leaving: Places
    leaving_tokens: Places
    late: Places
    late_start: int
    mask: Tensor | None
    shared_mask: Tensor | None

    @property
    def queries(self) -> int:
        """New tokens of the row."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows whose memory is gathered and decoded at once. Each then attends by itself: batch mates change nothing.

    Args:
        rows: the rows.
        exact: sink and recent tokens of all rows, row by row.
        history, shared: pages that own-coded and shared cells read, row by row.
    """

    rows: tuple[Row, ...]
    exact: Places
    history: Places
    shared: Places


class CpuOperators:
    """See ``Operators``. Between calls it keeps the host plan of the current step and nothing else."""

    def __init__(self, layout: Layout, dtype: torch.dtype, *, seed: str, counters: Counters) -> None:
        if dtype.itemsize != layout.exact_itemsize:
            raise ValueError(f"layout for {layout.exact_itemsize}-byte values, dtype {dtype}")
        self.layout, self.policy = layout, layout.policy
        self.dtype, self.seed, self.counters = dtype, seed, counters
        self.heads, self.dim = layout.geometry.kv_heads, layout.geometry.head_dim
        self.structs: tuple[PageStruct | None, ...] = tuple(
            page_struct(place.option, self.heads, self.dim, self.policy) if place.option.coded else None
            for place in layout.cells
        )
        page_bytes = 2 * self.policy.page_tokens * self.heads * self.dim * torch.float32.itemsize
        self._group_pages = max(1, DECODED_BYTES // page_bytes)
        self._rows: tuple[Row, ...] = ()
        self._groups: tuple[RowGroup, ...] = ()
        self._append_tokens = torch.empty(0, dtype=torch.int64)
        self._append = Places(self._append_tokens, self._append_tokens)

    def window_view(self, pool: Tensor) -> Tensor:
        """Window blocks [blocks, C, 2, bw, H, D] in the exact dtype; a view of the pool."""
        cells, tokens = len(self.layout.cells), self.layout.window_block_tokens
        used = cells * 2 * tokens * self.heads * self.dim
        return pool.view(self.dtype)[:, :used].unflatten(1, (cells, 2, tokens, self.heads, self.dim))

    def history_view(self, pool: Tensor) -> Tensor:
        """History blocks [blocks, pages of a block, bytes of a page of all cells] uint8; a view of the pool."""
        pages, nbytes = self.layout.pages_per_block, self.layout.page_bytes
        return pool[:, : pages * nbytes].unflatten(1, (pages, nbytes))

    def code_leaving_pages(self, step: Step) -> None:
        """See ``Operators.code_leaving_pages``."""
        self._plan(step)
        window = self.window_view(step.pool)
        leaving = [row for row in self._rows if len(row.leaving.block)]
        if leaving:
            places = _join_places([row.leaving for row in leaving])
            tokens = _join_places([row.leaving_tokens for row in leaving])
            for cell, place in enumerate(self.layout.cells):
                if not place.option.shares:
                    keys, values = (window[tokens.block, cell, part, tokens.inside] for part in (0, 1))
                    self._write_pages(step.pool, cell, places, keys, values)
        self.counters.add("pages_coded", sum(len(row.leaving.block) + len(row.late.block) for row in self._rows))

    def publish(self, pages: HistoryPages | None) -> None:
        """See ``Operators.publish``: every step counts for itself and publishes with its last cell."""
        if pages is not None:
            self.counters.set("history_pages", pages.count()[0])

    def attend(self, cell: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, step: Step) -> None:
        """See ``Operators.attend``."""
        window = self.window_view(step.pool)
        window[self._append.block, cell, 0, self._append.inside] = k[self._append_tokens]
        window[self._append.block, cell, 1, self._append.inside] = v[self._append_tokens]
        for group in self._groups:
            self._attend_group(cell, group, q, k, v, out, step.pool, window)
        if cell == len(self.layout.cells) - 1:
            self.counters.flush()

    # planning

    def _plan(self, step: Step) -> None:
        """Work out every row's segments once; all cells share them."""
        starts, lengths = step.query_start_cpu.tolist(), step.seq_lens.tolist()
        rows, tokens, appended = [], [], []
        for index, last in enumerate(lengths):
            count = starts[index + 1] - starts[index]
            if last <= 0 or count <= 0:
                continue  # padding
            row = self._plan_row(index, starts[index], last - count, last, step)
            rows.append(row)
            places = self._token_places(step.window_table[index], row.first, row.last, written=True)
            kept = places.block != 0  # tokens that leave inside their own chunk may have no block
            tokens.append(torch.arange(row.start, row.start + count)[kept])
            appended.append(Places(places.block[kept], places.inside[kept]))
        self._rows = tuple(rows)
        self._groups = tuple(self._group(rows))
        self._append_tokens = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
        self._append = _join_places(appended)

    def _group(self, rows: list[Row]) -> Iterator[RowGroup]:
        """Cut the rows into groups whose decoded pages stay below ``DECODED_BYTES`` (or single rows)."""
        taken: list[Row] = []
        pages = 0
        for row in rows:
            if taken and pages + len(row.history.block) > self._group_pages:
                yield _row_group(taken)
                taken, pages = [], 0
            taken.append(row)
            pages += len(row.history.block)
        if taken:
            yield _row_group(taken)

    def _plan_row(self, index: int, start: int, first: int, last: int, step: Step) -> Row:
        policy = self.policy
        sink, page = policy.sink_tokens, policy.page_tokens
        coded_end = policy.history_end(first)
        recent_start, history_end = policy.history_end(first + 1), policy.history_end(last)
        computed = max(sink, min(history_end, first // page * page))  # pages below it were computed in earlier steps
        late_start = max(coded_end, computed)
        window, history = step.window_table[index], step.history_table[index]
        shared_pages = (computed - sink) // page
        several = last - first > 1
        return Row(
            start=start,
            first=first,
            last=last,
            sink=self._token_places(window, 0, min(sink, first)),
            recent=self._token_places(window, recent_start, first),
            recent_start=recent_start,
            history=self._page_places(history, sink, history_end),
            history_end=history_end,
            shared_pages=shared_pages,
            leaving=self._page_places(history, coded_end, computed),
            leaving_tokens=self._token_places(window, coded_end, computed),
            late=self._page_places(history, late_start, history_end),
            late_start=late_start,
            mask=self._mask(first, last, recent_start, history_end) if several else None,
            shared_mask=self._mask(first, last, recent_start, computed) if several else None,
        )

    def _mask(self, first: int, last: int, recent_start: int, history_end: int) -> Tensor:
        policy = self.policy
        ends = [min(policy.history_end(position + 1), history_end) for position in range(first, last)]
        boundary = torch.tensor(ends)[:, None]
        query = torch.arange(first, last)[:, None]
        coded = torch.arange(policy.sink_tokens, history_end) < boundary
        exact = torch.cat(
            [
                torch.arange(min(policy.sink_tokens, first)),
                torch.arange(min(recent_start, first), first),
                torch.arange(first, last),
            ]
        )
        readable = (exact <= query) & ((exact < policy.sink_tokens) | (exact >= boundary))
        return torch.cat([coded, readable], dim=1)

    def _token_places(self, table: Tensor, begin: int, end: int, *, written: bool = False) -> Places:
        position = torch.arange(begin, max(begin, end))
        size = self.layout.window_block_tokens
        block = table[position // size].long()
        assert written or bool((block != 0).all()), f"window block of a token in [{begin}, {end}) is null"
        return Places(block, position % size)

    def _page_places(self, table: Tensor, begin: int, end: int) -> Places:
        page = torch.arange(begin // self.policy.page_tokens, max(begin, end) // self.policy.page_tokens)
        size = self.layout.pages_per_block
        block = table[page // size].long()
        assert bool((block != 0).all()), f"history block of a page in [{begin}, {end}) is null"
        return Places(block, page % size)

    # pages

    def _write_pages(self, pool: Tensor, cell: int, places: Places, keys: Tensor, values: Tensor) -> None:
        """Code keys and values [N * S, H, D] of whole pages into the pool."""
        place, struct = self.layout.cells[cell], self.structs[cell]
        keys, values = (x.unflatten(0, (-1, self.policy.page_tokens)) for x in (keys, values))
        if struct is None:
            data = torch.stack([keys, values], dim=1).flatten(1).contiguous().view(torch.uint8)
        else:
            (keys, bad_keys), (values, bad_values) = sanitize(keys), sanitize(values)
            self.counters.add("clamped_values", bad_keys + bad_values)
            coded_values = encode_values(values, struct.bits, self.policy.group)
            data = pack_page(struct, encode_keys(keys, struct.bits), coded_values)
        end = place.history_offset + data.shape[1]
        self.history_view(pool)[places.block, places.inside, place.history_offset : end] = data

    def _read_pages(self, pool: Tensor, cell: int, places: Places, *, cold: bool) -> tuple[KV, Tensor | None]:
        """Decoded history [1, N * S, H, D] that ``cell`` reads; with ``cold`` also the values of the high plane."""
        place = self.layout.cells[cell]
        struct = self.structs[place.holder]
        pages = self.history_view(pool)
        if struct is None:
            shape = (-1, 2, self.policy.page_tokens, self.heads, self.dim)
            nbytes = 2 * self.policy.page_tokens * self.heads * self.dim * self.dtype.itemsize
            data = pages[places.block, places.inside, place.history_offset : place.history_offset + nbytes]
            exact = data.view(self.dtype).view(shape)
            return KV(exact[:, 0].flatten(0, 1)[None], exact[:, 1].flatten(0, 1)[None]), None
        data = pages[places.block, places.inside, place.history_offset : place.history_offset + struct.nbytes]
        keys, values = unpack_page(struct, data)
        decoded = KV(decode_keys(keys).flatten(0, 1)[None], decode_values(values).flatten(0, 1)[None])
        if not cold:
            return decoded, None
        everything = torch.ones(values.q.shape[:-1], dtype=torch.bool)
        return decoded, decode_values(values, cold=everything).flatten(0, 1)[None]

    # attention

    def _attend_group(
        self, cell: int, group: RowGroup, q: Tensor, k: Tensor, v: Tensor, out: Tensor, pool: Tensor, window: Tensor
    ) -> None:
        place = self.layout.cells[cell]
        if not place.option.shares:
            for row in group.rows:
                if len(row.late.block):
                    self._code_late(cell, row, k, v, pool, window)
        precise = self.layout.has_precision(cell) and any(row.queries == 1 for row in group.rows)
        places = group.shared if place.option.shares else group.history
        history, cold = self._read_pages(pool, cell, places, cold=precise) if len(places.block) else (None, None)
        exact = window[group.exact.block, cell, :, group.exact.inside].float()  # [N, 2, H, D]
        new = torch.stack([k, v], dim=1).float()
        exact_end = history_end = 0
        for row in group.rows:
            span = slice(row.start, row.start + row.queries)
            count = row.shared_pages if place.option.shares else len(row.history.block)
            pages = slice(history_end, history_end + count * self.policy.page_tokens)
            near = slice(exact_end, exact_end + len(row.sink.block) + len(row.recent.block))
            exact_end, history_end = near.stop, pages.stop
            if precise and row.queries == 1 and count:
                assert history is not None and cold is not None
                recent = torch.cat([exact[near][len(row.sink.block) :], new[span]])
                sink = exact[near][: len(row.sink.block)]
                out[span] = self._attend_precisely(row, q[span], sink, history, cold, pages, recent)
                continue
            mask = row.shared_mask if place.option.shares else row.mask
            parts = [[exact[near, part], new[span, part]] for part in (0, 1)]
            if history is not None and count:
                parts = [[history[part][0, pages], *parts[part]] for part in (0, 1)]
            joined = KV(*(torch.cat(part)[None] for part in parts))
            out[span] = masked_attention(q[span][None], joined, mask)[0]

    def _attend_precisely(
        self, row: Row, q: Tensor, sink: Tensor, history: KV, cold: Tensor, pages: slice, recent: Tensor
    ) -> Tensor:
        """A decode row under V precision: q and result [1, Hq, D], sink and recent [N, 2, H, D]."""
        assert self.layout.tau is not None
        near, far = (KV(x[None, :, 0], x[None, :, 1]) for x in (sink, recent))
        own = KV(history.k[:, pages], history.v[:, pages])
        o, hot = cold_attention(
            q[None],
            row.first,
            near,
            own,
            cold[:, pages],
            far,
            self.policy,
            self.layout.tau,
            sink_seed=self.seed == "sink",
        )
        self.counters.add("hot_values", int(hot.sum()))
        self.counters.add("decode_values", (pages.stop - pages.start) * self.heads)
        return o[0]

    def _code_late(self, cell: int, row: Row, k: Tensor, v: Tensor, pool: Tensor, window: Tensor) -> None:
        """Code the pages that hold tokens of this very chunk, from the window and the activations."""
        span = slice(row.start, row.start + row.queries)
        begin = row.late_start - min(row.recent_start, row.first)
        tokens = slice(begin, begin + len(row.late.block) * self.policy.page_tokens)
        keys, values = (
            torch.cat([window[row.recent.block, cell, part, row.recent.inside], x[span]])[tokens]
            for part, x in enumerate((k, v))
        )
        self._write_pages(pool, cell, row.late, keys, values)


def _row_group(rows: list[Row]) -> RowGroup:
    shared = [Places(row.history.block[: row.shared_pages], row.history.inside[: row.shared_pages]) for row in rows]
    return RowGroup(
        rows=tuple(rows),
        exact=_join_places([places for row in rows for places in (row.sink, row.recent)]),
        history=_join_places([row.history for row in rows]),
        shared=_join_places(shared),
    )


def _join_places(places: list[Places]) -> Places:
    if not places:
        empty = torch.empty(0, dtype=torch.int64)
        return Places(empty, empty)
    return Places(torch.cat([p.block for p in places]), torch.cat([p.inside for p in places]))
