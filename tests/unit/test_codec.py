"""The KIVI code: exact values, a bound on what it loses, and every kind of group that has broken a codec before."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopkv.codec import decode_keys, decode_values, encode_keys, encode_values, sanitize
from loopkv.codec.kivi import FP16_MAX

PAGE, HEADS, DIM = 32, 2, 64


def _page(seed: int, magnitude: float, offset: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PAGE, HEADS, DIM, generator=generator) * magnitude + offset


def _loss_bound(x: Tensor, scale: Tensor, zero: Tensor, bits: int, dim: int) -> Tensor:
    """Largest |x - x'| in one group, from the definition, in fp64 (scale and zero broadcast over ``dim``).

    Inside [zero, zero + top * scale] the nearest step is at most half a scale away; below zero (fp16 rounding of lo)
    and above the last step (fp16 rounding of the scale) the value is clamped. fp32 rounding of division, product and
    sum adds at most a few units in the last place of the group's largest magnitude.
    """
    top = (1 << bits) - 1
    lo, hi = x.double().amin(dim, keepdim=True), x.double().amax(dim, keepdim=True)
    scale, zero = scale.double(), zero.double()
    clamped = torch.maximum(zero - lo, hi - (zero + top * scale)).clamp_min(0.0)
    size = torch.maximum(lo.abs(), hi.abs()) + top * scale
    return torch.maximum(scale / 2, clamped) + 4 * 2.0**-24 * size


magnitudes = st.floats(-9, 4).map(lambda exponent: 10.0**exponent)
offsets = st.one_of(st.just(0.0), st.floats(-6e4, 6e4))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), magnitude=magnitudes, offset=offsets, bits=st.sampled_from([2, 4]))
def test_a_round_trip_loses_at_most_half_a_step_and_the_clamp(seed, magnitude, offset, bits):
    x = sanitize(_page(seed, magnitude, offset))[0]
    keys = encode_keys(x, bits)
    bound = _loss_bound(x, keys.scale.unsqueeze(0), keys.zero.unsqueeze(0), bits, 0)
    assert ((decode_keys(keys).double() - x.double()).abs() <= bound).all()
    values = encode_values(x, bits)
    grouped = x.unflatten(-1, (-1, 32))
    bound = _loss_bound(grouped, values.scale.unsqueeze(-1), values.zero.unsqueeze(-1), bits, -1)
    decoded = decode_values(values).unflatten(-1, (-1, 32))
    assert ((decoded.double() - grouped.double()).abs() <= bound).all()


@settings(max_examples=60, deadline=None)
@given(
    value=st.one_of(st.floats(-6e4, 6e4, width=32), st.sampled_from([0.0, 65504.0, -65504.0, 6e-8, 1e-9])),
    bits=st.sampled_from([2, 4]),
)
def test_a_constant_group_decodes_to_its_fp16_value(value, bits):
    x = torch.full((PAGE, HEADS, DIM), value)
    expected = x.half().float()
    for coded, decoded in (
        (encode_keys(x, bits), decode_keys(encode_keys(x, bits))),
        (encode_values(x, bits), decode_values(encode_values(x, bits))),
    ):
        assert not coded.q.any()  # scale 0 gives q = 0
        assert torch.equal(decoded, expected)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_column_of_zeros_stays_zero_beside_others(bits):
    x = _page(0, 1.0, 0.0)
    x[..., 32:] = 0.0  # one value group, and 32 key channels
    keys, values = decode_keys(encode_keys(x, bits)), decode_values(encode_values(x, bits))
    assert (keys[..., 32:] == 0).all() and (values[..., 32:] == 0).all()
    assert keys[..., :32].abs().sum() > 0 and values[..., :32].abs().sum() > 0


def _steps(*values: float) -> Tensor:
    """A page whose every value group holds ``values`` and zeros behind them."""
    x = torch.zeros(PAGE, 1, 32)
    x[..., : len(values)] = torch.tensor(values)
    return x


def test_ties_round_to_even():
    # lo = 0, hi = 15: scale = 1 and zero = 0 exactly, so a code is the value rounded half to even.
    coded = encode_values(_steps(0.5, 1.5, 2.5, 3.5, 14.5, 15.0), 4)
    assert coded.scale.unique().tolist() == [1.0] and coded.zero.unique().tolist() == [0.0]
    assert coded.q[0, 0, :6].tolist() == [0, 2, 2, 4, 14, 15]


def test_codes_use_the_rounded_scale():
    # hi - lo = 1 over 3 steps: fp16(1/3) = 0.333251953125; 0.5 / 0.333251953125 = 1.50037 rounds to 2,
    # while the exact scale 1/3 would give the tie 1.5.
    coded = encode_values(_steps(0.5, 1.0), 2)
    assert coded.scale[0, 0, 0].item() == 0.333251953125
    assert coded.q[0, 0, :2].tolist() == [2, 3]
    assert decode_values(coded)[0, 0, 1].item() == pytest.approx(3 * 0.333251953125, abs=1e-7)


def test_subnormal_scales_are_kept():
    # Steps of 1e-6: fp16(1e-6) = 17 * 2^-24 = 1.01328e-6, a subnormal; 15e-6 / 1.01328e-6 = 14.80 rounds to 15.
    coded = encode_values(_steps(*(i * 1e-6 for i in range(16))), 4)
    assert coded.scale[0, 0, 0].item() == 17 * 2.0**-24
    assert coded.q[0, 0, :16].tolist() == list(range(16))
    assert decode_values(coded)[0, 0, 15].item() == pytest.approx(15 * 17 * 2.0**-24, rel=1e-6)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_scale_that_underflows_gives_the_zero_point(bits):
    """A range of 6e-8 at most: below half the smallest fp16 step (2^-24) a level is 0 although the range is not."""
    x = _page(1, 1e-8, 0.0)
    assert x.amax() - x.amin() > 0
    for coded, decoded in (
        (encode_keys(x, bits), decode_keys(encode_keys(x, bits))),
        (encode_values(x, bits), decode_values(encode_values(x, bits))),
    ):
        flat = coded.scale == 0
        assert flat.any() and torch.isfinite(decoded).all()
        assert (decoded - x).abs().max() <= 2.0**-24 * ((1 << bits) - 1)


@pytest.mark.parametrize("magnitude", [1e-6, 1e-7])
@pytest.mark.parametrize("bits", [2, 4])
def test_tiny_groups_lose_half_a_step_and_the_rounding_of_their_scale(magnitude, bits):
    x = _page(1, magnitude, 0.0)
    top = (1 << bits) - 1
    step = (x.amax() - x.amin()) / top
    for decoded in (decode_keys(encode_keys(x, bits)), decode_values(encode_values(x, bits))):
        # fp16 rounds scale and zero by at most half of 2^-24 each; a code multiplies the scale's error by up to top.
        assert (decoded - x).abs().max() <= step / 2 + 2.0**-25 * (top + 1)


@pytest.mark.parametrize("outlier", [7e4, -7e4, 1e5, -1e5, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [2, 4])
def test_outliers_beyond_fp16_are_clamped_and_never_infinite(outlier, bits):
    x = _page(2, 1.0, 0.0)
    x[3, 0, 5] = outlier
    clean, changed = sanitize(x)
    assert changed == 1 and clean[3, 0, 5].item() == math.copysign(FP16_MAX, outlier)
    keys, values = encode_keys(x, bits), encode_values(x, bits)
    for coded in (keys, values):
        assert torch.isfinite(coded.scale).all() and torch.isfinite(coded.zero).all()
    for decoded in (decode_keys(keys), decode_values(values)):
        assert torch.isfinite(decoded).all()
        # fp16(65504 / 15) differs from it by up to 2^-11: the outlier comes back to within that and some noise
        assert decoded[3, 0, 5].item() == pytest.approx(math.copysign(FP16_MAX, outlier), rel=2e-3)


def test_both_ends_of_fp16_in_one_group():
    x = _steps(-1e5, 1e5)
    coded = encode_values(x, 2)
    # (65504 + 65504) / 3 = 43669.33, in fp16 43680; zero = -65504.
    assert coded.scale[0, 0, 0].item() == 43680.0 and coded.zero[0, 0, 0].item() == -65504.0
    assert coded.q[0, 0, :2].tolist() == [0, 3]


def test_nan_becomes_zero_and_is_counted():
    x = _page(3, 1.0, 0.0)
    x[0, 0, :3] = math.nan
    clean, changed = sanitize(x)
    assert changed == 3 and (clean[0, 0, :3] == 0).all()
    assert torch.isfinite(decode_values(encode_values(x, 4))).all()
    assert torch.isfinite(decode_keys(encode_keys(x, 4))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_input_is_the_value_as_stored_in_the_cache_dtype(dtype):
    x = _page(4, 3.0, 1.0).to(dtype)
    assert torch.equal(encode_values(x, 4).q, encode_values(x.float(), 4).q)
    assert decode_values(encode_values(x, 4), dtype).dtype == dtype


def test_a_cold_value_is_the_middle_of_its_bucket():
    values = encode_values(_page(5, 1.0, 0.0), 4)
    cold = torch.zeros(PAGE, HEADS, dtype=torch.bool)
    cold[::2] = True
    decoded = decode_values(values, torch.float64, cold=cold)
    exact = decode_values(values, torch.float64)
    assert torch.equal(decoded[1::2], exact[1::2])
    scale = values.scale.double().repeat_interleave(32, dim=-1)
    zero = values.zero.double().repeat_interleave(32, dim=-1)
    expected = zero + scale * (4 * (values.q // 4).double() + 1.5)
    assert torch.allclose(decoded[::2], expected[::2], rtol=0, atol=1e-12)
    assert ((decoded - exact).abs() <= 1.5 * scale + 1e-12).all()


def test_two_bit_values_have_no_low_plane():
    with pytest.raises(ValueError, match="4-bit"):
        decode_values(encode_values(_page(6, 1.0, 0.0), 2), cold=torch.ones(PAGE, HEADS, dtype=torch.bool))


def test_pages_and_batches_are_coded_independently():
    x = torch.stack([_page(7, 1.0, 0.0), _page(8, 5.0, 2.0)])
    together, alone = encode_keys(x, 4), [encode_keys(page, 4) for page in x]
    for i in range(2):
        assert torch.equal(together.q[i], alone[i].q)
        assert torch.equal(together.scale[i], alone[i].scale)
