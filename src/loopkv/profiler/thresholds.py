"""``tau(model, fingerprint, plan, documents)``: the smallest V-precision threshold that costs almost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loopkv.artifacts import Fingerprint, Plan
from loopkv.engine.whole_sequence import plan_reads
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.models.base import LoopedModel
from loopkv.profiler.documents import Document
from loopkv.profiler.measuring import PlanMeasurement, measure
from loopkv.profiler.probe import OnProgress

TAU_CANDIDATES = (10.0, 12.0, 14.0, 16.0)
TAU_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class TauSweep:
    """KL of a plan at every threshold, and the plan with the chosen one.

    Args:
        plan: the plan with the smallest threshold whose KL is at most ``1 + tolerance`` times that of full reads, and
            with its measurement; tau None where none is.
        full: the plan measured with both planes read always.
        points: measured at the candidates, smallest first.
        tolerance: the share by which the KL may grow.
    """

    plan: Plan
    full: PlanMeasurement
    points: tuple[PlanMeasurement, ...]
    tolerance: float

    def growth(self, point: PlanMeasurement) -> float:
        """KL of a point over that of full reads (1 where both are 0)."""
        full = self.full.measured.kl_nats
        if full == 0.0:
            return 1.0 if point.measured.kl_nats == 0.0 else math.inf
        return point.measured.kl_nats / full


def tau(
    model: LoopedModel,
    fingerprint: Fingerprint,
    plan: Plan,
    documents: Sequence[Document],
    *,
    candidates: Sequence[float] = TAU_CANDIDATES,
    tolerance: float = TAU_TOLERANCE,
    accept_weights: bool = False,
    seed: int = 0,
    journal: Path | str | None = None,
    on_progress: OnProgress | None = None,
) -> TauSweep:
    """Sweep thresholds in fp32, every position taken as a decode row, and write the chosen one into the plan.

    Args:
        model, fingerprint, plan, documents: as for ``measure``.
        candidates: thresholds in bits.
        tolerance: the share by which the KL may grow.
        accept_weights, seed, journal, on_progress: as for ``measure``.

    Raises:
        UnsupportedError: a plan in which no cell reads an int4 history, so that there is no low plane to skip.
        LoopKVError: candidates that are no thresholds; whatever ``measure`` raises.
    """
    check_sweep(plan, candidates, tolerance)
    plans = [plan.with_tau(candidate) for candidate in sorted(set(candidates))]
    full, *points = measure(
        model,
        fingerprint,
        [plan.with_tau(None), *plans],
        documents,
        accept_weights=accept_weights,
        seed=seed,
        journal=journal,
        on_progress=on_progress,
    )
    bound = full.measured.kl_nats * (1.0 + tolerance)
    chosen = next((point.plan for point in points if point.measured.kl_nats <= bound), full.plan)
    return TauSweep(chosen, full, tuple(points), tolerance)


def check_sweep(plan: Plan, candidates: Sequence[float], tolerance: float) -> None:
    """Refuse a sweep that can give nothing; needs no model.

    Raises:
        UnsupportedError: a plan in which no cell reads an int4 history.
        LoopKVError: candidates that are no thresholds, a tolerance that is no share.
    """
    if not candidates or not all(math.isfinite(c) and 0 <= c <= 1024 for c in candidates):
        raise LoopKVError("thresholds", got=list(candidates), wanted="numbers of bits from 0 to 1024")
    if not 0 <= tolerance < math.inf:
        raise LoopKVError("tolerance", got=tolerance, wanted="a share >= 0")
    if all(read.bits != 4 for read in plan_reads(plan.fingerprint.geometry, plan.cell_options)):
        raise UnsupportedError(
            f"V precision of plan {plan.name!r}",
            got="no cell that reads an int4 history",
            wanted="int4 cells, whose values have a low plane to skip",
        )
