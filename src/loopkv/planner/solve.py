"""``plan(profile, budget) -> Plan``: the exact optimum, read off a table that holds every budget's optimum at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loopkv.artifacts import Budget, Plan, Profile
from loopkv.errors import BudgetInfeasibleError, ProfileFormatError, UnsupportedError
from loopkv.options import BF16, INT4, OPTIONS, SHARE, Option, own_bytes
from loopkv.planner.budget import check_budget, told_limit
from loopkv.planner.knapsack import Choice, IntArray, KnapsackTable
from loopkv.planner.prediction import predict

FloatArray = npt.NDArray[np.float64]
PLAN_NAMES = {"read": "loopkv-r", "memory": "loopkv-m", "damage": "loopkv-d"}


@dataclass(frozen=True, slots=True)
class Frontier:
    """All plans that no other plan beats in stored bytes, read bytes and damage at once: the optimum of every budget.

    The three arrays [N] describe the points, fewest reads first, then least damage, then least stored. Bytes are per
    history token with a two-byte exact dtype and both value planes; damage is in nats and sums all cells. The plan of a
    point is built when it is asked for.
    """

    profile: Profile
    stored_bytes: IntArray
    read_bytes: IntArray
    damage_nats: FloatArray
    _states: IntArray = field(repr=False)
    _table: KnapsackTable = field(repr=False)
    _groups: tuple[tuple[tuple[int, ...], tuple[Option, ...]], ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self._states)

    def options(self, point: int) -> tuple[str, ...]:
        """One option name per cell of a point; among equal plans the first in cell order by table order."""
        names = [INT4.name] * len(self.profile.fingerprint.geometry.cells)
        taken = self._table.first_plan(int(self._states[point]))
        for (cells, menu), choice in zip(self._groups, taken, strict=True):
            for cell in cells:
                names[cell] = menu[choice].name
        return tuple(names)

    def find(self, budget: Budget) -> int:
        """Position of the best point within ``budget``; nothing is solved again.

        Minimises reads (goals ``read`` and ``memory``) or damage (``damage``); ties go to the fewest reads, then the
        least damage, then the least stored bytes.

        Raises:
            BudgetInfeasibleError: no point fits; the message gives the smallest feasible budget.
            UnsupportedError: a goal that does not exist or lacks its limits.
        """
        check_budget(budget)
        fits = self._fitting(budget)
        if not fits.any():
            raise self._infeasible(budget)
        candidates = np.flatnonzero(fits)
        stored, read = self.stored_bytes[candidates], self.read_bytes[candidates]
        damage = self.damage_nats[candidates]
        keys = (stored, damage, read) if budget.goal != "damage" else (stored, read, damage)
        return int(candidates[np.lexsort(keys)[0]])

    def plan(self, budget: Budget, *, name: str | None = None, tau: float | None = None) -> Plan:
        """The plan of the best point within ``budget`` (see ``find``)."""
        plan = self.plan_at(self.find(budget), PLAN_NAMES[budget.goal] if name is None else name, tau=tau)
        return plan.model_copy(update={"budget": budget})

    def plan_at(self, point: int, name: str, *, tau: float | None = None) -> Plan:
        """The plan of one point of the frontier."""
        options = self.options(point)
        bare = Plan(
            name="plan",
            fingerprint=self.profile.fingerprint,
            policy=self.profile.policy,
            options=options,
            predicted=predict(self.profile, options),
        )
        return bare.with_name(name).with_tau(tau)

    def _fitting(self, budget: Budget, without: str | None = None) -> npt.NDArray[np.bool_]:
        fits = np.ones(len(self), dtype=np.bool_)
        for limit, values in self._limits():
            bound = getattr(budget, limit)
            if bound is not None and limit != without:
                fits &= values <= bound
        return fits

    def _limits(self) -> tuple[tuple[str, IntArray | FloatArray], ...]:
        return (
            ("max_damage_nats", self.damage_nats),
            ("max_stored_bytes", self.stored_bytes),
            ("max_read_bytes", self.read_bytes),
        )

    def _infeasible(self, budget: Budget) -> BudgetInfeasibleError:
        """One sentence with the smallest feasible value of every limit given: beside the others, or else alone."""
        got, wanted = [], []
        given = [(limit, values) for limit, values in self._limits() if getattr(budget, limit) is not None]
        share = self.profile.kl_share
        for limit, values in given:
            flag, bound = f"--{limit.rsplit('_', 1)[0].replace('_', '-')}", getattr(budget, limit)
            got.append(f"{flag} {told_limit(bound, share)}")
            beside = self._fitting(budget, without=limit)
            if beside.any():
                rest = " with the other budgets kept" if len(given) > 1 else ""
                wanted.append(f"{flag} >= {told_limit(values[beside].min().item(), share, least=True)}{rest}")
            elif bound < values.min():
                least = told_limit(values.min().item(), share, least=True)
                wanted.append(f"{flag} >= {least} whatever the others are")
        return BudgetInfeasibleError(
            f"no plan of {self.profile.fingerprint.name} fits the budget",
            got=", ".join(got),
            wanted=" or ".join(wanted) if wanted else "budgets that some plan meets together",
            hint="loosen a budget; `loopkv inspect` of the profile shows what each cell costs",
        )


def plan(
    profile: Profile,
    budget: Budget,
    *,
    share: bool = True,
    plan_source_cells: bool = False,
    per_layer: bool = False,
    name: str | None = None,
    tau: float | None = None,
) -> Plan:
    """The best plan within ``budget``: exact, deterministic, ties broken as ``Frontier.find`` says (paper Eq. 2).

    Args:
        profile: damages of every cell.
        budget: goal and limits, per history token and over the whole cache, source cells included.
        share: let cells read the final loop's history.
        plan_source_cells: choose the final loop's options too instead of fixing them at int4; sharing must be off.
        per_layer: one option for all loops of a layer but the final one ("layer-only", the paper's comparison).
        name: of the plan; by default that of its goal.
        tau: V-precision threshold in bits, written into the plan; None reads both value planes.

    Raises:
        BudgetInfeasibleError: no plan fits; the message gives the smallest feasible budget.
        UnsupportedError: flags that contradict each other, an unknown goal or one without its limits.
    """
    check_budget(budget)
    table = frontier(profile, share=share, plan_source_cells=plan_source_cells, per_layer=per_layer)
    return table.plan(budget, name=name, tau=tau)


def frontier(
    profile: Profile, *, share: bool = True, plan_source_cells: bool = False, per_layer: bool = False
) -> Frontier:
    """Every non-dominated plan of ``profile``; the arguments are those of ``plan``.

    State of the dynamic program: how many cells share, and the bytes that the others store beyond the cheapest own
    option, in the greatest common unit. A shared cell stores nothing and reads its source's int4 pages, own options
    read what they store: so the state gives stored and read bytes, and they give the state.
    """
    if share and plan_source_cells:
        raise UnsupportedError(
            "planning the final loop's cells",
            got="sharing allowed",
            wanted="sharing off",
            hint="shared cells read int4 sources; switch sharing off (--no-share) to plan the source cells",
        )
    geometry, policy = profile.fingerprint.geometry, profile.policy
    own = [o for o in OPTIONS.values() if not o.shares and (o is BF16 or o.name in profile.damage_nats)]
    sizes = {o: own_bytes(o, geometry.kv_heads, geometry.head_dim, policy).stored for o in own}
    sources = () if plan_source_cells else geometry.source_cells
    if sources and INT4 not in sizes:
        raise ProfileFormatError(
            f"profile of {profile.fingerprint.name}", got="no damage of int4", wanted="int4, which source cells take"
        )
    base = min(sizes.values())
    unit = math.gcd(*(size - base for size in sizes.values())) or 1
    damages = {o: profile.damage(o.name) for o in own}
    if share and SHARE.name in profile.damage_nats:
        damages[SHARE] = profile.damage(SHARE.name)

    groups = []
    items: list[list[Choice]] = []
    for cells in _groups(profile, set(sources), per_layer):
        menu = [o for o in OPTIONS.values() if o in damages and damages[o][cells[0]] is not None]
        groups.append((cells, tuple(menu)))
        items.append(
            [
                Choice(
                    shared=len(cells) if o.shares else 0,
                    excess=0 if o.shares else len(cells) * (sizes[o] - base) // unit,
                    damages=tuple(_known(damages[o][cell]) for cell in cells),
                )
                for o in menu
            ]
        )
    table = KnapsackTable(items, fixed=[_known(damages[INT4][cell]) for cell in sources])
    planned = sum(len(cells) for cells, _ in groups)
    source_bytes = sizes.get(INT4, 0)
    stored = base * (planned - table.shared) + unit * table.excess + len(sources) * source_bytes
    read = stored + table.shared * source_bytes

    # The exact order prunes almost everything at once; the rounded damages then drop what differs by a rounding only.
    states = np.flatnonzero(_non_dominated(stored, read, table.order))
    try:
        damage = table.damage(states)
    except OverflowError:
        raise ProfileFormatError("damages", got="a sum beyond the largest float", wanted="damages in nats") from None
    if len(np.unique(damage)) < len(damage):
        kept = _non_dominated(stored[states], read[states], damage)
        states, damage = states[kept], damage[kept]
    order = np.lexsort((stored[states], damage, read[states]))
    states, damage = states[order], damage[order]
    arrays = (stored[states], read[states], damage)
    for array in arrays:
        array.flags.writeable = False
    return Frontier(profile, *arrays, _states=states, _table=table, _groups=tuple(groups))


def _groups(profile: Profile, sources: set[int], per_layer: bool) -> list[tuple[int, ...]]:
    """Cells that are chosen together, in cell order: single cells, or with ``per_layer`` the loops of one layer."""
    geometry = profile.fingerprint.geometry
    if not per_layer:
        return [(index,) for index in range(len(geometry.cells)) if index not in sources]
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for index, cell in enumerate(geometry.cells):
        if index not in sources:
            final = cell.section == "loop" and geometry.source_of(index) is None
            groups.setdefault((cell.section, cell.layer, final), []).append(index)
    return [tuple(cells) for cells in groups.values()]


def _known(damage: float | None) -> float:
    assert damage is not None, "the profile's validator admits no missing damage of an option that applies"
    return damage


def _non_dominated(stored: IntArray, read: IntArray, value: IntArray | FloatArray) -> npt.NDArray[np.bool_]:
    """Which points [N] no other point equals or beats in stored, read and value. ``(stored, read)`` are distinct."""
    stored_values, row = np.unique(stored, return_inverse=True)
    read_values, column = np.unique(read, return_inverse=True)
    worst = np.inf if value.dtype.kind == "f" else np.iinfo(np.int64).max
    best = np.full((len(stored_values) + 1, len(read_values) + 1), worst, dtype=value.dtype)
    best[row + 1, column + 1] = value
    np.minimum.accumulate(best, axis=0, out=best)
    np.minimum.accumulate(best, axis=1, out=best)
    return np.asarray((value < best[row, column + 1]) & (value < best[row + 1, column]))
