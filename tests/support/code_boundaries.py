"""Are two codings of nearly equal values the same, up to rounding boundaries? (fp32 runs may differ that far.)"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from loopkv.codec import CodedKeys, CodedValues


class CodeDifference(NamedTuple):
    """Codes that differ, how many of them no rounding boundary explains, and codes in all."""

    differing: int
    unexplained: int
    total: int


def compare_codes(x: Tensor, mine: CodedKeys | CodedValues, theirs: CodedKeys | CodedValues) -> CodeDifference:
    """Compare ``mine``, the codes of x [..., S, H, D], with another run's.

    A code may differ where its unrounded step lies within 1e-4 of a rounding boundary, or where its scale or zero
    differs and the unrounded scale or zero lies within 1e-4 of a scale step of an fp16 rounding boundary.
    """
    if isinstance(mine, CodedKeys):
        groups, axis = x.float().double(), -3
        shape = [m.unsqueeze(-3).double() for m in (mine.scale, mine.zero, theirs.scale, theirs.zero)]
        codes = (mine.q.double(), theirs.q.double())
    else:
        width = x.shape[-1] // mine.scale.shape[-1]
        groups, axis = x.float().double().unflatten(-1, (-1, width)), -1
        shape = [m.unsqueeze(-1).double() for m in (mine.scale, mine.zero, theirs.scale, theirs.zero)]
        codes = tuple(q.double().unflatten(-1, (-1, width)) for q in (mine.q, theirs.q))
    scale, zero, other_scale, other_zero = shape
    lo, hi = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
    step = (hi - lo) / ((1 << mine.bits) - 1)
    near_scale = ((scale + other_scale) / 2 - step).abs() <= 1e-4 * step
    near_zero = ((zero + other_zero) / 2 - lo).abs() <= 1e-4 * step
    excused = ((scale != other_scale) & near_scale) | ((zero != other_zero) & near_zero)
    fraction = torch.where(scale == 0, 0.0, (groups - zero) / scale)
    boundary = (fraction - fraction.floor() - 0.5).abs() <= 1e-4
    differs = codes[0] != codes[1]
    moved = (scale != other_scale) & ~near_scale | (zero != other_zero) & ~near_zero
    unexplained = (differs & ~(boundary | excused)) | moved
    return CodeDifference(int(differs.sum()), int(unexplained.sum()), differs.numel())
