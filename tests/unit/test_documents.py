"""Documents from files: what is read, cut, passed over, and every way a file can be wrong."""

from __future__ import annotations

import json
import lzma
import os
import socket
import tracemalloc

import pytest

from loopkv import reference
from loopkv.errors import DocumentError
from loopkv.models import load_tokenizer
from loopkv.policy import DEFAULT_POLICY, Policy
from loopkv.profiler import documents
from loopkv.profiler.documents import Document, documents_sha256, load_documents, min_document_tokens
from loopkv.profiler.own_documents import read_prompts

LONG = "the quick brown fox jumps over the lazy dog. " * 200
SHORT = "too short"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(reference.model_folder())


@pytest.fixture
def load(tokenizer):
    def run(path, **options):
        options = {"policy": DEFAULT_POLICY, "vocab_size": 4096, "max_tokens": 400, **options}
        return load_documents(path, tokenizer, **options)

    return run


def _jsonl(path, *texts):
    data = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(data.encode()))
    else:
        path.write_text(data)
    return path


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.xz"])
def test_lines_are_cut_numbered_and_short_ones_passed_over(tmp_path, load, name):
    path = _jsonl(tmp_path / name, SHORT, LONG, "x" + LONG, SHORT, "y" + LONG)
    found = load(path)
    assert [d.source for d in found.documents] == [f"{name}#2", f"{name}#3", f"{name}#5"]
    assert [len(d.ids) for d in found.documents] == [400] * 3
    assert found.too_short == 2
    # skip and limit count the documents that are long enough
    assert [d.source for d in load(path, skip=1, limit=1).documents] == [f"{name}#3"]


def test_a_text_file_is_one_document(tmp_path, load):
    (tmp_path / "d.txt").write_text(LONG)
    (document,) = load(tmp_path / "d.txt").documents
    assert len(document.ids) == 400


def test_the_shortest_document_has_one_scored_position(tmp_path, load):
    assert min_document_tokens(DEFAULT_POLICY) == 320
    path = _jsonl(tmp_path / "d.jsonl", LONG)
    (document,) = load(path, max_tokens=320).documents
    assert document.info(DEFAULT_POLICY).scored_positions == 1
    with pytest.raises(DocumentError, match="319 tokens, wanted at least 320"):
        load(path, max_tokens=319)
    assert len(load(path, max_tokens=32, policy=Policy(sink_tokens=8, window_tokens=16, page_tokens=8)).documents) == 1


def test_identity_follows_the_tokens(tmp_path, load):
    path = _jsonl(tmp_path / "d.jsonl", LONG, "x" + LONG)
    first, second = load(path).documents
    assert first.sha256 != second.sha256
    assert first.sha256 == Document("elsewhere", first.ids).sha256
    assert documents_sha256([first, second]) != documents_sha256([second, first])
    assert load(path, max_tokens=399).documents[0].sha256 != first.sha256


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n', "the longest has"),
        (b"", "the longest has 0 tokens"),
        (b"\n\n", "the longest has 0 tokens"),
        (b'{"text": 3}\n', "line 1, got no text"),
        (b'{"texts": "a"}\n', "line 1, got no text"),
        (b'["text"]\n', "line 1, got no text"),
        (b'{"text": "a"}\n{"text"\n', "line 2, got broken JSON"),
        (b"[" * 100_000 + b"\n", "line 1, got broken JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path, load, content, words):
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(DocumentError, match=words) as caught:
        load(tmp_path / "d.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"no xz", lzma.compress(b'{"text": "abc"}\n' * 50)[:-30]])
def test_a_broken_archive_is_one_sentence(tmp_path, load, content):
    (tmp_path / "d.jsonl.xz").write_bytes(content)
    with pytest.raises(DocumentError):
        load(tmp_path / "d.jsonl.xz")


def test_missing_files_folders_and_other_suffixes(tmp_path, load):
    with pytest.raises(DocumentError, match="No such file"):
        load(tmp_path / "none.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(DocumentError, match="a directory"):
        load(tmp_path / "d.jsonl")
    with pytest.raises(DocumentError, match=r"suffix '\.csv'"):
        load(tmp_path / "d.csv")


def test_a_selection_beyond_the_end_is_refused(tmp_path, load):
    path = _jsonl(tmp_path / "d.jsonl", LONG, LONG)
    with pytest.raises(DocumentError, match="only 2 that are long enough"):
        load(path, skip=2)
    with pytest.raises(DocumentError, match="number of documents, got 0"):
        load(path, limit=0)


def test_the_tokenizer_of_another_model_is_noticed(tmp_path, load):
    path = _jsonl(tmp_path / "d.jsonl", LONG)
    with pytest.raises(DocumentError, match="vocabulary of 64"):
        load(path, vocab_size=64)


def test_prompts(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("one\n\n two \n")
    assert read_prompts(path) == ["one", " two "]
    path.write_text("\n \n")
    with pytest.raises(DocumentError, match="no line of text"):
        read_prompts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DocumentError, match="not UTF-8"):
        read_prompts(path)
    with pytest.raises(DocumentError, match="No such file"):
        read_prompts(tmp_path / "none")


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, load, monkeypatch, line_end):
    """64 MiB of blanks pack into some 10 KB; neither one line nor many may fill the memory."""
    monkeypatch.setattr(documents, "MAX_TEXT_BYTES", 1 << 20)
    path = tmp_path / "d.jsonl.xz"
    path.write_bytes(lzma.compress((b" " * 4095 + (line_end or b" ")) * (16 << 10)))
    assert path.stat().st_size < 20_000
    tracemalloc.start()
    with pytest.raises(DocumentError, match="more than 1048576 bytes of text"):
        load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_the_limit_counts_what_is_read(tmp_path, load, monkeypatch):
    path = _jsonl(tmp_path / "d.jsonl.xz", *([LONG] * 3))
    one = len(json.dumps({"text": LONG, "id": 1})) + 1
    monkeypatch.setattr(documents, "MAX_TEXT_BYTES", 3 * one)
    assert len(load(path).documents) == 3
    monkeypatch.setattr(documents, "MAX_TEXT_BYTES", 3 * one - 1)
    assert len(load(path, limit=2).documents) == 2
    with pytest.raises(DocumentError, match="bytes of text"):
        load(path)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.xz", "d.txt"])
def test_pipes_sockets_and_devices_do_not_block(tmp_path, load, name, monkeypatch):
    path = tmp_path / name
    for reader in (load, read_prompts):
        os.mkfifo(path)
        with pytest.raises(DocumentError, match="a named pipe"):
            reader(path)
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(DocumentError, match="a device"):
            reader(path)
        path.unlink()
        monkeypatch.chdir(tmp_path)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            with pytest.raises(DocumentError, match="a socket"):
                reader(path)
        path.unlink()
