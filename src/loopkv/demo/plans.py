"""The plans a demo compares: the planner's two and the hand-made ones of the paper."""

from __future__ import annotations

from dataclasses import dataclass

from loopkv.artifacts import Budget, Fingerprint, Plan, Profile
from loopkv.errors import UnsupportedError
from loopkv.planner import Frontier, frontier, named_plan

READ_DAMAGE_SHARES = 1.19  # the paper's LoopKV-R budget, in KL_share (section 3.1)
MEMORY_DAMAGE_SHARES = 2.0  # and its LoopKV-M budget
MEMORY_STORED_SHARE = 156 / 240  # LoopKV-M stores at most this share of uniform int4 (section 3.1)
MEMORY_DAMAGE_MARGIN = 1.2  # over the least damage that fits the storage, where the paper's budget does not
HAND_MADE = ("bf16", "kivi4", "kivi2", "kivi4-share", "int4-int2-share")
RANDOM = ("random:0", "random:3", "random-share:1", "random-share:4")


@dataclass(frozen=True, slots=True)
class DemoPlans:
    """Plans of a demo.

    Args:
        frontier: of the profile.
        read, memory: LoopKV-R and LoopKV-M.
        hand_made: the paper's hand-made plans.
        random: drawn by seed, to test the prediction on plans that nobody chose.
        budgets: what ``read`` and ``memory`` were asked for, one sentence each.
    """

    frontier: Frontier
    read: Plan
    memory: Plan
    hand_made: tuple[Plan, ...]
    random: tuple[Plan, ...]
    budgets: tuple[str, ...]


def check_loops(fingerprint: Fingerprint) -> None:
    """Refuse a model of one loop, which has nothing to share (UnsupportedError)."""
    if fingerprint.geometry.loops < 2:
        raise UnsupportedError(f"demo of {fingerprint.name}", got="a model of one loop", wanted="a looped model")


def choose_plans(profile: Profile) -> DemoPlans:
    """Plan with the paper's budgets; the memory plan's damage budget widens where its storage budget needs it.

    Raises:
        UnsupportedError: a model of one loop, which has no KL_share and nothing to share.
    """
    check_loops(profile.fingerprint)
    assert profile.kl_share is not None
    table = frontier(profile)
    fingerprint = profile.fingerprint
    uniform = named_plan("kivi4", fingerprint, profile=profile)
    stored = int(MEMORY_STORED_SHARE * uniform.footprint.stored_bytes)
    least = table.damage_nats[table.stored_bytes <= stored].min()
    share = profile.kl_share
    damage = max(MEMORY_DAMAGE_SHARES * share, MEMORY_DAMAGE_MARGIN * float(least))
    return DemoPlans(
        frontier=table,
        read=table.plan(Budget(goal="read", max_damage_nats=READ_DAMAGE_SHARES * profile.kl_share)),
        memory=table.plan(Budget(goal="memory", max_damage_nats=damage, max_stored_bytes=stored)),
        hand_made=tuple(named_plan(name, fingerprint, profile=profile) for name in HAND_MADE),
        random=tuple(named_plan(name, fingerprint, profile=profile) for name in RANDOM),
        budgets=told_budgets(share, stored, float(least)),
    )


def told_budgets(kl_share_nats: float, stored_bytes: int, least_nats: float) -> tuple[str, str]:
    """What the two planned plans were asked for; says so where the memory plan's damage budget was widened.

    Args:
        kl_share_nats: the unit, of this model.
        stored_bytes: LoopKV-M's storage budget per history token.
        least_nats: least damage of any plan within it.
    """
    paper = MEMORY_DAMAGE_SHARES * kl_share_nats
    wide = MEMORY_DAMAGE_MARGIN * least_nats
    read = READ_DAMAGE_SHARES * kl_share_nats
    memory = f"loopkv-m: fewest bytes read within {stored_bytes:,} B stored and a damage of "
    if wide > paper:
        memory += (
            f"{wide:.3g} nats ({wide / kl_share_nats:.3g} KL_share): widened to {MEMORY_DAMAGE_MARGIN:g} x the least "
            f"that these bytes allow from the paper's {MEMORY_DAMAGE_SHARES:g} KL_share ({paper:.3g} nats), "
            f"{'which no plan meets' if least_nats > paper else 'which is too near it'}."
        )
    else:
        memory += f"{paper:.3g} nats ({MEMORY_DAMAGE_SHARES:g} KL_share)."
    return (
        f"loopkv-r: fewest bytes read within a damage of {read:.3g} nats ({READ_DAMAGE_SHARES:g} KL_share).",
        memory,
    )
