"""What plans do to the model: damage against speed, prediction against measurement, task scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loopkv.records import Record
from loopkv.report.page import Figure, Section, Table, table_of
from loopkv.report.plots import Series, curves, intervals, predicted_measured, short_number
from loopkv.report.sections.common import (
    PLACES,
    arms_of,
    command,
    figures_of,
    grouped,
    interval,
    kib,
    latest,
    number,
    of_kind,
    slug,
    text,
)
from loopkv.report.sections.decode import decode_place, peaks, stock_arm, tokens_per_s

RATIO_BAND = (0.85, 1.25)


def quality_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``quality.*`` and ``additivity.*``, with the frontier where decode rows exist too."""
    rows = latest(of_kind(records, "quality.kl_nats"), *PLACES["quality.kl_nats"])
    shares = latest(of_kind(records, "quality.kl_share_nats"), *PLACES["quality.kl_share_nats"])
    units = {r.model or "": r.value for r in shares if r.value}
    blocks: list[Figure | Table] = []
    blocks += _frontiers(records, units)
    if rows:
        blocks.append(
            table_of(
                "Damage of plans",
                (
                    "arm",
                    "documents",
                    "activations",
                    "KL nats",
                    "95% interval",
                    "in\nKL_share",
                    "predicted",
                    "same top\ntoken",
                    "stored\nKiB/token",
                    "read\nKiB/token",
                ),
                [
                    (
                        text(r, "arm"),
                        text(r, "documents") or "-",
                        text(r, "activations") or "fp32",
                        short_number(float(r.value or 0)),
                        interval(r.settings.get("ci95")),
                        "-" if (unit := units.get(r.model or "")) is None else f"{float(r.value or 0) / unit:.3g}",
                        "-" if number(r, "predicted_nats") is None else short_number(number(r, "predicted_nats") or 0),
                        "-" if number(r, "top1") is None else f"{number(r, 'top1'):.2%}",
                        kib(number(r, "stored_bytes")),
                        kib(number(r, "read_bytes")),
                    )
                    for r in rows
                ],
            )
        )
    blocks += _additivity(records)
    return Section("quality", "Damage", "fp32 KL to the exact model.", tuple(blocks)) if blocks else None


def _frontiers(records: Sequence[Record], units: Mapping[str, float]) -> list[Figure]:
    """Damage against throughput of the plans that have both, one figure per model, hardware and context of decode."""
    damages = latest(of_kind(records, "quality.kl_nats"), *PLACES["quality.kl_nats"])
    damages = sorted(damages, key=lambda r: r.date, reverse=True)
    damages += latest(of_kind(records, "additivity.plan"), *PLACES["additivity.plan"])
    figures = []
    for (model, hardware, context), tops in grouped(peaks(records), decode_place).items():
        both = [(top, found) for top in tops if (found := _damage_of(top, damages)) is not None]
        if not both:
            continue
        scales = {units.get(found.model or "") for _, found in both}
        unit = scales.pop() if len(scales) == 1 else None
        scale, label = (unit, "KL / KL_share") if unit else (1.0, "KL (nats per token)")
        speed = {text(top, "arm"): tokens_per_s(top) for top, _ in both}
        damage = {text(top, "arm"): float(found.value or 0) / scale for top, found in both}
        on = [arm for arm in speed if not any(damage[a] < damage[arm] and speed[a] >= speed[arm] for a in speed)]
        on.sort(key=lambda arm: speed[arm])
        rest = [arm for arm in speed if arm not in on]
        series = [
            Series("frontier", tuple(speed[a] for a in on), tuple(damage[a] for a in on), labels=tuple(on), colour=0),
            Series(
                "behind it",
                tuple(speed[a] for a in rest),
                tuple(damage[a] for a in rest),
                labels=tuple(rest),
                colour=7,
                line=False,
                hollow=True,
            ),
        ]
        base = stock_arm(tops)
        exact = [f" {base}, without damage: {tokens_per_s(t):,.4g} tok/s." for t in tops if text(t, "arm") == base]
        figures.append(
            Figure(
                key=slug("frontier", model, hardware, context),
                title=f"Damage against best throughput, {context:,} tokens",
                explanation=(
                    "Lower (less damage) and further right (faster) is better; the line joins unbeaten arms "
                    f"({', '.join(part for part in (model, hardware) if part)}).{''.join(exact)}"
                ),
                alt="; ".join(f"{arm}: {speed[arm]:.4g} tok/s at {short_number(damage[arm])}" for arm in speed) + ".",
                command=command([record for pair in both for record in pair]),
                place=", ".join(part for part in (model, hardware) if part),
                drawing=curves([one for one in series if one.x], "best decode tok/s", label, log_y=True),
            )
        )
    return figures


def _damage_of(step: Record, damages: Sequence[Record]) -> Record | None:
    """The first Record of damage above 0 of the plan that ran: by its hash or, where one has none, by model and arm.

    A hash holds geometry, constants and options, so that a dummy model's speed meets the real one's damage; a name
    alone says nothing, as every model has a kivi4.
    """

    def same(damage: Record) -> bool:
        if step.plan_sha256 and damage.plan_sha256:
            return step.plan_sha256 == damage.plan_sha256
        return (step.model, text(step, "arm")) == (damage.model, text(damage, "arm"))

    return next((damage for damage in damages if (damage.value or 0) > 0 and same(damage)), None)


def _additivity(records: Sequence[Record]) -> list[Figure | Table]:
    blocks: list[Figure | Table] = []
    plans = latest(of_kind(records, "additivity.plan"), *PLACES["additivity.plan"])
    rows = [r for r in plans if (number(r, "predicted_nats") or 0) > 0 and (r.value or 0) > 0]
    correlations = latest(of_kind(records, "additivity.correlation"), *PLACES["additivity.correlation"])
    for documents, group in grouped(rows, lambda r: text(r, "documents")).items():
        pairs = [
            (number(r, "predicted_nats") or 0.0, float(r.value or 0), bool(r.settings.get("shares"))) for r in group
        ]
        ratios = [measured / predicted for predicted, measured, _ in pairs]
        inside = sum(RATIO_BAND[0] <= ratio <= RATIO_BAND[1] for ratio in ratios)
        known = [r for r in correlations if text(r, "documents") == documents]
        said = f"; log-log correlation {known[-1].value:.4f}" if known else ""
        series = [
            Series(
                name,
                tuple(p for p, _, s in pairs if s == shares),
                tuple(m for _, m, s in pairs if s == shares),
                colour=colour,
                hollow=shares,
            )
            for name, shares, colour in (("own codes only", False, 0), ("with shared cells", True, 1))
            if any(s == shares for *_, s in pairs)
        ]
        blocks.append(
            Figure(
                key=slug("additivity", documents or "plans"),
                title="Predicted against measured damage" + (f" ({documents} documents)" if documents else ""),
                explanation=(
                    f"{inside} of {len(ratios)} plans measure {RATIO_BAND[0]} to {RATIO_BAND[1]} x the sum of their "
                    f"cells' damages; ratios from {min(ratios):.2f} to {max(ratios):.2f}{said}."
                ),
                alt=(
                    f"Log-log scatter of {len(ratios)} plans, ratios from {min(ratios):.2f} to {max(ratios):.2f}{said}."
                ),
                command=command(group),
                place=_models(group),
                drawing=predicted_measured(series, RATIO_BAND),
            )
        )
    if plans:
        blocks.append(_ratio_table(plans))
    if correlations and not rows:
        blocks.append(
            table_of(
                "Correlation of predicted and measured damage",
                ("documents", "r (log-log)", "plans"),
                [(text(r, "documents"), figures_of(r.value), text(r, "plans") or "-") for r in correlations],
            )
        )
    return blocks


def _ratio_table(plans: Sequence[Record]) -> Table:
    """Every plan's measured over predicted damage, the kinds of documents side by side."""
    kinds = list(dict.fromkeys(text(r, "documents") for r in plans))
    at = {(text(r, "arm"), text(r, "documents")): r for r in plans}
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    lines = []
    for arm in arms_of(plans):
        found = [at.get((arm, kind)) for kind in kinds]
        predicted = next((p for r in found if r is not None and (p := number(r, "predicted_nats")) is not None), None)
        cells = [arm, "-" if predicted is None else short_number(predicted)]
        for kind, one in zip(kinds, found, strict=True):
            below = None if one is None else number(one, "predicted_nats")
            ratio = float(one.value or 0) / below if one is not None and below else None
            ratios[kind] += [] if ratio is None else [ratio]
            cells += ["-" if one is None else short_number(float(one.value or 0)), _two(ratio)]
        lines.append(cells)
    told = "; ".join(f"{kind or 'all'} {min(v):.2f} to {max(v):.2f}" for kind, v in ratios.items() if v)
    names = [f"{kind}{suffix}".strip() for kind in kinds for suffix in ("\nnats", "\nratio")]
    return table_of(
        "Measured over predicted damage",
        ("plan", "predicted\nnats", *names),
        lines,
        f"Ratio: measured KL over the sum of the cells' damages, measured on the profiled documents ({told})."
        if told
        else "",
    )


def _two(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def task_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``tasks.accuracy``."""
    rows = latest(of_kind(records, "tasks.accuracy"), *PLACES["tasks.accuracy"])
    if not rows:
        return None
    blocks: list[Figure | Table] = []
    arms = arms_of(rows)
    for suite, group in grouped(rows, lambda r: text(r, "suite")).items():
        tasks = list(dict.fromkeys(text(r, "task") for r in group))
        at = {(text(r, "arm"), text(r, "task")): r for r in group}
        told = "; ".join(
            f"{task}: " + ", ".join(f"{arm} {float(at[arm, task].value or 0):.0%}" for arm in arms if (arm, task) in at)
            for task in tasks
        )
        blocks.append(
            Figure(
                key=slug("tasks", suite),
                title=f"Scores by task: {suite}",
                explanation="Mean score with its 95% interval where the record has one.",
                alt=f"{told}.",
                command=command(group),
                place=_models(group),
                drawing=intervals(
                    tasks, [(arm, [_point(at.get((arm, task))) for task in tasks]) for arm in arms], "score (%)"
                ),
            )
        )
        blocks.append(
            table_of(
                suite,
                (
                    "task",
                    "arm",
                    "items",
                    "score",
                    "95% interval",
                    "points\nto bf16",
                    "95% interval\nof difference",
                    "flips\ndown / up",
                ),
                [
                    (
                        text(r, "task"),
                        text(r, "arm"),
                        figures_of(number(r, "items"), 6),
                        f"{float(r.value or 0):.1%}",
                        interval(r.settings.get("ci95"), 100),
                        "-" if (gap := number(r, "difference")) is None else f"{100 * gap:+.1f}",
                        interval(r.settings.get("difference_ci95"), 100),
                        "-" if number(r, "flips_down") is None else f"{text(r, 'flips_down')} / {text(r, 'flips_up')}",
                    )
                    for r in sorted(group, key=lambda r: (tasks.index(text(r, "task")), arms.index(text(r, "arm"))))
                ],
            )
        )
    return Section("tasks", "Tasks", "Differences are paired: the same items under both arms.", tuple(blocks))


def _models(records: Sequence[Record]) -> str:
    return ", ".join(dict.fromkeys(r.model for r in records if r.model))


def _point(record: Record | None) -> tuple[float, float, float] | None:
    if record is None:
        return None
    value = 100 * float(record.value or 0)
    ends = record.settings.get("ci95")
    if isinstance(ends, list | tuple) and len(ends) == 2 and all(isinstance(end, int | float) for end in ends):
        return (value, min(value, 100 * ends[0]), max(value, 100 * ends[1]))
    return (value, value, value)
