"""A demo refuses at once what would stop it minutes later, and is not bound by another run's leftovers."""

from __future__ import annotations

import json

import pytest

from loopkv.artifacts import Fingerprint
from loopkv.demo import DemoSettings, run_demo
from loopkv.demo.pipeline import OUTPUT_FILES
from loopkv.demo.plans import check_loops
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.geometry import Geometry
from loopkv.profiler.journal import Journal, belongs_to


def refused(settings: DemoSettings) -> str:
    said: list[str] = []
    with pytest.raises(LoopKVError) as caught:
        run_demo(settings, say=said.append, progress=None)
    assert said == []  # no stage has begun
    return str(caught.value)


@pytest.mark.parametrize("name", OUTPUT_FILES)
def test_a_folder_in_the_place_of_an_output(tmp_path, name):
    (tmp_path / name).mkdir()
    assert f"{name}, got a directory" in refused(DemoSettings(tmp_path, serve=False))


def test_an_output_folder_that_is_a_file(tmp_path):
    (tmp_path / "out").touch()
    assert "wanted a folder" in refused(DemoSettings(tmp_path / "out", serve=False))


def test_task_records_are_read_first(tmp_path):
    path = tmp_path / "r.jsonl"
    assert "No such file" in refused(DemoSettings(tmp_path / "out", task_records=path, serve=False))
    path.write_text('{"what": 3}\n')
    assert "r.jsonl, line 1: what, got 3" in refused(DemoSettings(tmp_path / "out", task_records=path, serve=False))


def test_a_missing_server_is_noticed_first(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "no package 'vllm'" in refused(DemoSettings(tmp_path / "out"))


def test_a_model_of_one_loop():
    geometry = Geometry(architecture="ouro", loops=1, layers=2, query_heads=2, kv_heads=2, head_dim=32)
    with pytest.raises(UnsupportedError, match="one loop"):
        check_loops(Fingerprint(name="x", geometry=geometry))


def test_whose_journal_it_is(tmp_path):
    path = tmp_path / "j"
    assert belongs_to(path, "a")
    with Journal(path, "a") as journal:
        journal.put("x", 1)
    assert belongs_to(path, "a") and not belongs_to(path, "b")
    for content, expected in (("", True), ("notes", False), (json.dumps([1]) + "\n", False)):
        path.write_text(content)
        assert belongs_to(path, "a") is expected
