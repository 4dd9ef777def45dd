"""Lines over one pair of axes, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopkv.report.figure import Drawing
from loopkv.report.plots.labels import draw_labels
from loopkv.report.plots.scales import set_scales
from loopkv.report.plots.series import HEIGHT_IN, RUN_DASHES, WIDTH_IN, Series, dash_of, marker_of
from loopkv.report.theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def curves(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    horizontal: tuple[float, str] | None = None,
    vertical: tuple[float, str] | None = None,
    y_limits: tuple[float, float] | None = None,
    height_in: float = HEIGHT_IN,
) -> Drawing:
    """Lines or clouds over one pair of axes; ``low`` and ``high`` of a series become error bars."""

    def draw(axes: Axes, theme: Theme) -> None:
        axes.grid(True, linewidth=0.6)
        axes.set_axisbelow(True)
        labels: list[tuple[float, float, str, str]] = []
        for index, one in enumerate(series):
            number = index if one.colour is None else one.colour
            colour = theme.of(number)
            style: dict[str, Any] = {
                "color": colour,
                "marker": marker_of(number) if one.marked else "none",
                "linestyle": _line_of(one, number) if one.line else "none",
                "markerfacecolor": "none" if one.hollow else colour,
                "label": one.name or "_nolegend_",
            }
            if one.low:
                below = [y - low for y, low in zip(one.y, one.low, strict=True)]
                above = [high - y for y, high in zip(one.y, one.high, strict=True)]
                axes.errorbar(one.x, one.y, yerr=[below, above], capsize=2, elinewidth=1.0, **style)
            else:
                axes.plot(one.x, one.y, **style)
            labels += [(x, y, text, colour) for x, y, text in zip(one.x, one.y, one.labels, strict=False)]
        if horizontal is not None:
            axes.axhline(horizontal[0], color=theme.muted, linewidth=0.9, linestyle=":")
            axes.annotate(
                horizontal[1],
                (1, horizontal[0]),  # beside the axes: no line of data runs through it
                xycoords=("axes fraction", "data"),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=7.5,
                color=theme.muted,
                va="center",
            )
        if vertical is not None:
            axes.axvline(vertical[0], color=theme.muted, linewidth=0.9, linestyle=":")
            axes.annotate(
                vertical[1],
                (vertical[0], 1),  # above the axes, for the same reason
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize=7.5,
                color=theme.muted,
                ha="center",
                va="bottom",
            )
        set_scales(axes, log_x, log_y)
        if y_limits is not None:
            axes.set_ylim(*y_limits)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        names = [one.name for one in series if one.name]
        if names:
            axes.figure.legend(loc="outside lower center", ncols=_legend_columns(names))
        draw_labels(axes, labels, theme.paper)

    names = [one.name for one in series if one.name]
    return Drawing(WIDTH_IN, height_in + 0.17 * math.ceil(len(names) / min(2, _legend_columns(names))), draw)


def _line_of(one: Series, number: int) -> Any:
    return RUN_DASHES[one.run % len(RUN_DASHES)] if one.dashed else dash_of(number)


def _legend_columns(names: Sequence[str]) -> int:
    """As many as the width holds."""
    longest = max(map(len, names), default=0)
    return 1 if longest > 28 else 2 if longest > 14 else 3
