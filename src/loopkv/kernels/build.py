"""Compiling the CUDA kernels: just in time with a cache on disk, or ahead of time into the package.

A binary is named by what it was made from (sources, flags, architecture), a cached one by its compiler too, so neither
is ever stale. Compilation happens aside and the result is renamed into place: processes may race.

    python -m loopkv.kernels.build --list                       what a release carries
    python -m loopkv.kernels.build --release --output DIR       compile all of it
    python -m loopkv.kernels.build --head-dim 128 --arch sm_90a compile one into the cache

Environment: ``LOOPKV_JIT=0`` never compiles, ``LOOPKV_CACHE_DIR`` is the cache (default ``~/.cache/loopkv``), ``NVCC``
names the compiler (default: on the PATH, then below ``CUDA_HOME``).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.records import environment_of_others

_HERE = Path(__file__).resolve().parent
SOURCES = _HERE / "csrc"
PREBUILT = _HERE / "prebuilt"
_UNITS = ("attend.cu",)
_KIB = 1024
_TABLE_BYTES = 14 * _KIB  # row tables and barriers beside the page buffers
_NOTES_BYTES = 640  # of a warp (csrc/notes.cuh)
_MAX_WARPS = 12  # 168 registers a thread
_MAX_WARPS_INT2 = 12  # 16 warps of 128 registers each: slower on an H200
_MAX_WARPS_PRECISION = 12  # 15: slower too


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GPU architecture.

    Args:
        name: as nvcc's ``code=``.
        shared_bytes: shared memory one block may have.
        bulk_copy: whether it has bulk asynchronous copies.
        measured: whether the kernels have been run on it here; the others are only compiled.
    """

    name: str
    shared_bytes: int
    bulk_copy: bool
    measured: bool


ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", 163 * _KIB, bulk_copy=False, measured=False),
        Architecture("sm_90a", 227 * _KIB, bulk_copy=True, measured=True),
        Architecture("sm_100a", 227 * _KIB, bulk_copy=True, measured=False),
        Architecture("sm_120a", 99 * _KIB, bulk_copy=True, measured=False),
    )
}
_BY_CAPABILITY = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}
HEAD_DIMS = (64, 96, 128, 256)
QUERIES = (1, 8, 16)
MIXED_TILES = 64  # of one launch of a mixed step: bounds its workspace
RELEASE_SHAPES = ((64, 1), (96, 1), (128, 1), (128, 8), (256, 8))
"""(head size, queries per kv head) of the models: looped-tiny, Huginn, Ouro, Nanbeige and LoopCoder, Dory."""


@dataclass(frozen=True, slots=True)
class Build:
    """One binary: a head size, queries per kv head it is made for (1, up to 8, up to 16), an architecture."""

    head_dim: int
    queries: int
    arch: Architecture

    @property
    def ring_bytes(self) -> int:
        """Page buffers of a warp: three int4 pages."""
        return 3 * 40 * self.head_dim

    @property
    def int2_ring_bytes(self) -> int:
        """The same for int2: five pages, or four where more warps share the memory."""
        many = _MAX_WARPS_INT2 > _MAX_WARPS and self.queries == 1 and self.head_dim == 128
        return 4 * 24 * self.head_dim if many else self.ring_bytes

    @property
    def precision_ring_bytes(self) -> int:
        """The same for V precision: three pages without the low plane, which has one buffer of its own."""
        return (3 * 32 + 8) * self.head_dim

    @property
    def warps(self) -> int:
        """Warps of a block: as many as page buffers and registers allow."""
        return self._warps(self.ring_bytes)

    @property
    def int2_warps(self) -> int:
        """The same for int2."""
        second = self.queries_bytes if self.head_dim in (64, 128) else 0  # a turn of two pages (csrc/attend.cuh: PAGES)
        return self._warps(self.int2_ring_bytes + second, _MAX_WARPS_INT2)

    @property
    def precision_warps(self) -> int:
        """The same for V precision."""
        return self._warps(self.precision_ring_bytes, _MAX_WARPS_PRECISION)

    @property
    def mixed_warps(self) -> int:
        """The same for mixed steps, whose tiles of 16 queries take twice the registers and a larger table."""
        return max(1, min(8, self._warps(self.ring_bytes + MIXED_TILES * 20 // 8)))

    @property
    def queries_bytes(self) -> int:
        """Digits of a warp in shared memory (csrc/integers.cuh: IntegerShared)."""
        return -(-6 * self.head_dim // 128) * 128 if self.queries == 1 else 0

    def _warps(self, ring_bytes: int, most: int = _MAX_WARPS) -> int:
        if self.head_dim > 128 or self.queries > 8:
            most = 8
        elif self.queries > 1 or self.head_dim < 128:
            most = min(most, _MAX_WARPS)
        warp_bytes = ring_bytes + self.queries_bytes + _NOTES_BYTES
        return max(1, min(most, (self.arch.shared_bytes - _TABLE_BYTES) // warp_bytes))

    def flags(self) -> tuple[str, ...]:
        """Everything on the compiler's command line but the files."""
        virtual = self.arch.name.replace("sm_", "compute_")
        return (
            "-std=c++17",
            "-O3",
            "--expt-relaxed-constexpr",
            f"-gencode=arch={virtual},code={self.arch.name}",
            f"-DLOOPKV_HEAD_DIM={self.head_dim}",
            f"-DLOOPKV_QUERY_TILES={-(-self.queries // 8)}",
            f"-DLOOPKV_SINGLE={int(self.queries == 1)}",
            f"-DLOOPKV_WARPS={self.warps}",
            f"-DLOOPKV_RING_BYTES={self.ring_bytes}",
            f"-DLOOPKV_WARPS_INT2={self.int2_warps}",
            f"-DLOOPKV_RING_BYTES_INT2={self.int2_ring_bytes}",
            f"-DLOOPKV_WARPS_PRECISION={self.precision_warps}",
            f"-DLOOPKV_RING_BYTES_PRECISION={self.precision_ring_bytes}",
            f"-DLOOPKV_WARPS_MIXED={self.mixed_warps}",
            f"-DLOOPKV_BULK_COPY={int(self.arch.bulk_copy)}",
            "-shared",
            "-Xcompiler=-fPIC",
        )

    @property
    def name(self) -> str:
        """File name of the binary: what it is and a hash of what it was made from."""
        digest = hashlib.sha256()
        for path in sorted(SOURCES.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update("\0".join(self.flags()).encode())
        return f"d{self.head_dim}-q{self.queries}-{self.arch.name}-{digest.hexdigest()[:16]}.so"


def release_builds() -> tuple[Build, ...]:
    """The binaries a wheel carries."""
    return tuple(
        Build(head_dim, queries, arch) for arch in ARCHITECTURES.values() for head_dim, queries in RELEASE_SHAPES
    )


def queries_class(group_queries: int) -> int:
    """The smallest binary that serves so many query heads per kv head."""
    return next(queries for queries in QUERIES if group_queries <= queries)


def architecture_of(capability: tuple[int, int]) -> Architecture:
    """The architecture whose code runs on a device of a compute capability.

    Raises:
        UnsupportedError: none.
    """
    name = _BY_CAPABILITY.get(capability)
    if name is None:
        raise UnsupportedError(
            "CUDA kernels: compute capability",
            got=".".join(map(str, capability)),
            wanted=", ".join(f"{major}.{minor}" for major, minor in _BY_CAPABILITY),
            hint="serve on another GPU",
        )
    return ARCHITECTURES[name]


def cache_folder() -> Path:
    """Where compiled binaries are kept."""
    chosen = os.environ.get("LOOPKV_CACHE_DIR")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "loopkv") / "kernels"


def find_compiler() -> str | None:
    """Path of nvcc, or None."""
    named = os.environ.get("NVCC")
    if named:
        return shutil.which(named)
    found = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return found or shutil.which("nvcc", path=str(Path(home) / "bin"))


@functools.cache
def _compiler_version(compiler: str) -> str:
    try:
        command = [compiler, "--version"]
        told = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60, env=environment_of_others()
        )
        return told.stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LoopKVError("CUDA compiler", got=str(error)[:200], wanted=f"{compiler} --version to run") from None


def build_command(build: Build, output: Path, compiler: str = "nvcc") -> list[str]:
    """The command that compiles a binary."""
    return [compiler, *build.flags(), "-o", str(output), *(str(SOURCES / unit) for unit in _UNITS)]


def compile_to(build: Build, target: Path, compiler: str) -> None:
    """Compile aside and rename into place.

    Raises:
        LoopKVError: the compiler fails; the first error it printed is in the message.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    try:
        command = build_command(build, Path(aside), compiler)
        result = subprocess.run(command, capture_output=True, text=True, env=environment_of_others())
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line or "fatal" in line]
            raise LoopKVError(
                f"compiling the CUDA kernels for head size {build.head_dim}, {build.arch.name}",
                got=(lines or result.stderr.splitlines() or ["no message"])[0][:300],
                hint=f"to see all of it: {' '.join(build_command(build, target))}",
            )
        Path(aside).chmod(0o755)
        Path(aside).replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(aside).unlink()


def obtain(build: Build) -> Path:
    """The binary: from the package, from the cache, or compiled now.

    Raises:
        UnsupportedError: not there and not to be had, with the command that mends it.
    """
    shipped = PREBUILT / build.name
    if shipped.exists():
        return shipped
    compiler = find_compiler()
    by_hand = f"python -m loopkv.kernels.build --head-dim {build.head_dim} --queries {build.queries}"
    by_hand += f" --arch {build.arch.name}"
    if os.environ.get("LOOPKV_JIT") == "0" or compiler is None:
        found = sorted(cache_folder().glob(f"*/{build.name}"))
        if found:
            return found[0]
        reason = "compiling is switched off (LOOPKV_JIT=0)" if compiler else "no CUDA compiler (nvcc)"
        raise UnsupportedError(
            f"CUDA kernels for head size {build.head_dim}, {build.arch.name}",
            got=f"no binary, and {reason}",
            wanted=f"{build.name} in {cache_folder()} or nvcc 12.4 or later on the PATH",
            hint=f"on a machine with nvcc: {by_hand}",
        )
    version = hashlib.sha256(_compiler_version(compiler).encode()).hexdigest()[:12]
    target = cache_folder() / version / build.name
    if not target.exists():
        compile_to(build, target, compiler)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m loopkv.kernels.build``."""
    parser = argparse.ArgumentParser(prog="python -m loopkv.kernels.build", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the binaries of a release")
    parser.add_argument("--release", action="store_true", help="compile all of them")
    parser.add_argument("--output", type=Path, default=PREBUILT, help="folder for --release")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS)
    parser.add_argument("--queries", type=int, choices=QUERIES, default=1, help="query heads per kv head, at most")
    parser.add_argument("--arch", choices=tuple(ARCHITECTURES), default="sm_90a")
    options = parser.parse_args(arguments)
    try:
        if options.list:
            for build in release_builds():
                ran = "measured" if build.arch.measured else "compiled only, never run here"
                print(f"{build.name}  {build.warps}/{build.precision_warps}/{build.mixed_warps} warps  ({ran})")
        elif options.release:
            compiler = find_compiler()
            if compiler is None:
                raise UnsupportedError(
                    "CUDA compiler", got="none", wanted="nvcc on the PATH", hint="set NVCC=/path/nvcc"
                )
            for build in release_builds():
                print(f"compiling {build.name}", flush=True)
                compile_to(build, options.output / build.name, compiler)
        elif options.head_dim:
            print(obtain(Build(options.head_dim, options.queries, ARCHITECTURES[options.arch])))
        else:
            parser.print_help()
    except LoopKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
