"""Pages of a long prefill chunk, coded and expanded at once.

A chunk longer than the window reads pages of its own tokens: their exact keys and values are at hand, so one pass
writes the page into the pool and what it decodes to into the scratch of ``expand``. Bytes are those of
``loopkv.codec``: rounded scale and zero, IEEE division, halves to even.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from loopkv.kernels.expand import (
    GROUP,
    INFO_COLUMNS,
    PAGE,
    ROW,
    code_shifts,
    head_bytes,
    load_tokens,
    page_address,
    piece_at,
    piece_channels,
    pieces,
    scratch_place,
    value_codes_at,
    value_scales_at,
)

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a smaller fp32 to an integer, halves to even
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def clean(x):
    """NaN as 0 and everything within fp16, in fp32."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)


@triton.jit
def scale_zero(lo, hi, BITS: tl.constexpr):
    """fp16 scale and zero of a group with these extremes."""
    TOP: tl.constexpr = (1 << BITS) - 1
    lo += 0.0  # -0.0 becomes 0.0
    return tl.div_rn(hi - lo, tl.zeros_like(lo) + TOP).to(tl.float16), lo.to(tl.float16)


if triton.knobs.runtime.interpret:  # tl.fma rounds twice there

    @triton.jit
    def divide(x, divisor, reciprocal):
        """x / divisor as IEEE 754 rounds it."""
        return tl.div_rn(x, divisor)
else:

    @triton.jit
    def divide(x, divisor, reciprocal):
        """x / divisor as IEEE 754 rounds it, where that is beyond 2^-100: one division serves all x of a divisor.

        The reciprocal is rounded correctly, so one step from ``x * reciprocal`` along the exact remainder rounds the
        quotient correctly (Markstein 1990) as long as nothing underflows: a divisor is an fp16 number.
        """
        quotient = x * reciprocal
        return tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)


@triton.jit
def codes_of(x, scale, zero, BITS: tl.constexpr):
    """Codes int32 of x under scale and zero: fp32, of shapes that x's is made of."""
    TOP: tl.constexpr = (1 << BITS) - 1
    divisor = tl.where(scale == 0.0, 1.0, scale)
    reciprocal = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    x, divisor = tl.broadcast(x - zero, divisor)
    steps = divide(x, divisor, tl.broadcast_to(reciprocal, x.shape))
    steps = (steps + ROUND) - ROUND
    steps = tl.minimum(tl.maximum(steps, 0.0), TOP * 1.0)
    return tl.where(scale == 0.0, 0.0, steps).to(tl.int32)


@triton.jit
def encode_key_block(head, tokens, x, BITS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr, C: tl.constexpr):
    """Code keys x [32, C] fp32 of channels AT .. AT + C - 1 into a head's part of a page; returns the decoded ones."""
    WORDS: tl.constexpr = C * BITS // 32
    scale16, zero16 = scale_zero(tl.min(x, 0), tl.max(x, 0), BITS)
    scale, zero = scale16.to(tl.float32)[None, :], zero16.to(tl.float32)[None, :]
    codes = codes_of(x, scale, zero, BITS)
    shift = code_shifts(BITS, C)
    words = tl.sum(tl.reshape(codes, [PAGE, WORDS, 32 // BITS]) << shift[None, None, :], 2)
    words_at = (head + PAGE * AT * BITS // 8).to(tl.pointer_type(tl.int32))
    tl.store(words_at + tokens[:, None] * WORDS + tl.arange(0, WORDS)[None, :], words)
    scales = (head + PAGE * D * BITS // 8).to(tl.pointer_type(tl.float16)) + AT + tl.arange(0, C)
    tl.store(scales, scale16)
    tl.store(scales + D, zero16)
    return codes.to(tl.float32) * scale + zero


@triton.jit
def encode_value_block(head, tokens, x, BITS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr, C: tl.constexpr):
    """Code values x [32, C] fp32 of channels AT .. AT + C - 1 likewise."""
    GROUPS: tl.constexpr = C // GROUP
    SCALES: tl.constexpr = value_scales_at(D, BITS)
    HIGH: tl.constexpr = value_codes_at(D, BITS)
    OUTER: tl.constexpr = GROUPS // 2 if GROUPS > 1 else 1  # a word of 2-bit codes: two tokens of INNER groups
    INNER: tl.constexpr = GROUPS // OUTER
    x = tl.reshape(x, [PAGE, GROUPS, GROUP])
    scale16, zero16 = scale_zero(tl.min(x, 2), tl.max(x, 2), BITS)
    scale, zero = scale16.to(tl.float32)[:, :, None], zero16.to(tl.float32)[:, :, None]
    codes = codes_of(x, scale, zero, BITS)
    high = codes >> (BITS - 2)
    i = 2 * tl.arange(0, 4)
    quads = tl.sum(tl.reshape(high, [PAGE, C // 4, 4]) << i[None, None, :], 2)  # [token, group * 8 + r] bytes
    quads = tl.reshape(quads, [PAGE // 2, 2, OUTER, INNER, 8])
    quads = tl.sum(quads << (tl.arange(0, INNER) * 8)[None, None, None, :, None], 3)
    words = tl.sum(quads << (tl.arange(0, 2) * (8 * INNER))[None, :, None, None], 1)  # [pair, OUTER, r]
    pair, outer, r = tl.arange(0, PAGE // 2)[:, None, None], tl.arange(0, OUTER)[None, :, None], tl.arange(0, 8)
    m, k, t, r = pair // 8, pair // 4 % 2, pair % 4, r[None, None, :]
    if C == 128:  # noqa: SIM108 - a choice at compile time
        place = (((m * 8 + r) * 4 + t) * 2 + k) * 2 + outer
    else:
        place = ((r * 4 + t) * 2 + m) * 2 + k + 0 * outer
    word_type: tl.constexpr = tl.int32 if INNER == 2 else tl.int16
    tl.store((head + HIGH + 8 * AT).to(tl.pointer_type(word_type)) + place, words.to(word_type))
    token = tokens[:, None]
    if BITS == 4:
        low = tl.sum(tl.reshape(codes & 3, [PAGE, C // 4, 4]) << i[None, None, :], 2)
        quad = tl.arange(0, C // 4)[None, :]
        slot = token // 8 * 8 + token % 2 * 4 + token // 2 % 4
        low_at = slot * (D // 4) + AT // 4 + quad % 8 * GROUPS + quad // 8
        tl.store((head + HIGH + 8 * D).to(tl.pointer_type(tl.uint8)) + low_at, low.to(tl.uint8))
    group = tl.arange(0, GROUPS)[None, :]
    scale_at = token // 2 % 4 * 8 + token // 8 * 2 + token % 2 + (AT // GROUP + group) * PAGE
    scales = (head + SCALES).to(tl.pointer_type(tl.float16)) + scale_at
    tl.store(scales, scale16)
    tl.store(scales + PAGE * (D // GROUP), zero16)
    return tl.reshape(codes.to(tl.float32) * scale + zero, [PAGE, C])


@triton.jit(do_not_specialize=["history_stride", "window_stride"])
def encode_kernel(
    pool,
    history_table,
    window_table,
    tasks,
    info,
    k_new,
    v_new,
    coded_k,
    coded_v,
    counters,
    kv_stride,
    history_offset,
    window_offset,
    history_stride,
    window_stride,
    BITS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One page and kv head a program.

    Args:
        tasks: [N, 2] int32: a row's record (-1: nothing to do) and a page.
        counters: [2] int64; the second counts values that were NaN or beyond fp16.
        others: see ``expand_kernel``.
    """
    head, task = tl.program_id(0), tl.program_id(1)  # neighbours read one token's heads: whole rows of memory
    record = tl.load(tasks + 2 * task)
    if record < 0:
        return
    piece = tl.load(tasks + 2 * task + 1)
    info += record * INFO_COLUMNS
    row = tl.load(info + ROW).to(tl.int64)
    lane = tl.arange(0, PAGE)
    token = piece * PAGE + lane
    to = scratch_place(info, token, head, H, D)
    history = history_table + row * history_stride
    page = page_address(pool, history, piece, history_offset, BLOCK_BYTES, PAGE_BYTES, PAGES)
    table = window_table + row * window_stride
    window = pool + window_offset
    element = coded_k.dtype.element_ty
    changed = 0
    for i in tl.static_range(pieces(D)):
        k, v = load_tokens(
            window,
            table,
            info,
            k_new,
            v_new,
            kv_stride,
            token,
            head,
            piece_at(D, i),
            piece_channels(D, i),
            element,
            H,
            D,
            BLOCK_BYTES,
            WINDOW,
        )
        changed += store_coded(
            page, lane, k, v, coded_k, coded_v, to, head, BITS, H, D, piece_at(D, i), piece_channels(D, i)
        )
    if changed > 0:
        tl.atomic_add(counters + 1, changed)


@triton.jit
def store_coded(
    page,
    lane,
    k,
    v,
    coded_k,
    coded_v,
    to,
    head,
    BITS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    AT: tl.constexpr,
    C: tl.constexpr,
):
    """Store channels AT .. AT + C - 1 of a head, k and v [32, C], in the page and in the scratch; returns how many
    values had to be changed to be coded.
    """
    place = to[:, None] + (AT + tl.arange(0, C))[None, :]
    if BITS == 16:
        plain = page.to(tl.pointer_type(k.dtype)) + ((lane * H + head) * D + AT)[:, None] + tl.arange(0, C)[None, :]
        tl.store(plain, k)
        tl.store(plain + PAGE * H * D, v)
        tl.store(coded_k + place, k)
        tl.store(coded_v + place, v)
        return 0
    else:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_clean, v_clean = clean(k), clean(v)
        changed = tl.sum((k != k_clean).to(tl.int32)) + tl.sum((v != v_clean).to(tl.int32))
        part = page + head * head_bytes(D, BITS)
        decoded = encode_key_block(part, lane, k_clean, BITS, D, AT, C)
        tl.store(coded_k + place, decoded.to(coded_k.dtype.element_ty))
        decoded = encode_value_block(part, lane, v_clean, BITS, D, AT, C)
        tl.store(coded_v + place, decoded.to(coded_v.dtype.element_ty))
        return changed
