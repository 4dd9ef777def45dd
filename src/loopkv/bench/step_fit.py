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
from loopkv.capacity import datasheet_bandwidth
from loopkv.errors import LoopKVError
from loopkv.records import Record, of_one_commit
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
        hardware: that the rows were measured on.
        commit: of the code that measured them.
        left_out: Records of other commits, which were used for nothing.
    """

    arm: str
    source: str
    model: StepTimeModel
    fitted: FitError
    held_out: FitError | None
    hardware: str = ""
    commit: str | None = None
    left_out: int = 0

    def describe(self) -> str:
        """One line for print and for Records."""
        model = self.model
        text = f"{self.source}: t_fix {model.t_fix_s * 1e3:.2f} ms, {model.bandwidth_text()}; "
        text += f"{self.fitted.rows} rows, mean error {self.fitted.mean_absolute:.1%}"
        if self.held_out is not None:
            text += f"; {self.held_out.rows} others predicted, mean error {self.held_out.mean_absolute:.1%}"
        if self.commit is not None:
            text += f"; commit {self.commit[:7]}"
        if self.left_out:
            text += f", {self.left_out} record{'s' if self.left_out > 1 else ''} of others left out"
        return text

    def warnings(self) -> list[str]:
        """One sentence for each reason to doubt the constants."""
        errors = [("fitted", self.fitted), ("others", self.held_out)]
        far = [
            f"{error.mean_absolute:.0%} ({name})"
            for name, error in errors
            if error is not None and error.mean_absolute > WARN_ERROR
        ]
        told = [f"the step-time fit is off by {' and '.join(far)} on average"] if far else []
        most = datasheet_bandwidth(self.hardware)
        if most is not None and self.model.bandwidth_bytes_s > most:
            told.append(
                f"the fitted bandwidth, {self.model.bandwidth_text()}, is above the datasheet's {most / 1e12:.4g} TB/s "
                f"of {self.hardware}: these rows do not determine a bandwidth; add rows of larger batches or contexts"
            )
        return told


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the rows of a fit were measured."""

    hardware: str
    commit: str | None
    left_out: int


def step_rows(records: Sequence[Record], arm: CacheArm, file: str = "records") -> tuple[list[StepRow], float, _Origin]:
    """Rows, weight bytes and origin of the ``decode.step_ms`` Records of one arm: those of the commit with most.

    Args:
        records: of one file, in its order.
        arm: its label.
        file: name of the file, for errors.

    Raises:
        LoopKVError: no usable row, a broken one, or rows of several models, plans or GPUs.
    """
    found: list[tuple[Record, StepRow, float]] = []
    for number, record in enumerate(records, 1):
        settings = record.settings
        if record.what != DECODE_ROWS or record.value is None or settings.get("arm") != arm.name:
            continue
        if settings.get("read_bytes_per_request") is None or settings.get("weight_bytes") is None:
            continue
        place = f"{file}, record {number}"
        batch = _number(settings, "batch", place, 1, MAX_REQUESTS, whole=True)
        read = _number(settings, "read_bytes_per_request", place, 0, MAX_BYTES)
        weight = _number(settings, "weight_bytes", place, 0, MAX_BYTES)
        step = _number({"value": record.value}, "value", place, MIN_MS, MAX_MS) / 1e3
        found.append((record, StepRow(step, batch, read), weight))
    who = f"step-time fit of arm {arm.name}"
    if not found:
        raise LoopKVError(who, got=f"no decode.step_ms record with bytes in {file}", wanted="two or more")
    used, origin = _of_one_commit(who, [record for record, _, _ in found])
    kept = [(row, weight) for record, row, weight in found if record.commit == origin.commit]
    weights = {weight for _, weight in kept}
    if len(weights) > 1:
        raise LoopKVError(who, got=f"weights of {sorted(weights)} bytes", wanted="one model")
    if arm.plan_sha256 is None and used[0].plan_sha256 is not None:
        raise LoopKVError(who, got=f"rows of plan {used[0].plan_sha256[:12]}", wanted="rows of vLLM's own cache")
    return [row for row, _ in kept], weights.pop(), origin


def served_rows(
    records: Sequence[Record], arm: CacheArm, models: Collection[str], file: str = "records"
) -> tuple[dict[float, list[StepRow]], _Origin | None]:
    """Rows of the windows of one arm's ``slo.cell`` Records, by rung (requests/s): those of the commit with most rungs.

    Args:
        records: of one file, in its order.
        arm: its label, its plan's hash, and the bytes that a request of any length reads.
        models: names under which the model may stand in Records.
        file: name of the file, for errors.

    Returns:
        The rungs, and where they were measured (None without a rung).

    Raises:
        LoopKVError: a broken record, or rungs of several GPUs or workloads.
    """
    found: list[tuple[Record, float, list[StepRow]]] = []
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
        rows = []
        for window in windows:
            context = min(round(window.context_tokens), arm.max_tokens)
            rows.append(StepRow(window.step_ms / 1e3, window.decoding, float(arm.read_bytes[context])))
        if rows:
            found.append((record, rate, rows))
    if not found:
        return {}, None
    who = f"step-time fit of arm {arm.name}"
    used, origin = _of_one_commit(who, [record for record, _, _ in found])
    _check_one(who, "workloads", [str(record.settings.get("workload")) for record in used])
    rungs: dict[float, list[StepRow]] = {}
    for record, rate, rows in found:
        if record.commit == origin.commit:
            rungs.setdefault(rate, []).extend(rows)
    return rungs, origin


def _of_one_commit(who: str, records: Sequence[Record]) -> tuple[list[Record], _Origin]:
    """The Records of the commit that has most of them, which must be of one GPU and one plan."""
    kept, others = of_one_commit(records)
    _check_one_origin(who, kept)
    return kept, _Origin(kept[0].hardware, kept[0].commit, len(others))


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


def _fit_served(rungs: dict[float, list[StepRow]], origin: _Origin, arm: CacheArm, weight_bytes: float) -> ArmFit:
    """Fit the slowest rung and predict the windows of the others; of a single rung, every third window.

    Raises:
        LoopKVError: too few windows, or times that do not grow with bytes.
    """
    slowest, *others = (rungs[rate] for rate in sorted(rungs))
    kept, left = (slowest, [row for rows in others for row in rows]) if others else hold_out(slowest)
    return _fit(arm.name, SERVED_ROWS, kept, left, weight_bytes, origin)


def fit_cache_arm(
    records: Sequence[Record], arm: CacheArm, weight_bytes: float, models: Collection[str], file: str = "records"
) -> ArmFit:
    """Fit an arm to its ``decode.step_ms`` Records, or where there are none to the windows of its ``slo.cell`` Records.

    Of decode rows every third is left out to be predicted. Only Records of one commit count, the one with most.

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
        rows, measured_bytes, origin = step_rows(records, arm, file)
        if abs(measured_bytes / weight_bytes - 1) > WEIGHT_TOLERANCE:
            raise LoopKVError(
                f"step-time fit of arm {arm.name}",
                got=f"rows of a model that reads {measured_bytes / 1e9:.2f} GB of weights a step",
                wanted=f"{weight_bytes / 1e9:.2f} GB, those of this model",
            )
        return _fit(arm.name, DECODE_ROWS, *hold_out(rows), measured_bytes, origin)
    rungs, where = served_rows(records, arm, models, file)
    if where is None:
        raise LoopKVError(
            f"step-time fit of arm {arm.name}",
            got=f"no decode.step_ms record and no slo.cell record with steps, of this arm and model, in {file}",
            wanted="one of the two",
            hint=_what_is_there(records, models),
        )
    return _fit_served(rungs, where, arm, weight_bytes)


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


def _fit(
    arm: str, source: str, kept: Sequence[StepRow], left: Sequence[StepRow], weight_bytes: float, origin: _Origin
) -> ArmFit:
    model = StepTimeModel.fit(kept, weight_bytes)
    error = model.error(left) if left else None
    return ArmFit(arm, source, model, model.error(kept), error, origin.hardware, origin.commit, origin.left_out)
