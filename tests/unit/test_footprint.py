"""Byte counts: the paper's figures for Ouro-1.4B, and sharing."""

import pytest

from loopkv.codec.pages import page_struct
from loopkv.errors import PlanFormatError, UnsupportedError
from loopkv.footprint import plan_footprint
from loopkv.geometry import Geometry
from loopkv.options import BF16, INT2, INT4, SHARE, get_option, own_bytes
from loopkv.policy import DEFAULT_POLICY

OURO = Geometry(architecture="ouro", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
KIB = 1024


@pytest.mark.parametrize(
    ("option", "stored"),
    # 4,096 elements a token and layer: 16, 5 and 3 bits each (appendix C)
    [(BF16, 8 * KIB), (INT4, 2560), (INT2, 1536)],
)
def test_bytes_of_one_cell(option, stored):
    size = own_bytes(option, 16, 128, DEFAULT_POLICY)
    assert (size.stored, size.read) == (stored, stored)
    assert size.value_low_plane == (512 if option is INT4 else 0)


@pytest.mark.parametrize(
    ("loops", "stored_kib", "read_kib"),
    # tables 8 and 12 of the paper
    [
        ((INT4, INT4, INT4, INT4), 240, 240),
        ((INT4, INT4, SHARE, INT4), 180, 240),
        ((INT4, INT2, SHARE, INT4), 156, 216),
        ((INT2, INT2, SHARE, INT4), 132, 192),
        ((INT2, INT2, INT2, INT4), 168, 168),
        ((BF16, BF16, BF16, BF16), 768, 768),
        ((BF16, BF16, SHARE, BF16), 576, 768),
    ],
)
def test_the_papers_plans(loops, stored_kib, read_kib):
    options = [option for option in loops for _ in range(24)]
    footprint = plan_footprint(OURO, options, DEFAULT_POLICY)
    assert (footprint.stored_bytes, footprint.read_bytes) == (stored_kib * KIB, read_kib * KIB)


def test_v_precision_skips_the_low_plane_of_cold_tokens():
    footprint = plan_footprint(OURO, [INT4] * 96, DEFAULT_POLICY)
    assert footprint.low_plane_bytes == 96 * 512
    assert footprint.read_bytes_at(1.0) == 240 * KIB
    assert footprint.read_bytes_at(0.0) == 192 * KIB


def test_the_exact_dtype_sets_the_bytes_of_bf16_cells_only():
    options = [BF16] * 24 + [INT4] * 72
    assert plan_footprint(OURO, options, DEFAULT_POLICY, exact_itemsize=4).stored_bytes == (24 * 16 + 72 * 2.5) * KIB


@pytest.mark.parametrize("option", [INT4, INT2])
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (6, 64), (55, 96), (4, 256)])
def test_a_packed_page_has_exactly_the_bytes_of_the_byte_model(option, heads, dim):
    page = page_struct(option, heads, dim, DEFAULT_POLICY).nbytes
    assert page == 32 * own_bytes(option, heads, dim, DEFAULT_POLICY).stored


def test_impossible_sharing_is_refused():
    with pytest.raises(PlanFormatError, match=r"L4\.01.*share"):
        plan_footprint(OURO, [INT4] * 72 + [SHARE] * 24, DEFAULT_POLICY)
    with pytest.raises(PlanFormatError, match="95"):
        plan_footprint(OURO, [INT4] * 95, DEFAULT_POLICY)


def test_unknown_options_suggest_the_near_name():
    with pytest.raises(UnsupportedError, match="did you mean 'int4'"):
        get_option("int44")


def test_a_head_size_off_the_group_is_refused():
    with pytest.raises(UnsupportedError, match=r"head size.*80.*multiple"):
        own_bytes(INT4, 4, 80, DEFAULT_POLICY)
