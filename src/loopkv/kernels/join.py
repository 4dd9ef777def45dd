"""Three partial results of prefill attention made one: coded keys, the window, and the page in between.

Queries whose history ends at the same token come in groups of 32. For query number r of a group with history end e, the
coded part holds the keys before ``e - 31 + r`` and the window those from ``e + r`` on; the 31 keys between are coded
below e and exact from e on, two triangles of two pages that this kernel reads itself.
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


@triton.jit
def group_of_queries(tasks, info, WINDOW: tl.constexpr):
    """A task's record (-1: nothing to do) and ``e // 32``; of its queries [32] the position, whether it exists, and its
    token of the batch."""
    task = tl.program_id(1)
    record, page = tl.load(tasks + 2 * task), tl.load(tasks + 2 * task + 1)
    info += tl.maximum(record, 0) * INFO_COLUMNS
    computed = tl.load(info + COMPUTED)
    position = page * PAGE + WINDOW - 1 + tl.arange(0, PAGE)
    there = (position >= computed) & (position < computed + tl.load(info + NEW))
    return record, page, position, there, tl.load(info + START) + position - computed


@triton.jit
def added(near, near_lse, far, far_lse):
    """Results [32, D] fp32 over two sets of keys made one; -inf is the log-sum-exp of no keys."""
    most = tl.maximum(near_lse, far_lse)
    near_weight, far_weight = tl.exp(near_lse - most), tl.exp(far_lse - most)
    result = near * near_weight[:, None] + far.to(tl.float32) * far_weight[:, None]
    return result / (near_weight + far_weight)[:, None]


@triton.jit(do_not_specialize=["first", "tokens"])
def join_kernel(
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
    window_lse,
    near_o,
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
    FAR: tl.constexpr,
):
    """One group of queries and query head a program.

    Args:
        q, out: [T, Hq, D], tokens ``q_stride`` and ``out_stride`` elements apart; ``out`` holds the window's result.
        tasks: [N, 2] int32: a row's record (-1: nothing to do) and ``e // 32`` of a group of its queries.
        info: see ``expand``.
        coded_k, coded_v: [N, H, D] scratch of ``expand``.
        exact_k, exact_v: [N, H, D], tokens ``exact_stride`` elements apart.
        coded_o: [tokens, Hq, D], result over the coded part, of the batch's tokens from ``first`` on.
        coded_lse, window_lse: [Hq, tokens] fp32, natural logarithm.
        near_o: [tokens, Hq, D] fp32: without FAR the result goes here, and its log-sum-exp to ``window_lse``.
        scale: softmax scale.
        WINDOW: tokens of the policy's window.
        FAR: whether the coded part is added here.
    """
    head = tl.program_id(0)  # neighbours read one token's heads: whole rows of memory
    record, page, position, mine, batch_token = group_of_queries(tasks, info, WINDOW)
    if record < 0:
        return
    info += record * INFO_COLUMNS
    element = coded_k.dtype.element_ty
    end = tl.load(info + COMPUTED) + tl.load(info + NEW)
    lane = tl.arange(0, PAGE)
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
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where((lane[None, :] > lane[:, None]) & (token >= 0)[None, :], scores, float("-inf"))

    # page e, exact: keys before the diagonal
    recent = page * PAGE + lane
    near = (tl.load(info + EXACT_AT) + recent - tl.load(info + EXACT_FIRST)).to(tl.int64)
    near_place = near[:, None] * exact_stride + head // G * D + channels[None, :]
    near_there = ((recent >= tl.load(info + EXACT_FIRST)) & (recent < end))[:, None] & inside
    near_keys = tl.load(exact_k + near_place, mask=near_there, other=0.0)
    near_values = tl.load(exact_v + near_place, mask=near_there, other=0.0)
    near_scores = tl.dot(queries, tl.trans(near_keys), input_precision="ieee") * scale
    near_scores = tl.where(lane[None, :] < lane[:, None], near_scores, float("-inf"))

    # with the window's result
    here = head * tokens + batch_token - first
    window = tl.load(window_lse + here, mask=mine, other=0.0)
    most = tl.maximum(window, tl.maximum(tl.max(scores, 1), tl.max(near_scores, 1)))
    window_weight = tl.exp(window - most)
    weights, near_weights = tl.exp(scores - most[:, None]), tl.exp(near_scores - most[:, None])
    total = window_weight + tl.sum(weights, 1) + tl.sum(near_weights, 1)
    result = tl.dot(weights.to(element), values, input_precision="ieee")
    result = tl.dot(near_weights.to(element), near_values, result, input_precision="ieee")
    to = out + batch_token.to(tl.int64)[:, None] * out_stride + head * D + channels[None, :]
    result += tl.load(to, mask=valid, other=0.0).to(tl.float32) * window_weight[:, None]
    near, near_lse = result / total[:, None], most + tl.log(total)
    place = (batch_token - first).to(tl.int64)[:, None] * (H * G * D) + head * D + channels[None, :]
    if FAR:
        reads_coded = mine & (position > WINDOW + PAGE - 2)
        far_lse = tl.load(coded_lse + here, mask=reads_coded, other=float("-inf"))
        far = tl.load(coded_o + place, mask=reads_coded[:, None] & inside, other=0.0)
        tl.store(to, added(near, near_lse, far, far_lse).to(out.dtype.element_ty), mask=valid)
    else:
        tl.store(window_lse + here, near_lse, mask=mine)
        tl.store(near_o + place, near, mask=valid)


@triton.jit(do_not_specialize=["first", "tokens"])
def add_kernel(
    out,
    tasks,
    info,
    coded_o,
    coded_lse,
    near_lse,
    near_o,
    out_stride,
    first,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Adds the coded part after ``join_kernel`` without FAR, whose arguments these are; HEADS query heads in all."""
    head = tl.program_id(0)
    record, _, position, mine, batch_token = group_of_queries(tasks, info, WINDOW)
    if record < 0:
        return
    reads_coded = mine & (position > WINDOW + PAGE - 2)
    channels = tl.arange(0, triton.next_power_of_2(D))
    inside = (channels < D)[None, :]
    here = head * tokens + batch_token - first
    to = out + batch_token.to(tl.int64)[:, None] * out_stride + head * D + channels[None, :]
    place = (batch_token - first).to(tl.int64)[:, None] * (HEADS * D) + head * D + channels[None, :]
    near = tl.load(near_o + place, mask=mine[:, None] & inside, other=0.0)
    far = tl.load(coded_o + place, mask=reads_coded[:, None] & inside, other=0.0)
    near_lse = tl.load(near_lse + here, mask=mine, other=0.0)
    far_lse = tl.load(coded_lse + here, mask=reads_coded, other=float("-inf"))
    tl.store(to, added(near, near_lse, far, far_lse).to(out.dtype.element_ty), mask=mine[:, None] & inside)
