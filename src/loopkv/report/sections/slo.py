"""Goodput under a latency objective: ladders, capacities, misses, ratios; measured and simulated side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loopkv.record_kinds import ignores_eos
from loopkv.records import Record
from loopkv.report.page import Figure, Section, Table, table_of
from loopkv.report.plots import Series, curves
from loopkv.report.sections.common import (
    PLACES,
    arms_of,
    command,
    constants_of,
    figures_of,
    grouped,
    hardware_of,
    interval,
    latest,
    number,
    of_kind,
    server_options,
    slug,
    tau0_ms_of,
    text,
    watermark_of,
)
from loopkv.report.sections.simulated import run_name

ATTAINMENT_RULE = 0.95
RATE_DIGITS = 3
DRAWN_BOUNDS = (3.0, 10.0)  # k and TTFT of the paper's main objective; the others are in a table


@dataclass(frozen=True, slots=True)
class _Place:
    """What one ladder stands for beside its arm and bounds."""

    simulated: bool
    model: str
    hardware: str
    pool_bytes: float | None
    workload: str
    full_length: bool
    options: tuple[str, ...] = ()  # of the server
    server: str = ""  # what is said of them

    @property
    def where(self) -> str:
        """Hardware, said to be simulated where it is."""
        return f"simulated {self.hardware}".strip() if self.simulated else self.hardware

    @property
    def answers(self) -> str:
        """How long answers are."""
        return "answers of full length" if self.full_length else "answers that end by themselves"

    @property
    def text(self) -> str:
        """All of it, for captions and titles."""
        pool = "" if self.pool_bytes is None else f"pool of {self.pool_bytes / 2**30:.4g} GiB"
        workload = f"workload {self.workload[:6]}" if self.workload else ""
        return ", ".join(part for part in (self.model, self.where, pool, workload, self.answers, self.server) if part)


class _Runs:
    """Names of simulated ladders: the arm with what it was computed with, ``m, bytes, watermark 0.06``.

    Where runs of one place and name are of several GPUs, each names its own; where those of one arm still have one name
    and other constants, they are numbered. Measured ladders are called by their arm.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.gpus: dict[tuple[_Place, str], set[str]] = {}
        for record in records:
            self.gpus.setdefault((_place(record), run_name(record)), set()).add(hardware_of(record))
        self.found: dict[tuple[_Place, str, str], list[str]] = {}
        for record in records:
            constants = self.found.setdefault(self._key(record), [])
            if constants_of(record) not in constants:
                constants.append(constants_of(record))

    def _key(self, record: Record) -> tuple[_Place, str, str]:
        return _place(record), text(record, "arm"), self._name(record)

    def _name(self, record: Record) -> str:
        gpu = hardware_of(record) if len(self.gpus[_place(record), run_name(record)]) > 1 else ""
        return ", ".join(part for part in (run_name(record), gpu) if part)

    def of(self, record: Record) -> str:
        """What the record was computed with, empty where it was measured or does not say."""
        alike = self.found[self._key(record)]
        name = self._name(record)
        return f"{name} ({alike.index(constants_of(record)) + 1})".strip() if len(alike) > 1 else name

    def label(self, record: Record, between: str = ", ") -> str:
        """The arm and what it was computed with."""
        return between.join(part for part in (text(record, "arm"), self.of(record)) if part)

    def constants(self, records: Sequence[Record]) -> str:
        """The constants of every simulated ladder in a sentence."""
        told = grouped(records, lambda r: (constants_of(r), watermark_of(r), hardware_of(r)))
        several = len({gpu for _, _, gpu in told}) > 1
        parts = [
            f"{' / '.join(dict.fromkeys(map(self.label, rows)))}{f' ({gpu})' if several else ''}: {constants}"
            for (constants, _, gpu), rows in told.items()
            if constants
        ]
        return f" Constants of {'. '.join(parts)}." if parts else ""


def slo_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``slo.*`` and ``simulate.*``: measured ladders, then simulated ones."""
    attained = _unique(of_kind(records, "slo.attainment", "simulate.attainment"), PLACES["slo.attainment"])
    capacities = _unique(_kinds(records, "slo.capacity", "simulate.capacity"), PLACES["slo.capacity"])
    arms = arms_of(attained)
    runs = _Runs([*attained, *capacities])
    blocks: list[Figure | Table] = []
    for place, rows in _by_place(attained).items():
        for tau0_ms, group in grouped(rows, tau0_ms_of).items():
            by_bounds = grouped(group, _bounds)
            shown = next((b for b in by_bounds if b[:2] == DRAWN_BOUNDS), next(iter(by_bounds)))
            blocks.append(_ladder(shown, place, by_bounds[shown], arms, runs))
            if len(by_bounds) > 1:
                blocks.append(_all_bounds_table(group, sorted(by_bounds), place, tau0_ms, runs))
    blocks.sort(key=lambda block: isinstance(block, Table))
    blocks += [_capacity_table(place, rows, runs) for place, rows in _by_place(capacities).items()]
    missed = [_misses(place, rows, runs) for place, rows in _by_place(attained).items()]
    blocks += [table for table in missed if table is not None]
    ratios = _unique(of_kind(records, "slo.capacity_ratio"), PLACES["slo.capacity_ratio"])
    blocks += [_ratio_table(place, rows) for place, rows in _by_place(ratios).items()]
    tau0 = _unique(of_kind(records, "slo.tau0_ms"), PLACES["slo.tau0_ms"])
    if tau0:
        blocks.append(
            table_of(
                "tau0",
                ("rule", "arm", "tau0 ms", "context (tokens)", "model", "hardware"),
                [
                    (
                        text(r, "tau0_rule"),
                        text(r, "arm"),
                        figures_of(r.value),
                        "-" if (tokens := number(r, "context_tokens")) is None else f"{tokens:,.0f}",
                        r.model or "-",
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


def _kinds(records: Sequence[Record], *names: str) -> list[Record]:
    """Records of the named kinds, also without a value."""
    return [record for record in records if record.what in names]


def _unique(records: Sequence[Record], keys: Sequence[str]) -> list[Record]:
    """The last record of each place, kind and seed."""
    return [
        record
        for group in grouped(records, lambda r: (r.what, r.seed, hardware_of(r))).values()
        for record in latest(group, *keys)
    ]


def _place(record: Record) -> _Place:
    """Simulations of one pool are one place whatever the GPU: constants that are given or fitted are those of none
    by its name, and are there to be compared. ``_by_place`` fills in the hardware."""
    simulated, pool_bytes = record.what.startswith("simulate."), number(record, "pool_bytes")
    return _Place(
        simulated,
        record.model or "",
        "" if simulated and pool_bytes is not None else hardware_of(record),
        pool_bytes,
        text(record, "workload"),
        ignores_eos(record),
        server_options(record),
    )


def _by_place(records: Sequence[Record]) -> dict[_Place, list[Record]]:
    """Records by the ladder they belong to, measured ones first. Of its server a place says what tells it from others
    that are alike otherwise."""
    groups = grouped(records, _place)
    alike = _servers(groups)
    found = {}
    for place in sorted(groups, key=lambda place: place.simulated):
        hardware = " and ".join(dict.fromkeys(map(hardware_of, groups[place])))
        server = _differing(place.options, alike[replace(place, options=())])
        found[replace(place, hardware=hardware, server=server)] = groups[place]
    return found


def _servers(places: Iterable[_Place]) -> dict[_Place, list[tuple[str, ...]]]:
    """Options of the servers of places that are alike otherwise."""
    servers: dict[_Place, list[tuple[str, ...]]] = {}
    for place in places:
        servers.setdefault(replace(place, options=()), []).append(place.options)
    return servers


def _differing(own: tuple[str, ...], servers: Sequence[tuple[str, ...]]) -> str:
    """The options of one server that not all have."""
    if len(servers) == 1:
        return ""
    told = [one for one in own if not all(one in other for other in servers)]
    return f"server with {' '.join(told)}" if told else "server without more options"


def _bounds(record: Record) -> tuple[float, float, float]:
    return (float(record.settings["k"]), float(record.settings["ttft_s"]), tau0_ms_of(record))


def _rate(record: Record) -> str:
    return figures_of(float(record.settings["rate_per_s"]), RATE_DIGITS)


def _bound_text(bounds: tuple[float, float, float]) -> str:
    k, ttft, tau0 = bounds
    return f"TTFT <= {ttft:g} s, TPOT <= {k:g} x {tau0:.4g} ms = {k * tau0:.4g} ms"


def _ladder(
    bounds: tuple[float, float, float], place: _Place, rows: Sequence[Record], arms: Sequence[str], runs: _Runs
) -> Figure:
    series = []
    lines = []
    told = []
    simulated = place.simulated
    for (label, seed), group in grouped(rows, lambda r: (runs.label(r), r.seed)).items():
        ordered = sorted(group, key=lambda r: float(r.settings["rate_per_s"]))
        arm = text(group[0], "arm")
        seeds = list(dict.fromkeys(r.seed for r in rows if runs.label(r) == label))
        of_arm = list(dict.fromkeys(runs.of(r) for r in rows if text(r, "arm") == arm))
        name = label + (f", seed {seed}" if len(seeds) > 1 else "")
        legend = "" if seed != seeds[0] else label + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")
        series.append(
            Series(
                legend,
                tuple(float(r.settings["rate_per_s"]) for r in ordered),
                tuple(float(r.value or 0) for r in ordered),
                colour=list(arms).index(arm),
                dashed=simulated,
                run=of_arm.index(runs.of(group[0])),
                hollow=simulated,
            )
        )
        low, high = ordered[0], ordered[-1]
        told.append(f"{name}: {low.value:.2f} at {_rate(low)} to {high.value:.2f} at {_rate(high)} req/s")
        lines += [
            (
                name,
                _rate(r),
                f"{r.value:.3f}",
                figures_of(number(r, "scored"), 6),
                figures_of(number(r, "preemptions"), 6),
            )
            for r in ordered
        ]
    k, ttft, tau0 = bounds
    kind = ("Simulated attainment" if simulated else "Attainment") + ("" if place.full_length else f", {place.answers}")
    ends = [] if place.full_length else ["natural"]
    ends += [] if place.pool_bytes is None else [f"{place.pool_bytes / 2**30:.4g}g"]
    ends += [place.server] if place.server else []
    return Figure(
        key=slug("slo", place.model, place.where, place.workload[:6], *ends, k, ttft, f"{tau0:.3f}"),
        title=f"{kind}: {_bound_text(bounds)}",
        explanation=(
            f"{place.text}. Share of requests in the objective at each arrival rate; an arm's capacity is its last "
            f"rung before the line falls below {ATTAINMENT_RULE:.0%}.{runs.constants(rows)}"
        ),
        alt="; ".join(told) + ".",
        command=command(rows),
        place=place.text,
        drawing=curves(
            series,
            "arrival rate (req/s)",
            "attainment",
            horizontal=(ATTAINMENT_RULE, f"{ATTAINMENT_RULE:.0%}"),
            y_limits=(0.0, 1.02),
        ),
        data=table_of("Rungs", ("arm", "req/s", "attainment", "scored", "preemptions"), lines),
    )


def _all_bounds_table(
    rows: Sequence[Record], bounds: Sequence[tuple[float, float, float]], place: _Place, tau0: float, runs: _Runs
) -> Table:
    """Attainment of every rung under every bound at one tau0."""
    lines = []
    for (arm, seed, rate), group in grouped(
        rows, lambda r: (runs.label(r), r.seed, float(r.settings["rate_per_s"]))
    ).items():
        at = {_bounds(r): float(r.value or 0) for r in group}
        seed_text = "-" if seed is None else str(seed)
        lines.append(
            (arm, seed_text, figures_of(rate, RATE_DIGITS), *(f"{at[b]:.3f}" if b in at else "-" for b in bounds))
        )
    names = [f"{k:g} tau0\nTTFT {ttft:g} s" for k, ttft, _ in bounds]
    title = f"Attainment under every bound, tau0 {tau0:.4g} ms ({place.text})"
    return table_of(title, ("arm", "seed", "req/s", *names), lines)


def _capacity_table(place: _Place, rows: Sequence[Record], runs: _Runs) -> Table:
    """Capacities of all arms, a row for each pair of bounds: a phone shows them without scrolling."""
    labels = list(dict.fromkeys(runs.label(r, "\n") for r in rows))
    lines = []
    by_bounds = grouped(rows, lambda r: (*reversed(_bounds(r)), -1 if r.seed is None else r.seed))
    for (tau0, ttft, k, _), group in sorted(by_bounds.items(), key=lambda one: one[0]):
        at = {runs.label(r, "\n"): r for r in group}
        seed = group[0].seed
        lines.append(
            (
                f"{k * tau0:.4g} ms ({k:g} x {tau0:.4g})",
                f"{ttft:g} s",
                *(_capacity_text(at.get(label)) for label in labels),
                "-" if seed is None else str(seed),
            )
        )
    return table_of(
        f"{'Simulated capacity' if place.simulated else 'Capacity'} in req/s ({place.text})",
        ("TPOT (k x tau0)", "TTFT", *labels, "seed"),
        lines,
        "Highest rate tested with at least 95% attainment before the first rung below it; < means that the lowest "
        "rung fails, >= that no rung fails or that a rate below the first failing rung was not tested."
        f"{runs.constants(rows)}",
    )


def _capacity_text(record: Record | None) -> str:
    if record is None:
        return "-"
    if record.value is None:
        lowest = number(record, "lowest_rate")
        return "none" if lowest is None else f"<{figures_of(lowest, RATE_DIGITS)}"
    at_least = record.settings.get("no_rung_failed") or record.settings.get("bound") == "at_least"
    return f"{'>=' if at_least else ''}{figures_of(record.value, RATE_DIGITS)}"


def _misses(place: _Place, rows: Sequence[Record], runs: _Runs) -> Table | None:
    """The first failing rung of every ladder."""
    lines = []
    for (arm, seed, bounds), group in grouped(rows, lambda r: (runs.label(r), r.seed, _bounds(r))).items():
        ordered = sorted(group, key=lambda r: float(r.settings["rate_per_s"]))
        first = next((r for r in ordered if float(r.value or 0) < ATTAINMENT_RULE), None)
        if first is None:
            continue
        k, ttft, tau0 = bounds
        lines.append(
            (
                arm,
                f"{k:g} x {tau0:.4g} ms, {ttft:g} s",
                _rate(first),
                f"{float(first.value or 0):.3f}",
                *(figures_of(number(first, key), 6) for key in ("missed_ttft", "missed_tpot", "missed_both", "failed")),
                figures_of(number(first, "preemptions"), 6),
                "-" if seed is None else str(seed),
            )
        )
    if not lines:
        return None
    columns = ("arm", "TPOT, TTFT", "req/s", "met", "TTFT\nonly", "TPOT\nonly", "both", "failed", "preempted", "seed")
    return table_of(f"First failing rung ({place.text})", columns, lines)


def _ratio_table(place: _Place, rows: Sequence[Record]) -> Table:
    shares = sorted({key for r in rows for key in _mapping(r.settings.get("share_at_least"))}, key=float)
    lines = []
    for r in rows:
        held = _mapping(r.settings.get("share_at_least"))
        k, ttft, tau0 = _bounds(r)
        lines.append(
            (
                f"{text(r, 'arm')} / {text(r, 'baseline')}",
                "-" if r.value is None else f"{r.value:.2f}x",
                interval(r.settings.get("ci95")),
                *("-" if key not in held else f"{float(held[key]):.0%}" for key in shares),
                f"{k:g} x {tau0:.4g} ms, {ttft:g} s",
                "-" if r.seed is None else str(r.seed),
            )
        )
    return table_of(
        f"Ratios of capacities ({place.text})",
        ("arms", "ratio", "95% interval", *(f"draws with\n>= {key}x" for key in shares), "TPOT, TTFT", "seed"),
        lines,
        "Scored requests resampled with replacement in every rung of both arms; a draw in which no rung fails counts "
        "its highest rung. No ratio stands where the lowest rung of either fails, or none of the baseline's.",
    )


def _mapping(value: Any) -> dict[str, float]:
    return {str(k): float(v) for k, v in value.items()} if isinstance(value, dict) else {}
