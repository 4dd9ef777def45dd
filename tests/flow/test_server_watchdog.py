"""SIGKILL of a command, which no handler hears: neither its server nor its client, nor what those started, stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STAND_IN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "if 'child' in sys.argv: subprocess.Popen([sys.executable, __file__, sys.argv[1]])\n"
    "time.sleep(600)\n"
)
SERVER = (
    "import sys; from pathlib import Path\n"
    "from loopkv.vllm_plugin import server\nserver._WATCHDOG_PATIENCE_S = 1\n"
    "with server.running_server([sys.executable, *sys.argv[1:3], 'child'], Path(sys.argv[3])): pass\n"
)
CLIENT = (
    "import sys; from pathlib import Path\n"
    "from loopkv.bench import serving_client as client\nfrom loopkv.bench.workload import Request\n"
    "from loopkv.vllm_plugin import server\nserver._WATCHDOG_PATIENCE_S = 1\n"
    "client.client_command = lambda *_, **__: [sys.executable, *sys.argv[1:3]]\n"
    "client.run_client('http://x', [Request(1, 1, 'a')], Path(sys.argv[3]), 'x', rate_per_s=1.0, seed=0)\n"
)


def running(mark: str) -> list[int]:
    """Processes with ``mark`` among their arguments."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (folder / "cmdline").read_text() and "\nState:\tZ" not in (folder / "status").read_text():
                    found.append(int(folder.name))
    return found


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("code", "count"), [(SERVER, 2), (CLIENT, 1)])
def test_a_killed_command_leaves_nothing_behind(tmp_path: Path, code: str, count: int) -> None:
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    before = set(Path(tempfile.gettempdir()).glob("loopkv-*"))
    command = subprocess.Popen([sys.executable, "-c", code, str(stand_in), mark, str(tmp_path / "log")])
    try:
        until(lambda: len([pid for pid in running(mark) if pid != command.pid]) == count)
        until(lambda: any(running(f"loopkv-watchdog\0{pid}\0") for pid in running(mark)))
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    until(lambda: running(mark) == [] and set(Path(tempfile.gettempdir()).glob("loopkv-*")) <= before)


def test_a_watchdog_ends_with_its_child(tmp_path: Path) -> None:
    """One that is stopped in order takes its watchdog along, and nobody is signalled afterwards."""
    code = (
        "import subprocess, sys; from loopkv.vllm_plugin.server import ends_with_this_process\n"
        "child = subprocess.Popen([sys.executable, '-c', ''])\n"
        "with ends_with_this_process(child.pid, group=False): child.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stderr == b""
