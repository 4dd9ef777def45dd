"""Hand-made plans by name: their options, their bytes as the paper's tables give them, and what is refused."""

from __future__ import annotations

import pytest
from profiles import geometry, profile, random_damage

from loopkv.artifacts import Budget, Fingerprint, Plan
from loopkv.errors import LoopKVError, PlanFormatError, PlanMismatchError, UnsupportedError
from loopkv.geometry import Geometry
from loopkv.planner import assigned_plan, frontier, named_plan, per_layer_plans, per_loop_plans

KIB = 1024
TINY = Fingerprint(name="tiny", geometry=geometry())
OURO = Fingerprint(name="ouro", geometry=geometry(4, 24, query_heads=16, kv_heads=16, head_dim=128))


def by_loop(plan: Plan) -> list[set[str]]:
    shape = plan.fingerprint.geometry
    return [{plan.options[i] for i in shape.loop_cells(t)} for t in range(shape.loops)]


@pytest.mark.parametrize(
    ("name", "loops", "stored_kib", "read_kib"),
    [
        # Bytes: paper Tables 8 and 12, KiB per token of Ouro-1.4B (stored / read).
        ("bf16", "bf16 bf16 bf16 bf16", 768, 768),
        ("bf16-share", "bf16 bf16 share bf16", 576, 768),
        ("kivi4", "int4 int4 int4 int4", 240, 240),
        ("kivi2", "int2 int2 int2 int2", 144, 144),  # 4 x 24 x 1.5
        ("uniform:int2", "int2 int2 int2 int2", 144, 144),
        ("uniform:bf16", "bf16 bf16 bf16 bf16", 768, 768),
        ("kivi4-share3", "int4 int4 share int4", 180, 240),
        ("kivi4-share", "int4 int4 share int4", 180, 240),
        ("kivi4-share2,3", "int4 share share int4", 120, 240),
        ("kivi2-share3", "int2 int2 share int2", 108, 144),
        ("int4-int2-share", "int4 int2 share int4", 156, 216),
        ("int2-share", "int2 int2 share int4", 132, 192),
        ("int2-loops", "int2 int2 int2 int4", 168, 168),
        ("per-loop:int4,int2,share", "int4 int2 share int4", 156, 216),
        ("per-loop:int4, int2, share, int2", "int4 int2 share int2", 60 + 36 + 36, 60 + 36 + 36 + 36),
    ],
)
def test_options_and_bytes(name: str, loops: str, stored_kib: int, read_kib: int) -> None:
    plan = named_plan(name, OURO)
    assert by_loop(plan) == [{option} for option in loops.split()]
    assert (plan.footprint.stored_bytes, plan.footprint.read_bytes) == (stored_kib * KIB, read_kib * KIB)
    assert plan.name == name and plan.predicted is None and plan.budget is None


def test_per_layer_leaves_the_final_loop_at_int4() -> None:
    plan = named_plan("per-layer:int4,int2,share,bf16", TINY)
    assert plan.options == ("int4", "int2", "share", "bf16") * 3 + ("int4",) * 4


def test_other_loop_counts() -> None:
    deep = Fingerprint(name="deep", geometry=geometry(32, 2, prelude_layers=2, coda_layers=2))
    last = named_plan("kivi4-share", deep)
    assert [t + 1 for t, options in enumerate(by_loop(last)) if options == {"share"}] == [31]
    assert by_loop(named_plan("kivi4-share3", deep))[2] == {"share"}
    split = by_loop(named_plan("int4-int2-share", deep))
    assert split == [{"int4"}] * 15 + [{"int2"}] * 15 + [{"share"}, {"int4"}]
    # Prelude and coda follow the final loop.
    assert named_plan("int2-loops", deep).options[:2] == ("int4", "int4")
    assert named_plan("per-loop:" + ",".join(["int4"] * 31 + ["int2"]), deep).options[-2:] == ("int2", "int2")
    two = Fingerprint(name="two", geometry=geometry(2, 3))
    assert by_loop(named_plan("kivi4-share", two)) == [{"share"}, {"int4"}]
    assert by_loop(named_plan("per-loop:share", two)) == [{"share"}, {"int4"}]


def test_sliding_layers_have_no_cell() -> None:
    shape = Fingerprint(name="s", geometry=geometry(2, 4, sliding_looped=(1, 2)))
    assert named_plan("per-layer:int2,share", shape).options == ("int2", "share", "int4", "int4")


def test_random_plans_follow_from_their_seed() -> None:
    assert named_plan("random:7", OURO).options == named_plan("random:7", OURO).options
    own = [named_plan(f"random:{seed}", OURO) for seed in range(20)]
    shared = [named_plan(f"random-share:{seed}", OURO) for seed in range(20)]
    assert len({p.options for p in own + shared}) == 40
    for plan in own + shared:
        assert by_loop(plan)[3] == {"int4"}
        assert "share" not in by_loop(plan)[0]
    assert not any(p.shares for p in own) and all(p.shares for p in shared)
    coarse = sorted(p.options.count("int2") for p in own)
    assert coarse[0] < 10 and coarse[-1] > 60  # the share of int2 varies too
    # Pinned: the same seed must name the same plan on every machine and Python.
    letters = {"int4": "4", "int2": "2", "share": "s"}
    assert "".join(letters[o] for o in named_plan("random:1", TINY).options) == "4442444442444444"
    assert "".join(letters[o] for o in named_plan("random-share:1", TINY).options) == "222222242s224444"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("kivi3", "did you mean 'kivi"),
        ("kivi4-shar3", "did you mean 'kivi4-share3'"),
        ("perloop:int4,int4,int4", "did you mean 'per-loop"),
        ("", "unknown plan name"),
        ("x" * 10_000, "unknown plan name"),
        ("kivi4-share4", "loop 4 is the final one"),
        ("kivi4-share0", "wanted 1 to 3"),
        ("kivi4-share9999", "wanted 1 to 3"),
        ("uniform:share", "final loop cannot share"),
        ("uniform:int3", "did you mean 'int"),
        ("uniform:int4,int2", "wanted bf16, int4 or int2"),
        ("uniform:", "option ''"),
        ("per-loop:int4,int4,int4,share", "share for the final loop"),
        ("per-loop:int4", "got 1 options, wanted 3"),
        ("per-loop:int4,int4,shared", "did you mean 'share'"),
        ("per-layer:int4,int2", "got 2 options, wanted 4 layers"),
        ("random:x", "whole number as the seed"),
        ("random:-1", "whole number as the seed"),
        ("layer-only", "no profile"),
    ],
)
def test_wrong_names_are_refused_with_a_reason(name: str, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        named_plan(name, TINY)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", ["kivi4-share", "int2-share", "int2-loops", "int4-int2-share", "per-layer:int4,int4"])
def test_a_model_of_one_loop_has_nothing_to_share(name: str) -> None:
    with pytest.raises(UnsupportedError, match="at least"):
        named_plan(name, Fingerprint(name="plain", geometry=geometry(1, 2)))


def test_a_head_size_that_cannot_be_coded_is_one_of_our_errors() -> None:
    odd = Fingerprint(
        name="odd", geometry=Geometry(architecture="ouro", loops=2, layers=2, query_heads=2, kv_heads=2, head_dim=80)
    )
    with pytest.raises(UnsupportedError, match="head size"):
        named_plan("kivi4", odd)
    assert named_plan("bf16", odd).footprint.stored_bytes == 4 * 2 * 2 * 80 * 2


def test_assigned_options_are_checked() -> None:
    with pytest.raises(PlanFormatError, match="16 cells"):
        assigned_plan("x", TINY, ["int4"] * 15)
    with pytest.raises(PlanFormatError, match="only looped cells before the final loop"):
        assigned_plan("x", TINY, ["int4"] * 15 + ["share"])
    with pytest.raises(UnsupportedError, match="did you mean 'int4'"):
        assigned_plan("x", TINY, ["in4"] * 16)


# -- with a profile ----------------------------------------------------------------------------------------------------


def test_prediction_sums_the_cells() -> None:
    data = profile(lambda option, cell: {"int4": 1e-6, "int2": 1e-4, "share": 1e-3}[option])
    for name, total, factor in (
        ("bf16", 0.0, 0.73),
        ("kivi4", 16e-6, 0.73),
        ("kivi2", 16e-4, 0.73),
        ("kivi4-share3", 12e-6 + 4e-3, 0.97),
        ("int2-loops", 12e-4 + 4e-6, 0.73),
    ):
        predicted = named_plan(name, data.fingerprint, profile=data).predicted
        assert predicted is not None
        assert predicted.damage_nats == pytest.approx(total, rel=1e-12)
        assert predicted.corrected_nats == predicted.damage_nats * factor


@pytest.mark.parametrize("name", ["bf16-share", "kivi2-share", "per-loop:int4,int4,share,bf16"])
def test_sharing_another_source_than_int4_has_no_prediction(name: str) -> None:
    """The profile measures sharing with the source at int4; anything else would be a guess."""
    data = profile(random_damage(1))
    assert named_plan(name, data.fingerprint, profile=data).predicted is None


def test_profile_of_another_model_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="layers"):
        named_plan("kivi4", TINY, profile=profile(random_damage(1, geometry(4, 5)), geometry(4, 5)))


def test_layer_only_needs_and_uses_a_budget() -> None:
    data = profile(random_damage(1))
    with pytest.raises(UnsupportedError, match="no budget"):
        named_plan("layer-only", TINY, profile=data)
    with pytest.raises(UnsupportedError, match="got a budget"):
        named_plan("kivi4", TINY, profile=data, budget=Budget(goal="read", max_damage_nats=1.0))
    budget = Budget(goal="damage", max_stored_bytes=5400)
    plan = named_plan("layer-only", TINY, profile=data, budget=budget)
    assert plan.name == "layer-only" and plan.budget == budget
    assert plan.options[:4] == plan.options[4:8] == plan.options[8:12]


def test_enumerations_are_whole_and_never_beat_the_planner() -> None:
    data = profile(random_damage(1))
    loops = list(per_loop_plans(TINY, profile=data))
    layers = list(per_layer_plans(TINY, profile=data))
    assert (len(loops), len(layers)) == (27, 81)
    assert len({p.options for p in loops + layers}) == 27 + 81 - 3  # three uniform plans are in both
    table = frontier(data)
    for plan in loops + layers:
        size = plan.footprint
        budget = Budget(goal="damage", max_stored_bytes=size.stored_bytes, max_read_bytes=size.read_bytes)
        best = table.plan(budget)
        assert best.predicted is not None and plan.predicted is not None
        assert best.predicted.damage_nats <= plan.predicted.damage_nats


def test_enumerations_of_many_layers_are_refused() -> None:
    with pytest.raises(LoopKVError, match="plans"):
        next(per_layer_plans(OURO))
