"""Records survive a file, a torn last line, and say how they were made."""

import pytest

from loopkv.errors import LoopKVError
from loopkv.records import append_records, make_record, read_records


def test_round_trip_and_provenance(tmp_path):
    record = make_record("decode.step_ms", 1.5, "ms", samples=(1.4, 1.6), settings={"arm": "bf16"}, seed=3)
    assert record.versions["python"].startswith("3.")
    assert record.hardware
    assert record.date
    append_records(tmp_path / "a" / "r.jsonl", [record, record])
    assert list(read_records([tmp_path / "a" / "r.jsonl"])) == [record, record]


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
