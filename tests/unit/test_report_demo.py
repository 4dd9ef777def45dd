"""The demo report on synthetic numbers: one self-contained page, an exact summary, PNG files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support.html_page import check_page
from support.report_data import DORY, OURO, TINY, make_report

from loopkv.errors import LoopKVError
from loopkv.report import write_demo_report
from loopkv.report.demo import demo_page, log_correlation
from loopkv.report.figure import to_svg
from loopkv.report.page import render_page, table_of
from loopkv.report.plots import grid_layers, grid_rows, short_number


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_demo_report(make_report(), tmp_path_factory.mktemp("demo")).read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_needs_nothing_but_itself(html: str) -> None:
    check_page(html)


def test_every_figure_says_what_it_shows_and_how_to_remake_it(html: str) -> None:
    checker = check_page(html)
    page = demo_page(make_report())
    assert [figure.alt for figure in page.figures] == checker.labels
    for figure in page.figures:
        assert len(figure.alt) > 20 and figure.explanation.endswith(".")
        assert figure.command.startswith("loopkv ")
    keys = [figure.key for figure in page.figures]
    assert keys[:3] == ["damage-int4", "damage-int2", "damage-share"]
    assert [f"plan-{n}" for n in range(1, 7)] == keys[3:9]
    assert {"frontier-stored", "frontier-read", "frontier-bytes", "predicted-measured", "task-accuracy"} <= set(keys)


def test_colours_follow_the_readers_setting(html: str) -> None:
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html
    assert {"--ink", "--muted", "--line", "--band", "--s0"} <= set(re.findall(r"var\((--\w+)\)", html))


def test_text_of_models_is_escaped(html: str) -> None:
    assert "<script>" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<b>harbour" not in html


def test_summary_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    report = make_report()
    write_demo_report(report, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["profile_s", "plan_s", "correlation", "plans", "kl_share_nats", "versions"]
    assert all(
        list(plan) == ["name", "stored_bytes", "read_bytes", "predicted_nats", "measured_nats", "top1"]
        for plan in summary["plans"]
    )
    by_name = {plan["name"]: plan for plan in summary["plans"]}
    # 16 cells x 2 x 6 x 64 x 2 B = 24,576 B in bf16; int4 is 5 bits an element: 16 x 768 x 5 / 8 = 7,680 B
    assert by_name["bf16"]["stored_bytes"] == 24_576 and by_name["kivi4"]["read_bytes"] == 7_680
    # int4 + int2 + share + int4 loops: 4 layers x (480 + 288 + 0 + 480) B stored; the shared loop reads int4
    assert by_name["LoopKV-M"]["stored_bytes"] == 4_992 and by_name["LoopKV-M"]["read_bytes"] == 6_912
    assert by_name["unmeasured"]["measured_nats"] is None and by_name["unmeasured"]["top1"] is None
    assert summary["kl_share_nats"] == pytest.approx(3e-4)
    assert 0.95 < summary["correlation"] <= 1.0


def test_correlation_is_that_of_the_logarithms() -> None:
    assert log_correlation([(1e-3, 2e-3), (1e-2, 2e-2), (1e-1, 2e-1)]) == pytest.approx(1.0)
    assert log_correlation([(1e-3, 1e-1), (1e-2, 1e-2), (1e-1, 1e-3)]) == pytest.approx(-1.0)
    assert log_correlation([(1e-3, 1e-3), (1e-2, 1e-2)]) is None
    assert log_correlation([(1e-3, 1.0), (1e-3, 2.0), (1e-3, 3.0)]) is None
    given = dataclasses.replace(make_report(), correlation=0.5)
    assert given.summary()["correlation"] == 0.5


def test_png_files_for_every_figure(tmp_path: Path) -> None:
    report = dataclasses.replace(make_report(), plans=make_report().plans[:2])
    write_demo_report(report, tmp_path, png_folder=tmp_path / "png")
    names = {path.name for path in (tmp_path / "png").iterdir()}
    assert names == {f"{figure.key}.png" for figure in demo_page(report).figures}
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in (tmp_path / "png").iterdir())


def test_a_bare_report_still_renders(tmp_path: Path) -> None:
    full = make_report()
    bare = dataclasses.replace(
        full,
        plans=(),
        frontier=(),
        random_plans=(),
        task_scores=(),
        samples=(),
        request_bytes=(),
        versions={},
        facts=(),
    )
    path = write_demo_report(bare, tmp_path)
    assert 'id="damage"' in path.read_text() and 'id="frontier"' not in path.read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["correlation"] is None


def test_missing_timings_and_foreign_plans_are_refused() -> None:
    with pytest.raises(LoopKVError, match="plan_s"):
        dataclasses.replace(make_report(), timings={"profile_s": 1.0})
    with pytest.raises(LoopKVError, match="another geometry"):
        dataclasses.replace(make_report(), plans=make_report(OURO).plans)


def test_grids_of_geometries() -> None:
    rows = grid_rows(TINY)
    assert [row.label for row in rows] == ["loop 1", "loop 2", "loop 3", "loop 4"]
    assert rows[2].cells == (8, 9, 10, 11)
    assert grid_layers(DORY) == (0, 3, 4, 7, 8, 12, 16)
    assert [row.label for row in grid_rows(DORY)] == ["prelude", "loop 1", "loop 2", "loop 3", "loop 4", "coda"]
    drawn = [cell for row in grid_rows(DORY) for cell in row.cells if cell is not None]
    assert sorted(drawn) == list(range(len(DORY.cells)))


def test_svg_ids_are_prefixed_and_rendering_is_repeatable() -> None:
    figure = demo_page(make_report()).figures[0]
    first = to_svg(figure.drawing, figure.alt, "a")
    assert first == to_svg(figure.drawing, figure.alt, "a")
    assert all(name.startswith("a-") for name in re.findall(r'\bid="([^"]*)"', first))
    assert 'role="img"' in first and "<metadata>" not in first


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (3.456, "3.46"), (0.0123, "0.0123"), (7680, "7,680"), (1.234e-5, "1.2e-5"), (2e9, "2.0e9")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


def test_numeric_columns_are_set_right() -> None:
    table = table_of("t", ("name", "x", "y", "z"), [("1. a", "-0.5", "1.2e-5", "-"), ("2. b", "12%", "x", "-")])
    assert table.columns == ("name", "x", "y") and table.numeric == {1}
    with pytest.raises(ValueError, match="cells in a row"):
        table_of("t", ("name",), [("a", "b")])


def test_two_figures_of_one_name_are_our_bug() -> None:
    page = demo_page(make_report())
    doubled = dataclasses.replace(page, sections=(page.sections[0], page.sections[0]))
    with pytest.raises(ValueError, match="one id"):
        render_page(doubled)


def test_numbers_behind_the_prediction_carry_the_plans_names() -> None:
    figure = next(f for f in demo_page(make_report()).figures if f.key == "predicted-measured")
    assert figure.data is not None
    names = [row[0] for row in figure.data.rows]
    # bf16 predicts 0 and "unmeasured" has no measurement: neither has a ratio; numbers are those of the plan table
    assert names[:4] == ["2. kivi4", "3. LoopKV-R", "4. LoopKV-M", "5. kivi2"]
    assert names[4:] == [f"random {i}" for i in range(24)]
