"""The decode benchmark without an engine: rows, jobs, components; what is resumed and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopkv.artifacts import Fingerprint
from loopkv.bench import decode
from loopkv.bench.arm_bytes import pairs_read
from loopkv.bench.arms import EngineArm, parse_arm, parse_arms
from loopkv.bench.components import component_of, component_times, launches_per_step
from loopkv.bench.decode import (
    ALL_SLOTS,
    TTFT_SLOT,
    DecodeSettings,
    Job,
    batch_of,
    engine_text,
    missing_rows,
    run_decode,
)
from loopkv.bench.decode_engine import engine_options
from loopkv.bench.decode_worker import Sweep, growth_tokens, start_hint
from loopkv.bench.dummy_model import SHAPES, dummy_shape, shape_size, write_dummy_model
from loopkv.capacity import KNOWN_MODELS
from loopkv.errors import LoopKVError
from loopkv.layout import lay_out
from loopkv.models.config import parse_ouro_config, read_config
from loopkv.planner import named_plan
from loopkv.records import Record, append_records, make_record, read_records

TINY = shape_size(SHAPES["tiny"])


def settings(tmp_path: Path, **changes: Any) -> DecodeSettings:
    fields: dict[str, Any] = {
        "model": tmp_path / "model",
        "dummy": True,
        "identity": Fingerprint(name="tiny", geometry=TINY.geometry),
        "step_parameters": TINY.step_parameters,
        "arms": parse_arms(["stock", "kivi4"]),
        "contexts": (400, 800),
        "batches": ("1", "peak"),
        "output": tmp_path / "d.jsonl",
        "work": tmp_path / "work",
        **changes,
    }
    return DecodeSettings(**fields)


@pytest.mark.parametrize(
    ("slot", "batch"),
    [("1", 1), ("7", 7), ("99", 24), ("peak", 24), ("peak/2", 12), ("3peak/4", 18), ("peak/5", 4), ("peak/100", 1)],
)
def test_batches_of_a_peak_of_24(slot: str, batch: int) -> None:
    assert batch_of(slot, 24) == batch


@pytest.mark.parametrize("slot", ["", "0", "-1", "half", "peak/", "2.5", "peak*2"])
def test_bad_batches_are_refused(slot: str, tmp_path: Path) -> None:
    with pytest.raises(LoopKVError):
        batch_of(slot, 8)
    with pytest.raises(LoopKVError):
        settings(tmp_path, batches=(slot,))


def kept(one: DecodeSettings, arm: str, context: int, slot: str, what: str = "decode.step_ms") -> Record:
    place = {
        "arm": arm,
        "spec": parse_arm(arm).spec,
        "engine": engine_text(one),
        "contents": one.contents,
        "context_tokens": context,
        "slot": slot,
    }
    place["arm"] = parse_arm(arm).label
    plan = parse_arm(arm).load_plan(one.identity)
    sha256 = None if plan is None else plan.sha256
    return make_record(what, 1.0, "ms", settings={**place, "batch": 1}, model=one.identity.name, plan_sha256=sha256)


def test_only_missing_rows_are_run(tmp_path: Path) -> None:
    one = settings(tmp_path)
    stock, kivi4 = one.arms
    every = ((400, "1"), (400, "peak"), (800, "1"), (800, "peak"))
    assert missing_rows(one, stock, []) == every
    records = [kept(one, "stock", 400, "1"), kept(one, "kivi4", 800, ALL_SLOTS, "decode.refused")]
    assert missing_rows(one, stock, records) == every[1:]
    assert missing_rows(one, kivi4, records) == every[:2]
    other = settings(tmp_path, engine={"gpu_memory_utilization": 0.9})
    assert missing_rows(other, stock, records) == every  # another engine, another measurement
    assert missing_rows(settings(tmp_path, prefill=True), stock, records) == every  # likewise other caches
    assert missing_rows(settings(tmp_path, ttft=True), stock, records)[:2] == ((400, TTFT_SLOT), (400, "peak"))


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": "NVIDIA H200"},
        {"versions": {"vllm": "0.1"}},
        {"model": "another"},
        {"weights_sha256": "a" * 64},
        {"plan_sha256": "b" * 64},
    ],
)
def test_rows_of_another_place_or_model_are_missing_here(tmp_path: Path, change: dict[str, Any]) -> None:
    one = settings(tmp_path)
    for arm in one.arms:
        row = kept(one, arm.label, 400, "1")
        assert len(missing_rows(one, arm, [row])) == 3
        assert len(missing_rows(one, arm, [row.model_copy(update=change)])) == 4


def test_rows_of_another_gpu_are_named_kept_and_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = settings(tmp_path, arms=parse_arms(["stock"]), contexts=(400,))
    rows = [kept(one, "stock", 400, "1"), kept(one, "stock", 400, "peak")]
    here = rows[0].hardware
    append_records(one.output, [r.model_copy(update={"hardware": "NVIDIA H200"}) for r in rows])
    ran: list[Any] = []
    monkeypatch.setattr(decode, "_run_arm", lambda settings, arm, rows, say: ran.append(rows))
    monkeypatch.setattr(decode, "slow_cores", lambda: "warning: slow")
    said: list[str] = []
    records = run_decode(one, said.append)
    assert ran == [((400, "1"), (400, "peak"))] and [r.hardware for r in records] == ["NVIDIA H200"] * 2
    assert said[0].startswith("2 rows of NVIDIA H200, vLLM ") and f"; this machine is {here}, vLLM " in said[0]
    assert said[1] == "warning: slow"
    append_records(one.output, rows)
    run_decode(one, said.append)
    assert len(ran) == 1 and said.count("warning: slow") == 1 and said[-1] == "stock: nothing missing"


def test_slots_of_one_batch_are_one_row(tmp_path: Path) -> None:
    one = settings(tmp_path, contexts=(400,), batches=("1", "peak/2", "16", "24", "peak"))
    stock = one.arms[0]
    row = kept(one, "stock", 400, "16")
    at_peak = row.model_copy(update={"settings": {**row.settings, "batch": 10, "peak_batch": 10}})
    # 16, 24 and peak are batch 10 where ten requests fit
    assert missing_rows(one, stock, [at_peak]) == ((400, "1"), (400, "peak/2"))


def test_an_engine_that_failed_is_tried_again(tmp_path: Path) -> None:
    one = settings(tmp_path)
    failed = kept(one, "stock", 400, "", "decode.refused")
    failed = failed.model_copy(update={"settings": {k: v for k, v in failed.settings.items() if k != "slot"}})
    assert len(missing_rows(one, one.arms[0], [failed])) == 4


def test_a_finished_file_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = settings(tmp_path, arms=parse_arms(["stock"]), contexts=(400,))
    append_records(one.output, [kept(one, "stock", 400, "1"), kept(one, "stock", 400, "peak")])
    with one.output.open("a") as file:
        file.write('{"what": "decode.st')
    monkeypatch.setattr(decode.subprocess, "Popen", None)
    said: list[str] = []
    records = run_decode(one, said.append)
    assert len(records) == 2 and said == ["stock: nothing missing"]


def test_an_arm_that_dies_leaves_a_record_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "WORKER", "loopkv.no_such_module")
    said: list[str] = []
    records = run_decode(settings(tmp_path), said.append)
    assert [r.settings["arm"] for r in records] == ["stock", "kivi4"]
    assert all(r.what == "decode.refused" and r.value is None for r in records)
    assert all("no_such_module" in r.settings["reason"] for r in records)


BROKEN = """import sys, traceback
try:
    raise ValueError("Available memory on node 0 (1.0/24.0 GiB) on startup is less than desired" + " and more" * 50)
except ValueError:
    traceback.print_exc()
print("hint: on a CPU, set VLLM_CPU_KVCACHE_SPACE=GIB")
sys.exit(3)
"""


def test_a_failure_to_start_says_what_was_raised_and_goes_when_the_arm_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(decode, "WORKER", "worker")
    one = settings(tmp_path, arms=parse_arms(["stock"]))
    other = kept(one, "kivi4", 400, "", "decode.refused")
    append_records(one.output, [kept(one, "stock", 800, ALL_SLOTS, "decode.refused"), other])
    for _ in range(2):  # the second run replaces the first one's Record
        *before, record = run_decode(one, lambda line: None)
        assert len(before) == 2, "a row that cannot run, and what another arm left, stay"
        assert record.settings["slot"] == decode.ENGINE_SLOT and "context_tokens" not in record.settings
        reason = record.settings["reason"]
        assert reason.startswith("the engine did not start: ValueError: Available memory on node 0 (1.0/24.0 GiB)")
        assert reason.endswith(" ... (hint: on a CPU, set VLLM_CPU_KVCACHE_SPACE=GIB)")
    (tmp_path / "worker.py").write_text("")
    assert len(run_decode(one, lambda line: None)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[rank0]: AssertionError: no version", "AssertionError: no version"),
        (
            "(Core pid=7) ERROR [core.py:1] torch.OutOfMemoryError: full",
            "torch.OutOfMemoryError: full",
        ),
        ("Killed", "Killed"),
    ],
)
def test_a_reason_starts_at_the_exception(line: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"Traceback\n{line}\n")
    assert decode._reason(tmp_path / "log", 1) == f"exit status 1: {reason}"


def test_a_hint_names_the_pool_only_where_nobody_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert "VLLM_CPU_KVCACHE_SPACE" in (start_hint({}) or "")
    assert start_hint({"kv_cache_memory_bytes": 1 << 30}) is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert start_hint({}) is None


def test_an_arm_out_of_time_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text("import time\n\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(decode, "WORKER", "sleeper")
    said: list[str] = []
    run_decode(settings(tmp_path, arms=parse_arms(["stock"]), arm_seconds=0.5), said.append)
    assert "out of time" in said[-1]


def test_bad_plans_are_refused_before_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.subprocess, "Popen", None)
    with pytest.raises(LoopKVError):
        run_decode(settings(tmp_path, arms=parse_arms(["stock", "kivi5"])), lambda line: None)
    for changes in (
        {"contexts": ()},
        {"contexts": (0,)},
        {"decode_steps": 0},
        {"arm_seconds": 0},
        {"ttft_prompts": 0},
        {"hot_share": 0},
    ):
        with pytest.raises(LoopKVError):
            settings(tmp_path, **changes)


def test_jobs_survive_their_file(tmp_path: Path) -> None:
    one = settings(tmp_path)
    job = job_of(one, parse_arm("tq=stock:turboquant_4bit_nc,skip_layers=2-4"), rows=((400, "1"), (400, "peak")))
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job and job.fingerprint == one.identity


def test_dummy_models_have_the_known_sizes(tmp_path: Path) -> None:
    for name, size in KNOWN_MODELS.items():
        assert shape_size(SHAPES[name]) == size
    folder = write_dummy_model(tmp_path / "m", dummy_shape("ouro-1.4b", 4))
    config = parse_ouro_config(read_config(folder), "config.json")
    assert (config.num_hidden_layers, config.total_ut_steps, config.attention_head_dim) == (4, 4, 128)
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(LoopKVError, match="geometry"):
        dummy_shape("ouro-9b")
    with pytest.raises(LoopKVError, match="layers"):
        dummy_shape("tiny", 0)


@pytest.mark.parametrize(
    ("kernel", "component"),
    [
        ("void attend_kernel<loopkv::Config<128, 1>>(AttendArgs)", "LoopKV attention"),
        ("code_kernel(CodeArgs)", "LoopKV coding"),
        ("append_kernel(AppendArgs)", "KV append"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "KV append"),
        ("void flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("nvjet_tst_128x64_64x9_2x1_v_bz_TNT", "matrix products"),
        ("void vllm::act_and_mul_kernel<...>", "norms and activations"),
        ("void vllm::rotary_embedding_kernel<...>", "norms and activations"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
        ("mystery", "other"),
    ],
)
def test_kernels_by_component(kernel: str, component: str) -> None:
    assert component_of(kernel) == component


def test_component_times_and_launches_are_per_step() -> None:
    times = component_times([("attend_kernel", 800.0), ("nvjet_a", 100.0), ("nvjet_b", 60.0)], steps=8)
    assert times == {"LoopKV attention": 100.0, "matrix products": 20.0}
    calls = {"cudaLaunchKernel": 80, "cudaGraphLaunch": 8, "cudaMemcpyAsync": 99, "aten::mm": 5, "cuLaunchKernelEx": 48}
    assert launches_per_step(calls, steps=8) == 17.0


def job_of(one: DecodeSettings, arm: EngineArm, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "arm": arm,
        "model": str(one.model),
        "dummy": True,
        "identity": one.identity.model_dump(mode="json"),
        "step_parameters": one.step_parameters,
        "rows": ((400, "1"),),
        "output": str(one.output),
        "engine": {},
        "settings": {"arm": arm.label},
        "decode_steps": 128,
        "components": False,
        "ttft_prompts": 4,
        "prefill": False,
        "hot_share": 0.2,
        "seed": 0,
        "command": "loopkv bench decode",
        **changes,
    }
    return Job(**fields)


def test_a_row_that_fails_leaves_its_reason_and_the_others_run(tmp_path: Path) -> None:
    """The largest batch is preempted in every try: it is refused, and the next smaller one starts with a fresh fill."""
    one = settings(tmp_path)
    live: list[str] = []
    fills: list[int] = []
    done: list[tuple[str, int, bool]] = []

    class Requests:
        """Twelve fit, whatever the context."""

        def __init__(self) -> None:
            self.live = live

        def peak(self, context: int, steps: int) -> int:
            return 12

        def fill(self, count: int, context: int) -> None:
            fills.append(count)
            live.extend(["r"] * count)

        def drop(self, count: int) -> None:
            del live[len(live) - count :]

    class FailingSweep(Sweep):
        def row(self, context: int, slot: str, peak: int, *, first: bool) -> None:
            if len(live) == 12:
                raise LoopKVError("arm kivi4", got="preemptions in every try")
            done.append((slot, len(live), first))

        def first_tokens(self, context: int, prompts: int) -> None:
            raise LoopKVError("arm kivi4", got="a prompt that ended without a token")

    held: Any = type("Held", (), {"plan": None})()
    requests: Any = Requests()
    engine: Any = None
    sweep = FailingSweep(job_of(one, one.arms[1]), engine, requests, held)
    sweep.run_context(400, ["ttft", "1", "peak/2", "16", "peak"])
    assert done == [("peak/2", 6, True), ("1", 1, False)] and fills == [12, 6] and live == []
    refused = list(read_records([one.output]))
    assert [(r.what, r.settings["slot"]) for r in refused] == [("decode.refused", "ttft"), ("decode.refused", "16")]
    assert "preemptions" in refused[1].settings["reason"]


def test_a_request_may_grow_by_every_row_of_its_context(tmp_path: Path) -> None:
    one = settings(tmp_path)
    job = job_of(one, one.arms[0], rows=((400, "1"), (400, "peak"), (800, "1")))
    # two rows at most: 4 tries of 128 steps, (2 + 2) x (32 + 8 profiled + 8 x 3 settling) steps, 16 to spare
    assert growth_tokens(job) == 4 * 128 + 4 * 64 + 16


def test_engine_options_follow_the_arm_and_end_with_the_job_s_own(tmp_path: Path) -> None:
    one = settings(tmp_path)
    stock = job_of(one, parse_arm("tq=stock:turboquant_4bit_nc,skip_layers=2-4"), engine={"max_num_seqs": 3})
    options = engine_options(stock, 1000, cuda=True)
    assert options["kv_cache_dtype"] == "turboquant_4bit_nc" and options["max_model_len"] == 1000
    assert options["kv_cache_dtype_skip_layers"] == ["2", "3", "4"]
    assert options["max_num_seqs"] == 3 and options["load_format"] == "dummy"
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY" and "enforce_eager" not in options
    assert "additional_config" not in options
    plan = job_of(one, parse_arm("kivi4"), dummy=False)
    options = engine_options(plan, 1000, cuda=False)
    assert options["enforce_eager"] and options["additional_config"] == plan.arm.additional_config()
    assert not {"kv_cache_dtype", "kv_cache_dtype_skip_layers", "load_format", "compilation_config"} & set(options)


def test_pairs_of_a_step_are_those_of_int4_histories() -> None:
    """A cell that shares reads its holder's history, which lies in the last loop; int2 values have no part to skip."""
    identity = Fingerprint(name="tiny", geometry=TINY.geometry)  # 3 loops of 2 layers, 2 kv heads
    for spec, cells in (("kivi4", 6), ("kivi2", 0), ("per-loop:int4,share,int2", 2), ("per-loop:share,int2,int4", 4)):
        layout = lay_out(named_plan(spec, identity))
        # 400 tokens: those from 128 on are exact, the first 32 the sink; 290 tokens: exact from 32 on, no history
        assert pairs_read(layout, [400, 290]) == (96 + 0) * 2 * cells
