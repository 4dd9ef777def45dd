"""What ``inspect`` finds: stability of a profile, its heaviest cells, and the warnings a reader needs."""

from __future__ import annotations

import pytest
from profiles import geometry, profile, random_damage

from loopkv.artifacts import Budget, Fingerprint, Profile
from loopkv.artifacts.plan import Measured
from loopkv.inspection import half_split_correlation, heaviest_cells, plan_warnings, profile_warnings
from loopkv.planner import named_plan, plan

SHA = "0" * 64
KNOWN = Fingerprint(name="known", geometry=geometry(), weights_sha256=SHA)


def with_documents(rows: dict[str, list[tuple[float, ...]]]) -> Profile:
    """A 1-loop profile whose documents differ."""
    shape = geometry(1, len(next(iter(rows.values()))))
    count = len(next(iter(rows.values()))[0])
    base = profile(lambda option, cell: 0.0, shape, documents=count, options=tuple(rows), kl_share=None)
    return base.model_copy(update={"damage_nats": {name: tuple(table) for name, table in rows.items()}})


def measured(kl: float, tau: float | None = None) -> Measured:
    return Measured(kl_nats=kl, kl_ci95_nats=(kl, kl), top1_agreement=1.0, documents_sha256=SHA, tau=tau)


def test_half_split_by_hand() -> None:
    # Even documents rank the four cells 1 2 3 4, odd ones 2 1 3 4: Spearman = 1 - 6 * 2 / (4 * 15) = 0.8.
    data = with_documents({"int4": [(1.0, 2.0), (2.0, 1.0), (3.0, 3.0), (4.0, 4.0)]})
    assert half_split_correlation(data) == pytest.approx(0.8)
    # Means over the documents of a half: (1 + 3) / 2 against (9 + 9) / 2 and so on; the same order in both halves.
    data = with_documents({"int4": [(1.0, 9.0, 3.0, 9.0), (5.0, 10.0, 6.0, 20.0), (9.0, 30.0, 9.0, 30.0)]})
    assert half_split_correlation(data) == pytest.approx(1.0)


def test_half_split_where_it_has_no_meaning() -> None:
    assert half_split_correlation(profile(random_damage(1), documents=1)) is None
    assert half_split_correlation(profile(lambda option, cell: 0.0, documents=4)) is None
    assert half_split_correlation(with_documents({"int4": [(1.0, 2.0), (2.0, 1.0)]})) is None


def test_heaviest_cells() -> None:
    data = profile(lambda option, cell: (cell + 1) * {"int4": 1e-6, "int2": 1e-5, "share": 1e-4}[option])
    assert [(c.label, c.option) for c in heaviest_cells(data, 3)] == [
        ("L3.04", "share"),
        ("L3.03", "share"),
        ("L3.02", "share"),
    ]
    assert heaviest_cells(data, 3)[0].damage_nats == pytest.approx(12e-4)


def test_a_good_profile_has_no_warnings() -> None:
    data = profile(random_damage(1), documents=16)
    good = data.model_copy(update={"fingerprint": KNOWN})
    assert profile_warnings(good) == ()


def test_profile_warnings() -> None:
    few = profile(random_damage(1), documents=2, options=("int4", "int2"), kl_share=None)
    text = " | ".join(profile_warnings(few))
    for part in ("2 documents", "weights are not known", "KL_share was not measured", "no damages of share"):
        assert part in text
    noisy = with_documents({"int4": [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0)]})
    assert "rank the cells differently (correlation -1.00)" in " | ".join(profile_warnings(noisy))
    inverted = profile(lambda option, cell: {"int4": 2.0, "int2": 1.0, "share": 3.0}[option], documents=9)
    assert "16 cells cost more at int4 than at int2" in " | ".join(profile_warnings(inverted))


def test_plan_warnings() -> None:
    data = profile(random_damage(1)).model_copy(update={"fingerprint": KNOWN})
    made = plan(data, Budget(goal="read", max_damage_nats=5e-3))
    assert plan_warnings(made) == ()
    assert made.predicted is not None
    total = made.predicted.damage_nats
    assert plan_warnings(made.with_measured(measured(total))) == ()
    assert "exceeds the budget of 0.005" in " | ".join(plan_warnings(made.with_measured(measured(6e-3))))
    assert "measured / predicted is 0.10" in " | ".join(plan_warnings(made.with_measured(measured(total / 10))))
    assert "measured at tau infinite, the plan reads at tau 14" in " | ".join(
        plan_warnings(made.with_tau(14.0).with_measured(measured(total)))
    )
    assert "tau 14 is set" in " | ".join(plan_warnings(made.with_tau(14.0)))
    named = " | ".join(plan_warnings(named_plan("kivi4-share3", Fingerprint(name="x", geometry=geometry()))))
    for part in ("neither predicted nor measured", "weights are not known", "at most 256 tokens"):
        assert part in named
