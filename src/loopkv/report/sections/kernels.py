"""The kernels alone: time and share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

from loopkv.records import Record
from loopkv.report.page import Figure, Section, Table, table_of
from loopkv.report.plots import bars
from loopkv.report.sections.common import command, figures_of, grouped, number, of_kind, slug, text

_PLACE = ("kernel", "option", "head_dim", "kv_heads", "group_queries", "hot_share", "batch", "context_tokens")


def kernel_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``kernel.*``."""
    rows = of_kind(records, "kernel.us", "kernel.bandwidth_share")
    if not rows:
        return None
    blocks: list[Figure | Table] = []
    for hardware, group in grouped(rows, lambda r: r.hardware).items():
        at: dict[tuple[str, ...], dict[str, Record]] = {}
        for record in group:
            at.setdefault(tuple(text(record, key) for key in _PLACE), {})[record.what] = record
        shares = [
            (place, kinds["kernel.bandwidth_share"]) for place, kinds in at.items() if "kernel.bandwidth_share" in kinds
        ]
        if shares:
            names = [
                " ".join(part for part in (p[0], p[1], f"B{p[6]} N{p[7]}", f"hot {p[5]}" if p[5] else "") if part)
                for p, _ in shares
            ]
            values = [100 * float(r.value or 0) for _, r in shares]
            blocks.append(
                Figure(
                    key=slug("kernel", hardware),
                    title="Bytes moved, as a share of the copy bandwidth",
                    explanation=f"100% is what a plain copy reaches in the same run ({hardware}).",
                    alt="; ".join(f"{name}: {value:.0f}%" for name, value in zip(names, values, strict=True)) + ".",
                    command=command([r for _, r in shares]),
                    drawing=bars(names, [("share", values)], "% of copy bandwidth", texts=[f"{v:.0f}" for v in values]),
                )
            )
        lines = []
        for place, kinds in at.items():
            time, share = kinds.get("kernel.us"), kinds.get("kernel.bandwidth_share")
            some = time or share
            assert some is not None
            moved = number(some, "bytes")
            lines.append(
                (
                    *(part or "-" for part in place),
                    figures_of(None if time is None else time.value),
                    "-" if moved is None else f"{moved / 1e6:,.4g}",
                    "-" if share is None else f"{float(share.value or 0):.1%}",
                )
            )
        columns = ("kernel", "option", "D", "kv heads", "G", "hot", "batch", "context", "us", "MB", "of copy")
        blocks.append(table_of(f"Kernels ({hardware})", columns, lines))
    return Section("kernels", "Kernels alone", "", tuple(blocks))
