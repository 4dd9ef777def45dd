"""Capacity: exact values by hand for one case, the paper's served peaks within its own stated distance, refusals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from loopkv.artifacts import Fingerprint
from loopkv.capacity import (
    GPUS,
    KNOWN_MODELS,
    Gpu,
    datasheet_bandwidth,
    get_gpu,
    get_model_size,
    ouro_size,
    predict_capacity,
)
from loopkv.errors import LoopKVError, PlanMismatchError, UnsupportedError
from loopkv.layout import lay_out
from loopkv.planner import named_plan
from loopkv.records import of_one_commit, read_records
from loopkv.step_time import StepRow, StepTimeModel

ROOT = Path(__file__).resolve().parents[2]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OURO = KNOWN_MODELS["ouro-1.4b"]
MODEL = Fingerprint(name="Ouro-1.4B", geometry=OURO.geometry)


def test_parameters_are_the_published_ones() -> None:
    assert OURO.parameters == 1_434_652_673
    assert KNOWN_MODELS["ouro-2.6b"].parameters == 2_667_974_657
    assert len(KNOWN_MODELS["ouro-2.6b"].geometry.cells) == 192


def test_weights_read_per_step_are_the_papers() -> None:
    # 24 layers x 51,388,416 + the norm, four times, + head 49,152 x 2,048, in BF16: the paper's W_T = 10.07 GB.
    assert OURO.step_parameters == 4 * (24 * 51_388_416 + 2048) + 49_152 * 2_048
    assert OURO.step_parameters * 2 == pytest.approx(10.07e9, rel=1e-3)


def test_tied_embeddings_are_counted_once() -> None:
    fields = {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 896,
        "layers": 4,
        "loops": 4,
        "query_heads": 6,
        "kv_heads": 6,
        "head_dim": 64,
    }
    tied, untied = (ouro_size(**fields, tied=value) for value in (True, False))
    assert untied.parameters - tied.parameters == 4096 * 384
    assert tied.step_parameters == untied.step_parameters
    # looped-tiny: "8.07M parameters"
    assert round(tied.parameters / 1e6, 2) == 8.07


def test_one_prediction_by_hand() -> None:
    gpu = Gpu("x", 32 * GIB, 1e12, 5e-3, "made up")
    found = predict_capacity([named_plan("kivi4-share3", MODEL)], OURO, gpu, 8192, utilization=0.5, reserve_bytes=GIB)
    assert found.weight_bytes == 2 * 1_434_652_673
    assert found.pool_bytes == 16 * GIB - 2 * 1_434_652_673 - GIB
    assert [arm.name for arm in found.arms] == ["BF16 (stock)", "KIVI-4", "kivi4-share3"]
    stock, kivi4, shared = found.arms
    assert stock.request_bytes == stock.request_read_bytes == 8192 * 768 * KIB
    assert stock.requests == (13 * GIB - 2 * 1_434_652_673 + 2 * GIB) // (6 * GIB) == 2
    # 7,904 history tokens and 288 exact ones (see test_step_time); reads of a shared cell are its source's.
    assert kivi4.request_read_bytes == shared.request_read_bytes == 7904 * 240 * KIB + 288 * 768 * KIB
    assert (shared.stored_bytes, shared.read_bytes) == (180 * KIB, 240 * KIB)
    assert shared.request_bytes == lay_out(named_plan("kivi4-share3", MODEL)).request_bytes(8192)
    assert shared.requests == found.pool_bytes // shared.request_bytes > kivi4.requests
    step = 5e-3 + (OURO.step_parameters * 2 + kivi4.requests * kivi4.request_read_bytes) / 1e12
    assert kivi4.step_s == pytest.approx(step, rel=1e-12)
    assert kivi4.tokens_per_s == pytest.approx(kivi4.requests / step, rel=1e-12)


def test_a_hot_share_adds_rows_and_changes_reads_alone() -> None:
    plans = [named_plan("int2-loops", MODEL), named_plan("kivi2", MODEL)]
    found = predict_capacity(plans, OURO, get_gpu("H200"), 8192, hot_share=0.25)
    # kivi2 has no int4 value, hence no second plane to skip.
    assert [a.name for a in found.arms[1:]] == ["KIVI-4", "KIVI-4 + V", "int2-loops", "int2-loops + V", "kivi2"]
    plain, precise = found.arms[1:3]
    assert precise.read_bytes == 240 * KIB - 0.75 * 96 * 512
    assert precise.request_bytes == plain.request_bytes and precise.tokens_per_s > plain.tokens_per_s


def test_kivi4_is_shown_once() -> None:
    found = predict_capacity([named_plan("kivi4", MODEL, tau=14.0)], OURO, get_gpu("H200"), 8192)
    assert [a.name for a in found.arms] == ["BF16 (stock)", "KIVI-4"]


@pytest.mark.parametrize(
    ("context", "plan", "batch", "tokens_per_s"),
    # Paper Table 11: measured peaks on an RTX PRO 6000, which "lie at 98-103% of Eq. 1".
    [
        (8192, "kivi4", 34, 494.4),
        (8192, "kivi4-share3", 40, 505.4),
        (16384, "kivi4", 14, 249.1),
        (16384, "kivi4-share3", 20, 264.2),
    ],
)
def test_the_papers_served_peaks(context: int, plan: str, batch: int, tokens_per_s: float) -> None:
    found = predict_capacity(
        [named_plan(plan, MODEL)], OURO, get_gpu("rtx pro 6000"), context, utilization=0.9, max_requests=batch
    )
    arm = found.arms[-1]
    assert arm.requests == batch
    assert arm.tokens_per_s == pytest.approx(tokens_per_s, rel=0.07)  # 0.936 to 0.966 of the measured


def test_the_h200_is_the_one_of_the_records() -> None:
    """Its constants are a fit of stock vLLM's rows: as good as a fit made now, and right where one request is alone."""
    records = [
        r
        for r in read_records([ROOT / "results" / "decode.jsonl"])
        if r.what == "decode.step_ms" and r.settings["arm"] == "bf16"
    ]
    kept, _ = of_one_commit(records)
    assert {r.hardware for r in kept} == {"NVIDIA H200"}
    rows = [StepRow(float(r.value or 0) / 1e3, r.settings["batch"], r.settings["read_bytes_per_request"]) for r in kept]
    gpu, weight_bytes = get_gpu("H200"), float(OURO.step_parameters * 2)
    listed = StepTimeModel(gpu.t_fix_s, weight_bytes, gpu.bandwidth_bytes_s)
    assert listed.error(rows).mean_absolute < StepTimeModel.fit(rows, weight_bytes).error(rows).mean_absolute + 0.02
    alone = next(
        row for r, row in zip(kept, rows, strict=True) if (r.settings["context_tokens"], row.batch) == (8192, 1)
    )
    assert predict_capacity([], OURO, gpu, 8192).arms[0].single_step_s == pytest.approx(alone.step_s, rel=0.05)


def test_t_fix_scales_with_the_cells() -> None:
    deep = get_model_size("Ouro-2.6B")
    found = predict_capacity([], deep, get_gpu("H200"), 8192)
    assert found.step_time.t_fix_s == pytest.approx(2 * get_gpu("H200").t_fix_s, rel=1e-12)


def test_nothing_fits_is_zero_not_an_error() -> None:
    found = predict_capacity([], OURO, get_gpu("RTX-PRO-4500"), 65536)
    assert found.arms[0].requests == 0 and found.arms[0].tokens_per_s == 0.0 and math.isnan(found.arms[0].step_s)
    assert found.arms[1].requests >= 1


def test_what_cannot_be_predicted_is_refused() -> None:
    gpu = get_gpu("H200")
    other = Fingerprint(name="tiny", geometry=OURO.geometry.model_copy(update={"layers": 4}))
    with pytest.raises(PlanMismatchError, match="layers"):
        predict_capacity([named_plan("kivi4", other)], OURO, gpu, 8192)
    for arguments, match in (
        ({"context_tokens": 0}, "context"),
        ({"context_tokens": 1 << 40}, "context"),
        ({"context_tokens": 8192, "hot_share": 1.5}, "hot share"),
        ({"context_tokens": 8192, "hot_share": math.nan}, "hot share"),
        ({"context_tokens": 8192, "utilization": 0.0}, "utilization"),
        ({"context_tokens": 8192, "max_requests": 0}, "max requests"),
        ({"context_tokens": 8192, "utilization": 0.01}, "weights and activations"),
    ):
        with pytest.raises(LoopKVError, match=match):
            predict_capacity([], OURO, gpu, **arguments)  # type: ignore[arg-type]


def test_the_datasheet_of_a_gpu_by_the_name_that_cuda_gives_it() -> None:
    for hardware, tb_s in (
        ("NVIDIA H200", 4.8),
        ("NVIDIA H200 NVL", 4.8),
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA A100-SXM4-80GB", 2.039),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1.792),
        ("NVIDIA L40S", 0.864),
        ("NVIDIA L4", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("AMD EPYC, 2 cores", None),
        ("", None),
    ):
        assert datasheet_bandwidth(hardware) == (None if tb_s is None else pytest.approx(tb_s * 1e12)), hardware
    for gpu in GPUS.values():  # no step is faster than the memory
        assert gpu.datasheet_bytes_s is not None and gpu.bandwidth_bytes_s < gpu.datasheet_bytes_s


def test_gpu_and_model_tables() -> None:
    for name, gpu in GPUS.items():
        assert get_gpu(name.lower()) is gpu and gpu.source
        assert get_gpu(f"NVIDIA {name}") is gpu and get_gpu(f" nvidia_{name.lower()}") is gpu
    with pytest.raises(UnsupportedError, match=r"did you mean H100\? or --memory GIB --bandwidth TB/S --t-fix MS$"):
        get_gpu("h10")
    with pytest.raises(UnsupportedError, match="did you mean A100-80"):
        get_gpu("A100")
    for unlike in ("tpu", "V100", "B200", "A10", "RTX 4090"):
        with pytest.raises(UnsupportedError, match=r"L40S, or --memory GIB --bandwidth TB/S --t-fix MS$"):
            get_gpu(unlike)
    with pytest.raises(UnsupportedError, match=r"did you mean ouro-1.4b"):
        get_model_size("ouro1.4")
    for field, value in (("memory_bytes", 0), ("bandwidth_bytes_s", math.nan), ("t_fix_s", -1.0)):
        with pytest.raises(LoopKVError, match="GPU x"):
            Gpu(
                **{"name": "x", "memory_bytes": 1, "bandwidth_bytes_s": 1.0, "t_fix_s": 0.0, "source": "", field: value}
            )
