"""The demo report: one model from profile to plans to answers, on one page and in one summary file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loopkv.artifacts import Plan, Profile
from loopkv.artifacts.storage import write_atomically
from loopkv.errors import LoopKVError
from loopkv.options import OPTIONS
from loopkv.report.figure import write_png
from loopkv.report.page import Figure, Page, Section, Table, TextColumns, render_page, table_of
from loopkv.report.plots import (
    MAX_COLUMNS_WITH_VALUES,
    Series,
    curves,
    grid_layers,
    heat_map,
    intervals,
    option_grid,
    predicted_measured,
    shaded_points,
    short_number,
)

if TYPE_CHECKING:
    from loopkv.planner.solve import Frontier

KIB = 1024
RATIO_BAND = (0.85, 1.25)
MAX_FRONTIER_POINTS = 1500
COMMANDS: dict[str, str] = {
    "profile": "loopkv profile MODEL -o profile.json",
    "plan": "loopkv plan profile.json --goal memory --max-damage 2.0share --max-stored 4992B -o plan.json",
    "measure": "loopkv measure MODEL plan.json",
    "tasks": "loopkv demo",
    "capacity": "loopkv capacity --plan plan.json --context 8192",
    "generate": "loopkv generate MODEL --plan plan.json",
}
"""Command line behind each group of figures; ``DemoReport.commands`` overrides single ones (a plan's by its name)."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan of the frontier by its numbers: bytes per history token and predicted damage."""

    stored_bytes: int
    read_bytes: int
    damage_nats: float


def frontier_points(frontier: Frontier) -> tuple[FrontierPoint, ...]:
    """The planner's frontier as plain points."""
    return tuple(
        FrontierPoint(int(stored), int(read), float(damage))
        for stored, read, damage in zip(frontier.stored_bytes, frontier.read_bytes, frontier.damage_nats, strict=True)
    )


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Mean score of one arm on one task with its 95% interval; ``difference`` is to BF16 on the same items."""

    arm: str
    task: str
    items: int
    accuracy: float
    ci95: tuple[float, float]
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and what each arm answered (``(arm, text)`` in the order shown)."""

    title: str
    prompt: str
    outputs: tuple[tuple[str, str], ...]
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """Cache bytes that one request of ``tokens`` tokens holds under one arm, whole blocks counted."""

    arm: str
    tokens: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything the page and ``summary.json`` say.

    Args:
        profile: the model's profile.
        plans: the plans shown, each with ``predicted`` and (once measured) ``measured`` attached.
        frontier: the planner's Pareto points under the same profile.
        timings: seconds by stage; ``profile_s`` and ``plan_s`` are required.
        random_plans: further measured plans, drawn only in the prediction figure and counted in the correlation.
        task_scores, samples, request_bytes: what the plans do to answers and to a request's bytes.
        versions: package versions.
        facts: short ``(name, value)`` pairs for the head of the page.
        commands: overrides of ``COMMANDS``.
        correlation: log-log Pearson correlation of predicted and measured KL; computed from the plans where None.
    """

    profile: Profile
    plans: tuple[Plan, ...]
    frontier: tuple[FrontierPoint, ...]
    timings: Mapping[str, float]
    random_plans: tuple[Plan, ...] = ()
    task_scores: tuple[TaskScore, ...] = ()
    samples: tuple[Sample, ...] = ()
    request_bytes: tuple[RequestBytes, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[tuple[str, str], ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    correlation: float | None = None

    def __post_init__(self) -> None:
        for stage in ("profile_s", "plan_s"):
            if stage not in self.timings:
                raise LoopKVError("demo report: timings", got=", ".join(self.timings) or "none", wanted=stage)
        cells = self.profile.fingerprint.geometry
        for plan in (*self.plans, *self.random_plans):
            if plan.fingerprint.geometry != cells:
                raise LoopKVError(f"demo report: plan {plan.name!r}", got="another geometry than the profile's")

    def command(self, group: str) -> str:
        """Command line behind a group of figures."""
        return self.commands.get(group, COMMANDS[group])

    @property
    def prediction_correlation(self) -> float | None:
        """The correlation given, or computed over all plans with both numbers above 0; None below three of them."""
        if self.correlation is not None:
            return self.correlation
        return log_correlation([pair for plan in (*self.plans, *self.random_plans) if (pair := _pair(plan))])

    def summary(self) -> dict[str, Any]:
        """Contents of ``summary.json``."""
        return {
            "profile_s": self.timings["profile_s"],
            "plan_s": self.timings["plan_s"],
            "correlation": self.prediction_correlation,
            "plans": [
                {
                    "name": plan.name,
                    "stored_bytes": plan.footprint.stored_bytes,
                    "read_bytes": plan.footprint.read_bytes,
                    "predicted_nats": None if plan.predicted is None else plan.predicted.damage_nats,
                    "measured_nats": None if plan.measured is None else plan.measured.kl_nats,
                    "top1": None if plan.measured is None else plan.measured.top1_agreement,
                }
                for plan in self.plans
            ],
            "kl_share_nats": self.profile.kl_share,
            "versions": dict(self.versions),
        }


def write_demo_report(report: DemoReport, folder: Path | str, *, png_folder: Path | str | None = None) -> Path:
    """Write ``report.html`` and ``summary.json`` into ``folder`` (and every figure as PNG into ``png_folder``).

    Returns:
        The path of the page.
    """
    folder = Path(folder)
    page = demo_page(report)
    write_atomically(folder / "report.html", render_page(page).encode())
    write_atomically(folder / "summary.json", (json.dumps(report.summary(), indent=1, allow_nan=False) + "\n").encode())
    if png_folder is not None:
        for figure in page.figures:
            write_png(figure.drawing, Path(png_folder) / f"{figure.key}.png")
    return folder / "report.html"


def log_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson correlation of the logarithms; None where fewer than three pairs or no spread define none."""
    if len(pairs) < 3:
        return None
    x, y = np.log(np.array(pairs, dtype=np.float64)).T
    if float(x.std()) < 1e-12 or float(y.std()) < 1e-12:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _pair(plan: Plan) -> tuple[float, float] | None:
    if plan.predicted is None or plan.measured is None:
        return None
    predicted, measured = plan.predicted.damage_nats, plan.measured.kl_nats
    return (predicted, measured) if predicted > 0 and measured > 0 else None


def demo_page(report: DemoReport) -> Page:
    """The page before it is rendered: sections without data are left out."""
    geometry = report.profile.fingerprint.geometry
    shape = f"{geometry.loops} loops x {geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}"
    correlation = report.prediction_correlation
    exact = next((p.footprint.stored_bytes for p in report.plans if set(p.options) == {"bf16"}), None)
    facts = [
        ("Model", report.profile.fingerprint.name),
        ("Cells", f"{len(geometry.cells)} ({shape})"),
        ("Profiled in", f"{report.timings['profile_s']:.1f} s"),
        ("Planned in", f"{report.timings['plan_s']:.3g} s"),
        ("Predicted : measured", "-" if correlation is None else f"r = {correlation:.4f} (log-log)"),
        ("KL_share", "-" if report.profile.kl_share is None else f"{short_number(report.profile.kl_share)} nats"),
    ]
    sections = [
        _damage_section(report),
        _plan_section(report, exact),
        _frontier_section(report),
        _prediction_section(report),
        _task_section(report),
        _bytes_section(report),
        _sample_section(report),
        _provenance_section(report),
    ]
    return Page(
        title=f"LoopKV: {report.profile.fingerprint.name}",
        lead=(
            "A looped transformer keeps one KV cache per loop and layer (a cell). This page shows what each cell loses "
            "under each way of storing its history, the plans chosen from that, and what those plans do to the model."
        ),
        facts=(*facts, *report.facts),
        sections=tuple(section for section in sections if section is not None),
        footer="Every figure can be remade by the command below it. Damage is fp32 KL in nats per token.",
    )


def _damage_section(report: DemoReport) -> Section:
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
    positions = sum(document.scored_positions for document in profile.documents)
    return Section(
        "damage",
        "What each cell loses",
        f"Measured on {len(profile.documents)} documents, {positions:,} positions whose history is not empty.",
        tuple(figures),
    )


def _plan_section(report: DemoReport, exact: int | None) -> Section:
    geometry = report.profile.fingerprint.geometry
    unit = report.profile.kl_share
    rows = []
    for number, plan in enumerate(report.plans, 1):
        predicted = None if plan.predicted is None else plan.predicted.damage_nats
        measured = plan.measured
        rows.append(
            (
                f"{number}. {plan.name}",
                f"{plan.footprint.stored_bytes:,}",
                f"{plan.footprint.read_bytes:,}",
                "-" if exact is None else f"{exact / plan.footprint.stored_bytes:.2f}x",
                _nats(predicted),
                _nats(None if measured is None else measured.kl_nats),
                "-" if measured is None else " to ".join(map(short_number, measured.kl_ci95_nats)),
                "-" if measured is None or not unit else f"{measured.kl_nats / unit:.3g}",
                "-" if measured is None else f"{measured.top1_agreement:.2%}",
                "-" if plan.tau is None else f"{plan.tau:g}",
            )
        )
    columns = (
        "plan",
        "stored\nB/token",
        "read\nB/token",
        "bf16 /\nplan",
        "predicted\nnats",
        "measured\nnats",
        "95% interval",
        "measured in\nKL_share",
        "same top\ntoken",
        "tau",
    )
    table = table_of(
        "Plans",
        columns,
        rows,
        "Bytes per history token over all cells, both value planes; predicted is the sum of the cells' damages; the "
        "interval is a bootstrap over documents; KL_share is the measured KL in that unit.",
    )
    grids = []
    for number, plan in enumerate(report.plans, 1):
        counts = {name: plan.options.count(name) for name in OPTIONS if name in plan.options}
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        grids.append(
            Figure(
                key=f"plan-{number}",
                title=f"{number}. {plan.name}",
                explanation=f"Option of every cell: {told}.",
                alt=f"Grid of loops by layers for plan {plan.name}: {told}.",
                command=_plan_command(report, plan),
                drawing=option_grid(geometry, plan.options),
            )
        )
    return Section(
        "plans", "Plans", "One option per cell; the numbers are used in every figure below.", (table, *grids)
    )


def _plan_command(report: DemoReport, plan: Plan) -> str:
    """Command line that makes ``plan``: its budgets, or its name where it was made by hand."""
    if plan.name in report.commands:
        return report.commands[plan.name]
    budget = plan.budget
    if budget is None:
        return f"loopkv plan profile.json --named {plan.name} -o {plan.name}.json"
    limits = [f"--max-damage {budget.max_damage_nats:g}nats"] if budget.max_damage_nats is not None else []
    limits += [f"--max-stored {budget.max_stored_bytes}B"] if budget.max_stored_bytes is not None else []
    limits += [f"--max-read {budget.max_read_bytes}B"] if budget.max_read_bytes is not None else []
    return " ".join(["loopkv plan profile.json --goal", budget.goal, *limits, "-o", f"{plan.name}.json"])


def _nats(value: float | None) -> str:
    return "-" if value is None else short_number(value) if value else "0"


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


def _frontier_section(report: DemoReport) -> Section | None:
    if not report.frontier:
        return None
    points = _thinned(report.frontier)
    measured = [(n, p, pair) for n, p in enumerate(report.plans, 1) if (pair := _pair(p))]
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


def _prediction_section(report: DemoReport) -> Section | None:
    groups = []
    for name, plans, labelled in (("plans", report.plans, True), ("random plans", report.random_plans, False)):
        pairs = [(n, pair) for n, plan in enumerate(plans, 1) if (pair := _pair(plan))]
        if pairs:
            groups.append((name, pairs, labelled))
    if not groups:
        return None
    ratios = [pair[1] / pair[0] for _, pairs, _ in groups for _, pair in pairs]
    inside = sum(RATIO_BAND[0] <= ratio <= RATIO_BAND[1] for ratio in ratios)
    series = [
        Series(
            name,
            tuple(pair[0] for _, pair in pairs),
            tuple(pair[1] for _, pair in pairs),
            labels=tuple(str(n) for n, _ in pairs) if labelled else (),
            colour=1 if labelled else 0,
            line=False,
            hollow=not labelled,
        )
        for name, pairs, labelled in groups
    ]
    correlation = report.prediction_correlation
    told = f"{inside} of {len(ratios)} plans measure {RATIO_BAND[0]} to {RATIO_BAND[1]} x their prediction"
    figure = Figure(
        key="predicted-measured",
        title="Predicted against measured damage",
        explanation=(
            "A point on the diagonal measures exactly the sum of its cells' damages; the band is "
            f"{RATIO_BAND[0]} to {RATIO_BAND[1]} times the prediction. {told}."
        ),
        alt=(
            f"Log-log scatter of {len(ratios)} plans close to the diagonal; {told}; ratios from {min(ratios):.2f} to "
            f"{max(ratios):.2f}" + ("." if correlation is None else f"; correlation {correlation:.4f}.")
        ),
        command=report.command("measure"),
        drawing=predicted_measured(series, RATIO_BAND),
        data=table_of(
            "Predicted and measured",
            ("plan", "predicted nats", "measured nats", "measured / predicted"),
            [
                (f"{name} {n}", f"{pair[0]:.4g}", f"{pair[1]:.4g}", f"{pair[1] / pair[0]:.3f}")
                for name, pairs, _ in groups
                for n, pair in pairs
            ],
        ),
    )
    lead = "The planner adds up damages measured one cell at a time; this is how well the sum tells the whole."
    return Section("prediction", "Prediction", lead, (figure,))


def _task_section(report: DemoReport) -> Section | None:
    if not report.task_scores:
        return None
    arms = list(dict.fromkeys(score.arm for score in report.task_scores))
    tasks = list(dict.fromkeys(score.task for score in report.task_scores))
    at = {(score.arm, score.task): score for score in report.task_scores}
    rows = []
    for task in tasks:
        for arm in arms:
            score = at.get((arm, task))
            if score is not None:
                rows.append(
                    (
                        task,
                        arm,
                        str(score.items),
                        f"{score.accuracy:.1%}",
                        f"{score.ci95[0]:.1%} to {score.ci95[1]:.1%}",
                        "-" if score.difference is None else f"{100 * score.difference:+.1f}",
                        "-"
                        if score.difference_ci95 is None
                        else f"{100 * score.difference_ci95[0]:+.1f} to {100 * score.difference_ci95[1]:+.1f}",
                    )
                )
    table = table_of(
        "Task accuracy",
        ("task", "arm", "items", "accuracy", "95% interval", "points\nto bf16", "95% interval\nof difference"),
        rows,
        "Differences are paired: the same items under both arms.",
    )
    figure = Figure(
        key="task-accuracy",
        title="Task accuracy by arm",
        explanation="Mean score with its 95% interval; the paired differences to bf16 are in the table.",
        alt="; ".join(
            f"{task}: " + ", ".join(f"{arm} {at[arm, task].accuracy:.0%}" for arm in arms if (arm, task) in at)
            for task in tasks
        )
        + ".",
        command=report.command("tasks"),
        drawing=intervals(
            tasks,
            [
                (
                    arm,
                    [
                        None
                        if (score := at.get((arm, task))) is None
                        else (100 * score.accuracy, 100 * score.ci95[0], 100 * score.ci95[1])
                        for task in tasks
                    ],
                )
                for arm in arms
            ],
            "accuracy (%)",
        ),
    )
    return Section("tasks", "Tasks", "Greedy answers, scored exactly.", (figure, table))


def _bytes_section(report: DemoReport) -> Section | None:
    if not report.request_bytes:
        return None
    arms = list(dict.fromkeys(row.arm for row in report.request_bytes))
    lengths = sorted({row.tokens for row in report.request_bytes})
    at = {(row.arm, row.tokens): row.held_bytes for row in report.request_bytes}
    series = [
        Series(
            arm,
            tuple(float(n) for n in lengths if (arm, n) in at),
            tuple(at[arm, n] / KIB / KIB for n in lengths if (arm, n) in at),
        )
        for arm in arms
    ]
    rows = [(arm, *("-" if (arm, n) not in at else f"{at[arm, n] / KIB / KIB:,.2f}" for n in lengths)) for arm in arms]
    figure = Figure(
        key="request-bytes",
        title="Cache bytes of one request",
        explanation="MiB held at each length: coded history plus exact sink and window, in whole blocks.",
        alt="; ".join(f"{row[0]}: {row[-1]} MiB at {lengths[-1]:,} tokens" for row in rows) + ".",
        command=report.command("capacity"),
        drawing=curves(series, "tokens of the request", "MiB held", log_x=len(lengths) > 2, log_y=len(lengths) > 2),
        data=table_of("MiB held", ("arm", *(f"{n:,} tokens" for n in lengths)), rows),
    )
    return Section("bytes", "Bytes per request", "What decides how many requests fit together.", (figure,))


def _sample_section(report: DemoReport) -> Section | None:
    if not report.samples:
        return None
    blocks: list[Figure | Table | TextColumns] = []
    for sample in report.samples:
        columns = [("Prompt", _shortened(sample.prompt)), *sample.outputs]
        if sample.expected is not None:
            columns.insert(1, ("Expected", sample.expected))
        texts = {text for _, text in sample.outputs}
        note = "All arms give the same text." if len(texts) == 1 and len(sample.outputs) > 1 else ""
        blocks.append(TextColumns(sample.title, note, tuple(columns)))
    lead = f"Greedy text of the same prompts under each arm ({report.command('generate')})."
    return Section("samples", "Answers side by side", lead, tuple(blocks))


def _shortened(text: str, head: int = 300, tail: int = 500) -> str:
    if len(text) <= head + tail + 40:
        return text
    return f"{text[:head]}\n[... {len(text) - head - tail:,} characters ...]\n{text[-tail:]}"


def _provenance_section(report: DemoReport) -> Section:
    rows = [(stage, f"{seconds:.3f}") for stage, seconds in report.timings.items()]
    blocks: list[Figure | Table | TextColumns] = [table_of("Timings", ("stage", "seconds"), rows)]
    if report.versions:
        blocks.append(table_of("Versions", ("package", "version"), sorted(report.versions.items())))
    identities = [
        ("profile", report.profile.sha256),
        ("weights", report.profile.fingerprint.weights_sha256 or "unknown"),
        *((f"plan {plan.name}", plan.sha256) for plan in report.plans),
    ]
    blocks.append(table_of("Identities (SHA-256)", ("what", "hash"), [(name, text[:16]) for name, text in identities]))
    return Section("provenance", "Provenance", "", tuple(blocks))
