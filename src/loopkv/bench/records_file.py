"""A Records file written anew, whole: what benches do to drop a torn line, an old failure or replaced scores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from loopkv.artifacts.storage import write_atomically
from loopkv.errors import LoopKVError
from loopkv.records import Record


def rewrite_records(path: Path, records: Iterable[Record]) -> None:
    """Replace the file by ``records``; an interrupted write leaves it as it was.

    Raises:
        LoopKVError: a record that no file can hold, or a file that cannot be written.
    """
    try:
        lines = "".join(record.to_line() for record in records).encode()
    except ValueError as error:  # half a character of UTF-16, say
        got = str(error)[:120]
        raise LoopKVError(f"cannot write {path}", got=got, hint="remove the line that holds it") from None
    write_atomically(path, lines)
