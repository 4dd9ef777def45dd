"""Counters of the workers and how they reach the server.

A worker counts where the work happens and writes a small file that other processes map; vLLM's own statistics carry no
foreign fields. The server process reads the files when Prometheus asks, and when vLLM prints its periodic log line.
Worker and server share a machine; on other nodes the counters stay in the workers' files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import multiprocessing.util
import os
import struct
import tempfile
from pathlib import Path

logger = logging.getLogger("vllm.loopkv")

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
    """Remove the files of workers that were killed before they could.

    A living worker holds a lock on its file, which is seen from other PID namespaces too; its process number is not.
    """
    for path in folder.glob(f"loopkv-{os.getuid()}-*.counters"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read(len(_MAGIC)) == _MAGIC:  # without it: not ours, or about to be locked by its owner
                path.unlink()


class Counters:
    """Counters of one worker. Without a path, or where no file can be made, they stay in the process.

    The file is created for the user alone, removed by ``close``, and by the next worker on this machine otherwise.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.values = dict.fromkeys(COUNTERS, 0)
        self._path = path
        self._map: mmap.mmap | None = None
        if path is None:
            return
        remove_stale(path.parent)
        try:
            self._map = _map_file(path)
        except OSError as problem:
            logger.warning(
                "LoopKV: no metrics from this worker: counter file %s: %s; set TMPDIR to a folder with room",
                path,
                problem.strerror,
            )
            return
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, os.getpid())
        # Not atexit, without which forked children of multiprocessing end. A worker that vLLM kills leaves its file to
        # the next one.
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)
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
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._map.close()
            self._map = None


def _map_file(path: Path) -> mmap.mmap:
    """A new file of ``_BYTES`` zeros, mapped and locked; the map keeps the file open, and so the lock.

    Raises:
        OSError: the folder is full or unwritable, or the name is a link or a living worker's.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # no locks on this file system: nobody else gets one either, so the file stays
            pass
        try:
            os.ftruncate(handle, 0)
            _allocate(handle)
            return mmap.mmap(handle, _BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            raise
    finally:
        os.close(handle)


def _allocate(handle: int) -> None:
    """Give the file its blocks: a store into the hole of a sparse file kills the process when the disk is full."""
    try:
        os.posix_fallocate(handle, 0, _BYTES)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if os.pwrite(handle, bytes(_BYTES), 0) != _BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None


def read_counters(path: Path) -> dict[str, int] | None:
    """Counters another process published, or None where there are none (yet, or no longer)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _BYTES or _HEADER.unpack(data[: _HEADER.size])[0] != _MAGIC:
        return None
    return dict(zip(COUNTERS, struct.unpack(f"<{len(COUNTERS)}Q", data[_HEADER.size :]), strict=True))
