"""``measure(model, fingerprint, plans, documents)``: the fp32 KL of whole plans beside what the profile predicted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopkv.artifacts import Fingerprint, Measured, Plan
from loopkv.artifacts.storage import digest
from loopkv.engine.whole_sequence import plan_reads
from loopkv.models.base import LoopedModel
from loopkv.policy import Policy
from loopkv.profiler.documents import Document, documents_sha256
from loopkv.profiler.journal import Journal
from loopkv.profiler.probe import (
    LOGITS_COST_CELLS,
    DocumentDamage,
    OnProgress,
    Probe,
    check_precision,
    document_batches,
)
from loopkv.profiler.profiling import MEASUREMENT_VERSION
from loopkv.records import Record, make_record

BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """What a whole plan does to the model's predictions.

    Args:
        plan: the plan, with ``measured`` attached.
        measured: mean KL in nats with its interval, and top-1 agreement.
        kl_nats, agreement: per document.
        hot_share: share of (query, kv head, history token) triples that read both value planes, per cell; None where a
            cell has no int4 history or the plan no tau.
    """

    plan: Plan
    measured: Measured
    kl_nats: tuple[float, ...]
    agreement: tuple[float, ...]
    hot_share: tuple[float | None, ...]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted damage; None without a prediction above 0."""
        predicted = self.plan.predicted
        if predicted is None or predicted.damage_nats == 0.0:
            return None
        return self.measured.kl_nats / predicted.damage_nats

    def loop_hot_share(self) -> tuple[float | None, ...]:
        """Mean hot share of each loop's cells that have one (cells of a loop read equally many tokens)."""
        geometry = self.plan.fingerprint.geometry
        shares = []
        for loop in range(geometry.loops):
            known = [share for cell in geometry.loop_cells(loop) if (share := self.hot_share[cell]) is not None]
            shares.append(math.fsum(known) / len(known) if known else None)
        return tuple(shares)


def measure(
    model: LoopedModel,
    fingerprint: Fingerprint,
    plans: Sequence[Plan],
    documents: Sequence[Document],
    *,
    accept_weights: bool = False,
    seed: int = 0,
    journal: Path | str | None = None,
    restart: bool = False,
    batch_documents: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[PlanMeasurement]:
    """Measure the KL of whole plans against the exact model; a plan with tau reads every position as a decode row.

    Args:
        model: loaded in fp32 (or fp64).
        fingerprint: of the checkpoint the model was loaded from; plans for another model are refused.
        plans: to measure; equal ones (``Plan.sha256``) run once.
        documents: each of at least 320 tokens.
        accept_weights: allow plans of a sibling checkpoint.
        seed: of the bootstrap.
        journal: file of results by plan and document, read before and written while measuring; it stays.
        restart: measure anew whatever the journal holds.
        batch_documents: documents that run together; as many as fit by default.
        on_progress: told about progress.

    Raises:
        PlanMismatchError: a plan of another model.
        UnsupportedError: a model in BF16, or a head size the codec cannot code.
        LoopKVError: a journal of another model, predictions that are not finite.
    """
    check_precision(model)
    for plan in plans:
        plan.check_serves(fingerprint, accept_weights=accept_weights)
    distinct = {plan.sha256: plan for plan in plans}
    work = _Work(model, distinct.values(), documents, on_progress)
    found: dict[tuple[str, int], DocumentDamage] = {}
    with Journal(journal, measure_key(fingerprint), restart=restart) if journal is not None else nullcontext() as kept:
        for policy in {plan.policy: None for plan in distinct.values()}:
            its = {sha: plan for sha, plan in distinct.items() if plan.policy == policy}
            _measure_policy(model, policy, its, documents, batch_documents, kept, work, found)
    set_sha256 = documents_sha256(documents)
    results = []
    for plan in plans:
        damages = [found[plan.sha256, i] for i in range(len(documents))]
        kl = tuple(damage.kl_nats for damage in damages)
        agreement = tuple(1.0 - damage.changed for damage in damages)
        measured = Measured(
            kl_nats=math.fsum(kl) / len(kl),
            kl_ci95_nats=bootstrap_interval(kl, seed),
            top1_agreement=math.fsum(agreement) / len(agreement),
            documents_sha256=set_sha256,
            tau=plan.tau,
        )
        shares = tuple(_hot_share(damages, cell) for cell in range(len(plan.options)))
        results.append(PlanMeasurement(plan.with_measured(measured), measured, kl, agreement, shares))
    return results


class _Work:
    """Progress in cells run over one document."""

    def __init__(
        self,
        model: LoopedModel,
        plans: Iterable[Plan],
        documents: Sequence[Document],
        on_progress: OnProgress | None,
    ) -> None:
        self._cells = len(model.geometry.cells)
        self._on_progress = on_progress
        self._done = 0.0
        plans = list(plans)
        runs = sum(self.cost(plan.options) for plan in plans) + self.cost(None) * len({plan.policy for plan in plans})
        self._total = runs * len(documents)

    def cost(self, options: Sequence[str] | None) -> float:
        """Cells that a plan's run takes; None is the exact run."""
        first = 0 if options is None else _first_cell(options)
        return self._cells - first + LOGITS_COST_CELLS

    def advance(self, work: float, label: str) -> None:
        self._done += work
        if self._on_progress is not None:
            self._on_progress(self._done, self._total, label)


def _measure_policy(
    model: LoopedModel,
    policy: Policy,
    plans: dict[str, Plan],
    documents: Sequence[Document],
    batch_documents: int | None,
    kept: Journal | None,
    work: _Work,
    found: dict[tuple[str, int], DocumentDamage],
) -> None:
    """Fill ``found`` for the plans of one policy."""
    starts = {_first_cell(plan.options) for plan in plans.values()} - {len(model.geometry.cells)}
    for batch in document_batches(model, documents, policy, len(starts), batch_documents):
        todo = {}
        for sha, plan in plans.items():
            names = {i: f"{sha}:{documents[i].sha256}" for i in batch}
            if kept is None or not all(name in kept for name in names.values()):
                todo[sha] = plan
                continue
            for i, name in names.items():
                kl, changed, hot = kept.get(name)
                found[sha, i] = DocumentDamage(kl, changed, {int(cell): tuple(count) for cell, count in hot.items()})
            work.advance(work.cost(plan.options) * len(batch), f"{plan.name}: from the journal")
        if todo:
            resume = {_first_cell(plan.options) for plan in todo.values()} & starts
            probe = Probe(model, [documents[i] for i in batch], policy, resume)
        work.advance(work.cost(None) * len(batch), "exact run")
        for sha, plan in todo.items():
            damages = probe.measure(plan_reads(model.geometry, plan.cell_options), plan.tau)
            for i, damage in zip(batch, damages, strict=True):
                found[sha, i] = damage
                if kept is not None:
                    kept.put(f"{sha}:{documents[i].sha256}", [damage.kl_nats, damage.changed, damage.hot])
            work.advance(work.cost(plan.options) * len(batch), plan.name)


def _hot_share(damages: Sequence[DocumentDamage], cell: int) -> float | None:
    counts = [damage.hot[cell] for damage in damages if cell in damage.hot]
    total = sum(count[1] for count in counts)
    return sum(count[0] for count in counts) / total if total else None


def measure_key(fingerprint: Fingerprint) -> str:
    """Identity of a measurement journal: one checkpoint, any plans and documents."""
    return digest(
        {
            "measurement": MEASUREMENT_VERSION,
            "kind": "plans",
            "geometry": fingerprint.geometry.model_dump(mode="json"),
            "weights": fingerprint.weights_sha256,
        }
    )


def bootstrap_interval(values: Sequence[float], seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over documents (one document gives an interval of no width)."""
    sample = np.asarray(values, dtype=np.float64)
    rows = np.random.default_rng(seed).integers(len(sample), size=(BOOTSTRAP_SAMPLES, len(sample)))
    low, high = np.quantile(sample[rows].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def measurement_records(results: Sequence[PlanMeasurement], seed: int) -> list[Record]:
    """One Record ``quality.kl_nats`` per plan; samples are documents."""
    records = []
    for result in results:
        plan, footprint = result.plan, result.plan.footprint
        settings = {
            "arm": plan.name,
            "ci95": list(result.measured.kl_ci95_nats),
            "top1": result.measured.top1_agreement,
            "predicted_nats": None if plan.predicted is None else plan.predicted.damage_nats,
            "stored_bytes": footprint.stored_bytes,
            "read_bytes": footprint.read_bytes,
            "documents": len(result.kl_nats),
            "documents_sha256": result.measured.documents_sha256,
            "activations": "fp32",
            "tau": plan.tau,
            "hot_share_by_loop": list(result.loop_hot_share()),
        }
        records.append(
            make_record(
                "quality.kl_nats",
                result.measured.kl_nats,
                "nats",
                samples=result.kl_nats,
                settings=settings,
                plan_sha256=plan.sha256,
                model=plan.fingerprint.name,
                weights_sha256=plan.fingerprint.weights_sha256,
                seed=seed,
            )
        )
    return records


def _first_cell(options: Sequence[str]) -> int:
    return next((cell for cell, option in enumerate(options) if option != "bf16"), len(options))
