"""Building kernels: what names a binary, and one clear sentence where there is none to be had."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.kernels import build as kernel_build
from loopkv.kernels.build import ARCHITECTURES, Build, architecture_of, build_command, main, obtain, queries_class

HOPPER = Build(128, 1, ARCHITECTURES["sm_90a"])


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.delenv("NVCC", raising=False)


def _compiler(folder: Path, script: str) -> str:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_name_depends_on_sources_flags_and_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {
        HOPPER.name,
        dataclasses.replace(HOPPER, head_dim=64).name,
        dataclasses.replace(HOPPER, queries=8).name,
        dataclasses.replace(HOPPER, arch=ARCHITECTURES["sm_80"]).name,
    }
    assert len(names) == 4
    (tmp_path / "page.cuh").write_text("// another source")
    monkeypatch.setattr(kernel_build, "SOURCES", tmp_path)
    assert HOPPER.name not in names


def test_shared_memory_of_every_release_build_fits() -> None:
    for build in kernel_build.release_builds():
        notes = 512 + build.queries_bytes
        for warps, ring in (
            (build.warps, build.ring_bytes),
            (build.int2_warps, build.int2_ring_bytes),
            (build.precision_warps, build.precision_ring_bytes),
            (build.mixed_warps, build.ring_bytes),
        ):
            assert 1 <= warps <= 16
            assert warps * (ring + notes) + (3 * 1024 + 4) * 4 <= build.arch.shared_bytes


def test_jit_switched_off_prints_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVCC", _compiler(tmp_path, "exit 0"))
    monkeypatch.setenv("LOOPKV_JIT", "0")
    with pytest.raises(UnsupportedError, match=r"LOOPKV_JIT=0.*python -m loopkv.kernels.build --head-dim 128"):
        obtain(HOPPER)


def test_no_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"no CUDA compiler \(nvcc\)"):
        obtain(HOPPER)


def test_a_compiled_binary_is_kept_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""if [ "$1" = --version ]; then echo "release 13.0"; exit 0; fi
echo run >> {log}
while [ "$1" != -o ]; do shift; done
echo binary > "$2" """
    monkeypatch.setenv("NVCC", _compiler(tmp_path, script))
    first = obtain(HOPPER)
    assert first.read_text() == "binary\n"
    assert obtain(HOPPER) == first
    assert log.read_text() == "run\n"
    assert [path.name for path in first.parent.iterdir()] == [HOPPER.name]  # nothing half-written beside it
    monkeypatch.setenv("LOOPKV_JIT", "0")
    assert obtain(HOPPER) == first


def test_a_failing_compiler_leaves_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = 'if [ "$1" = --version ]; then exit 0; fi\necho "page.cuh(3): error: no such thing" >&2; exit 1'
    monkeypatch.setenv("NVCC", _compiler(tmp_path, script))
    with pytest.raises(LoopKVError, match="error: no such thing"):
        obtain(HOPPER)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_unknown_architectures_are_refused() -> None:
    assert architecture_of((9, 0)).measured and not architecture_of((8, 0)).measured
    with pytest.raises(UnsupportedError, match="compute capability"):
        architecture_of((7, 5))


def test_queries_are_rounded_up_to_what_is_built() -> None:
    assert [queries_class(group) for group in (1, 2, 8, 9, 16)] == [1, 8, 8, 16, 16]


def test_the_list_says_what_never_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert all(("measured" in line) == ("sm_90a" in line) for line in lines)
    assert "nvcc" in build_command(HOPPER, Path("x.so"))[0]
