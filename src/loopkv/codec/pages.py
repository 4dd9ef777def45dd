"""The packing of one cell's page into bytes: the struct that Python, CUDA and the engines share.

The logical contract is (codes, scale, zero); this file is its one physical form, versioned by ``PAGE_VERSION``. A page
lies head by head, so that the reader of one head gets everything it always needs with one contiguous copy::

    page = [head][ k_codes | k_scales | k_zeros | v_scales | v_zeros | v_codes | v_low ]

The order inside a plane is what a tensor-core reader wants: the codes of a 16 x 16 tile come out of 32-bit words by one
AND for two or for four of them (``halves.cuh`` and ``integers.cuh`` in ``kernels/csrc`` say how; ``page.cuh`` has the
offsets). With channel blocks of 128, 64 and 32 channels (``_blocks``)::

    k_codes   [block][token][channel]       channels permuted in units of 8 (4 bits) or 16 (2 bits): the even ones,
                                            then the odd ones, so that the halves of a word hold neighbours
    v_codes   [block][lane][tile][pair][token][channel]
                                            2-bit codes (the high plane of int4, the whole code of int2); lane 4 r + t
                                            of 32 holds channels 4 r .. 4 r + 3 of every 32, tokens 2 t and 2 t + 1 of
                                            every 8; a word has one token in each half (``_high_order``)
    v_low     [slot][block][r][channel]     the low plane of int4, token by token (32 bytes at 128 channels: one
                                            sector of memory), because V precision skips it token by token
    k_scales  [channel]        fp16         likewise k_zeros
    v_scales  [group][t][tile][token] fp16  likewise v_zeros

Geometries that the kernels do not serve (pages of other than 32 tokens, heads no multiple of 32) keep the natural
order in ``v_codes``, and wherever a permutation does not divide them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from loopkv.codec.kivi import CodedKeys, CodedValues
from loopkv.options import Option
from loopkv.policy import Policy

PAGE_VERSION = 3
CELL_ALIGNMENT_BYTES = 128
_KERNEL_PAGE_TOKENS = 32
_TILE_TOKENS = 8
_UNIT_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class Plane:
    """One contiguous array of a head's part of a page: byte offset from the head's start and size in bytes."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageStruct:
    """Planes of one coded page; offsets count from the start of a head's part, which has ``head_nbytes`` bytes.

    ``v_codes`` holds 2-bit codes: the whole code of int2, the high plane of int4, whose low plane is ``v_low``.
    """

    bits: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    group: int
    k_codes: Plane
    k_scales: Plane
    k_zeros: Plane
    v_scales: Plane
    v_zeros: Plane
    v_codes: Plane
    v_low: Plane
    head_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the page: all heads."""
        return self.kv_heads * self.head_nbytes


def page_struct(option: Option, kv_heads: int, head_dim: int, policy: Policy) -> PageStruct:
    """The struct of a coded option's page."""
    if not option.coded or option.bits is None:
        raise ValueError(f"option {option.name} has no coded pages")
    elements = policy.page_tokens * head_dim
    sizes = {
        "k_codes": elements * option.bits // 8,
        "k_scales": head_dim * 2,
        "k_zeros": head_dim * 2,
        "v_scales": elements // policy.group * 2,
        "v_zeros": elements // policy.group * 2,
        "v_codes": elements * 2 // 8,
        "v_low": elements * (option.bits - 2) // 8,
    }
    planes, offset = {}, 0
    for name, size in sizes.items():
        planes[name] = Plane(offset, size)
        offset += size
    return PageStruct(
        bits=option.bits,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=policy.page_tokens,
        group=policy.group,
        head_nbytes=offset,
        **planes,
    )


def _blocks(head_dim: int) -> tuple[int, ...]:
    """Channels of each block: as many of 128 as fit, then 64, then 32."""
    if head_dim % _UNIT_CHANNELS:
        return (head_dim,)
    blocks, left = [], head_dim
    for size in (128, 64, 32):
        blocks += [size] * (left // size)
        left %= size
    return tuple(blocks)


@functools.lru_cache(maxsize=64)
def _key_order(block: int, bits: int) -> Tensor:
    """Channel held at each place of a block of key codes."""
    if block % _UNIT_CHANNELS:
        return torch.arange(block)
    unit = min(32 // bits, block // 4)  # a reader lane holds a quarter of the block, in words of 32 bits
    even_first = torch.arange(unit).view(-1, 2).T.flatten()
    return (torch.arange(0, block, unit)[:, None] + even_first).flatten()


@functools.lru_cache(maxsize=64)
def _value_order(block: int) -> Tensor:
    """Channel held at each place of a block of value codes: [lane, group, 4] for [group, lane, 4]."""
    if block % _UNIT_CHANNELS:
        return torch.arange(block)
    return torch.arange(block).view(-1, 8, 4).transpose(0, 1).flatten()


@functools.lru_cache(maxsize=64)
def _slot_tokens(page_tokens: int) -> Tensor:
    """Token in each slot of the value planes: of eight neighbours, those of even number first."""
    if page_tokens % _TILE_TOKENS:
        return torch.arange(page_tokens)
    return torch.arange(page_tokens).view(-1, 4, 2).transpose(1, 2).flatten()


@functools.lru_cache(maxsize=64)
def _scale_tokens(page_tokens: int) -> Tensor:
    """Token of each place of a value scale row: [pair of eight, tile, 2] for [tile, pair, 2]."""
    if page_tokens % _TILE_TOKENS:
        return torch.arange(page_tokens)
    return torch.arange(page_tokens).view(-1, 4, 2).transpose(0, 1).flatten()


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """[..., N] uint8 codes below 2^bits to [..., N * bits / 8] bytes, lowest index in the lowest bits."""
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    packed: Tensor = (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)
    return packed


@functools.lru_cache(maxsize=8)
def _byte_codes(bits: int, device: torch.device) -> Tensor:
    """The codes of every byte value, packed into one integer per value: [256] int16 (4 bits) or int32 (2 bits)."""
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=device) * bits
    codes = (torch.arange(256, device=device)[:, None] >> shifts) & ((1 << bits) - 1)
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return codes.to(torch.uint8).view(dtypes[per_byte]).flatten()


def _unpack_bits(data: Tensor, bits: int) -> Tensor:
    """Inverse of ``_pack_bits``: one table look-up per byte."""
    table = _byte_codes(bits, data.device)
    codes = table.index_select(0, data.flatten().int()).view(torch.uint8)
    return codes.view(*data.shape[:-1], data.shape[-1] * 8 // bits)


def _value_channels(head_dim: int) -> Tensor:
    """Channel at each place of a slot of the low plane, over all blocks."""
    order, start = [], 0
    for block in _blocks(head_dim):
        order.append(_value_order(block) + start)
        start += block
    return torch.cat(order)


@functools.lru_cache(maxsize=64)
def _low_order(page_tokens: int, head_dim: int) -> Tensor:
    """``token * D + channel`` of the code at each place of the low plane."""
    return (_slot_tokens(page_tokens)[:, None] * head_dim + _value_channels(head_dim)).flatten()


@functools.lru_cache(maxsize=64)
def _high_order(page_tokens: int, head_dim: int) -> Tensor:
    """``token * D + channel`` of the code at each place of ``v_codes``."""
    if page_tokens != _KERNEL_PAGE_TOKENS or head_dim % _UNIT_CHANNELS:
        return torch.arange(page_tokens * head_dim)
    parts, start = [], 0
    for block in _blocks(head_dim):
        groups = block // 32
        # a code's indices: two tiles of 16 tokens m, two of 8 k, t, token e; channel group pair h, group g, r, i
        m, k, t, e = (torch.arange(n) for n in (2, 2, 4, 2))
        h, g, r, i = (torch.arange(n) for n in (max(1, groups // 2), min(2, groups), 8, 4))

        def grid(*axes: Tensor) -> list[Tensor]:
            return list(torch.meshgrid(*axes, indexing="ij"))

        if block == 128:  # [m][r][t][k][h][e][g][i]: 16 bytes a lane and tile of 16 tokens
            m, r, t, k, h, e, g, i = grid(m, r, t, k, h, e, g, i)
        else:  # [r][t][m][k][e][g][i]: a lane's four token pairs together
            r, t, m, k, e, g, i = grid(r, t, m, k, e, g, i)
            h = torch.zeros_like(r)
        token, channel = 16 * m + 8 * k + 2 * t + e, start + 32 * (2 * h + g) + 4 * r + i
        parts.append((token * head_dim + channel).flatten())
        start += block
    return torch.cat(parts)


def _permute(codes: Tensor, order: Tensor) -> Tensor:
    """Codes [..., S * D] uint8 in the given order; neighbours that stay together move as one integer."""
    if len(order) % 4 == 0 and bool((order.view(-1, 4) == order[::4, None] + torch.arange(4)).all()):
        quads = codes.view(torch.int32)[..., (order[::4] // 4).to(codes.device)]
        return quads.view(torch.uint8)
    return codes[..., order.to(codes.device)]


def _pack_plane(codes: Tensor, order: Tensor) -> Tensor:
    """2-bit codes [..., H, S, D] to bytes [..., H, S * D / 4] in the given order."""
    return _pack_bits(_permute(codes.flatten(-2).contiguous(), order), 2)


def _unpack_plane(data: Tensor, order: Tensor, page_tokens: int, head_dim: int) -> Tensor:
    """Inverse of ``_pack_plane``."""
    return _permute(_unpack_bits(data, 2), _inverse(order)).unflatten(-1, (page_tokens, head_dim))


def pack_page(struct: PageStruct, keys: CodedKeys, values: CodedValues) -> Tensor:
    """Bytes [..., nbytes] uint8 of pages with codes [..., S, H, D]."""
    k, v = keys.q.transpose(-3, -2), values.q.transpose(-3, -2)  # [..., H, S, D]
    parts, start = [], 0
    for block in _blocks(struct.head_dim):
        order = _key_order(block, struct.bits).to(k.device) + start
        parts.append(_pack_bits(k.index_select(-1, order).flatten(-2), struct.bits))
        start += block
    tokens = _scale_tokens(struct.page_tokens).to(k.device)
    halves = (
        keys.scale,
        keys.zero,
        values.scale.movedim(-3, -1).index_select(-1, tokens).flatten(-2),  # [..., H, groups, S]
        values.zero.movedim(-3, -1).index_select(-1, tokens).flatten(-2),
    )
    parts += [half.contiguous().view(torch.uint8) for half in halves]
    high, low = (order(struct.page_tokens, struct.head_dim) for order in (_high_order, _low_order))
    parts.append(_pack_plane(v if struct.bits == 2 else v >> 2, high))
    if struct.bits == 4:
        parts.append(_pack_plane(v & 3, low))
    return torch.cat(parts, dim=-1).flatten(-2)


def unpack_page(struct: PageStruct, data: Tensor) -> tuple[CodedKeys, CodedValues]:
    """Codes of pages from bytes [..., nbytes] uint8."""
    tokens, dim = struct.page_tokens, struct.head_dim
    heads = data.unflatten(-1, (struct.kv_heads, struct.head_nbytes))

    def raw(plane: Plane) -> Tensor:
        return heads[..., plane.offset : plane.offset + plane.nbytes]

    def halves(plane: Plane) -> Tensor:
        return raw(plane).contiguous().view(torch.float16)

    def scales(plane: Plane) -> Tensor:
        order = _inverse(_scale_tokens(tokens)).to(data.device)
        return halves(plane).unflatten(-1, (-1, tokens)).index_select(-1, order).movedim(-1, -3)

    blocks, offset = [], 0
    for block in _blocks(dim):
        nbytes = tokens * block * struct.bits // 8
        order = _inverse(_key_order(block, struct.bits)).to(data.device)
        codes = _unpack_bits(raw(struct.k_codes)[..., offset : offset + nbytes], struct.bits)
        blocks.append(codes.unflatten(-1, (tokens, block)).index_select(-1, order))
        offset += nbytes
    k = torch.cat(blocks, dim=-1)
    v = _unpack_plane(raw(struct.v_codes), _high_order(tokens, dim), tokens, dim)
    if struct.bits == 4:
        v = (v << 2) | _unpack_plane(raw(struct.v_low), _low_order(tokens, dim), tokens, dim)
    return (
        CodedKeys(k.transpose(-3, -2), halves(struct.k_scales), halves(struct.k_zeros), struct.bits),
        CodedValues(v.transpose(-3, -2), scales(struct.v_scales), scales(struct.v_zeros), struct.bits),
    )
