"""Records with numbers that no axis can hold are listed with the reason, and the page is drawn all the same."""

from __future__ import annotations

import math

import pytest
from support.record_data import all_records

from loopkv.records import Record
from loopkv.report.from_records import problem, records_page
from loopkv.report.page import Table, render_page

PLACED = [r for r in all_records() if problem(r) is None]


def of(what: str) -> Record:
    return next(r for r in PLACED if r.what == what)


@pytest.mark.parametrize(
    ("what", "key", "value", "reason"),
    [
        ("slo.attainment", "rate_per_s", 1e308, "rate_per_s: not a number above 0"),
        ("slo.attainment", "rate_per_s", 1e-308, "rate_per_s: not a number above 0"),
        ("slo.attainment", "tau0_ms", 10**400, "tau0_ms: not a number above 0"),
        ("simulate.capacity", "pool_bytes", 10**400, "pool_bytes: a number that cannot be drawn"),
        ("slo.capacity_ratio", "ci95", [1.0, math.inf], "ci95: a number that cannot be drawn"),
        ("decode.step_ms", "read_bytes_per_request", math.nan, "read_bytes_per_request: a number that cannot be drawn"),
        ("decode.step_ms", "batch", True, "batch: not a number above 0"),
    ],
)
def test_settings_beyond_any_measurement(what: str, key: str, value: object, reason: str) -> None:
    good = of(what)
    check(good, good.model_copy(update={"settings": {**good.settings, key: value}}), reason)


@pytest.mark.parametrize("changes", [{"value": 1e308}, {"value": -1e19}, {"samples": (1.0, 1e308)}])
def test_values_and_samples_beyond_any_measurement(changes: dict[str, object]) -> None:
    for what in ("slo.attainment", "decode.step_ms"):
        check(of(what), of(what).model_copy(update=changes), "a value or samples that cannot be drawn")


def check(good: Record, bad: Record, reason: str) -> None:
    assert problem(good) is None and problem(bad) == reason
    page = records_page([good, bad])
    assert render_page(page)
    tables = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
    (listed,) = (table for table in tables if table.title == "Records not drawn")
    assert [row[listed.columns.index("why")] for row in listed.rows] == [reason]
