"""SHA-256 of a checkpoint's weight files, read once for all processes of one command.

A checkpoint has gigabytes, and both the command that starts an engine and the engine's own check ask for its hash. A
hash is kept under what the file system says of the files that it was made of, and handed to child processes in an
environment variable: nothing is written anywhere, and nothing that lies beside or inside a checkpoint can speak for it.
Whoever sets the environment of a command is believed, as with ``PYTHONPATH``: who can do that can also replace the code
that hashes. Programs that are not ours get an environment without the variable.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from loopkv.artifacts.storage import digest
from loopkv.errors import ModelFormatError

HANDED_ON = "LOOPKV_HASHED_FILES"
"""Environment variable of child processes: ``identity:sha256``, comma-separated, both in hex."""

SETTLED_NS = 2_000_000_000
"""A file that changed later than this before it was read may change again within one tick of the file system's clock,
and look the same: its hash is not kept."""

MAX_KEPT = 16

_kept: dict[str, str] = {}


def hash_files(files: Sequence[Path]) -> str:
    """SHA-256 (hex) over the SHA-256 of every file, in the order given; from memory where no file has changed.

    Raises:
        ModelFormatError: a file that cannot be read.
    """
    known = {**_read_handed_on(os.environ), **_kept}
    before = _identity(files)
    if before in known:
        return known[before]
    started_ns = time.time_ns()
    whole = hashlib.sha256()
    for file in files:
        whole.update(hash_file(file))
    if _identity(files) == before and all(_changed_ns(file) < started_ns - SETTLED_NS for file in files):
        while len(_kept) >= MAX_KEPT:
            del _kept[next(iter(_kept))]
        _kept[before] = whole.hexdigest()
    return whole.hexdigest()


def hash_file(file: Path) -> bytes:
    """SHA-256 of one file.

    Raises:
        ModelFormatError: it cannot be read.
    """
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").digest()
    except OSError as problem:
        raise ModelFormatError(f"{file}", got=problem.strerror, wanted="a readable file") from None


def handed_on() -> dict[str, str]:
    """Environment of a child process that need not read the files again which this one has hashed; may be empty."""
    text = ",".join(f"{identity}:{found}" for identity, found in _kept.items())
    return {HANDED_ON: text} if text else {}


def _read_handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    pairs = re.findall(r"(?:^|,)([0-9a-f]{64}):([0-9a-f]{64})(?=,|$)", environment.get(HANDED_ON, ""))
    return dict(pairs[:MAX_KEPT])


def _identity(files: Sequence[Path]) -> str:
    """Device, inode, size and times of every file. Nobody can set the time of the last change (ctime) back."""
    return digest(
        [
            [file.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            for file, status in ((file, _status(file)) for file in files)
        ]
    )


def _changed_ns(file: Path) -> int:
    status = _status(file)
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _status(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as problem:
        raise ModelFormatError(f"{file}", got=problem.strerror, wanted="a readable file") from None
