"""Plans with the paper's option counts for Ouro-1.4B, to compare speeds without its weights or a profile.

How fast a plan decodes depends on how many cells take which option in which loop, hardly on which layer they are in.
The paper's plans have (section 4, 96 cells): LoopKV-M 26 shared, 20 int2 and 50 int4 cells, 155 KiB stored and 220 KiB
read per token; LoopKV-R 25 int2 among the 72 cells before the final loop, 215 KiB. The layers named here are a guess at
the published pattern (loop 3 shares most, outer layers are coded coarsely): these plans have no quality to speak of.

=================  ====================================================================================================
paper-loopkv-m     loop 1: int2 in 5 layers; loop 2: int2 in 11, share in 6; loop 3: int2 in 4, share in 20; else int4
paper-loopkv-r     int2 in 8, 8 and 9 outer layers of loops 1 to 3; else int4
=================  ====================================================================================================

A model of other than 24 layers gets the pattern stretched over its own. They are not among the names of ``named_plan``:
only what predicts or measures speed takes them.
"""

from __future__ import annotations

from loopkv.artifacts import Fingerprint, Plan
from loopkv.errors import UnsupportedError
from loopkv.planner.named import PAPER_PLANS, assigned_plan

LAYERS, LOOPS = 24, 4


def paper_plan(name: str, identity: Fingerprint, tau: float | None = None) -> Plan:
    """The plan called ``name`` for a model of four loops.

    Raises:
        UnsupportedError: an unknown name, or another number of loops (or layers outside the loop).
    """
    if name not in PAPER_PLANS:
        raise UnsupportedError("paper plan", got=repr(name)[:40], wanted=" or ".join(PAPER_PLANS))
    geometry = identity.geometry
    if geometry.loops != LOOPS or len(geometry.cells) != LOOPS * geometry.layers:
        raise UnsupportedError(
            f"plan {name!r}", got=geometry.architecture, wanted="four loops and no layer outside them"
        )
    pattern = _memory() if name == "paper-loopkv-m" else _read()
    options = [
        pattern[loop][layer * LAYERS // geometry.layers] for loop in range(LOOPS) for layer in range(geometry.layers)
    ]
    return assigned_plan(name, identity, options, tau=tau)


def _memory() -> list[list[str]]:
    first = ["int2" if layer in (0, 1, 21, 22, 23) else "int4" for layer in range(LAYERS)]
    second = ["int2" if layer < 6 or 18 <= layer <= 22 else "int4" for layer in range(LAYERS)]
    for layer in (8, 10, 12, 14, 16, 17):
        second[layer] = "share"
    third = ["share" if 2 <= layer < 22 else "int2" for layer in range(LAYERS)]
    return [first, second, third, ["int4"] * LAYERS]


def _read() -> list[list[str]]:
    def outer(count: int) -> list[str]:
        return [
            "int2" if layer < count // 2 or layer >= LAYERS - (count - count // 2) else "int4"
            for layer in range(LAYERS)
        ]

    return [outer(8), outer(8), outer(9), ["int4"] * LAYERS]
