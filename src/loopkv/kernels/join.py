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
        q, out: [T, Hq, D], tokens ``q_stride`` and ``out_stride`` elements apart; ``out`` holds the window's result.
        tasks: [N, 2] int32: a row's record (-1: nothing to do) and ``e // 32`` of a group of its queries.
        info: see ``expand``.
        coded_k, coded_v: [N, H, D] scratch of ``expand``.
        exact_k, exact_v: [N, H, D], tokens ``exact_stride`` elements apart.
        coded_o: [tokens, Hq, D], result over the coded part, of the batch's tokens from ``first`` on.
        coded_lse, window_lse: [Hq, tokens] fp32, natural logarithm.
        scale: softmax scale.
        WINDOW: tokens of the policy's window.
    """
    head, task = tl.program_id(0), tl.program_id(1)  # neighbours read one token's heads: whole rows of memory
    record = tl.load(tasks + 2 * task)
    if record < 0:
        return
    page = tl.load(tasks + 2 * task + 1)
    info += record * INFO_COLUMNS
    element = coded_k.dtype.element_ty
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

    # the two parts that are done
    here = head * tokens + batch_token - first
    window = tl.load(window_lse + here, mask=mine, other=0.0)
    reads_coded = mine & (position > WINDOW + PAGE - 2)
    far = tl.load(coded_lse + here, mask=reads_coded, other=float("-inf"))
    most = tl.maximum(tl.maximum(window, far), tl.maximum(tl.max(scores, 1), tl.max(near_scores, 1)))
    window_weight, far_weight = tl.exp(window - most), tl.exp(far - most)
    weights, near_weights = tl.exp(scores - most[:, None]), tl.exp(near_scores - most[:, None])
    total = window_weight + far_weight + tl.sum(weights, 1) + tl.sum(near_weights, 1)
    result = tl.dot(weights.to(element), values, input_precision="ieee")
    result = tl.dot(near_weights.to(element), near_values, result, input_precision="ieee")
    to = out + batch_token.to(tl.int64)[:, None] * out_stride + head * D + channels[None, :]
    result += tl.load(to, mask=valid, other=0.0).to(tl.float32) * window_weight[:, None]
    far_o = coded_o + (batch_token - first).to(tl.int64)[:, None] * (H * G * D) + head * D + channels[None, :]
    result += tl.load(far_o, mask=reads_coded[:, None] & inside, other=0.0).to(tl.float32) * far_weight[:, None]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=valid)
