"""Results of a long run, written as they come, so that a killed run continues where it stopped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loopkv.errors import LoopKVError
from loopkv.paths import check_input_file

_VERSION = 1


class Journal:
    """A JSON-lines file of named results that belong to one ``key`` (a hash of all that decides them).

    The first line names the key. A torn last line, which a kill leaves behind, is cut off. One process at a time.

    Args:
        path: the file; its parent folder is made.
        key: identity of the run; a file of another run is refused.
        restart: drop whatever the file holds.

    Raises:
        LoopKVError: another run's journal, one in use, or a file that is no journal.
    """

    def __init__(self, path: Path | str, key: str, *, restart: bool = False) -> None:
        self.path = Path(path)
        self._entries: dict[str, Any] = {}
        if self.path.exists():
            check_input_file(self.path, "journal", LoopKVError)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as problem:
            raise LoopKVError(
                f"cannot write {self.path}", got=problem.strerror, hint="choose a writable file"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise LoopKVError(
                f"journal {self.path}", got="another running process", wanted="one run at a time"
            ) from None
        try:
            self._load(key, restart)
        except BaseException:
            self._file.close()
            raise

    def _load(self, key: str, restart: bool) -> None:
        self._file.seek(0)
        data = self._file.read()
        if data and not _begins_like_a_journal(data):  # before anything is cut off: it may be a file that matters
            raise LoopKVError(f"journal {self.path}", got="a file that is no journal", hint="move it away")
        if restart:
            self._file.truncate(0)
            data = b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        header = {"journal": _VERSION, "key": key}
        if not whole:
            self._append(header)
            return
        try:
            rows = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
            found = rows[0]["key"] if rows[0]["journal"] == _VERSION else None
            self._entries = {str(row["name"]): row["value"] for row in rows[1:]}
        except (ValueError, KeyError, TypeError, IndexError):
            raise LoopKVError(f"journal {self.path}", got="a file that is no journal", hint="move it away") from None
        if found != key:
            raise LoopKVError(
                f"journal {self.path} belongs to another run",
                got=f"key {str(found)[:12]}",
                wanted=f"key {key[:12]} (this model, policy, documents and options)",
                hint="finish that run, delete the file (`loopkv profile --restart` does), or choose another",
            )

    def _append(self, row: dict[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())
        self._file.flush()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> Any:
        """The value written under ``name``."""
        return self._entries[name]

    def put(self, name: str, value: Any) -> None:
        """Write a value (plain JSON); it is on its way to the disk when this returns."""
        self._entries[name] = value
        self._append({"name": name, "value": value})

    def remove(self) -> None:
        """Delete the file: its results now live in the finished output."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the file, which stays."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def belongs_to(path: Path, key: str) -> bool:
    """Whether ``path`` is the journal of the run with this key, or of none yet; for those who may drop another's."""
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 16)
    except FileNotFoundError:
        return True
    try:
        header = json.loads(first)
    except ValueError:
        return not first
    return isinstance(header, dict) and header.get("key") == key


def count_kept(path: Path, key: str) -> int:
    """How many results of the run with this key ``path`` holds (0 where there is no such journal)."""
    if not path.is_file() or not belongs_to(path, key):
        return 0
    with path.open("rb") as file:
        return max(0, sum(line.endswith(b"\n") for line in file) - 1)


@contextlib.contextmanager
def going_on(path: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Where the body is interrupted, say how to go on: the same command reads ``path`` (None: it has no journal)."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if path is not None and path.is_file():
            say(f"measurements so far are kept in {path}: the same command goes on from there")
        raise


def _begins_like_a_journal(data: bytes) -> bool:
    """True for a journal of any key or version, and for the part of a header that a kill leaves."""
    start = b'{"journal": '
    return data.startswith(start) or start.startswith(data)
