"""Grids of cells, loops by layers: a value or an option in every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopkv.geometry import Geometry, Section
from loopkv.report.figure import Drawing
from loopkv.report.plots.scales import add_colour_bar, short_number
from loopkv.report.theme import OPTION_COLOURS, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS_WITH_VALUES = 8
OPTION_LETTERS = {"bf16": "B", "int4": "4", "int2": "2", "share": "S"}


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
        add_colour_bar(axes, ScalarMappable(norm, colours), "nats per token", aspect=12)

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
