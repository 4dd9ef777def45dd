"""The step-time model of each arm, fitted to what was measured of it.

Either to ``decode.step_ms`` Records (an engine in the benchmark's own process, batches that stay as they are) or to the
windows of ``slo.cell`` Records: steps as clients of a server saw them, with the host's share of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopkv.bench.cache_arms import CacheArm
from loopkv.bench.served_steps import windows_from_json
from loopkv.errors import LoopKVError
from loopkv.records import Record
from loopkv.step_time import FitError, StepRow, StepTimeModel, hold_out

DECODE_ROWS, SERVED_ROWS = "decode.step_ms", "slo.cell"
WEIGHT_TOLERANCE = 0.01
WARN_ERROR = 0.15
MAX_REQUESTS, MAX_BYTES, MIN_MS, MAX_MS = 1e6, 1e16, 1e-6, 1e9  # beyond is no measurement
MAX_NAMED = 12


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

    arm: str
    source: str
    model: StepTimeModel
    fitted: FitError
    held_out: FitError | None

    def describe(self) -> str:
        """One line for print and for Records."""
        model = self.model
        text = f"{self.source}: t_fix {model.t_fix_s * 1e3:.2f} ms, {model.bandwidth_text()}; "
        text += f"{self.fitted.rows} rows, mean error {self.fitted.mean_absolute:.1%}"
        if self.held_out is not None:
            text += f"; {self.held_out.rows} others predicted, mean error {self.held_out.mean_absolute:.1%}"
        return text

    def warning(self) -> str | None:
        """One sentence where the model is far from the rows, else None."""
        errors = [("fitted", self.fitted), ("others", self.held_out)]
        far = [
            f"{error.mean_absolute:.0%} ({name})"
            for name, error in errors
            if error is not None and error.mean_absolute > WARN_ERROR
        ]
        return f"the step-time fit is off by {' and '.join(far)} on average" if far else None


def step_rows(records: Sequence[Record], arm: CacheArm, file: str = "records") -> tuple[list[StepRow], float]:
    """Rows and weight bytes of the ``decode.step_ms`` Records of one arm.

    Args:
        records: of one file, in its order.
        arm: its label.
        file: name of the file, for errors.

    Raises:
        LoopKVError: no usable row, a broken one, or rows of several models, plans or GPUs.
    """
    rows: list[StepRow] = []
    used: list[Record] = []
    weights = set()
    for number, record in enumerate(records, 1):
        settings = record.settings
        if record.what != DECODE_ROWS or record.value is None or settings.get("arm") != arm.name:
            continue
        if settings.get("read_bytes_per_request") is None or settings.get("weight_bytes") is None:
            continue
        place = f"{file}, record {number}"
        batch = _number(settings, "batch", place, 1, MAX_REQUESTS, whole=True)
        read = _number(settings, "read_bytes_per_request", place, 0, MAX_BYTES)
        weights.add(_number(settings, "weight_bytes", place, 0, MAX_BYTES))
        rows.append(StepRow(_number({"value": record.value}, "value", place, MIN_MS, MAX_MS) / 1e3, batch, read))
        used.append(record)
    who = f"step-time fit of arm {arm.name}"
    if not rows:
        raise LoopKVError(who, got=f"no decode.step_ms record with bytes in {file}", wanted="two or more")
    if len(weights) > 1:
        raise LoopKVError(who, got=f"weights of {sorted(weights)} bytes", wanted="one model")
    _check_one_origin(who, used)
    if arm.plan_sha256 is None and used[0].plan_sha256 is not None:
        raise LoopKVError(who, got=f"rows of plan {used[0].plan_sha256[:12]}", wanted="rows of vLLM's own cache")
    return rows, weights.pop()


def served_rows(
    records: Sequence[Record], arm: CacheArm, models: Collection[str], file: str = "records"
) -> dict[float, list[StepRow]]:
    """Rows of the windows of one arm's ``slo.cell`` Records, by rung (requests/s).

    Args:
        records: of one file, in its order.
        arm: its label, its plan's hash, and the bytes that a request of any length reads.
        models: names under which the model may stand in Records.
        file: name of the file, for errors.

    Raises:
        LoopKVError: a broken record, or rungs of several GPUs or workloads.
    """
    rungs: dict[float, list[StepRow]] = {}
    used = []
    for number, record in enumerate(records, 1):
        settings = record.settings
        if record.what != SERVED_ROWS or settings.get("arm") != arm.name or record.plan_sha256 != arm.plan_sha256:
            continue
        if record.model not in models:
            continue
        place = f"{file}, record {number}"
        rate = _number(settings, "rate_per_s", place, math.ulp(0.0), MAX_REQUESTS)
        try:
            windows = windows_from_json(settings.get("steps", []))
        except LoopKVError as error:
            raise LoopKVError(f"{place}: steps", got=error.got, wanted=error.wanted) from None
        for window in windows:
            context = min(round(window.context_tokens), arm.max_tokens)
            rungs.setdefault(rate, []).append(
                StepRow(window.step_ms / 1e3, window.decoding, float(arm.read_bytes[context]))
            )
        if windows:
            used.append(record)
    who = f"step-time fit of arm {arm.name}"
    _check_one_origin(who, used)
    _check_one(who, "workloads", [str(record.settings.get("workload")) for record in used])
    return rungs


def _number(
    settings: Mapping[str, Any], key: str, place: str, low: float, high: float, *, whole: bool = False
) -> float:
    """``settings[key]``, which must be a number from ``low`` to ``high``."""
    value = settings.get(key)
    if isinstance(value, int | float) and type(value) is not bool and low <= value <= high:
        number = float(value)
        if number.is_integer() or not whole:
            return number
    kind = "a whole number" if whole else "a number"
    got = "nothing" if value is None else repr(value)[:80]
    raise LoopKVError(f"{place}: {key}", got=got, wanted=f"{kind} from {low:.4g} to {high:.4g}")


def _check_one_origin(who: str, records: Sequence[Record]) -> None:
    """All of one GPU and one plan: times of several fit none of them."""
    _check_one(who, "machines", [record.hardware or "unnamed" for record in records])
    _check_one(who, "plans", [(record.plan_sha256 or "none")[:12] for record in records])


def _check_one(who: str, what: str, names: Iterable[str]) -> None:
    found = list(dict.fromkeys(names))
    if len(found) > 1:
        raise LoopKVError(
            who,
            got=f"rows of {len(found)} {what} ({', '.join(found)[:200]})",
            wanted="rows of one",
            hint="give a file with the Records of one of them",
        )


def fit_served(rungs: dict[float, list[StepRow]], arm: CacheArm, weight_bytes: float) -> ArmFit:
    """Fit the slowest rung and predict the windows of the others; of a single rung, every third window.

    Raises:
        LoopKVError: too few windows, or times that do not grow with bytes.
    """
    slowest, *others = (rungs[rate] for rate in sorted(rungs))
    kept, left = (slowest, [row for rows in others for row in rows]) if others else hold_out(slowest)
    return _fit(arm.name, SERVED_ROWS, kept, left, weight_bytes)


def fit_cache_arm(
    records: Sequence[Record], arm: CacheArm, weight_bytes: float, models: Collection[str], file: str = "records"
) -> ArmFit:
    """Fit an arm to its ``decode.step_ms`` Records, or where there are none to the windows of its ``slo.cell`` Records.

    Of decode rows every third is left out to be predicted.

    Args:
        records: of one file, in its order; other arms and models may stand beside.
        arm: the cache.
        weight_bytes: W_T of the model.
        models: names under which the model may stand in Records.
        file: name of the file, for errors.

    Raises:
        LoopKVError: neither kind, a broken record, decode rows of a model of another size, rows of several GPUs or
            plans, or rows that cannot be fitted.
    """
    if any(record.what == DECODE_ROWS and record.settings.get("arm") == arm.name for record in records):
        rows, measured_bytes = step_rows(records, arm, file)
        if abs(measured_bytes / weight_bytes - 1) > WEIGHT_TOLERANCE:
            raise LoopKVError(
                f"step-time fit of arm {arm.name}",
                got=f"rows of a model that reads {measured_bytes / 1e9:.2f} GB of weights a step",
                wanted=f"{weight_bytes / 1e9:.2f} GB, those of this model",
            )
        return _fit(arm.name, DECODE_ROWS, *hold_out(rows), measured_bytes)
    rungs = served_rows(records, arm, models, file)
    if not rungs:
        raise LoopKVError(
            f"step-time fit of arm {arm.name}",
            got=f"no decode.step_ms record and no slo.cell record with steps, of this arm and model, in {file}",
            wanted="one of the two",
            hint=_what_is_there(records, models),
        )
    return fit_served(rungs, arm, weight_bytes)


def _what_is_there(records: Sequence[Record], models: Collection[str]) -> str:
    """The arms and models of a file's rows, beside the model that was asked for."""
    rows = [record for record in records if record.what in (DECODE_ROWS, SERVED_ROWS)]
    if not rows:
        return f"of its {len(records)} Records none is of these kinds"
    arms = dict.fromkeys(str(record.settings.get("arm"))[:40] for record in rows)
    named = dict.fromkeys(str(record.model)[:60] for record in rows)
    return (
        f"it has the arms {', '.join([*arms][:MAX_NAMED])}, of {'; '.join([*named][:MAX_NAMED])} "
        f"(this model: {'; '.join(sorted(models))}); give the label of one: --arm LABEL=SPEC"
    )


def _fit(arm: str, source: str, kept: Sequence[StepRow], left: Sequence[StepRow], weight_bytes: float) -> ArmFit:
    model = StepTimeModel.fit(kept, weight_bytes)
    return ArmFit(arm, source, model, model.error(kept), model.error(left) if left else None)
