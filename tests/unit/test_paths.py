"""Paths are checked before work starts: what is read is a regular file, what is written can be written."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loopkv.artifacts.storage import write_atomically
from loopkv.cli import app as cli
from loopkv.errors import LoopKVError, PlanFormatError
from loopkv.paths import check_input_file, check_output_file, check_output_folder


def make(kind: str, folder: Path) -> Path:
    """A path of that kind below ``folder``."""
    path = folder / kind.replace(" ", "-")
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # the name of a socket is short
    elif kind == "below a file":
        (folder / "a-file").touch()
        return folder / "a-file" / "out.json"
    elif kind == "no folder":
        return folder / "nowhere" / "out.json"
    elif kind == "virtual":
        return Path("/proc/out.json")
    elif kind == "null byte":
        return folder / "a\0b"
    elif kind == "long name":
        return folder / ("x" * 300)
    elif kind == "link in a circle":
        path.symlink_to(path)
    return path


OUTPUTS = {
    "directory": "a directory",
    "pipe": "a named pipe",
    "device": "a device",
    "socket": "a socket",
    "below a file": "no folder|Not a directory",
    "no folder": "no folder .*nowhere.* mkdir -p",
    "virtual": "cannot write",
    "null byte": "null",
    "long name": "too long",
    "link in a circle": "loop|cannot write",
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_cannot_be_written_is_one_sentence(tmp_path, kind):
    path = make(kind, tmp_path)
    with pytest.raises(LoopKVError, match=OUTPUTS[kind]) as caught:
        check_output_file(path)
    assert str(caught.value).startswith("cannot write") and "\n" not in str(caught.value)


def test_nothing_is_appended_to_an_archive(tmp_path):
    with pytest.raises(LoopKVError, match="a compressed file, wanted plain text"):
        check_output_file(tmp_path / "r.jsonl.xz")


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "socket", "null byte", "link in a circle"])
def test_what_cannot_be_read_is_one_sentence(tmp_path, kind):
    with pytest.raises(PlanFormatError, match="plan "):
        check_input_file(make(kind, tmp_path), "plan", PlanFormatError)


def test_good_paths_pass_and_nothing_is_left(tmp_path):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to("old.json")
    for name in ("new.json", "old.json", "link.json"):
        assert check_output_file(tmp_path / name) == tmp_path / name
    assert check_output_file(Path("new.json")) == Path("new.json")
    assert check_output_file(None) is None and check_output_folder(None) is None
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "newer"):
        assert check_output_folder(folder) == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]
    assert check_input_file(tmp_path / "link.json", "plan", PlanFormatError) == 3


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "below a file", "virtual", "null byte", "long name"])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, kind):
    with pytest.raises(LoopKVError, match="cannot write"):
        check_output_folder(make(kind, tmp_path))


def test_a_file_behind_a_link_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to("old.json")
    write_atomically(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "old.json").read_text() == "new"


MODEL, WORK = "no-model", "no-workload.jsonl"
WRITERS = {
    "profile": ("profile", MODEL, "-o"),
    "profile records": ("profile", MODEL, "-o", "p.json", "--records"),
    "plan": ("plan", "--named", "kivi4", "--model", MODEL, "-o"),
    "tau": ("tau", MODEL, "kivi4", "-o"),
    "measure records": ("measure", MODEL, "kivi4", "--records"),
    "measure journal": ("measure", MODEL, "kivi4", "--journal"),
    "tasks records": ("eval", "tasks", MODEL, "--records"),
    "tasks journal": ("eval", "tasks", MODEL, "--journal"),
    "served records": ("eval", "served", MODEL, "kivi4", "--records"),
    "additivity records": ("eval", "additivity", MODEL, "p.json", "--documents", "d.jsonl", "--records"),
    "additivity journal": ("eval", "additivity", MODEL, "p.json", "--documents", "d.jsonl", "--journal"),
    "simulate": ("simulate", WORK, "--arm", "stock", "-o"),
    "report": ("report", "r.jsonl", "-o"),
    "decode": ("bench", "decode", "--arm", "stock", "-o"),
    "kernel": ("bench", "kernel", "-o"),
    "slo": ("bench", "slo", WORK, "--arm", "stock", "--rates", "1", "-o"),
    "workload": ("bench", "workload", "-o"),
}
FOLDER_WRITERS = {
    "demo": ("demo", "-o"),
    "report png": ("report", "r.jsonl", "--png"),
    "decode work": ("bench", "decode", "--arm", "stock", "-o", "r.jsonl", "--work"),
    "slo work": ("bench", "slo", WORK, "--arm", "stock", "--rates", "1", "-o", "r.jsonl", "--work"),
}


def error_of(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["loopkv", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error and len(error.splitlines()) == 1, error
    return error


@pytest.mark.parametrize("kind", ["directory", "pipe", "below a file", "no folder"])
@pytest.mark.parametrize("verb", WRITERS)
def test_every_verb_refuses_an_output_before_it_looks_at_anything_else(tmp_path, monkeypatch, capsys, verb, kind):
    """The models, plans and workloads named here do not exist: the output is complained about first."""
    error = error_of(monkeypatch, capsys, *WRITERS[verb], str(make(kind, tmp_path)))
    assert "cannot write" in error


@pytest.mark.parametrize("kind", ["pipe", "below a file", "virtual"])
@pytest.mark.parametrize("verb", FOLDER_WRITERS)
def test_every_verb_refuses_a_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys, verb, kind):
    assert "cannot write" in error_of(monkeypatch, capsys, *FOLDER_WRITERS[verb], str(make(kind, tmp_path)))


def test_no_writing_option_of_any_verb_is_left_out():
    """Every option that names an output goes through the shared check."""
    import typer
    from typer.main import get_command

    def commands(command, name=""):
        if isinstance(command, typer.core.TyperGroup):
            for child, its in command.commands.items():
                yield from commands(its, f"{name} {child}")
        else:
            yield name, command

    found = 0
    for name, command in commands(get_command(cli.app)):
        for parameter in command.params:
            if parameter.name in {"output", "records", "journal", "png", "work"}:
                assert parameter.callback is not None, (name, parameter.name)
                found += 1
    assert found >= len(WRITERS) + len(FOLDER_WRITERS)


def test_a_folder_without_write_permission():
    """As a user without rights: permission bits mean nothing to root."""
    code = (
        "import os, sys; from pathlib import Path; from loopkv.paths import check_output_file\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: check_output_file(Path(sys.argv[1]))\nexcept Exception as error: print(type(error).__name__, error)"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        told = subprocess.run([sys.executable, "-c", code, str(folder / "p.json")], capture_output=True, text=True)
        folder.chmod(0o755)
    assert told.stdout.startswith("LoopKVError cannot write") and "Permission denied" in told.stdout, told.stderr
