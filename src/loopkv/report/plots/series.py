"""What is drawn on a pair of axes: named points, and the marks and room that all plots share."""

from __future__ import annotations

from dataclasses import dataclass, field

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH_IN, HEIGHT_IN = 4.2, 3.1


@dataclass(frozen=True, slots=True)
class Series:
    """One line or cloud of points. ``labels`` are written beside its points."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    labels: tuple[str, ...] = ()
    colour: int | None = None
    line: bool = True
    dashed: bool = False
    hollow: bool = False
    marked: bool = True
    low: tuple[float, ...] = field(default=())
    high: tuple[float, ...] = field(default=())
