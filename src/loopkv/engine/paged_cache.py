"""Storage of the paged reference engine: every byte of the KV cache in blocks of one pool, placed by a layout.

Keys and values of the sink and the window lie exact in window blocks; the history lies as pages (coded, or exact for
option bf16) in history blocks. Both kinds come from one pool of equal blocks; block 0 is handed out to nobody, and an
entry 0 of a table means "no block". Which blocks a request holds is ``loopkv.residency``'s arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loopkv.codec import CodedKeys, CodedValues, encode_keys, encode_values, sanitize
from loopkv.codec.pages import PAGE_VERSION, PageStruct, pack_page, page_struct, unpack_page
from loopkv.engine.attention import KV
from loopkv.errors import LoopKVError, PlanMismatchError, UnsupportedError
from loopkv.layout import Layout

CACHE_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(slots=True, eq=False)
class CachedRequest:
    """Block tables of one request. Entry i of a table covers tokens ``[i * block, (i + 1) * block)``; 0 is no block.

    Args:
        tokens: tokens whose keys and values are stored.
        history: ids of history blocks.
        window: ids of window blocks.
    """

    tokens: int = 0
    history: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """Ids of all blocks held."""
        return [block for block in (*self.history, *self.window) if block]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a run of tokens or pages lies: block ids and places inside the block, each [n] int64."""

    blocks: Tensor
    places: Tensor

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """A request's bytes outside the pool: codes, scales, sink and window, with what they must be read as.

    Args:
        layout: the layout they were written under.
        dtype: exact dtype.
        page_version: packing of the pages.
        tokens: tokens stored.
        history, window: [blocks, block_bytes] uint8, the blocks held, in table order.
    """

    layout: Layout
    dtype: torch.dtype
    page_version: int
    tokens: int
    history: Tensor
    window: Tensor


class BlockPool:
    """Blocks of equal size in one buffer. Block 0 is never handed out."""

    def __init__(self, block_bytes: int, blocks: int, device: torch.device, fill_byte: int | None = None):
        """Allocate ``blocks`` blocks (block 0 included); ``fill_byte`` overwrites fresh and freed blocks (tests)."""
        self.data = torch.empty((blocks, block_bytes), dtype=torch.uint8, device=device)
        self._free = list(range(blocks - 1, 0, -1))
        self._held: set[int] = set()
        self._fill_byte = fill_byte
        if fill_byte is not None:
            self.data.fill_(fill_byte)

    @property
    def free_blocks(self) -> int:
        """Blocks that can still be handed out."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Ids of ``count`` blocks.

        Raises:
            LoopKVError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise LoopKVError(
                "KV cache pool",
                got=f"{len(self._free)} free blocks",
                wanted=f"{count}",
                hint="give the engine more blocks or run fewer requests at once",
            )
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks to the pool."""
        for block in blocks:
            self._held.remove(block)  # a block freed twice is a bug of ours: KeyError
            self._free.append(block)
            if self._fill_byte is not None:
                self.data[block].fill_(self._fill_byte)


class PagedCache:
    """Reads and writes the blocks of requests under one layout."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, blocks: int, device: torch.device, fill_byte: int | None = None
    ):
        if dtype not in CACHE_DTYPES:
            raise UnsupportedError("KV cache dtype", got=str(dtype), wanted=", ".join(map(str, CACHE_DTYPES)))
        if dtype.itemsize != layout.exact_itemsize:
            raise UnsupportedError(
                "KV cache dtype",
                got=f"{dtype} ({dtype.itemsize} bytes)",
                wanted=f"a dtype of {layout.exact_itemsize} bytes",
                hint="lay the plan out for the engine's dtype",
            )
        self.layout, self.dtype, self.device = layout, dtype, device
        self.policy, self.residency = layout.policy, layout.residency
        self.pool = BlockPool(layout.block_bytes, blocks, device, fill_byte)
        self.sanitized_elements = 0
        heads, dim, bw = layout.geometry.kv_heads, layout.geometry.head_dim, layout.window_block_tokens
        size, page = layout.exact_itemsize, self.policy.page_tokens
        exact = self.pool.data.view(dtype)
        pages = self.pool.data[:, : layout.pages_per_block * layout.page_bytes]
        pages = pages.unflatten(1, (layout.pages_per_block, layout.page_bytes))
        exact_pages = exact[:, : layout.pages_per_block * layout.page_bytes // size]
        exact_pages = exact_pages.unflatten(1, (layout.pages_per_block, layout.page_bytes // size))
        self._window: list[Tensor] = []  # per cell [blocks, 2, bw, H, D]
        self._history: list[Tensor] = []  # per cell [blocks, pages, bytes], or [blocks, pages, 2, P, H, D] if exact
        self._structs: list[PageStruct | None] = []
        for place in layout.cells:
            begin, extent = place.window_offset // size, 2 * bw * heads * dim
            self._window.append(exact[:, begin : begin + extent].unflatten(1, (2, bw, heads, dim)))
            option = layout.cells[place.holder].option
            begin = place.history_offset
            if option.coded:
                struct = page_struct(option, heads, dim, self.policy)
                self._structs.append(struct)
                self._history.append(pages[:, :, begin : begin + struct.nbytes])
            else:
                begin, extent = begin // size, 2 * page * heads * dim
                self._structs.append(None)
                self._history.append(exact_pages[:, :, begin : begin + extent].unflatten(2, (2, page, heads, dim)))
        self.owners = tuple(i for i, place in enumerate(layout.cells) if not place.option.shares)

    # -- tables -------------------------------------------------------------------------------------------------------

    def blocks_wanted(self, request: CachedRequest, new_tokens: int) -> int:
        """Blocks that ``reserve`` would take."""
        tokens, null = request.tokens + new_tokens, self.residency.null_history_entries
        history = self.residency.history_entries(tokens) - max(len(request.history), null)
        return max(0, history) + max(0, self.residency.window_entries(tokens) - len(request.window))

    def reserve(self, request: CachedRequest, new_tokens: int) -> None:
        """Take the blocks that the next ``new_tokens`` tokens and the pages they push out of the window need.

        Raises:
            LoopKVError: the pool has too few; the request is unchanged.
        """
        tokens, null = request.tokens + new_tokens, self.residency.null_history_entries
        taken = self.pool.take(self.blocks_wanted(request, new_tokens))
        while len(request.history) < self.residency.history_entries(tokens):
            request.history.append(0 if len(request.history) < null else taken.pop())
        while len(request.window) < self.residency.window_entries(tokens):
            request.window.append(taken.pop())

    def settle(self, request: CachedRequest, new_tokens: int) -> None:
        """Count ``new_tokens`` tokens as stored and free the window blocks that no later query reads."""
        request.tokens += new_tokens
        last = min(self.residency.first_live_window_entry(request.tokens), len(request.window))
        for i in range(self.residency.sink_window_entries, last):
            if request.window[i]:
                self.pool.give_back([request.window[i]])
                request.window[i] = 0

    def release(self, request: CachedRequest) -> None:
        """Free everything the request holds."""
        self.pool.give_back(request.blocks)
        request.tokens, request.history, request.window = 0, [], []

    def token_span(self, request: CachedRequest, start: int, stop: int) -> Span:
        """Places of the exact tokens ``[start, stop)``."""
        return self._span(request.window, start, stop, self.layout.window_block_tokens)

    def page_span(self, request: CachedRequest, start: int, stop: int) -> Span:
        """Places of the pages of history tokens ``[start, stop)`` (multiples of the page)."""
        size = self.policy.page_tokens
        return self._span(request.history, start // size, stop // size, self.layout.pages_per_block)

    def _span(self, table: Sequence[int], start: int, stop: int, per_block: int) -> Span:
        index = torch.arange(start, max(start, stop), dtype=torch.int64)
        if not len(index):
            return Span(index.to(self.device), index.to(self.device))
        first = start // per_block
        ids = torch.tensor(table[first : -(-stop // per_block)], dtype=torch.int64)
        assert int(ids.min()) > 0, "a span reaches tokens that are not stored"
        return Span(ids[index // per_block - first].to(self.device), (index % per_block).to(self.device))

    # -- exact tokens -------------------------------------------------------------------------------------------------

    def write_exact(self, cell: int, span: Span, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, H, D] of the tokens of ``span``.

        Raises:
            UnsupportedError: another dtype than the cache's (bits are never reinterpreted) or another shape.
        """
        wanted = (len(span), self.layout.geometry.kv_heads, self.layout.geometry.head_dim)
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.dtype != self.dtype:
                raise UnsupportedError(f"{name} for the KV cache", got=str(tensor.dtype), wanted=str(self.dtype))
            if tuple(tensor.shape) != wanted:
                raise UnsupportedError(
                    f"{name} for the KV cache",
                    got=list(tensor.shape),
                    wanted=list(wanted),
                    hint="keys and values must have the geometry's kv heads and one head size",
                )
        self._window[cell][span.blocks, 0, span.places] = keys
        self._window[cell][span.blocks, 1, span.places] = values

    def read_exact(self, cell: int, span: Span) -> KV:
        """Exact keys and values [1, n, H, D]."""
        view = self._window[cell]
        return KV(view[span.blocks, 0, span.places][None], view[span.blocks, 1, span.places][None])

    # -- pages --------------------------------------------------------------------------------------------------------

    def write_pages(self, cell: int, pages: Span, keys: Tensor, values: Tensor) -> None:
        """Code keys and values [pages, P, H, D], as the cache holds them, into the history of an owning cell."""
        struct = self._structs[cell]
        assert not self.layout.cells[cell].option.shares, "a shared cell has no pages of its own"
        if struct is None:
            self._history[cell][pages.blocks, pages.places] = torch.stack([keys, values], dim=1)
            return
        self.sanitized_elements += sanitize(keys)[1] + sanitize(values)[1]
        self._history[cell][pages.blocks, pages.places] = self.encode_pages(cell, struct, pages, keys, values)

    def encode_pages(self, cell: int, struct: PageStruct, pages: Span, keys: Tensor, values: Tensor) -> Tensor:
        """Bytes [pages, nbytes] of coded pages (a test that injects codes replaces this)."""
        return pack_page(struct, encode_keys(keys, struct.bits), encode_values(values, struct.bits, struct.group))

    def code_leaving(self, request: CachedRequest, start: int, stop: int, cells: Iterable[int] | None = None) -> None:
        """Code the pages of tokens ``[start, stop)`` of the owning cells from their exact copy in the window."""
        if start >= stop:
            return
        tokens, pages = self.token_span(request, start, stop), self.page_span(request, start, stop)
        for cell in self.owners if cells is None else cells:
            exact = self.read_exact(cell, tokens)
            shape = (-1, self.policy.page_tokens)
            self.write_pages(cell, pages, exact.k[0].unflatten(0, shape), exact.v[0].unflatten(0, shape))

    def read_codes(self, cell: int, pages: Span) -> tuple[CodedKeys, CodedValues]:
        """Codes [pages, P, H, D] of the history that ``cell`` reads, its own or its source's."""
        struct = self._structs[cell]
        assert struct is not None, "an exact history has no codes"
        return unpack_page(struct, self._history[cell][pages.blocks, pages.places])

    def read_exact_pages(self, cell: int, pages: Span) -> KV:
        """Exact history [1, pages * P, H, D] of a cell with option bf16."""
        assert self._structs[cell] is None
        data = self._history[cell][pages.blocks, pages.places]
        return KV(data[:, 0].flatten(0, 1)[None], data[:, 1].flatten(0, 1)[None])

    def codes_history(self, cell: int) -> bool:
        """True where the history that ``cell`` reads is coded."""
        return self._structs[cell] is not None

    def struct(self, cell: int) -> PageStruct | None:
        """Packing of the pages that ``cell`` reads; None where they are exact."""
        return self._structs[cell]

    # -- bytes --------------------------------------------------------------------------------------------------------

    def held_bytes(self, request: CachedRequest) -> int:
        """Pool bytes of the blocks the request holds."""
        return len(request.blocks) * self.layout.block_bytes

    def stored_bytes(self, request: CachedRequest) -> int:
        """Bytes of keys, values, codes and scales the request keeps alive in its blocks (no padding, no slack)."""
        end = self.policy.history_end(request.tokens)
        pages = (end - self.policy.sink_tokens) // self.policy.page_tokens
        exact_page = 2 * self.policy.page_tokens * self.layout.geometry.kv_heads * self.layout.geometry.head_dim
        page_bytes = 0
        for cell in self.owners:
            struct = self._structs[cell]
            page_bytes += exact_page * self.dtype.itemsize if struct is None else struct.nbytes
        exact_tokens = request.tokens - pages * self.policy.page_tokens
        return pages * page_bytes + exact_tokens * self.layout.window_token_bytes

    # -- copies -------------------------------------------------------------------------------------------------------

    def save(self, request: CachedRequest) -> SavedRequest:
        """A copy of everything the request stores, outside the pool."""
        history = [block for block in request.history if block]
        window = [block for block in request.window if block]
        return SavedRequest(
            layout=self.layout,
            dtype=self.dtype,
            page_version=PAGE_VERSION,
            tokens=request.tokens,
            history=self.pool.data[history].clone(),
            window=self.pool.data[window].clone(),
        )

    def restore(self, saved: SavedRequest) -> CachedRequest:
        """A new request with the bytes of ``saved``.

        Raises:
            PlanMismatchError: saved under another layout, dtype or packing: its bytes mean something else here.
            LoopKVError: the pool has too few blocks.
        """
        if (saved.layout, saved.dtype, saved.page_version) != (self.layout, self.dtype, PAGE_VERSION):
            raise PlanMismatchError(
                "saved request",
                got=f"bytes of another layout ({saved.dtype}, page version {saved.page_version})",
                wanted=f"this engine's layout ({self.dtype}, page version {PAGE_VERSION})",
                hint="compute the request anew",
            )
        request = self._mirror(saved.tokens, len(saved.history) + len(saved.window))
        self.pool.data[[block for block in request.history if block]] = saved.history
        self.pool.data[[block for block in request.window if block]] = saved.window
        return request

    def _mirror(self, tokens: int, blocks: int) -> CachedRequest:
        """Tables of ``blocks`` fresh blocks for a request at rest with ``tokens`` tokens."""
        taken = self.pool.take(blocks)
        request, null = CachedRequest(tokens), self.residency.null_history_entries
        dead = range(self.residency.sink_window_entries, self.residency.first_live_window_entry(tokens))
        for i in range(self.residency.history_entries(tokens)):
            request.history.append(0 if i < null else taken.pop())
        for i in range(self.residency.window_entries(tokens)):
            request.window.append(0 if i in dead else taken.pop())
        assert not taken, "a request holds other blocks than its length implies"
        return request

    def fork(self, request: CachedRequest) -> CachedRequest:
        """A second request with a copy of the same bytes."""
        mirror = self._mirror(request.tokens, len(request.blocks))
        for mine, theirs in zip(mirror.blocks, request.blocks, strict=True):
            self.pool.data[mine] = self.pool.data[theirs]
        return mirror

    def adopt(self, other: PagedCache, request: CachedRequest) -> CachedRequest:
        """A new request with the tokens of ``request`` in ``other``, a cache of another plan.

        Until the first page is coded, what is stored does not depend on the plan.

        Raises:
            PlanMismatchError: another geometry, policy or dtype, or a request with a history.
        """
        mine, theirs = (
            (self.layout.geometry, self.policy, self.dtype),
            (other.layout.geometry, other.policy, other.dtype),
        )
        if mine != theirs or self.policy.history_end(request.tokens) > self.policy.sink_tokens:
            raise PlanMismatchError(
                "request of another plan",
                got=f"{request.tokens} tokens" if mine == theirs else "another geometry, policy or dtype",
                wanted=f"at most {self.policy.first_coded_position} tokens of the same geometry, policy and dtype",
            )
        mirror = CachedRequest()
        self.reserve(mirror, request.tokens)
        theirs_span, mine_span = (
            cache.token_span(table, 0, request.tokens) for cache, table in ((other, request), (self, mirror))
        )
        for cell in range(len(self.layout.cells)):
            exact = other.read_exact(cell, theirs_span)
            self.write_exact(cell, mine_span, exact.k[0], exact.v[0])
        self.settle(mirror, request.tokens)
        return mirror


def peak_blocks(layout: Layout, tokens: int, chunk_tokens: int) -> int:
    """Blocks that suffice for a request growing to ``tokens`` tokens in steps of at most ``chunk_tokens``."""
    return layout.history_blocks(tokens) + layout.residency.max_window_blocks(chunk_tokens, tokens)
