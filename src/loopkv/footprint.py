"""Bytes per history token that a whole assignment of options stores and reads (paper appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loopkv.errors import PlanFormatError
from loopkv.geometry import Geometry
from loopkv.options import Option, own_bytes
from loopkv.policy import Policy


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes per history token over all cells.

    Args:
        stored_bytes: what the cache keeps.
        read_bytes: what one decode step reads, both value planes.
        low_plane_bytes: the part of ``read_bytes`` that V precision skips for a cold token.
    """

    stored_bytes: int
    read_bytes: int
    low_plane_bytes: int

    def read_bytes_at(self, hot_share: float) -> float:
        """Bytes read per token when a share ``hot_share`` of (token, kv head) pairs is hot."""
        return self.read_bytes - (1.0 - hot_share) * self.low_plane_bytes


def plan_footprint(geometry: Geometry, options: Sequence[Option], policy: Policy, exact_itemsize: int = 2) -> Footprint:
    """Footprint of one option per cell, in cell order. A shared cell stores nothing and reads its source's bytes.

    Raises:
        PlanFormatError: wrong number of options, or a shared cell without a source that owns its history.
    """
    if len(options) != len(geometry.cells):
        raise PlanFormatError("options of a plan", got=len(options), wanted=f"{len(geometry.cells)} cells")
    stored = read = low = 0
    for index, option in enumerate(options):
        holder = option
        if option.shares:
            source = geometry.source_of(index)
            if source is None:
                raise PlanFormatError(
                    f"cell {geometry.cells[index].label}",
                    got="share",
                    wanted="an option with its own history",
                    hint="only looped cells before the final loop can share",
                )
            holder = options[source]
            if holder.shares:
                raise PlanFormatError(
                    f"share target {geometry.cells[source].label}",
                    got="share",
                    wanted="a source that stores its history",
                )
        size = own_bytes(holder, geometry.kv_heads, geometry.head_dim, policy, exact_itemsize)
        stored += 0 if option.shares else size.stored
        read += size.read
        low += size.value_low_plane
    return Footprint(stored, read, low)
