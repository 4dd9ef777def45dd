"""A device without a model: it keeps, per slot of the pool, *which tokens* a slot holds, and checks every touch.

The content of position ``i`` of a request is one integer that stands for its token prefix ``[0, i]``: keys and values
of a token depend on nothing else. A step does what the attention backend does, from the row's numbers ``(c, q)`` and
its two block tables alone, in the same order: code the pages that leave, append the new tokens, read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loopkv.residency import Residency

UNWRITTEN = 0  # no content: what a fresh block holds
Content = npt.NDArray[np.int64]


class DeviceError(AssertionError):
    """The device was told to touch something wrong."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request in one step.

    Args:
        name: the request.
        computed: tokens whose KV exists before the step (c).
        new: tokens of this step (q).
        history_table, window_table: block ids as the worker knows them; 0 is the null block.
        content: content of positions ``[0, c + q)`` and maybe more.
    """

    name: str
    computed: int
    new: int
    history_table: list[int]
    window_table: list[int]
    content: Content


@dataclass(slots=True)
class Tally:
    """What a run did, so that a test can show that it tried something."""

    steps: int = 0
    appended_tokens: int = 0
    coded_pages: int = 0
    read_tokens: int = 0
    null_appends: int = 0


@dataclass(slots=True)
class SymbolicDevice:
    """The pool of a worker.

    Args:
        residency: block arithmetic of the layout.
        blocks: blocks of the pool, the null block included.
        reads_activations: tokens that leave the window within their own chunk may have the null block (plans without
            shared cells): they are coded and read from the chunk's activations.
    """

    residency: Residency
    blocks: int
    reads_activations: bool = False
    tally: Tally = field(default_factory=Tally)
    exact: Content = field(init=False)
    coded: Content = field(init=False)

    def __post_init__(self) -> None:
        rule = self.residency
        self.exact = np.zeros((self.blocks, rule.window_block_tokens), np.int64)
        self.coded = np.zeros((self.blocks, rule.history_block_tokens // rule.policy.page_tokens), np.int64)

    def forget(self, blocks: list[int]) -> None:
        """These blocks were handed out anew: whatever they held is somebody else's."""
        self.exact[blocks] = UNWRITTEN
        self.coded[blocks] = UNWRITTEN

    def step(self, rows: list[Row]) -> None:
        """Run one step of all rows. Every phase ends for all rows before the next begins, as on the device."""
        self.tally.steps += 1
        for row in rows:
            self._code(row, after_append=False)
        for row in rows:
            self._append(row)
        for row in rows:
            self._code(row, after_append=True)
        for row in rows:
            self._read(row)
        if self.exact[0].any() or self.coded[0].any():
            raise DeviceError("the null block was written")

    def _fail(self, row: Row, what: str) -> None:
        raise DeviceError(f"{row.name} at {row.computed} + {row.new} tokens: {what}")

    def _window_blocks_of(self, row: Row, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        entries = positions // self.residency.window_block_tokens
        if len(entries) and entries[-1] >= len(row.window_table):
            self._fail(row, f"token {positions[-1]} lies behind the window table of {len(row.window_table)} entries")
        return np.asarray(row.window_table, np.int64)[entries]

    def _exact_at(self, row: Row, first: int, end: int, why: str) -> None:
        """Check the exact tokens ``[first, end)``; those of the own chunk may come from the activations."""
        if first >= end:
            return
        positions = np.arange(first, end, dtype=np.int64)
        blocks = self._window_blocks_of(row, positions)
        null = blocks == 0
        if null.any():
            allowed = positions >= row.computed if self.reads_activations else np.zeros(len(null), bool)
            if (null & ~allowed).any():
                self._fail(row, f"{why}: token {positions[null & ~allowed][0]} is in the null block")
            positions, blocks = positions[~null], blocks[~null]
        held = self.exact[blocks, positions % self.residency.window_block_tokens]
        wrong = held != row.content[positions]
        if wrong.any():
            at = int(np.argmax(wrong))
            state = "nothing" if held[at] == UNWRITTEN else "another token"
            self._fail(row, f"{why}: exact token {positions[at]} in block {blocks[at]} holds {state}")

    def _page_slots(self, row: Row, pages: range, why: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rule = self.residency
        first = np.arange(pages.start, pages.stop, dtype=np.int64) * rule.policy.page_tokens
        entries = first // rule.history_block_tokens
        if entries[-1] >= len(row.history_table):
            self._fail(
                row, f"{why}: page {pages[-1]} lies behind the history table of {len(row.history_table)} entries"
            )
        blocks = np.asarray(row.history_table, np.int64)[entries]
        if (blocks == 0).any():
            self._fail(row, f"{why}: page {pages.start + int(np.argmax(blocks == 0))} is in the null block")
        return blocks, first % rule.history_block_tokens // rule.policy.page_tokens

    def _code(self, row: Row, *, after_append: bool) -> None:
        """Code the leaving pages that lie below ``c`` (start of the step), or those that do not (after the append)."""
        page = self.residency.policy.page_tokens
        leaving = self.residency.leaving_pages(row.computed, row.new)
        old = min(leaving.stop, max(leaving.start, row.computed // page))
        pages = range(old, leaving.stop) if after_append else range(leaving.start, old)
        if not pages:
            return
        if after_append and not self.reads_activations:
            self._fail(row, f"page {pages[0]} leaves within its own chunk")
        self._exact_at(row, pages.start * page, pages.stop * page, "coding")
        blocks, slots = self._page_slots(row, pages, "coding")
        self.coded[blocks, slots] = row.content[np.arange(pages.start, pages.stop) * page + page - 1]
        self.tally.coded_pages += len(pages)

    def _append(self, row: Row) -> None:
        positions = np.arange(row.computed, row.computed + row.new, dtype=np.int64)
        blocks = self._window_blocks_of(row, positions)
        null = blocks == 0
        if null.any():
            leaves = positions < self.residency.policy.history_end(row.computed + row.new)
            if not self.reads_activations or (null & ~leaves).any():
                self._fail(row, f"token {positions[null][-1]} would be appended to the null block")
            self.tally.null_appends += int(null.sum())
            positions, blocks = positions[~null], blocks[~null]
        self.exact[blocks, positions % self.residency.window_block_tokens] = row.content[positions]
        self.tally.appended_tokens += row.new

    def _read(self, row: Row) -> None:
        """All queries of the row: their reads are nested, so the first query's exact and the last one's coded part."""
        policy = self.residency.policy
        end = row.computed + row.new
        self._exact_at(row, 0, min(policy.sink_tokens, end), "reading the sink")
        self._exact_at(row, min(policy.history_end(row.computed + 1), end), end, "reading the window")
        pages = range(policy.sink_tokens // policy.page_tokens, policy.history_end(end) // policy.page_tokens)
        if pages:
            blocks, slots = self._page_slots(row, pages, "reading")
            last = np.arange(pages.start, pages.stop) * policy.page_tokens + policy.page_tokens - 1
            wrong = self.coded[blocks, slots] != row.content[last]
            if wrong.any():
                at = int(np.argmax(wrong))
                state = "nothing" if self.coded[blocks[at], slots[at]] == UNWRITTEN else "another page"
                self._fail(row, f"reading: page {pages.start + at} in block {blocks[at]} holds {state}")
        self.tally.read_tokens += end
