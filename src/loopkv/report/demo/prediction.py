"""Prediction: how well the sum of the cells' damages tells what a whole plan measures."""

from __future__ import annotations

from loopkv.report.demo.contents import DemoReport, predicted_and_measured
from loopkv.report.page import Figure, Section, table_of
from loopkv.report.plots import Series, predicted_measured

RATIO_BAND = (0.85, 1.25)


def prediction_section(report: DemoReport) -> Section | None:
    """Predicted against measured damage; None where no plan has both above 0."""
    groups = []
    for name, plans, labelled in (("plans", report.plans, True), ("random plans", report.random_plans, False)):
        pairs = [(n, plan.name, pair) for n, plan in enumerate(plans, 1) if (pair := predicted_and_measured(plan))]
        if pairs:
            groups.append((name, pairs, labelled))
    if not groups:
        return None
    ratios = [pair[1] / pair[0] for _, pairs, _ in groups for *_, pair in pairs]
    inside = sum(RATIO_BAND[0] <= ratio <= RATIO_BAND[1] for ratio in ratios)
    series = [
        Series(
            name,
            tuple(pair[0] for *_, pair in pairs),
            tuple(pair[1] for *_, pair in pairs),
            labels=tuple(str(n) for n, *_ in pairs) if labelled else (),
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
                (f"{n}. {name}" if labelled else name, f"{pair[0]:.4g}", f"{pair[1]:.4g}", f"{pair[1] / pair[0]:.3f}")
                for _, pairs, labelled in groups
                for n, name, pair in pairs
            ],
        ),
    )
    lead = "The planner adds up damages measured one cell at a time; this is how well the sum tells the whole."
    return Section("prediction", "Prediction", lead, (figure,))
