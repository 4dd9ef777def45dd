"""A simulation's run in a few words, from what its Records were computed with."""

from __future__ import annotations

from loopkv.records import Record
from loopkv.report.sections.common import constants_of, watermark_of

FITTED_TO = {"decode.step_ms": "fitted to decode", "slo.cell": "fitted to ladder"}
"""Short names by the kind of the Records that an arm's constants are fitted to."""


def run_name(record: Record) -> str:
    """A simulation in a few words, without its arm: ``bytes``, ``fitted to decode, watermark 0.06``; empty where the
    Record is none or names no constants."""
    if not record.what.startswith("simulate."):
        return ""
    constants = constants_of(record)
    kind = next((name for rows, name in FITTED_TO.items() if f": {rows}: " in constants), None)
    kind = kind or ("fitted" if constants.startswith("fitted to ") else "bytes" if constants else "")
    watermark = watermark_of(record)
    return ", ".join(part for part in (kind, f"watermark {watermark:g}" if watermark else "") if part)
