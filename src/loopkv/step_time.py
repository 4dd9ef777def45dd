"""The step-time model ``t(B) = t_fix + (W_T + B * D_read) / BW`` (paper eq. 1): one definition for every predictor.

``W_T`` is the bytes of weights a decode step reads over all loops, ``D_read`` the KV bytes one request reads per
step, ``BW`` the effective bandwidth of the whole step and ``t_fix`` the time that does not scale with bytes. ``W_T``
is a fact of the model, ``D_read`` of plan and context; only ``BW`` and ``t_fix`` are fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.optimize import nnls

from loopkv.errors import LoopKVError
from loopkv.footprint import Footprint
from loopkv.geometry import Geometry
from loopkv.policy import Policy

LEAST_TB_S = 0.01
LEAST_GROWTH = 1e-3
"""Least share of the longest step that the bytes which differ between rows must explain: below it a bandwidth is the
rounding of times that do not grow."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One measured decode step: ``batch`` requests reading ``read_bytes_per_request`` each took ``step_s`` seconds.

    The batch of a stretch of served steps is a mean, hence no whole number.
    """

    step_s: float
    batch: float
    read_bytes_per_request: float


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a model lies from measured rows: relative errors ``predicted / measured - 1``."""

    rows: int
    mean_absolute: float
    largest: float


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Decode step time from bytes (paper eq. 1).

    Args:
        t_fix_s: seconds of a step that do not scale with bytes.
        weight_bytes: W_T, bytes of weights read per step, every loop counted.
        bandwidth_bytes_s: BW, effective bytes per second of the whole step.
    """

    t_fix_s: float
    weight_bytes: float
    bandwidth_bytes_s: float

    def __post_init__(self) -> None:
        for name, value, low in (
            ("t_fix_s", self.t_fix_s, 0.0),
            ("weight_bytes", self.weight_bytes, 0.0),
            ("bandwidth_bytes_s", self.bandwidth_bytes_s, math.ulp(0.0)),
        ):
            if not (math.isfinite(value) and value >= low):
                raise LoopKVError(f"step-time model: {name}", got=value, wanted="a finite number" + " > 0" * (low > 0))

    def bandwidth_text(self) -> str:
        """The bandwidth for print: TB/s, or GB/s where it is below 0.01 TB/s (a CPU's)."""
        tb_s = self.bandwidth_bytes_s / 1e12
        return f"{tb_s:.2f} TB/s" if tb_s >= LEAST_TB_S else f"{tb_s * 1e3:.3g} GB/s"

    def step_s(self, batch: float, read_bytes_per_request: float) -> float:
        """Seconds of one decode step of ``batch`` requests that read ``read_bytes_per_request`` bytes each."""
        return self.step_s_of_bytes(batch * read_bytes_per_request)

    def step_s_of_bytes(self, read_bytes: float) -> float:
        """Seconds of one decode step whose requests read ``read_bytes`` bytes together (mixed contexts)."""
        return self.t_fix_s + (self.weight_bytes + read_bytes) / self.bandwidth_bytes_s

    def tokens_per_s(self, batch: float, read_bytes_per_request: float) -> float:
        """Decode throughput of ``batch`` requests that each gain one token a step."""
        return batch / self.step_s(batch, read_bytes_per_request)

    @classmethod
    def fit(cls, rows: Iterable[StepRow], weight_bytes: float) -> Self:
        """Least squares of the relative errors over ``rows``, with ``t_fix >= 0`` and ``1 / BW >= 0``.

        Relative errors, because rows of 5 ms and of 100 ms must count alike for a claim in percent.

        Raises:
            LoopKVError: fewer than two distinct byte counts, a row that is not a measurement, or times that do not grow
                with the bytes read (by ``LEAST_GROWTH`` of the longest, at least).
        """
        table = list(rows)
        for row in table:
            if not (1e-15 < row.step_s < math.inf and row.batch > 0 and row.read_bytes_per_request >= 0):
                raise LoopKVError("step-time fit", got=row, wanted="a step time > 0 of a batch > 0")
        read = np.array([weight_bytes + row.batch * row.read_bytes_per_request for row in table])
        if len(set(read.tolist())) < 2:
            raise LoopKVError(
                "step-time fit", got=f"{len(set(read.tolist()))} byte counts", wanted="at least two that differ"
            )
        times = np.array([row.step_s for row in table])
        scale = float(read.max())  # both columns of order one: nnls has an absolute tolerance
        design = np.stack([np.ones_like(read), read / scale], axis=1) / times[:, None] * float(times.max())
        solution, _ = nnls(design, np.full(len(table), float(times.max())))
        t_fix, slope = float(solution[0]), float(solution[1]) / scale
        if slope * float(np.ptp(read)) <= LEAST_GROWTH * float(times.max()):
            raise LoopKVError(
                "step-time fit",
                got="step times that do not grow with the bytes read",
                wanted="a finite bandwidth",
                hint="add rows of larger batches or contexts",
            )
        return cls(t_fix, weight_bytes, 1.0 / slope)

    def error(self, rows: Iterable[StepRow]) -> FitError:
        """Relative errors of this model on ``rows``."""
        errors = [self.step_s(row.batch, row.read_bytes_per_request) / row.step_s - 1.0 for row in rows]
        if not errors:
            raise LoopKVError("step-time error", got="no rows", wanted="at least one measured row")
        return FitError(len(errors), math.fsum(map(abs, errors)) / len(errors), max(errors, key=abs))


def hold_out(rows: Sequence[StepRow], every: int = 3) -> tuple[list[StepRow], list[StepRow]]:
    """Rows to fit and rows to predict: in order of bytes read, every ``every``-th row is held out, never an end.

    The ends stay in the fit, so a held-out row is interpolated; ask for extrapolation by fitting the rows you choose.
    """
    if every < 2:
        raise LoopKVError("hold_out", got=every, wanted="every >= 2")
    ordered = sorted(rows, key=lambda row: (row.batch * row.read_bytes_per_request, row.batch, row.step_s))
    held = {i for i in range(1, len(ordered) - 1) if i % every == every // 2 + every % 2}
    return (
        [row for i, row in enumerate(ordered) if i not in held],
        [row for i, row in enumerate(ordered) if i in held],
    )


def matched_tokens_per_s(measured: Iterable[tuple[int, float]], step_bound_s: float) -> float | None:
    """Decode throughput at the largest batch whose step stays within ``step_bound_s`` (paper appendix B).

    The step time is linear in the batch between the two measured batches that bracket the bound. An arm whose largest
    batch meets the bound keeps that batch; None where its smallest batch already exceeds it.

    Args:
        measured: (batch, step seconds) of one arm at one context.
        step_bound_s: time per output token to match.
    """
    rows = sorted(dict(measured).items())
    if not rows or rows[0][1] > step_bound_s:
        return None
    below = max((row for row in rows if row[1] <= step_bound_s), key=lambda row: row[0])
    above = min((row for row in rows if row[0] > below[0]), default=None, key=lambda row: row[0])
    if above is None:
        return below[0] / below[1]
    share = (step_bound_s - below[1]) / (above[1] - below[1])
    return (below[0] + share * (above[0] - below[0])) / step_bound_s


def request_read_bytes(
    geometry: Geometry,
    policy: Policy,
    footprint: Footprint,
    tokens: int,
    *,
    exact_itemsize: int = 2,
    hot_share: float = 1.0,
) -> float:
    """D_read: KV bytes that one decode step reads for a request of ``tokens`` tokens (paper appendix C).

    ``N_history * d_read + (sink + window) * exact bytes``, with the history that semantics define for ``tokens``.
    """
    end = policy.history_end(tokens)
    history = min(tokens, end) - min(tokens, policy.sink_tokens)
    exact_token = len(geometry.cells) * 2 * geometry.kv_heads * geometry.head_dim * exact_itemsize
    return history * footprint.read_bytes_at(hot_share) + (tokens - history) * exact_token
