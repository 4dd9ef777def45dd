"""The planner against an independent solver (HiGHS through SciPy) on instances too large for brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from profiles import geometry, profile, random_damage
from scipy.optimize import Bounds, LinearConstraint, milp

from loopkv.artifacts import Budget, Profile
from loopkv.options import OPTIONS, own_bytes
from loopkv.planner import frontier


def milp_optimum(data: Profile, budget: Budget) -> tuple[int, float] | None:
    """(read bytes, damage) of the solver's optimum. Damages are scaled to order one: its tolerance is absolute."""
    shape = data.fingerprint.geometry
    sizes = {
        o.name: own_bytes(o, shape.kv_heads, shape.head_dim, data.policy).stored
        for o in OPTIONS.values()
        if not o.shares
    }
    damages = {name: data.damage(name) for name in OPTIONS}
    variables = [
        (index, name)
        for index in range(len(shape.cells))
        for name in (("int4",) if index in shape.source_cells else OPTIONS)
        if damages[name][index] is not None
    ]
    read = np.array([sizes["int4" if name == "share" else name] for _, name in variables], dtype=float)
    stored = np.array([0 if name == "share" else sizes[name] for _, name in variables], dtype=float)
    damage = np.array([damages[name][index] for index, name in variables])
    one_option = np.zeros((len(shape.cells), len(variables)))
    one_option[[index for index, _ in variables], range(len(variables))] = 1
    constraints = [LinearConstraint(one_option, 1, 1)]
    unit = math.gcd(*sizes.values())
    if budget.max_stored_bytes is not None:
        constraints.append(LinearConstraint(stored / unit, ub=budget.max_stored_bytes / unit))
    if budget.max_read_bytes is not None:
        constraints.append(LinearConstraint(read / unit, ub=budget.max_read_bytes / unit))
    if budget.max_damage_nats is not None:
        constraints.append(LinearConstraint(damage / budget.max_damage_nats, ub=1.0))
    scale = float(np.median(damage[damage > 0]))
    result = milp(
        damage / scale if budget.goal == "damage" else read / unit,
        constraints=constraints,
        integrality=np.ones(len(variables)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": 60.0},
    )
    if result.status == 2:
        return None
    assert result.success, result.message
    taken = result.x > 0.5
    return round(float(read[taken].sum())), math.fsum(damage[taken])


@pytest.mark.parametrize("block", range(10))
def test_equals_milp_on_random_instances(block: int) -> None:
    """20 instances per block, 200 in all: 6 to 36 planned cells, every goal, tight and loose budgets."""
    for seed in range(20 * block, 20 * block + 20):
        draw = random.Random(seed)
        shape = geometry(draw.randint(2, 4), draw.randint(6, 12))
        data = profile(random_damage(seed, shape), shape)
        table = frontier(data)
        target = draw.randrange(len(table))  # budgets near a point of the frontier bind
        slack = draw.uniform(1.0, 1.3)
        goal = draw.choice(["read", "memory", "damage"])
        budget = Budget(
            goal=goal,
            max_damage_nats=None if goal == "damage" else float(table.damage_nats[target]) * slack,
            max_stored_bytes=None if goal == "read" else int(table.stored_bytes[target] * slack),
            max_read_bytes=int(table.read_bytes[target]) if goal == "damage" else None,
        )
        found = milp_optimum(data, budget)
        assert found is not None, seed
        mine = table.plan(budget)
        assert mine.predicted is not None
        if goal == "damage":
            assert mine.predicted.damage_nats <= found[1] * (1 + 1e-12), seed
            assert mine.predicted.damage_nats == pytest.approx(found[1], rel=1e-6), seed
        else:
            assert mine.footprint.read_bytes == found[0], seed
