"""A plan made physical: where every cell lies in the two kinds of cache block.

A *history block* holds ``history_block_tokens / page_tokens`` pages of all cells; a *window block* holds the exact keys
and values of ``window_block_tokens`` tokens of all cells. Both have the same byte size, so one pool serves both.

    history block = [page][cell page]        page p of cell c at p * page_bytes + cells[c].history_offset
    window block  = [cell][K, V][token][head][channel]    keys of cell c at cells[c].window_offset, values behind them
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loopkv.artifacts import Plan
from loopkv.codec.pages import CELL_ALIGNMENT_BYTES, page_struct
from loopkv.errors import UnsupportedError
from loopkv.geometry import Geometry
from loopkv.options import INT4, Option, check_codable
from loopkv.policy import Policy
from loopkv.residency import Residency

MAX_HIT_GRID_TOKENS = 160  # prefix-cache hits land on multiples of lcm(window block, history block)
HISTORY_BLOCK_CHOICES = (32, 64, 128, 256)
SIZING_REQUEST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class CellPlace:
    """Where one cell's KV lies.

    Args:
        option: how its history is stored.
        holder: index of the cell whose pages are read (itself, or the source of a shared cell).
        history_offset: byte offset of the holder's page inside a page of all cells.
        window_offset: byte offset of the cell's exact keys in a window block; its values follow the keys.
    """

    option: Option
    holder: int
    history_offset: int
    window_offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte geometry of the cache under one plan. All sizes in bytes unless the name says tokens."""

    geometry: Geometry
    policy: Policy
    exact_itemsize: int
    tau: float | None
    cells: tuple[CellPlace, ...]
    page_bytes: int
    history_block_tokens: int
    window_block_tokens: int
    block_bytes: int

    @property
    def pages_per_block(self) -> int:
        """Pages of a history block."""
        return self.history_block_tokens // self.policy.page_tokens

    @property
    def residency(self) -> Residency:
        """Block arithmetic of this layout."""
        return Residency(self.policy, self.history_block_tokens, self.window_block_tokens)

    @property
    def window_token_bytes(self) -> int:
        """Exact keys and values of one token over all cells."""
        return _exact_token_bytes(self.geometry, self.exact_itemsize)

    @property
    def slack_bytes(self) -> tuple[int, int]:
        """Unused bytes of a (history, window) block."""
        return (
            self.block_bytes - self.pages_per_block * self.page_bytes,
            self.block_bytes - self.window_block_tokens * self.window_token_bytes,
        )

    def read_option(self, cell: int) -> Option:
        """How the history that a cell reads is stored: by its own option, or by its source's."""
        return self.cells[self.cells[cell].holder].option

    def has_precision(self, cell: int) -> bool:
        """Whether V precision acts on a cell: the plan sets tau, and the history that the cell reads is int4."""
        return self.tau is not None and self.read_option(cell) == INT4

    def history_blocks(self, tokens: int) -> int:
        """History blocks a request of ``tokens`` tokens holds (whole sink blocks are null)."""
        return self.residency.history_blocks(tokens)

    def window_blocks(self, tokens: int) -> int:
        """Window blocks a request holds in the decode step that computes its ``tokens``-th token."""
        return self.residency.window_blocks(tokens)

    def request_bytes(self, tokens: int) -> int:
        """Pool bytes a request of ``tokens`` tokens holds in decode."""
        return self.block_bytes * (self.history_blocks(tokens) + self.window_blocks(tokens))


def _exact_token_bytes(geometry: Geometry, exact_itemsize: int) -> int:
    return len(geometry.cells) * 2 * geometry.kv_heads * geometry.head_dim * exact_itemsize


def _blocks_about(residency: Residency, tokens: int) -> int:
    """Blocks of requests whose lengths spread over the last 256 tokens up to ``tokens``: no length is special."""
    lengths = range(max(1, tokens - 252), tokens + 1, 4)
    return sum(residency.history_blocks(n) + residency.window_blocks(n) for n in lengths)


def _history_choices(policy: Policy) -> list[int]:
    """History block sizes that whole pages fill and that prefix-cache hits can start, the usual ones first."""

    def fits(bh: int) -> bool:
        return bh % policy.page_tokens == 0 and Residency(policy, bh, 1).hits_are_possible

    usual = [bh for bh in HISTORY_BLOCK_CHOICES if fits(bh)]
    return usual or [bh for bh in range(policy.page_tokens, HISTORY_BLOCK_CHOICES[-1] + 1) if fits(bh)]


def _choose_blocks(
    policy: Policy, page_bytes: int, window_token_bytes: int, history_block_tokens: int | None, window_block: int | None
) -> tuple[int, int, int]:
    """(history block tokens, window block tokens, block bytes) with the least bytes for requests of about 8K tokens."""
    if history_block_tokens is None:
        history_choices = _history_choices(policy)
    elif history_block_tokens < 1 or history_block_tokens % policy.page_tokens:
        raise UnsupportedError(
            "history block",
            got=f"{history_block_tokens} tokens",
            wanted=f"a multiple of the page of {policy.page_tokens}",
        )
    else:
        history_choices = [history_block_tokens]
    if window_block is not None and window_block < 1:
        raise UnsupportedError("window block", got=f"{window_block} tokens", wanted="at least one token")
    # A page longer than the grid may be has no choice: its own length is the finest grid there is.
    grid = max(MAX_HIT_GRID_TOKENS, min(history_choices))
    best: tuple[int, int, int, int] | None = None
    for bh in history_choices:
        for bw in (window_block,) if window_block is not None else range(1, grid + 1):
            if math.lcm(bw, bh) > grid and (history_block_tokens is None or window_block is None):
                continue
            block = max(bh // policy.page_tokens * page_bytes, bw * window_token_bytes)
            block = -(-block // CELL_ALIGNMENT_BYTES) * CELL_ALIGNMENT_BYTES
            candidate = (block * _blocks_about(Residency(policy, bh, bw), SIZING_REQUEST_TOKENS), bh, bw, block)
            best = candidate if best is None or candidate < best else best
    if best is None:
        raise UnsupportedError(
            "block sizes",
            got=f"history {history_block_tokens or 'any'}, window {window_block or 'any'} tokens",
            wanted=f"a least common multiple of at most {grid} tokens, where prefix-cache hits land",
            hint="fix both sizes to have them as they are",
        )
    return best[1:]


def lay_out(
    plan: Plan,
    *,
    exact_itemsize: int = 2,
    history_block_tokens: int | None = None,
    window_block_tokens: int | None = None,
) -> Layout:
    """Place every cell of ``plan`` and choose the block sizes with the least bytes for a request of 8K tokens.

    Args:
        plan: the plan.
        exact_itemsize: bytes of the engine's cache dtype.
        history_block_tokens, window_block_tokens: fix a block size instead of choosing it; with a history block fixed
            to a size that ``Residency.hits_are_possible`` denies, prefix-cache hits end before the history begins.

    Raises:
        UnsupportedError: a head size the codec cannot code, or block sizes that fit no page.
    """
    geometry, policy = plan.fingerprint.geometry, plan.policy
    options = plan.cell_options
    element_bytes = geometry.kv_heads * geometry.head_dim * exact_itemsize
    offsets: list[int] = []
    position = 0
    for option in options:
        offsets.append(position)
        if option.coded:
            check_codable(geometry.head_dim, policy)
            position += page_struct(option, geometry.kv_heads, geometry.head_dim, policy).nbytes
        elif not option.shares:
            position += 2 * policy.page_tokens * element_bytes
        position = -(-position // CELL_ALIGNMENT_BYTES) * CELL_ALIGNMENT_BYTES
    sources = [geometry.source_of(index) for index in range(len(options))]
    holders = [
        source if option.shares and source is not None else index
        for index, (option, source) in enumerate(zip(options, sources, strict=True))
    ]
    page_bytes = position
    window_token = _exact_token_bytes(geometry, exact_itemsize)

    bh, bw, block = _choose_blocks(policy, page_bytes, window_token, history_block_tokens, window_block_tokens)
    places = tuple(
        CellPlace(option, holder, offsets[holder], i * bw * 2 * element_bytes)
        for i, (option, holder) in enumerate(zip(options, holders, strict=True))
    )
    return Layout(geometry, policy, exact_itemsize, plan.tau, places, page_bytes, bh, bw, block)
