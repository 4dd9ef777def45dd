"""A cell's history as plain keys and values: coded pages decoded, exact tokens gathered, all in one launch.

Prefill reads every history token with hundreds of queries: decoding it once into a scratch lets a library's attention
read it at full rate. A program copies 32 tokens of one kv head; ``tasks`` says which (see ``prefill_plan``).
The order of codes inside a page is that of ``loopkv.codec.pages``.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

INFO_COLUMNS = tl.constexpr(16)
ROW, COMPUTED, NEW, START, EXACT_FIRST, EXACT_AT, CODED_AT, CODED, TAIL_AT = (tl.constexpr(i) for i in range(9))
"""Columns of a row's record, [R, 16] int32: its row in the block tables, tokens before the step and in it, its first
token in the batch; the first token of its exact buffer and where that lies; where token 0 of its history lies, how many
history tokens follow each other there, and where the rest (less than a page) lies."""

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
    """First elements [32] of history tokens of a head in the coded scratch."""
    coded = tl.load(info + CODED)
    at = tl.where(token < coded, tl.load(info + CODED_AT) + token, tl.load(info + TAIL_AT) + token - coded)
    return at.to(tl.int64) * (H * D) + head * D


@triton.jit
def page_address(pool, table, page, offset, BLOCK_BYTES: tl.constexpr, PAGE_BYTES: tl.constexpr, PAGES: tl.constexpr):
    """A cell's part (at ``offset`` bytes) of a page of a row's history; ``table`` is the row's."""
    block = tl.load(table + page // PAGES).to(tl.int64)
    return pool + block * BLOCK_BYTES + (page % PAGES) * PAGE_BYTES + offset


@triton.jit
def decode_key_block(head, tokens, BITS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr, C: tl.constexpr):
    """Keys [32, C] fp32 of channels AT .. AT + C - 1 from a head's part of a page; ``tokens`` [32]."""
    WORDS: tl.constexpr = C * BITS // 32  # of a token
    words_at = (head + PAGE * AT * BITS // 8).to(tl.pointer_type(tl.int32))
    words = tl.load(words_at + tokens[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    shift = code_shifts(BITS, C)
    codes = (words[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1)
    scales = (head + PAGE * D * BITS // 8).to(tl.pointer_type(tl.float16))
    channels = AT + tl.arange(0, C)
    scale = tl.load(scales + channels).to(tl.float32)
    zero = tl.load(scales + D + channels).to(tl.float32)
    return tl.reshape(codes, [PAGE, C]).to(tl.float32) * scale[None, :] + zero[None, :]


@triton.jit
def decode_value_block(head, tokens, BITS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr, C: tl.constexpr):
    """Values [32, C] fp32 of channels AT .. AT + C - 1 from a head's part of a page; ``tokens`` [32]."""
    GROUPS: tl.constexpr = C // GROUP
    SCALES: tl.constexpr = value_scales_at(D, BITS)
    HIGH: tl.constexpr = value_codes_at(D, BITS)
    quads = tl.arange(0, C // 4)
    group, r = (quads // 8)[None, :], (quads % 8)[None, :]
    token = tokens[:, None]
    m, k, t, e = token // 16, token // 8 % 2, token // 2 % 4, token % 2
    if C == 128:
        high = ((((m * 8 + r) * 4 + t) * 2 + k) * 2 + group // 2) * 4 + e * 2 + group % 2
    else:
        high = ((((r * 4 + t) * 2 + m) * 2 + k) * 2 + e) * GROUPS + group
    four = (2 * tl.arange(0, 4))[None, None, :]
    packed = tl.load((head + HIGH + 8 * AT).to(tl.pointer_type(tl.uint8)) + high).to(tl.int32)
    codes = (packed[:, :, None] >> four) & 3
    if BITS == 4:
        slot = token // 8 * 8 + e * 4 + t
        low = tl.load(
            (head + HIGH + 8 * D).to(tl.pointer_type(tl.uint8)) + slot * (D // 4) + AT // 4 + r * GROUPS + group
        )
        codes = codes * 4 + ((low.to(tl.int32)[:, :, None] >> four) & 3)
    place = t * 8 + token // 8 * 2 + e + (AT // GROUP + group) * PAGE
    scales = (head + SCALES).to(tl.pointer_type(tl.float16))
    scale = tl.load(scales + place).to(tl.float32)
    zero = tl.load(scales + PAGE * (D // GROUP) + place).to(tl.float32)
    return tl.reshape(codes.to(tl.float32) * scale[:, :, None] + zero[:, :, None], [PAGE, C])


@triton.jit
def expand_block(
    head, tokens, keys_to, values_to, to, BITS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr, C: tl.constexpr
):
    """Decode channels AT .. AT + C - 1 of a page's head; token i goes to element ``to[i]``."""
    place = to[:, None] + (AT + tl.arange(0, C))[None, :]
    keys = decode_key_block(head, tokens, BITS, D, AT, C)
    tl.store(keys_to + place, keys.to(keys_to.dtype.element_ty))
    values = decode_value_block(head, tokens, BITS, D, AT, C)
    tl.store(values_to + place, values.to(values_to.dtype.element_ty))


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
):
    """One task and kv head a program.

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
    head, task = tl.program_id(0), tl.program_id(1)  # neighbours read one token's heads: whole rows of memory
    record = tl.load(tasks + 2 * task)
    if record < 0:
        return
    piece = tl.load(tasks + 2 * task + 1)
    info += record * INFO_COLUMNS
    row = tl.load(info + ROW).to(tl.int64)
    lane = tl.arange(0, PAGE)
    if piece < 0:
        first = tl.load(info + EXACT_FIRST)
        token = first + (-1 - piece) * PAGE + lane
        to = (tl.load(info + EXACT_AT) + token - first).to(tl.int64) * (H * D) + head * D
        window = window_table + row * window_stride
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
            to,
            head,
            H,
            D,
            BLOCK_BYTES,
            WINDOW,
        )
        return
    token = piece * PAGE + lane
    to = scratch_place(info, token, head, H, D)
    if piece < SINK // PAGE:
        window = window_table + row * window_stride
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
            to,
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
        source = page.to(tl.pointer_type(coded_k.dtype.element_ty)) + (lane[:, None] * H + head) * D + channels
        tl.store(coded_k + to[:, None] + channels, tl.load(source, mask=inside), mask=inside)
        tl.store(coded_v + to[:, None] + channels, tl.load(source + PAGE * H * D, mask=inside), mask=inside)
    else:
        page += head * head_bytes(D, BITS)
        for i in tl.static_range(pieces(D)):
            expand_block(page, lane, coded_k, coded_v, to, BITS, D, piece_at(D, i), piece_channels(D, i))
