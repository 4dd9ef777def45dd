"""The reference engine: serves requests from a cache that really holds coded pages.

One step takes any number of requests, each with one or more new tokens::

    1. take blocks for the new tokens and for the pages they push out of the window
    2. code those pages, all cells of all requests, from the exact tokens of earlier steps
    3. run every cell: store the new keys and values; each query reads coded below its own ``history_end``, exact above
    4. free the window blocks that no later query reads

What is coded and read follows from (tokens stored c, new tokens q) alone, so neither chunking nor batch mates change
it. The tokens of all requests go through the matrix products together; attention runs request by request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loopkv.artifacts import Fingerprint, Plan
from loopkv.codec import decode_keys, decode_values
from loopkv.engine.attention import KV, cold_attention, policy_attention, work_dtype
from loopkv.engine.paged_cache import CachedRequest, PagedCache, SavedRequest, Span, peak_blocks
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.layout import Layout, lay_out
from loopkv.models.base import LoopedModel, run_cells


class NewTokens(NamedTuple):
    """The next tokens of one request in a step."""

    request: CachedRequest
    ids: Sequence[int]


@dataclass(slots=True)
class HotReads:
    """(kv head, history token) pairs that decode rows read under V precision, and how many read both value planes."""

    hot: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """One request's part of a step: its tokens ``[first, first + count)`` and where its segments lie."""

    request: CachedRequest
    offset: int
    first: int
    count: int
    coded_from: int
    coded_until: int
    new: Span
    sink: Span
    recent: Span
    pages: Span


class PagedEngine:
    """Runs a looped model under a plan with paged, really coded storage.

    Args:
        model: fp64, fp32 or BF16; its dtype is the cache's exact dtype.
        plan: one option per cell.
        blocks: blocks of the pool, the null block included.
        layout: block sizes; by default ``lay_out(plan)`` for the model's dtype.
        fill_byte: overwrite fresh and freed blocks with this byte (tests: nothing unwritten may be read).
        cache_class: a cache that checks or replaces what is coded (tests).
    """

    def __init__(
        self,
        model: LoopedModel,
        plan: Plan,
        *,
        blocks: int,
        layout: Layout | None = None,
        fill_byte: int | None = None,
        cache_class: type[PagedCache] = PagedCache,
    ):
        plan.check_serves(Fingerprint(name=model.name, geometry=model.geometry))
        self.model, self.plan, self.policy = model, plan, plan.policy
        self.layout = layout or lay_out(plan, exact_itemsize=model.dtype.itemsize)
        self.cache = cache_class(self.layout, model.dtype, blocks, model.device, fill_byte)
        self.hot = HotReads()
        self._shares = plan.shares

    @property
    def max_chunk_tokens(self) -> int | None:
        """Most new tokens of one request a step; None where any number is exact (plans without shared cells)."""
        return self.policy.max_exact_chunk_tokens if self._shares else None

    def new_request(self) -> CachedRequest:
        """A request without tokens; it holds no block yet."""
        return CachedRequest()

    def release(self, request: CachedRequest) -> None:
        """Free everything ``request`` holds."""
        self.cache.release(request)

    def fork(self, request: CachedRequest) -> CachedRequest:
        """A second request in the same state."""
        return self.cache.fork(request)

    def adopt(self, other: PagedEngine, request: CachedRequest) -> CachedRequest:
        """A new request in the state of ``request``, which another plan's engine computed and has not coded yet."""
        return self.cache.adopt(other.cache, request)

    def save(self, request: CachedRequest) -> SavedRequest:
        """The request's bytes outside the pool."""
        return self.cache.save(request)

    def restore(self, saved: SavedRequest) -> CachedRequest:
        """A new request with saved bytes (PlanMismatchError if they belong to another layout)."""
        return self.cache.restore(saved)

    @torch.inference_mode()
    def step(self, rows: Sequence[NewTokens], *, every_position: bool = False) -> list[Tensor]:
        """Store and read the new tokens of each row.

        Args:
            rows: requests (each at most once) with at least one new token id each.
            every_position: return the logits of all new tokens instead of the last one's.

        Returns:
            Per row logits [V], or [T, V] with ``every_position``.

        Raises:
            UnsupportedError: more new tokens than the plan's exact chunk, or than the model's positions.
            LoopKVError: the pool is full, no tokens, or ids outside the vocabulary; no request has changed.
        """
        self._check(rows)
        ids = torch.tensor([i for row in rows for i in row.ids], dtype=torch.int64, device=self.model.device)
        self._reserve(rows)
        for request, new in rows:
            start, stop = self._leaving(request, len(new))
            self.cache.code_leaving(request, start, min(stop, self._whole_pages(request)))
        prepared = self._prepare(rows)
        positions = torch.cat([torch.arange(row.first, row.first + row.count) for row in prepared])

        def attend(cell: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = []
            for row in prepared:
                part = slice(row.offset, row.offset + row.count)
                self.cache.write_exact(cell, row.new, k[0, part], v[0, part])
                if row.coded_until > row.coded_from and cell in self.cache.owners:
                    self.cache.code_leaving(row.request, row.coded_from, row.coded_until, (cell,))
                parts.append(self._read(cell, row, q[:, part]))
            return torch.cat(parts, dim=1)

        hidden = self.model.embed(ids[None])
        hidden = run_cells(self.model, hidden, self.model.rotary(positions.to(ids.device)), attend)[0]
        for row in prepared:
            self.cache.settle(row.request, row.count)
        if every_position:
            return [self.model.logits(hidden[row.offset : row.offset + row.count]) for row in prepared]
        last = [row.offset + row.count - 1 for row in prepared]
        return list(self.model.logits(hidden[last]))

    def _check(self, rows: Sequence[NewTokens]) -> None:
        if not rows or len({id(row.request) for row in rows}) != len(rows):
            raise LoopKVError("step", got="no rows" if not rows else "a request twice", wanted="each request once")
        for request, ids in rows:
            if not len(ids):
                raise LoopKVError("step", got="a request without new tokens", wanted="at least one token id")
            wrong = next((i for i in ids if not 0 <= i < self.model.vocab_size), None)
            if wrong is not None:
                raise LoopKVError("token id", got=wrong, wanted=f"0 to {self.model.vocab_size - 1}")
            if self.max_chunk_tokens is not None and len(ids) > self.max_chunk_tokens:
                raise UnsupportedError(
                    "prefill chunk of a plan with shared cells",
                    got=f"{len(ids)} tokens",
                    wanted=f"at most {self.max_chunk_tokens}",
                    hint="a shared cell reads pages of the final loop, which runs later in the same chunk",
                )
            if request.tokens + len(ids) > self.model.max_positions:
                raise UnsupportedError(
                    f"context of model {self.model.name}",
                    got=f"{request.tokens + len(ids)} tokens",
                    wanted=f"at most {self.model.max_positions} positions",
                )

    def _reserve(self, rows: Sequence[NewTokens]) -> None:
        wanted = sum(self.cache.blocks_wanted(request, len(ids)) for request, ids in rows)
        if wanted > self.cache.pool.free_blocks:
            raise LoopKVError(
                f"KV cache pool, step of {len(rows)} requests",
                got=f"{self.cache.pool.free_blocks} free blocks",
                wanted=wanted,
                hint="give the engine more blocks or run fewer requests at once",
            )
        for request, ids in rows:
            self.cache.reserve(request, len(ids))

    def _leaving(self, request: CachedRequest, new_tokens: int) -> tuple[int, int]:
        """Tokens ``[start, stop)`` whose pages leave the window with the next ``new_tokens`` tokens."""
        return self.policy.history_end(request.tokens), self.policy.history_end(request.tokens + new_tokens)

    def _whole_pages(self, request: CachedRequest) -> int:
        """End of the last page that is whole before the step."""
        return request.tokens // self.policy.page_tokens * self.policy.page_tokens

    def _prepare(self, rows: Sequence[NewTokens]) -> list[_Row]:
        """Everything a cell needs to know about the rows, worked out once per step."""
        prepared, offset = [], 0
        for request, ids in rows:
            first, last = request.tokens, request.tokens + len(ids)
            _, until = self._leaving(request, len(ids))
            sink = self.policy.sink_tokens
            prepared.append(
                _Row(
                    request=request,
                    offset=offset,
                    first=first,
                    count=len(ids),
                    coded_from=max(self.policy.history_end(first), self._whole_pages(request)),
                    coded_until=until,
                    new=self.cache.token_span(request, first, last),
                    sink=self.cache.token_span(request, 0, min(sink, last)),
                    recent=self.cache.token_span(request, self.policy.history_end(first + 1), last),
                    pages=self.cache.page_span(request, sink, until),
                )
            )
            offset += len(ids)
        return prepared

    def _read(self, cell: int, row: _Row, q: Tensor) -> Tensor:
        """Attention output [1, T, Hq, D] of one row's queries."""
        cache = self.cache
        sink, recent = cache.read_exact(cell, row.sink), cache.read_exact(cell, row.recent)
        if not len(row.pages):
            none = KV(sink.k[:, :0], sink.v[:, :0])
            return policy_attention(q, row.first, sink, none, recent, self.policy)
        if not cache.codes_history(cell):
            return policy_attention(q, row.first, sink, cache.read_exact_pages(cell, row.pages), recent, self.policy)
        keys, values = cache.read_codes(cell, row.pages)
        work = work_dtype(q.dtype)
        history = KV(decode_keys(keys, work).flatten(0, 1)[None], decode_values(values, work).flatten(0, 1)[None])
        tau = self.plan.tau
        if tau is None or row.count > 1 or keys.bits != 4:
            return policy_attention(q, row.first, sink, history, recent, self.policy)
        everything = torch.ones(values.q.shape[:-1], dtype=torch.bool, device=q.device)
        cold = decode_values(values, work, cold=everything).flatten(0, 1)[None]
        o, hot = cold_attention(q, row.first, sink, history, cold, recent, self.policy, tau)
        self.hot.hot += int(hot.sum())
        self.hot.total += history.k.shape[1] * history.k.shape[2]
        return o


def pool_blocks(layout: Layout, lengths: Sequence[int], chunk_tokens: int) -> int:
    """Pool size, null block included, at which requests growing to ``lengths`` tokens together never run out."""
    return 1 + sum(peak_blocks(layout, tokens, chunk_tokens) for tokens in lengths)
