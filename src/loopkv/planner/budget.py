"""Budgets: how people write them, and which limits each goal needs."""

from __future__ import annotations

import difflib
import math
import re
from fractions import Fraction

from loopkv.artifacts import Budget, Profile
from loopkv.errors import UnsupportedError
from loopkv.footprint import Footprint, plan_footprint
from loopkv.options import BF16, INT4, Option

GOALS = {
    "read": "fewest bytes read within a damage budget (LoopKV-R; a storage budget may be added)",
    "memory": "fewest bytes read within a damage and a storage budget (LoopKV-M)",
    "damage": "least damage within a storage or read budget, or both",
}
KL_SHARE_UNIT = "KL_share"
"""Unit of damage; ``share`` alone, an option's name, is read as well."""
_NUMBER = r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?)"
_DAMAGE = re.compile(_NUMBER + r"\s*(?P<unit>[A-Za-z_]*)", re.ASCII)
_BYTES = re.compile(_NUMBER + r"\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_BYTE_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
_MAX_BYTES = 1 << 53
HEAVY_DAMAGE_SHARES = 10.0  # the paper's plans take 1.19 and 2.0 KL_share (section 3.1)
_EXAMPLE_STORED_SHARE = 156 / 240  # of uniform int4, what the paper's LoopKV-M stores (section 3.1)


def parse_damage(text: str, kl_share_nats: float | None = None) -> float:
    """Nats of a damage budget written as ``5e-4``, ``5e-4nats`` or ``2.0KL_share``.

    Args:
        text: what the user wrote.
        kl_share_nats: the profile's KL_share, needed for the unit ``KL_share`` alone.

    Raises:
        UnsupportedError: anything else, or a KL_share that is unknown.
    """
    match = _DAMAGE.fullmatch(text.strip()) if len(text) <= 64 else None
    unit = match["unit"] if match else ""
    if match is None or unit not in ("", "nats", KL_SHARE_UNIT, "share"):
        raise UnsupportedError(
            "damage budget",
            got=repr(text)[:80],
            wanted="a number >= 0 in nats or KL_share",
            hint="5e-4nats or 2.0KL_share",
        )
    value = float(match["number"])
    if unit in (KL_SHARE_UNIT, "share"):
        if kl_share_nats is None:
            raise UnsupportedError(
                "damage budget",
                got=repr(text),
                wanted="nats",
                hint="KL_share is not known here (a profile of a model with two or more loops holds it)",
            )
        value *= kl_share_nats
    if not math.isfinite(value):
        raise UnsupportedError("damage budget", got=repr(text), wanted="a finite number")
    return value


def parse_bytes(text: str) -> int:
    """Bytes per history token written as ``6912``, ``6912B``, ``156KiB`` or ``6.75KiB``; a part of a byte is dropped.

    Raises:
        UnsupportedError: anything else.
    """
    match = _BYTES.fullmatch(text.strip()) if len(text) <= 64 else None
    if match is None or match["unit"] not in _BYTE_UNITS:
        unit = match["unit"] if match else ""
        near = difflib.get_close_matches(unit.lower(), ["kib", "mib", "b"], n=1, cutoff=0.5) if unit else []
        names = {"kib": "KiB", "mib": "MiB", "b": "B"}
        raise UnsupportedError(
            "byte budget",
            got=repr(text)[:80],
            wanted="bytes per history token",
            hint=f"did you mean {names[near[0]]} ({'binary units only' if near[0] != 'b' else 'bytes'})?"
            if near
            else "6912, 6912B or 6.75KiB",
        )
    value = Fraction(match["number"]) * _BYTE_UNITS[match["unit"]]
    if value > _MAX_BYTES:
        raise UnsupportedError("byte budget", got=repr(text), wanted=f"at most {_MAX_BYTES} bytes")
    return math.floor(value)


def told_limit(value: float, kl_share_nats: float | None, *, least: bool = False) -> str:
    """A limit as ``loopkv plan`` takes it: bytes (an int), or damage in every unit that a user may have typed.

    Args:
        value: bytes, or nats.
        kl_share_nats: the profile's KL_share, or None.
        least: whether a smaller damage would not do: KL_share, in five digits, is then rounded up.
    """
    if isinstance(value, int):
        return f"{value}B"
    if not kl_share_nats or not math.isfinite(value / kl_share_nats):
        return f"{value!r}nats"
    shares = f"{value / kl_share_nats:.5g}"
    if least and float(shares) * kl_share_nats < value:
        step = math.floor(math.log10(value / kl_share_nats)) - 4
        shares = f"{float(shares) + 10.0**step:.5g}"
    return f"{shares}{KL_SHARE_UNIT} ({value!r}nats)"


def budget_warnings(budget: Budget, profile: Profile) -> tuple[str, ...]:
    """Limits that are hardly meant: a damage far beyond the paper's budgets, and bytes that even BF16 keeps to."""
    warnings = []
    damage, share = budget.max_damage_nats, profile.kl_share
    if damage is not None and share and damage > HEAVY_DAMAGE_SHARES * share:
        warnings.append(
            f"--max-damage is {damage:.4g} nats, {damage / share:.3g} KL_share (the paper's plans take 1.19 and 2.0); "
            "a number without a unit is in nats: write 2.0KL_share for 2.0 KL_share"
        )
    exact = _uniform(BF16, profile)
    for name, limit, most in (
        ("--max-stored", budget.max_stored_bytes, exact.stored_bytes),
        ("--max-read", budget.max_read_bytes, exact.read_bytes),
    ):
        if limit is not None and limit >= most:
            warnings.append(f"{name} {limit:,} B does not bind: all-BF16 needs {most:,} B per history token")
    return tuple(warnings)


def _uniform(option: Option, profile: Profile) -> Footprint:
    geometry = profile.fingerprint.geometry
    return plan_footprint(geometry, [option] * len(geometry.cells), profile.policy)


def check_budget(budget: Budget, profile: Profile | None = None) -> None:
    """Refuse an unknown goal and a goal without the limits that give it a meaning (UnsupportedError).

    Args:
        budget: what was asked for.
        profile: whose bytes the hint's example takes.
    """
    if budget.goal not in GOALS:
        near = difflib.get_close_matches(budget.goal, GOALS, n=1, cutoff=0.4)
        raise UnsupportedError(
            "goal",
            got=repr(budget.goal),
            wanted=", ".join(GOALS),
            hint=f"did you mean {near[0]!r}?" if near else None,
        )
    needs_damage = budget.goal in ("read", "memory") and budget.max_damage_nats is None
    needs_stored = budget.goal == "memory" and budget.max_stored_bytes is None
    needs_bytes = budget.goal == "damage" and budget.max_stored_bytes is None and budget.max_read_bytes is None
    if needs_damage or needs_stored or needs_bytes:
        missing = [
            name
            for name, needed in (
                ("max_damage", needs_damage),
                ("max_stored", needs_stored),
                ("max_stored or max_read", needs_bytes),
            )
            if needed
        ]
        stored = None if profile is None else int(_EXAMPLE_STORED_SHARE * _uniform(INT4, profile).stored_bytes)
        examples = ["--max-damage 2.0KL_share"] * needs_damage
        if needs_stored or needs_bytes:
            examples.append(f"--max-stored {'BYTES' if stored is None else f'{stored}B'}")
        raise UnsupportedError(
            f"goal {budget.goal!r}",
            got=f"no {' and no '.join(missing)}",
            wanted=f"the budget that this goal needs ({GOALS[budget.goal]})",
            hint=f"add {' '.join(examples)}",
        )
