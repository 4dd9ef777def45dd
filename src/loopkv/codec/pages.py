"""The packing of one cell's page into bytes: the struct that Python, CUDA and the engines share.

The logical contract is (codes, scale, zero); this file is its one physical form, versioned by ``PAGE_VERSION``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from loopkv.codec.kivi import CodedKeys, CodedValues
from loopkv.options import Option
from loopkv.policy import Policy

PAGE_VERSION = 1
CELL_ALIGNMENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class Plane:
    """One contiguous array of a page: byte offset from the page's start and size in bytes."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageStruct:
    """Planes of one coded page.

    ``v_codes`` holds 2-bit codes: the whole code of int2, the high plane of int4, whose low plane is ``v_low``.
    Codes lie as [token][head][channel], the lowest channel in the lowest bits of a byte; ``k_scales`` and ``k_zeros``
    as [head][channel] fp16, ``v_scales`` and ``v_zeros`` as [token][head][group] fp16.
    """

    bits: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    group: int
    k_codes: Plane
    v_codes: Plane
    v_low: Plane
    k_scales: Plane
    k_zeros: Plane
    v_scales: Plane
    v_zeros: Plane
    nbytes: int


def page_struct(option: Option, kv_heads: int, head_dim: int, policy: Policy) -> PageStruct:
    """The struct of a coded option's page."""
    if not option.coded or option.bits is None:
        raise ValueError(f"option {option.name} has no coded pages")
    elements = policy.page_tokens * kv_heads * head_dim
    sizes = {
        "k_codes": elements * option.bits // 8,
        "v_codes": elements * 2 // 8,
        "v_low": elements * (option.bits - 2) // 8,
        "k_scales": kv_heads * head_dim * 2,
        "k_zeros": kv_heads * head_dim * 2,
        "v_scales": elements // policy.group * 2,
        "v_zeros": elements // policy.group * 2,
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
        nbytes=offset,
        **planes,
    )


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """[..., N] uint8 codes below 2^bits to [..., N * bits / 8] bytes, lowest index in the lowest bits."""
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    packed: Tensor = (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)
    return packed


@cache
def _codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """For each byte value its 8 / bits codes, as one integer whose bytes are the codes in order."""
    values = torch.arange(256, device=device, dtype=torch.uint8).unsqueeze(-1)
    shifts = torch.arange(8 // bits, device=device, dtype=torch.uint8) * bits
    codes = (values >> shifts) & ((1 << bits) - 1)
    return codes.view({2: torch.int32, 4: torch.int16}[bits]).flatten()


def _unpack_bits(data: Tensor, bits: int) -> Tensor:
    """Inverse of ``_pack_bits``: one table look-up per byte, ten times faster than shifting on a CPU."""
    words = _codes_of_bytes(bits, data.device).index_select(0, data.flatten().int())
    return words.view(torch.uint8).view(*data.shape[:-1], data.shape[-1] * 8 // bits)


def pack_page(struct: PageStruct, keys: CodedKeys, values: CodedValues) -> Tensor:
    """Bytes [..., nbytes] uint8 of pages with codes [..., S, H, D]."""
    k, v = keys.q.flatten(-3), values.q.flatten(-3)
    high = v if struct.bits == 2 else v >> 2
    low = [_pack_bits(v & 3, 2)] if struct.bits == 4 else []
    halves = (
        keys.scale.flatten(-2),
        keys.zero.flatten(-2),
        values.scale.flatten(-3),
        values.zero.flatten(-3),
    )
    raw = [half.contiguous().view(torch.uint8) for half in halves]
    return torch.cat([_pack_bits(k, struct.bits), _pack_bits(high, 2), *low, *raw], dim=-1)


def unpack_page(struct: PageStruct, data: Tensor) -> tuple[CodedKeys, CodedValues]:
    """Codes of pages from bytes [..., nbytes] uint8."""
    tokens, heads, dim = struct.page_tokens, struct.kv_heads, struct.head_dim

    def raw(plane: Plane) -> Tensor:
        return data[..., plane.offset : plane.offset + plane.nbytes]

    def halves(plane: Plane, *shape: int) -> Tensor:
        return raw(plane).contiguous().view(torch.float16).unflatten(-1, shape)

    k = _unpack_bits(raw(struct.k_codes), struct.bits).unflatten(-1, (tokens, heads, dim))
    v = _unpack_bits(raw(struct.v_codes), 2)
    if struct.bits == 4:
        v = (v << 2) | _unpack_bits(raw(struct.v_low), 2)
    groups = dim // struct.group
    return (
        CodedKeys(k, halves(struct.k_scales, heads, dim), halves(struct.k_zeros, heads, dim), struct.bits),
        CodedValues(
            v.unflatten(-1, (tokens, heads, dim)),
            halves(struct.v_scales, tokens, heads, groups),
            halves(struct.v_zeros, tokens, heads, groups),
            struct.bits,
        ),
    )
