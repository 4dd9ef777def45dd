"""Counters of the workers and how they reach the server.

A worker counts where the work happens and writes a small file that other processes map; vLLM's own statistics carry no
foreign fields. The server process reads the files when Prometheus asks, and when vLLM prints its periodic log line.
Worker and server share a machine; on other nodes the counters stay in the workers' files.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import struct
import tempfile
from pathlib import Path

from loopkv.errors import LoopKVError

COUNTERS: dict[str, str] = {
    "pages_coded": "history pages coded since the start (a page of all cells counts once)",
    "clamped_values": "keys and values that were NaN or beyond fp16 when their page was coded",
    "hot_values": "history tokens per kv head that decode steps read with both value planes (V precision)",
    "decode_values": "history tokens per kv head that decode steps read under V precision",
    "history_pages": "history pages of the requests of the latest step (a shared prefix counts per request)",
    "pool_blocks": "blocks that the pool can hand out",
}
"""Names in the order of the file: one unsigned 64-bit integer each, behind the header."""

_HEADER = struct.Struct("<8sQ")
_MAGIC = b"loopkv01"
_BYTES = _HEADER.size + 8 * len(COUNTERS)


def counters_path(instance_id: str, engine: int, rank: int) -> Path:
    """File of one worker (``rank``) of one engine of a server (several with data parallelism)."""
    return Path(tempfile.gettempdir()) / f"loopkv-{os.getuid()}-{instance_id}-{engine}-{rank}.counters"


def remove_stale(folder: Path) -> None:
    """Remove the files of workers that were killed before they could."""
    for path in folder.glob(f"loopkv-{os.getuid()}-*.counters"):
        with contextlib.suppress(OSError, struct.error):
            magic, pid = _HEADER.unpack(path.read_bytes()[: _HEADER.size])
            if magic == _MAGIC and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
                path.unlink()


class Counters:
    """Counters of one worker. Without a path they stay in the process.

    The file is created for the user alone, removed by ``close``, and by the next worker on this machine otherwise.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.values = dict.fromkeys(COUNTERS, 0)
        self._path = path
        self._map: mmap.mmap | None = None
        if path is None:
            return
        remove_stale(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        try:
            handle = os.open(path, flags, 0o600)
        except OSError as problem:
            raise LoopKVError(
                f"counter file {path}", got=problem.strerror, wanted="a writable temporary folder"
            ) from None
        try:
            os.ftruncate(handle, _BYTES)
            self._map = mmap.mmap(handle, _BYTES)
        finally:
            os.close(handle)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, os.getpid())
        atexit.register(self.close)
        self.flush()

    def add(self, name: str, amount: int) -> None:
        """Count ``amount`` more."""
        self.values[name] += amount

    def set(self, name: str, value: int) -> None:
        """Set a gauge."""
        self.values[name] = value

    def flush(self) -> None:
        """Publish (a memory write of a few bytes)."""
        if self._map is not None:
            self._map[_HEADER.size :] = struct.pack(f"<{len(COUNTERS)}Q", *self.values.values())

    def close(self) -> None:
        """Remove the file."""
        if self._map is not None and self._path is not None:
            self._map.close()
            self._map = None
            with contextlib.suppress(OSError):
                self._path.unlink()


def read_counters(path: Path) -> dict[str, int] | None:
    """Counters another process published, or None where there are none (yet, or no longer)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _BYTES or _HEADER.unpack(data[: _HEADER.size])[0] != _MAGIC:
        return None
    return dict(zip(COUNTERS, struct.unpack(f"<{len(COUNTERS)}Q", data[_HEADER.size :]), strict=True))
