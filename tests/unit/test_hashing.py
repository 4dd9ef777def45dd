"""Hashes of weight files: read once for all processes of a command, and never kept for a file that has changed."""

import hashlib
import os
import subprocess
import sys

import pytest

from loopkv import reference
from loopkv.artifacts import hashing
from loopkv.artifacts.hashing import HANDED_ON, hash_files
from loopkv.errors import ModelFormatError


@pytest.fixture(autouse=True)
def reads(monkeypatch):
    """Files that were really read; every test starts with nothing kept and files of any age count as settled."""
    monkeypatch.setattr(hashing, "_kept", {})
    monkeypatch.setattr(hashing, "SETTLED_NS", -(1 << 62))
    monkeypatch.delenv(HANDED_ON, raising=False)
    read = []
    really = hashing.hash_file
    monkeypatch.setattr(hashing, "hash_file", lambda file: read.append(file.name) or really(file))
    return read


@pytest.fixture
def shards(tmp_path):
    for name, content in (("a", b"one"), ("b", b"two")):
        (tmp_path / name).write_bytes(content)
    return [tmp_path / "a", tmp_path / "b"]


def expected(*contents):
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()


def test_files_are_read_once(shards, reads):
    assert hash_files(shards) == hash_files(shards) == expected(b"one", b"two")
    assert reads == ["a", "b"]
    assert hash_files(shards[::-1]) == expected(b"two", b"one") and len(reads) == 4


def rewrite(file):
    file.write_bytes(b"six")


def rewrite_and_set_the_time_back(file):
    before = file.stat()
    file.write_bytes(b"six")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file):
    other = file.with_name("other")
    other.write_bytes(b"six")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)


def link_elsewhere(file):
    other = file.with_name("other")
    other.write_bytes(b"six")
    file.unlink()
    file.symlink_to(other)


@pytest.mark.parametrize("change", [rewrite, rewrite_and_set_the_time_back, replace, link_elsewhere])
@pytest.mark.parametrize("through_environment", [False, True])
def test_a_file_that_changed_is_read_again(shards, change, through_environment, monkeypatch):
    hash_files(shards)
    if through_environment:
        monkeypatch.setenv(HANDED_ON, hashing.handed_on()[HANDED_ON])
        monkeypatch.setattr(hashing, "_kept", {})
    tick = shards[1].stat().st_ctime_ns
    change(shards[1])
    while shards[1].stat().st_ctime_ns == tick:  # within one tick of the clock: what SETTLED_NS is for
        change(shards[1])
    assert hash_files(shards) == expected(b"one", b"six")


def test_a_file_that_has_just_changed_is_not_kept(shards, reads, monkeypatch):
    monkeypatch.setattr(hashing, "SETTLED_NS", 3600 * 10**9)
    hash_files(shards)
    assert hashing.handed_on() == {}
    hash_files(shards)
    assert reads == ["a", "b", "a", "b"]


def test_a_file_that_changes_while_it_is_read_is_not_kept(shards, monkeypatch):
    really = hashing.hash_file

    def read_slowly(file):
        found = really(file)
        file.write_bytes(b"longer than it was")
        return found

    monkeypatch.setattr(hashing, "hash_file", read_slowly)
    assert hash_files(shards) == expected(b"one", b"two")
    assert hashing.handed_on() == {}


def test_a_child_process_reads_nothing_again(shards):
    hash_files(shards)
    code = (
        "import sys; from pathlib import Path; from loopkv.artifacts import hashing\n"
        "hashing.hash_file = None\n"
        "print(hashing.hash_files([Path(name) for name in sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, shards)],
        env={**os.environ, **hashing.handed_on()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == expected(b"one", b"two"), done.stderr


def test_programs_that_are_not_ours_are_handed_nothing(monkeypatch):
    from loopkv import records

    monkeypatch.setenv(HANDED_ON, f"{'0' * 64}:{'1' * 64}")
    monkeypatch.setenv("GIT_DIR", "elsewhere")
    environments = []

    def run(command, **options):
        environments.append(options["env"])
        raise OSError

    monkeypatch.setattr(subprocess, "run", run)
    records._checkout_commit(reference.model_folder())
    records._gpu_driver.__wrapped__()
    assert len(environments) == 2 and all("PATH" in one and HANDED_ON not in one for one in environments)


@pytest.mark.parametrize("text", ["", ",", "x:y", "0" * 129, f"{'0' * 64}:{'1' * 64}", f"{'0' * 64}:", ":" * 10_000])
def test_what_else_lies_in_the_variable_changes_nothing(shards, reads, monkeypatch, text):
    monkeypatch.setenv(HANDED_ON, text)
    assert hash_files(shards) == expected(b"one", b"two") and reads == ["a", "b"]


def test_only_the_latest_are_kept(tmp_path):
    for number in range(40):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
        hash_files([tmp_path / str(number)])
    assert len(hashing._kept) == hashing.MAX_KEPT
    assert len(hashing.handed_on()[HANDED_ON]) < 4096


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(ModelFormatError, match="No such file"):
        hash_files([tmp_path / "absent"])


def test_serve_hands_on_what_it_checked(reads, monkeypatch, tmp_path):
    """``loopkv serve`` becomes ``vllm serve``, whose config check asks for the same hash."""
    pytest.importorskip("vllm")
    from typer.testing import CliRunner

    from loopkv.cli.app import app
    from loopkv.models import fingerprint_model
    from loopkv.planner import named_plan

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    folder = reference.model_folder()
    plan = named_plan("kivi4", fingerprint_model(folder))
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(hashing, "_kept", {})
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    result = CliRunner().invoke(app, ["serve", str(folder), "--plan", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert f":{plan.fingerprint.weights_sha256}" in started[0][2][HANDED_ON]
    monkeypatch.setenv(HANDED_ON, started[0][2][HANDED_ON])
    monkeypatch.setattr(hashing, "_kept", {})
    reads.clear()
    assert fingerprint_model(folder).weights_sha256 == plan.fingerprint.weights_sha256
    assert not set(reads) - {"tokenizer.json"}
