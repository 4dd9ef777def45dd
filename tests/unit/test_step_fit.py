"""Step-time fits from the Records of decode benchmarks and of served ladders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from loopkv.artifacts import Fingerprint
from loopkv.bench.arms import parse_arms
from loopkv.bench.cache_arms import CacheArm, cache_arm
from loopkv.bench.dummy_model import dummy_shape, shape_size
from loopkv.bench.served_steps import StepWindow, windows_to_json
from loopkv.bench.step_fit import fit_cache_arm
from loopkv.errors import LoopKVError
from loopkv.records import Record, make_record
from loopkv.step_time import StepTimeModel

MODEL = "ouro-1.4b, 4 layers (dummy)"
IDENTITY = Fingerprint(name=MODEL, geometry=shape_size(dummy_shape("ouro-1.4b", 4)).geometry)
TRUTH = StepTimeModel(1.5e-3, 1.85e9, 4e12)


def arm(spec: str) -> CacheArm:
    return cache_arm(parse_arms([spec])[0], IDENTITY, 16384)


def rung(cache: CacheArm, rate: float, places: Sequence[tuple[float, float]], slower: float = 1.0) -> Record:
    """A rung whose windows show ``TRUTH`` at (decoding, context) of ``places``."""
    windows = [
        StepWindow(2.0 * i, n, c, slower * 1e3 * TRUTH.step_s(n, float(cache.read_bytes[round(c)])))
        for i, (n, c) in enumerate(places)
    ]
    settings = {"arm": cache.name, "rate_per_s": rate, "requests": [], "steps": windows_to_json(windows)}
    return make_record("slo.cell", 1.0, "requests", settings=settings, model=MODEL, plan_sha256=cache.plan_sha256)


@pytest.mark.parametrize("spec", ["bf16=stock", "kivi4", "m=paper-loopkv-m"])
def test_the_slowest_rung_is_fitted_and_the_others_are_predicted(spec: str) -> None:
    cache = arm(spec)
    slow = rung(cache, 0.1, [(1.0, 500.0), (3.5, 4000.0), (6.0, 9000.0)])
    fast = rung(cache, 0.2, [(9.0, 7000.0), (12.5, 12000.0)], slower=1.25)
    fit = fit_cache_arm([fast, slow], cache, TRUTH.weight_bytes, {MODEL})
    assert fit.source == "slo.cell" and (fit.fitted.rows, fit.fitted.largest) == (3, pytest.approx(0.0, abs=1e-4))
    assert fit.model.t_fix_s == pytest.approx(TRUTH.t_fix_s, rel=1e-3)
    assert fit.model.bandwidth_bytes_s == pytest.approx(TRUTH.bandwidth_bytes_s, rel=1e-3)
    # Measured a quarter above the truth: predicted / measured - 1 = 1 / 1.25 - 1.
    assert fit.held_out is not None
    assert (fit.held_out.rows, fit.held_out.mean_absolute) == (2, pytest.approx(0.2, abs=1e-3))
    assert "t_fix 1.50 ms, 4.00 TB/s; 3 rows" in fit.describe() and "2 others predicted" in fit.describe()


def test_every_third_window_of_a_single_rung_is_predicted() -> None:
    cache = arm("kivi4")
    fit = fit_cache_arm(
        [rung(cache, 0.1, [(n, 5000.0) for n in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)])], cache, TRUTH.weight_bytes, {MODEL}
    )
    assert fit.held_out is not None and (fit.fitted.rows, fit.held_out.rows) == (5, 1)


def test_other_arms_plans_and_models_are_not_fitted() -> None:
    cache = arm("kivi4")
    places = [(1.0, 500.0), (6.0, 9000.0)]
    good = rung(cache, 0.1, places)
    for other in (
        rung(arm("bf16=stock"), 0.1, places),
        good.model_copy(update={"plan_sha256": "0" * 64}),
        good.model_copy(update={"model": "ouro-1.4b, 24 layers (dummy)"}),
        good.model_copy(update={"settings": {**good.settings, "steps": []}}),
    ):
        with pytest.raises(LoopKVError, match=r"no decode\.step_ms record and no slo\.cell"):
            fit_cache_arm([other], cache, TRUTH.weight_bytes, {MODEL})
        assert fit_cache_arm([other, good], cache, TRUTH.weight_bytes, {MODEL}).fitted.rows == 2


def test_decode_rows_come_first_and_must_be_of_this_model() -> None:
    cache = arm("kivi4")
    rows = [
        make_record(
            "decode.step_ms",
            1e3 * TRUTH.step_s(batch, 4e8),
            "ms",
            settings={
                "arm": "kivi4",
                "context_tokens": 8192,
                "batch": batch,
                "read_bytes_per_request": 4e8,
                "weight_bytes": TRUTH.weight_bytes,
            },
        )
        for batch in (1, 2, 4, 8)
    ]
    served = rung(cache, 0.1, [(1.0, 500.0), (6.0, 9000.0)], slower=3.0)
    fit = fit_cache_arm([served, *rows], cache, TRUTH.weight_bytes, {MODEL})
    assert fit.source == "decode.step_ms" and math.isclose(fit.model.t_fix_s, TRUTH.t_fix_s, rel_tol=1e-6)
    with pytest.raises(LoopKVError, match=r"1\.85 GB of weights"):
        fit_cache_arm(rows, cache, 10.07e9, {MODEL})
