"""Options of the measuring verbs: files that are missing are said before a model is loaded; journals lie beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopkv.cli.documents import check_documents_file
from loopkv.cli.eval_additivity import journal_beside
from loopkv.errors import DocumentError


def test_documents_that_are_missing(tmp_path):
    with pytest.raises(DocumentError, match="got no such file"):
        check_documents_file(tmp_path / "texts")  # not "suffix ''"
    assert check_documents_file(None) is None
    assert check_documents_file(tmp_path) == tmp_path  # what it is, the reader says


def test_the_additivity_journal_lies_beside_its_output():
    assert journal_beside(Path("a/p.json"), Path("b/r.jsonl")) == Path("b/r.jsonl.journal")
    assert journal_beside(Path("a/p.json"), None) == Path("a/p.json.additivity.journal")
