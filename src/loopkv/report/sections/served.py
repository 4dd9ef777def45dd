"""What an engine serves against the exact model and the policy it follows, and what its tests found."""

from __future__ import annotations

from collections.abc import Sequence

from loopkv.records import Record
from loopkv.report.page import Section, Table, table_of
from loopkv.report.sections.common import PLACES, figures_of, grouped, interval, latest, number, of_kind, text

_KINDS = ("quality.served_kl_nats", "quality.policy_kl_nats", "quality.byte_check")


def served_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``quality.served_kl_nats``, ``quality.policy_kl_nats`` and ``quality.byte_check``."""
    rows = [one for kind in _KINDS for one in latest(of_kind(records, kind), *PLACES[kind])]
    if not rows:
        return None
    places = grouped(rows, lambda r: (r.model or "", text(r, "prompt_tokens"), r.hardware))
    lead = (
        "Tokens of held-out documents are forced through the decode steps of a running engine. Served is the mean KL "
        "per token from the exact fp32 model to what it answers, policy that of the fp32 reference of the same plan at "
        "the same positions: a ratio of 1 says that the engine adds nothing to the plan's own damage."
    )
    return Section("served", "Served quality", lead, tuple(_table(*place, group) for place, group in places.items()))


def _table(model: str, prompt_tokens: str, hardware: str, rows: Sequence[Record]) -> Table:
    policies = {(text(r, "arm"), text(r, "dtype")): r for r in rows if r.what == "quality.policy_kl_nats"}
    lines = []
    shown: set[tuple[str, str]] = set()
    for (arm, dtype), group in grouped(
        [r for r in rows if r.what != "quality.policy_kl_nats"], lambda r: (text(r, "arm"), text(r, "dtype"))
    ).items():
        kinds = {r.what: r for r in group}
        of_policy = (arm, dtype) if (arm, dtype) in policies else (arm, "")  # fp32 whatever the engine's dtype
        lines.append(_line(arm, dtype, kinds.get(_KINDS[0]), policies.get(of_policy), kinds.get(_KINDS[2])))
        shown.add(of_policy)
    lines += [
        _line(arm, dtype or "-", None, r, None) for (arm, dtype), r in policies.items() if (arm, dtype) not in shown
    ]
    lines.sort(key=lambda line: line[1] != "float32")
    where = ", ".join(part for part in (model, hardware) if part)
    floor = "" if not any(line[0] == "stock" for line in lines) else " Stock is vLLM's own cache: the dtype's floor."
    note = f"After a prompt of {prompt_tokens} tokens.{floor}" if prompt_tokens else floor.strip()
    if any(r.what == "quality.byte_check" for r in rows):
        note += (
            " Wrong bytes: sampled history pages as the engine stored them, against the same tokens encoded by the "
            "reference codec."
        )
    columns = (
        "arm",
        "dtype",
        "served\nnats",
        "policy\nnats",
        "served /\npolicy",
        "wrong\nbytes",
        "95% interval\nof served",
        "same top\ntoken",
        "worst\nnats",
        "documents",
        "tokens",
    )
    return table_of(f"Served against exact ({where})", columns, lines, note.strip())


def _line(
    arm: str, dtype: str, served: Record | None, policy: Record | None, checked: Record | None
) -> tuple[str, ...]:
    some = served or policy or checked
    assert some is not None
    of_policy = policy.value if policy is not None else None if served is None else number(served, "policy_nats")
    ratio = None if served is None else number(served, "ratio")
    top = None if served is None else number(served, "top1")
    wrong = "-"
    if checked is not None:
        compared = number(checked, "compared_bytes")
        wrong = f"{float(checked.value or 0):,.0f}" + ("" if compared is None else f" of {compared:,.0f}")
    return (
        arm,
        dtype,
        _nats(None if served is None else served.value),
        _nats(of_policy),
        "-" if ratio is None else f"{ratio:.4f}",
        wrong,
        "-" if served is None else interval(served.settings.get("ci95")),
        "-" if top is None else f"{top:.2%}",
        _nats(None if served is None else number(served, "worst_nats")),
        figures_of(number(some, "documents"), 6),
        figures_of(number(some, "positions"), 6),
    )


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def tests_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``tests.gpu``: every run, the newest first."""
    rows = sorted(of_kind(records, "tests.gpu"), key=lambda r: r.date, reverse=True)
    if not rows:
        return None
    lines = [
        (
            (r.date[:19].replace("T", " ")) or "undated",
            r.hardware or "-",
            figures_of(r.value, 6),
            figures_of(number(r, "failed"), 6),
            figures_of(number(r, "skipped"), 6),
            figures_of(number(r, "seconds"), 4),
            (r.commit or "-")[:7],
        )
        for r in rows
    ]
    columns = ("run", "hardware", "passed", "failed", "skipped", "seconds", "commit")
    note = "A run of several processes writes a row for each of them and, last, one for all."
    return Section("tests", "GPU tests", "", (table_of("GPU tests", columns, lines, note),))
