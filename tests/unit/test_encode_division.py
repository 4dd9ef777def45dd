"""The division of ``kernels.encode``: a rounded reciprocal and one step along the remainder give IEEE quotients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def divide(x: Floats, divisor: Floats) -> Floats:
    """What the machine code computes; the fused operations round once (longdouble holds more than they need)."""
    reciprocal = np.float32(1.0) / divisor
    quotient = x * reciprocal
    remainder = (x.astype(np.float64) - quotient.astype(np.float64) * divisor).astype(np.float32)
    step = remainder.astype(np.longdouble) * reciprocal.astype(np.longdouble)
    return (quotient.astype(np.longdouble) + step).astype(np.float32)


def test_quotients_are_those_of_ieee_division_for_every_scale() -> None:
    scales = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)  # all positive halves
    generator = np.random.default_rng(0)
    for _ in range(20):
        steps = generator.uniform(0, 17, len(scales)).astype(np.float32)
        for x in (steps * scales, np.round(steps) * scales + scales / 2):  # anywhere, and beside the ties of rounding
            for nudged in (x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))):
                dividend = np.asarray(nudged, np.float32)
                assert np.array_equal(divide(dividend, scales), dividend / scales)


def test_far_values_stay_finite() -> None:
    smallest, largest = np.float32(2.0**-24), np.float32(2 * 65504.0)
    assert divide(np.array([largest]), np.array([smallest]))[0] == largest / smallest
