"""What is drawn on a pair of axes: named points, and the marks and room that all plots share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
COLOURS = 8  # of a theme
DASHES: tuple[Any, ...] = ("-", (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
RUN_DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (1, 4)), (0, (9, 3)))
"""Line styles of the further runs of one look."""
WIDTH_IN, HEIGHT_IN = 4.2, 3.1


def marker_of(number: int) -> str:
    """Marker of series ``number``: where colours repeat, another one, so that the first 64 series all differ."""
    return MARKERS[(number + number // COLOURS) % len(MARKERS)]


def dash_of(number: int) -> Any:
    """Line style of series ``number``: another where colours repeat; the first 256 differ in one of the three."""
    repeat = number // COLOURS
    return DASHES[(repeat + repeat // len(MARKERS)) % len(DASHES)]


@dataclass(frozen=True, slots=True)
class Series:
    """One line or cloud of points. ``labels`` are written beside its points.

    ``colour`` numbers its look (colour, marker and dash, see ``marker_of``); ``dashed`` is a second run of that look,
    or with ``run`` above 0 one after it.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    labels: tuple[str, ...] = ()
    colour: int | None = None
    line: bool = True
    dashed: bool = False
    run: int = 0
    hollow: bool = False
    marked: bool = True
    low: tuple[float, ...] = field(default=())
    high: tuple[float, ...] = field(default=())
