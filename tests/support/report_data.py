"""Synthetic profiles, plans and measurements with the shape of real ones (no model behind them)."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from loopkv.artifacts import DocumentInfo, Fingerprint, Measured, Plan, Predicted, Profile
from loopkv.geometry import Geometry
from loopkv.policy import DEFAULT_POLICY
from loopkv.report import DemoReport, FrontierPoint, RequestBytes, Sample, TaskScore

TINY = Geometry(architecture="ouro", loops=4, layers=4, query_heads=6, kv_heads=6, head_dim=64)
OURO = Geometry(architecture="ouro", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
DORY = Geometry(
    architecture="dory",
    loops=4,
    layers=20,
    query_heads=16,
    kv_heads=4,
    head_dim=256,
    prelude_layers=8,
    coda_layers=8,
    sliding_looped=tuple(i for i in range(20) if i % 4),
    sliding_prelude=(0, 1, 2, 4, 5, 6),
    sliding_coda=(0, 1, 2, 4, 5, 6),
)
DOCUMENTS = 4


def make_profile(geometry: Geometry, seed: int = 0) -> Profile:
    """A profile in which earlier loops and middle layers suffer most, as on Ouro."""
    rng = np.random.default_rng(seed)
    tables: dict[str, list[tuple[float, ...] | None]] = {"int4": [], "int2": [], "share": []}
    for index, cell in enumerate(geometry.cells):
        weight = math.exp(-1.6 * cell.loop) * math.exp(-(((cell.layer - geometry.layers / 2.4) / geometry.layers) ** 2))
        for name, scale in (("int4", 2e-6), ("int2", 1e-4), ("share", 8e-3)):
            if name == "share" and geometry.source_of(index) is None:
                tables[name].append(None)
                continue
            damage = scale * weight * (math.exp(-1.8 * cell.loop) if name == "share" else 1.0)
            tables[name].append(tuple(float(damage * math.exp(rng.normal(0, 0.5))) for _ in range(DOCUMENTS)))
    documents = tuple(
        DocumentInfo(
            source=f"held-out {i}",
            sha256=hashlib.sha256(str(i).encode()).hexdigest(),
            tokens=1536,
            scored_positions=1217,
        )
        for i in range(DOCUMENTS)
    )
    frozen = {name: tuple(rows) for name, rows in tables.items()}
    return Profile(
        fingerprint=Fingerprint(name="synthetic", geometry=geometry, weights_sha256="ab" * 32),
        policy=DEFAULT_POLICY,
        documents=documents,
        damage_nats=frozen,
        changed={
            name: tuple(None if r is None else (0.01,) * DOCUMENTS for r in rows) for name, rows in frozen.items()
        },
        kl_share_nats=(3e-4,) * DOCUMENTS,
    )


def make_plan(profile: Profile, name: str, options: list[str], ratio: float | None, tau: float | None = None) -> Plan:
    """A plan with its prediction and, where ``ratio`` is given, a measurement of ``ratio`` times it."""
    geometry = profile.fingerprint.geometry
    damages = {option: profile.damage(option) for option in set(options)}
    total = math.fsum(damages[option][i] or 0.0 for i, option in enumerate(options))
    shares = "share" in options
    measured = None
    if ratio is not None:
        kl = total * ratio
        measured = Measured(
            kl_nats=kl,
            kl_ci95_nats=(0.8 * kl, 1.25 * kl),
            top1_agreement=1.0 if kl == 0 else max(0.0, 1.0 - 3.0 * kl),
            documents_sha256="cd" * 32,
            tau=tau,
        )
    return Plan(
        name=name,
        fingerprint=Fingerprint(name="synthetic", geometry=geometry, weights_sha256="ab" * 32),
        policy=DEFAULT_POLICY,
        options=tuple(options),
        tau=tau,
        predicted=Predicted(
            damage_nats=total,
            corrected_nats=total * (0.97 if shares else 0.73),
            kl_share_nats=profile.kl_share,
            profile_sha256=profile.sha256,
        ),
        measured=measured,
    )


def per_loop(geometry: Geometry, loops: list[str], outside: str = "bf16") -> list[str]:
    """One option per loop; prelude and coda cells take ``outside``."""
    return [loops[cell.loop] if cell.section == "loop" else outside for cell in geometry.cells]


def make_report(geometry: Geometry = TINY, seed: int = 0) -> DemoReport:
    """A whole demo report of synthetic numbers."""
    profile = make_profile(geometry, seed)
    rng = np.random.default_rng(seed + 1)
    sharable = [geometry.source_of(i) is not None for i in range(len(geometry.cells))]

    def drawn() -> list[str]:
        names = ["int4", "int2", "share"]
        return [str(rng.choice(names if s else names[:1], p=[0.5, 0.3, 0.2] if s else None)) for s in sharable]

    plans = (
        make_plan(profile, "bf16", ["bf16"] * len(geometry.cells), 1.0),
        make_plan(profile, "kivi4", ["int4"] * len(geometry.cells), 0.95),
        make_plan(profile, "LoopKV-R", per_loop(geometry, ["int4", "int4", "int2", "int4"], "int4"), 0.92, tau=14.0),
        make_plan(profile, "LoopKV-M", per_loop(geometry, ["int4", "int2", "share", "int4"], "int4"), 1.05, tau=14.0),
        make_plan(profile, "kivi2", ["int2"] * len(geometry.cells), 1.1),
        make_plan(profile, "unmeasured", per_loop(geometry, ["int4", "share", "share", "int4"], "int4"), None),
    )
    others = tuple(make_plan(profile, f"random {i}", drawn(), float(rng.uniform(0.88, 1.2))) for i in range(24))
    frontier = []
    for _ in range(400):
        plan = make_plan(profile, "point", drawn(), None)
        assert plan.predicted is not None
        frontier.append(
            FrontierPoint(plan.footprint.stored_bytes, plan.footprint.read_bytes, plan.predicted.damage_nats)
        )
    scores = []
    for task, base in (("needle", 0.99), ("copy", 0.98), ("variable tracking", 0.5), ("induction", 0.9)):
        for arm, loss in (("bf16", 0.0), ("kivi4", 0.0), ("LoopKV-M", 0.01), ("kivi2", 0.08)):
            scores.append(
                TaskScore(
                    arm,
                    task,
                    100,
                    base - loss,
                    (base - loss - 0.06, min(1.0, base - loss + 0.05)),
                    None if arm == "bf16" else -loss,
                    None if arm == "bf16" else (-loss - 0.03, -loss + 0.02),
                )
            )
    return DemoReport(
        profile=profile,
        plans=plans,
        frontier=tuple(frontier),
        random_plans=others,
        task_scores=tuple(scores),
        samples=(
            Sample(
                "A needle",
                "The number of the <b>harbour</b> is 48213. " * 40 + "\nWhat is the number of the harbour?",
                (("bf16", "48213"), ("LoopKV-M", "48213")),
                expected="48213",
            ),
            Sample(
                "Prose",
                "It was the best of times,",
                (
                    ("bf16", " it was the worst of times. " * 12),
                    ("LoopKV-M", " it was the worst of times; & <script>alert(1)</script> " * 8),
                ),
            ),
        ),
        request_bytes=tuple(
            RequestBytes(arm, tokens, int(tokens * per_token + 3e6))
            for arm, per_token in (("bf16", 24576), ("kivi4", 7680), ("LoopKV-M", 4992))
            for tokens in (1024, 2048, 4096, 8192)
        ),
        timings={"profile_s": 143.2, "plan_s": 0.31, "measure_s": 55.0, "tasks_s": 120.0},
        versions={"python": "3.11.7", "torch": "2.11.0", "loopkv": "0.1.0"},
        facts=(("Machine", "2 cores, no GPU"),),
    )
