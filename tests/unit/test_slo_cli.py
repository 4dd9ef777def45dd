"""The arguments of ``loopkv bench slo``: each bad one is one sentence, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loopkv.bench import slo_run
from loopkv.bench.workload import Request, write_workload
from loopkv.cli.app import app
from loopkv.errors import LoopKVError
from loopkv.records import make_record


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches ``run_slo``, which does not run."""
    calls: list[Any] = []

    def run(settings: Any, *_: Any) -> Any:
        calls.append(settings)
        return slo_run.SloResult((), (), 0, (), {})

    monkeypatch.setattr(slo_run, "run_slo", run)
    write_workload(tmp_path / "w.jsonl", [Request(8, 8, "a b c d e f g h")] * 3)
    return calls


def invoke(tmp_path: Path, *arguments: str) -> Any:
    line = ["bench", "slo", str(tmp_path / "w.jsonl"), "--geometry", "tiny", "--arm", "kivi4"]
    line += ["-o", str(tmp_path / "slo.jsonl"), "--work", str(tmp_path / "work"), *arguments]
    return CliRunner().invoke(app, line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "101.7"), "--seeds"),
        (("--seeds", "4294967296"), "seeds"),
        (("--seeds", "-1"), "--seeds"),
        (("--seeds", "1,1"), "each seed once"),
        (("--pool", "nan"), "--pool"),
        (("--pool", "-1"), "--pool"),
        (("--pool", "1", "--server-arg=--kv-cache-memory-bytes=5"), "one of the two"),
        (("--rates", "kivi4=1", "--rates", "kivi4=2"), "two lists"),
        (("--tau0", "nan"), "tau0"),
        (("--max-seconds", "nan"), "max seconds"),
        (("--arm", "kivi2,prefill=zzz"), "exact or fast"),
    ],
)
def test_bad_arguments(tmp_path: Path, asked: list[Any], arguments: tuple[str, ...], message: str) -> None:
    done = invoke(tmp_path, "--rates", "1", *arguments)
    assert done.exit_code == 1 and isinstance(done.exception, LoopKVError)
    assert message in str(done.exception) and not asked


def test_what_is_given_is_what_runs(tmp_path: Path, asked: list[Any]) -> None:
    assert invoke(tmp_path, "--rates", "1,2", "--find", "4", "--server-arg=--max-model-len=99").exit_code == 0
    (settings,) = asked
    assert settings.ks == (2.0, 3.0, 5.0, 4.0) and settings.find_k == 4.0
    assert settings.server_arguments[0] == "--max-model-len=99" and "--max-model-len" not in settings.server_arguments
    assert invoke(tmp_path, "--rates", "1,2").exit_code == 0
    assert "--max-model-len" in asked[1].server_arguments


def test_an_arm_that_failed_makes_the_command_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_workload(tmp_path / "w.jsonl", [Request(8, 8)] * 3)
    failures = {"kivi4": LoopKVError("vllm serve")}
    monkeypatch.setattr(slo_run, "run_slo", lambda *_: slo_run.SloResult((), (), 2, ("kivi4 1", "kivi4 2"), failures))
    done = invoke(tmp_path, "--rates", "1,2")
    assert done.exit_code == 1 and "kivi4" in str(done.exception) and "left: kivi4 1, kivi4 2; run" in done.output


def test_an_interrupted_command_prints_what_it_came_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_workload(tmp_path / "w.jsonl", [Request(8, 8)] * 3)
    settings = {"arm": "kivi4", "k": 3.0, "ttft_s": 10.0, "tau0_ms": 2.0, "tau0_rule": "given", "lowest_rate": 1.0}
    capacity = make_record("slo.capacity", 1.0, "req/s", settings={**settings, "bound": "at_least"}, seed=101)

    def run(settings: Any, say: Any, interrupted: Any) -> Any:
        interrupted(slo_run.SloResult((capacity,), (capacity,), 1, ("kivi4 2",), {}))
        raise KeyboardInterrupt

    monkeypatch.setattr(slo_run, "run_slo", run)
    done = invoke(tmp_path, "--rates", "1,2")
    assert done.exit_code == 130 and ">=1" in done.output and "left: kivi4 2; run" in done.output
