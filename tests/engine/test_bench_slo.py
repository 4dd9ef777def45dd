"""``loopkv bench slo`` against a real ``vllm serve`` and its own client, on the CPU with the reference model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopkv.bench import slo_run
from loopkv.bench.workload import SMALL, generate, write_workload
from loopkv.cli.app import app
from loopkv.records import read_records
from loopkv.reference import model_folder

pytestmark = pytest.mark.engine


PLAN = Path(__file__).resolve().parents[2] / "results" / "reference" / "loopkv-m.json"


def test_one_rung_of_stock_vllm_and_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    traffic = dataclasses.replace(
        SMALL,
        mean_output_tokens=12,
        max_length_tokens=80,
        prompt_median_tokens=24,
        prompt_min_tokens=16,
        prompt_max_tokens=40,
    )
    requests = generate(traffic, 8, 1)
    write_workload(tmp_path / "work.jsonl", requests)
    output = tmp_path / "slo.jsonl"
    arguments = ["bench", "slo", str(tmp_path / "work.jsonl"), "--model", str(model_folder()), "--arm", "stock"]
    arguments += ["--arm", f"m={PLAN},tau=10"]
    arguments += ["--rates", "4", "--seeds", "101", "-o", str(output), "--work", str(tmp_path / "work")]
    arguments += ["--server-arg=--enforce-eager", "--server-arg=--max-num-seqs", "--server-arg=8"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    records = list(read_records([output]))
    cells = [r for r in records if r.what == "slo.cell"]
    assert [cell.settings["arm"] for cell in cells] == ["stock", "m"]
    assert [cell.plan_sha256 is None for cell in cells] == [True, False]
    for cell in cells:
        rows = cell.settings["requests"]
        assert [row["output_tokens"] for row in rows] == [request.output_tokens for request in requests]
        assert all(row["error"] is None and row["ttft_s"] > 0 for row in rows)
        assert cell.settings["preemptions"] == 0
        # The client sends in the pattern that the simulator replays: the last of 8 requests at 8 / 4 s.
        assert rows[0]["arrival_s"] == 0.0 and 1.0 < rows[-1]["arrival_s"] < 3.0
    assert {r.settings["tau0_rule"] for r in records if r.what == "slo.tau0_ms"} == {"own", "short"}
    assert sum(r.what == "slo.attainment" for r in records) == 2 * 2 * 5  # arms, tau0 rules, pairs of k and TTFT
    assert sum(r.what == "slo.capacity" for r in records) == 2 * 2 * 5
    assert sum(r.what == "slo.capacity_ratio" for r in records) == 2 * 5

    # The cell is known: a second run starts no server and scores the same.
    monkeypatch.setattr(slo_run, "starting_server", None)
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert again.exit_code == 0, again.output
    assert [(r.what, r.value) for r in read_records([output])] == [(r.what, r.value) for r in records]
