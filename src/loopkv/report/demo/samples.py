"""Answers to the same prompts, side by side."""

from __future__ import annotations

from loopkv.report.demo.contents import DemoReport
from loopkv.report.page import Figure, Section, Table, TextColumns


def sample_section(report: DemoReport) -> Section | None:
    """The samples' texts in columns; None without any."""
    if not report.samples:
        return None
    blocks: list[Figure | Table | TextColumns] = []
    for sample in report.samples:
        columns = [("Prompt", _shortened(sample.prompt)), *sample.outputs]
        if sample.expected is not None:
            columns.insert(1, ("Expected", sample.expected))
        texts = {text for _, text in sample.outputs}
        note = "All arms give the same text." if len(texts) == 1 and len(sample.outputs) > 1 else ""
        blocks.append(TextColumns(sample.title, note, tuple(columns)))
    lead = f"Greedy text of the same prompts under each arm ({report.command('generate')})."
    return Section("samples", "Answers side by side", lead, tuple(blocks))


def _shortened(text: str, head: int = 300, tail: int = 500) -> str:
    if len(text) <= head + tail + 40:
        return text
    return f"{text[:head]}\n[... {len(text) - head - tail:,} characters ...]\n{text[-tail:]}"
