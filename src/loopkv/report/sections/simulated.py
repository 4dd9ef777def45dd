"""What a simulation's Records were computed with: the constants of an arm, in full and as a short name."""

from __future__ import annotations

import re

from loopkv.records import Record

FITTED_TO = {"decode.step_ms": "fitted to decode", "slo.cell": "fitted to ladder"}
"""Short names by the kind of the Records that an arm's constants are fitted to."""
_FITS = re.compile(r"; (?=[^;]+: (?:decode\.step_ms|slo\.cell): )")


def constants_of(record: Record) -> str:
    """The constants behind a simulated arm: those that all arms of its run share, and its own fit where it has one.

    A run's Records name the fits of all its arms (``LABEL: KIND: t_fix ...``); those of the others are left out.
    """
    shared, *fits = _FITS.split(str(record.settings.get("constants") or ""))
    arm = str(record.settings.get("arm", ""))
    return "; ".join([shared, *(fit for fit in fits if fit.startswith(f"{arm}: "))])


def watermark_of(record: Record) -> float:
    """Share of the pool that admissions leave free; 0 where a Record names none."""
    value = record.settings.get("watermark")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


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
