"""What each cell loses: one heat map per option, on one colour scale."""

from __future__ import annotations

from loopkv.options import OPTIONS
from loopkv.report.demo.contents import DemoReport
from loopkv.report.page import Figure, Section, table_of
from loopkv.report.plots import MAX_COLUMNS_WITH_VALUES, grid_layers, heat_map, short_number


def damage_section(report: DemoReport) -> Section:
    """Heat maps of the profile."""
    profile = report.profile
    geometry = profile.fingerprint.geometry
    names = [name for name in OPTIONS if name in profile.damage_nats]
    damages = {name: profile.damage(name) for name in names}
    positive = [value for row in damages.values() for value in row if value]
    low, high = (min(positive), max(positive)) if positive else (1e-9, 1e-8)
    limits = (low, max(high, low * 1.01))
    meaning = {"int4": "stored in 4-bit codes", "int2": "stored in 2-bit codes", "share": "read from the final loop"}
    figures = []
    for name in names:
        row = damages[name]
        known = [(value, index) for index, value in enumerate(row) if value is not None]
        worst = max(known, default=(0.0, 0))
        least = min(known, default=(0.0, 0))
        label = meaning.get(name, name)
        figures.append(
            Figure(
                key=f"damage-{name}",
                title=f"Damage of one cell {label} ({name})",
                explanation=(
                    "Each square is one cell, alone under this option while every other cell stays exact; darker is "
                    "worse, and all options share one colour scale."
                    + (
                        " Labels are base-10 logarithms of nats."
                        if len(grid_layers(geometry)) > MAX_COLUMNS_WITH_VALUES
                        else ""
                    )
                ),
                alt=(
                    f"Heat map of {len(known)} cells under {name}: worst {geometry.cells[worst[1]].label} at "
                    f"{short_number(worst[0])} nats, least {geometry.cells[least[1]].label} at "
                    f"{short_number(least[0])}."
                ),
                command=report.command("profile"),
                drawing=heat_map(geometry, row, limits),
                data=table_of(
                    f"Damage under {name}",
                    ("cell", "nats per token"),
                    [(geometry.cells[i].label, f"{value:.4g}") for value, i in sorted(known, key=lambda k: k[1])],
                ),
            )
        )
    count = len(profile.documents)
    positions = sum(document.scored_positions for document in profile.documents)
    return Section(
        "damage",
        "What each cell loses",
        f"Measured on {count} document{'s' * (count != 1)}, {positions:,} positions whose history is not empty.",
        tuple(figures),
    )
