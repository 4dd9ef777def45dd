"""What a decode kernel must return on a generated case: the policy's attention in fp32, and plain PyTorch in BF16.

The first defines the result, the second how much rounding is usual at that precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from loopkv.engine.attention import KV, cold_attention, policy_attention
from loopkv.kernels.cases import Case


class Reference(NamedTuple):
    """o [Hq, D] fp32, and how many of the row's history (token, kv head) pairs were hot (None: V precision off)."""

    o: Tensor
    hot: int | None
    history: int


def _segments(case: Case, cell: int, row: int) -> tuple[KV, KV, KV]:
    policy, tokens = case.layout.policy, int(case.seq_lens[row])
    end = policy.history_end(tokens)
    sink = case.exact_kv(cell, row, range(min(policy.sink_tokens, tokens)))
    recent = case.exact_kv(cell, row, range(min(end, tokens), tokens))
    empty = (sink[0][:0].float(), sink[1][:0].float())
    history = case.history_kv(cell, row) if end > policy.sink_tokens else empty
    return tuple(KV(k.float()[None], v.float()[None]) for k, v in (sink, history, recent))  # type: ignore[return-value]


def reference_decode(case: Case, cell: int, row: int, *, precision: bool = True) -> Reference:
    """The policy's result for one row of one cell, in fp32; ``precision`` False reads both value planes always."""
    policy, tokens = case.layout.policy, int(case.seq_lens[row])
    sink, history, recent = _segments(case, cell, row)
    q = case.q[cell, row].float()[None, None]
    pages = history.k.shape[1]
    if precision and pages and case.layout.has_precision(cell):
        assert case.layout.tau is not None
        cold = case.history_kv(cell, row, cold=True)[1][None]
        o, hot = cold_attention(q, tokens - 1, sink, history, cold, recent, policy, case.layout.tau)
        return Reference(o[0, 0], int(hot.sum()), pages * case.spec.kv_heads)
    return Reference(policy_attention(q, tokens - 1, sink, history, recent, policy)[0, 0], None, 0)


def plain_bf16(case: Case, cell: int, row: int) -> Tensor:
    """o [Hq, D] of PyTorch's attention on the same tokens with everything in BF16."""
    keys, values = (torch.cat(parts, 1) for parts in zip(*_segments(case, cell, row), strict=True))
    group = case.spec.group_queries
    k, v = (x[0].bfloat16().repeat_interleave(group, 1).transpose(0, 1)[None] for x in (keys, values))
    q = case.q[cell, row].bfloat16()[None, :, None]
    return F.scaled_dot_product_attention(q, k, v, scale=case.scale)[0, :, 0].float()


def relative_error(o: Tensor, reference: Tensor) -> float:
    """||o - reference|| / ||reference||; NaN never passes a comparison."""
    return float((o.double() - reference.double()).norm() / reference.double().norm())
