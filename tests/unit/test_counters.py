"""Counters between processes: files that neither a full disk nor another server takes away."""

import errno
import multiprocessing
import os
import subprocess
import sys

import pytest

from loopkv.vllm_plugin.metrics import COUNTERS, Counters, counters_path, read_counters, remove_stale


def test_counters_travel_between_processes(tmp_path):
    path = tmp_path / "w.counters"
    assert read_counters(path) is None
    counters = Counters(path)
    assert read_counters(path) == dict.fromkeys(COUNTERS, 0)
    counters.add("pages_coded", 3)
    counters.add("pages_coded", 4)
    counters.set("history_pages", 2**40)
    assert read_counters(path)["pages_coded"] == 0, "not published yet"
    counters.flush()
    assert read_counters(path) == {**dict.fromkeys(COUNTERS, 0), "pages_coded": 7, "history_pages": 2**40}
    assert path.stat().st_mode & 0o777 == 0o600
    counters.close()
    assert not path.exists() and read_counters(path) is None
    counters.flush()  # after the end: nothing to publish to, nothing breaks


def test_foreign_bytes_are_no_counters(tmp_path):
    path = tmp_path / "x.counters"
    for data in (b"", b"short", b"\0" * (16 + 8 * len(COUNTERS)), os.urandom(16 + 8 * len(COUNTERS) + 1)):
        path.write_bytes(data)
        assert read_counters(path) is None


def test_a_killed_workers_file_goes_with_the_next_worker(tmp_path):
    def name(instance: str):
        return tmp_path / counters_path(instance, 0, 0).name

    code = "import os; from pathlib import Path; from loopkv.vllm_plugin.metrics import Counters; "
    code += f"Counters(Path({str(name('1'))!r})); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert name("1").exists()
    living = Counters(name("2"))
    assert not name("1").exists() and name("2").exists()
    other = Counters(name("3"))
    assert name("2").exists(), "a living worker's file stays"
    living.close()
    other.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_ends_in_order_removes_its_file(tmp_path, method):
    path = tmp_path / counters_path("1", 0, 0).name
    worker = multiprocessing.get_context(method).Process(target=Counters, args=(path,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0 and not path.exists()
    code = f"from pathlib import Path; from loopkv.vllm_plugin.metrics import Counters; Counters(Path({str(path)!r}))"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert not path.exists()


def test_a_forked_child_leaves_its_parents_file_alone(tmp_path):
    path = tmp_path / counters_path("1", 0, 0).name
    living = Counters(path)
    child = multiprocessing.get_context("fork").Process(target=print)
    child.start()
    child.join(60)
    assert child.exitcode == 0 and read_counters(path) is not None
    living.close()


def test_a_living_workers_file_is_known_by_its_lock_not_by_its_process_number(tmp_path):
    path = tmp_path / counters_path("1", 0, 0).name
    living = Counters(path)
    with path.open("r+b") as file:  # as another PID namespace sees it: no such process
        file.seek(8)
        file.write((2**40).to_bytes(8, "little"))
    remove_stale(tmp_path)
    assert read_counters(path) is not None
    living.close()
    assert not path.exists()


def test_a_counter_file_is_never_written_through_a_link(tmp_path, caplog):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "l.counters").symlink_to(tmp_path / "victim")
    counters = Counters(tmp_path / "l.counters")
    counters.flush()
    assert (tmp_path / "victim").read_text() == "kept" and len(caplog.records) == 1
    counters.close()
    assert (tmp_path / "l.counters").is_symlink()


@pytest.mark.parametrize("kind", ["full", "no allocation, full", "no folder"])
def test_a_worker_serves_without_metrics_where_no_file_can_be_made(tmp_path, monkeypatch, caplog, kind):
    def fails(code):
        def call(*_):
            raise OSError(code, os.strerror(code))

        return call

    path = tmp_path / "w.counters"
    if kind == "no folder":
        path = tmp_path / "none" / "w.counters"
    else:
        monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC if kind == "full" else errno.EOPNOTSUPP))
        monkeypatch.setattr(os, "pwrite", fails(errno.ENOSPC))
    counters = Counters(path)
    counters.add("pages_coded", 1)
    counters.flush()
    counters.close()
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "TMPDIR" in record.getMessage()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_allocate_gets_zeros(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    counters = Counters(tmp_path / "w.counters")
    assert read_counters(tmp_path / "w.counters") == dict.fromkeys(COUNTERS, 0)
    counters.close()


def test_counters_without_a_file_stay_in_the_process():
    counters = Counters()
    counters.add("clamped_values", 1)
    counters.flush()
    assert counters.values["clamped_values"] == 1
