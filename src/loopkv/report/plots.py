"""The plots that reports are made of, each a ``Drawing`` of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopkv.geometry import Geometry, Section
from loopkv.report.figure import Drawing
from loopkv.report.theme import OPTION_COLOURS, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH_IN, HEIGHT_IN = 4.2, 3.1
MAX_COLUMNS_WITH_VALUES = 8
OPTION_LETTERS = {"bf16": "B", "int4": "4", "int2": "2", "share": "S"}


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


@dataclass(frozen=True, slots=True)
class GridRow:
    """One row of a grid of cells: ``label`` and the cell index of each column (None where the row has no such cell)."""

    label: str
    cells: tuple[int | None, ...]


def grid_layers(geometry: Geometry) -> tuple[int, ...]:
    """Layers (0-based) that have a cell in any section: the columns of a grid."""
    return tuple(sorted({cell.layer for cell in geometry.cells}))


def grid_rows(geometry: Geometry) -> tuple[GridRow, ...]:
    """Rows of a loops x layers grid; prelude and coda are rows of their own."""
    columns = grid_layers(geometry)
    at = {(c.section, c.loop, c.layer): i for i, c in enumerate(geometry.cells)}

    def row(label: str, section: Section, loop: int) -> GridRow:
        return GridRow(label, tuple(at.get((section, loop, layer)) for layer in columns))

    sections = {cell.section for cell in geometry.cells}
    rows = [row("prelude", "prelude", 0)] if "prelude" in sections else []
    rows += [row(f"loop {loop + 1}", "loop", loop) for loop in range(geometry.loops)]
    rows += [row("coda", "coda", 0)] if "coda" in sections else []
    return tuple(rows)


def short_number(value: float) -> str:
    """A number in few characters: 0, 12, 3.4, 0.12, 20,000, 1.2e-5."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 100:
        return f"{value:.3g}"
    if 100 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def heat_map(geometry: Geometry, values: Sequence[float | None], limits: tuple[float, float]) -> Drawing:
    """Values of all cells on a logarithmic colour scale between ``limits`` (both above 0), written in the cells.

    Up to 8 layers the value itself is written, beyond that its base-10 logarithm. A cell without a value stays empty,
    one at 0 takes the lowest colour.
    """
    rows = grid_rows(geometry)
    columns = len(rows[0].cells)
    wide = columns > MAX_COLUMNS_WITH_VALUES
    cell_in = 0.36 if wide else min(0.72, 4.4 / columns)
    row_in = 0.34 if wide else 0.42

    def draw(axes: Axes, theme: Theme) -> None:
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm

        norm, colours = LogNorm(*limits, clip=True), colormaps["viridis_r"]
        for y, row in enumerate(rows):
            for x, cell in enumerate(row.cells):
                value = None if cell is None else values[cell]
                if value is None:
                    continue
                shade = colours(float(norm(max(value, limits[0]))))
                axes.add_patch(_square(x, y, shade, theme))
                text = short_number(value) if not wide else ("0" if value <= 0 else f"{math.log10(value):.1f}")
                axes.text(x, y, text, ha="center", va="center", fontsize=7.5 if wide else 8.5, color=_contrast(shade))
        _grid_axes(axes, rows, grid_layers(geometry))
        bar = axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.02, fraction=0.06, aspect=12)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8)
        bar.set_label("nats per token", fontsize=8)

    return Drawing(columns * cell_in + 1.35, len(rows) * row_in + 0.75, draw, scrolls=wide)


def option_grid(geometry: Geometry, options: Sequence[str]) -> Drawing:
    """The option of every cell as a coloured square with a letter (B bf16, 4 int4, 2 int2, S share)."""
    rows = grid_rows(geometry)
    columns = len(rows[0].cells)
    cell_in = 0.2 if columns > MAX_COLUMNS_WITH_VALUES else 0.34

    def draw(axes: Axes, theme: Theme) -> None:
        from matplotlib.patches import Patch

        for y, row in enumerate(rows):
            for x, cell in enumerate(row.cells):
                if cell is None:
                    continue
                name = options[cell]
                axes.add_patch(_square(x, y, OPTION_COLOURS.get(name, theme.muted), theme))
                axes.text(x, y, OPTION_LETTERS.get(name, "?"), ha="center", va="center", fontsize=7.5, color="#101418")
        _grid_axes(axes, rows, grid_layers(geometry))
        shown = [name for name in OPTION_COLOURS if name in set(options)]
        axes.legend(
            handles=[Patch(facecolor=OPTION_COLOURS[name], label=name) for name in shown],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.22 if len(rows) < 8 else -0.06),
            ncols=4,
            handlelength=1.0,
            columnspacing=1.0,
        )

    return Drawing(max(2.9, columns * cell_in + 1.0), len(rows) * max(cell_in, 0.24) + 1.1, draw, scrolls=columns > 16)


def _square(x: int, y: int, colour: object, theme: Theme):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor=theme.paper, linewidth=1.0)


def _contrast(shade: tuple[float, ...]) -> str:
    red, green, blue = shade[:3]
    return "#101418" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


def _grid_axes(axes: Axes, rows: Sequence[GridRow], layers: Sequence[int]) -> None:
    columns = len(layers)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_aspect("auto")
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    step = 1 if columns <= 24 else 4
    ticks = [x for x in range(columns) if (x + 1) % step == 0 or x == 0]
    axes.set_xticks(ticks, [str(layers[x] + 1) for x in ticks])
    axes.set_xlabel("layer")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


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
        for index, one in enumerate(series):
            number = index if one.colour is None else one.colour
            colour = theme.of(number)
            style: dict[str, Any] = {
                "color": colour,
                "marker": MARKERS[number % len(MARKERS)] if one.marked else "none",
                "linestyle": ("--" if one.dashed else "-") if one.line else "none",
                "markerfacecolor": "none" if one.hollow else colour,
                "label": one.name or "_nolegend_",
            }
            if one.low:
                below = [y - low for y, low in zip(one.y, one.low, strict=True)]
                above = [high - y for y, high in zip(one.y, one.high, strict=True)]
                axes.errorbar(one.x, one.y, yerr=[below, above], capsize=2, elinewidth=1.0, **style)
            else:
                axes.plot(one.x, one.y, **style)
            for x, y, text in zip(one.x, one.y, one.labels, strict=False):
                axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7.5, color=colour)
        if horizontal is not None:
            axes.axhline(horizontal[0], color=theme.muted, linewidth=0.9, linestyle=":")
            axes.annotate(
                horizontal[1],
                (0.01, horizontal[0]),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize=7.5,
                color=theme.muted,
            )
        if vertical is not None:
            axes.axvline(vertical[0], color=theme.muted, linewidth=0.9, linestyle=":")
            axes.annotate(
                vertical[1],
                (vertical[0], 0.02),
                xycoords=("data", "axes fraction"),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=7.5,
                color=theme.muted,
                rotation=90,
                va="bottom",
            )
        _scales(axes, log_x, log_y)
        if y_limits is not None:
            axes.set_ylim(*y_limits)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        names = [one.name for one in series if one.name]
        if len(names) > 1:
            axes.figure.legend(loc="outside lower center", ncols=2 if max(map(len, names)) > 14 else 3)

    return Drawing(WIDTH_IN, height_in + 0.17 * math.ceil(len(series) / 2), draw)


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
                marker=MARKERS[number % len(MARKERS)],
                color=colour,
                markerfacecolor="none" if one.hollow else colour,
                label=one.name,
            )
            for x, y, text in zip(one.x, one.y, one.labels, strict=False):
                axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, -8), fontsize=7.5, color=colour)
        _scales(axes, True, True)
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
            bar = axes.figure.colorbar(points, ax=axes, pad=0.02, fraction=0.06, aspect=20)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=8)
            bar.set_label(shade_label, fontsize=8)
        for index, one in enumerate(marks):
            number = index if one.colour is None else one.colour
            colour = theme.of(number)
            axes.plot(
                one.x,
                one.y,
                linestyle="none",
                marker=MARKERS[number % len(MARKERS)],
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
        _scales(axes, False, False)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if any(one.name for one in marks):
            axes.figure.legend(loc="outside lower center", ncols=2)

    return Drawing(WIDTH_IN, 3.9, draw)


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
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, max([*left, 1e-12]) * (1.18 if texts else 1.03))
        axes.grid(True, axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(x_label)
        if len(parts) > 1:
            axes.figure.legend(loc="outside lower center", ncols=2)

    return Drawing(WIDTH_IN, 0.9 + 0.3 * len(names) + 0.17 * (math.ceil(len(parts) / 2) if len(parts) > 1 else 0), draw)


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
                marker=MARKERS[index % len(MARKERS)],
                markersize=4.5,
                color=theme.of(index),
                elinewidth=1.2,
                capsize=2,
                label=label,
            )
        axes.set_yticks(range(len(names)), names)
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
    return Drawing(WIDTH_IN, height, draw)


def _scales(axes: Axes, log_x: bool, log_y: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

    for use, axis, name in ((log_x, axes.xaxis, "x"), (log_y, axes.yaxis, "y")):
        if not use:
            axis.set_major_formatter(StrMethodFormatter("{x:,.8g}"))
            continue
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
        if high / low < 100:  # under two decades, powers of ten alone would leave one tick
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axis.set_minor_formatter(NullFormatter())
