"""The planner against brute force, at every budget, with damages made to provoke ties and rounding."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import Damage, geometry, profile, random_damage

from loopkv.artifacts import Budget, Profile
from loopkv.errors import BudgetInfeasibleError, ProfileFormatError, UnsupportedError
from loopkv.footprint import plan_footprint
from loopkv.geometry import Geometry
from loopkv.options import get_option
from loopkv.planner import Frontier, frontier, plan
from loopkv.policy import DEFAULT_POLICY, Policy

# (reads, damage, stored, ranks): the tie rule is the tuple's order.
Point = tuple[int, float, int, tuple[int, ...]]
RANK = {"bf16": 0, "int4": 1, "int2": 2, "share": 3}


def all_plans(data: Profile, *, share: bool = True, plan_source_cells: bool = False) -> list[Point]:
    """Every plan of the planner's space, by enumeration: bytes from the byte model, damages by fsum."""
    shape = data.fingerprint.geometry
    sources = set() if plan_source_cells else set(shape.source_cells)
    menus = []
    for index in range(len(shape.cells)):
        if index in sources:
            menus.append(("int4",))
            continue
        own = [o for o in ("bf16", "int4", "int2") if o == "bf16" or o in data.damage_nats]
        shares = share and "share" in data.damage_nats and shape.source_of(index) is not None
        menus.append((*own, *(("share",) if shares else ())))
    damages = {name: data.damage(name) for name in ("bf16", *data.damage_nats)}
    points = []
    for options in itertools.product(*menus):
        size = plan_footprint(shape, [get_option(o) for o in options], data.policy)
        total = math.fsum(damages[o][i] for i, o in enumerate(options))
        points.append((size.read_bytes, total, size.stored_bytes, tuple(RANK[o] for o in options)))
    return points


def least(points: list[Point], budget: Budget) -> Point | None:
    """The optimum of the tie rule by looking at every plan."""
    inf = math.inf
    eps = inf if budget.max_damage_nats is None else budget.max_damage_nats
    stored = inf if budget.max_stored_bytes is None else budget.max_stored_bytes
    read = inf if budget.max_read_bytes is None else budget.max_read_bytes
    fits = [p for p in points if p[1] <= eps and p[2] <= stored and p[0] <= read]
    if budget.goal == "damage":
        return min(fits, key=lambda p: (p[1], p[0], p[2], p[3]), default=None)
    return min(fits, default=None)


def chosen(table: Frontier, budget: Budget) -> Point | None:
    try:
        result = table.plan(budget)
    except BudgetInfeasibleError:
        return None
    assert result.predicted is not None and result.budget == budget
    size = result.footprint
    ranks = tuple(RANK[o] for o in result.options)
    return size.read_bytes, result.predicted.damage_nats, size.stored_bytes, ranks


def check_every_budget(data: Profile, *, seed: int = 0, budgets: int = 120, **flags: bool) -> None:
    """Frontier and optimum equal brute force: all limits alone, and a sample of all their combinations."""
    points = all_plans(data, **flags)
    table = frontier(data, **flags)
    # The frontier is exactly the set of non-dominated (stored, read, damage).
    unique = sorted({(read, damage, stored) for read, damage, stored, _ in points})
    best: list[tuple[int, float, int]] = []
    for read, damage, stored in unique:  # by read: an earlier point dominates if it is no worse in the other two
        if not any(d <= damage and s <= stored for _, d, s in best):
            best.append((read, damage, stored))
    got = list(zip(table.read_bytes.tolist(), table.damage_nats.tolist(), table.stored_bytes.tolist(), strict=True))
    assert got == best

    reads, damages, storeds = ([*sorted({p[i] for p in best})] for i in range(3))
    draw = random.Random(seed)
    cases: list[tuple[float | None, int | None, int | None]] = []
    cases += [(d, None, None) for d in damages] + [(None, s, None) for s in storeds] + [(None, None, r) for r in reads]
    cases = draw.sample(cases, min(len(cases), budgets))
    off = [math.nextafter(d, 0) for d in damages] + damages
    cases += [
        (draw.choice([None, *off]), draw.choice([None, *storeds, storeds[0] - 1]), draw.choice([None, *reads]))
        for _ in range(budgets)
    ]
    for eps, stored, read in cases:
        goals = ["read"] if eps is not None else []
        goals += ["memory"] if eps is not None and stored is not None else []
        goals += ["damage"] if stored is not None or read is not None else []
        for goal in goals:
            budget = Budget(goal=goal, max_damage_nats=eps, max_stored_bytes=stored, max_read_bytes=read)
            assert chosen(table, budget) == least(points, budget), budget


SMALL = geometry(3, 2)  # 4 planned cells of 4 options, 2 source cells: 256 plans
MEDIUM = geometry(4, 2)  # 6 planned cells: 4,096 plans


def from_list(values: list[float]) -> Damage:
    """Damages of (int4, int2, share) cell after cell, repeating the list."""
    names = ("int4", "int2", "share")
    return lambda option, cell: values[(3 * cell + names.index(option)) % len(values)]


ADVERSARIAL: dict[str, Callable[[], Damage]] = {
    "zeros": lambda: lambda option, cell: 0.0,
    "all equal, not a binary fraction": lambda: lambda option, cell: 0.1,
    "int2 no worse than int4": lambda: lambda option, cell: {"int4": 0.3, "int2": 0.3, "share": 0.1}[option],
    # 0.1 + 0.2 != 0.3 and (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3) in floats added one by one
    "sums that depend on the order": lambda: from_list([0.1, 0.2, 0.3, 0.6, 0.7, 0.1, 0.3]),
    # 1 + 1e-17 rounds to 1: plans that differ by it are equal, and the next key decides
    "below a rounding step": lambda: from_list([1.0, 1e-17, 2e-17, 1.0, 0.0, 3e-17, 1.0]),
    "half a rounding step": lambda: from_list([1.0, 2.0**-53, 2.0**-54, 1.0, 2.0**-52, 1 - 2.0**-53, 2.0**-53]),
    "tiny": lambda: from_list([1e-12, 3e-12, 2e-12, 1e-12, 0.0]),
    "tiny beside large": lambda: from_list([1e-12, 0.7, 3e-12, 0.2, 1e-9, 12.5, 0.1]),
    "three hundred decades": lambda: from_list([1e-300, 1e300, 1e-5, 3e-308, 5e-324, 1.0, 1e-150]),
    "better when coarser": lambda: (
        lambda option, cell: {"int4": 3e-3, "int2": 1e-3, "share": 2e-3}[option] * (cell + 1)
    ),
}


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_equals_brute_force_on_adversarial_damages(case: str) -> None:
    check_every_budget(profile(ADVERSARIAL[case](), SMALL))


@pytest.mark.parametrize("seed", range(6))
def test_equals_brute_force_on_model_like_damages(seed: int) -> None:
    check_every_budget(profile(random_damage(seed, MEDIUM), MEDIUM), seed=seed, budgets=25)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.one_of(
            st.floats(0, 1e-2),
            st.sampled_from([0.0, 0.1, 0.2, 0.3, 1e-12, 2.0**-60, 1.0, 1 + 2.0**-52]),
            st.integers(0, 4).map(float),
        ),
        min_size=1,
        max_size=18,
    ),
    seed=st.integers(0, 99),
)
def test_equals_brute_force_on_any_damages(values: list[float], seed: int) -> None:
    check_every_budget(profile(from_list(values), SMALL), seed=seed, budgets=8)


@pytest.mark.parametrize(
    "shape",
    [
        geometry(2, 3),
        geometry(2, 2, prelude_layers=1, coda_layers=1),
        geometry(3, 3, sliding_looped=(1,)),
        geometry(1, 4),
        geometry(2, 2, query_heads=16, kv_heads=4, head_dim=256),
    ],
    ids=["2 loops", "prelude and coda", "sliding layer", "1 loop", "grouped heads"],
)
def test_equals_brute_force_on_other_geometries(shape: Geometry) -> None:
    check_every_budget(profile(random_damage(3, shape), shape), budgets=30)


def test_without_sharing_source_cells_stay_int4_unless_planned() -> None:
    data = profile(random_damage(1, SMALL), SMALL)
    check_every_budget(data, share=False)
    check_every_budget(data, share=False, plan_source_cells=True, budgets=30)
    generous = Budget(goal="damage", max_stored_bytes=10**6)
    assert plan(data, generous, share=False).options == ("bf16",) * 4 + ("int4",) * 2
    assert plan(data, generous, share=False, plan_source_cells=True).options == ("bf16",) * 6
    with pytest.raises(UnsupportedError, match="sharing off"):
        plan(data, generous, plan_source_cells=True)


def test_profiles_of_fewer_options() -> None:
    check_every_budget(profile(random_damage(1, SMALL), SMALL, options=("int4", "int2")))
    check_every_budget(profile(random_damage(1, SMALL), SMALL, options=("int4", "share")))
    only_int2 = profile(random_damage(1, SMALL), SMALL, options=("int2",))
    with pytest.raises(ProfileFormatError, match="int4, which source cells take"):
        frontier(only_int2)
    check_every_budget(only_int2, share=False, plan_source_cells=True, budgets=20)


def test_other_page_and_group_change_the_bytes() -> None:
    check_every_budget(profile(random_damage(2, SMALL), SMALL, policy=Policy(page_tokens=16, group=64)), budgets=20)


def test_damages_beyond_the_largest_float_are_refused() -> None:
    with pytest.raises(ProfileFormatError, match="beyond the largest float"):
        frontier(profile(lambda option, cell: 1.7e308, SMALL))


# -- ties -----------------------------------------------------------------------------------------------------------


def test_equal_damage_takes_the_first_cells_by_table_order() -> None:
    """All damages equal d: any 3 of 6 cells at int2 read the same and cost the same; int4 comes first in the table."""
    data = profile(lambda option, cell: 1e-3 if option != "share" else 1.0, MEDIUM)
    # eps = 8 d lets all 6 planned cells be int2 (reads least); a read budget of 3 int4 + 3 int2 cells is not needed.
    everything = plan(data, Budget(goal="read", max_damage_nats=8e-3))
    assert everything.options == ("int2",) * 6 + ("int4",) * 2
    # int4 = int2 in damage, so the least damage at R bytes leaves bf16 where possible: none fits at R = all int2 + 192.
    budget = Budget(goal="damage", max_read_bytes=6 * 288 + 2 * 480 + 192)
    assert plan(data, budget).options == ("int2",) * 6 + ("int4",) * 2  # fewest reads among equal damage


def test_lexicographic_tie_among_equal_bytes_and_damage() -> None:
    """int4 and int2 damages differ by a constant in every cell: which cells take int2 is a pure tie."""
    data = profile(lambda option, cell: {"int4": 1e-3, "int2": 2e-3, "share": 1.0}[option], MEDIUM)
    two_coarse = 8e-3 + 2e-3  # 8 cells at int4 damage, two of them with 1e-3 more
    result = plan(data, Budget(goal="read", max_damage_nats=math.fsum([1e-3] * 6 + [2e-3] * 2)))
    assert result.options == ("int4",) * 4 + ("int2",) * 2 + ("int4",) * 2
    assert result.predicted is not None and result.predicted.damage_nats == pytest.approx(two_coarse)


def test_planning_twice_gives_the_same_file() -> None:
    data = profile(random_damage(5))
    budget = Budget(goal="memory", max_damage_nats=5e-3, max_stored_bytes=6144)
    assert plan(data, budget).model_dump_json() == plan(data, budget).model_dump_json()


# -- goals, budgets, predictions --------------------------------------------------------------------------------------


def test_goals_name_their_plans_and_keep_their_budgets() -> None:
    data = profile(random_damage(5), kl_share=3e-4)
    read = plan(data, Budget(goal="read", max_damage_nats=3e-3))
    memory = plan(data, Budget(goal="memory", max_damage_nats=3e-3, max_stored_bytes=5000))
    assert (read.name, memory.name) == ("loopkv-r", "loopkv-m")
    assert plan(data, read.budget, name="mine", tau=14.0).tau == 14.0
    assert memory.footprint.stored_bytes <= 5000
    assert read.footprint.read_bytes <= memory.footprint.read_bytes
    for result in (read, memory):
        assert result.predicted is not None
        assert result.predicted.damage_nats <= 3e-3
        assert result.predicted.profile_sha256 == data.sha256
        assert result.predicted.kl_share_nats == data.kl_share
        factor = 0.97 if result.shares else 0.73
        assert result.predicted.corrected_nats == result.predicted.damage_nats * factor
    assert memory.shares and not read.shares  # sharing saves storage, never reads


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        (Budget(goal="reads", max_damage_nats=1.0), "did you mean 'read'"),
        (Budget(goal="read"), "no max_damage"),
        (Budget(goal="memory", max_damage_nats=1.0), "no max_stored"),
        (Budget(goal="memory", max_stored_bytes=1), "no max_damage"),
        (Budget(goal="damage", max_damage_nats=1.0), "no max_stored or max_read"),
    ],
)
def test_goals_without_meaning_are_refused(budget: Budget, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        plan(profile(random_damage(5)), budget)


def smallest(error: BudgetInfeasibleError, name: str) -> float:
    flag = f"--{name.replace('_', '-')}"
    found = re.search(rf"{flag} >= (?:\S+KL_share \()?([\d.e+-]+)(?:nats|B)\b", str(error.wanted))
    assert found, error.wanted
    return float(found[1])


def test_infeasible_damage_names_the_smallest_feasible_one() -> None:
    data = profile(random_damage(5))
    table = frontier(data)
    floor = math.fsum(data.damage("int4")[i] for i in data.fingerprint.geometry.source_cells)
    with pytest.raises(BudgetInfeasibleError) as caught:
        table.plan(Budget(goal="read", max_damage_nats=math.nextafter(floor, 0)))
    assert smallest(caught.value, "max_damage") == floor  # all else bf16
    assert table.plan(Budget(goal="read", max_damage_nats=floor)).options[:12] == ("bf16",) * 12

    budget = Budget(goal="memory", max_damage_nats=3 * floor, max_stored_bytes=5000)
    with pytest.raises(BudgetInfeasibleError, match="with the other budgets kept") as caught:
        table.plan(budget)
    for name, field in (("max_damage", "max_damage_nats"), ("max_stored", "max_stored_bytes")):
        value = smallest(caught.value, name)
        value = int(value) if field == "max_stored_bytes" else value
        enough = budget.model_copy(update={field: value})
        less = value - 1 if field == "max_stored_bytes" else math.nextafter(value, 0)
        table.plan(enough)
        with pytest.raises(BudgetInfeasibleError):
            table.plan(budget.model_copy(update={field: less}))


def test_infeasible_bytes_name_the_floor() -> None:
    # Least stored: all 12 planned cells share, 4 sources at int4: 4 x 480. Least read: 12 int2 and 4 int4.
    with pytest.raises(BudgetInfeasibleError, match="--max-stored >= 1920B"):
        plan(profile(random_damage(5)), Budget(goal="damage", max_stored_bytes=1919))
    with pytest.raises(BudgetInfeasibleError, match=f"--max-read >= {12 * 288 + 4 * 480}B"):
        plan(profile(random_damage(5)), Budget(goal="damage", max_read_bytes=100))
    with pytest.raises(BudgetInfeasibleError, match="whatever the others are") as caught:
        plan(profile(random_damage(5)), Budget(goal="damage", max_read_bytes=100, max_stored_bytes=100))
    assert "--max-read" in str(caught.value) and "--max-stored" in str(caught.value)


def test_layer_only_is_the_optimum_of_one_option_per_layer() -> None:
    shape = geometry(3, 3)
    data = profile(random_damage(4, shape), shape)
    damages = {name: data.damage(name) for name in RANK}
    points = []
    for per_layer in itertools.product(RANK, repeat=3):
        options = [*per_layer, *per_layer, *["int4"] * 3]
        size = plan_footprint(shape, [get_option(o) for o in options], DEFAULT_POLICY)
        total = math.fsum(damages[o][i] for i, o in enumerate(options))
        points.append((size.read_bytes, total, size.stored_bytes, tuple(RANK[o] for o in options)))
    table = frontier(data, per_layer=True)
    cells = frontier(data)
    for eps in sorted({p[1] for p in points}):
        budget = Budget(goal="read", max_damage_nats=eps)
        assert chosen(table, budget) == least(points, budget)
        assert cells.plan(budget).footprint.read_bytes <= table.plan(budget).footprint.read_bytes


def test_frontier_arrays_are_read_only_and_sorted() -> None:
    table = frontier(profile(random_damage(5)))
    assert len(table) == len(table.stored_bytes) > 50
    assert (table.read_bytes[1:] >= table.read_bytes[:-1]).all()
    with pytest.raises(ValueError):
        table.damage_nats[0] = 0
