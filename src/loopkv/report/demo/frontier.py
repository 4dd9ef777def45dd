"""The frontier: what damage costs in bytes stored and bytes read, with the plans on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loopkv.report.demo.contents import DemoReport, FrontierPoint, predicted_and_measured
from loopkv.report.page import Figure, Section
from loopkv.report.plots import Series, curves, shaded_points, short_number

MAX_FRONTIER_POINTS = 1500


def frontier_section(report: DemoReport) -> Section | None:
    """Damage over each kind of bytes, then all three together; None without a frontier."""
    if not report.frontier:
        return None
    points = _thinned(report.frontier)
    measured = [(n, p, pair) for n, p in enumerate(report.plans, 1) if (pair := predicted_and_measured(p))]
    figures = []
    for kind, label in (("stored", "stored"), ("read", "read")):
        x, y = _envelope(
            [(p.stored_bytes if kind == "stored" else p.read_bytes, p.damage_nats) for p in report.frontier]
        )
        floor = [(a, b) for a, b in zip(x, y, strict=True) if b > 0]
        at = [float(p.footprint.stored_bytes if kind == "stored" else p.footprint.read_bytes) for _, p, _ in measured]
        series = [
            Series(
                "planner: least predicted damage",
                tuple(a for a, _ in floor),
                tuple(b for _, b in floor),
                colour=7,
                marked=False,
            ),
            Series(
                "plans, predicted",
                tuple(at),
                tuple(pair[0] for *_, pair in measured),
                colour=0,
                line=False,
                hollow=True,
            ),
            Series(
                "plans, measured",
                tuple(at),
                tuple(pair[1] for *_, pair in measured),
                labels=tuple(str(n) for n, *_ in measured),
                colour=1,
                line=False,
            ),
        ]
        figures.append(
            Figure(
                key=f"frontier-{kind}",
                title=f"Frontier: damage against bytes {label}",
                explanation=(
                    f"Lower and further left is better; the line is the least damage the planner can reach at each "
                    f"number of bytes {label} per token, the numbers are the plans of the table above."
                ),
                alt=(
                    f"Line of least predicted damage falling from {short_number(floor[0][1])} nats at "
                    f"{floor[0][0]:,.0f} bytes to {short_number(floor[-1][1])} at {floor[-1][0]:,.0f} bytes, with "
                    f"{len(measured)} plans marked."
                )
                if floor
                else "No point of the frontier has damage.",
                command=report.command("plan"),
                drawing=curves(series, f"bytes {label} per history token", "damage (nats per token)", log_y=True),
            )
        )
    marks = [
        Series(
            "",
            tuple(float(p.footprint.stored_bytes) for p in report.plans),
            tuple(float(p.footprint.read_bytes) for p in report.plans),
            labels=tuple(str(n) for n in range(1, len(report.plans) + 1)),
            colour=1,
        )
    ]
    figures.append(
        Figure(
            key="frontier-bytes",
            title="Frontier: stored, read and damage together",
            explanation=(
                "Every point is a plan that no other beats on all three; colour is its predicted damage. Plans far "
                "outside the frontier's bytes (bf16) are not drawn."
            ),
            alt=(
                f"Scatter of {len(report.frontier):,} Pareto plans over bytes stored and bytes read, coloured by "
                f"predicted damage; {len(report.plans)} plans marked."
            ),
            command=report.command("plan"),
            drawing=shaded_points(
                [p.stored_bytes for p in points],
                [p.read_bytes for p in points],
                [p.damage_nats for p in points],
                marks,
                "bytes stored per history token",
                "bytes read per history token",
                "predicted nats",
            ),
        )
    )
    drawn = f"; {len(points):,} of them drawn" if len(points) < len(report.frontier) else ""
    lead = f"One dynamic program yields all {len(report.frontier):,} Pareto plans{drawn}."
    return Section("frontier", "Frontier", lead, tuple(figures))


def _thinned(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """At most ``MAX_FRONTIER_POINTS`` points, evenly through the list in order of damage."""
    ordered = sorted(points, key=lambda p: (p.damage_nats, p.stored_bytes, p.read_bytes))
    step = max(1, math.ceil(len(ordered) / MAX_FRONTIER_POINTS))
    return ordered[::step]


def _envelope(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lower-left envelope of (bytes, damage): the least damage at or below each byte count."""
    best = math.inf
    kept = []
    for x, y in sorted(points):
        if y < best:
            best = y
            kept.append((x, y))
    return tuple(x for x, _ in kept), tuple(y for _, y in kept)
