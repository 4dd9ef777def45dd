"""The package as a whole: what importing it costs."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["loopkv", "loopkv.artifacts", "loopkv.planner", "loopkv.records", "loopkv.report"])
def test_importing_the_numbers_side_imports_no_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
