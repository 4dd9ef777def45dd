"""``loopkv bench decode`` on the real engine, on the CPU: rows up to the resident peak, Records, resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopkv.bench import decode
from loopkv.cli.app import app
from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import read_records
from loopkv.report import write_records_report

pytestmark = pytest.mark.engine


def test_stock_and_a_plan_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # vLLM compiles its sampler even when eager
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # it would overrule the pool of 6 MiB
    output = tmp_path / "d.jsonl"
    arguments = ["bench", "decode", "--geometry", "tiny", "--arm", "bf16=stock", "--arm", "kivi4=kivi4,tau=14"]
    arguments += ["--contexts", "400", "--batches", "1,peak/2,peak", "--steps", "40", "--arm-seconds", "280", "--ttft"]
    arguments += ["--hot-share", "0.3", "--ttft-prompts", "3"]
    arguments += ["-o", str(output), "--work", str(tmp_path / "work")]
    arguments += ["--engine", '{"kv_cache_memory_bytes": 6291456, "max_num_seqs": 32}']
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    records = list(read_records([output]))
    assert done.exit_code == 0, done.output
    assert not [r for r in records if r.what == "decode.refused"], [r.settings for r in records]
    steps = [r for r in records if r.what == "decode.step_ms"]
    by_arm: dict[str, list[int]] = {}
    for record in steps:
        assert not RECORD_KINDS[record.what].missing(record) and record.value is not None and record.value > 0
        assert record.settings["resident"] and record.settings["mean_context_tokens"] >= 400
        by_arm.setdefault(record.settings["arm"], []).append(record.settings["batch"])
        assert len(record.samples) == (40 if record.settings["slot"] == "peak" else 32)  # a window grows over blocks
    assert set(by_arm) == {"bf16", "kivi4"}
    assert max(by_arm["kivi4"]) > max(by_arm["bf16"])  # one pool of 6 MiB holds more requests under the plan
    for arm, batches in by_arm.items():
        peak = next(r.settings["peak_batch"] for r in steps if r.settings["arm"] == arm)
        assert batches[0] == peak and batches[-1] == 1 and batches == sorted(batches, reverse=True)
    stock = next(r for r in steps if r.settings["arm"] == "bf16")
    # 3 loops x 2 layers x 2 (K, V) x 2 heads x 32 channels x 2 B
    assert stock.settings["stored_bytes"] == 1536
    assert stock.settings["hot_share"] is None and stock.settings["generated"]
    plan = next(r for r in steps if r.settings["arm"] == "kivi4")
    assert plan.settings["stored_bytes"] == 480 and plan.plan_sha256 is not None
    # caches of 0.3 hot were asked for; three pages, six heads and 48 rows give a rough share, far from all or nothing
    assert 0.15 < plan.settings["hot_share"] < 0.45 and plan.settings["contents"] == "generated, hot share 0.3"
    first = {r.settings["arm"]: r for r in records if r.what == "decode.ttft_ms"}
    together = {r.settings["arm"]: r for r in records if r.what == "decode.prefill_tok_s"}
    assert set(first) == set(together) == {"bf16", "kivi4"}
    assert all(len(r.samples) == 3 and r.value > 0 for r in first.values())
    assert all(r.settings["batch"] == 3 and r.value > 0 for r in together.values())
    assert "x bf16" in done.output and "Prefill (" in done.output

    # Nothing is measured twice, and the page draws what was measured.
    monkeypatch.setattr(decode.subprocess, "Popen", None)
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert again.exit_code == 0 and len(list(read_records([output]))) == len(records)
    page = write_records_report([output], tmp_path / "page.html").read_text()
    assert "Decode at 400 tokens" in page and "Step-time model" in page
