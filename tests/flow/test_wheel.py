"""A wheel carries what an installed package opens at run time: CUDA sources, the reference model, documents."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import loopkv

ROOT = Path(__file__).parents[2]
PACKAGE = Path(loopkv.__file__).parent
DATA = ("kernels/csrc", "reference")
"""Folders of the package that hold files which are read, not imported."""


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the sources (setuptools leaves files beside what it builds)."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    prebuilt = source / "src/loopkv/kernels/prebuilt"
    prebuilt.mkdir(exist_ok=True)
    (prebuilt / "d128-q1-sm_90a-0000000000000000.so").write_bytes(b"")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("loopkv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("folder", DATA)
def test_every_data_file_is_in_the_wheel(wheel_names: set[str], folder: str) -> None:
    files = [p for p in (PACKAGE / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert files
    missing = {f"loopkv/{p.relative_to(PACKAGE)}" for p in files} - wheel_names
    assert not missing


def test_compiled_kernels_travel_with_the_wheel(wheel_names: set[str]) -> None:
    assert "loopkv/kernels/prebuilt/d128-q1-sm_90a-0000000000000000.so" in wheel_names
