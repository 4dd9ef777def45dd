"""Cores of unequal speed: what is warned of, what is not, and that the affinity stays as it was."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from loopkv.bench import cores
from loopkv.bench.cores import core_list, slow_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")


def warning(speeds: Mapping[int, list[float | None]]) -> str | None:
    """Of cores that run at these speeds in the rounds, and at the last one from then on."""
    left = {core: list(every) for core, every in speeds.items()}
    return slow_cores(lambda core: left[core].pop(0) if len(left[core]) > 1 else left[core][0], speeds)


def test_slow_cores_are_named_with_the_line_that_avoids_them() -> None:
    told = warning({core: [0.5, 0.5] if 4 <= core < 12 else [1.0, 0.9] for core in range(16)})
    assert told is not None and "of 16 cores, 4-11 run at down to 0.50 of the speed of the fastest" in told
    assert told.startswith("warning: ") and told.endswith("taskset -c 0-3,12-15")


def test_equal_cores_and_noise_are_silent() -> None:
    assert warning({core: [1.0, 1.0] for core in range(4)}) is None
    assert warning({0: [1.0, 1.0], 1: [0.4, 1.0], 2: [1.0, 0.3]}) is None  # the better of two
    assert warning({0: [1.0, 1.0], 1: [0.4, 0.5, 0.5, 0.6, 0.9]}) is None  # slow for some time only
    assert warning({0: [1.3, 1.3], 1: [1.0, 1.0]}) is None and warning({0: [1.31, 1.0], 1: [1.0, 1.0]}) is not None


def test_cores_that_cannot_be_measured_do_not_count() -> None:
    assert warning({0: [1.0, 1.0], 1: [None, None]}) is None
    assert warning({0: [None, 1.0], 1: [0.5, None], 2: [None, None]}) is not None
    assert warning({}) is None and warning({3: [1.0, 1.0]}) is None


def test_of_many_cores_some_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "PAUSE_S", 0.0)
    probed: list[int] = []

    def probe(core: int) -> float:
        probed.append(core)
        return 1.0 if core < 64 else 0.6

    told = slow_cores(probe, range(128))
    assert probed == list(range(0, 128, 8)) * 2 + list(range(64, 128, 8)) * cores.SECOND_LOOKS
    assert told is not None and "of the 16 cores measured of 128" in told
    assert told.endswith("taskset -c 0,8,16,24,32,40,48,56")


def test_the_affinity_stays_and_a_turn_is_short() -> None:
    before = os.sched_getaffinity(0)
    slow_cores()
    assert os.sched_getaffinity(0) == before

    def interrupted(core: int) -> float:
        os.sched_setaffinity(0, {min(before)})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slow_cores(interrupted, (0, 1))
    assert os.sched_getaffinity(0) == before
    assert cores.MAX_CORES * cores.ROUNDS * cores.WALL_S < 1.5 and cores.LIMIT_S < 1.5
    assert cores.core_speed(max(before) + 100_000) is None  # no such core


def test_core_lists() -> None:
    assert core_list([8, 0, 1, 2, 5]) == "0-2,5,8" and core_list([3]) == "3"
