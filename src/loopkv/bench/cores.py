"""Whether the processor cores this process may use are equally fast: an engine's steps hang on those it gets.

A virtual machine's cores can differ (a busy neighbour on the same physical core, another clock), and the kernel does
not move a process for that. tau0 and the steps of two arms are only alike where their cores are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

TOLERATED_RATIO = 1.3
MAX_CORES = 16
ROUNDS = 2
SECOND_LOOKS = 8
"""At most, at cores that look slow after the rounds: what passes by is no property of a core."""
CPU_S = 0.025
WALL_S = 0.04
"""Of one turn on one core, whatever else runs there: 16 cores in two rounds end within 1.3 s."""
PAUSE_S = 0.08
"""Before a further look."""
LIMIT_S = 1.25
"""No further look starts that could end later than this after the first."""
_TURN = 2_000
Probe = Callable[[int], float | None]


def slow_cores(probe: Probe | None = None, cores: Collection[int] | None = None) -> str | None:
    """A warning where the slowest allowed core is more than 1.3 times slower than the fastest, else None.

    Every core is measured twice, in two rounds, one that looks slow some more times, and the best counts. Of more than
    16 allowed cores 16 are measured, evenly spread. The affinity is afterwards what it was.

    Args:
        probe: speed of a core in any unit, None where it cannot be had; this module's own pins the calling thread.
        cores: those allowed, this process's by default.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0) if cores is None else cores)
    probed = [allowed[i * len(allowed) // MAX_CORES] for i in range(MAX_CORES)] if len(allowed) > MAX_CORES else allowed
    if len(probed) < 2:
        return None
    speeds: dict[int, float] = {}
    started = time.perf_counter()
    before = os.sched_getaffinity(0)
    try:
        for number in range(ROUNDS + SECOND_LOOKS):
            looked_at = probed if number < ROUNDS else _slow(speeds)
            if number >= ROUNDS:
                needed = PAUSE_S + len(looked_at) * WALL_S
                if not looked_at or time.perf_counter() - started + needed > LIMIT_S:
                    break
                time.sleep(PAUSE_S)
            for core in looked_at:
                if (speed := (probe or core_speed)(core)) is not None:
                    speeds[core] = max(speed, speeds.get(core, 0.0))
    finally:
        os.sched_setaffinity(0, before)
    return _warning(speeds, len(allowed))


def core_speed(core: int) -> float | None:
    """Turns of a small loop per second of processor time on one core, which the calling thread is pinned to.

    Processor time, so that a core that others use at the moment does not look slow for it.
    """
    wall = time.perf_counter()  # the wait for a core that is busy counts
    try:
        os.sched_setaffinity(0, {core})
    except OSError:  # taken out of service, or out of this process's set, meanwhile
        return None
    turns, cpu = 0, time.thread_time()
    taken = 0.0
    while taken < CPU_S and time.perf_counter() - wall < WALL_S:
        total = 0
        for i in range(_TURN):
            total += i
        turns += 1
        taken = time.thread_time() - cpu
    return turns / taken if taken > 0 else None


def _slow(speeds: Mapping[int, float]) -> list[int]:
    """Cores more than 1.3 times slower than the fastest."""
    fastest = max(speeds.values(), default=0.0)
    return [core for core, speed in speeds.items() if speed * TOLERATED_RATIO < fastest]


def _warning(speeds: Mapping[int, float], allowed: int) -> str | None:
    slow = _slow(speeds)
    if not slow:
        return None
    counted = f"{len(speeds)} cores" if len(speeds) == allowed else f"the {len(speeds)} cores measured of {allowed}"
    share = min(speeds.values()) / max(speeds.values())
    fast = [core for core in speeds if core not in slow]
    return (
        f"warning: the cores are not equally fast: of {counted}, {core_list(slow)} run at down to {share:.2f} of the "
        f"speed of the fastest. tau0 and the steps of an arm depend on those that its processes get; start the command "
        f"with: taskset -c {core_list(fast)}"
    )


def core_list(cores: Sequence[int]) -> str:
    """Core numbers as ``taskset -c`` takes them: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
