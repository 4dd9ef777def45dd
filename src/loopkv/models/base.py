"""What the profiler and the engines ask of a looped model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loopkv.geometry import Geometry

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(cell, q, k, v) -> o``: q and o [B, T, Hq, D], k and v [B, T, H, D] after RoPE; scores scale by D ** -0.5."""


class Rotary(NamedTuple):
    """Rotary factors of some positions: cos and sin, each [T, 1, D / 2]."""

    cos: Tensor
    sin: Tensor


class LoopedModel(Protocol):
    """One block of layers applied several times, cut at its attention cells.

    ``run_cell`` applies the layer of cell ``index`` (with whatever precedes the next cell: the norm after a loop), so
    a run can stop and resume at any cell from the hidden states that enter it.
    """

    geometry: Geometry
    name: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, E] that enter cell 0, of ids [B, T] int64."""
        ...

    def rotary(self, positions: Tensor) -> Rotary:
        """Rotary factors of positions [T] int64."""
        ...

    def run_cell(self, index: int, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Hidden states [B, T, E] that enter cell ``index + 1`` (after the last cell: what ``logits`` takes)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of final hidden states [..., E]."""
        ...


def run_cells(model: LoopedModel, hidden: Tensor, rotary: Rotary, attend: Attend, first: int = 0) -> Tensor:
    """Run cells ``first`` to the last; returns the hidden states that ``logits`` takes."""
    for index in range(first, len(model.geometry.cells)):
        hidden = model.run_cell(index, hidden, rotary, attend)
    return hidden
