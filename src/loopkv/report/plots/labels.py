"""Texts beside points, moved up or down until none covers another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OFFSET_POINTS = (4.0, 4.0)
LEADER_POINTS = 6.0
"""A text moved further than this gets a line to its point."""


@dataclass(frozen=True, slots=True)
class Box:
    """Where a text stands, in any one unit."""

    left: float
    right: float
    bottom: float
    height: float


def spread(boxes: Sequence[Box], top: float) -> list[float]:
    """Bottoms of the boxes after those that share a column have been moved apart, in the given order.

    Boxes keep their order from below. They are moved up; where that leaves a box above ``top``, it and what it then
    covers are moved down instead.
    """
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].bottom)
    bottoms = [box.bottom for box in boxes]
    for at, i in enumerate(order):
        below = [bottoms[j] + boxes[j].height for j in order[:at] if _share_column(boxes[i], boxes[j])]
        bottoms[i] = max([bottoms[i], *below])
    for at, i in reversed(list(enumerate(order))):
        above = [bottoms[j] for j in order[at + 1 :] if _share_column(boxes[i], boxes[j])]
        highest = max(min([top, *above]) - boxes[i].height, boxes[i].bottom if not above else -float("inf"))
        bottoms[i] = min(bottoms[i], highest)
    return bottoms


def _share_column(one: Box, other: Box) -> bool:
    return one.left < other.right and other.left < one.right


def draw_labels(axes: Axes, labels: Sequence[tuple[float, float, str, str]], paper: str) -> None:
    """Write texts ``(x, y, text, colour)`` beside points of finished axes (scales, limits and legend are set).

    Lines and marks that run behind a text are covered with ``paper``, nearly.
    """
    shown = [label for label in labels if label[2]]
    if not shown:
        return
    texts = [
        axes.annotate(
            text,
            (x, y),
            textcoords="offset points",
            xytext=OFFSET_POINTS,
            fontsize=7.5,
            color=colour,
            zorder=4,
            bbox={"facecolor": paper, "edgecolor": "none", "alpha": 0.7, "pad": 0.3},
        )
        for x, y, text, colour in shown
    ]
    figure: Any = axes.figure
    figure.draw_without_rendering()  # the layout decides where the points are
    extents = [text.get_window_extent() for text in texts]
    boxes = [Box(e.x0, e.x1, e.y0, e.height) for e in extents]
    for (x, y, _, colour), text, box, bottom in zip(
        shown, texts, boxes, spread(boxes, axes.get_window_extent().y1), strict=True
    ):
        moved = (bottom - box.bottom) * 72 / figure.dpi
        text.xyann = (OFFSET_POINTS[0], OFFSET_POINTS[1] + moved)
        if abs(moved) > LEADER_POINTS:
            axes.annotate(
                "",
                (x, y),
                textcoords="offset points",
                xytext=(OFFSET_POINTS[0], OFFSET_POINTS[1] + moved + 2),
                arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": colour, "shrinkA": 0, "shrinkB": 2},
            )
