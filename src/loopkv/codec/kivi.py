"""KIVI-style integer codes: the reference that defines every stored bit.

Keys are coded per (kv head, channel) over the tokens of a page, values per (token, kv head) over groups of
neighbouring channels (paper section 3.1; Liu et al. 2024b). With ``b`` bits::

    lo, hi = min, max                       in fp32
    scale  = fp16((hi - lo) / (2^b - 1))    zero = fp16(lo)
    q      = clamp(round_half_even((x - zero) / scale), 0, 2^b - 1)
    x'     = zero + scale * q

The codes use the rounded scale and zero; a scale of 0 gives q = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP16_MAX = 65504.0
MIDPOINT = 1.5  # a cold value's low plane is read as the middle of {0, 1, 2, 3}


@dataclass(frozen=True, slots=True)
class CodedKeys:
    """Keys of whole pages.

    Args:
        q: [..., S, H, D] uint8 codes (S tokens of a page).
        scale, zero: [..., H, D] fp16.
        bits: bits per code.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor
    bits: int


@dataclass(frozen=True, slots=True)
class CodedValues:
    """Values of whole pages.

    Args:
        q: [..., S, H, D] uint8 codes.
        scale, zero: [..., S, H, D / group] fp16.
        bits: bits per code.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor
    bits: int


def sanitize(x: Tensor) -> tuple[Tensor, int]:
    """``x`` in fp32 with NaN as 0 and everything clamped to the fp16 range, and how many elements that changed."""
    x = x.float()
    clean = torch.nan_to_num(x, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX).clamp(-FP16_MAX, FP16_MAX)
    return clean, int((clean != x).sum())  # NaN != NaN counts too


def _encode(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``x`` (fp32, clean) with one (scale, zero) along ``dim``, which stays as a dimension of size 1."""
    top = (1 << bits) - 1
    lo, hi = x.amin(dim, keepdim=True) + 0.0, x.amax(dim, keepdim=True)  # -0.0 becomes 0.0: amin may find either
    scale = ((hi - lo) / torch.full_like(lo, top)).half()  # by a tensor: CUDA divides by a number inexactly
    zero = lo.half()
    divisor = scale.float()
    steps = torch.round((x - zero.float()) / divisor.masked_fill(divisor == 0, 1.0)).clamp_(0, top)
    return steps.masked_fill_(divisor == 0, 0.0).to(torch.uint8), scale, zero


def encode_keys(keys: Tensor, bits: int) -> CodedKeys:
    """Code keys [..., S, H, D] (after RoPE, as stored in the cache) of whole pages."""
    clean, _ = sanitize(keys)
    q, scale, zero = _encode(clean, -3, bits)
    return CodedKeys(q, scale.squeeze(-3), zero.squeeze(-3), bits)


def encode_values(values: Tensor, bits: int, group: int = 32) -> CodedValues:
    """Code values [..., S, H, D] in groups of ``group`` neighbouring channels."""
    clean, _ = sanitize(values)
    q, scale, zero = _encode(clean.unflatten(-1, (-1, group)), -1, bits)
    return CodedValues(q.flatten(-2), scale.squeeze(-1), zero.squeeze(-1), bits)


def decode_keys(coded: CodedKeys, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decoded keys [..., S, H, D]: ``zero + scale * q`` in fp32, or in fp64 when that is ``dtype``."""
    work = torch.promote_types(dtype, torch.float32)
    scale, zero = coded.scale.to(work).unsqueeze(-3), coded.zero.to(work).unsqueeze(-3)
    return torch.addcmul(zero, scale, coded.q.to(work)).to(dtype)


def decode_values(coded: CodedValues, dtype: torch.dtype = torch.float32, *, cold: Tensor | None = None) -> Tensor:
    """Decoded values [..., S, H, D].

    Args:
        coded: the codes.
        dtype: of the result.
        cold: [..., S, H] bool; True reads only the high plane, ``zero + scale * (4 * (q // 4) + 1.5)`` (4 bits only).
    """
    work = torch.promote_types(dtype, torch.float32)
    group = coded.q.shape[-1] // coded.scale.shape[-1]
    steps = coded.q.to(work)
    if cold is not None:
        if coded.bits != 4:
            raise ValueError(f"V precision needs 4-bit values, got {coded.bits} bits")
        steps = torch.where(cold.unsqueeze(-1), (coded.q & 12).to(work) + MIDPOINT, steps)
    scale, zero = coded.scale.to(work).unsqueeze(-1), coded.zero.to(work).unsqueeze(-1)
    return torch.addcmul(zero, scale, steps.unflatten(-1, (-1, group))).flatten(-2).to(dtype)
