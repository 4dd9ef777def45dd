"""Drawings: a function of the theme, rendered as inline SVG for the page and as PNG for files."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkv.artifacts.storage import write_atomically
from loopkv.report.theme import PAGE_THEME, PNG_THEME, Theme, to_css_variables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PNG_DPI = 200
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "loopkv",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "axes.titlesize": 9.0,
    "text.parse_math": False,  # names come from Records: a $ in them is a dollar
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """What to draw and on how much room.

    Args:
        width_in, height_in: natural size in inches; shrinks on a narrow screen, grows by at most a quarter.
        draw: fills the axes with the colours of the theme.
        scrolls: unreadable when small: shrinks by at most 15%, then scrolls sideways.
    """

    width_in: float
    height_in: float
    draw: Callable[[Axes, Theme], None]
    scrolls: bool = False

    @property
    def fills_row(self) -> bool:
        """Too wide to stand beside another figure."""
        return self.width_in > 6.4


def _rendered(drawing: Drawing, theme: Theme, kind: str, title: str = "") -> bytes:
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    colours = {
        "text.color": theme.ink,
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "grid.color": theme.line,
        "axes.facecolor": "none",
    }
    settings: Any = {**_STYLE, **colours}
    with matplotlib.rc_context(settings):
        lines = [part for line in title.splitlines() for part in textwrap.wrap(line, round(13 * drawing.width_in))]
        height_in = drawing.height_in + 0.16 * len(lines)
        canvas = Canvas(figsize=(drawing.width_in, height_in), layout="constrained")
        if lines:
            canvas.suptitle("\n".join(lines), fontsize=8.5, x=0.02, ha="left")
        canvas.patch.set_facecolor("none" if kind == "svg" else theme.paper)
        drawing.draw(canvas.subplots(), theme)
        output = io.BytesIO()
        metadata = (
            {"Date": None, "Creator": None, "Format": None, "Type": None} if kind == "svg" else {"Software": None}
        )
        canvas.savefig(output, format=kind, dpi=PNG_DPI if kind == "png" else 72, metadata=metadata)
    return output.getvalue()


def to_svg(drawing: Drawing, alt: str, prefix: str) -> str:
    """Inline SVG that follows the page's colours; ``prefix`` keeps its ids apart from other drawings'."""
    svg = _rendered(drawing, PAGE_THEME, "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    width = round(drawing.width_in * 96)
    least = f"min-width:{round(0.85 * width)}px;" if drawing.scrolls else ""
    style = f"width:100%;{least}max-width:{round(1.25 * width)}px"
    opening = f'<svg role="img" aria-label="{html.escape(alt, quote=True)}" style="{style}" '
    svg = re.sub(r'^<svg\b((?:(?!width=|height=)[^>])*?)\s(?:width|height)="[^"]*"', r"<svg\1", svg)
    svg = re.sub(r'^(<svg\b[^>]*?)\s(?:width|height)="[^"]*"', r"\1", svg)
    return to_css_variables(svg.replace("<svg ", opening, 1))


def write_png(drawing: Drawing, path: Path, title: str = "") -> None:
    """Write the drawing as a PNG file on white, its title above it: away from the page nothing else says what it is."""
    write_atomically(path, _rendered(drawing, PNG_THEME, "png", title))
