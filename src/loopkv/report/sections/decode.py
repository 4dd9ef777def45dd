"""Decode throughput: sweeps over the batch, the step-time model, time by component, rows that could not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loopkv.capacity import datasheet_bandwidth
from loopkv.errors import LoopKVError
from loopkv.records import Record, of_one_commit
from loopkv.report.page import Figure, Section, Table, table_of
from loopkv.report.plots import Series, bars, curves
from loopkv.report.plots.series import HEIGHT_IN
from loopkv.report.sections.common import (
    PLACES,
    arms_of,
    baseline,
    command,
    figures_of,
    grouped,
    kib,
    latest,
    number,
    of_kind,
    slug,
    text,
)
from loopkv.step_time import StepRow, StepTimeModel, hold_out, matched_tokens_per_s

DRAWN_PARTS = 7
FEW_ARMS = 5
"""Arms beyond make a figure higher: the names at the ends of their lines need room."""
A_A = " (A/A)"
"""Behind the name of an arm that ran a second time."""
_MEASURED = ("decode.step_ms", "decode.ttft_ms", "decode.prefill_tok_s")
_CURVE_ROWS = 3
_WHOLE_ENGINE = ("engine", "all")  # slots of bench decode that are no single row


def decode_section(records: Sequence[Record]) -> Section | None:
    """Everything of ``decode.*``."""
    steps = of_kind(records, "decode.step_ms")
    figures: list[Figure] = []
    tables: list[Table] = []
    alone = {(r.model or "", r.hardware) for r in of_kind(records, "decode.ttft_ms", "decode.prefill_tok_s")}
    alone -= {(r.model or "", r.hardware) for r in steps}
    tables += [t for place in sorted(alone) if (t := _prefill_table(records, *place)) is not None]
    for (model, hardware), group in grouped(steps, lambda r: (r.model or "", r.hardware)).items():
        of_one, of_others = drawn_steps(group)
        rows = latest(of_one, *PLACES["decode.step_ms"])
        arms = arms_of(rows)
        launches = _launches(records, model, hardware)
        others = grouped(of_others, lambda r: int(r.settings["context_tokens"]))
        for context, at in sorted(grouped(rows, lambda r: int(r.settings["context_tokens"])).items()):
            commits = _commits(at, others.get(context, []))
            figure, table = _sweep(model, hardware, context, at, arms, launches, commits)
            figures.append(figure)
            tables.append(table)
        where = f"{model} on {hardware}" if model else hardware
        tables += [
            t for t in (_fit_table(rows, arms, where), _prefill_table(records, model, hardware)) if t is not None
        ]
    blocks: list[Figure | Table] = [*figures, *tables, *_breakdown(records)]
    later = superseded(records)
    refused = [r for r in records if r.what == "decode.refused" and all(r is not one for one in later)]
    if refused:
        blocks.append(
            table_of(
                "Rows that could not run",
                ("arm", "context", "batch", "reason"),
                [
                    (
                        text(r, "arm"),
                        figures_of(number(r, "context_tokens"), 6),
                        figures_of(number(r, "batch"), 6) if number(r, "batch") is not None else text(r, "slot") or "-",
                        text(r, "reason"),
                    )
                    for r in latest(refused, *PLACES["decode.refused"])
                ],
            )
        )
    if not blocks:
        return None
    lead = (
        "B requests of one context decode together; a step gives each of them one token. Lower and further right is "
        "not better or worse by itself: compare arms at one time per token, and where each stops for want of memory."
    )
    return Section("decode", "Decode throughput", lead, tuple(blocks))


def peaks(records: Sequence[Record]) -> list[Record]:
    """The fastest row of each arm at each place (``decode_place``), as its ``decode.step_ms`` record."""
    best: dict[tuple[str, str, int, str], Record] = {}
    for _, group in grouped(of_kind(records, "decode.step_ms"), lambda r: (r.model or "", r.hardware)).items():
        for record in latest(drawn_steps(group)[0], *PLACES["decode.step_ms"]):
            key = (*decode_place(record), text(record, "arm"))
            if key not in best or tokens_per_s(record) > tokens_per_s(best[key]):
                best[key] = record
    return list(best.values())


def drawn_steps(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The ``decode.step_ms`` rows that are drawn and those that are not: of an arm, each context's line is of one
    commit, the newest with a curve (``_CURVE_ROWS`` rows), else that of most rows. Two versions of the code are no one
    curve."""
    kept: list[Record] = []
    others: list[Record] = []
    steps = of_kind(records, "decode.step_ms")
    for group in grouped(steps, lambda r: (*decode_place(r), text(r, "arm"))).values():
        sweeps = [of for of in grouped(group, lambda r: r.commit).values() if len(of) >= _CURVE_ROWS]
        newest = max(sweeps, key=lambda of: max(r.date or "" for r in of)) if sweeps else of_one_commit(group)[0]
        drawn = {id(record) for record in newest}
        kept += newest
        others += [record for record in group if id(record) not in drawn]
    order = {id(record): number for number, record in enumerate(steps)}
    return sorted(kept, key=lambda r: order[id(r)]), sorted(others, key=lambda r: order[id(r)])


def _commits(rows: Sequence[Record], others: Sequence[Record]) -> str:
    """A sentence on the commits of an arm's rows, where there are several or some are left out."""
    by_commit = grouped(rows, lambda r: r.commit)
    if len(by_commit) < 2 and not others:
        return ""
    told = "; ".join(f"{', '.join(arms_of(group))} of {_short(commit)}" for commit, group in by_commit.items())
    left = grouped(others, lambda r: (text(r, "arm"), r.commit))
    rest = ", ".join(f"{len(group)} of {arm} of {_short(commit)}" for (arm, commit), group in left.items())
    return f" Rows by commit: {told}." + (f" Rows not drawn, of other commits: {rest}." if rest else "")


def _short(commit: str | None) -> str:
    if commit is None:
        return "no commit"
    bare, dirty, _ = commit.partition("-dirty")
    return bare[:7] + dirty


def decode_place(record: Record) -> tuple[str, str, int]:
    """Model, hardware and context of a decode row: what stands side by side."""
    return record.model or "", record.hardware, int(record.settings["context_tokens"])


def tokens_per_s(record: Record) -> float:
    """Throughput of a ``decode.step_ms`` record."""
    assert record.value is not None
    return 1e3 * float(record.settings["batch"]) / record.value


def _launches(records: Sequence[Record], model: str, hardware: str) -> dict[tuple[str, int], float]:
    """Launches of one step by arm and context: those of the largest batch, which is where a step is profiled."""
    rows = [r for r in of_kind(records, "decode.launches") if (r.model or "", r.hardware) == (model, hardware)]
    rows = sorted(latest(rows, *PLACES["decode.launches"]), key=lambda r: float(r.settings["batch"]))
    return {(text(r, "arm"), int(r.settings["context_tokens"])): float(r.value or 0) for r in rows}


def _sweep(
    model: str,
    hardware: str,
    context: int,
    rows: Sequence[Record],
    arms: Sequence[str],
    launches: dict[tuple[str, int], float],
    commits: str,
) -> tuple[Figure, Table]:
    by_arm = {arm: sorted(g, key=lambda r: float(r.settings["batch"])) for arm, g in grouped(rows, _arm).items()}
    best = {arm: max(g, key=tokens_per_s) for arm, g in by_arm.items()}
    base = stock_arm(rows)
    looks = _looks(arms)
    bound_ms = best[base].value if base is not None else None
    series = [
        Series(
            arm,
            tuple(float(r.value or 0) for r in by_arm[arm]),
            tuple(tokens_per_s(r) for r in by_arm[arm]),
            labels=(*("" for _ in by_arm[arm][:-1]), f"{arm}, {by_arm[arm][-1].settings['batch']}"),
            colour=looks[arm],
            dashed=arm.endswith(A_A),
            hollow=arm.endswith(A_A),
        )
        for arm in arms
        if arm in by_arm
    ]
    where = ", ".join(part for part in (model, hardware) if part)
    table = []
    for arm in (arm for arm in arms if arm in by_arm):
        top = best[arm]
        first = by_arm[arm][0]
        matched = None
        if bound_ms is not None:
            pairs = [(int(r.settings["batch"]), float(r.value or 0) / 1e3) for r in by_arm[arm]]
            matched = matched_tokens_per_s(pairs, bound_ms / 1e3)
        peak_batches = [peak for r in by_arm[arm] if (peak := number(r, "peak_batch")) is not None]
        again = arm.endswith(A_A)  # has fewer batches than its arm: compared at one batch, not at its best
        ratio = "-" if base is None or again else f"{tokens_per_s(top) / tokens_per_s(best[base]):.2f}x"
        at_time = "-" if base is None or again or matched is None else f"{matched / tokens_per_s(best[base]):.2f}x"
        table.append(
            (
                arm,
                kib(number(top, "stored_bytes")),
                kib(number(top, "read_bytes")),
                figures_of(tokens_per_s(top)),
                figures_of(number(top, "batch"), 6),
                figures_of(top.value),
                figures_of(max(peak_batches, default=None), 6),
                ratio,
                _at_one_batch(by_arm[arm], by_arm.get(arm.removesuffix(A_A), ())) if again else "-",
                figures_of(matched),
                at_time,
                _percent(number(top, "hot_share")),
                figures_of(first.value) if first.settings["batch"] == 1 else "-",
                figures_of(launches.get((arm, context)), 6),
            )
        )
    twice = (
        " An A/A arm is the same arm run again: dashed, and compared with its first run at equal batches."
        if any(arm.endswith(A_A) for arm in by_arm)
        else ""
    )
    told = ", ".join(f"{row[0]} {row[3]} tok/s at batch {row[4]}" for row in table)
    figure = Figure(
        key=slug("decode", model, hardware, context),
        title=f"Decode at {context:,} tokens of context",
        explanation=(
            f"{where}. Each line is one arm as its batch grows; its end names it and the largest batch measured. "
            f"Further up at one time per token is better.{twice}{commits}"
        ),
        alt=f"Tokens per second over time per token at {context:,} tokens: {told}.",
        command=command(rows),
        place=where,
        drawing=curves(
            series,
            "time per output token (ms)",
            "decode tok/s",
            log_x=True,
            height_in=HEIGHT_IN + 0.15 * max(0, len(series) - FEW_ARMS),
            vertical=None if bound_ms is None or base is None else (bound_ms, f"{base} at its best"),
        ),
    )
    matched_name = "tok/s at\nmatched time" if bound_ms is None else f"tok/s at\n{bound_ms:.4g} ms"
    columns = (
        "arm",
        "stored\nKiB/token",
        "read\nKiB/token",
        "best\ntok/s",
        "batch",
        "step ms",
        "resident\npeak",
        f"x {base}" if base else "ratio",
        "A/A\n(batch)",
        matched_name,
        "x at\nthat time",
        "hot",
        "batch-1\nstep ms",
        "launches\nper step",
    )
    explained = (
        ((1, 2), "KiB per token of history, both value planes."),
        (
            (6,),
            "Best: the batch measured at which the arm is fastest; the resident peak, the most requests that stay "
            "resident, may be another.",
        ),
        (
            (8,),
            "A/A: the same arm run again, over its first run at one batch: of those that both have measured, the one "
            "at which the first was fastest. It has fewer batches than its arm, so its best is compared with nothing.",
        ),
        (
            (9,),
            f"{matched_name.replace(chr(10), ' ')}: each arm's batch interpolated at the time per token of the "
            "baseline's best, or its largest batch where that is faster; a dash means that its smallest is slower.",
        ),
        ((11,), "Hot: share of the history that V precision read with both value planes."),
    )
    note = " ".join(text for at, text in explained if any(row[c] != "-" for row in table for c in at))
    return figure, table_of(f"Decode at {context:,} tokens ({where})", columns, table, note)


def stock_arm(rows: Sequence[Record]) -> str | None:
    """The arm that ratios refer to: by its name, or vLLM's own cache at its defaults."""
    named = baseline(arms_of(rows))
    return named or next((text(r, "arm") for r in rows if r.settings.get("spec") == "stock"), None)


def superseded(records: Sequence[Record]) -> list[Record]:
    """``decode.refused`` Records of what ran later: the same row, or, where an engine failed, the same arm.

    An engine's failure names no slot, or the slot ``engine`` where it did not even start, whatever the context.
    """
    ran = [r for r in records if r.what in _MEASURED and r.value is not None]

    def is_later(refused: Record, row: Record) -> bool:
        same = (row.model, row.hardware, text(row, "arm")) == (refused.model, refused.hardware, text(refused, "arm"))
        same = same and all(
            row.settings.get(key) == refused.settings[key] for key in ("spec", "engine") if key in refused.settings
        )
        slot, context = refused.settings.get("slot"), refused.settings.get("context_tokens")
        where = context is None or row.settings.get("context_tokens") == context
        what = slot in (None, *_WHOLE_ENGINE) or row.settings.get("slot") == slot
        return same and where and what and row.date > refused.date

    return [r for r in records if r.what == "decode.refused" and any(is_later(r, row) for row in ran)]


def _looks(arms: Sequence[str]) -> dict[str, int]:
    """Number of each arm's look: its place among the arms, an A/A arm that of its arm."""
    order = list(dict.fromkeys(arm.removesuffix(A_A) for arm in arms))
    return {arm: order.index(arm.removesuffix(A_A)) for arm in arms}


def _at_one_batch(again: Sequence[Record], first: Sequence[Record]) -> str:
    """Throughput of an arm's second run over its first at the batch of both at which the first was fastest."""
    second = {number(r, "batch"): r for r in again}
    shared = [r for r in first if number(r, "batch") in second]
    if not shared:
        return "-"
    top = max(shared, key=tokens_per_s)
    batch = number(top, "batch")
    return f"{tokens_per_s(second[batch]) / tokens_per_s(top):.2f}x ({figures_of(batch, 6)})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _prefill_table(records: Sequence[Record], model: str, hardware: str) -> Table | None:
    """Time to the first token and prefill throughput of every arm and context."""
    rows = [
        r
        for r in of_kind(records, "decode.ttft_ms", "decode.prefill_tok_s")
        if (r.model or "", r.hardware) == (model, hardware)
    ]
    first = {
        (text(r, "arm"), int(r.settings["context_tokens"]), 1): r
        for r in latest([r for r in rows if r.what == "decode.ttft_ms"], *PLACES["decode.ttft_ms"])
    }
    rates = {
        (text(r, "arm"), int(r.settings["context_tokens"]), int(r.settings["batch"])): r
        for r in latest([r for r in rows if r.what == "decode.prefill_tok_s"], *PLACES["decode.prefill_tok_s"])
    }
    if not rows:
        return None
    base = stock_arm(rows)
    arms = arms_of(rows)

    def over(found: dict[tuple[str, int, int], Record], arm: str, context: int, batch: int) -> str:
        of_base = [place for place in found if place[:2] == (base, context)]
        nearest = min(of_base, key=lambda place: abs(place[2] - batch), default=None)
        one, other = found.get((arm, context, batch)), None if nearest is None else found[nearest]
        if one is None or other is None or not one.value or not other.value:
            return "-"
        return f"{one.value / other.value:.2f}x"

    # The time to the first token is of one prompt alone; it stands in the line of the fewest prompts at once.
    places = {place[:2]: [0] for place in first} | {
        place: sorted(batch for *at, batch in rates if tuple(at) == place) for place in {p[:2] for p in rates}
    }
    lines = []
    for arm, context, batch in sorted(
        ((*place, batch) for place, batches in places.items() for batch in batches),
        key=lambda place: (place[1], arms.index(place[0]), place[2]),
    ):
        alone = first.get((arm, context, 1)) if batch == places[arm, context][0] else None
        together = rates.get((arm, context, batch))
        lines.append(
            (
                arm,
                f"{context:,}",
                figures_of(None if alone is None else alone.value),
                over(first, arm, context, 1) if alone is not None else "-",
                figures_of(None if together is None else number(together, "batch"), 6),
                figures_of(None if together is None else together.value),
                over(rates, arm, context, batch),
            )
        )
    ratio = f"x {base}" if base else "ratio"
    return table_of(
        f"Prefill ({', '.join(part for part in (model, hardware) if part)})",
        ("arm", "context", "first token\nms", f"{ratio} ", "prompts\nat once", "prompt\ntok/s", ratio),
        lines,
        "Time from submitting one prompt to an idle engine to its first token, and prompt tokens per second of several "
        "submitted together; its ratio is to the baseline with as many prompts, or the nearest number it has.",
    )


def _arm(record: Record) -> str:
    return text(record, "arm")


def _fit_table(rows: Sequence[Record], arms: Sequence[str], where: str) -> Table | None:
    """The step-time model of every arm that has enough rows, with its error on rows it was not fitted to."""
    lines = []
    for arm in (*arms, None):
        chosen, others = of_one_commit([r for r in rows if arm is None or text(r, "arm") == arm])
        known = [
            (weight, StepRow(float(r.value or 0) / 1e3, int(r.settings["batch"]), read))
            for r in chosen
            if (weight := number(r, "weight_bytes")) is not None
            and (read := number(r, "read_bytes_per_request")) is not None
        ]
        if len({weight for weight, _ in known}) != 1:
            continue
        weight = known[0][0]
        fitted, held = hold_out([row for _, row in known])
        try:
            model = StepTimeModel.fit(fitted, weight)
        except LoopKVError:
            continue
        error = model.error(held) if held else None
        most = datasheet_bandwidth(chosen[0].hardware)
        beyond = most is not None and model.bandwidth_bytes_s > most
        lines.append(
            (
                "all arms" if arm is None else arm,
                str(len(fitted)),
                f"{model.t_fix_s * 1e3:.3g}",
                f"{model.bandwidth_bytes_s / 1e12:.3g}" + (f" > {most / 1e12:.4g}" if most and beyond else ""),
                str(len(held)),
                "-" if error is None else f"{error.mean_absolute:.1%}",
                "-" if error is None else f"{error.largest:+.1%}",
                _short(chosen[0].commit),
                str(len(others)) if others else "-",
            )
        )
    if not lines:
        return None
    undetermined = any(" > " in line[3] for line in lines)
    return table_of(
        f"Step-time model ({where})",
        (
            "arm",
            "rows\nfitted",
            "t_fix ms",
            "BW TB/s",
            "rows\npredicted",
            "mean\nerror",
            "largest\nerror",
            "commit",
            "of other\ncommits",
        ),
        lines,
        "t(B) = t_fix + (W_T + B x D_read) / BW, least squares of relative errors; every third row in order of bytes "
        "is left out of the fit and predicted. The rows of a fit are of one commit."
        + (" > names the GPU's datasheet bandwidth: these rows do not determine one." if undetermined else ""),
    )


def _breakdown(records: Sequence[Record]) -> list[Figure]:
    figures = []
    rows = of_kind(records, "decode.component_us")
    named = grouped(rows, lambda r: text(r, "component"))
    sizes = {name: sum(float(r.value or 0) for r in group) for name, group in named.items()}  # one order on the page
    for (model, hardware, context), group in grouped(
        rows, lambda r: (r.model or "", r.hardware, int(r.settings["context_tokens"]))
    ).items():
        where = ", ".join(part for part in (model, hardware) if part)
        chosen = latest(group, *PLACES["decode.component_us"])
        cells = list(dict.fromkeys((text(r, "arm"), int(r.settings["batch"])) for r in chosen))
        components = list(dict.fromkeys(text(r, "component") for r in chosen))
        at = {
            (text(r, "arm"), int(r.settings["batch"]), text(r, "component")): float(r.value or 0) / 1e3 for r in chosen
        }
        parts = [(name, [at.get((*cell, name), 0.0) for cell in cells]) for name in components]
        totals = [sum(widths[i] for _, widths in parts) for i in range(len(cells))]
        names = [f"{arm}, batch {batch}" for arm, batch in cells]
        shown = _largest(parts, sizes)
        figures.append(
            Figure(
                key=slug("breakdown", model, hardware, context),
                title=f"Where a decode step goes, {context:,} tokens",
                explanation=f"{where}. GPU time of one decode step by component; the number is the sum in ms.",
                alt="; ".join(f"{name}: {total:.3g} ms" for name, total in zip(names, totals, strict=True)) + ".",
                command=command(group),
                place=where,
                drawing=bars(names, shown, "GPU time per step (ms)", texts=[f"{total:.3g}" for total in totals]),
                data=table_of(
                    "GPU time per step (ms)",
                    ("arm", *components, "sum"),
                    [
                        (name, *(f"{widths[i]:.3g}" for _, widths in parts), f"{totals[i]:.3g}")
                        for i, name in enumerate(names)
                    ],
                ),
            )
        )
    return figures


def _largest(parts: Sequence[tuple[str, list[float]]], sizes: Mapping[str, float]) -> list[tuple[str, list[float]]]:
    """The parts in order of ``sizes``, all beyond the theme's colours summed up: no two parts of a bar look alike."""
    order = sorted(parts, key=lambda part: -sizes[part[0]])
    if len(order) <= DRAWN_PARTS:
        return order
    rest = order[DRAWN_PARTS - 1 :]
    others = [sum(values) for values in zip(*(widths for _, widths in rest), strict=True)]
    return [*order[: DRAWN_PARTS - 1], ("all else", others)]
