"""``loopkv report``: tables and plots from Records alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from loopkv.artifacts.storage import write_atomically
from loopkv.errors import LoopKVError
from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import Record, read_records
from loopkv.report.figure import write_png
from loopkv.report.page import Figure, Page, Section, Table, TextColumns, render_page, table_of
from loopkv.report.sections.common import arms_of, figures_of, interval, replaced, report_command
from loopkv.report.sections.decode import decode_section, drawn_steps, superseded
from loopkv.report.sections.kernels import kernel_section
from loopkv.report.sections.quality import quality_section, task_section
from loopkv.report.sections.served import served_section, tests_section
from loopkv.report.sections.slo import slo_section

TITLE = "LoopKV results"
SECTIONS = (
    decode_section,
    slo_section,
    quality_section,
    served_section,
    task_section,
    kernel_section,
    tests_section,
)
DRAWN_KINDS = {
    "decode.step_ms",
    "decode.ttft_ms",
    "decode.prefill_tok_s",
    "decode.component_us",
    "decode.refused",
    "kernel.us",
    "kernel.bandwidth_share",
    "slo.tau0_ms",
    "slo.attainment",
    "slo.capacity",
    "slo.capacity_ratio",
    "simulate.attainment",
    "simulate.capacity",
    "quality.kl_nats",
    "quality.served_kl_nats",
    "quality.policy_kl_nats",
    "quality.byte_check",
    "tests.gpu",
    "tasks.accuracy",
    "additivity.plan",
}
"""Kinds with tables or figures of their own; every other known kind gets a plain table."""
FOLDED_KINDS = {
    "decode.tok_s": "derived from decode.step_ms",
    "slo.cell": "raw requests behind slo.attainment",
}
"""Kinds that are counted only, with the reason."""
MAY_LACK_VALUE = ("decode.refused", "slo.capacity", "simulate.capacity")
SMALLEST, LARGEST = 1e-15, 1e18
"""Limits of what is drawn, far beyond any measurement: axes fail near the limits of floats."""
POSITIVE_SETTINGS = ("context_tokens", "batch", "rate_per_s", "tau0_ms", "k", "ttft_s")


def write_records_report(
    paths: Sequence[Path | str],
    output: Path | str,
    *,
    png_folder: Path | str | None = None,
    title: str = TITLE,
) -> Path:
    """Read Records and write one self-contained page (and every figure as PNG into ``png_folder``).

    Raises:
        LoopKVError: no file, an unreadable one, or no record at all.
    """
    records = list(read_records(paths))
    if not records:
        raise LoopKVError("report", got="no record", wanted="JSON-lines files written by loopkv bench or loopkv eval")
    line = report_command(
        [str(path) for path in paths],
        str(output),
        png=None if png_folder is None else str(png_folder),
        title=None if title == TITLE else title,
    )
    page = records_page(records, title=title, command=line)
    write_atomically(Path(output), render_page(page).encode())
    if png_folder is not None:
        for figure in page.figures:
            write_png(figure.drawing, Path(png_folder) / f"{figure.key}.png", figure.png_title)
    return Path(output)


def records_page(records: Sequence[Record], *, title: str = TITLE, command: str = "") -> Page:
    """The page before it is rendered."""
    placed = [record for record in records if problem(record) is None]
    sections: list[Section | None] = [make(placed) for make in SECTIONS]
    sections.append(_plain_section(placed))
    sections.append(_other_section(records))
    sections.append(_provenance_section(records))
    simulated = [record for record in records if record.what.startswith("simulate.")]
    hardware = dict.fromkeys(r.hardware for r in records if r.hardware and not r.what.startswith("simulate."))
    gpus = dict.fromkeys(str(r.settings.get("gpu") or "unnamed") for r in simulated)
    computed = dict.fromkeys(r.hardware for r in simulated if r.hardware)
    dates = sorted(record.date for record in records if record.date)
    facts = [
        ("Records", f"{len(records):,}"),
        *([("Hardware", "; ".join(hardware) or "-")] if hardware or not simulated else []),
        *([("GPU simulated", "; ".join(gpus))] if simulated else []),
        *([("Simulated on", "; ".join(computed))] if computed else []),
        ("Models", "; ".join(dict.fromkeys(r.model for r in records if r.model)) or "-"),
        (
            "Measured" if len(simulated) < len(records) else "Simulated",
            "-" if not dates else f"{dates[0][:10]} to {dates[-1][:10]}",
        ),
    ]
    return Page(
        title=title,
        lead="Every number on this page is a Record: a value with the command, versions and hardware behind it.",
        facts=tuple(facts),
        sections=_with_ids_of_their_own([section for section in sections if section is not None]),
        footer=f"Drawn by: {command}" if command else "",
    )


def _with_ids_of_their_own(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The sections, later figures of one id numbered: names that differ in punctuation only, say."""
    used = {section.key for section in sections}

    def own(block: Figure | Table | TextColumns) -> Figure | Table | TextColumns:
        if not isinstance(block, Figure):
            return block
        names = itertools.chain([block.key], (f"{block.key}-{number}" for number in itertools.count(2)))
        key = next(name for name in names if name not in used)
        used.add(key)
        return dataclasses.replace(block, key=key)

    return tuple(dataclasses.replace(one, blocks=tuple(map(own, one.blocks))) for one in sections)


def problem(record: Record) -> str | None:
    """Why a record cannot be placed, or None."""
    kind = RECORD_KINDS.get(record.what)
    if kind is None:
        return "a name that this release does not draw"
    missing = kind.missing(record)
    if missing:
        return f"lacks {', '.join(missing)}"
    if kind.unit != record.unit:
        return f"unit {record.unit!r}, wanted {kind.unit!r}"
    wrong = [key for key in POSITIVE_SETTINGS if key in kind.settings and not _is_positive(record.settings[key])]
    if wrong:
        return f"{', '.join(wrong)}: not a number above 0"
    wild = [key for key in (*kind.settings, *kind.optional) if not _is_drawable(record.settings.get(key))]
    if wild:
        return f"{', '.join(wild)}: a number that cannot be drawn"
    if record.value is not None and not math.isfinite(record.value):
        return "a value that is not finite"
    if not _is_drawable([record.value, *record.samples]):
        return "a value or samples that cannot be drawn"
    if record.what == "decode.step_ms" and record.value is not None and record.value < SMALLEST:
        return "a step time that is not above 0"
    return None


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


def _is_drawable(value: object) -> bool:
    """Whether every number in a setting is within the limits of what is drawn."""
    if isinstance(value, list | tuple):
        return all(map(_is_drawable, value))
    if isinstance(value, dict):
        return all(map(_is_drawable, value.values()))
    return not isinstance(value, int | float) or -LARGEST <= value <= LARGEST


def _plain_section(records: Sequence[Record]) -> Section | None:
    """One plain table per known kind that has no drawing of its own."""
    blocks = []
    for name, kind in RECORD_KINDS.items():
        rows = [r for r in records if r.what == name and r.value is not None]
        if not rows or name in DRAWN_KINDS or name in FOLDED_KINDS:
            continue
        keys = [*kind.settings, *kind.optional]
        blocks.append(
            table_of(
                name,
                (*(key.replace("_", " ") for key in keys), f"value ({kind.unit})" if kind.unit else "value"),
                [(*(_setting(r.settings.get(key)) for key in keys), figures_of(r.value)) for r in rows],
                kind.meaning[:1].upper() + kind.meaning[1:] + ".",
            )
        )
    return Section("more", "More measurements", "", tuple(blocks)) if blocks else None


def _setting(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return figures_of(float(value), 6 if float(value).is_integer() else 4)
    if isinstance(value, list) and (ends := interval(value)) != "-":
        return ends
    if isinstance(value, dict):
        return ", ".join(f"{key} {_setting(one)}" for key, one in value.items()) or "-"
    return value if isinstance(value, str) else json.dumps(value)


def _other_section(records: Sequence[Record]) -> Section | None:
    """What is not drawn above: unplaced records with the reason, known kinds without a row as counts."""
    blocks = []
    unplaced = [(record, why) for record in records if (why := problem(record)) is not None]
    if unplaced:
        blocks.append(
            table_of(
                "Records not drawn",
                ("what", "value", "unit", "why", "settings"),
                [
                    (
                        record.what,
                        figures_of(record.value),
                        record.unit or "-",
                        why,
                        json.dumps(record.settings, sort_keys=True)[:300],
                    )
                    for record, why in unplaced
                ],
            )
        )
    counts = Counter(record.what for record in records if record.what in FOLDED_KINDS)
    empty = Counter(
        record.what
        for record in records
        if record.value is None and record.what in RECORD_KINDS and record.what not in MAY_LACK_VALUE
    )
    other_commits = drawn_steps([r for r in records if problem(r) is None])[1]
    elsewhere = {id(record) for record in other_commits}
    older = Counter(
        record.what
        for record in replaced(
            r for r in records if r.what in DRAWN_KINDS and problem(r) is None and id(r) not in elsewhere
        )
    )
    later = Counter(record.what for record in superseded([r for r in records if problem(r) is None]))
    if counts or empty or older or later or other_commits:
        rows = [(what, f"{count:,}", FOLDED_KINDS[what]) for what, count in counts.items()]
        rows += [(what, f"{count:,}", "a later Record of the same place is drawn") for what, count in older.items()]
        rows += [
            (what, f"{count:,}", "rows of other commits than the one drawn for their arm and context")
            for what, count in Counter(record.what for record in other_commits).items()
        ]
        rows += [(what, f"{count:,}", "the same row or arm ran later") for what, count in later.items()]
        rows += [(what, f"{count:,}", "no value") for what, count in empty.items()]
        blocks.append(table_of("Records without a row of their own", ("what", "records", "why"), rows))
    return Section("others", "Not drawn", "", tuple(blocks)) if blocks else None


def _provenance_section(records: Sequence[Record]) -> Section:
    kinds = Counter(record.what for record in records)
    commands = Counter(record.command for record in records if record.command)
    by_command = {line: [r for r in records if r.command == line and r.settings.get("arm")] for line in commands}
    kinds_of = {line: {r.what for r in records if r.command == line} for line in commands}
    versions: dict[str, set[str]] = {}
    for record in records:
        for package, version in record.versions.items():
            versions.setdefault(package, set()).add(version)
    commits = Counter(record.commit for record in records if record.commit)
    return Section(
        "provenance",
        "Provenance",
        "",
        (
            table_of("Records by kind", ("what", "records"), [(what, f"{n:,}") for what, n in sorted(kinds.items())]),
            table_of(
                "Commands",
                ("command", "records", "kinds", "arms"),
                [
                    (line, f"{n:,}", ", ".join(sorted(kinds_of[line])), ", ".join(arms_of(by_command[line])) or "-")
                    for line, n in commands.most_common()
                ],
            ),
            table_of("Commits", ("commit", "records"), [(text, f"{n:,}") for text, n in commits.most_common()]),
            table_of(
                "Versions",
                ("package", "versions"),
                [(package, ", ".join(sorted(found))) for package, found in sorted(versions.items())],
            ),
        ),
    )
