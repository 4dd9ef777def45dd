"""Cache bytes of one request by its length, under each plan."""

from __future__ import annotations

from loopkv.report.demo.contents import DemoReport
from loopkv.report.page import Figure, Section, table_of
from loopkv.report.plots import Series, curves

KIB = 1024


def bytes_section(report: DemoReport) -> Section | None:
    """Curves of the bytes held; None without any."""
    if not report.request_bytes:
        return None
    arms = list(dict.fromkeys(row.arm for row in report.request_bytes))
    lengths = sorted({row.tokens for row in report.request_bytes})
    at = {(row.arm, row.tokens): row.held_bytes for row in report.request_bytes}
    series = [
        Series(
            arm,
            tuple(float(n) for n in lengths if (arm, n) in at),
            tuple(at[arm, n] / KIB / KIB for n in lengths if (arm, n) in at),
        )
        for arm in arms
    ]
    rows = [(arm, *("-" if (arm, n) not in at else f"{at[arm, n] / KIB / KIB:,.2f}" for n in lengths)) for arm in arms]
    figure = Figure(
        key="request-bytes",
        title="Cache bytes of one request",
        explanation="MiB held at each length: coded history plus exact sink and window, in whole blocks.",
        alt="; ".join(f"{row[0]}: {row[-1]} MiB at {lengths[-1]:,} tokens" for row in rows) + ".",
        command=report.command("capacity"),
        drawing=curves(series, "tokens of the request", "MiB held", log_x=len(lengths) > 2, log_y=len(lengths) > 2),
        data=table_of("MiB held", ("arm", *(f"{n:,} tokens" for n in lengths)), rows),
    )
    return Section("bytes", "Bytes per request", "What decides how many requests fit together.", (figure,))
