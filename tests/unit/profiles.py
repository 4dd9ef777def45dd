"""Synthetic profiles for planner tests: damages of any shape without a model."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from loopkv.artifacts import DocumentInfo, Fingerprint, Profile
from loopkv.geometry import Geometry
from loopkv.policy import DEFAULT_POLICY, Policy

Damage = Callable[[str, int], float]
"""``damage(option, cell)`` in nats."""


def geometry(loops: int = 4, layers: int = 4, **fields: object) -> Geometry:
    """looped-tiny's heads (6 x 64) on any grid: bf16, int4, int2 cost 1,536, 480, 288 bytes per token and cell."""
    data = {"architecture": "ouro", "query_heads": 6, "kv_heads": 6, "head_dim": 64, **fields}
    return Geometry.model_validate({"loops": loops, "layers": layers, **data})


def profile(
    damage: Damage,
    shape: Geometry | None = None,
    *,
    documents: int = 1,
    options: tuple[str, ...] = ("int4", "int2", "share"),
    kl_share: float | None = 3e-4,
    policy: Policy = DEFAULT_POLICY,
) -> Profile:
    """A profile whose every document has the same damage, so that the mean over documents is that damage."""
    shape = shape or geometry()
    tables: dict[str, tuple[tuple[float, ...] | None, ...]] = {}
    changed: dict[str, tuple[tuple[float, ...] | None, ...]] = {}
    for option in options:
        applies = [option != "share" or shape.source_of(i) is not None for i in range(len(shape.cells))]
        tables[option] = tuple((damage(option, i),) * documents if ok else None for i, ok in enumerate(applies))
        changed[option] = tuple((0.0,) * documents if ok else None for ok in applies)
    return Profile(
        fingerprint=Fingerprint(name="synthetic", geometry=shape),
        policy=policy,
        documents=tuple(
            DocumentInfo(
                source=f"synthetic {i}",
                sha256=hashlib.sha256(str(i).encode()).hexdigest(),
                tokens=1536,
                scored_positions=1217,
            )
            for i in range(documents)
        ),
        damage_nats=tables,
        changed=changed,
        kl_share_nats=None if kl_share is None else (kl_share,) * documents,
    )


def random_damage(seed: int, shape: Geometry | None = None) -> Damage:
    """Damages like a model's: int4 far below int2, sharing ruinous in the first loop and cheap in the last but one."""
    shape = shape or geometry()
    numbers = random.Random(seed)
    table: dict[tuple[str, int], float] = {}
    for index, cell in enumerate(shape.cells):
        scale = 10 ** numbers.uniform(-6, -3) * 0.3**cell.loop
        table["int4", index] = scale * numbers.uniform(0.01, 0.1)
        table["int2", index] = scale
        table["share", index] = 10 ** numbers.uniform(-5, -2) * 0.1**cell.loop
    return lambda option, cell: table[option, cell]
