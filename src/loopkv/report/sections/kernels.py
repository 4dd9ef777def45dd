"""The kernels alone: time and share of the copy bandwidth, the newest run of every place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loopkv.records import Record
from loopkv.report.page import Figure, Section, Table, table_of
from loopkv.report.plots import bars
from loopkv.report.sections.common import command, figures_of, grouped, number, of_kind, slug, text

_GEOMETRY = ("head_dim", "kv_heads", "group_queries")
_PLACE = ("kernel", "option", *_GEOMETRY, "hot_share", "tau", "seed_mode", "batch", "context_tokens")
_FIRST = ("kernel", "option", "batch", "context_tokens")  # on a phone the measurements come right after these
_Place = tuple[str, ...]
_Drawn = tuple[_Place, dict[str, Record]]


def kernel_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``kernel.*``; a place measured more than once shows its newest run and counts the older ones."""
    rows = of_kind(records, "kernel.us", "kernel.bandwidth_share")
    if not rows:
        return None
    figures: list[Figure] = []
    tables: list[Table] = []
    for hardware, group in grouped(rows, lambda r: r.hardware).items():
        drawn, older = _newest(group)
        by_kernel = grouped_places([one for one in drawn if "kernel.bandwidth_share" in one[1]])
        figures += [_figure(hardware, kernel, shares) for kernel, shares in by_kernel.items()]
        tables.append(_table(hardware, drawn, older))
    return Section("kernels", "Kernels alone", "", (*figures, *tables))


def grouped_places(drawn: Sequence[_Drawn]) -> dict[str, list[_Drawn]]:
    """Places by the name of their kernel, in order of first appearance."""
    groups: dict[str, list[_Drawn]] = {}
    for one in drawn:
        groups.setdefault(one[0][0], []).append(one)
    return groups


def _place(record: Record) -> _Place:
    """Where a record stands: settings as text, the share of hot tokens to two digits (it is measured, not chosen)."""
    return tuple(
        ("" if (share := number(record, key)) is None else f"{share:.2f}") if key == "hot_share" else _text(record, key)
        for key in _PLACE
    )


def _text(record: Record, key: str) -> str:
    return "" if record.settings.get(key) is None else text(record, key)


def _run(record: Record) -> tuple[str, str]:
    return (record.commit or "", _text(record, "variant"))


def _newest(records: Sequence[Record]) -> tuple[list[_Drawn], list[Record]]:
    """The newest run (commit and variant) of every place, its time and share from that run alone, and all others."""
    drawn: list[_Drawn] = []
    older: list[Record] = []
    for place, group in grouped(records, _place).items():
        order = sorted(group, key=lambda r: r.date)  # stable: of one date, the later line is the newer
        run = _run(order[-1])
        kinds = {record.what: record for record in order if _run(record) == run}
        drawn.append((place, kinds))
        older += [record for record in order if all(record is not one for one in kinds.values())]
    return drawn, older


def _run_text(run: tuple[str, str]) -> str:
    commit, variant = run
    named = f"commit {commit[:7]}" if commit else "an unnamed commit"
    return f"{named}, variant {variant}" if variant else named


def _figure(hardware: str, kernel: str, shares: Sequence[_Drawn]) -> Figure:
    common = Counter(place[2:5] for place, _ in shares).most_common(1)[0][0]
    hots = {place[5] for place, _ in shares}
    at = {key: index for index, key in enumerate(_PLACE)}
    batch, context = at["batch"], at["context_tokens"]
    differing = {key for key in ("tau", "seed_mode") if len({place[at[key]] for place, _ in shares}) > 1}

    def label(place: _Place) -> str:
        name = f"{place[1]}, " if place[1] else ""
        name += f"{place[batch]} x {_thousands(place[context])}"
        name += f", hot {place[5]}" if place[5] and len(hots) > 1 else ""
        told_apart = (
            (f"tau {place[at['tau']].removesuffix('.0')}", "tau"),
            (f"{place[at['seed_mode']]} seed", "seed_mode"),
        )
        name += "".join(f", {said}" for said, key in told_apart if place[at[key]] and key in differing)
        parts = [
            text_of.format(value)
            for text_of, value, usual in zip(("D {}", "{} kv heads", "G {}"), place[2:5], common, strict=True)
            if value != usual and value
        ]
        return name + (f"\n{', '.join(parts)}" if parts else "")

    ordered = sorted(shares, key=lambda one: (one[0][2:5] != common, one[0][2:5], one[0][1]))
    names = [label(place) for place, _ in ordered]
    values = [100 * float(kinds["kernel.bandwidth_share"].value or 0) for _, kinds in ordered]
    usual = ", ".join(f"{name} {value}" for name, value in zip(("D", "kv heads", "G"), common, strict=True) if value)
    told = "Rows are option, batch x context" + (f" at {usual}; other geometries are named." if usual else ".")
    hot = f" V precision reads both value planes of {float(min(hots)):.0%} of the history." if _one_hot(hots) else ""
    return Figure(
        key=slug("kernel", hardware, kernel),
        title=f"Kernel {kernel}: share of the copy bandwidth",
        explanation=f"{hardware}. Bytes moved; 100% is what a plain copy reaches in the same run. {told}{hot}",
        alt="; ".join(f"{n}: {v:.0f}%" for n, v in zip(names, values, strict=True)).replace("\n", ", ") + ".",
        command=command([kinds["kernel.bandwidth_share"] for _, kinds in ordered]),
        place=hardware,
        drawing=bars(names, [("share", values)], "% of copy bandwidth", texts=[f"{v:.0f}" for v in values]),
    )


def _thousands(text: str) -> str:
    return f"{int(text):,}" if text.isdecimal() else text


def _one_hot(hots: set[str]) -> bool:
    return len(hots) == 1 and "" not in hots


def _table(hardware: str, drawn: Sequence[_Drawn], older: Sequence[Record]) -> Table:
    runs = list(dict.fromkeys(_run(record) for _, kinds in drawn for record in kinds.values()))
    lines = []
    for place, kinds in drawn:
        time, share = kinds.get("kernel.us"), kinds.get("kernel.bandwidth_share")
        some = time or share
        assert some is not None
        moved = number(some, "bytes")
        lines.append(
            (
                *(_thousands(place[_PLACE.index(key)]) or "-" for key in _FIRST),
                figures_of(None if time is None else time.value),
                "-" if moved is None else f"{moved / 1e6:,.4g}",
                "-" if share is None else f"{float(share.value or 0):.1%}",
                *(_thousands(part) or "-" for key, part in zip(_PLACE, place, strict=True) if key not in _FIRST),
                _run_text(_run(some)) if len(runs) > 1 else "-",
            )
        )
    first = ("kernel", "option", "batch", "context", "us", "MB", "of copy")
    columns = (*first, "D", "kv heads", "G", "hot", "tau", "V seed", "run")
    note = f"Measured at {_run_text(runs[0])}." if len(runs) == 1 and any(runs[0]) else ""
    if older:
        counts = Counter(_run(record) for record in older)
        each = "; ".join(f"{count} of {_run_text(run)}" for run, count in counts.items())
        note += f" {len(older)} older Records of the same places are not drawn: {each}."
    return table_of(f"Kernels ({hardware})", columns, lines, note.strip())
