"""GPU tests: kernels on a CUDA device. Elsewhere they are skipped, saying so."""

from __future__ import annotations

import os
import time

import pytest
import torch

from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import append_records, make_record

_STARTED = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="no CUDA device: run `make test-gpu` on a machine with one"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what ran where; with LOOPKV_RECORDS=FILE also as a Record."""
    if not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" in os.environ:
        return
    count = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    settings = {"failed": count["failed"] + count["error"], "skipped": count["skipped"]}
    record = make_record(
        "tests.gpu",
        count["passed"],
        RECORD_KINDS["tests.gpu"].unit,
        settings={**settings, "seconds": round(time.monotonic() - _STARTED, 1)},
        command="make test-gpu",
    )
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    terminalreporter.write_line(f"{record.hardware}, driver {record.driver}, commit {record.commit}; {versions}")
    file = os.environ.get("LOOPKV_RECORDS")
    if file:
        append_records(file, [record])
