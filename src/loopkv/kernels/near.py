"""What a query of prefill reads beside its coded history: the exact tokens, and the coded page that its window touches.

Queries whose history ends at the same token e come in groups of 32. For query number r of a group the library's
attention held the coded keys before ``e - 31 + r``; the 31 - r coded keys from there to e, and all exact keys from e to
the query itself, are read here, and the parts joined.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from loopkv.kernels.expand import (
    CODED,
    CODED_AT,
    COMPUTED,
    EXACT_AT,
    EXACT_FIRST,
    INFO_COLUMNS,
    NEW,
    PAGE,
    START,
    TAIL_AT,
)

KEYS = tl.constexpr(64)  # of a turn


@triton.jit
def add_keys(queries, keys, values, seen, scale, most, total, result):
    """The softmax of [32] queries so far (largest score, sum of weights, weighted values), with more keys."""
    scores = tl.where(seen, tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, float("-inf"))
    new = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp(scores - new[:, None])
    before = tl.exp(most - new)
    result = tl.dot(weights.to(values.dtype), values, result * before[:, None], input_precision="ieee")
    return new, total * before + tl.sum(weights, 1), result


@triton.jit(do_not_specialize=["first", "tokens"])
def near_kernel(
    q,
    out,
    tasks,
    info,
    coded_k,
    coded_v,
    exact_k,
    exact_v,
    coded_o,
    coded_lse,
    q_stride,
    exact_stride,
    out_stride,
    first,
    tokens,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One group of queries and query head a program.

    Args:
        q, out: [T, Hq, D], tokens ``q_stride`` and ``out_stride`` elements apart.
        tasks: [N, 2] int32: a row's record (-1: nothing to do) and ``e // 32`` of a group of its queries; below 0 for
            queries that see fewer tokens than a window.
        info: see ``expand``.
        coded_k, coded_v: [N, H, D] scratch of ``expand``.
        exact_k, exact_v: [N, H, D], tokens ``exact_stride`` elements apart.
        coded_o: [tokens, Hq, D], result over the coded part, of the batch's tokens from ``first`` on.
        coded_lse: [Hq, tokens] fp32, natural logarithm.
        scale: softmax scale.
        WINDOW: tokens of the policy's window.
    """
    head, task = tl.program_id(0), tl.program_id(1)  # neighbours read one token's heads: whole rows of memory
    record = tl.load(tasks + 2 * task)
    if record < 0:
        return
    page = tl.load(tasks + 2 * task + 1)
    info += record * INFO_COLUMNS
    computed = tl.load(info + COMPUTED)
    end = computed + tl.load(info + NEW)
    lane = tl.arange(0, PAGE)
    position = page * PAGE + WINDOW - 1 + lane
    mine = (position >= computed) & (position < end)
    batch_token = tl.load(info + START) + position - computed
    channels = tl.arange(0, triton.next_power_of_2(D))
    inside = (channels < D)[None, :]
    valid = mine[:, None] & inside
    queries = tl.load(
        q + batch_token.to(tl.int64)[:, None] * q_stride + head * D + channels[None, :], mask=valid, other=0.0
    )

    # page e - 1, coded: keys after the diagonal
    token = (page - 1) * PAGE + lane
    coded = tl.load(info + CODED)
    at = tl.where(token < coded, tl.load(info + CODED_AT) + token, tl.load(info + TAIL_AT) + token - coded)
    place = at.to(tl.int64)[:, None] * (H * D) + head // G * D + channels[None, :]
    there = (token >= 0)[:, None] & inside
    keys = tl.load(coded_k + place, mask=there, other=0.0)
    values = tl.load(coded_v + place, mask=there, other=0.0)
    # the part that is done; a finite start keeps rows that have seen nothing yet free of NaN
    reads_coded = mine & (position > WINDOW + PAGE - 2)
    far = tl.load(coded_lse + head * tokens + batch_token - first, mask=reads_coded, other=-1e30)
    total = tl.where(reads_coded, 1.0, 0.0)
    far_o = coded_o + (batch_token - first).to(tl.int64)[:, None] * (H * G * D) + head * D + channels[None, :]
    result = tl.load(far_o, mask=reads_coded[:, None] & inside, other=0.0).to(tl.float32)
    after = (lane[None, :] > lane[:, None]) & (token >= 0)[None, :]
    most, total, result = add_keys(queries, keys, values, after, scale, far, total, result)

    # from e on, exact
    exact_first = tl.load(info + EXACT_FIRST)
    exact_at = tl.load(info + EXACT_AT) - exact_first
    key = tl.arange(0, KEYS)
    for turn in tl.range(0, (WINDOW + PAGE - 1 + KEYS - 1) // KEYS, num_stages=2):
        recent = page * PAGE + turn * KEYS + key
        exists = (recent >= exact_first) & (recent < end)
        near = (exact_at + recent).to(tl.int64)[:, None] * exact_stride + head // G * D + channels[None, :]
        near_keys = tl.load(exact_k + near, mask=exists[:, None] & inside, other=0.0)
        near_values = tl.load(exact_v + near, mask=exists[:, None] & inside, other=0.0)
        seen = (recent[None, :] <= position[:, None]) & exists[None, :]
        most, total, result = add_keys(queries, near_keys, near_values, seen, scale, most, total, result)
    to = out + batch_token.to(tl.int64)[:, None] * out_stride + head * D + channels[None, :]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=valid)
