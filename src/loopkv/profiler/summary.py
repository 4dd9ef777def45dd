"""What a profile says at a glance: heaviest cells, sums per loop, and whether two halves of the documents agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from loopkv.artifacts import Profile
from loopkv.geometry import Cell


@dataclass(frozen=True, slots=True)
class CellDamage:
    """Damage of one cell alone under one option, in nats, mean over documents."""

    cell: Cell
    option: str
    damage_nats: float


def heaviest_cells(profile: Profile, option: str, count: int = 5) -> tuple[CellDamage, ...]:
    """The cells with the largest damage under ``option``, heaviest first."""
    cells = profile.fingerprint.geometry.cells
    known = [CellDamage(cells[i], option, d) for i, d in enumerate(profile.damage(option)) if d is not None]
    return tuple(sorted(known, key=lambda entry: -entry.damage_nats)[:count])


def loop_sums(profile: Profile, option: str) -> tuple[float | None, ...]:
    """Summed damage in nats of each loop's cells under ``option`` (None where it applies to none of them)."""
    geometry, damage = profile.fingerprint.geometry, profile.damage(option)
    sums = []
    for loop in range(geometry.loops):
        known = [value for cell in geometry.loop_cells(loop) if (value := damage[cell]) is not None]
        sums.append(math.fsum(known) if known else None)
    return tuple(sums)


def half_split_correlation(profile: Profile, option: str) -> float | None:
    """Spearman correlation over cells of the damage on even-numbered and on odd-numbered documents.

    None with fewer than two documents or three cells, or where all cells damage alike.
    """
    rows = np.array([row for row in profile.damage_nats[option] if row is not None])
    if rows.ndim != 2 or rows.shape[0] < 3 or rows.shape[1] < 2:
        return None
    first, second = rows[:, ::2].mean(axis=1), rows[:, 1::2].mean(axis=1)
    if np.ptp(first) == 0.0 or np.ptp(second) == 0.0:
        return None
    return float(spearmanr(first, second).statistic)
