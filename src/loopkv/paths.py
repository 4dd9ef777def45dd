"""Paths that a user gave, checked before work starts: inputs are regular files, outputs can be written.

A measurement of minutes must not end in "is a directory", and a named pipe must not hold a command for ever.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from loopkv.errors import LoopKVError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_input_file(path: Path, what: str, error: type[LoopKVError], wanted: str = "a regular file") -> int:
    """Refuse what is no regular file: a pipe would block, a device may never end.

    Args:
        path: the file, or a link to it.
        what: names it in the error.
        error: raised.
        wanted: kind of file, for the error.

    Returns:
        Its size in bytes.
    """
    try:
        status = path.stat()
    except OSError as problem:
        raise error(f"{what} {path}", got=problem.strerror, wanted=wanted) from None
    except ValueError as problem:  # a null byte in the path
        raise error(f"{what} {str(path)!r}", got=str(problem), wanted="a path") from None
    if kind := _irregular(status):
        raise error(f"{what} {path}", got=kind, wanted=wanted)
    return status.st_size


def check_output_file(path: Path | None) -> Path | None:
    """``path`` if a file can be written or appended to there; None passes.

    Raises:
        LoopKVError: a directory or another thing that is no file, a folder that is missing or not writable, or a
            compressed file: what is read as xz is not written as such.
    """
    if path is None:
        return None
    if path.suffix == ".xz":
        raise LoopKVError(
            f"cannot write {path}", got="a compressed file", wanted="plain text", hint="name it without .xz"
        )
    try:
        if path.exists():
            if kind := _irregular(path.stat()):
                raise LoopKVError(f"cannot write {path}", got=kind, wanted="a file")
            if not os.access(path, os.W_OK):
                raise LoopKVError(f"cannot write {path}", got="a file without write permission")
        folder = path.resolve().parent  # of the file behind a link
        if not folder.is_dir():
            got = f"no folder {folder}" if not folder.exists() else f"{folder}, which is no folder"
            raise LoopKVError(
                f"cannot write {path}", got=got, hint=f"make it first, or choose another: mkdir -p {folder}"
            )
        _try_to_write(folder)
    except (OSError, ValueError, RuntimeError) as problem:  # ValueError: a null byte; RuntimeError: links in a circle
        raise _unwritable(path, problem) from None
    return path


def check_output_folder(path: Path | None) -> Path | None:
    """``path`` if files can be written into that folder, which need not exist yet; None passes.

    Raises:
        LoopKVError: a file, or a place where no folder can be made or written to.
    """
    if path is None:
        return None
    try:
        if path.exists() and not path.is_dir():
            raise LoopKVError(f"cannot write into {path}", got="no folder", wanted="a folder, or a new name")
        nearest = path.resolve()
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise LoopKVError(f"cannot write into {path}", got=f"{nearest}, which is no folder", wanted="a folder")
        _try_to_write(nearest)
    except (OSError, ValueError, RuntimeError) as problem:
        raise _unwritable(path, problem) from None
    return path


def _irregular(status: os.stat_result) -> str | None:
    """What a path is, where it is no regular file."""
    if stat.S_ISREG(status.st_mode):
        return None
    return next((name for test, name in _KINDS if test(status.st_mode)), "no regular file")


def _try_to_write(folder: Path) -> None:
    """Make a file and remove it: permission bits alone say nothing about read-only and virtual file systems."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".loopkv-", suffix=".part")
    os.close(handle)
    with contextlib.suppress(OSError):
        os.unlink(name)  # noqa: PTH108


def _unwritable(path: Path, problem: OSError | ValueError | RuntimeError) -> LoopKVError:
    reason = problem.strerror if isinstance(problem, OSError) else str(problem)
    return LoopKVError(f"cannot write {str(path)!r}", got=reason, hint="choose a writable folder")


def exists(text: str) -> bool:
    """Whether something lies at ``text``; False for what cannot be a path (too long, or with a null character)."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False
