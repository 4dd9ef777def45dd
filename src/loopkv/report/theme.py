"""Colours: one set for PNG files; for the page, CSS variables that follow the reader's light or dark setting."""

from __future__ import annotations

from dataclasses import dataclass

_SERIES_LIGHT = ("#0072b2", "#d55e00", "#008a62", "#aa4586", "#b07c00", "#2f8fc4", "#6b5bd2", "#7a7a7a")
_SERIES_DARK = ("#56b4e9", "#ff8f4a", "#2fc497", "#e58cc4", "#f0c44a", "#9ad0f0", "#aaa0ff", "#b5b5b5")
"""Okabe-Ito hues, darkened or lightened for contrast on their background."""

OPTION_COLOURS = {"bf16": "#8c8c8c", "int4": "#2b83ba", "int2": "#f2a541", "share": "#5fb874"}
"""Fill of a cell's option; readable with dark text on both backgrounds."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours that a figure is drawn with."""

    ink: str
    muted: str
    line: str
    paper: str
    band: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        """Colour of series ``index`` (repeats after the last; markers tell repeats apart)."""
        return self.series[index % len(self.series)]


PNG_THEME = Theme("#1b1f24", "#57606a", "#d0d7de", "#ffffff", "#e6f2e6", _SERIES_LIGHT)

PAGE_THEME = Theme(
    "#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", tuple(f"#0a01{i:02x}" for i in range(len(_SERIES_LIGHT)))
)
"""Placeholders that ``to_css_variables`` turns into CSS variables."""

_NAMES = {
    PAGE_THEME.ink: "--ink",
    PAGE_THEME.muted: "--muted",
    PAGE_THEME.line: "--line",
    PAGE_THEME.paper: "--card",
    PAGE_THEME.band: "--band",
    **{colour: f"--s{i}" for i, colour in enumerate(PAGE_THEME.series)},
}


def to_css_variables(svg: str) -> str:
    """Replace the placeholders of ``PAGE_THEME`` by references to the page's variables."""
    for colour, name in _NAMES.items():
        svg = svg.replace(colour, f"var({name})")
    return svg


def _block(
    ink: str, muted: str, line: str, card: str, band: str, page: str, accent: str, series: tuple[str, ...]
) -> str:
    pairs = {"ink": ink, "muted": muted, "line": line, "card": card, "band": band, "page": page, "accent": accent}
    pairs |= {f"s{i}": colour for i, colour in enumerate(series)}
    return "".join(f"--{name}:{value};" for name, value in pairs.items())


LIGHT_VARIABLES = _block("#1b1f24", "#57606a", "#d0d7de", "#ffffff", "#dff0df", "#f6f8fa", "#0a5fb4", _SERIES_LIGHT)
DARK_VARIABLES = _block("#e6edf3", "#9aa4af", "#3a424c", "#171b21", "#1f3a2a", "#0d1117", "#6cb6ff", _SERIES_DARK)
