"""Reports from Records alone: every kind drawn, nothing dropped silently, numbers as they were recorded."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Canvas
from support.html_page import check_page
from support.record_data import all_records, decode_records, record, slo_records
from typer.testing import CliRunner

from loopkv.errors import LoopKVError
from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import Record, append_records
from loopkv.report import write_records_report
from loopkv.report.figure import to_svg, write_png
from loopkv.report.from_records import DRAWN_KINDS, FOLDED_KINDS, problem, records_page
from loopkv.report.page import Page, Table, render_page
from loopkv.report.sections.common import command, report_command
from loopkv.report.sections.decode import drawn_steps
from loopkv.report.theme import PNG_THEME


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "r.jsonl"
    append_records(path, all_records())
    return path


def tables(page: object) -> dict[str, Table]:
    return {b.title: b for s in page.sections for b in s.blocks if isinstance(b, Table)}  # type: ignore[attr-defined]


def test_the_page_is_well_formed_and_shows_every_section(results: Path, tmp_path: Path) -> None:
    html = write_records_report([results], tmp_path / "r.html", png_folder=tmp_path / "png").read_text()
    checker = check_page(html)
    assert {"decode", "slo", "quality", "tasks", "kernels", "others", "provenance"} <= set(checker.ids)
    page = records_page(all_records())
    assert {f"{figure.key}.png" for figure in page.figures} == {path.name for path in (tmp_path / "png").iterdir()}


def test_the_sample_has_every_kind() -> None:
    assert {r.what for r in all_records()} >= DRAWN_KINDS
    assert set(FOLDED_KINDS) | DRAWN_KINDS <= set(RECORD_KINDS)


def test_decode_table_gives_the_recorded_numbers() -> None:
    shown = tables(records_page(decode_records(noise=0.0)))
    table = next(t for title, t in shown.items() if title.startswith("Decode at 8,192"))
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    # bf16: 85e9 / (768 KiB x 8,192 + 216 MiB) = 12.7 requests; eq. 1: 6.84 ms + (10.07e9 + 12 x D) / 1.29e12
    read = (8192 - 288) * 768 * 1024 + 216 * 2**20
    step = 6.84e-3 + (10.07e9 + 12 * read) / 1.29e12
    assert rows["bf16"]["batch"] == "12"
    assert rows["bf16"]["best\ntok/s"] == f"{12 / step:,.4g}"
    assert rows["bf16"]["x bf16"] == "1.00x" and rows["bf16"]["launches\nper step"] == "17"
    assert rows["LoopKV-M"]["stored\nKiB/token"] == "155"


def test_step_time_fit_recovers_the_constants_behind_the_rows() -> None:
    shown = tables(records_page(decode_records(noise=0.0)))
    table = next(t for title, t in shown.items() if title.startswith("Step-time model"))
    for row in table.rows:
        fields = dict(zip(table.columns, row, strict=True))
        assert fields["t_fix ms"] == "6.84" and fields["BW TB/s"] == "1.29"
        assert fields["mean\nerror"] == "0.0%"


def test_capacity_says_when_the_lowest_rung_fails() -> None:
    place = "Ouro-1.4B geometry, Synthetic GPU 96 GB, workload abcdef, answers of full length"
    table = tables(records_page(slo_records()))[f"Capacity in req/s ({place})"]
    assert table.columns == ("TPOT (k x tau0)", "TTFT", "kivi4", "LoopKV-M", "bf16", "seed")
    assert table.rows[0] == ("55.8 ms (3 x 18.6)", "10 s", "0.06", "0.11", "<0.04", "101")


def test_ladders_of_either_length_of_answers_stand_beside_each_other() -> None:
    """The same arms, rates and bounds once with answers of full length and once with answers that end by themselves."""

    def ending(r: Record, how: bool | str) -> Record:
        if isinstance(how, str):  # an older Record tells by its command only
            return r.model_copy(update={"command": how, "date": "2026-02-01T00:00:00+00:00"})
        return r.model_copy(update={"settings": {**r.settings, "ignore_eos": how}, "value": 0.5})

    kinds = ("slo.attainment", "slo.capacity", "slo.capacity_ratio")
    full = [r for r in slo_records() if r.what in kinds]
    for natural in (False, "loopkv bench slo work.jsonl --natural-end"):
        page = records_page([*full, *(ending(r, natural) for r in full)])
        first, second = (f for f in page.figures if f.key.startswith("slo"))
        assert first.key != second.key and first.png_title.startswith("Attainment: TTFT")
        assert first.place.endswith("Synthetic GPU 96 GB, workload abcdef, answers of full length")
        assert second.title.startswith("Attainment, answers that end by themselves: TTFT")
        assert second.png_title.endswith(second.place) and second.place.endswith("answers that end by themselves")
        shown = tables(page)
        for title in ("Capacity in req/s", "First failing rung", "Ratios of capacities"):
            assert len([one for one in shown if one.startswith(title)]) == 2
        assert "Records without a row of their own" not in shown


def test_ladders_of_two_servers_or_two_pools_are_not_mixed() -> None:
    rows = [r for r in slo_records() if r.what in ("slo.attainment", "slo.capacity")]
    page = records_page(
        [
            r.model_copy(update={"settings": {**r.settings, "server": f"--max-model-len 16384{more}"}})
            for more in (" --max-num-seqs 8", " --max-num-seqs 64", "")
            for r in rows
        ]
    )
    ladders = [f for f in page.figures if f.key.startswith("slo")]
    assert [f.place.rsplit(", ", 1)[1] for f in ladders] == [
        "server with --max-num-seqs=8",
        "server with --max-num-seqs=64",
        "server without more options",
    ]
    assert len({f.key for f in ladders}) == 3
    assert len([title for title in tables(page) if title.startswith("Capacity in req/s")]) == 3
    assert "Records without a row of their own" not in tables(page)
    simulated = [r for r in slo_records() if r.what == "simulate.attainment"]
    pools = [
        r.model_copy(update={"settings": {**r.settings, "pool_bytes": gib << 30}})
        for gib in (3, 125)
        for r in simulated
    ]
    first, second = (f for f in records_page(pools).figures if f.key.startswith("slo"))
    assert "simulated H200, pool of 3 GiB," in first.png_title and "pool of 125 GiB" in second.png_title


def test_servers_that_only_look_different_are_one_and_servers_that_only_look_alike_are_two() -> None:
    rows = [r for r in slo_records() if r.what in ("slo.attainment", "slo.capacity")]

    def page_of(*servers: str) -> Page:
        return records_page(
            [
                r.model_copy(
                    update={"settings": {**r.settings, "server": server}, "date": f"2026-02-0{day}T00:00:00+00:00"}
                )
                for day, server in enumerate(servers, 1)
                for r in rows
            ]
        )

    same = page_of("--a 1 --b", "--b --a=1", "--a 1 --a 1 --b")  # the newest is drawn, the others are counted
    assert len([f for f in same.figures if f.key.startswith("slo")]) == 1
    (left,) = [t for title, t in tables(same).items() if title == "Records without a row of their own"]
    assert sum(int(row[left.columns.index("records")]) for row in left.rows) == 2 * len(rows)
    for servers in (("--a x.y", "--a x-y"), ("", "--a " + "x" * 300)):
        keys = [f.key for f in page_of(*servers).figures if f.key.startswith("slo")]
        assert len(set(keys)) == 2 and all(len(key) <= 130 for key in keys)
        assert render_page(page_of(*servers))


def test_dollars_in_names_are_dollars(tmp_path: Path) -> None:
    """Two of them would be mathematics to matplotlib, and most names none that it can read."""
    rows = [
        r.model_copy(update={"model": "a$b^$c", "hardware": "$x_$", "settings": {**r.settings, "arm": "$m_{$"}})
        for r in (*slo_records(), *decode_records(noise=0.0))
    ]
    page = records_page(rows)
    assert len(page.figures) > 2 and "$m_{$" in render_page(page)
    for figure in page.figures:
        write_png(figure.drawing, tmp_path / "one.png", figure.png_title)


def test_a_seed_of_zero_is_a_seed() -> None:
    rows = [r for r in slo_records() if r.what == "slo.capacity" and r.value is not None][:1]
    shown = tables(records_page([r.model_copy(update={"seed": seed}) for r in rows for seed in (None, 0)]))
    table = next(table for title, table in shown.items() if title.startswith("Capacity in req/s"))
    assert len(table.rows) == 2


def test_simulations_of_other_constants_or_another_watermark_are_neither_joined_nor_replaced() -> None:
    """Three runs in one file: from bytes, fitted (the fits of two arms are named in each Record), and with a watermark;
    then a second fit of other numbers."""
    rows = [r for r in slo_records() if r.what.startswith("simulate.")]
    fits = "kivi4: decode.step_ms: t_fix 4.32 ms, 4.13 TB/s; 9 rows; LoopKV-M: slo.cell: t_fix 1 ms, 3 TB/s; 8 rows"
    told = (
        {"constants": "given; prefill 2e4 tok/s assumed"},
        {"constants": f"fitted to d.jsonl; prefill 2e4 tok/s assumed; {fits}"},
        {"constants": "given; prefill 2e4 tok/s assumed; watermark 0.06", "watermark": 0.06},
    )
    more = {"constants": f"fitted to e.jsonl; prefill 2e4 tok/s assumed; {fits.replace('4.32', '4.4')}"}

    def made(runs: Sequence[dict[str, object]]) -> list[Record]:
        return [r.model_copy(update={"settings": {**r.settings, **run}}) for run in runs for r in rows]

    page = records_page(made(told))
    (figure,) = (f for f in page.figures if f.key.startswith("slo"))
    axes = Canvas(figsize=(4.2, 4.0), layout="constrained").subplots()
    figure.drawing.draw(axes, PNG_THEME)
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    names = ["kivi4, bytes", "kivi4, fitted to decode", "kivi4, bytes, watermark 0.06"]
    assert {*names, "LoopKV-M, fitted to ladder"} <= set(lines)
    assert all(len(lines[name].get_xdata()) == 5 for name in names)
    assert len({lines[name].get_linestyle() for name in names}) == 3
    assert "kivi4, fitted to decode: fitted to d.jsonl; prefill 2e4 tok/s assumed; kivi4: decode" in figure.explanation
    table = next(t for title, t in tables(page).items() if title.startswith("Simulated capacity"))
    assert table.columns[2:5] == ("kivi4\nbytes", "LoopKV-M\nbytes", "kivi4\nfitted to decode")
    assert [*table.columns[6:8]] == ["kivi4\nbytes, watermark 0.06", "LoopKV-M\nbytes, watermark 0.06"]
    assert len(table.rows) == 1 and "-" not in table.rows[0] and "4.32 ms" in table.note
    assert "Records without a row of their own" not in tables(page)

    page = records_page(made((*told, more)))
    (figure,) = (f for f in page.figures if f.key.startswith("slo"))
    assert "kivi4, fitted to decode (1): 1.00 at" in figure.alt and "kivi4, fitted to decode (2): 1.00" in figure.alt
    assert "Records without a row of their own" not in tables(page)
    again = records_page(made((told[0], told[0])))
    counted = tables(again)["Records without a row of their own"]
    assert [row[:2] for row in counted.rows] == [("simulate.attainment", "10"), ("simulate.capacity", "2")]


def test_simulations_of_two_gpus_in_one_pool_are_compared_and_each_names_its_gpu() -> None:
    rows = [r for r in slo_records() if r.what.startswith("simulate.")]

    def run(gpu: str, constants: str, **more: object) -> list[Record]:
        settings = {"gpu": gpu, "constants": constants, "pool_bytes": 3 << 30, **more}
        return [r.model_copy(update={"settings": {**r.settings, **settings}}) for r in rows]

    fitted = "fitted to d.jsonl; kivi4: slo.cell: t_fix 1 ms, 3 TB/s; LoopKV-M: slo.cell: t_fix 1 ms, 4 TB/s"
    page = records_page([*run("custom", "given"), *run("H200", fitted)])
    (figure,) = (f for f in page.figures if f.key.startswith("slo"))
    assert "simulated custom and H200, pool of 3 GiB" in figure.png_title
    assert "kivi4, bytes: 1.00 at" in figure.alt and "kivi4, fitted to ladder: 1.00 at" in figure.alt
    assert "Constants of kivi4, bytes / LoopKV-M, bytes (custom): given. kivi4, fitted to" in figure.explanation
    table = next(t for title, t in tables(page).items() if title.startswith("Simulated capacity"))
    assert table.columns[2] == "kivi4\nbytes" and len(table.rows) == 1
    (figure,) = (f for f in records_page([*run("A", "a"), *run("B", "b")]).figures if f.key.startswith("slo"))
    assert "kivi4, bytes, A: 1.00 at" in figure.alt and "kivi4, bytes, B: 1.00 at" in figure.alt
    apart = [*run("A", "given", pool_bytes=None), *run("B", "given", pool_bytes=None)]
    assert len([f for f in records_page(apart).figures if f.key.startswith("slo")]) == 2


def test_a_bound_is_printed_in_one_way_and_a_rate_with_three_figures() -> None:
    """tau0 as measured and as given to a command, 3 x 1.4238 = 4.271 and 3 x 1.424 = 4.272 ms, are one figure;
    rates of a grid of 10% steps; an axis that begins at 0."""
    rows = [r for r in slo_records() if r.what in ("simulate.attainment", "simulate.capacity")]
    grid = {0.04: 1.1**-34, 0.06: 1.1**-30, 0.08: 1.1**-27, 0.11: 1.1**-23, 0.14: 1.1**-21}

    def at(r: Record, tau0: float) -> Record:
        settings = {**r.settings, "tau0_ms": tau0}
        if "rate_per_s" in settings:
            settings["rate_per_s"] = grid[settings["rate_per_s"]]
        return r.model_copy(
            update={"settings": settings, "value": 1.1**-30 if r.what.endswith("capacity") else r.value}
        )

    page = records_page([at(r, 1.4238306208508813 if r.settings["arm"] == "kivi4" else 1.424) for r in rows])
    (figure,) = (f for f in page.figures if f.key.startswith("slo"))
    assert figure.title.endswith("TPOT <= 3 x 1.424 ms = 4.272 ms")
    assert figure.data is not None and [row[1] for row in figure.data.rows[:2]] == ["0.0391", "0.0573"]
    assert "at 0.0391 to 0.76 at 0.135 req/s" in figure.alt
    axes = Canvas(figsize=(4.2, 4.0), layout="constrained").subplots()
    figure.drawing.draw(axes, PNG_THEME)
    assert axes.get_ylim()[0] == 0
    table = next(t for title, t in tables(page).items() if title.startswith("Simulated capacity"))
    assert table.rows == (("4.272 ms (3 x 1.424)", "10 s", "0.0573", "0.0573", "101"),)
    twice = [at(r, tau0) for tau0 in (1.4238306208508813, 1.424) for r in rows]
    counted = tables(records_page(twice))["Records without a row of their own"]
    assert [row[:2] for row in counted.rows] == [("simulate.attainment", "10"), ("simulate.capacity", "2")]


def test_measured_ladders_come_before_simulated_ones_and_each_says_what_it_is() -> None:
    rows = slo_records()
    simulated = [r for r in rows if r.what.startswith("simulate.")]
    page = records_page([*simulated, *(r for r in rows if not r.what.startswith("simulate."))])
    titles = [f.png_title for f in page.figures if f.key.startswith("slo")]
    assert titles[0].startswith("Attainment: ") and "Synthetic GPU 96 GB" in titles[0]
    assert titles[1].startswith("Simulated attainment: ") and "simulated H200" in titles[1]


def test_ladders_are_drawn_at_the_main_objective_and_tabled_at_all() -> None:
    rows = [r for r in slo_records() if r.what == "slo.attainment"]
    tight = [r.model_copy(update={"settings": {**r.settings, "k": 2.0}, "value": 0.5}) for r in rows]
    page = records_page([*tight, *rows])
    (ladder,) = (f for f in page.figures if f.key.startswith("slo"))
    assert "3 x 18.6 ms" in ladder.title
    table = next(t for title, t in tables(page).items() if title.startswith("Attainment under every bound"))
    assert table.columns == ("arm", "seed", "req/s", "2 tau0\nTTFT 10 s", "3 tau0\nTTFT 10 s")
    assert len(table.rows) == len(rows) and {row[3] for row in table.rows} == {"0.500"}


def test_a_repeated_row_is_replaced_by_the_later_one() -> None:
    old = record("decode.step_ms", 20.0, "ms", {"arm": "bf16", "context_tokens": 8192, "batch": 1})
    new = old.model_copy(update={"value": 10.0, "date": "2026-05-01T00:00:00+00:00"})
    for order in ([old, new], [new, old]):
        table = next(t for title, t in tables(records_page(order)).items() if title.startswith("Decode"))
        assert dict(zip(table.columns, table.rows[0], strict=True))["step ms"] == "10"


def test_lines_and_fits_are_of_one_commit_and_the_others_are_named() -> None:
    rows = [r for r in decode_records(noise=0.0) if r.settings["arm"] == "bf16" and r.what == "decode.step_ms"]
    rows = [r.model_copy(update={"commit": "a" * 40, "hardware": "NVIDIA L40S"}) for r in rows]
    newer = rows[0].model_copy(
        update={"commit": f"{'b' * 40}-dirty", "value": 3.0, "date": "2026-05-01T00:00:00+00:00"}
    )
    page = records_page([*rows, newer])
    figure = next(f for f in page.figures if f.key.startswith("decode") and "8,192" in f.title)
    left_out = " Rows not drawn, of other commits: 1 of bf16 of bbbbbbb-dirty."
    assert figure.explanation.endswith(f" Rows by commit: bf16 of aaaaaaa.{left_out}")
    other = next(f for f in page.figures if f.key.startswith("decode") and "16,384" in f.title)
    assert "Rows by commit" not in other.explanation
    shown = tables(page)
    table = next(t for title, t in shown.items() if title.startswith("Decode at 8,192"))
    assert table.rows[0][table.columns.index("batch-1\nstep ms")] == f"{rows[0].value:.4g}"
    counted = ("decode.step_ms", "1", "rows of other commits than the one drawn for their arm and context")
    assert shown["Records without a row of their own"].rows == (counted,)
    fit = next(t for title, t in shown.items() if title.startswith("Step-time model"))
    fields = dict(zip(fit.columns, fit.rows[0], strict=True))
    # The rows of 1.29 TB/s are said to be of an L40S: 0.864 TB/s by its datasheet.
    assert (fields["t_fix ms"], fields["BW TB/s"], fields["commit"]) == ("6.84", "1.29 > 0.864", "aaaaaaa")
    assert "do not determine" in fit.note


def test_a_newer_commit_with_a_curve_is_drawn_one_with_fewer_rows_is_not() -> None:
    """A curve is three rows; five older ones stand aside for it."""
    place = {"arm": "bf16", "context_tokens": 8192}
    old = [record("decode.step_ms", 20.0, "ms", {**place, "batch": b}) for b in (1, 2, 4, 8, 16)]
    old = [r.model_copy(update={"commit": "a" * 40}) for r in old]
    later = {"commit": "b" * 40, "date": "2026-05-01T00:00:00+00:00"}
    new = [r.model_copy(update=later) for r in old[:3]]
    assert drawn_steps([*old, *new]) == (new, old)
    assert drawn_steps([*new[:2], *old]) == (old, new[:2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"what": "moon.phase"}, "a name that this release does not draw"),
        ({"settings": {"arm": "a", "batch": 1}}, "lacks context_tokens"),
        ({"unit": "s"}, "unit 's', wanted 'ms'"),
        ({"settings": {"arm": "a", "batch": "many", "context_tokens": 5}}, "batch: not a number above 0"),
        ({"settings": {"arm": "a", "batch": 0, "context_tokens": 5}}, "batch: not a number above 0"),
        ({"value": float("nan")}, "a value that is not finite"),
        ({"value": 0.0}, "a step time that is not above 0"),
    ],
)
def test_records_that_cannot_be_placed_are_listed_with_the_reason(changes: dict[str, object], reason: str) -> None:
    good = record("decode.step_ms", 20.0, "ms", {"arm": "a", "context_tokens": 8192, "batch": 1})
    assert problem(good) is None
    bad = good.model_copy(update=changes)
    assert problem(bad) == reason
    listed = tables(records_page([good, bad]))["Records not drawn"]
    assert len(listed.rows) == 1
    assert dict(zip(listed.columns, listed.rows[0], strict=True))["why"] == reason


def frontiers(records: list[Record]) -> dict[str, str]:
    """Alternative text of each frontier by its key: what it shows, as text."""
    return {f.key: f.alt for f in records_page(records).figures if f.key.startswith("frontier")}


def step_row(arm: str, ms: float, **fields: object) -> Record:
    return record("decode.step_ms", ms, "ms", {"arm": arm, "context_tokens": 8192, "batch": 10}, **fields)


def damage_row(arm: str, kl: float, **fields: object) -> Record:
    return record("quality.kl_nats", kl, "nats", {"arm": arm, "documents": 8}, **fields)


def test_a_frontier_joins_the_damage_and_the_speed_of_one_plan_by_its_hash_whatever_it_is_called() -> None:
    rows = [
        step_row("bf16", 40.0, model="O (dummy)"),
        step_row("m", 10.0, model="O (dummy)", plan_sha256="a" * 64),
        step_row("kivi4", 20.0, model="O (dummy)", plan_sha256="b" * 64),
        damage_row("memory", 2e-3, model="O", plan_sha256="a" * 64),
        damage_row("kivi4", 1e-3, model="O", plan_sha256="b" * 64),
        record("quality.kl_share_nats", 1e-3, "nats", {}, model="O"),
        record("quality.kl_share_nats", 5.0, "nats", {}, model="other"),
    ]
    # 10 requests over 10 ms: 1,000 tok/s at 2 KL_share of this model, not of the other
    assert frontiers(rows) == {
        "frontier-o--dummy--synthetic-gpu-96-gb-8192": "m: 1000 tok/s at 2; kivi4: 500 tok/s at 1."
    }
    (figure,) = (f for f in records_page(rows).figures if f.key.startswith("frontier"))
    assert "bf16, without damage: 250 tok/s" in figure.explanation and "O (dummy), Synthetic GPU" in figure.explanation


def test_a_name_alone_joins_no_two_models() -> None:
    speed = step_row("kivi4", 10.0, model="Ouro", plan_sha256="a" * 64)
    assert frontiers([speed, damage_row("kivi4", 1e-3, model="tiny", plan_sha256="b" * 64)]) == {}
    assert frontiers([speed, damage_row("kivi4", 1e-3, model="tiny")]) == {}
    assert frontiers([speed, damage_row("kivi4", 1e-3, model="Ouro", plan_sha256="b" * 64)]) == {}, "another kivi4"
    assert len(frontiers([speed, damage_row("kivi4", 1e-3, model="Ouro")])) == 1
    assert frontiers([speed, damage_row("kivi4", 0.0, model="Ouro")]) == {}, "no place on a logarithmic axis"


def test_frontiers_of_two_machines_stand_apart_and_eval_counts_as_damage() -> None:
    plan = {"plan_sha256": "a" * 64}
    settings = {"arm": "p", "predicted_nats": 1e-3, "documents": "unseen"}
    rows = [
        step_row("p", 10.0, hardware="H200", **plan),
        step_row("p", 40.0, hardware="L40S", **plan),
        record("additivity.plan", 3e-3, "nats", settings, **plan),
    ]
    assert list(frontiers(rows).values()) == ["p: 1000 tok/s at 3.0e-3.", "p: 250 tok/s at 3.0e-3."]
    measured = damage_row("p", 2e-3, **plan)
    assert all("at 2.0e-3" in alt for alt in frontiers([*rows, measured]).values()), "measure goes before eval"


def test_every_record_is_somewhere() -> None:
    """Each kind alone gives a page that shows it, or lists it among the records without a row."""
    for kind in RECORD_KINDS:
        settings = dict.fromkeys(RECORD_KINDS[kind].settings, 1.0)
        made = record(kind, 1.0, RECORD_KINDS[kind].unit, settings)
        only = [r for r in all_records() if r.what == kind and problem(r) is None] or [made]
        sections = {section.key for section in records_page(only).sections}
        assert sections - {"provenance"}, kind


def test_hostile_settings_are_escaped(tmp_path: Path) -> None:
    hostile = record("x<y", 1.0, "<b>", {"arm": "<img src=x onerror=alert(1)>"})
    append_records(tmp_path / "r.jsonl", [hostile])
    check_page(write_records_report([tmp_path / "r.jsonl"], tmp_path / "r.html").read_text())


def test_no_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(LoopKVError, match="no record"):
        write_records_report([tmp_path / "empty.jsonl"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_command_line(results: Path, tmp_path: Path) -> None:
    import typer

    from loopkv.cli.report import register

    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    out = CliRunner().invoke(app, ["report", str(results), "-o", str(tmp_path / "page.html"), "--title", "T & T"])
    assert out.exit_code == 0, out.output
    assert "<title>T &amp; T</title>" in (tmp_path / "page.html").read_text()
    assert json.loads(results.read_text().splitlines()[0])["what"] == "decode.step_ms"


def kernel_row(what: str, value: float, day: int, variant: str | None, commit: str, **settings: object) -> Record:
    place = {"kernel": "decode+v", "option": "int4", "head_dim": 128, "kv_heads": 16, "group_queries": 1}
    place |= {"hot_share": 0.20006729641681162, "batch": 32, "context_tokens": 16384, "bytes": 1e9, "seed_mode": "sink"}
    made = record(what, value, RECORD_KINDS[what].unit, {**place, "variant": variant, **settings})
    return made.model_copy(update={"commit": commit, "date": f"2026-05-{day:02}T00:00:00+00:00"})


def test_older_kernel_rows_of_a_place_are_counted_and_none_is_mixed_with_the_newest() -> None:
    rows = [
        kernel_row("kernel.us", 100.0, 9, "new", "bbbbbbbbb"),
        kernel_row("kernel.us", 150.0, 2, "base", "aaaaaaaaa"),
        kernel_row("kernel.bandwidth_share", 0.5, 2, "base", "aaaaaaaaa"),
        kernel_row("kernel.us", 160.0, 1, None, "aaaaaaaaa", hot_share=0.1999),  # 0.20 too: one place
        kernel_row("kernel.us", 70.0, 9, "new", "bbbbbbbbb", hot_share=None, kernel="decode"),
    ]
    table = tables(records_page(rows))["Kernels (Synthetic GPU 96 GB)"]
    assert [row[table.columns.index("us")] for row in table.rows] == ["100", "70"]
    assert "of copy" not in table.columns  # the only share belongs to the older run
    assert table.note == (
        "Measured at commit bbbbbbb, variant new. 3 older Records of the same places are not drawn: "
        "1 of commit aaaaaaa; 2 of commit aaaaaaa, variant base."
    )


def test_kernel_figures_name_what_differs() -> None:
    rows = [
        kernel_row("kernel.bandwidth_share", 0.9, 1, "v", "b", batch=1),
        kernel_row("kernel.bandwidth_share", 0.8, 1, "v", "b"),
        kernel_row("kernel.bandwidth_share", 0.7, 1, "v", "b", head_dim=96, kv_heads=55, hot_share=0.2001),
        kernel_row("kernel.bandwidth_share", 0.6, 1, "v", "b", kernel="decode", hot_share=None),
    ]
    first, second = (f for f in records_page(rows).figures if f.key.startswith("kernel"))
    assert first.alt == "int4, 1 x 16,384: 90%; int4, 32 x 16,384: 80%; int4, 32 x 16,384, D 96, 55 kv heads: 70%."
    assert "at D 128, kv heads 16, G 1" in first.explanation and "20%" in first.explanation
    assert second.alt == "int4, 32 x 16,384: 60%." and "V precision" not in second.explanation
    again = [
        kernel_row("kernel.bandwidth_share", share, 1, "v", "b", tau=tau) for share, tau in ((0.7, None), (0.8, 14))
    ]
    (figure,) = (f for f in records_page(again).figures if f.key.startswith("kernel"))
    assert figure.alt == "int4, 32 x 16,384: 70%; int4, 32 x 16,384, tau 14: 80%."


def test_the_command_drawn_by_repeats_the_arguments_quoted_for_a_shell(results: Path, tmp_path: Path) -> None:
    page, plots = tmp_path / "my page.html", tmp_path / "p"
    html = write_records_report([results], page, png_folder=plots, title="A & B").read_text()
    said = shlex.split(unescape(re.findall(r"Drawn by: (.*?)</footer>", html)[0]))
    assert said == ["loopkv", "report", "-o", str(page), "--png", str(plots), "--title", "A & B", str(results)]
    assert report_command(["-x.jsonl"], "r.html") == "loopkv report -o r.html -- -x.jsonl"


def test_served_quality_stands_beside_its_policy_and_the_checked_bytes() -> None:
    table = tables(records_page(all_records()))["Served against exact (Ouro-1.4B geometry, Synthetic GPU 96 GB)"]
    rows = {row[:2]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == [("LoopKV-M", "float32"), ("LoopKV-M", "bfloat16"), ("stock", "bfloat16")]
    assert rows["LoopKV-M", "bfloat16"]["served\nnats"] == "0.000752"
    assert rows["LoopKV-M", "bfloat16"]["served /\npolicy"] == f"{7.524 / 5.459:.4f}"
    assert rows["LoopKV-M", "float32"]["wrong\nbytes"] == "0 of 1,843,200"
    assert rows["stock", "bfloat16"]["policy\nnats"] == "-"
    assert "GPUModelRunner" not in str(table)


def test_prefill_has_a_row_for_every_number_of_prompts_at_once() -> None:
    def row(what: str, value: float, arm: str, batch: int) -> Record:
        return record(what, value, RECORD_KINDS[what].unit, {"arm": arm, "context_tokens": 8192, "batch": batch})

    page = records_page(
        [
            row("decode.ttft_ms", 100.0, "stock", 1),
            row("decode.ttft_ms", 150.0, "kivi4", 1),
            *(row("decode.prefill_tok_s", 1e4 * n, "stock", n) for n in (4, 2)),
            *(row("decode.prefill_tok_s", 5e3 * n, "kivi4", n) for n in (4, 2)),
        ]
    )
    (table,) = (t for title, t in tables(page).items() if title.startswith("Prefill"))
    assert table.columns[3].strip() == "x stock"
    assert [(*row[:5], row[6]) for row in table.rows] == [
        ("stock", "8,192", "100", "1.00x", "2", "1.00x"),
        ("stock", "8,192", "-", "-", "4", "1.00x"),
        ("kivi4", "8,192", "150", "1.50x", "2", "0.50x"),
        ("kivi4", "8,192", "-", "-", "4", "0.50x"),
    ]


def test_replaced_records_are_counted() -> None:
    old = record("decode.step_ms", 20.0, "ms", {"arm": "bf16", "context_tokens": 8192, "batch": 1})
    new = old.model_copy(update={"value": 10.0, "date": "2026-05-01T00:00:00+00:00"})
    elsewhere = old.model_copy(update={"hardware": "another"})
    counted = tables(records_page([new, old, elsewhere]))["Records without a row of their own"]
    assert counted.rows == (("decode.step_ms", "1", "a later Record of the same place is drawn"),)


def test_notes_explain_only_the_columns_that_are_there() -> None:
    row = record("decode.step_ms", 20.0, "ms", {"arm": "x", "context_tokens": 8192, "batch": 1})
    (bare,) = (t for title, t in tables(records_page([row])).items() if title.startswith("Decode"))
    assert bare.note == ""
    whole = next(t for title, t in tables(records_page(decode_records())).items() if title.startswith("Decode"))
    assert ("Hot:" in whole.note) == ("hot" in whole.columns) and "interpolated" in whole.note


def test_a_simulated_page_names_the_simulated_gpu() -> None:
    facts = dict(records_page([r for r in slo_records() if r.what.startswith("simulate.")]).facts)
    assert facts["GPU simulated"] == "H200" and "Hardware" not in facts and "Simulated" in facts
    both = dict(records_page(slo_records()).facts)
    assert both["Hardware"] == "Synthetic GPU 96 GB" and both["GPU simulated"] == "H200"


def test_ratios_of_unseen_documents_stand_beside_the_profiled() -> None:
    def plan(arm: str, documents: str, measured: float) -> Record:
        settings = {"arm": arm, "documents": documents, "predicted_nats": 2e-3, "shares": False}
        return record("additivity.plan", measured, "nats", settings)

    page = records_page([plan("a", "profiled", 2e-3), plan("b", "profiled", 2.2e-3), plan("a", "unseen", 1e-3)])
    table = tables(page)["Measured over predicted damage"]
    assert [(row[0], row[3], row[5]) for row in table.rows] == [("a", "1.00", "0.50"), ("b", "1.10", "-")]
    assert "profiled 1.00 to 1.10; unseen 0.50 to 0.50" in table.note
    assert any("ratios from 0.50 to 0.50" in figure.explanation for figure in page.figures)


def test_more_measurements_show_no_raw_lists() -> None:
    settings = {"documents": [1.6865257766925977e-4, 3.7301e-4]}
    (table,) = (t for t in tables(records_page([record("quality.kl_share_nats", 1e-4, "nats", settings)])).values()
                if t.title == "quality.kl_share_nats")  # fmt: skip
    assert table.rows[0][0] == "1.7e-4 to 3.7e-4"


def test_parts_of_a_step_beyond_the_colours_are_summed() -> None:
    rows = [
        record(
            "decode.component_us",
            1000.0 * (n + 1),
            "us",
            {"arm": "x", "context_tokens": 8192, "batch": 1, "component": f"part {n}"},
        )
        for n in range(9)
    ]
    (figure,) = (f for f in records_page(rows).figures if f.key.startswith("breakdown"))
    svg = to_svg(figure.drawing, "", "f")
    # 9 parts, 7 colours: the six largest (9, 8 ... 4 ms) and the sum of 1, 2 and 3 ms
    assert "part 8" in svg and "part 3" in svg and "part 2" not in svg and "all else" in svg
    assert figure.data is not None and len(figure.data.columns) == 11  # the numbers name all of them


def test_a_refused_row_says_where_and_why() -> None:
    settings = {"arm": "m", "context_tokens": 8192, "slot": "peak", "reason": "requests that ended early"}
    table = tables(records_page([record("decode.refused", None, "", settings)]))["Rows that could not run"]
    assert table.rows == (("m", "8,192", "peak", "requests that ended early"),)


@pytest.mark.parametrize(
    ("refusal", "row", "stays"),
    [
        ({"slot": "engine"}, {"context_tokens": 400}, False),  # it starts now: any row of the arm shows that
        ({"slot": "engine"}, {"context_tokens": 400, "arm": "n"}, True),
        ({"slot": "engine", "spec": "kivi4"}, {"context_tokens": 400, "spec": "kivi2"}, True),
        ({"context_tokens": 8192}, {"context_tokens": 8192}, False),
        ({"context_tokens": 8192}, {"context_tokens": 400}, True),
        ({"context_tokens": 400, "slot": "all"}, {"context_tokens": 400, "slot": "1"}, False),
        ({"context_tokens": 400, "slot": "peak"}, {"context_tokens": 400, "slot": "1"}, True),
        ({"context_tokens": 400, "slot": "peak"}, {"context_tokens": 400, "slot": "peak"}, False),
    ],
)
def test_what_ran_later_is_no_longer_listed_as_refused(
    refusal: dict[str, object], row: dict[str, object], stays: bool
) -> None:
    refused = record("decode.refused", None, "", {"arm": "m", "reason": "full", **refusal})
    ran = record("decode.step_ms", 5.0, "ms", {"arm": "m", "batch": 1, **row}, date="2026-05-01T00:00:00+00:00")
    shown = tables(records_page([refused, ran]))
    assert ("Rows that could not run" in shown) == stays
    counted = ("decode.refused", "1", "the same row or arm ran later")
    assert (counted in shown.get("Records without a row of their own", Table("", (), ())).rows) != stays
    earlier = ran.model_copy(update={"date": "2025-01-01T00:00:00+00:00"})
    assert "Rows that could not run" in tables(records_page([refused, earlier]))


def test_a_second_run_is_compared_with_its_arm_at_one_batch() -> None:
    rows = [
        record("decode.step_ms", ms, "ms", {"arm": arm, "context_tokens": 16384, "batch": batch, "peak_batch": 10})
        for arm, batch, ms in (
            ("bf16", 10, 44.0),  # 227 tok/s
            ("bf16", 8, 30.0),  # 267 tok/s, its best, which the second run lacks
            ("bf16", 1, 10.0),
            ("bf16 (A/A)", 10, 40.0),  # 250 tok/s: 1.10 times the first run at 10
            ("bf16 (A/A)", 1, 10.0),
            ("kivi4", 30, 40.0),
        )
    ]
    page = records_page(rows)
    table = next(t for title, t in tables(page).items() if title.startswith("Decode at"))
    shown = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert shown["bf16"]["batch"] == "8" and shown["bf16"]["resident\npeak"] == "10"
    assert shown["bf16 (A/A)"]["A/A\n(batch)"] == "1.10x (10)" and shown["bf16 (A/A)"]["x bf16"] == "-"
    assert shown["kivi4"]["x bf16"] == f"{(30 / 40) / (8 / 30):.2f}x" and shown["kivi4"]["A/A\n(batch)"] == "-"
    assert "one batch" in table.note
    (figure,) = (f for f in page.figures if f.key.startswith("decode"))
    assert "equal batches" in figure.explanation
    assert figure.png_title == "Decode at 16,384 tokens of context\nOuro-1.4B geometry, Synthetic GPU 96 GB"


def test_captions_name_every_command_once_or_say_how_many() -> None:
    rows = [
        record("decode.step_ms", 5.0, "ms", {"arm": f"a{n}", "context_tokens": 400, "batch": 1}, command=f"bench {n}")
        for n in (1, 2, 2, 3, 4)
    ]
    assert command(rows[:4]) == "bench 1\nbench 2\nbench 3"
    page = records_page(rows)
    assert page.figures[0].command == "4 commands, see Provenance"
    (listed,) = (t for title, t in tables(page).items() if title == "Commands")
    assert sorted((row[0], row[-1]) for row in listed.rows) == [(f"bench {n}", f"a{n}") for n in (1, 2, 3, 4)]


def test_an_unlabelled_stock_arm_is_the_baseline() -> None:
    rows = [
        record("decode.step_ms", ms, "ms", {"arm": arm, "context_tokens": 8192, "batch": 1})
        for arm, ms in (("kivi4", 10.0), ("stock", 20.0))
    ]
    table = next(t for title, t in tables(records_page(rows)).items() if title.startswith("Decode at"))
    assert [row[table.columns.index("x stock")] for row in table.rows] == ["2.00x", "1.00x"]
