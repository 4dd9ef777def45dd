"""One engine step as the operators see it. Imports no vLLM: operators are tested without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from loopkv.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a step, and how many tokens each has and gets.

    There are B rows; those beyond the scheduled ones are padding.

    Args:
        seq_lens: [B] int32, tokens of each row after this step; 0 for padding.
        query_start: [B + 1] int32, first new token of each row.
        query_start_cpu: the same on the host.
        max_query_tokens, max_seq_tokens: upper bounds over the rows.
        tokens: new tokens of the step, padding included.
        seq_lens_cpu: ``seq_lens`` on the host where known: exact for rows with several new tokens, else upper bounds.
    """

    seq_lens: Tensor
    query_start: Tensor
    query_start_cpu: Tensor
    max_query_tokens: int
    max_seq_tokens: int
    tokens: int
    seq_lens_cpu: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Rows):
    """Everything an operator gets about a step: its rows, the pool and both groups' tables.

    Args:
        pool: [blocks, block_bytes] uint8, history and window blocks alike.
        history_table: entry i holds the pages of tokens ``[i * bh, (i + 1) * bh)``.
        window_table: entry i holds the exact KV of tokens ``[i * bw, (i + 1) * bw)``. Both [B, N] int32; 0 is no block.
    """

    pool: Tensor
    history_table: Tensor
    window_table: Tensor


@dataclass(frozen=True, slots=True)
class HistoryPages:
    """History pages of the rows of a step, counted when somebody asks: most steps publish nothing.

    Args:
        policy: of the layout.
        tokens: [>= B] int32 on the host, tokens of the rows after the step (upper bounds).
        query_start: [B + 1] int32 on the host, first new token of each row.
    """

    policy: Policy
    tokens: Tensor
    query_start: Tensor

    def count(self) -> tuple[int, int]:
        """Pages of all rows, and of those with one new token (what V precision decides on)."""
        new = np.diff(self.query_start.numpy())
        ends = (self.tokens.numpy()[: len(new)] - self.policy.window_tokens) // self.policy.page_tokens
        pages = np.maximum(ends - self.policy.sink_tokens // self.policy.page_tokens, 0)
        return int(pages.sum()), int(pages[new == 1].sum())
