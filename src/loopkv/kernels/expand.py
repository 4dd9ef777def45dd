"""A cell's history as plain keys and values: coded pages decoded, exact tokens gathered, all in one launch.

Prefill reads every history token with hundreds of queries: decoding it once into a scratch lets a library's attention
read it at full rate. A program copies 32 tokens of some kv heads; ``tasks`` says which (see ``prefill_plan``).
The order of codes inside a page is that of ``loopkv.codec.pages``.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import math

import triton
import triton.language as tl

INFO_COLUMNS = tl.constexpr(16)
ROW, COMPUTED, NEW, START, EXACT_FIRST, EXACT_AT, CODED_AT, CODED, TAIL_AT = (tl.constexpr(i) for i in range(9))
"""Columns of a row's record, [R, 16] int32: its row in the block tables, tokens before the step and in it, its first
token in the batch; the first token of its exact buffer and where that lies; where token 0 of its history lies, how many
history tokens follow each other there, and where the rest (less than a page) lies."""

HEADS_TOGETHER = 4
"""kv heads of a program where they can be divided so."""

PAGE = tl.constexpr(32)
GROUP = tl.constexpr(32)


@triton.constexpr_function
def pieces(D):
    """Blocks of 128, 64 and 32 channels that a head is cut into: Triton's shapes are powers of two."""
    return D // 128 + (D % 128 >= 64) + (D % 64 >= 32)


@triton.constexpr_function
def piece_channels(D, i):
    """Channels of the i-th of them."""
    if i < D // 128:
        return 128
    return 64 if i == D // 128 and D % 128 >= 64 else 32


@triton.constexpr_function
def piece_at(D, i):
    """Its first channel."""
    return 128 * i if i <= D // 128 else D // 64 * 64


@triton.constexpr_function
def value_scales_at(D, BITS):
    """Bytes of a head's part of a page before the scales of its values: key codes, key scales and zeros."""
    return 32 * D * BITS // 8 + 4 * D


@triton.constexpr_function
def value_codes_at(D, BITS):
    """Bytes before the codes of its values: the above, value scales and zeros."""
    return value_scales_at(D, BITS) + 4 * 32 * (D // 32)


@triton.constexpr_function
def head_bytes(D, BITS):
    """Bytes of a head's part of a page."""
    return value_codes_at(D, BITS) + 32 * D * BITS // 8


def heads_together(heads: int) -> int:
    """kv heads that a program of ``expand_kernel`` copies: a power of two that divides all."""
    return math.gcd(heads, HEADS_TOGETHER)


@triton.jit
def code_shifts(BITS: tl.constexpr, C: tl.constexpr):
    """Bits below each code of a key word."""
    PER: tl.constexpr = 32 // BITS  # codes of a word
    UNIT: tl.constexpr = PER if PER < C // 4 else C // 4
    j = tl.arange(0, PER)
    inside = j % UNIT
    return (j // UNIT * UNIT + inside % 2 * (UNIT // 2) + inside // 2) * BITS


@triton.jit
def scratch_place(info, token, head, H: tl.constexpr, D: tl.constexpr):
    """First elements [N] of history tokens of a head (of heads) in the coded scratch."""
    coded = tl.load(info + CODED)
    at = tl.where(token < coded, tl.load(info + CODED_AT) + token, tl.load(info + TAIL_AT) + token - coded)
    return at.to(tl.int64) * (H * D) + head * D


@triton.jit
def page_address(pool, table, page, offset, BLOCK_BYTES: tl.constexpr, PAGE_BYTES: tl.constexpr, PAGES: tl.constexpr):
    """A cell's part (at ``offset`` bytes) of a page of a row's history; ``table`` is the row's."""
    block = tl.load(table + page // PAGES).to(tl.int64)
    return pool + block * BLOCK_BYTES + (page % PAGES) * PAGE_BYTES + offset


@triton.jit
def eight_codes(x, ODD: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr):
    """The codes that begin ``ODD * (j % 2) + EVEN * (j // 2)`` bits up in x, j = 0 .. 7: a last axis, in j's order."""
    c0, c1 = x & MASK, (x >> ODD) & MASK
    c2, c3 = (x >> EVEN) & MASK, (x >> (ODD + EVEN)) & MASK
    c4, c5 = (x >> (2 * EVEN)) & MASK, (x >> (ODD + 2 * EVEN)) & MASK
    c6, c7 = (x >> (3 * EVEN)) & MASK, (x >> (ODD + 3 * EVEN)) & MASK
    even, odd = tl.join(tl.join(c0, c4), tl.join(c2, c6)), tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.reshape(tl.join(even, odd), x.shape + (8,))  # noqa: RUF005 - Triton knows no unpacking


@triton.jit
def four_codes(x):
    """The four 2-bit codes of bytes x, as a last axis."""
    c0, c1, c2, c3 = x & 3, (x >> 2) & 3, (x >> 4) & 3, (x >> 6) & 3
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), x.shape + (4,))  # noqa: RUF005


@triton.jit
def load_key_block(
    heads, part, token, BITS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr
):
    """What channels AT .. AT + C - 1 of keys are decoded from: words of eight codes, scale and zero of each channel.

    Args:
        heads: [HEADS] the heads' parts of a page.
        part, token: [HEADS * 32] every token's own of them, and its number.
    """
    unit = tl.arange(0, C // 8)
    words = part.to(tl.pointer_type(tl.int32)) + (PAGE * AT * BITS // 32 + token * (C * BITS // 32))
    at = PAGE * D * BITS // 16 + AT + tl.arange(0, C)
    scales = heads.to(tl.pointer_type(tl.float16))[:, None] + at[None, :]
    return tl.load(words[:, None] + (unit * BITS // 4)[None, :]), tl.load(scales), tl.load(scales + D)


@triton.jit
def decode_key_block(words, scale, zero, BITS: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr):
    """Keys [HEADS * 32, C] fp32."""
    if BITS == 4:
        codes = eight_codes(words, 16, 4, 15)
    elif C == 32:
        codes = eight_codes(words >> (tl.arange(0, C // 8) % 2 * 16)[None, :], 8, 2, 3)
    else:
        codes = eight_codes(words >> (tl.arange(0, C // 8) % 2 * 8)[None, :], 16, 2, 3)
    scale = tl.broadcast_to(scale.to(tl.float32)[:, None, :], [HEADS, PAGE, C])
    zero = tl.broadcast_to(zero.to(tl.float32)[:, None, :], [HEADS, PAGE, C])
    codes = tl.reshape(codes, [HEADS * PAGE, C]).to(tl.float32)
    return codes * tl.reshape(scale, [HEADS * PAGE, C]) + tl.reshape(zero, [HEADS * PAGE, C])


@triton.jit
def value_channel(C: tl.constexpr):
    """Channels [C] of a block in the order of ``decode_value_block``."""
    c = tl.arange(0, C)
    return c // 4 % (C // GROUP) * GROUP + c // (C // 8) * 4 + c % 4


@triton.jit
def load_value_block(part, token, BITS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr, C: tl.constexpr):
    """The same of values: the codes' high and low bits, of two groups at a time (or of the only one), and the scale and
    zero of each group. With BITS 2 the low bits are no value."""
    GROUPS: tl.constexpr = C // GROUP
    PAIRS: tl.constexpr = GROUPS // 2 if GROUPS > 1 else 1
    unit_type: tl.constexpr = tl.uint16 if GROUPS > 1 else tl.uint8
    m, k, t, e = (token // 16)[:, None], (token // 8 % 2)[:, None], (token // 2 % 4)[:, None], (token % 2)[:, None]
    unit = tl.arange(0, 8 * PAIRS)
    r, pair = (unit // PAIRS)[None, :], (unit % PAIRS)[None, :]
    if C == 128:
        high_at = ((((m * 8 + r) * 4 + t) * 2 + k) * 2 + pair) * 2 + e
    else:
        high_at = (((r * 4 + t) * 2 + m) * 2 + k) * 2 + e
    planes = part + value_codes_at(D, BITS)
    high = tl.load((planes + 8 * AT).to(tl.pointer_type(unit_type))[:, None] + high_at)
    low = high
    if BITS == 4:
        slot = token // 8 * 8 + token % 2 * 4 + token // 2 % 4
        low_at = (planes + (8 * D + AT // 4 + slot * (D // 4))).to(tl.pointer_type(unit_type))
        low = tl.load(low_at[:, None] + unit[None, :])
    place = (token // 2 % 4 * 8 + token // 8 * 2 + token % 2)[:, None] + (AT + tl.arange(0, GROUPS) * PAGE)[None, :]
    scales = (part + value_scales_at(D, BITS)).to(tl.pointer_type(tl.float16))[:, None] + place
    return high, low, tl.load(scales), tl.load(scales + D)


@triton.jit
def decode_value_block(high, low, scale, zero, BITS: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr):
    """Values [HEADS * 32, C] fp32, channels in the order of ``value_channel``: four of each group at a time, as the
    codes lie."""
    N: tl.constexpr = HEADS * PAGE
    GROUPS: tl.constexpr = C // GROUP
    high, low = high.to(tl.int32), low.to(tl.int32)
    codes = eight_codes(high, 2, 4, 3) if GROUPS > 1 else four_codes(high)
    if BITS == 4:
        codes = codes * 4 + (eight_codes(low, 2, 4, 3) if GROUPS > 1 else four_codes(low))
    codes = tl.reshape(codes, [N, 8, GROUPS, 4]).to(tl.float32)
    scale, zero = scale.to(tl.float32)[:, None, :, None], zero.to(tl.float32)[:, None, :, None]
    return tl.reshape(codes * scale + zero, [N, C])


@triton.jit
def expand_block(
    heads,
    part,
    token,
    keys_to,
    values_to,
    to,
    BITS: tl.constexpr,
    D: tl.constexpr,
    AT: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Decode channels AT .. AT + C - 1 of some heads of a page; token i goes to element ``to[i]``.

    All loads come first: what is done between them would make each wait for the one before.
    """
    words, key_scale, key_zero = load_key_block(heads, part, token, BITS, D, AT, C, HEADS)
    high, low, scale, zero = load_value_block(part, token, BITS, D, AT, C)
    keys = decode_key_block(words, key_scale, key_zero, BITS, C, HEADS)
    tl.store(keys_to + to[:, None] + (AT + tl.arange(0, C))[None, :], keys.to(keys_to.dtype.element_ty))
    values = decode_value_block(high, low, scale, zero, BITS, C, HEADS)
    tl.store(values_to + to[:, None] + (AT + value_channel(C))[None, :], values.to(values_to.dtype.element_ty))


@triton.jit
def load_tokens(
    window_pool,
    table,
    info,
    k_new,
    v_new,
    kv_stride,
    token,
    head,
    AT: tl.constexpr,
    C: tl.constexpr,
    element: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Exact keys and values [32, C] of channels AT .. AT + C - 1 of a head, from window blocks or the step's own."""
    computed = tl.load(info + COMPUTED)
    end = computed + tl.load(info + NEW)
    channels = (AT + tl.arange(0, C))[None, :]
    stored = (token < computed)[:, None] & (channels < D)
    fresh = ((token >= computed) & (token < end))[:, None] & (channels < D)
    blocks = tl.load(table + token // WINDOW, mask=token < computed, other=0).to(tl.int64)
    old = (window_pool + blocks * BLOCK_BYTES).to(tl.pointer_type(element))
    old = (old + (token % WINDOW * H + head) * D)[:, None] + channels
    new = ((tl.load(info + START) + token - computed).to(tl.int64) * kv_stride + head * D)[:, None] + channels
    keys = tl.where(fresh, tl.load(k_new + new, mask=fresh, other=0.0), tl.load(old, mask=stored, other=0.0))
    old += WINDOW * H * D
    values = tl.where(fresh, tl.load(v_new + new, mask=fresh, other=0.0), tl.load(old, mask=stored, other=0.0))
    return keys, values


@triton.jit
def copy_tokens(
    window_pool,
    table,
    info,
    k_new,
    v_new,
    kv_stride,
    keys_to,
    values_to,
    token,
    to,
    head,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Copy exact tokens [32] of a head to elements ``to`` [32]."""
    C: tl.constexpr = triton.next_power_of_2(D)
    element: tl.constexpr = keys_to.dtype.element_ty
    keys, values = load_tokens(
        window_pool, table, info, k_new, v_new, kv_stride, token, head, 0, C, element, H, D, BLOCK_BYTES, WINDOW
    )
    exist = token < tl.load(info + COMPUTED) + tl.load(info + NEW)
    channels = tl.arange(0, C)[None, :]
    tl.store(keys_to + to[:, None] + channels, keys, mask=exist[:, None] & (channels < D))
    tl.store(values_to + to[:, None] + channels, values, mask=exist[:, None] & (channels < D))


@triton.jit(do_not_specialize=["history_stride", "window_stride"])
def expand_kernel(
    pool,
    history_table,
    window_table,
    tasks,
    info,
    k_new,
    v_new,
    coded_k,
    coded_v,
    exact_k,
    exact_v,
    kv_stride,
    history_offset,
    window_offset,
    history_stride,
    window_stride,
    BITS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SINK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One task and HEADS kv heads a program: their loads are on their way together.

    Args:
        pool: the pool's bytes.
        history_table, window_table: [B, *_stride] int32.
        tasks: [N, 2] int32: a row's record (-1: nothing to do), and a page of its history, or -1 - i for the i-th 32
            tokens of its exact buffer.
        info: [R, 16] int32, see above.
        k_new, v_new: [T, H, D] of the step, tokens ``kv_stride`` elements apart.
        coded_k, coded_v, exact_k, exact_v: [N, H, D] scratch.
        history_offset, window_offset: bytes, of the cell.
        BITS: of the codes; 16 is a history kept exact.
        PAGES, WINDOW: pages of a history block, tokens of a window block.
    """
    first_head, task = HEADS * tl.program_id(0), tl.program_id(1)  # neighbours make up whole rows of memory
    record, piece = tl.load(tasks + 2 * task), tl.load(tasks + 2 * task + 1)
    if record < 0:
        return
    info += record * INFO_COLUMNS
    row = tl.load(info + ROW).to(tl.int64)
    lane = tl.arange(0, PAGE)
    if piece < 0:
        first = tl.load(info + EXACT_FIRST)
        token = first + (-1 - piece) * PAGE + lane
        to = (tl.load(info + EXACT_AT) + token - first).to(tl.int64) * (H * D)
        window = window_table + row * window_stride
        for head in tl.range(first_head, first_head + HEADS):
            copy_tokens(
                pool + window_offset,
                window,
                info,
                k_new,
                v_new,
                kv_stride,
                exact_k,
                exact_v,
                token,
                to + head * D,
                head,
                H,
                D,
                BLOCK_BYTES,
                WINDOW,
            )
        return
    token = piece * PAGE + lane
    if piece < SINK // PAGE:
        window = window_table + row * window_stride
        for head in tl.range(first_head, first_head + HEADS):
            copy_tokens(
                pool + window_offset,
                window,
                info,
                k_new,
                v_new,
                kv_stride,
                coded_k,
                coded_v,
                token,
                scratch_place(info, token, head, H, D),
                head,
                H,
                D,
                BLOCK_BYTES,
                WINDOW,
            )
        return
    table = history_table + row * history_stride
    page = page_address(pool, table, piece, history_offset, BLOCK_BYTES, PAGE_BYTES, PAGES)
    if BITS == 16:
        channels = tl.arange(0, triton.next_power_of_2(D))[None, :]
        inside = channels < D
        for head in tl.range(first_head, first_head + HEADS):
            to = scratch_place(info, token, head, H, D)
            source = page.to(tl.pointer_type(coded_k.dtype.element_ty)) + (lane[:, None] * H + head) * D + channels
            tl.store(coded_k + to[:, None] + channels, tl.load(source, mask=inside), mask=inside)
            tl.store(coded_v + to[:, None] + channels, tl.load(source + PAGE * H * D, mask=inside), mask=inside)
    else:
        every = tl.arange(0, HEADS * PAGE)
        heads = page + (first_head + tl.arange(0, HEADS)) * head_bytes(D, BITS)
        head, mine = first_head + every // PAGE, every % PAGE
        part = page + head * head_bytes(D, BITS)
        to = scratch_place(info, piece * PAGE + mine, head, H, D)
        for i in tl.static_range(pieces(D)):
            expand_block(heads, part, mine, coded_k, coded_v, to, BITS, D, piece_at(D, i), piece_channels(D, i), HEADS)
