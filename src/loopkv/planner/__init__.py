"""``plan(profile, budget) -> Plan``, the whole frontier behind it, and the hand-made plans it is compared with.

The planner sees numbers only: damages and bytes, no tensors, no model, no GPU.
"""

from loopkv.planner.budget import GOALS, budget_warnings, check_budget, parse_bytes, parse_damage
from loopkv.planner.named import assigned_plan, named_options, named_plan, per_layer_plans, per_loop_plans
from loopkv.planner.prediction import (
    CORRECTION_WITH_SHARES,
    CORRECTION_WITHOUT_SHARES,
    correction,
    correction_applies,
    predict,
)
from loopkv.planner.solve import Frontier, frontier, plan

__all__ = [
    "CORRECTION_WITHOUT_SHARES",
    "CORRECTION_WITH_SHARES",
    "GOALS",
    "Frontier",
    "assigned_plan",
    "budget_warnings",
    "check_budget",
    "correction",
    "correction_applies",
    "frontier",
    "named_options",
    "named_plan",
    "parse_bytes",
    "parse_damage",
    "per_layer_plans",
    "per_loop_plans",
    "plan",
    "predict",
]
