"""The plots that reports are made of, one module per kind, each a ``Drawing`` of plain numbers."""

from loopkv.report.plots.curves import curves
from loopkv.report.plots.grids import MAX_COLUMNS_WITH_VALUES, GridRow, grid_layers, grid_rows, heat_map, option_grid
from loopkv.report.plots.rows import bars, intervals
from loopkv.report.plots.scales import short_number
from loopkv.report.plots.scatter import predicted_measured, shaded_points
from loopkv.report.plots.series import Series

__all__ = [
    "MAX_COLUMNS_WITH_VALUES",
    "GridRow",
    "Series",
    "bars",
    "curves",
    "grid_layers",
    "grid_rows",
    "heat_map",
    "intervals",
    "option_grid",
    "predicted_measured",
    "shaded_points",
    "short_number",
]
