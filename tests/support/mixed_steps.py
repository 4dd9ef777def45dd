"""Steps in which rows of a generated case get several new tokens each: their last ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loopkv.kernels.cases import Case
from loopkv.vllm_plugin.step import Step


def mixed_step(case: Case, counts: Sequence[int], rows: Sequence[int] | None = None) -> Step:
    """The step that ends at the case's tokens, with ``counts`` new ones; ``rows`` of the case, default all."""
    chosen = list(range(len(counts)) if rows is None else rows)
    start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor([case.spec.tokens[row] for row in chosen], dtype=torch.int32)
    device = case.seq_lens.device
    return Step(
        pool=case.pool.clone(),
        history_table=case.history_table[chosen],
        window_table=case.window_table[chosen],
        seq_lens=lens.to(device),
        query_start=start.to(device),
        query_start_cpu=start,
        max_query_tokens=max(counts),
        max_seq_tokens=int(lens.max()),
        tokens=sum(counts),
        seq_lens_cpu=lens,
    )


def new_keys_values(
    case: Case, cell: int, counts: Sequence[int], rows: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """k, v [T, H, D] of the new tokens, as the case has them."""
    chosen = range(len(counts)) if rows is None else rows
    lasts = [(row, case.spec.tokens[row], count) for row, count in zip(chosen, counts, strict=True)]
    parts = [case.exact_kv(cell, row, range(tokens - count, tokens)) for row, tokens, count in lasts]
    return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


def near_queries(case: Case, cell: int, counts: Sequence[int], seed: int) -> Tensor:
    """q [T, Hq, D] near the planted direction of each row."""
    device = case.q.device
    generator = torch.Generator(device).manual_seed(seed)
    parts = []
    for row, count in enumerate(counts):
        noise = torch.randn(count, 1, 1, device=device, generator=generator)
        parts.append((case.q[cell, row].float() * (1 + 0.3 * noise)).to(case.spec.dtype))
    return torch.cat(parts)
