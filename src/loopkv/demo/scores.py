"""Task scores for a demo's report, taken from Records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loopkv.records import Record
from loopkv.report.demo import TaskScore


def task_scores(
    records: Iterable[Record], weights_sha256: str | None, plans: Mapping[str, str]
) -> tuple[TaskScore, ...]:
    """Scores of the records of this checkpoint and these plans; others say nothing about the demo and are left out.

    Args:
        records: of ``loopkv eval tasks``.
        weights_sha256: of the demo's model.
        plans: hash of each of the demo's plans by name; bf16 stands for the exact model.
    """
    scores = []
    for record in records:
        if record.what != "tasks.accuracy" or record.weights_sha256 != weights_sha256 or record.value is None:
            continue
        if record.plan_sha256 not in plans.values():
            continue
        settings = record.settings
        scores.append(
            TaskScore(
                arm=str(settings["arm"]),
                task=str(settings["task"]),
                items=int(settings.get("items", len(record.samples))),
                accuracy=record.value,
                ci95=_pair(settings.get("ci95")) or (record.value, record.value),
                difference=settings.get("difference"),
                difference_ci95=_pair(settings.get("difference_ci95")),
            )
        )
    return tuple(scores)


def _pair(value: object) -> tuple[float, float] | None:
    return (float(value[0]), float(value[1])) if isinstance(value, list | tuple) and len(value) == 2 else None
