"""Attention as the policy defines it: the primitives of whole-sequence evaluation and of the paged reference engine.

Shapes: q and o [B, T, Hq, D]; keys and values [B, N, H, D], which is how the model makes them, the codec codes them
and the cache holds them; Hq = H * G. Scores are ``q . k * D ** -0.5`` and everything is computed at least in fp32. A
block of queries at positions ``first .. first + T - 1`` reads three segments (``Policy.history_end``)::

    sink     tokens [0, min(S, first + T))                            exact
    history  tokens [S, history_end(first + T))                       decoded
    recent   tokens [history_end(first + 1), first + T)               exact

History and recent overlap where a page leaves the window inside the block: each query takes every token once, coded
below its own boundary and exact above.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from loopkv.policy import Policy

QUERY_BLOCK_TOKENS = 256
_MASKS = 16  # masks kept: every cell of a step asks for the same one, and one of a long context takes megabytes


class KV(NamedTuple):
    """Keys and values of consecutive tokens, each [B, N, H, D]."""

    k: Tensor
    v: Tensor


class Partial(NamedTuple):
    """Attention over a part of the tokens: o [..., D] normalised within the part, lse [...] its log-sum-exp."""

    o: Tensor
    lse: Tensor


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype attention over ``dtype`` is computed in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def masked_attention(q: Tensor, kv: KV, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of q [B, T, Hq, D] over kv; ``mask`` [T, N] bool, True where a query reads a token.

    The queries of a kv head are rows of one matrix product, so grouped heads repeat no key. Returns q's dtype.
    """
    batch, tokens, query_heads, dim = q.shape
    heads = kv.k.shape[2]
    group = query_heads // heads
    work = work_dtype(q.dtype)
    rows = q.to(work)
    if group > 1:  # [B, T, H, G, D] -> [B, H, T * G, D]
        rows = rows.unflatten(2, (heads, group)).permute(0, 2, 1, 3, 4).reshape(batch, heads, tokens * group, dim)
        mask = None if mask is None else mask.repeat_interleave(group, dim=0)
    else:
        rows = rows.transpose(1, 2)
    k, v = kv.k.to(work).transpose(1, 2), kv.v.to(work).transpose(1, 2)
    o = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=dim**-0.5)
    o = o.unflatten(2, (tokens, group)).permute(0, 2, 1, 3, 4).flatten(2, 3) if group > 1 else o.transpose(1, 2)
    return o.to(q.dtype)


def exact_attention(q: Tensor, kv: KV, first: int = 0) -> Tensor:
    """Causal attention of queries at positions ``first .. first + T - 1`` over the exact tokens [0, first + T).

    Args:
        q: [B, T, Hq, D].
        kv: at least ``first + T`` tokens; later ones are not read.
        first: position of the first query.
    """
    blocks = []
    for start in range(0, q.shape[1], QUERY_BLOCK_TOKENS):
        rows = q[:, start : start + QUERY_BLOCK_TOKENS]
        end = first + start + rows.shape[1]
        mask = None if rows.shape[1] == 1 else _causal_mask(first + start, rows.shape[1], q.device)
        blocks.append(masked_attention(rows, KV(kv.k[:, :end], kv.v[:, :end]), mask))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def policy_attention(q: Tensor, first: int, sink: KV, history: KV, recent: KV, policy: Policy) -> Tensor:
    """Attention of a block of queries, each with its own boundary between coded and exact tokens.

    Args:
        q: [B, T, Hq, D], positions ``first .. first + T - 1``.
        first: position of the first query.
        sink, history, recent: the segments above, exactly those tokens; empty ones have N = 0.
        policy: boundaries.
    """
    mask = policy_mask(policy, first, q.shape[1], q.device)
    return masked_attention(q, _join(q, sink, history, recent), mask)


def cold_attention(
    q: Tensor,
    first: int,
    sink: KV,
    history: KV,
    cold_values: Tensor,
    recent: KV,
    policy: Policy,
    tau: float,
    *,
    sink_seed: bool = True,
) -> tuple[Tensor, Tensor]:
    """``policy_attention`` with read-time V precision (paper section 3.3), every query being a decode row of its own.

    A history token j is cold for a query and kv head if ``s_j < m - tau ln 2`` for all G queries of the head, where m
    is the larger of the best sink score and the scores of its split's pages up to and including its own; a cold token's
    value is ``cold_values``, which its high plane alone gives.

    Args:
        q, first, sink, history, recent, policy: as for ``policy_attention``.
        cold_values: [B, N, H, D] values of the history with the low plane read as its midpoint.
        tau: threshold in bits.
        sink_seed: False starts m at -inf instead of the best sink score (seed mode ``none``).

    Returns:
        o [B, T, Hq, D] and the number of hot history tokens [B, T, H] int64 (of ``history_end(position + 1) - S``).
    """
    batch, tokens, _, dim = q.shape
    heads = sink.k.shape[2]
    if history.k.shape[1] == 0:
        hot = torch.zeros(batch, tokens, heads, dtype=torch.int64, device=q.device)
        return policy_attention(q, first, sink, history, recent, policy), hot
    work = work_dtype(q.dtype)
    splits = [policy.split_pages(first + 1 + row) for row in range(tokens)]
    mask = policy_mask(policy, first, tokens, q.device)
    joined = _join(q, sink, history, recent)
    begin, end = sink.k.shape[1], sink.k.shape[1] + history.k.shape[1]
    outputs, hot_counts = [], []
    for b in range(batch):  # a batch's scores at once would not fit the processor's cache
        k, v = joined.k[b].to(work).transpose(0, 1), joined.v[b].to(work).transpose(0, 1)  # [H, N, D]
        rows = q[b].to(work).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, G, T, D]
        scores = (rows.flatten(1, 2) @ k.transpose(1, 2)).mul_(dim**-0.5).unflatten(1, (-1, tokens))
        scores.masked_fill_(~mask, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        history_scores = scores[..., begin:end]
        # Without a sink nothing is known before a split's own pages: m0 = -inf.
        seeded = begin > 0 and sink_seed
        seed = scores[..., :begin].amax(-1) if seeded else torch.full_like(scores[..., 0], -math.inf)
        bar = _running_maximum(history_scores, seed, splits, policy) - tau * math.log(2.0)
        cold = (history_scores < bar.repeat_interleave(policy.page_tokens, dim=-1)).all(dim=1)  # [H, T, N]
        readable = mask[:, begin:end]
        hot_counts.append((~cold & readable).sum(-1).transpose(0, 1))
        part = weights[..., begin:end]
        cold_weights = part * cold.unsqueeze(1)
        part -= cold_weights
        o = weights.flatten(1, 2) @ v
        o += cold_weights.flatten(1, 2) @ cold_values[b].to(work).transpose(0, 1)
        outputs.append(o.unflatten(1, (-1, tokens)).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.stack(outputs).to(q.dtype), torch.stack(hot_counts)


def partial_attention(q: Tensor, kv: KV, mask: Tensor | None = None) -> Partial:
    """Attention over a part of the tokens with its log-sum-exp; ``mask`` as in ``masked_attention``.

    Returns o [B, T, Hq, D] and lse [B, T, Hq] in the working dtype; a part a query reads nothing of has lse -inf, o 0.
    """
    heads = kv.k.shape[2]
    work = work_dtype(q.dtype)
    rows = q.to(work).unflatten(2, (heads, -1))
    scores = torch.einsum("bthgd,bnhd->bthgn", rows, kv.k.to(work)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[None, :, None, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    o = torch.einsum("bthgn,bnhd->bthgd", weights, kv.v.to(work))
    return Partial(o.flatten(2, 3), lse.flatten(2, 3))


def merge_partials(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint parts, merged in the order given."""
    lse = torch.logsumexp(torch.stack([part.lse for part in parts]), dim=0)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    o = torch.zeros_like(parts[0].o)
    for part in parts:
        o = o + part.o * torch.exp(part.lse - shift).unsqueeze(-1)
    return Partial(o, lse)


def policy_mask(policy: Policy, first: int, tokens: int, device: torch.device) -> Tensor:
    """Which of the joined [sink, history, recent] tokens each query reads: [T, N] bool."""
    return _policy_mask(policy, first, tokens).to(device)


def _history_ends(policy: Policy, first: int, tokens: int) -> list[int]:
    return [policy.history_end(first + 1 + row) for row in range(tokens)]


@functools.lru_cache(maxsize=_MASKS)
def _policy_mask(policy: Policy, first: int, tokens: int) -> Tensor:
    ends = torch.tensor(_history_ends(policy, first, tokens))[:, None]
    position = torch.arange(first, first + tokens)[:, None]
    last = first + tokens
    sink = torch.arange(min(policy.sink_tokens, last))
    history = torch.arange(policy.sink_tokens, max(policy.sink_tokens, int(ends[-1])))
    recent = torch.arange(int(ends[0]), max(int(ends[0]), last))
    return torch.cat([sink <= position, history < ends, (recent >= ends) & (recent <= position)], dim=1)


@functools.lru_cache(maxsize=_MASKS)
def _causal_mask(first: int, tokens: int, device: torch.device) -> Tensor:
    position = torch.arange(first, first + tokens, device=device)[:, None]
    return torch.arange(first + tokens, device=device) <= position


def _join(q: Tensor, *segments: KV) -> KV:
    parts = [segment for segment in segments if segment.k.shape[1]]
    if len(parts) == 1:
        return parts[0]
    work = work_dtype(q.dtype)
    return KV(torch.cat([part.k.to(work) for part in parts], 1), torch.cat([part.v.to(work) for part in parts], 1))


def _running_maximum(scores: Tensor, seed: Tensor, splits: Sequence[int], policy: Policy) -> Tensor:
    """m of every page [H, G, T, pages], of scores [H, G, T, pages * P] (-inf where not read) and seeds [H, G, T]."""
    pages = scores.unflatten(-1, (-1, policy.page_tokens)).amax(-1)
    best = torch.empty_like(pages)
    for split in sorted(set(splits)):
        rows = [row for row, its in enumerate(splits) if its == split]
        padded = F.pad(pages[:, :, rows], (0, -pages.shape[-1] % split), value=-math.inf)
        running = padded.unflatten(-1, (-1, split)).cummax(dim=-1).values.flatten(-2)
        best[:, :, rows] = running[..., : pages.shape[-1]]
    return torch.maximum(best, seed.unsqueeze(-1))
