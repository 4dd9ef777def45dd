"""compute-sanitizer over a small run of every kernel: no bad access, no race, nothing uninitialised read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_CASE = Path(__file__).with_name("sanitized_case.py")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_is_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # initcheck must see every write, those of PyTorch's kernels too
    options = [] if tool == "initcheck" else ["--kernel-regex", "kns=loopkv"]
    result = subprocess.run(
        [sanitizer, "--tool", tool, *options, "--error-exitcode", "9", sys.executable, str(_CASE)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert "ran every kernel" in result.stdout
