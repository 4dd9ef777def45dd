"""Records survive a file, a torn last line, and say how they were made."""

import json
import lzma
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import loopkv
from loopkv import records as records_module
from loopkv.errors import LoopKVError
from loopkv.records import Record, _checkout_commit, append_records, make_record, read_records


def test_round_trip_and_provenance(tmp_path):
    record = make_record("decode.step_ms", 1.5, "ms", samples=(1.4, 1.6), settings={"arm": "bf16"}, seed=3)
    assert record.versions["python"].startswith("3.")
    assert record.hardware
    assert record.date
    append_records(tmp_path / "a" / "r.jsonl", [record, record])
    assert list(read_records([tmp_path / "a" / "r.jsonl"])) == [record, record]


def test_samples_that_are_no_numbers_do_not_spoil_a_file(tmp_path):
    path = tmp_path / "r.jsonl"
    append_records(path, [make_record("decode.step_ms", 1.0, "ms", samples=(1.0, math.inf, math.nan))])
    (record,) = read_records([path])
    assert record.samples[0] == 1.0 and all(math.isnan(sample) for sample in record.samples[1:])
    assert '"samples"' not in make_record("decode.step_ms", 1.0, "ms").to_line()


def test_samples_keep_the_digits_that_a_measurement_has_and_every_whole_number():
    """Six significant digits: a step of 38.119 ms to a tenth of a microsecond."""
    samples = (38.11912345678, 1e-9 / 3, 0.0, 6_501_551_308_123.0, math.inf, -math.inf, 2.0**70)
    record = make_record("decode.step_ms", 39.31301800000142, "ms", samples=samples)
    assert record.samples == (38.1191, 3.33333e-10, *samples[2:])
    assert record.value == 39.31301800000142  # the median of samples that were not rounded


def test_a_line_leaves_out_what_holds_nothing_and_is_read_back_whole(tmp_path):
    record = Record(what="decode.refused", value=None, unit="", samples=(1.0, 0.0, 0.5), settings={"arm": "a"})
    assert (
        record.to_line()
        == '{"what":"decode.refused","value":null,"unit":"","samples":[1,0,0.5],"settings":{"arm":"a"}}\n'
    )
    path = tmp_path / "r.jsonl"
    append_records(path, [record])
    path.write_bytes(path.read_bytes() + record.model_dump_json().encode() + b"\n")  # a line of an earlier version
    assert list(read_records([path])) == [record, record]
    assert all(isinstance(sample, float) for one in read_records([path]) for sample in one.samples)


def test_a_torn_last_line_is_passed_over_but_a_broken_line_is_not(tmp_path):
    path = tmp_path / "r.jsonl"
    append_records(path, [make_record("x", 1.0, "s")])
    with path.open("a") as file:
        file.write('{"what": "y", "val')
    assert [record.what for record in read_records([path])] == ["x"]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(LoopKVError, match="line 2"):
        list(read_records([path]))


def test_an_archive_is_read_like_the_file_it_was(tmp_path):
    record = make_record("x", 1.0, "s", samples=(1.0, 0.5))
    packed = tmp_path / "r.jsonl.xz"
    packed.write_bytes(lzma.compress(2 * record.to_line().encode()))
    assert list(read_records([packed])) == [record, record]


@pytest.mark.parametrize("content", [b"", b'{"what": "x"}\n', lzma.compress(b"{}" * 100)[:-20]])
def test_what_is_no_whole_archive_is_one_sentence(tmp_path, content):
    path = tmp_path / "r.jsonl.xz"
    path.write_bytes(content)
    with pytest.raises(LoopKVError, match=r"r\.jsonl\.xz") as raised:
        list(read_records([path]))
    assert raised.value.wanted == "a whole xz file"


def test_an_archive_may_not_unpack_without_end(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl.xz"
    path.write_bytes(lzma.compress(b"\n" * 1001))
    monkeypatch.setattr(records_module, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(LoopKVError, match="more than 1000 bytes unpacked"):
        list(read_records([path]))
    monkeypatch.setattr(records_module, "MAX_UNPACKED_BYTES", 1001)
    assert list(read_records([path])) == []


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(LoopKVError, match=r"nothing\.jsonl"):
        list(read_records([tmp_path / "nothing.jsonl"]))


def test_deeply_nested_lines_are_one_sentence(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(LoopKVError, match="line 1"):
        list(read_records([path]))


def test_records_that_cannot_be_written_are_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "file" / "r.jsonl"):
        with pytest.raises(LoopKVError, match="cannot write"):
            append_records(target, [make_record("x", 1.0, "s")])


GOOD = json.loads(make_record("x", 1.0, "s").model_dump_json())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "broken JSON"),
        ("[]", "got list"),
        ("3", "got int"),
        (json.dumps({**GOOD, "value": "fast"}), "value, got 'fast'"),
        (json.dumps({**GOOD, "samples": [1, "two"]}), r"samples\.1, got 'two'"),
        (json.dumps({key: GOOD[key] for key in GOOD if key != "unit"}), "unit, got nothing"),
        (json.dumps({**GOOD, "speed": 3}), "speed, got a field that no Record has"),
        (json.dumps({**GOOD, "what": ""}), "what, got ''"),
    ],
)
def test_an_invalid_line_says_where_and_what(tmp_path, line, words):
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n{json.dumps(GOOD)}\n")
    with pytest.raises(LoopKVError, match=rf"records {path}, line 3.*{words}") as caught:
        list(read_records([path]))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    # a last line without an end is passed over only where it is torn, not where it is whole and wrong
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}")
    if words == "broken JSON":
        assert len(list(read_records([path]))) == 1
    else:
        with pytest.raises(LoopKVError, match="line 3"):
            list(read_records([path]))


def test_appending_after_a_torn_line_drops_it(tmp_path):
    """A run that was killed while it wrote, and run again."""
    record = make_record("x", 1.0, "s")
    whole = record.to_line()
    path = tmp_path / "r.jsonl"
    for length in (*range(1, 9), *range(9, len(whole) - 1, 7)):
        for before in ("", whole):
            path.write_text(before + whole[:length])
            append_records(path, [record])
            assert path.read_text() == before + whole
    path.write_text(whole + whole.rstrip())  # whole, only the end of the line is missing
    append_records(path, [record])
    assert path.read_text() == whole * 3
    path.write_text("notes of somebody")
    append_records(path, [record])
    assert path.read_text() == "notes of somebody\n" + whole


@pytest.mark.parametrize(
    "tail",
    [
        b'{"w',
        b"\x00" * 4096,
        '{"what":"\N{GREEK SMALL LETTER TAU}'.encode()[:-1],
        b"\xff\xfe",
        b"tail",
        b"[" * 100_000,
        pytest.param(b"\x00" * (9 << 20), id="longer than a Record may be"),
    ],
)
def test_a_torn_tail_of_any_bytes_is_passed_over_and_cut_off(tmp_path, tail):
    path = tmp_path / "r.jsonl"
    record = make_record("x", 1.0, "s")
    append_records(path, [record])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert list(read_records([path])) == [record]
    append_records(path, [record])
    assert path.read_bytes() == whole * 2
    path.write_bytes(whole + b"\xff\n" + whole)  # not a tail: its end is there
    with pytest.raises(LoopKVError, match="line 2, got broken JSON"):
        list(read_records([path]))


def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "r.jsonl")
    with pytest.raises(LoopKVError, match="a named pipe"):
        list(read_records([tmp_path / "r.jsonl"]))
    with pytest.raises(LoopKVError, match="a directory"):
        list(read_records([tmp_path]))


@pytest.mark.parametrize(
    "arguments", [["a b", "it's", "$HOME", "*.json", ""], ["--named", "per-loop:int4,int2,share", "x;rm -rf y"]]
)
def test_the_command_can_be_pasted_into_a_shell(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/loopkv", "measure", *arguments])
    assert shlex.split(make_record("x", 1.0, "s").command) == ["loopkv", "measure", *arguments]
    monkeypatch.setattr(sys, "argv", ["loopkv", os.fsdecode(b"\xff.json")])
    assert "udcff.json" in json.loads(make_record("x", 1.0, "s").model_dump_json())["command"]


def test_the_commit_is_of_the_package_s_own_checkout_alone(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    own = tmp_path / "src" / "loopkv"
    installed = tmp_path / ".venv" / "lib" / "site-packages" / "loopkv"
    for folder in (own, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    assert _checkout_commit(own) is None  # no repository
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    assert _checkout_commit(own) is None  # at the right place, but not tracked
    assert _checkout_commit(installed) is None  # in an environment inside somebody's repository
    git("add", "src")
    git("commit", "-q", "-m", "ours")
    assert _checkout_commit(own) == git("rev-parse", "HEAD")
    assert _checkout_commit(installed) is None
    (own / "__init__.py").write_text("changed")
    assert _checkout_commit(own) == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a hook of another repository
    assert _checkout_commit(tmp_path.parent) is None
    here = Path(loopkv.__file__).resolve().parent
    assert _checkout_commit(here) != git("rev-parse", "HEAD")
