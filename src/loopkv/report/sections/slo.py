"""Goodput under a latency objective: ladders, capacities, misses, ratios; measured and simulated side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkv.records import Record
from loopkv.report.page import Figure, Section, Table, table_of
from loopkv.report.plots import Series, curves
from loopkv.report.sections.common import (
    PLACES,
    arms_of,
    command,
    figures_of,
    grouped,
    interval,
    latest,
    number,
    of_kind,
    slug,
    text,
)

ATTAINMENT_RULE = 0.95
DRAWN_BOUNDS = (3.0, 10.0)  # k and TTFT of the paper's main objective; the others are in a table


def slo_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``slo.*`` and ``simulate.*``."""
    blocks: list[Figure | Table] = []
    attained = _unique(of_kind(records, "slo.attainment", "simulate.attainment"), PLACES["slo.attainment"])
    arms = arms_of(attained)
    for (workload, hardware, tau0_ms), group in grouped(
        attained, lambda r: (text(r, "workload"), _where(r), float(r.settings["tau0_ms"]))
    ).items():
        by_bounds = grouped(group, _bounds)
        shown = next((b for b in by_bounds if b[:2] == DRAWN_BOUNDS), next(iter(by_bounds)))
        blocks.append(_ladder(shown, workload, hardware, by_bounds[shown], arms))
        if len(by_bounds) > 1:
            blocks.append(_all_bounds_table(group, list(by_bounds), hardware, tau0_ms))
    blocks.sort(key=lambda block: isinstance(block, Table))
    blocks += _capacity_tables(records)
    misses = _misses(attained)
    blocks += [misses] if misses is not None else []
    ratios = of_kind(records, "slo.capacity_ratio")
    if ratios:
        blocks.append(_ratio_table(ratios))
    tau0 = latest(of_kind(records, "slo.tau0_ms"), *PLACES["slo.tau0_ms"])
    if tau0:
        blocks.append(
            table_of(
                "tau0",
                ("rule", "arm", "context (tokens)", "tau0 ms", "hardware"),
                [
                    (
                        text(r, "tau0_rule"),
                        text(r, "arm"),
                        figures_of(number(r, "context_tokens"), 6),
                        figures_of(r.value),
                        r.hardware,
                    )
                    for r in tau0
                ],
                "Step time of stock vLLM for one request, from a line fitted to step time over context.",
            )
        )
    if not blocks:
        return None
    lead = (
        "A request meets the objective if its first token comes within the TTFT bound and its mean time per output "
        "token (TPOT) stays within k x tau0. Only requests that arrive in the middle 80% of the trace are scored; one "
        "that failed has missed."
    )
    return Section("slo", "Goodput under a latency objective", lead, tuple(blocks))


def _unique(records: Sequence[Record], keys: Sequence[str]) -> list[Record]:
    """The last record of each place, kind and seed."""
    return [
        record
        for group in grouped(records, lambda r: (r.what, r.seed, _where(r))).values()
        for record in latest(group, *keys)
    ]


def _bounds(record: Record) -> tuple[float, float, float]:
    return (float(record.settings["k"]), float(record.settings["ttft_s"]), float(record.settings["tau0_ms"]))


def _where(record: Record) -> str:
    gpu = text(record, "gpu")
    return f"simulated {gpu}" if record.what.startswith("simulate.") and gpu else record.hardware


def _bound_text(bounds: tuple[float, float, float]) -> str:
    k, ttft, tau0 = bounds
    return f"TTFT <= {ttft:g} s, TPOT <= {k:g} x {tau0:.4g} ms = {k * tau0:.4g} ms"


def _ladder(
    bounds: tuple[float, float, float], workload: str, hardware: str, rows: Sequence[Record], arms: Sequence[str]
) -> Figure:
    series = []
    lines = []
    told = []
    for (arm, what, seed), group in grouped(rows, lambda r: (text(r, "arm"), r.what, r.seed)).items():
        ordered = sorted(group, key=lambda r: float(r.settings["rate_per_s"]))
        simulated = what.startswith("simulate.")
        seeds = list(dict.fromkeys(r.seed for r in rows if text(r, "arm") == arm and r.what == what))
        tail = " (simulated)" if simulated else ""
        name = arm + (f", seed {seed}" if len(seeds) > 1 else "") + tail
        legend = "" if seed != seeds[0] else arm + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "") + tail
        series.append(
            Series(
                legend,
                tuple(float(r.settings["rate_per_s"]) for r in ordered),
                tuple(float(r.value or 0) for r in ordered),
                colour=list(arms).index(arm),
                dashed=simulated,
                hollow=simulated,
            )
        )
        low, high = ordered[0], ordered[-1]
        told.append(
            f"{name}: {low.value:.2f} at {low.settings['rate_per_s']:g} to {high.value:.2f} at "
            f"{high.settings['rate_per_s']:g} req/s"
        )
        lines += [
            (
                name,
                f"{r.settings['rate_per_s']:g}",
                f"{r.value:.3f}",
                figures_of(number(r, "scored"), 6),
                figures_of(number(r, "preemptions"), 6),
            )
            for r in ordered
        ]
    k, ttft, tau0 = bounds
    return Figure(
        key=slug("slo", hardware, workload[:6], k, ttft, f"{tau0:.3f}"),
        title=f"Attainment, {_bound_text(bounds)}",
        explanation=(
            "Share of requests in the objective at each arrival rate; an arm's capacity is its last rung before the "
            f"line falls below {ATTAINMENT_RULE:.0%}." + (f" {hardware}." if hardware else "")
        ),
        alt="; ".join(told) + ".",
        command=command(rows),
        drawing=curves(
            series,
            "arrival rate (req/s)",
            "attainment",
            horizontal=(ATTAINMENT_RULE, f"{ATTAINMENT_RULE:.0%} rule"),
            y_limits=(min(0.5, *(v for one in series for v in one.y)) - 0.03, 1.02),
        ),
        data=table_of("Rungs", ("arm", "req/s", "attainment", "scored", "preemptions"), lines),
    )


def _all_bounds_table(
    rows: Sequence[Record], bounds: Sequence[tuple[float, float, float]], hardware: str, tau0: float
) -> Table:
    """Attainment of every rung under every bound at one tau0."""
    lines = []
    for (arm, what, seed, rate), group in grouped(
        rows, lambda r: (text(r, "arm"), r.what, r.seed, float(r.settings["rate_per_s"]))
    ).items():
        at = {_bounds(r): float(r.value or 0) for r in group}
        name = arm + (" (simulated)" if what.startswith("simulate.") else "")
        seed_text = "-" if seed is None else str(seed)
        lines.append((name, seed_text, f"{rate:.4g}", *(f"{at[b]:.3f}" if b in at else "-" for b in bounds)))
    names = [f"{k:g} tau0\nTTFT {ttft:g} s" for k, ttft, _ in bounds]
    title = f"Attainment under every bound, tau0 {tau0:.4g} ms" + (f" ({hardware})" if hardware else "")
    return table_of(title, ("arm", "seed", "req/s", *names), lines)


def _capacity_tables(records: Sequence[Record]) -> list[Table]:
    rows = [r for r in records if r.what in ("slo.capacity", "simulate.capacity")]
    rows = [
        record
        for group in grouped(rows, lambda r: (r.what, r.seed, _where(r))).values()
        for record in latest(group, *PLACES["slo.capacity"])
    ]
    if not rows:
        return []
    bounds = sorted({_bounds(r) for r in rows}, key=lambda b: (b[2], b[1], b[0]))
    lines = []
    for (arm, what, seed, where), group in grouped(rows, lambda r: (text(r, "arm"), r.what, r.seed, _where(r))).items():
        at = {_bounds(r): r for r in group}
        kind = "simulated" if what.startswith("simulate.") else "measured"
        lines.append(
            (arm, kind, "-" if seed is None else str(seed), where, *(_capacity_text(at.get(b)) for b in bounds))
        )
    names = [f"{k:g} tau0, TTFT {ttft:g} s\n(tau0 {tau0:.4g} ms)" for k, ttft, tau0 in bounds]
    return [
        table_of(
            "Capacity (req/s)",
            ("arm", "how", "seed", "hardware", *names),
            lines,
            "Highest rate tested with at least 95% attainment before the first rung below it; < means that the lowest "
            "rung fails, >= that no rung fails or that a rate below the first failing rung was not tested.",
        )
    ]


def _capacity_text(record: Record | None) -> str:
    if record is None:
        return "-"
    if record.value is None:
        lowest = number(record, "lowest_rate")
        return "none" if lowest is None else f"<{lowest:.4g}"
    at_least = record.settings.get("no_rung_failed") or record.settings.get("bound") == "at_least"
    return f"{'>=' if at_least else ''}{record.value:.4g}"


def _misses(rows: Sequence[Record]) -> Table | None:
    """The first failing rung of every ladder."""
    lines = []
    for (arm, what, seed, where, bounds), group in grouped(
        rows, lambda r: (text(r, "arm"), r.what, r.seed, _where(r), _bounds(r))
    ).items():
        ordered = sorted(group, key=lambda r: float(r.settings["rate_per_s"]))
        first = next((r for r in ordered if float(r.value or 0) < ATTAINMENT_RULE), None)
        if first is None:
            continue
        k, ttft, tau0 = bounds
        lines.append(
            (
                arm + (" (simulated)" if what.startswith("simulate.") else ""),
                "-" if seed is None else str(seed),
                where,
                f"{k:g} x {tau0:.4g} ms, {ttft:g} s",
                f"{first.settings['rate_per_s']:g}",
                f"{float(first.value or 0):.3f}",
                *(figures_of(number(first, key), 6) for key in ("missed_ttft", "missed_tpot", "missed_both", "failed")),
                figures_of(number(first, "preemptions"), 6),
            )
        )
    if not lines:
        return None
    return table_of(
        "First failing rung",
        (
            "arm",
            "seed",
            "hardware",
            "bounds",
            "req/s",
            "attainment",
            "TTFT\nonly",
            "TPOT\nonly",
            "both",
            "failed",
            "preempted",
        ),
        lines,
    )


def _ratio_table(rows: Sequence[Record]) -> Table:
    shares = sorted({key for r in rows for key in _mapping(r.settings.get("share_at_least"))}, key=float)
    lines = []
    for r in _unique(rows, PLACES["slo.capacity_ratio"]):
        held = _mapping(r.settings.get("share_at_least"))
        lines.append(
            (
                f"{text(r, 'arm')} / {text(r, 'baseline')}",
                "-" if r.seed is None else str(r.seed),
                _bound_text(_bounds(r)),
                "-" if r.value is None else f"{r.value:.2f}x",
                interval(r.settings.get("ci95")),
                *("-" if key not in held else f"{float(held[key]):.0%}" for key in shares),
            )
        )
    return table_of(
        "Ratios of capacities",
        ("arms", "seed", "bounds", "ratio", "95% interval", *(f"draws with\n>= {key}x" for key in shares)),
        lines,
        "Scored requests resampled with replacement in every rung of both arms; a draw in which no rung fails counts "
        "its highest rung. No ratio stands where the lowest rung of either fails, or none of the baseline's.",
    )


def _mapping(value: Any) -> dict[str, float]:
    return {str(k): float(v) for k, v in value.items()} if isinstance(value, dict) else {}
