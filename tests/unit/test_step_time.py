"""The step-time model: exact values, recovery of planted constants, and what a fit refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopkv.errors import LoopKVError
from loopkv.footprint import plan_footprint
from loopkv.geometry import Geometry
from loopkv.options import BF16, INT4
from loopkv.policy import DEFAULT_POLICY
from loopkv.step_time import StepRow, StepTimeModel, hold_out, matched_tokens_per_s, request_read_bytes

OURO = Geometry(architecture="ouro", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
KIB = 1024


def test_step_is_the_papers_equation() -> None:
    # 6.84 ms + (10.07 GB + 8 * 6 GB) / 1.29 TB/s = 6.84 ms + 45.0155 ms
    model = StepTimeModel(6.84e-3, 10.07e9, 1.29e12)
    assert model.step_s(8, 6e9) == pytest.approx(6.84e-3 + 58.07e9 / 1.29e12, rel=1e-15)
    assert model.tokens_per_s(8, 6e9) == pytest.approx(8 / (6.84e-3 + 58.07e9 / 1.29e12), rel=1e-15)
    assert model.step_s_of_bytes(48e9) == model.step_s(8, 6e9)


def test_paper_constants_predict_the_papers_bf16_peak() -> None:
    """Table 11: BF16 at 8K is "about 146 tok/s" by eq. 1 with the paper's constants and batch 8."""
    bf16 = plan_footprint(OURO, [BF16] * 96, DEFAULT_POLICY)
    read = request_read_bytes(OURO, DEFAULT_POLICY, bf16, 8192)
    assert read == 8192 * 768 * KIB
    assert StepTimeModel(6.84e-3, 10.07e9, 1.29e12).tokens_per_s(8, read) == pytest.approx(146, rel=0.02)


def test_read_bytes_count_history_sink_and_window() -> None:
    # n = 8,192: history_end = 32 * floor(7,936 / 32) = 7,936; history 7,904 tokens, exact 288 (216 MiB, appendix C).
    int4 = plan_footprint(OURO, [INT4] * 96, DEFAULT_POLICY)
    assert request_read_bytes(OURO, DEFAULT_POLICY, int4, 8192) == 7904 * 240 * KIB + 288 * 768 * KIB
    assert 288 * 768 * KIB == 216 * KIB * KIB
    # One hot token in six: each int4 cell skips 0.5 KiB for the other five sixths.
    cold = request_read_bytes(OURO, DEFAULT_POLICY, int4, 8192, hot_share=1 / 6)
    assert cold == pytest.approx(7904 * (240 - 5 / 6 * 96 * 0.5) * KIB + 288 * 768 * KIB)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 288, 319])
def test_short_requests_read_everything_exact(tokens: int) -> None:
    int4 = plan_footprint(OURO, [INT4] * 96, DEFAULT_POLICY)
    assert request_read_bytes(OURO, DEFAULT_POLICY, int4, tokens) == tokens * 768 * KIB


@given(
    t_fix=st.floats(0, 0.05),
    bandwidth=st.floats(1e10, 1e13),
    weight=st.floats(0, 2e10),
    rows=st.lists(st.tuples(st.integers(1, 200), st.floats(1e6, 1e10)), min_size=3, max_size=12),
)
def test_fit_recovers_planted_constants(
    t_fix: float, bandwidth: float, weight: float, rows: list[tuple[int, float]]
) -> None:
    truth = StepTimeModel(t_fix, weight, bandwidth)
    measured = [StepRow(truth.step_s(b, d), b, d) for b, d in rows]
    read = [b * d for b, d in rows]
    if max(read) < 2 * min(read) + 1e-3 * weight:  # nearly one byte count: t_fix and BW cannot be told apart
        return
    if (max(read) - min(read)) / bandwidth < 2e-3 * max(row.step_s for row in measured):  # refused as flat
        return
    fitted = StepTimeModel.fit(measured, weight)
    assert abs(fitted.error(measured).largest) < 1e-6


def test_fit_never_returns_a_negative_constant() -> None:
    # Times proportional to the square of the bytes would give a negative intercept by plain least squares.
    rows = [StepRow(1e-3 * b * b, b, 1e9) for b in (1, 2, 4, 8)]
    model = StepTimeModel.fit(rows, 0.0)
    assert model.t_fix_s == 0.0 and model.bandwidth_bytes_s > 0


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [StepRow(1e-3, 1, 1e9)],
        [StepRow(1e-3, 2, 1e9), StepRow(1.1e-3, 1, 2e9)],
        [StepRow(0.0, 1, 1e9), StepRow(1e-3, 2, 1e9)],
        [StepRow(math.nan, 1, 1e9), StepRow(1e-3, 2, 1e9)],
        [StepRow(2e-3, 1, 1e9), StepRow(1e-3, 8, 1e9)],
        [StepRow(0.01, batch, 1e9) for batch in (1, 2, 4, 8, 16)],  # flat
        [StepRow(0.01 * (1 + 1e-5 * batch), batch, 1e9) for batch in (1, 2, 4, 8, 16)],  # 0.02% of growth
    ],
)
def test_fit_refuses_rows_that_fix_nothing(rows: list[StepRow]) -> None:
    with pytest.raises(LoopKVError):
        StepTimeModel.fit(rows, 1e9)


def test_a_slow_machine_s_bandwidth_keeps_its_digits() -> None:
    texts = {1.294e12: "1.29 TB/s", 1e10: "0.01 TB/s", 9.99e9: "9.99 GB/s", 1.234e6: "0.00123 GB/s"}
    assert {bw: StepTimeModel(0.0, 1.0, bw).bandwidth_text() for bw in texts} == texts


def test_model_refuses_impossible_constants() -> None:
    for constants in ((-1e-3, 1.0, 1.0), (0.0, -1.0, 1.0), (0.0, 1.0, 0.0), (math.inf, 1.0, 1.0)):
        with pytest.raises(LoopKVError):
            StepTimeModel(*constants)


def test_matched_throughput_interpolates_the_batch() -> None:
    rows = [(1, 0.010), (8, 0.024), (16, 0.040)]
    # 0.032 s lies halfway between batches 8 and 16: 12 requests every 32 ms
    assert matched_tokens_per_s(rows, 0.032) == pytest.approx(12 / 0.032)
    assert matched_tokens_per_s(rows, 0.024) == pytest.approx(8 / 0.024)
    assert matched_tokens_per_s(rows, 0.1) == pytest.approx(16 / 0.040)
    assert matched_tokens_per_s(rows, 0.009) is None
    assert matched_tokens_per_s([], 0.1) is None


def test_hold_out_keeps_the_ends_and_loses_no_row() -> None:
    rows = [StepRow(1e-3 * b, b, 1e9) for b in (8, 1, 2, 6, 4, 3, 5, 7)]
    fitted, held = hold_out(rows)
    assert sorted(fitted + held, key=lambda r: r.batch) == sorted(rows, key=lambda r: r.batch)
    assert [row.batch for row in held] == [3, 6]  # positions 2 and 5 of 1..8
    assert {1, 8} <= {row.batch for row in fitted}
