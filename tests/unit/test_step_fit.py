"""Step-time fits from the Records of decode benchmarks and of served ladders."""

from __future__ import annotations

import math
import re
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


def decode_rows(cache: CacheArm, batches: Sequence[int] = (1, 2, 4, 8)) -> list[Record]:
    """Rows that show ``TRUTH``."""
    return [
        make_record(
            "decode.step_ms",
            1e3 * TRUTH.step_s(batch, 4e8),
            "ms",
            plan_sha256=cache.plan_sha256,
            settings={
                "arm": cache.name,
                "context_tokens": 8192,
                "batch": batch,
                "read_bytes_per_request": 4e8,
                "weight_bytes": TRUTH.weight_bytes,
            },
        )
        for batch in batches
    ]


def test_decode_rows_come_first_and_must_be_of_this_model() -> None:
    cache = arm("kivi4")
    rows = decode_rows(cache)
    served = rung(cache, 0.1, [(1.0, 500.0), (6.0, 9000.0)], slower=3.0)
    fit = fit_cache_arm([served, *rows], cache, TRUTH.weight_bytes, {MODEL})
    assert fit.source == "decode.step_ms" and math.isclose(fit.model.t_fix_s, TRUTH.t_fix_s, rel_tol=1e-6)
    with pytest.raises(LoopKVError, match=r"1\.85 GB of weights"):
        fit_cache_arm(rows, cache, 10.07e9, {MODEL})


def test_rows_of_several_gpus_plans_or_workloads_are_not_fitted_together() -> None:
    cache, stock = arm("kivi4"), arm("bf16=stock")
    rows = decode_rows(cache)
    changed = {"hardware": "L40S"}, {"plan_sha256": "f" * 64}
    for update, words in zip(changed, ("2 machines .*L40S", f"2 plans .*{'f' * 12}"), strict=True):
        with pytest.raises(LoopKVError, match=words):
            fit_cache_arm([*rows[:2], *(row.model_copy(update=update) for row in rows)], cache, 1.85e9, {MODEL})
    with pytest.raises(LoopKVError, match="rows of plan"):
        relabelled = [r.model_copy(update={"settings": {**r.settings, "arm": "bf16"}}) for r in rows]
        fit_cache_arm(relabelled, stock, 1.85e9, {MODEL})
    served = rung(cache, 0.1, [(1.0, 500.0), (6.0, 9000.0)])
    with pytest.raises(LoopKVError, match="2 machines"):
        fit_cache_arm([served, served.model_copy(update=changed[0])], cache, 1.85e9, {MODEL})
    other = served.model_copy(update={"settings": {**served.settings, "workload": "b" * 12}})
    with pytest.raises(LoopKVError, match="2 workloads"):
        fit_cache_arm([served, other], cache, 1.85e9, {MODEL})


def test_a_file_without_rows_of_the_arm_says_what_it_has() -> None:
    cache = arm("kivi4")
    with pytest.raises(LoopKVError, match=r"in none\.jsonl.* of its 0 Records none"):
        fit_cache_arm([], cache, 1.85e9, {MODEL}, "none.jsonl")
    mine = [*decode_rows(arm("a=kivi4")), rung(arm("b=kivi4"), 1.0, [(1.0, 500.0)])]
    with pytest.raises(LoopKVError, match=rf"arms a, b, of None; {re.escape(MODEL)}"):
        fit_cache_arm(mine, cache, 1.85e9, {MODEL})


def test_an_error_above_15_percent_is_a_warning() -> None:
    cache = arm("kivi4")
    good = rung(cache, 0.1, [(1.0, 500.0), (3.5, 4000.0), (6.0, 9000.0)])
    assert fit_cache_arm([good], cache, TRUTH.weight_bytes, {MODEL}).warnings() == []
    # Measured a third above the truth: predicted / measured - 1 = -25%.
    far = rung(cache, 0.2, [(9.0, 7000.0)], slower=4 / 3)
    (said,) = fit_cache_arm([good, far], cache, TRUTH.weight_bytes, {MODEL}).warnings()
    assert "25% (others)" in said


def test_a_bandwidth_above_the_datasheet_of_the_rows_gpu_is_a_warning() -> None:
    cache = arm("kivi4")
    # TRUTH reads 4 TB/s: below an H200's 4.8, above an H100's 3.35 and an A100's 2.039; of a CPU nothing is known.
    for rows in (decode_rows(cache), [rung(cache, 0.1, [(1.0, 500.0), (3.5, 4000.0), (6.0, 9000.0)])]):
        for hardware, most in (
            ("NVIDIA H200", None),
            ("NVIDIA H100 80GB HBM3", "3.35 TB/s"),
            ("NVIDIA A100-SXM4-80GB", "2.039 TB/s"),
            ("AMD EPYC, 2 cores", None),
        ):
            measured = [row.model_copy(update={"hardware": hardware}) for row in rows]
            told = fit_cache_arm(measured, cache, TRUTH.weight_bytes, {MODEL}).warnings()
            if most is None:
                assert told == []
            else:
                (said,) = told
                assert said.startswith(
                    f"the fitted bandwidth, 4.00 TB/s, is above the datasheet's {most} of {hardware}"
                )
                assert "do not determine a bandwidth" in said


def test_rows_of_one_commit_are_fitted_those_of_the_commit_that_has_most() -> None:
    cache = arm("kivi4")

    def of(commit: str, rows: Sequence[Record], times: float = 1.0) -> list[Record]:
        return [row.model_copy(update={"commit": commit, "value": times * (row.value or 0)}) for row in rows]

    mixed = [*of("b" * 40, decode_rows(cache, (1,)), 3.0), *of("a" * 40, decode_rows(cache))]
    fit = fit_cache_arm(mixed, cache, TRUTH.weight_bytes, {MODEL})
    assert math.isclose(fit.model.t_fix_s, TRUTH.t_fix_s, rel_tol=1e-6) and fit.left_out == 1
    assert fit.describe().endswith("; commit aaaaaaa, 1 record of others left out")
    places = [(1.0, 500.0), (3.5, 4000.0), (6.0, 9000.0)]
    served = [*of("a" * 40, [rung(cache, r, places) for r in (0.1, 0.2)]), *of("b" * 40, [rung(cache, 0.3, places, 2)])]
    fit = fit_cache_arm(served, cache, TRUTH.weight_bytes, {MODEL})
    assert fit.held_out is not None and (fit.fitted.rows, fit.held_out.rows, fit.left_out) == (3, 3, 1)
    assert fit.commit == "a" * 40 and fit.held_out.mean_absolute < 1e-3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("batch", value) for value in ("x", None, math.inf, 1.9, 0, True, [8])),
        *(("read_bytes_per_request", value) for value in (math.inf, 1e308, -1.0, math.nan, 10**400, "4e8")),
        *(("weight_bytes", value) for value in (math.inf, "all")),
    ],
)
def test_a_broken_decode_row_is_named(key: str, value: object) -> None:
    cache = arm("kivi4")
    rows = decode_rows(cache)
    rows[2] = rows[2].model_copy(update={"settings": {**rows[2].settings, key: value}})
    with pytest.raises(LoopKVError, match=rf"f\.jsonl, record 3: {key}, got"):
        fit_cache_arm(rows, cache, TRUTH.weight_bytes, {MODEL}, "f.jsonl")
    rows[2] = rows[2].model_copy(update={"settings": {**rows[2].settings, "arm": "another"}})
    fit_cache_arm(rows, cache, TRUTH.weight_bytes, {MODEL}, "f.jsonl")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rate_per_s", value) for value in (None, "fast", 0, math.inf, math.nan)),
        *(("steps", [[0.0, 1.0, context, 5.0]]) for context in (-5e9, math.inf, math.nan, 10**400)),
        *(("steps", [[0.0, batch, 500.0, 5.0]]) for batch in (0.0, math.inf, None)),
        *(("steps", value) for value in (3, [[1.0]], [3], "abc")),
    ],
)
def test_a_broken_rung_is_named(key: str, value: object) -> None:
    cache = arm("kivi4")
    good = rung(cache, 0.1, [(1.0, 500.0), (6.0, 9000.0)])
    bad = good.model_copy(update={"settings": {**good.settings, key: value}})
    with pytest.raises(LoopKVError, match=rf"f\.jsonl, record 2: {key}, got"):
        fit_cache_arm([good, bad], cache, TRUTH.weight_bytes, {MODEL}, "f.jsonl")
