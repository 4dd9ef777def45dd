"""One row per name: stacked bars, or points with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loopkv.report.figure import Drawing
from loopkv.report.plots.series import WIDTH_IN, marker_of
from loopkv.report.theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NARROW_IN = 3.6  # a narrower drawing shrinks less on a phone: its letters stay larger


def bars(
    names: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float]]],
    x_label: str,
    *,
    texts: Sequence[str] = (),
) -> Drawing:
    """Horizontal bars, one per name; several parts are stacked. ``texts`` are written behind the bars."""

    def draw(axes: Axes, theme: Theme) -> None:
        left = [0.0] * len(names)
        for index, (label, widths) in enumerate(parts):
            axes.barh(range(len(names)), widths, left=left, height=0.62, color=theme.of(index), label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, (end, text) in enumerate(zip(left, texts, strict=False)):
            axes.annotate(
                text, (end, y), textcoords="offset points", xytext=(4, 0), va="center", fontsize=8, color=theme.ink
            )
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, max([*left, 1e-12]) * (1.18 if texts else 1.03))
        axes.grid(True, axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(x_label)
        if len(parts) > 1:
            axes.figure.legend(loc="outside lower center", ncols=2)

    legend_in = 0.17 * math.ceil(len(parts) / 2) if len(parts) > 1 else 0.0
    width_in = _width_in(names, NARROW_IN if len(parts) == 1 else WIDTH_IN)  # a legend needs the wider one
    return Drawing(width_in, 0.9 + 0.3 * len(names) + legend_in, draw, scrolls=width_in > WIDTH_IN)


def _width_in(names: Sequence[str], least_in: float) -> float:
    """Width at which the plot keeps 2 inches beside its longest name (8 points, about 0.075 inches a letter)."""
    longest = max((len(line) for name in names for line in name.split("\n")), default=0)
    return max(least_in, 2.0 + 0.075 * longest)


def intervals(
    names: Sequence[str], series: Sequence[tuple[str, Sequence[tuple[float, float, float] | None]]], x_label: str
) -> Drawing:
    """Points with intervals ``(value, low, high)``, one row per name and one mark per series."""

    def draw(axes: Axes, theme: Theme) -> None:
        count = len(series)
        for index, (label, points) in enumerate(series):
            shown = [(y, point) for y, point in enumerate(points) if point is not None]
            if not shown:
                continue
            value = [point[0] for _, point in shown]
            axes.errorbar(
                value,
                [y + (index - (count - 1) / 2) * 0.7 / max(count, 1) for y, _ in shown],
                xerr=[
                    [v - point[1] for v, (_, point) in zip(value, shown, strict=True)],
                    [point[2] - v for v, (_, point) in zip(value, shown, strict=True)],
                ],
                linestyle="none",
                marker=marker_of(index),
                markersize=4.5,
                color=theme.of(index),
                elinewidth=1.2,
                capsize=2,
                label=label,
            )
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x", linewidth=0.6)
        for y in range(1, len(names)):
            axes.axhline(y - 0.5, color=theme.line, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(x_label)
        if count > 1:
            axes.figure.legend(loc="outside lower center", ncols=2)

    height = 0.9 + len(names) * max(0.3, 0.13 * len(series)) + 0.17 * math.ceil(len(series) / 2)
    width_in = _width_in(names, WIDTH_IN)
    return Drawing(width_in, height, draw, scrolls=width_in > WIDTH_IN)
