"""The grid of cells: numbering, sources, sections and refusals."""

import pytest
from pydantic import ValidationError

from loopkv.geometry import Cell, Geometry

OURO = Geometry(architecture="ouro", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
HUGINN = Geometry(
    architecture="huginn",
    loops=32,
    layers=4,
    query_heads=55,
    kv_heads=55,
    head_dim=96,
    prelude_layers=2,
    coda_layers=2,
)
DORY = Geometry(
    architecture="dory",
    loops=4,
    layers=20,
    query_heads=16,
    kv_heads=4,
    head_dim=256,
    prelude_layers=8,
    coda_layers=8,
    sliding_prelude=(0, 1, 2, 4, 5, 6),
    sliding_looped=tuple(i for i in range(20) if i % 4 != 3),
    sliding_coda=(0, 1, 2, 4, 5, 6),
)


def test_ouro_cells_are_loop_major():
    assert len(OURO.cells) == 96
    assert OURO.cells[25] == Cell("loop", 1, 1)
    assert OURO.cells[25].label == "L2.02"
    assert OURO.loop_cells(3) == tuple(range(72, 96)) == OURO.source_cells


def test_sharing_points_to_the_same_layer_of_the_final_loop():
    assert OURO.source_of(25) == 73
    assert OURO.source_of(73) is None


def test_huginn_counts_prelude_and_coda():
    assert len(HUGINN.cells) == 132  # 2 + 4 * 32 + 2
    assert HUGINN.cells[0].label == "pre.1"
    assert HUGINN.cells[-1].label == "coda.2"
    assert HUGINN.source_of(0) is None
    assert HUGINN.source_of(131) is None
    assert HUGINN.source_of(2) == 2 + 31 * 4


def test_sliding_layers_have_no_cell():
    # 2 full-attention prelude layers, 5 looped ones in 4 loops, 2 coda layers; G = 4 queries per kv head
    assert len(DORY.cells) == 2 + 5 * 4 + 2
    assert DORY.group_queries == 4
    assert {cell.layer for cell in DORY.cells if cell.section == "loop"} == {3, 7, 11, 15, 19}


def test_one_loop_has_nothing_to_share():
    plain = Geometry(architecture="x", loops=1, layers=3, query_heads=2, kv_heads=1, head_dim=64)
    assert plain.source_cells == ()
    assert all(plain.source_of(i) is None for i in range(3))


@pytest.mark.parametrize(
    "change",
    [
        {"kv_heads": 3},  # 16 query heads are not a multiple
        {"loops": 0},
        {"layers": -1},
        {"loops": True},
        {"loops": "4"},
        {"sliding_looped": (24,)},
        {"sliding_looped": (3, 1)},
        {"sliding_coda": (0,)},  # there is no coda
        {"unknown": 1},
    ],
)
def test_impossible_geometry_is_refused(change):
    with pytest.raises(ValidationError):
        Geometry.model_validate({**OURO.model_dump(), **change})


def test_geometry_is_immutable_and_survives_json():
    with pytest.raises(ValidationError):
        OURO.loops = 5
    assert Geometry.model_validate_json(DORY.model_dump_json()) == DORY
