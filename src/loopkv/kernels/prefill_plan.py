"""The host's part of prefill through a library's attention: which rows of a step, in which groups, and their tasks.

Integers alone, once a step; ``prefill`` explains the parts of a result and launches what is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopkv.kernels.int_arrays import Ints
from loopkv.policy import Policy

MIN_NEW_TOKENS = 128
"""Rows with fewer new tokens do not pay for expanding their history."""
WORTH_OPERATIONS = 3e10
"""A step whose prefill takes fewer is left to the mixed kernel: it needs 0.27 ms a cell for so many on an H200, and the
launches of the parts keep a host busy for about 0.3 ms. Chunks of 256 tokens reach it at a history of 14K on Ouro-1.4B.
"""

INFO_COLUMNS = 16  # of a row's record: see ``expand``

Mask = NDArray[np.bool_]

HISTORY_ROOMS = (2048, 8192, 32_768, 131_072)
"""Sizes of a history, scratch tokens: what is decided by its size, splits and CUDA graphs, is decided by these."""

MOST_FIXED_TOKENS = 1024
"""New tokens of the largest CUDA graph."""

_TILE_QUERIES = 128  # that a multiprocessor takes at once
_SPLIT_TOKENS = 1024
_SHORT_TOKENS = 8192
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a group, [R] each: see ``prefill.Group`` and ``expand``."""

    row: Ints
    start: Ints
    computed: Ints
    new: Ints
    exact_first: Ints
    coded: Ints
    coded_end: Ints
    late_first: Ints
    late_end: Ints

    @property
    def exact(self) -> Ints:
        """Tokens of the exact buffer."""
        return self.computed + self.new - self.exact_first

    def scratch_tokens(self, policy: Policy) -> int:
        """Tokens of the coded scratch: a page of each row lies apart."""
        return int(self.coded.sum()) + policy.page_tokens * len(self.row)

    @property
    def copies(self) -> bool:
        """Whether a row has earlier tokens, so that the exact buffer is no view of the step's."""
        return bool((self.computed > 0).any())


class GroupArrays(NamedTuple):
    """What the device needs of a group: see ``prefill.Group``."""

    info: Ints
    cu_new: Ints
    cu_coded: Ints
    cu_exact: Ints
    expand_tasks: Ints
    encode_tasks: Ints
    join_tasks: Ints


@dataclass(frozen=True, slots=True)
class Room:
    """Most that the fixed arrays of a group hold, so that one CUDA graph serves every step that is no larger.

    Args:
        rows: with several new tokens each.
        new_tokens: of all rows together, and no row may have more of them than the policy's window.
        coded_tokens: of the coded scratch, see ``Rows.scratch_tokens``.
    """

    rows: int
    new_tokens: int
    coded_tokens: int

    def shapes(self, policy: Policy) -> list[tuple[int, ...]]:
        """Shapes of a group's arrays: as many tasks as the largest step can have."""
        page, starts = policy.page_tokens, (self.rows + 1,)
        # an exact buffer reaches back W + P - 2 tokens at most, and its last task may hold a single token
        exact = self.new_tokens // page + self.rows * ((policy.window_tokens + 2 * page) // page + 1)
        joins = self.new_tokens // page + 2 * self.rows
        tasks = (self.history_tasks(policy) + exact, 2)
        return [(self.rows, INFO_COLUMNS), starts, starts, starts, tasks, (0, 2), (joins, 2)]

    def history_tasks(self, policy: Policy) -> int:
        """Tasks of the history; those of exact tokens come after them."""
        return self.coded_tokens // policy.page_tokens

    def holds(self, policy: Policy, rows: Rows) -> bool:
        """Whether these rows fit."""
        new = rows.new
        return (
            len(new) <= self.rows
            and int(new.sum()) <= self.new_tokens
            and int(new.max(initial=0)) <= policy.max_exact_chunk_tokens
            and rows.scratch_tokens(policy) <= self.coded_tokens
        )


def rows_taken(policy: Policy, lens: Ints, new: Ints, *, coded_tokens: int, channels: int) -> Mask | None:
    """The rows worth expanding; None where no row has enough new tokens, or all of them too little work.

    Args:
        policy: of the layout.
        lens: [B] tokens of each row after the step.
        new: [B] of them new in it.
        coded_tokens: history tokens that are expanded at once.
        channels: of all query heads together.
    """
    pages = -(-np.maximum(lens, 0) // policy.page_tokens) * policy.page_tokens
    taken: Mask = rows_there(lens, new) & (new >= MIN_NEW_TOKENS) & (pages <= coded_tokens)
    computed = lens - new
    pairs = float((new * (computed + (new + 1) / 2))[taken].sum())  # of a query and a key
    if not taken.any() or 4.0 * channels * pairs < WORTH_OPERATIONS:
        return None
    return taken


def rows_there(lens: Ints, new: Ints) -> Mask:
    """Rows that are no padding and have new tokens."""
    there: Mask = (new > 0) & (lens > 0)
    return there


def batches(
    policy: Policy, lens: Ints, starts: Ints, taken: Mask, *, exact_tokens: int, coded_tokens: int
) -> Iterator[Rows]:
    """Runs of rows that are taken, cut where a buffer would overflow.

    Args:
        policy: of the layout.
        lens: [B] tokens of each row after the step.
        starts: [B + 1] first new token of each row.
        taken: [B] see ``rows_taken``.
        exact_tokens, coded_tokens: that the buffers hold.
    """
    new = np.diff(starts)
    for begin, end in runs_of(taken):
        row = np.arange(begin, end, dtype=np.int32)
        rows = boundaries(policy, row, starts[begin:end], (lens - new)[begin:end], new[begin:end])
        exact, coded = rows.exact, rows.coded + policy.page_tokens
        first = 0
        for i in range(1, len(row) + 1):
            full = i < len(row) and (
                int(exact[first : i + 1].sum()) > exact_tokens or int(coded[first : i + 1].sum()) > coded_tokens
            )
            if full or i == len(row):
                piece = slice(first, i)
                yield Rows(*(getattr(rows, name)[piece] for name in Rows.__slots__))
                first = i


def boundaries(policy: Policy, row: Ints, start: Ints, computed: Ints, new: Ints) -> Rows:
    """What each of some rows reads, [R] each.

    Args:
        policy: of the layout.
        row: in the block tables.
        start: first new token in the batch.
        computed: tokens before the step.
        new: tokens of the step.
    """
    page, window, sink = policy.page_tokens, policy.window_tokens, policy.sink_tokens
    last = computed + new
    history_end = np.maximum((last - window) // page * page, sink)
    known = np.maximum(np.minimum(computed // page * page, history_end), sink)  # coded before, or from earlier tokens
    late_first = np.maximum(known, (computed - window) // page * page) // page
    return Rows(
        row=row,
        start=start,
        computed=computed,
        new=new,
        exact_first=np.maximum((computed + 1 - window) // page * page, 0),
        coded=np.maximum(last + 1 - window - page, 0),
        coded_end=np.maximum((last - window) // page * page, 0),
        late_first=late_first,
        late_end=np.maximum(history_end // page, late_first),
    )


def group_arrays(policy: Policy, rows: Rows, *, copies: bool) -> GroupArrays:
    """Records and tasks of a group; ``copies``: whether exact tokens are copied into the scratch."""
    page, window = policy.page_tokens, policy.window_tokens
    cu_new, cu_coded, cu_exact = _offsets(rows.new), _offsets(rows.coded), _offsets(rows.exact)
    tails = cu_coded[-1] + page * np.arange(len(rows.row), dtype=np.int32)
    exact_at = cu_exact[:-1] if copies else rows.start
    info = np.zeros((len(rows.row), INFO_COLUMNS), np.int32)
    columns = (rows.row, rows.computed, rows.new, rows.start, rows.exact_first, exact_at, cu_coded[:-1], rows.coded)
    for i, column in enumerate((*columns, tails)):
        info[:, i] = column
    row, piece = _ragged(np.minimum(rows.coded_end // page, rows.late_first))
    if copies:
        exact_row, exact_piece = _ragged(-(-rows.exact // page))
        row, piece = np.concatenate([row, exact_row]), np.concatenate([piece, -1 - exact_piece])
    first_page = np.maximum((rows.computed + 1 - window) // page, 0)
    past_page = (rows.computed + rows.new - window) // page + 1
    join_row, inside = _ragged(np.maximum(past_page - first_page, 0))
    joins = np.stack([join_row, first_page[join_row] + inside], 1)
    late_row, inside = _ragged(rows.late_end - rows.late_first)
    late = np.stack([late_row, rows.late_first[late_row] + inside], 1)
    return GroupArrays(info, cu_new, cu_coded, cu_exact, np.stack([row, piece], 1), late, joins)


def fixed_arrays(policy: Policy, rows: Rows, room: Room) -> GroupArrays:
    """The arrays of a group in the shapes of a room: rows that are not there have no tokens, tasks do nothing."""
    arrays = group_arrays(policy, rows, copies=True)
    history = int((arrays.expand_tasks[:, 1] >= 0).sum())
    at = {"expand_tasks": (history, room.history_tasks(policy))}  # exact ones begin at the same place in every step
    padded = []
    for name, array, shape in zip(GroupArrays._fields, arrays, room.shapes(policy), strict=True):
        fill = int(array[-1]) if name.startswith("cu_") else 0 if name == "info" else -1
        whole = np.full(shape, fill, np.int32)
        first, second = at.get(name, (len(array), len(array)))
        whole[:first] = array[:first]
        whole[second : second + len(array) - first] = array[first:]
        padded.append(whole)
    return GroupArrays(*padded)


def history_room(coded_tokens: int) -> int:
    """The smallest of HISTORY_ROOMS that holds so many tokens; the largest where none does."""
    return next((room for room in HISTORY_ROOMS if coded_tokens <= room), HISTORY_ROOMS[-1])


def tiles(new: Ints) -> int:
    """Tiles of queries of all rows, a head."""
    return int((-(-new // _TILE_QUERIES)).sum())


def splits(tiles: int, coded_tokens: int, multiprocessors: int) -> int:
    """Pieces of the history's keys: as many as multiprocessors stay idle otherwise, of at least _SPLIT_TOKENS keys.

    A short history is read while others attend over the window, so it leaves them the multiprocessors of as many tiles.

    Args:
        tiles: of queries, of all heads.
        coded_tokens: the scratch of the group; its room decides, so that a graph and a step without one agree.
        multiprocessors: of the device.
    """
    room = history_room(coded_tokens)
    others = tiles if room <= _SHORT_TOKENS else 0
    return max(1, min((multiprocessors - others) // tiles, room // _SPLIT_TOKENS, _MAX_SPLITS))


def runs_of(mask: Mask) -> Iterator[tuple[int, int]]:
    """Maximal runs [begin, end) of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _ragged(counts: Ints) -> tuple[Ints, Ints]:
    """For every item of every row: the row, and the item's number inside it."""
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    inside = np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)
    return row, inside


def _offsets(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
