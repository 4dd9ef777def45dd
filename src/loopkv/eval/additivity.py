"""Do damages add up, and does the planner gain by it? Predicted against measured KL of a fixed list of plans, and the
planner's plan against every hand-made plan of equal bytes (paper sections 2.4 and 5.7, appendix D).

Three tables, each on stated documents:

* the list: random plans by seed and the paper's hand-made ones; log-log correlation and ratios;
* chosen budgets: the planner's plan against the best per-loop plan that fits, on documents it was not profiled on;
* every budget that equals the bytes of a per-loop or per-layer plan, on the profiled documents.

V precision is off throughout: a profile predicts reads of both value planes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopkv.artifacts import Budget, Fingerprint, Plan, Profile
from loopkv.errors import DocumentError, LoopKVError
from loopkv.models.base import LoopedModel
from loopkv.planner import frontier, named_plan, per_layer_plans, per_loop_plans
from loopkv.profiler.documents import Document
from loopkv.profiler.measuring import PlanMeasurement, measure
from loopkv.profiler.probe import OnProgress
from loopkv.records import Record, make_record

RANDOM_SEEDS = range(12)
HAND_MADE = ("kivi4", "kivi2", "kivi4-share", "int4-int2-share", "int2-share", "int2-loops")
MAX_KL_NATS = 0.05
"""Plans that damage more are listed but not correlated: there the predictions are ruined and the KL saturates."""


@dataclass(frozen=True, slots=True)
class Additivity:
    """Predicted and measured KL of the list of plans on one set of documents.

    Args:
        documents: ``profiled`` or ``unseen``.
        results: of the plans with a measured KL below ``MAX_KL_NATS``.
        left_out: the others.
    """

    documents: str
    results: tuple[PlanMeasurement, ...]
    left_out: tuple[PlanMeasurement, ...]

    @property
    def correlation(self) -> float:
        """Pearson correlation of log predicted and log measured KL (NaN for fewer than three plans)."""
        pairs = [(r.plan.predicted.damage_nats, r.measured.kl_nats) for r in self.results if r.plan.predicted]
        if len(pairs) < 3:
            return math.nan
        predicted, measured = np.log(np.array(pairs)).T
        return float(np.corrcoef(predicted, measured)[0, 1])

    @property
    def ratios(self) -> tuple[float, float]:
        """Smallest and largest measured / predicted."""
        ratios = [r.ratio for r in self.results if r.ratio is not None]
        return (min(ratios), max(ratios)) if ratios else (math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """The planner's plan within a stored and a read budget (bytes per history token) beside the best hand-made one."""

    stored_bytes: int
    read_bytes: int
    planner: PlanMeasurement
    best: PlanMeasurement

    @property
    def ratio(self) -> float:
        """KL of the planner's plan over that of the best hand-made plan."""
        return self.planner.measured.kl_nats / self.best.measured.kl_nats


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """Planner against hand-made plans of one family on one set of documents, one row a budget."""

    documents: str
    family: str
    rows: tuple[BudgetRow, ...]

    @property
    def worst_ratio(self) -> float:
        """Largest ratio of all rows."""
        return max(row.ratio for row in self.rows)


@dataclass(frozen=True, slots=True)
class AdditivityStudy:
    """All tables of a study."""

    lists: tuple[Additivity, ...]
    tables: tuple[BudgetTable, ...]


def listed_plans(profile: Profile) -> list[Plan]:
    """The fixed list: random plans without and with shared cells by seed, and the paper's hand-made plans."""
    names = [f"random:{seed}" for seed in RANDOM_SEEDS] + [f"random-share:{seed}" for seed in RANDOM_SEEDS]
    return [named_plan(name, profile.fingerprint, profile=profile) for name in (*names, *HAND_MADE)]


def study_additivity(
    model: LoopedModel,
    fingerprint: Fingerprint,
    profile: Profile,
    profiled: Sequence[Document],
    unseen: Sequence[Document],
    budgets: Sequence[tuple[int, int]],
    *,
    every_budget: bool = True,
    journal: Path | str | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> AdditivityStudy:
    """Measure the three tables; a long run that continues from its journal.

    Args:
        model, fingerprint: the model in fp32.
        profile: made on ``profiled``.
        profiled: the documents of the profile, in its order.
        unseen: other documents.
        budgets: (stored, read) bytes per history token of the second table.
        every_budget: also measure the third table, which takes the longest.
        journal: file of measurements by plan and document.
        seed: of the bootstrap.
        on_progress: told about progress of the running table.

    Raises:
        DocumentError: documents other than the profile's, or unseen ones among them.
        BudgetInfeasibleError: a budget that no plan meets.
    """
    _check_documents(profile, profiled, unseen)

    def run(plans: Sequence[Plan], documents: Sequence[Document], what: str) -> dict[str, PlanMeasurement]:
        def report(done: float, total: float, label: str) -> None:
            if on_progress is not None:
                on_progress(done, total, f"{what}: {label}")

        results = measure(model, fingerprint, plans, documents, seed=seed, journal=journal, on_progress=report)
        return {result.plan.sha256: result for result in results}

    sets = {"profiled": profiled, "unseen": unseen}
    listed = listed_plans(profile)
    lists = []
    for name, documents in sets.items():
        results = list(run(listed, documents, f"list, {name}").values())
        kept = tuple(r for r in results if r.measured.kl_nats < MAX_KL_NATS)
        lists.append(Additivity(name, kept, tuple(r for r in results if r not in kept)))

    front = frontier(profile)

    def best_within(stored: int, read: int) -> Plan:
        budget = Budget(goal="damage", max_stored_bytes=stored, max_read_bytes=read)
        return front.plan(budget, name=f"planner:{stored},{read}")

    per_loop = list(per_loop_plans(profile.fingerprint, profile=profile))
    per_layer = list(per_layer_plans(profile.fingerprint, profile=profile))
    every = sorted({(p.footprint.stored_bytes, p.footprint.read_bytes) for p in (*per_loop, *per_layer)})
    tables = []
    requests = [("unseen", "per-loop", per_loop, list(budgets))]
    if every_budget:
        requests.append(("profiled", "per-loop and per-layer", [*per_loop, *per_layer], every))
    for name, family, hand_made, limits in requests:
        planned = [best_within(*limit) for limit in limits]
        found = run([*planned, *hand_made], sets[name], f"{family}, {name}")
        rows = []
        for (stored, read), plan in zip(limits, planned, strict=True):
            fitting = [found[p.sha256] for p in hand_made if _fits(p, stored, read)]
            if not fitting:
                raise LoopKVError(f"budget {stored}/{read} B", got=f"no {family} plan", wanted="one that fits")
            best = min(fitting, key=lambda result: result.measured.kl_nats)
            rows.append(BudgetRow(stored, read, _named(found[plan.sha256], plan), best))
        tables.append(BudgetTable(name, family, tuple(rows)))
    return AdditivityStudy(tuple(lists), tuple(tables))


def study_records(study: AdditivityStudy, seed: int) -> list[Record]:
    """Records of a study: every plan of the lists, the correlations, and every budget."""
    records = []
    for one in study.lists:
        for result in (*one.results, *one.left_out):
            plan = result.plan
            settings = {
                "arm": plan.name,
                "predicted_nats": None if plan.predicted is None else plan.predicted.damage_nats,
                "documents": one.documents,
                "shares": plan.shares,
                "ratio": result.ratio,
                "ci95": list(result.measured.kl_ci95_nats),
                "in_correlation": result in one.results,
            }
            records.append(_record("additivity.plan", result.measured.kl_nats, "nats", result, settings, seed))
        summary = {"documents": one.documents, "plans": len(one.results), "ratios": list(one.ratios)}
        records.append(make_record("additivity.correlation", one.correlation, "r", settings=summary, seed=seed))
    for table in study.tables:
        for row in table.rows:
            settings = {
                "arm": row.planner.plan.name,
                "baseline": row.best.plan.name,
                "documents": table.documents,
                "family": table.family,
                "stored_bytes": row.stored_bytes,
                "read_bytes": row.read_bytes,
                "planner_nats": row.planner.measured.kl_nats,
                "baseline_nats": row.best.measured.kl_nats,
            }
            records.append(_record("additivity.budget", row.ratio, "x", row.planner, settings, seed))
    return records


def _record(
    what: str, value: float, unit: str, result: PlanMeasurement, settings: Mapping[str, Any], seed: int
) -> Record:
    return make_record(
        what,
        value,
        unit,
        samples=result.kl_nats if unit == "nats" else (),
        settings=dict(settings),
        plan_sha256=result.plan.sha256,
        model=result.plan.fingerprint.name,
        weights_sha256=result.plan.fingerprint.weights_sha256,
        seed=seed,
    )


def _check_documents(profile: Profile, profiled: Sequence[Document], unseen: Sequence[Document]) -> None:
    wanted = [document.sha256 for document in profile.documents]
    if [document.sha256 for document in profiled] != wanted:
        raise DocumentError(
            "profiled documents",
            got=f"{len(profiled)} other than the profile's",
            wanted=f"the {len(wanted)} documents the profile was measured on, in its order",
            hint="give the --documents, --limit and --max-tokens of the profile",
        )
    common = {document.sha256 for document in unseen} & set(wanted)
    if common or not unseen:
        got = f"{len(common)} of the profile's" if common else "none"
        raise DocumentError("unseen documents", got=got, wanted="documents the profile was not measured on")


def _fits(plan: Plan, stored: int, read: int) -> bool:
    return plan.footprint.stored_bytes <= stored and plan.footprint.read_bytes <= read


def _named(result: PlanMeasurement, plan: Plan) -> PlanMeasurement:
    """The result under the planner's name: equal hand-made plans were measured once, under either."""
    return PlanMeasurement(
        plan.with_measured(result.measured), result.measured, result.kl_nats, result.agreement, result.hot_share
    )
