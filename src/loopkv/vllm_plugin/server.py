"""Start a ``vllm serve`` command as a child process, wait until it answers, and stop it again."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from loopkv.artifacts.hashing import handed_on
from loopkv.errors import LoopKVError

STARTUP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
# Reads a line that this process writes when the child has ended. Without one (this process was killed) it interrupts
# the child, as _stop does, and after some seconds kills it, or its whole group.
_WATCHDOG = """read -r ended && exit
kill -s INT "$1"
left="$3"
while [ "$left" -gt 0 ] && kill -s 0 -- "$2" 2>/dev/null; do sleep 1; left=$((left - 1)); done
kill -s KILL -- "$2" 2>/dev/null
[ -n "$4" ] && rm -rf -- "$4"
"""
_WATCHDOG_PATIENCE_S = 10


@contextlib.contextmanager
def running_server(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start ``command`` (a ``vllm serve`` line without a port), yield its base URL, and stop it on exit.

    Args:
        command: the command line.
        log: file for the server's output.
        environment: variables added to this process's.

    Raises:
        LoopKVError: the server ended or did not answer in time; the end of its log is part of the message.
    """
    with starting_server(command, log, environment) as answer:
        yield answer()


@contextlib.contextmanager
def starting_server(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[], str]]:
    """As ``running_server``, but yield at once: what is yielded waits until the server answers and returns its URL.

    So several servers can start side by side and still be stopped whenever this process is interrupted.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    # vLLM's processes talk through sockets in the temporary folder and leave them there.
    with tempfile.TemporaryDirectory(prefix="loopkv-") as sockets:
        variables = {**os.environ, **handed_on(), "VLLM_RPC_BASE_PATH": sockets, **(environment or {})}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
            )
        with contextlib.ExitStack() as end:
            stop = end.enter_context(contextlib.ExitStack())
            stop.callback(_stop, process)
            end.enter_context(ends_with_this_process(process.pid, group=True, folder=sockets))
            end.callback(stop.close)  # before the watchdog is told that the server has ended
            yield functools.partial(_wait, process, url, log)


@contextlib.contextmanager
def ends_with_this_process(pid: int, *, group: bool, folder: str | None = None) -> Iterator[None]:
    """While the body runs, a child ends soon after this process does, be it by SIGKILL, which no handler hears.

    A shell in a session of its own waits for the end of a pipe whose other end only this process holds.

    Args:
        pid: the child, which must have ended when the body ends.
        group: end its whole process group (it must lead it), with what the child started itself.
        folder: temporary folder that goes with it.
    """
    target = f"-{pid}" if group else str(pid)
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG, "loopkv-watchdog", str(pid), target, str(_WATCHDOG_PATIENCE_S), folder or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # hears no interrupt of the terminal
    )
    assert watchdog.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watchdog.stdin.write(b"ended\n")
            watchdog.stdin.close()
        watchdog.wait()


def last_telling_line(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error" in line]
    return (telling or lines or ["no output"])[-1][-300:]


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LoopKVError(
                "vllm serve", got=f"exit status {process.returncode}: {last_telling_line(log)}", hint=f"see {log}"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise LoopKVError("vllm serve", got=f"no answer in {STARTUP_TIMEOUT_S:.0f} s", hint=f"see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the server, which ends its engine in order, and kill what is left of the group, even if interrupted."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)  # an engine interrupted too would end first, and be reported dead
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
