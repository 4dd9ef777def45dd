"""Predicted damage of a plan: the sum of its cells' damages, beside the paper's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loopkv.artifacts import Predicted, Profile
from loopkv.errors import ProfileFormatError
from loopkv.geometry import Geometry

# Fitted in the paper (appendix D) on 14 plans and frozen before 40 random plans were scored: a mean absolute error of
# 15%, largest miss a factor of 1.41, on Ouro-1.4B.
CORRECTION_WITHOUT_SHARES = 0.73
CORRECTION_WITH_SHARES = 0.97
FITTED_GEOMETRY = Geometry(architecture="ouro", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)


def correction_applies(geometry: Geometry) -> bool:
    """Whether the paper's factors were fitted on a model of this shape: Ouro-1.4B (or a sibling checkpoint) alone."""
    return geometry == FITTED_GEOMETRY


def correction(options: Sequence[str]) -> float:
    """The paper's factor for a plan with these options."""
    return CORRECTION_WITH_SHARES if "share" in options else CORRECTION_WITHOUT_SHARES


def predict(profile: Profile, options: Sequence[str]) -> Predicted | None:
    """Damage that ``profile`` predicts for one option per cell (``math.fsum`` over all cells, source cells included).

    None where the profile has not measured what the plan does: sharing is profiled with the source's history at int4,
    so a shared cell whose source holds anything else has no known damage.

    Raises:
        ProfileFormatError: an option that the profile does not list.
    """
    geometry = profile.fingerprint.geometry
    missing = sorted({name for name in options if name != "bf16" and name not in profile.damage_nats})
    if missing:
        raise ProfileFormatError(
            f"profile of {profile.fingerprint.name}",
            got=f"no damage of {', '.join(missing)}",
            wanted="the damage of every option that the plan uses",
            hint="profile again with these options",
        )
    for index, name in enumerate(options):
        source = geometry.source_of(index)
        if name == "share" and source is not None and options[source] != "int4":
            return None
    tables = {name: profile.damage(name) for name in set(options)}
    damages = [tables[name][index] for index, name in enumerate(options)]
    try:
        total = math.fsum(damage for damage in damages if damage is not None)
    except OverflowError:
        raise ProfileFormatError("damages", got="a sum beyond the largest float", wanted="damages in nats") from None
    return Predicted(
        damage_nats=total,
        corrected_nats=total * correction(options),
        kl_share_nats=profile.kl_share,
        profile_sha256=profile.sha256,
    )
