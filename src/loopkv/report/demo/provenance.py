"""Where the numbers come from: timings, versions, identities."""

from __future__ import annotations

from loopkv.report.demo.contents import DemoReport
from loopkv.report.page import Figure, Section, Table, TextColumns, table_of


def provenance_section(report: DemoReport) -> Section:
    """Tables of timings, versions and hashes."""
    rows = [(stage, f"{seconds:.3f}") for stage, seconds in report.timings.items()]
    blocks: list[Figure | Table | TextColumns] = [table_of("Timings", ("stage", "seconds"), rows)]
    if report.versions:
        blocks.append(table_of("Versions", ("package", "version"), sorted(report.versions.items())))
    identities = [
        ("profile", report.profile.sha256),
        ("weights", report.profile.fingerprint.weights_sha256 or "unknown"),
        *((f"plan {plan.name}", plan.sha256) for plan in report.plans),
    ]
    blocks.append(table_of("Identities (SHA-256)", ("what", "hash"), [(name, text[:16]) for name, text in identities]))
    return Section("provenance", "Provenance", "", tuple(blocks))
