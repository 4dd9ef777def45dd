"""Plans and profiles on a terminal: readable without colour and at 80 columns, whatever the number of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopkv.artifacts import Budget, Measured, Plan, Profile
from loopkv.geometry import Geometry
from loopkv.inspection import half_split_correlation, heaviest_cells
from loopkv.options import OPTIONS
from loopkv.planner import CORRECTION_WITH_SHARES, CORRECTION_WITHOUT_SHARES, correction, correction_applies, named_plan

WIDTH = 80
_LABEL = 8  # columns of "loop 12 "
WIDE_LAYERS = 8  # damages are printed as numbers up to so many layers
_LETTERS = {"bf16": "B", "int4": "4", "int2": "2", "share": "s"}
_COLOURS = {"bf16": "bold green", "int4": "cyan", "int2": "yellow", "share": "magenta"}
# Decades of damage, heavy to light.
_HEAT = ("bold red", "bold red", "red", "yellow", "yellow", "green", "green", "cyan", "blue", "blue")


def console() -> Console:
    """A console on stdout that neither wraps at a pipe's width nor colours one.

    Names come from files and arguments: no string is markup or an emoji code; what is styled is a ``Text``.
    """
    found = Console(highlight=False, markup=False, emoji=False)
    if found.is_terminal:
        return found
    return Console(highlight=False, markup=False, emoji=False, width=max(found.width, WIDTH))


def kib(count: float) -> str:
    """Bytes as people read them: KiB with as many decimals as needed, bytes below."""
    return f"{count / 1024:.4g} KiB" if count >= 1024 else f"{count:g} B"


def grid(geometry: Geometry, mark: Callable[[int], tuple[str, str]], step: int | None = None) -> list[Text]:
    """Rows of loops over columns of layers; ``mark(cell) -> (text, style)``. Wide models wrap by layers.

    ``step`` is the columns of a cell; by default one letter and a blank, or the letter alone where that fits the line.
    """
    if step is None:
        step = 2 if _LABEL + 2 * geometry.layers <= WIDTH else 1
    per_row = (WIDTH - _LABEL) // step
    index: dict[tuple[str, int, int], int] = {(c.section, c.loop, c.layer): i for i, c in enumerate(geometry.cells)}
    lines: list[Text] = []

    def row(section: str, loop: int, label: str, layers: range) -> Text:
        line = Text(f"{label:<{_LABEL}}", no_wrap=True)
        for layer in layers:
            cell = index.get((section, loop, layer))
            letter, style = (".", "dim") if cell is None else mark(cell)
            line.append(f"{letter:<{step}}", style)
        return line

    if geometry.prelude_layers:
        lines.append(row("prelude", 0, "prelude", range(geometry.prelude_layers)))
    for first in range(0, geometry.layers, per_row):
        layers = range(first, min(first + per_row, geometry.layers))
        ruler = ["layer".ljust(_LABEL), *" " * (step * len(layers))]
        for layer in layers:
            number = str(layer + 1)
            if layer == first or (layer + 1) % 5 == 0 or step > 2:
                at = 1 + step * (layer - first)
                ruler[at : at + len(number)] = number
        lines.append(Text("".join(ruler).rstrip(), style="dim", no_wrap=True))
        lines += [row("loop", t, f"loop {t + 1}", layers) for t in range(geometry.loops)]
    if geometry.coda_layers:
        lines.append(row("coda", 0, "coda", range(geometry.coda_layers)))
    return lines


def options_grid(geometry: Geometry, options: Sequence[str]) -> list[Text]:
    """One letter per cell, and the legend with counts."""
    lines = grid(geometry, lambda cell: (_LETTERS[options[cell]], _COLOURS[options[cell]]))
    legend = Text(" " * _LABEL)
    for name in OPTIONS:
        if count := options.count(name):
            legend.append(_LETTERS[name], _COLOURS[name])
            legend.append(f" {name} x {count}   ")
    return [*lines, legend]


def damage_grid(geometry: Geometry, damages: Sequence[float | None]) -> list[Text]:
    """Damages in nats where the layers fit the line; else their decade: ``4`` stands for 1e-5 to 1e-4.

    ``.`` marks what was not measured and, as a decade, what lies below 1e-10.
    """
    if geometry.layers <= WIDE_LAYERS:
        return grid(geometry, lambda cell: _number(damages[cell]), step=9)

    def mark(cell: int) -> tuple[str, str]:
        damage = damages[cell]
        if damage is None or damage < 1e-10:
            return ".", "dim"
        decade = min(9, _decade(damage))
        return str(decade), _HEAT[decade]

    return grid(geometry, mark)


def _decade(damage: float) -> int:
    """0 for 0.1 and above, 1 for 0.01 to 0.1 and so on."""
    return 99 if damage <= 0 else max(0, math.floor(-math.log10(damage)))


def _number(damage: float | None) -> tuple[str, str]:
    if damage is None:
        return ".", "dim"
    decade = _decade(damage)
    return f"{damage:.1e}", _HEAT[decade] if decade <= 9 else "dim"


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Name and value in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def describe_geometry(geometry: Geometry) -> str:
    """``4 loops x 24 layers, 96 cells, 16 kv heads x 128``."""
    outside = f" + {geometry.prelude_layers} prelude, {geometry.coda_layers} coda" * bool(
        geometry.prelude_layers or geometry.coda_layers
    )
    return (
        f"{geometry.loops} loops x {geometry.layers} layers{outside}, {len(geometry.cells)} cells, "
        f"{geometry.kv_heads} kv heads x {geometry.head_dim}"
    )


def describe_budget(budget: Budget) -> str:
    """Goal and limits in one line."""
    limits = [
        f"damage <= {budget.max_damage_nats:.4g} nats" if budget.max_damage_nats is not None else "",
        f"stored <= {kib(budget.max_stored_bytes)}" if budget.max_stored_bytes is not None else "",
        f"read <= {kib(budget.max_read_bytes)}" if budget.max_read_bytes is not None else "",
    ]
    return f"goal {budget.goal}: " + ", ".join(filter(None, limits))


def nats(value: float, kl_share: float | None) -> str:
    """``2.37e-04 nats (1.97 KL_share)``."""
    return f"{value:.3e} nats" + (f" ({value / kl_share:.3g} KL_share)" if kl_share else "")


def print_plan(plan: Plan, warnings: Sequence[str], out: Console) -> None:
    """Bytes against BF16, damage, grid, identity and warnings of a plan."""
    geometry = plan.fingerprint.geometry
    size = plan.footprint
    exact = named_plan("bf16", plan.fingerprint, policy=plan.policy).footprint.stored_bytes
    rows = [
        ("plan", plan.name),
        ("model", f"{plan.fingerprint.name}: {describe_geometry(geometry)}"),
        (
            "stored",
            f"{kib(size.stored_bytes)} per history token, {size.stored_bytes / exact:.1%} of BF16 ({kib(exact)})",
        ),
        ("read", f"{kib(size.read_bytes)} per history token, {size.read_bytes / exact:.1%} of BF16"),
    ]
    if plan.tau is not None:
        low = kib(size.read_bytes_at(0.0))
        rows.append(("V precision", f"tau {plan.tau:g}: reads {low} (nothing hot) to {kib(size.read_bytes)} (all hot)"))
    if plan.budget is not None:
        rows.append(("budget", describe_budget(plan.budget)))
    if plan.predicted is not None:
        share = plan.predicted.kl_share_nats
        factor = correction(plan.options)
        kinds = (("without", CORRECTION_WITHOUT_SHARES), ("with", CORRECTION_WITH_SHARES))
        rows.append(("predicted", f"{nats(plan.predicted.damage_nats, share)}, the sum over cells"))
        for kind, value in kinds if correction_applies(geometry) else ():
            mine = "this plan" if value == factor else "other plans"
            rows.append(
                (
                    "",
                    f"{nats(plan.predicted.damage_nats * value, share)}, x {value} for plans {kind} shared cells "
                    f"({mine}); the paper's fit on Ouro-1.4B",
                )
            )
    if plan.measured is not None:
        interval = _interval(plan.measured)
        share = plan.predicted.kl_share_nats if plan.predicted else None
        rows.append(
            (
                "measured",
                f"{nats(plan.measured.kl_nats, share)}, {interval}, top-1 {plan.measured.top1_agreement:.2%}",
            )
        )
    rows.append(("sha256", plan.sha256[:16]))
    out.print(facts(rows))
    out.print()
    for line in options_grid(geometry, plan.options):
        out.print(line)
    print_warnings(warnings, out)


def _interval(measured: Measured) -> str:
    """The 95% interval, which has no width where one document was measured and the KL is not 0."""
    low, high = measured.kl_ci95_nats
    if low == high and measured.kl_nats > 0:
        return "1 document (no interval)"
    return f"95% CI {low:.3e} to {high:.3e}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if len(numbers) == 1 else f"{low} to {high}"


def counted(number: int, noun: str) -> str:
    """``1 document``, ``2 documents``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def print_profile(profile: Profile, warnings: Sequence[str], out: Console) -> None:
    """Documents, damages per loop and cell, stability, heaviest cells and warnings of a profile."""
    geometry = profile.fingerprint.geometry
    tokens = [document.tokens for document in profile.documents]
    stable = half_split_correlation(profile)
    share = profile.kl_share
    heavy = heaviest_cells(profile)
    rows = [
        ("profile of", f"{profile.fingerprint.name}: {describe_geometry(geometry)}"),
        (
            "documents",
            f"{len(tokens)} of {_span(tokens)} tokens, "
            f"{sum(d.scored_positions for d in profile.documents)} positions scored",
        ),
        ("KL_share", "not measured" if share is None else f"{share:.3e} nats"),
        ("stability", "-" if stable is None else f"two halves of the documents rank the cells with {stable:.3f}"),
        ("heaviest", ", ".join(f"{c.label} {c.option} {c.damage_nats:.2e}" for c in heavy[:3])),
        ("", ", ".join(f"{c.label} {c.option} {c.damage_nats:.2e}" for c in heavy[3:])),
        ("sha256", profile.sha256[:16]),
    ]
    out.print(facts(row for row in rows if row[1]))
    table = Table(title="sum of damages, nats", box=None, padding=(0, 2), title_justify="left", title_style="dim")
    table.add_column("")
    names = [name for name in OPTIONS if name in profile.damage_nats]
    for name in names:
        table.add_column(name, justify="right")
    sections = [("prelude", [i for i, c in enumerate(geometry.cells) if c.section == "prelude"])]
    sections += [(f"loop {t + 1}", list(geometry.loop_cells(t))) for t in range(geometry.loops)]
    sections += [("coda", [i for i, c in enumerate(geometry.cells) if c.section == "coda"])]
    for label, cells in sections:
        if cells:
            sums = []
            for name in names:
                column = profile.damage(name)
                known = [damage for cell in cells if (damage := column[cell]) is not None]
                sums.append(f"{math.fsum(known):.3e}" if known else "-")
            table.add_row(label, *sums)
    out.print()
    out.print(table)
    for name in names:
        out.print()
        decades = "" if geometry.layers <= WIDE_LAYERS else " by decade (4 = 1e-5 to 1e-4, . = below 1e-10 or none)"
        out.print(Text(f"damage of {name}, nats{decades}", style="dim"))
        for line in damage_grid(geometry, profile.damage(name)):
            out.print(line)
    print_warnings(warnings, out)


def print_warnings(warnings: Sequence[str], out: Console) -> None:
    """One line each, marked in words so that it survives without colour."""
    if warnings:
        out.print()
    for warning in warnings:
        out.print(Text(f"warning: {warning}", style="yellow"))
