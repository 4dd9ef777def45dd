"""What the sections share: picking records, the arms' order and colours, and numbers as text."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from loopkv.record_kinds import ignores_eos
from loopkv.records import Record
from loopkv.report.plots import short_number

_Key = TypeVar("_Key")
MAX_COMMANDS = 3
LONGEST_ID = 120
_FITS = re.compile(r"; (?=[^;]+: (?:decode\.step_ms|slo\.cell): )")
BASELINE_ARMS = ("bf16", "stock", "bf16-stock", "BF16")

_LADDER = (
    "arm",
    "tau0_ms",
    "k",
    "ttft_s",
    "workload",
    "gpu",
    "pool_bytes",
    "server",
    "ignore_eos",
    "constants",
    "watermark",
)
_SLO = (*_LADDER, "rate_per_s")
PLACES: dict[str, tuple[str, ...]] = {
    "decode.step_ms": ("arm", "context_tokens", "batch"),
    "decode.ttft_ms": ("arm", "context_tokens"),
    "decode.prefill_tok_s": ("arm", "context_tokens", "batch"),
    "decode.launches": ("arm", "context_tokens", "batch"),
    "decode.component_us": ("arm", "context_tokens", "batch", "component"),
    "decode.refused": ("arm", "context_tokens", "batch", "reason"),
    "slo.tau0_ms": ("arm", "tau0_rule", "workload", "server"),
    "slo.attainment": _SLO,
    "slo.capacity": _LADDER,
    "slo.capacity_ratio": (*_LADDER, "baseline"),
    "simulate.attainment": _SLO,
    "simulate.capacity": _LADDER,
    "quality.kl_nats": ("arm", "documents", "activations"),
    "quality.kl_share_nats": (),
    "quality.served_kl_nats": ("arm", "dtype", "prompt_tokens", "tau"),
    "quality.policy_kl_nats": ("arm", "dtype", "prompt_tokens", "tau"),
    "quality.byte_check": ("arm", "dtype", "prompt_tokens", "tau"),
    "tasks.accuracy": ("arm", "suite", "task"),
    "additivity.plan": ("arm", "documents"),
    "additivity.correlation": ("documents",),
}
"""Settings that are one place in a section, by kind: of several Records at a place only the newest is drawn."""
_PER_HARDWARE = ("decode.", "slo.", "simulate.", "quality.served", "quality.policy", "quality.byte")
_PER_SEED = ("slo.attainment", "slo.capacity", "slo.capacity_ratio", "simulate.")


def of_kind(records: Iterable[Record], *names: str) -> list[Record]:
    """Records of the named kinds that have a value, in file order."""
    return [record for record in records if record.what in names and record.value is not None]


def text(record: Record, key: str) -> str:
    """A setting as text."""
    return str(record.settings.get(key, ""))


def number(record: Record, key: str) -> float | None:
    """A setting as a number, None where it is absent or is not one."""
    value = record.settings.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def constants_of(record: Record) -> str:
    """The constants behind a simulated arm: those that all arms of its run share, and its own fit where it has one.

    A run's Records name the fits of all its arms (``LABEL: KIND: t_fix ...``); those of the others are left out.
    """
    shared, *fits = _FITS.split(str(record.settings.get("constants") or ""))
    arm = str(record.settings.get("arm", ""))
    return "; ".join([shared, *(fit for fit in fits if fit.startswith(f"{arm}: "))])


def watermark_of(record: Record) -> float:
    """Share of the pool that a simulation's admissions leave free; 0 where a Record names none."""
    return number(record, "watermark") or 0.0


def hardware_of(record: Record) -> str:
    """What was measured, or simulated (wherever that was computed)."""
    return text(record, "gpu") if record.what.startswith("simulate.") else record.hardware


def arms_of(records: Iterable[Record]) -> list[str]:
    """Arms in order of first appearance: one order, hence one colour, for a whole section."""
    return list(dict.fromkeys(text(record, "arm") for record in records))


def grouped(records: Iterable[Record], key: Callable[[Record], _Key]) -> dict[_Key, list[Record]]:
    """Records by key, keys in order of first appearance."""
    groups: dict[_Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def latest(records: Iterable[Record], *keys: str) -> list[Record]:
    """The last record of each combination of model and settings: a repeated run replaces the earlier one.

    Sections take their keys from ``PLACES``, so that the page can count what was replaced (``replaced``).
    """
    last: dict[tuple[Any, ...], Record] = {}
    for record in records:
        place = (record.model, *(_part(record, key) for key in keys))
        if place not in last or record.date >= last[place].date:
            last[place] = record
    return list(last.values())


def place_of(record: Record) -> tuple[Any, ...] | None:
    """Where a section would draw ``record``: kind, model, settings and, where rows are told apart by them, hardware and
    seed. None for a kind of which every Record has a row."""
    keys = PLACES.get(record.what)
    if keys is None:
        return None
    told_apart: list[Any] = [record.what, record.model]
    if record.what.startswith(_PER_HARDWARE):
        told_apart.append(hardware_of(record))
    if record.what.startswith(_PER_SEED):
        told_apart.append(record.seed)
    return (*told_apart, *(_part(record, key) for key in keys))


def _part(record: Record, key: str) -> str:
    """One setting of a place; every Record tells whether answers ran to their full length, and its watermark."""
    if key == "ignore_eos":
        return str(ignores_eos(record))
    if key == "constants":
        return constants_of(record)
    if key == "watermark":
        return f"{watermark_of(record):g}"
    if key == "tau0_ms" and number(record, key) is not None:
        return str(tau0_ms_of(record))
    if key == "server":
        return " ".join(server_options(record))
    return str(record.settings.get(key))


def tau0_ms_of(record: Record) -> float:
    """tau0 with four significant figures: measured as 1.42383 ms and given as 1.424 it is one bound, not two."""
    return float(f"{float(record.settings['tau0_ms']):.4g}")


def server_options(record: Record) -> tuple[str, ...]:
    """Options of a record's server, each once and in one order: ``--a 1 --b`` is the server of ``--b --a=1``."""
    given = (one.strip() for one in re.split(r"(?:^|\s)(?=--)", text(record, "server")))
    return tuple(sorted({re.sub(r"^(--[^\s=]+)\s+", r"\1=", one) for one in given if one}))


def replaced(records: Iterable[Record]) -> list[Record]:
    """Records that a later one of the same place has replaced in the page's tables and figures."""
    at = grouped(records, place_of)
    at.pop(None, None)
    older = []
    for group in at.values():
        order = sorted(group, key=lambda r: r.date)  # stable: of one date, the later line counts
        older += order[:-1]
    return older


def baseline(arms: Sequence[str]) -> str | None:
    """The arm that ratios refer to."""
    return next((arm for arm in BASELINE_ARMS if arm in arms), None)


def command(records: Sequence[Record]) -> str:
    """Command lines behind a figure, one a line, shortened where one names many files; of more than three their number.

    All of them stand in the page's Provenance, with the kinds and arms of their Records.
    """
    commands = list(dict.fromkeys(record.command for record in records if record.command))
    if len(commands) > MAX_COMMANDS:
        return f"{len(commands)} commands, see Provenance"
    return "\n".join(one if len(one) <= 400 else f"{one[:400]} ..." for one in commands)


def report_command(paths: Sequence[str], output: str, *, png: str | None = None, title: str | None = None) -> str:
    """Command line of the report itself, quoted for a shell; ``png`` and ``title`` where they were given."""
    named = [*(["--png", png] if png is not None else []), *(["--title", title] if title is not None else [])]
    files = ["--", *paths] if any(path.startswith("-") for path in paths) else list(paths)
    return shlex.join(["loopkv", "report", "-o", output, *named, *files])


def figures_of(value: float | None, digits: int = 4) -> str:
    """A measurement with ``digits`` significant figures, or a dash."""
    if value is None:
        return "-"
    if 10**digits <= abs(value) < 1e15:  # 40,920 rather than 4.092e+04
        return f"{float(f'{value:.{digits}g}'):,.0f}"
    return f"{value:,.{digits}g}" if 1e-3 <= abs(value) < 1e5 else short_number(value)


def kib(value: float | None) -> str:
    """Bytes as KiB."""
    return "-" if value is None else f"{value / 1024:,.6g}"


def interval(value: Any, scale: float = 1.0) -> str:
    """A pair ``[low, high]`` as text, or a dash."""
    if not (isinstance(value, list | tuple) and len(value) == 2):
        return "-"
    if not all(isinstance(end, int | float) for end in value):
        return "-"
    return f"{short_number(value[0] * scale)} to {short_number(value[1] * scale)}"


def slug(*parts: object) -> str:
    """An id for a figure, also its file's name: letters, digits and dashes, a long one cut and ending in a digest."""
    joined = "-".join(str(part) for part in parts).lower()
    plain = "".join(c if c.isalnum() and c.isascii() else "-" for c in joined).strip("-")
    if len(plain) <= LONGEST_ID:
        return plain
    return f"{plain[: LONGEST_ID - 9].strip('-')}-{hashlib.sha256(joined.encode()).hexdigest()[:8]}"
