"""The step-time model of each arm, fitted to measured ``decode.step_ms`` Records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loopkv.errors import LoopKVError
from loopkv.records import Record
from loopkv.step_time import FitError, StepRow, StepTimeModel, hold_out


@dataclass(frozen=True, slots=True)
class ArmFit:
    """A fitted model with its error on the rows it was fitted to and on those left out."""

    arm: str | None
    model: StepTimeModel
    fitted: FitError
    held_out: FitError | None


def step_rows(records: Iterable[Record], arm: str | None = None) -> tuple[list[StepRow], float]:
    """Rows and weight bytes of the ``decode.step_ms`` Records of one arm (None: of all).

    Raises:
        LoopKVError: no usable row, or rows of models of different size.
    """
    rows: list[StepRow] = []
    weights = set()
    for record in records:
        settings = record.settings
        if record.what != "decode.step_ms" or record.value is None or (arm is not None and settings.get("arm") != arm):
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
    kept, left = hold_out(rows)
    model = StepTimeModel.fit(kept, weight_bytes)
    return ArmFit(arm, model, model.error(kept), model.error(left) if left else None)
