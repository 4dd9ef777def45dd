"""The demo page: its sections in order, written with the summary beside it."""

from __future__ import annotations

import json
from pathlib import Path

from loopkv.artifacts.storage import write_atomically
from loopkv.report.demo.contents import DemoReport
from loopkv.report.demo.damage import damage_section
from loopkv.report.demo.frontier import frontier_section
from loopkv.report.demo.plans import plan_section
from loopkv.report.demo.prediction import prediction_section
from loopkv.report.demo.provenance import provenance_section
from loopkv.report.demo.request_bytes import bytes_section
from loopkv.report.demo.samples import sample_section
from loopkv.report.demo.tasks import task_section
from loopkv.report.figure import write_png
from loopkv.report.page import Page, render_page
from loopkv.report.plots import short_number


def write_demo_report(report: DemoReport, folder: Path | str, *, png_folder: Path | str | None = None) -> Path:
    """Write ``report.html`` and ``summary.json`` into ``folder`` (and every figure as PNG into ``png_folder``).

    Returns:
        The path of the page.
    """
    folder = Path(folder)
    page = demo_page(report)
    write_atomically(folder / "report.html", render_page(page).encode())
    write_atomically(folder / "summary.json", (json.dumps(report.summary(), indent=1, allow_nan=False) + "\n").encode())
    if png_folder is not None:
        for figure in page.figures:
            write_png(figure.drawing, Path(png_folder) / f"{figure.key}.png", figure.png_title)
    return folder / "report.html"


def demo_page(report: DemoReport) -> Page:
    """The page before it is rendered: sections without data are left out."""
    geometry = report.profile.fingerprint.geometry
    shape = f"{geometry.loops} loops x {geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}"
    correlation = report.prediction_correlation
    exact = next((p.footprint.stored_bytes for p in report.plans if set(p.options) == {"bf16"}), None)
    facts = [
        ("Model", report.profile.fingerprint.name),
        ("Cells", f"{len(geometry.cells)} ({shape})"),
        ("Profiled in", f"{report.timings['profile_s']:.1f} s"),
        ("Planned in", f"{report.timings['plan_s']:.3g} s"),
        ("Predicted : measured", "-" if correlation is None else f"r = {correlation:.4f} (log-log)"),
        ("KL_share", "-" if report.profile.kl_share is None else f"{short_number(report.profile.kl_share)} nats"),
    ]
    sections = [
        damage_section(report),
        plan_section(report, exact),
        frontier_section(report),
        prediction_section(report),
        task_section(report),
        bytes_section(report),
        sample_section(report),
        provenance_section(report),
    ]
    return Page(
        title=f"LoopKV: {report.profile.fingerprint.name}",
        lead=(
            "A looped transformer keeps one KV cache per loop and layer (a cell). This page shows what each cell loses "
            "under each way of storing its history, the plans chosen from that, and what those plans do to the model."
        ),
        facts=(*facts, *report.facts),
        sections=tuple(section for section in sections if section is not None),
        footer="The command below a figure remakes it, run where the demo ran. Damage is fp32 KL in nats per token.",
    )
