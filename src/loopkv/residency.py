"""Which blocks a request holds: the one arithmetic that layout, cache managers, kernels' hosts and tests share.

A request has two block tables. Entry ``i`` of the *history* table covers tokens ``[i * bh, (i + 1) * bh)`` and holds
their coded pages; entry ``i`` of the *window* table covers tokens ``[i * bw, (i + 1) * bw)`` and holds them exact.
With ``E(n) = policy.history_end(n)``, a step that computes tokens ``[c, c + q)``

* codes the pages of ``[E(c), E(c + q))`` into the history table,
* writes ``[c, c + q)`` into the window table,
* reads, for the query at position ``i``, ``[0, S)`` and ``[E(i + 1), i + 1)`` exact and ``[S, E(i + 1))`` coded.

Tokens are counted, never positions: ``tokens`` means that positions ``[0, tokens)`` exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from loopkv.policy import Policy


@dataclass(frozen=True, slots=True)
class Residency:
    """Block arithmetic of one layout. All sizes in tokens or whole blocks.

    Args:
        policy: sink, window and page.
        history_block_tokens: tokens of a history block (``bh``), a multiple of the page.
        window_block_tokens: tokens of a window block (``bw``).
    """

    policy: Policy
    history_block_tokens: int
    window_block_tokens: int

    def __post_init__(self) -> None:
        if self.history_block_tokens < 1 or self.history_block_tokens % self.policy.page_tokens:
            raise ValueError(
                f"a history block of {self.history_block_tokens} tokens is no multiple of the page of "
                f"{self.policy.page_tokens}"
            )
        if self.window_block_tokens < 1:
            raise ValueError(f"a window block needs at least one token, got {self.window_block_tokens}")

    # -- history ------------------------------------------------------------------------------------------------------

    @property
    def null_history_entries(self) -> int:
        """Leading history entries that hold sink tokens only: always the null block."""
        return self.policy.sink_tokens // self.history_block_tokens

    def history_entries(self, tokens: int) -> int:
        """Length of the history table once ``tokens`` tokens exist; 0 while nothing is coded."""
        end = self.policy.history_end(tokens)
        return 0 if end <= self.policy.sink_tokens else math.ceil(end / self.history_block_tokens)

    def history_blocks(self, tokens: int) -> int:
        """Pool blocks behind the history table (its entries less the null ones)."""
        return max(0, self.history_entries(tokens) - self.null_history_entries)

    def full_history_entries(self, tokens: int) -> int:
        """Leading history entries whose pages are all coded once ``tokens`` tokens are computed."""
        end = self.policy.history_end(tokens)
        return 0 if end <= self.policy.sink_tokens else end // self.history_block_tokens

    def tokens_within_history(self, entries: int) -> int:
        """Most tokens for which a history table of ``entries`` entries is long enough."""
        covered = max(self.policy.sink_tokens, entries * self.history_block_tokens)
        return covered + self._window_span

    def leaving_pages(self, computed: int, new: int) -> range:
        """Pages (numbered from token 0) that a step with ``new`` tokens after ``computed`` ones codes."""
        page = self.policy.page_tokens
        return range(self.policy.history_end(computed) // page, self.policy.history_end(computed + new) // page)

    # -- window -------------------------------------------------------------------------------------------------------

    @property
    def sink_window_entries(self) -> int:
        """Leading window entries that hold sink tokens: kept for the life of the request."""
        return math.ceil(self.policy.sink_tokens / self.window_block_tokens)

    def window_entries(self, tokens: int) -> int:
        """Length of the window table once ``tokens`` tokens exist."""
        return math.ceil(tokens / self.window_block_tokens)

    def first_live_window_entry(self, processed: int) -> int:
        """Window entries in ``[sink_window_entries, this)`` are read by no query after ``processed`` tokens."""
        return max(self.sink_window_entries, self.policy.history_end(processed) // self.window_block_tokens)

    def tokens_while_first_live(self, entry: int) -> int:
        """Most processed tokens for which ``first_live_window_entry`` is no more than ``entry``, one of its values."""
        page = self.policy.page_tokens
        last_page = ((entry + 1) * self.window_block_tokens - 1) // page
        return last_page * page + self._window_span

    def window_blocks(self, tokens: int, unprocessed: int = 1) -> int:
        """Pool blocks behind the window table during a step that ends at ``tokens`` tokens.

        Blocks are freed on processed tokens, so the last ``unprocessed`` tokens (this step's, and those of steps still
        in flight) have freed nothing yet: 1 in plain decode, 2 when steps overlap.
        """
        entries = self.window_entries(tokens)
        first = self.first_live_window_entry(max(0, tokens - unprocessed))
        return min(entries, self.sink_window_entries) + max(0, entries - first)

    def max_window_blocks(self, in_flight_tokens: int, max_tokens: int) -> int:
        """Most window blocks that one request of up to ``max_tokens`` tokens holds at any moment. Exact.

        ``in_flight_tokens`` bounds its tokens that are scheduled but not processed: with ``p`` processed tokens it
        holds its sink and what ``[E(p), p + in_flight)`` touches.
        """
        return _max_window_blocks(self, in_flight_tokens, max_tokens)

    # Chunks longer than the window, where the model reads a chunk's own tokens from its activations: tokens that leave
    # the window within their own chunk are never read exact again and need no block.

    def null_window_entries(self, held_entries: int, tokens: int, *, keep_resume_point: bool) -> range:
        """New entries (after ``held_entries``) of a chunk that ends at ``tokens`` tokens which get the null block.

        With ``keep_resume_point`` the window before the chunk's last resume point keeps its blocks: without them a
        prefix-cache hit would be impossible wherever a chunk ends.
        """
        keep = self.policy.history_end(tokens)
        if keep_resume_point:
            resume = self.last_resume_point(tokens)
            if tokens - resume < self.grid_tokens:
                keep = min(keep, self.policy.history_end(resume))
        return range(max(held_entries, self.sink_window_entries), keep // self.window_block_tokens)

    def max_window_blocks_with_nulls(self, steps_in_flight: int, max_tokens: int) -> int:
        """``max_window_blocks`` for chunks of any length whose leaving tokens have the null block.

        Live are the sink, the window before the processed tokens and one tail per step in flight:
        at most a window before a resume point that lies less than a grid step before the chunk's end.
        """
        tail = self._touched(self._window_span + self.grid_tokens - 1)
        most = self.sink_window_entries + self._touched(self._window_span) + steps_in_flight * tail
        return min(most, self.window_entries(max_tokens))

    @property
    def _window_span(self) -> int:
        """Most tokens between ``E(n)`` and ``n``."""
        return self.policy.window_tokens + self.policy.page_tokens - 1

    def _touched(self, tokens: int) -> int:
        """Most window blocks that a run of ``tokens`` tokens touches."""
        return math.ceil((tokens - 1) / self.window_block_tokens) + 1

    # -- prefix-cache hits --------------------------------------------------------------------------------------------

    @property
    def grid_tokens(self) -> int:
        """Prefix-cache hits land on multiples of this: on all of them if ``hits_are_possible``."""
        return math.lcm(self.history_block_tokens, self.window_block_tokens)

    @property
    def hits_are_possible(self) -> bool:
        """Whether a hit can reach into the history.

        At a multiple of the grid, ``E`` is a multiple of the history block less the window in whole pages: a request
        can resume at all multiples that have history, or at none.
        """
        window_pages = math.ceil(self.policy.window_tokens / self.policy.page_tokens)
        return window_pages * self.policy.page_tokens % self.history_block_tokens == 0

    def can_resume_at(self, tokens: int) -> bool:
        """Whether a request may start after a hit of ``tokens`` tokens without writing into a block it shares.

        The next page must start a history block of its own, the next token a window block of its own.
        """
        end = self.policy.history_end(tokens)
        fresh_history = end <= self.policy.sink_tokens or end % self.history_block_tokens == 0
        return fresh_history and tokens % self.window_block_tokens == 0

    def last_resume_point(self, limit: int, coded_entries: int | None = None, grid_tokens: int | None = None) -> int:
        """Longest hit of at most ``limit`` tokens that a request can resume at; 0 if there is none.

        Args:
            limit: most tokens of the hit.
            coded_entries: history entries at hand (null ones included); None leaves them free.
            grid_tokens: a coarser grid, where other cache groups share the pool; default ``grid_tokens``.
        """
        if coded_entries is not None:
            limit = min(limit, self.tokens_within_history(coded_entries))
        grid = grid_tokens or self.grid_tokens
        for tokens in range(limit // grid * grid, 0, -grid):
            if self.can_resume_at(tokens) and (coded_entries is None or self.history_entries(tokens) <= coded_entries):
                return tokens
        return 0


@lru_cache(maxsize=4096)  # asked for thousands of lengths while vLLM looks for the longest that fits
def _max_window_blocks(rule: Residency, in_flight_tokens: int, max_tokens: int) -> int:
    policy = rule.policy
    # Once the history has outgrown the blocks that the sink keeps, what is held depends on p modulo the page and the
    # window block. Before that the first live entry stays where it is while p grows.
    page, kept_tokens = policy.page_tokens, rule.sink_window_entries * rule.window_block_tokens
    outgrown = policy.window_tokens + page * math.ceil(kept_tokens / page)
    period = math.lcm(page, rule.window_block_tokens)
    lengths = range(min(max_tokens, max(policy.first_coded_position, outgrown) + 1 + period))
    return max(rule.window_blocks(min(p + in_flight_tokens, max_tokens), in_flight_tokens) for p in lengths)
