"""Record names: the table, its documentation and what a record may lack."""

from __future__ import annotations

from pathlib import Path

from loopkv.record_kinds import RECORD_KINDS, markdown_table
from loopkv.records import Record

DOCS = Path(__file__).resolve().parents[2] / "docs" / "records.md"


def test_the_documentation_is_the_table() -> None:
    assert DOCS.read_text(encoding="utf-8").rstrip().endswith(markdown_table())


def test_missing_settings_are_named() -> None:
    kind = RECORD_KINDS["decode.step_ms"]
    record = Record(what=kind.name, value=1.0, unit=kind.unit, settings={"arm": "bf16", "batch": 0})
    assert kind.missing(record) == ("context_tokens",)


def test_no_key_is_both_required_and_optional() -> None:
    for kind in RECORD_KINDS.values():
        assert not set(kind.settings) & set(kind.optional), kind.name
