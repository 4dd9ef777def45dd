"""Plots: looks that differ, texts that do not cover each other, titles in PNG files."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure as Canvas
from support.record_data import record

from loopkv.report.figure import PNG_DPI, write_png
from loopkv.report.from_records import records_page
from loopkv.report.plots import Series, curves
from loopkv.report.plots.labels import Box, spread
from loopkv.report.plots.series import COLOURS, MARKERS, dash_of, marker_of
from loopkv.report.sections.decode import _looks
from loopkv.report.theme import PNG_THEME


def test_the_first_looks_all_differ() -> None:
    assert len(PNG_THEME.series) == COLOURS
    many = COLOURS * len(MARKERS)
    assert len({(PNG_THEME.of(n), marker_of(n)) for n in range(many)}) == many
    assert len({(PNG_THEME.of(n), marker_of(n), dash_of(n)) for n in range(4 * many)}) == 4 * many
    # Where colours repeat the line tells too: markers are small.
    assert len({(PNG_THEME.of(n), dash_of(n)) for n in range(4 * COLOURS)}) == 4 * COLOURS


def test_every_arm_of_a_decode_figure_has_a_look_of_its_own() -> None:
    arms = ["bf16", *(f"arm{n}" for n in range(10)), "bf16 (A/A)"]
    rows = [
        record("decode.step_ms", 10.0 + n, "ms", {"arm": arm, "context_tokens": 8192, "batch": batch})
        for n, arm in enumerate(arms)
        for batch in (1, 8)
    ]
    (figure,) = records_page(rows).figures
    axes = Canvas(figsize=(4.2, 4.0), layout="constrained").subplots()
    figure.drawing.draw(axes, PNG_THEME)
    lines = {line.get_label(): line for line in axes.get_lines() if line.get_label() in arms}
    looks = {arm: (line.get_color(), line.get_marker(), line.get_linestyle()) for arm, line in lines.items()}
    assert len(looks) == len(set(looks.values())) == 12
    assert {text.get_text() for text in axes.texts} >= {f"{arm}, 8" for arm in arms}
    assert looks["bf16 (A/A)"] == (*looks["bf16"][:2], "--")
    assert _looks(["x (A/A)", "y", "x"]) == {"x (A/A)": 0, "y": 1, "x": 0}


def test_labels_of_neighbouring_points_do_not_overlap() -> None:
    series = [Series(f"s{n}", (1.0, 2.0), (1.0, 10.0 + 0.01 * n), labels=("", str(n))) for n in range(12)]
    drawing = curves(series, "x", "y")
    canvas = Canvas(figsize=(drawing.width_in, drawing.height_in), layout="constrained")
    drawing.draw(canvas.subplots(), PNG_THEME)
    canvas.draw_without_rendering()
    texts = [text for text in canvas.axes[0].texts if text.get_text().isdigit()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) == 12
    for i, one in enumerate(boxes):
        assert not any(one.padded(-0.5).overlaps(other.padded(-0.5)) for other in boxes[i + 1 :])


@given(st.lists(st.builds(Box, st.just(0.0), st.just(1.0), st.integers(0, 80).map(float), st.just(7.0)), max_size=10))
def test_spread_boxes_of_one_column_keep_apart_and_in_order(boxes: list[Box]) -> None:
    bottoms = spread(boxes, 100.0)
    order = sorted(range(len(boxes)), key=lambda i: (boxes[i].bottom, i))
    assert all(bottoms[b] - bottoms[a] >= 7.0 for a, b in itertools.pairwise(order))
    assert all(bottom + 7.0 <= 100.0 for bottom in bottoms)


def test_boxes_of_two_columns_stay_where_they_are() -> None:
    assert spread([Box(0, 1, 5, 7), Box(1, 2, 6, 7)], 100) == [5, 6]
    assert spread([Box(0, 1, 5, 7), Box(0, 1, 6, 7)], 100) == [5, 12]
    assert spread([Box(0, 1, 90, 7), Box(0, 1, 91, 7)], 100) == [86, 93]  # against the top: both move down


def test_a_png_has_room_for_its_title(tmp_path: Path) -> None:
    drawing = curves([Series("a", (1.0,), (1.0,))], "x", "y")
    heights = []
    for title in ("", "Decode at 8,192 tokens\nOuro-1.4B, H200"):
        write_png(drawing, tmp_path / "a.png", title)
        heights.append(int.from_bytes((tmp_path / "a.png").read_bytes()[20:24], "big"))
    assert heights[1] - heights[0] == round(2 * 0.16 * PNG_DPI)
