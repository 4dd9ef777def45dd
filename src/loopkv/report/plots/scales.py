"""Axes: linear or logarithmic scales, and the numbers written on them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.cm import ScalarMappable


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


def set_scales(axes: Axes, log_x: bool, log_y: bool) -> None:
    """Set both scales with their tick labels, after the data is drawn."""
    from matplotlib.ticker import StrMethodFormatter

    for use, axis, name in ((log_x, axes.xaxis, "x"), (log_y, axes.yaxis, "y")):
        if not use:
            axis.set_major_formatter(StrMethodFormatter("{x:,.8g}"))
            continue
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        _number_powers(axis, *(axes.get_xlim() if name == "x" else axes.get_ylim()))


def add_colour_bar(axes: Axes, colours: ScalarMappable, label: str, aspect: float) -> None:
    """A bar of logarithmic ``colours`` beside the axes."""
    bar = axes.figure.colorbar(colours, ax=axes, pad=0.02, fraction=0.06, aspect=aspect)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=8)
    _number_powers(bar.ax.yaxis, *bar.ax.get_ylim())


def _number_powers(axis: Axis, low: float, high: float) -> None:
    """Numbers instead of powers of ten on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if high / low < 100:  # under two decades, powers of ten alone would leave one tick
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axis.set_minor_formatter(NullFormatter())
