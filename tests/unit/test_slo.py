"""Scoring under a latency objective: exact values, derived by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopkv.bench.slo import (
    SHORT_RULE_FRACTION,
    Bounds,
    RequestTimes,
    capacity,
    capacity_ratio,
    middle_requests,
    score,
)
from loopkv.errors import LoopKVError

BOUNDS = Bounds(ttft_s=10.0, k=3.0, tau0_s=0.0186)


def at(arrival: float, ttft: float | None = 1.0, tpot: float | None = 0.02, error: str | None = None) -> RequestTimes:
    return RequestTimes(arrival, ttft, tpot, 100, error)


def test_bounds_are_the_papers() -> None:
    assert pytest.approx(0.0558) == BOUNDS.tpot_s
    # 17.31 ms + 0.495 ms per 1K: 18.60 ms at 2.606K and 20.69 ms at 6.828K tokens
    assert pytest.approx(2.606 / 6.828, rel=1e-3) == SHORT_RULE_FRACTION


def test_only_the_middle_of_the_arrival_window_is_scored() -> None:
    # Arrivals 0, 1, ..., 10: the window is [0, 10], its middle 80% is [1, 9], ends included.
    chosen = middle_requests([at(float(t)) for t in (10, 0, 3, 1, 2, 9, 8, 7, 6, 5, 4)])
    assert [r.arrival_s for r in chosen] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_the_papers_counts_of_scored_requests_are_plausible() -> None:
    """Of 60 Poisson arrivals the paper scores 43, 49 and 47: 80% of the window holds 48 on average."""
    from loopkv.bench.workload import poisson_arrivals

    counts = [len(middle_requests([at(t) for t in poisson_arrivals(60, 0.05, seed)])) for seed in range(101, 131)]
    assert 44 < sum(counts) / len(counts) < 51
    assert min(counts) >= 36 and max(counts) <= 58


def test_misses_by_kind() -> None:
    middle = [
        at(2, 10.0, BOUNDS.tpot_s),  # both exactly at the bound: met
        at(3, 10.1, 0.02),  # TTFT only
        at(4, 1.0, 0.056),  # TPOT only
        at(5, 11.0, 0.06),  # both
        at(6, None, None, "connection reset"),  # failed
        at(7, None, None),  # nothing came
        at(8),
    ]
    result = score([at(0), at(10), *middle], BOUNDS)
    assert result.met == (True, False, False, False, False, False, True)
    assert (result.missed_ttft, result.missed_tpot, result.missed_both, result.failed) == (1, 1, 1, 2)
    assert result.scored == 7
    assert result.attainment == pytest.approx(2 / 7)


def test_too_few_requests_cannot_be_scored() -> None:
    with pytest.raises(LoopKVError, match="none in the middle"):
        score([at(0.0), at(5.0)], BOUNDS)
    with pytest.raises(LoopKVError, match="no request"):
        score([], BOUNDS)
    assert score([at(0.0)], BOUNDS).scored == 1


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 30), st.floats(0, 0.2), st.booleans()), min_size=3, max_size=60)
)
def test_met_and_missed_add_up(rows: list[tuple[float, float, float, bool]]) -> None:
    requests = [at(t, a, b, "lost" if fail else None) for t, a, b, fail in rows]
    if not middle_requests(requests):
        return
    result = score(requests, BOUNDS)
    missed = result.missed_ttft + result.missed_tpot + result.missed_both + result.failed
    assert sum(result.met) + missed == result.scored <= len(requests)


def test_capacity_is_the_last_rung_before_the_first_failure() -> None:
    # A later rung that passes again does not count.
    result = capacity({0.03: 1.0, 0.01: 0.97, 0.02: 0.95, 0.04: 0.94, 0.05: 0.99})
    assert (result.rate_per_s, result.lowest_rate, result.highest_rate, result.no_rung_failed) == (
        0.03,
        0.01,
        0.05,
        False,
    )
    assert capacity({0.01: 0.9, 0.02: 1.0}).rate_per_s is None
    assert capacity({0.01: 1.0, 0.02: 0.96}) == capacity({0.02: 0.96, 0.01: 1.0})
    assert capacity({0.01: 1.0}).no_rung_failed
    # Known only where the next rate of the ladder was tested and failed.
    known = capacity({0.01: 1.0, 0.02: 0.9}, (0.01, 0.02, 0.03))
    assert (known.rate_per_s, known.bound, known.fails_at) == (0.01, None, 0.02)
    gap = capacity({0.01: 1.0, 0.03: 0.9}, (0.01, 0.02, 0.03))
    assert (gap.rate_per_s, gap.bound, gap.fails_at, gap.no_rung_failed) == (0.01, "at_least", 0.03, False)
    assert (capacity({0.01: 1.0}).bound, capacity({0.01: 0.9}).bound) == ("at_least", "below")
    with pytest.raises(LoopKVError):
        capacity({})


def test_ratio_of_certain_ladders_has_no_spread() -> None:
    sure, bad = [True] * 40, [False] * 40
    arm = {0.05: sure, 0.1: sure, 0.2: bad}
    base = {0.05: sure, 0.1: bad}
    result = capacity_ratio(arm, base, draws=1000)
    assert result.ratio == 2.0 and result.ci95 == (2.0, 2.0)
    assert result.share_at_least == {"1.5": 1.0, "1.7": 1.0} and result.draws == 1000


def test_ratio_bootstrap_has_the_binomial_shares() -> None:
    # One rung of 20 requests with 19 met passes (>= 19 of 20) when at least 19 of 20 draws are met:
    # P = 20 * 0.95^19 * 0.05 + 0.95^20 = 0.7358. Otherwise the arm's capacity counts as 0.
    flags = [True] * 19 + [False]
    result = capacity_ratio({1.0: flags}, {1.0: [True] * 20}, draws=200_000, at_least=(1.0,))
    assert result.ratio is None  # no rung of the baseline fails: its capacity is not known
    assert result.share_at_least["1"] == pytest.approx(0.7358, abs=0.005)
    # As the baseline it counts as the lowest rung whatever happens, so that no draw favours the arm.
    assert capacity_ratio({1.0: [True] * 20}, {1.0: flags}, draws=1000).ci95 == (1.0, 1.0)


def test_ratio_of_a_failing_baseline_is_unknown() -> None:
    result = capacity_ratio({1.0: [True] * 20}, {1.0: [False] * 20}, draws=100)
    assert result.ratio is None


def test_no_ratio_is_made_of_bounds() -> None:
    sure, bad = [True] * 20, [False] * 20
    arm, base = {0.2: sure, 0.4: bad}, {0.1: sure, 0.2: bad}
    assert capacity_ratio(arm, base, draws=10).ratio == 2.0
    assert capacity_ratio(arm, base, draws=10, arm_rates=(0.2, 0.3, 0.4)).ratio is None
    assert capacity_ratio(arm, base, draws=10, baseline_rates=(0.1, 0.15, 0.2)).ratio is None
    assert capacity_ratio({0.2: sure}, base, draws=10).ratio is None  # no rung of the arm fails


def test_times_that_are_no_numbers_have_missed() -> None:
    nan = float("nan")
    assert score([at(0, nan, 0.0), at(5, 0.0, nan), at(10)], BOUNDS).met == (False,)


def test_ratio_repeats_with_its_seed() -> None:
    flags = [True] * 18 + [False] * 2
    arm, base = {1.0: [True] * 20, 2.0: flags}, {1.0: flags}
    assert capacity_ratio(arm, base, draws=500, seed=3) == capacity_ratio(arm, base, draws=500, seed=3)
