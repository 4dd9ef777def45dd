"""Points: predicted against measured damage, and two quantities coloured by a third."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loopkv.report.figure import Drawing
from loopkv.report.plots.scales import add_colour_bar, set_scales
from loopkv.report.plots.series import WIDTH_IN, Series, marker_of
from loopkv.report.theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def predicted_measured(series: Sequence[Series], band: tuple[float, float]) -> Drawing:
    """Measured over predicted damage, both logarithmic, with the diagonal and the band of ratios around it."""

    def draw(axes: Axes, theme: Theme) -> None:
        values = [v for one in series for v in (*one.x, *one.y) if v > 0]
        low, high = (min(values) / 1.6, max(values) * 1.6) if values else (1e-6, 1.0)
        ends = (low, high)
        axes.fill_between(
            ends,
            [e * band[0] for e in ends],
            [e * band[1] for e in ends],
            color=theme.band,
            linewidth=0,
            label=f"{band[0]:g} to {band[1]:g} x predicted",
        )
        axes.plot(ends, ends, color=theme.muted, linewidth=0.9)
        for index, one in enumerate(series):
            number = index if one.colour is None else one.colour
            colour = theme.of(number)
            axes.plot(
                one.x,
                one.y,
                linestyle="none",
                marker=marker_of(number),
                color=colour,
                markerfacecolor="none" if one.hollow else colour,
                label=one.name,
            )
            for x, y, text in zip(one.x, one.y, one.labels, strict=False):
                axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, -8), fontsize=7.5, color=colour)
        set_scales(axes, True, True)
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        axes.grid(True, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("predicted damage: sum over cells (nats per token)")
        axes.set_ylabel("measured KL (nats per token)")
        axes.figure.legend(loc="outside lower center", ncols=2)

    return Drawing(WIDTH_IN, 4.2, draw)


def shaded_points(
    x: Sequence[float],
    y: Sequence[float],
    shade: Sequence[float],
    marks: Sequence[Series],
    x_label: str,
    y_label: str,
    shade_label: str,
) -> Drawing:
    """Points coloured by a third quantity on a logarithmic scale, with labelled marks on top.

    The axes cover the points; a mark at more than 1.5 times the largest point is not drawn.
    """

    def draw(axes: Axes, theme: Theme) -> None:
        from matplotlib.colors import LogNorm

        axes.grid(True, linewidth=0.6)
        axes.set_axisbelow(True)
        positive = [value for value in shade if value > 0]
        if positive:
            norm = LogNorm(min(positive), max(max(positive), min(positive) * 1.01), clip=True)
            clipped = [max(value, min(positive)) for value in shade]
            points = axes.scatter(x, y, c=clipped, norm=norm, cmap="viridis_r", s=9, linewidths=0)
            add_colour_bar(axes, points, shade_label, aspect=20)
        for index, one in enumerate(marks):
            number = index if one.colour is None else one.colour
            colour = theme.of(number)
            axes.plot(
                one.x,
                one.y,
                linestyle="none",
                marker=marker_of(number),
                markersize=6.5,
                markerfacecolor="none" if one.hollow else colour,
                markeredgecolor=theme.ink if not one.hollow else colour,
                markeredgewidth=0.8,
                label=one.name,
            )
            for px, py, text in zip(one.x, one.y, one.labels, strict=False):
                axes.annotate(
                    text,
                    (px, py),
                    textcoords="offset points",
                    xytext=(5, 4),
                    fontsize=8,
                    color=theme.ink,
                    weight="bold",
                    annotation_clip=True,
                )
        for points_at, marks_at, limit in (
            (x, [v for one in marks for v in one.x], axes.set_xlim),
            (y, [v for one in marks for v in one.y], axes.set_ylim),
        ):
            near = [*points_at, *(v for v in marks_at if not points_at or v <= 1.5 * max(points_at))]
            if near:  # marks far outside the points would squeeze them
                margin = 0.08 * (max(near) - min(near) + 1)
                limit(min(near) - margin, max(near) + margin)
        set_scales(axes, False, False)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if any(one.name for one in marks):
            axes.figure.legend(loc="outside lower center", ncols=2)

    return Drawing(WIDTH_IN, 3.9, draw)
