"""The step-time model of each arm, fitted to what was measured of it.

Either to ``decode.step_ms`` Records (an engine in the benchmark's own process, batches that stay as they are) or to the
windows of ``slo.cell`` Records: steps as clients of a server saw them, with the host's share of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from loopkv.bench.cache_arms import CacheArm
from loopkv.bench.served_steps import windows_from_json
from loopkv.errors import LoopKVError
from loopkv.records import Record
from loopkv.step_time import FitError, StepRow, StepTimeModel, hold_out

DECODE_ROWS, SERVED_ROWS = "decode.step_ms", "slo.cell"
WEIGHT_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class ArmFit:
    """A fitted model with its error on the rows it was fitted to and on those left out.

    Args:
        arm: label.
        source: kind of the Records.
        model: the constants.
        fitted: error on the rows of the fit.
        held_out: error on the others, None where there are none.
    """

    arm: str | None
    source: str
    model: StepTimeModel
    fitted: FitError
    held_out: FitError | None

    def describe(self) -> str:
        """One line for print and for Records."""
        model = self.model
        text = f"{self.source}: t_fix {model.t_fix_s * 1e3:.2f} ms, {model.bandwidth_bytes_s / 1e12:.2f} TB/s; "
        text += f"{self.fitted.rows} rows, mean error {self.fitted.mean_absolute:.1%}"
        if self.held_out is not None:
            text += f"; {self.held_out.rows} others predicted, mean error {self.held_out.mean_absolute:.1%}"
        return text


def step_rows(records: Iterable[Record], arm: str | None = None) -> tuple[list[StepRow], float]:
    """Rows and weight bytes of the ``decode.step_ms`` Records of one arm (None: of all).

    Raises:
        LoopKVError: no usable row, or rows of models of different size.
    """
    rows: list[StepRow] = []
    weights = set()
    for record in records:
        settings = record.settings
        if record.what != DECODE_ROWS or record.value is None or (arm is not None and settings.get("arm") != arm):
            continue
        if settings.get("read_bytes_per_request") is None or settings.get("weight_bytes") is None:
            continue
        rows.append(StepRow(record.value / 1e3, int(settings["batch"]), float(settings["read_bytes_per_request"])))
        weights.add(float(settings["weight_bytes"]))
    who = "all arms" if arm is None else f"arm {arm}"
    if not rows:
        raise LoopKVError(f"step-time fit of {who}", got="no decode.step_ms record with bytes", wanted="two or more")
    if len(weights) > 1:
        raise LoopKVError(f"step-time fit of {who}", got=f"weights of {sorted(weights)} bytes", wanted="one model")
    return rows, weights.pop()


def fit_arm(records: Sequence[Record], arm: str | None = None) -> ArmFit:
    """Fit one arm (None: all arms together), leaving every third row out to be predicted.

    Raises:
        LoopKVError: too few rows, or times that do not grow with bytes.
    """
    rows, weight_bytes = step_rows(records, arm)
    return _fit(arm, DECODE_ROWS, *hold_out(rows), weight_bytes)


def served_rows(records: Iterable[Record], arm: CacheArm, models: Collection[str]) -> dict[float, list[StepRow]]:
    """Rows of the windows of one arm's ``slo.cell`` Records, by rung (requests/s).

    Args:
        arm: its label, its plan's hash, and the bytes that a request of any length reads.
        models: names under which the model may stand in Records.
    """
    rungs: dict[float, list[StepRow]] = {}
    for record in records:
        settings = record.settings
        if record.what != SERVED_ROWS or settings.get("arm") != arm.name or record.plan_sha256 != arm.plan_sha256:
            continue
        if record.model not in models:
            continue
        rows = rungs.setdefault(float(settings["rate_per_s"]), [])
        for window in windows_from_json(settings.get("steps", [])):
            context = min(round(window.context_tokens), arm.max_tokens)
            rows.append(StepRow(window.step_ms / 1e3, window.decoding, float(arm.read_bytes[context])))
    return rungs


def fit_served(rungs: dict[float, list[StepRow]], arm: CacheArm, weight_bytes: float) -> ArmFit:
    """Fit the slowest rung and predict the windows of the others; of a single rung, every third window.

    Raises:
        LoopKVError: too few windows, or times that do not grow with bytes.
    """
    slowest, *others = (rungs[rate] for rate in sorted(rungs))
    kept, left = (slowest, [row for rows in others for row in rows]) if others else hold_out(slowest)
    return _fit(arm.name, SERVED_ROWS, kept, left, weight_bytes)


def fit_cache_arm(records: Sequence[Record], arm: CacheArm, weight_bytes: float, models: Collection[str]) -> ArmFit:
    """Fit an arm to its ``decode.step_ms`` Records, or where there are none to the windows of its ``slo.cell`` Records.

    Args:
        records: of one file; other arms and models may stand beside.
        arm: the cache.
        weight_bytes: W_T of the model.
        models: names under which the model may stand in Records.

    Raises:
        LoopKVError: neither kind, decode rows of a model of another size, or rows that cannot be fitted.
    """
    if any(record.what == DECODE_ROWS and record.settings.get("arm") == arm.name for record in records):
        fit = fit_arm(records, arm.name)
        if abs(fit.model.weight_bytes / weight_bytes - 1) > WEIGHT_TOLERANCE:
            raise LoopKVError(
                f"step-time fit of arm {arm.name}",
                got=f"rows of a model that reads {fit.model.weight_bytes / 1e9:.2f} GB of weights a step",
                wanted=f"{weight_bytes / 1e9:.2f} GB, those of this model",
            )
        return fit
    rungs = {rate: rows for rate, rows in served_rows(records, arm, models).items() if rows}
    if not rungs:
        raise LoopKVError(
            f"step-time fit of arm {arm.name}",
            got="no decode.step_ms record and no slo.cell record with steps, of this arm and model",
            wanted="one of the two",
        )
    return fit_served(rungs, arm, weight_bytes)


def _fit(arm: str | None, source: str, kept: Sequence[StepRow], left: Sequence[StepRow], weight_bytes: float) -> ArmFit:
    model = StepTimeModel.fit(kept, weight_bytes)
    return ArmFit(arm, source, model, model.error(kept), model.error(left) if left else None)
