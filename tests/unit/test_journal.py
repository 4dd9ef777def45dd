"""The journal of a long run: whole lines survive anything, and another run's are refused."""

from __future__ import annotations

import json
import os

import pytest

from loopkv.errors import LoopKVError
from loopkv.profiler.journal import Journal


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "deep" / "j"
    with Journal(path, "key") as journal:
        journal.put("a", [0.1, 2e-17])
        journal.put("b", {"c": None})
        assert "a" in journal and "x" not in journal
    with Journal(path, "key") as journal:
        assert len(journal) == 2 and journal.get("a") == [0.1, 2e-17] and journal.get("b") == {"c": None}
        journal.put("d", 3)
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize("keep", range(1, 40))
def test_a_torn_last_line_is_cut_off(tmp_path, keep):
    path = tmp_path / "j"
    with Journal(path, "key") as journal:
        journal.put("a", 1)
    whole = path.read_bytes()
    torn = json.dumps({"name": "b", "value": "x" * 20}).encode()[:keep]
    path.write_bytes(whole + torn)
    with Journal(path, "key") as journal:
        assert len(journal) == 1
        journal.put("c", 2)
    with Journal(path, "key") as journal:
        assert len(journal) == 2 and journal.get("c") == 2


def test_a_torn_header_starts_anew(tmp_path):
    (tmp_path / "j").write_bytes(b'{"journal": 1, "ke')
    with Journal(tmp_path / "j", "key") as journal:
        assert len(journal) == 0


def test_another_run_is_refused_and_kept(tmp_path):
    path = tmp_path / "j"
    with Journal(path, "mine") as journal:
        journal.put("a", 1)
    before = path.read_bytes()
    with pytest.raises(LoopKVError, match=r"belongs to another run.*hint: .*--restart"):
        Journal(path, "other")
    assert path.read_bytes() == before
    with Journal(path, "other", restart=True) as journal:
        assert len(journal) == 0


@pytest.mark.parametrize(
    "content", [b"hello\n", b"[]\n", b'{"journal": 1}\n', b"\xff\xfe\n", b'{"journal": 1, "key": "key"}\n[1]\n']
)
def test_a_file_that_is_no_journal_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(LoopKVError, match="no journal"):
        Journal(path, "key")
    assert path.read_bytes() == content


def test_two_processes_do_not_write_one_journal(tmp_path):
    with Journal(tmp_path / "j", "key"), pytest.raises(LoopKVError, match="another running process"):
        Journal(tmp_path / "j", "key")
    Journal(tmp_path / "j", "key").close()  # free again


def test_values_that_are_not_finite_never_enter(tmp_path):
    with Journal(tmp_path / "j", "key") as journal, pytest.raises(ValueError):
        journal.put("a", float("nan"))


def test_a_folder_is_no_journal(tmp_path):
    with pytest.raises(LoopKVError, match="a directory"):
        Journal(tmp_path, "key")


def test_a_pipe_is_no_journal(tmp_path):
    os.mkfifo(tmp_path / "j")
    with pytest.raises(LoopKVError, match="a named pipe"):
        Journal(tmp_path / "j", "key")


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("content", [b"precious", b"precious\nnotes", b"one line\n", b'{"options": []}'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path, content, restart):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(LoopKVError, match="no journal"):
        Journal(path, "key", restart=restart)
    assert path.read_bytes() == content
