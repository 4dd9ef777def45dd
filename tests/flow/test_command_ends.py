"""How a command ends: closed pipes, full disks, interrupts; what it leaves, and that a later run goes on from there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopkv import reference
from loopkv.artifacts import Profile
from loopkv.models import fingerprint_model
from loopkv.planner import named_plan

MODEL = str(reference.model_folder())
HELDOUT = str(reference.heldout_path())
TEXTS = ["--documents", HELDOUT, "--limit", "2", "--max-tokens", "330"]
COMMAND = [sys.executable, "-m", "loopkv"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    named_plan("kivi4", fingerprint_model(MODEL)).save(path)
    return str(path)


def start(*arguments: str, **options) -> subprocess.Popen:
    options |= {"stderr": subprocess.PIPE, "text": True, "preexec_fn": hears_sigint}
    return subprocess.Popen([*COMMAND, *arguments], **options)


def hears_sigint() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("verb", ["inspect", "help", "tasks help", "capacity"])
def test_a_reader_that_leaves_ends_the_command_quietly(plan_file, verb):
    arguments = {
        "inspect": ["inspect", plan_file],
        "help": ["--help"],
        "tasks help": ["eval", "tasks", "--help"],
        "capacity": ["capacity", "--plan", plan_file, "--geometry", "ouro-1.4b"],
    }[verb]
    if verb == "capacity":
        arguments[2] = "kivi4"
    read, write = os.pipe()
    os.close(read)  # nobody reads
    process = start(*arguments, stdout=write)
    os.close(write)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (141, "")


def test_an_error_stays_an_error_when_nobody_reads(tmp_path):
    read, write = os.pipe()
    os.close(read)
    process = start("inspect", str(tmp_path / "none.json"), stdout=write)
    os.close(write)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "No such file" in error and "Traceback" not in error


def test_a_full_disk_is_one_sentence(plan_file):
    with Path("/dev/full").open("w") as full:
        process = start("inspect", plan_file, stdout=full)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and error == "loopkv: error: cannot write, got No space left on device\n"


def stop_when(process: subprocess.Popen, ready, number: int = signal.SIGINT) -> str:
    """Send the signal once ``ready()``; returns standard error."""
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    return error


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


ENDINGS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "ended by SIGTERM")}


@pytest.mark.parametrize("number", ENDINGS)
def test_an_interrupted_profile_goes_on(tmp_path, number):
    output, journal = tmp_path / "p.json", tmp_path / "p.json.journal"
    one_by_one = ["--documents", HELDOUT, "--limit", "1", "--max-tokens", "352", "--batch", "1"]  # a line for each cell
    arguments = ["profile", MODEL, "-o", str(output), *one_by_one]
    error = stop_when(start(*arguments, stdout=subprocess.DEVNULL), lambda: lines(journal) > 5, number)
    words = ENDINGS[number][1]
    assert error.splitlines()[-1] == f"loopkv: {words}" and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == [journal.name]
    for line in journal.read_text().splitlines():
        json.loads(line)
    kept = lines(journal) - 1
    assert 5 <= kept < 40  # of 16 cells' int4, int2 and share, and the source cells
    again = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert Profile.load(output).provenance["resumed_measurements"] == kept
    assert not journal.exists()


def test_an_interrupt_before_any_result_leaves_nothing(tmp_path):
    """While libraries load, or while the model writes its own documents."""
    process = start("profile", MODEL, "-o", str(tmp_path / "p.json"), "--limit", "1", "--max-tokens", "8000")
    error = stop_when(process, lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text())
    assert process.returncode == 130 and error.splitlines()[-1] == "loopkv: interrupted"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["measure", "tasks"])
def test_interrupted_measurements_keep_their_journal_and_write_nothing_else(tmp_path, verb):
    journal, records = tmp_path / "j", tmp_path / "r.jsonl"
    kept = ["--journal", str(journal), "--records", str(records)]
    arguments = {
        "measure": ["measure", MODEL, "kivi4", "kivi2", "uniform:int2", *TEXTS, "--batch", "1", *kept],
        "tasks": ["eval", "tasks", MODEL, "--plan", "kivi4", "--items-per-task", "6", "--batch", "2", *kept],
    }[verb]
    process = start(*arguments, stdout=subprocess.DEVNULL)
    error = stop_when(process, lambda: lines(journal) > 1)
    assert process.returncode == 130 and error.splitlines()[-1] == "loopkv: interrupted" and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["j"]
    for line in journal.read_text().splitlines():
        json.loads(line)


def group_of(text: str) -> list[int]:
    """Processes whose command line holds ``text``, but for ours."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if text in (folder / "cmdline").read_text():
                    found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", ENDINGS)
def test_a_server_that_was_started_is_stopped(tmp_path, number):
    """The command ends while it waits for a server: a stand-in that ignores an interrupt and has a child of its own."""
    mark = f"mark-{tmp_path.name}-{int(number)}"
    server = tmp_path / "server.py"
    server.write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "if len(sys.argv) > 2: subprocess.Popen([sys.executable, __file__, sys.argv[1]])\n"
        "time.sleep(600)\n"
    )
    code = (
        "import sys; from pathlib import Path; from loopkv.cli.process import ends_like_other_tools\n"
        "from loopkv.vllm_plugin import server\nserver.STOP_TIMEOUT_S = 1.0\n"
        "with ends_like_other_tools():\n"
        "    with server.running_server([sys.executable, *sys.argv[1:3]], Path(sys.argv[3])):\n"
        "        pass\n"
    )
    command = [sys.executable, "-c", code, str(server), mark, str(tmp_path / "log")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears_sigint)
    mine = process.pid
    error = stop_when(process, lambda: len([p for p in group_of(mark) if p != mine]) == 2, number)
    status, words = ENDINGS[number]
    assert process.returncode == status and error == f"loopkv: {words}\n"
    deadline = time.monotonic() + 10
    while group_of(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_of(mark) == []
