"""The packing of a page: exact inverses for any geometry, and every code where the kernels' fragments expect it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkv.codec import CodedKeys, CodedValues
from loopkv.codec.pages import CELL_ALIGNMENT_BYTES, pack_page, page_struct, unpack_page
from loopkv.options import INT2, INT4, Option, own_bytes
from loopkv.policy import Policy


def _codes(option: Option, heads: int, dim: int, policy: Policy, seed: int = 0) -> tuple[CodedKeys, CodedValues]:
    generator = torch.Generator().manual_seed(seed)
    bits, page = int(option.bits or 0), policy.page_tokens

    def codes() -> torch.Tensor:
        return torch.randint(0, 1 << bits, (3, page, heads, dim), generator=generator, dtype=torch.uint8)

    def halves(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    groups = dim // policy.group
    keys = CodedKeys(codes(), halves(3, heads, dim), halves(3, heads, dim), bits)
    values = CodedValues(codes(), halves(3, page, heads, groups), halves(3, page, heads, groups), bits)
    return keys, values


@settings(max_examples=40, deadline=None)
@given(
    option=st.sampled_from([INT4, INT2]),
    heads=st.integers(1, 5),
    groups=st.integers(1, 8),
    group=st.sampled_from([8, 16, 32]),
    page=st.sampled_from([4, 8, 16, 32, 64]),
)
def test_unpacking_inverts_packing(option: Option, heads: int, groups: int, group: int, page: int) -> None:
    policy = Policy(page_tokens=page, group=group, sink_tokens=page)
    struct = page_struct(option, heads, groups * group, policy)
    keys, values = _codes(option, heads, groups * group, policy)
    data = pack_page(struct, keys, values)
    assert data.shape == (3, struct.nbytes)
    k, v = unpack_page(struct, data)
    for field in ("q", "scale", "zero"):
        assert torch.equal(getattr(keys, field), getattr(k, field))
        assert torch.equal(getattr(values, field), getattr(v, field))
    assert torch.equal(pack_page(struct, k, v), data)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("option", [INT4, INT2])
def test_page_bytes_are_those_of_the_byte_model(option: Option, dim: int) -> None:
    policy = Policy()
    struct = page_struct(option, 4, dim, policy)
    assert struct.nbytes == policy.page_tokens * own_bytes(option, 4, dim, policy).stored
    assert struct.head_nbytes % 32 == 0  # every head's low plane starts at a memory sector
    assert struct.v_low.offset % 32 == 0
    assert (struct.nbytes % CELL_ALIGNMENT_BYTES == 0) or dim % 64 != 0


def test_one_key_code_lies_where_the_reader_expects_it() -> None:
    """int4, D 128: token 5's channel 43 is place 3 of unit 5 (channels 40 .. 47: even ones first): nibble 45."""
    policy = Policy()
    struct = page_struct(INT4, 2, 128, policy)
    keys, values = _codes(INT4, 2, 128, policy)
    blank = CodedKeys(torch.zeros_like(keys.q), keys.scale, keys.zero, 4)
    blank.q[0, 5, 1, 43] = 9
    page = pack_page(struct, blank, values)[0]
    codes = page[struct.head_nbytes + struct.k_codes.offset :][: struct.k_codes.nbytes]
    # 43 = 40 + 3: the odd channels 41, 43, .. follow the four even ones, so place 4 + 1 = 5 of the unit's nibbles
    nibble = 5 * 128 + 40 + 5
    assert codes[nibble // 2] == 9 << (4 * (nibble % 2))
    assert int((codes != 0).sum()) == 1


def test_low_plane_of_a_token_is_one_contiguous_run() -> None:
    """V precision skips whole sectors: all low bits of token 3 (slot 5: tokens 0 2 4 6 1 3 5 7) in bytes 160 .. 191."""
    policy = Policy()
    struct = page_struct(INT4, 1, 128, policy)
    keys, values = _codes(INT4, 1, 128, policy)
    blank = CodedValues(torch.zeros_like(values.q), values.scale, values.zero, 4)
    blank.q[0, 3] = 1
    low = pack_page(struct, keys, blank)[0, struct.v_low.offset :]
    assert torch.equal(low.nonzero().flatten(), torch.arange(5 * 32, 6 * 32))
    assert bool((low[160:192] == 0b01010101).all())


def test_scales_of_a_value_group_lie_pair_by_pair() -> None:
    """A lane's four token pairs (2 t, 2 t + 1) + 8 k of a group are neighbours (token 11 = 8 + 2 + 1)."""
    policy = Policy()
    struct = page_struct(INT2, 1, 128, policy)
    keys, values = _codes(INT2, 1, 128, policy)
    plane = pack_page(struct, keys, values)[0, struct.v_scales.offset :][: struct.v_scales.nbytes].view(torch.float16)
    token, group = 11, 2
    tile, pair, which = token // 8, token % 8 // 2, token % 2
    assert plane[group * 32 + pair * 8 + tile * 2 + which] == values.scale[0, token, 0, group]


@pytest.mark.parametrize("option", [INT4, INT2])
def test_no_pages_pack_and_unpack_to_no_pages(option: Option) -> None:
    struct = page_struct(option, 6, 64, Policy())
    keys, values = unpack_page(struct, torch.empty(0, struct.nbytes, dtype=torch.uint8))
    assert keys.q.shape == values.q.shape == (0, 32, 6, 64)
    assert pack_page(struct, keys, values).shape == (0, struct.nbytes)
