"""What a demo report says: plain numbers and texts, and the summary made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from loopkv.artifacts import Plan, Profile
from loopkv.errors import LoopKVError

if TYPE_CHECKING:
    from loopkv.planner.solve import Frontier

COMMANDS: dict[str, str] = {
    "profile": "loopkv profile MODEL -o profile.json",
    "plan": "loopkv demo",
    "measure": "loopkv demo",
    "tasks": "loopkv demo",
    "capacity": "loopkv demo",
    "generate": "loopkv demo",
}
"""Verb behind each group of figures; a run gives its command lines in ``DemoReport.commands`` (a plan's by name)."""


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
        budgets: what the planner's plans were asked for, one sentence each.
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
    budgets: tuple[str, ...] = ()
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
        return log_correlation(
            [pair for plan in (*self.plans, *self.random_plans) if (pair := predicted_and_measured(plan))]
        )

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


def log_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson correlation of the logarithms; None where fewer than three pairs or no spread define none."""
    if len(pairs) < 3:
        return None
    x, y = np.log(np.array(pairs, dtype=np.float64)).T
    if float(x.std()) < 1e-12 or float(y.std()) < 1e-12:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def predicted_and_measured(plan: Plan) -> tuple[float, float] | None:
    """Predicted and measured damage in nats; None unless the plan has both and both are above 0."""
    if plan.predicted is None or plan.measured is None:
        return None
    predicted, measured = plan.predicted.damage_nats, plan.measured.kl_nats
    return (predicted, measured) if predicted > 0 and measured > 0 else None
