"""The plans: a table of their numbers and one grid of options each."""

from __future__ import annotations

from loopkv.artifacts import Measured, Plan
from loopkv.options import OPTIONS
from loopkv.report.demo.contents import DemoReport
from loopkv.report.page import Figure, Section, table_of
from loopkv.report.plots import option_grid, short_number


def plan_section(report: DemoReport, exact: int | None) -> Section:
    """Table and grids of the plans; ``exact`` is what bf16 stores per history token, in bytes."""
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
                _interval(measured),
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
        "plans",
        "Plans",
        " ".join(["One option per cell; the numbers are used in every figure below.", *report.budgets]),
        (table, *grids),
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


def _interval(measured: Measured | None) -> str:
    """The 95% interval; one document gives none (its ends are equal)."""
    if measured is None:
        return "-"
    low, high = measured.kl_ci95_nats
    return "1 document" if low == high and measured.kl_nats > 0 else f"{short_number(low)} to {short_number(high)}"


def _nats(value: float | None) -> str:
    return "-" if value is None else short_number(value) if value else "0"
