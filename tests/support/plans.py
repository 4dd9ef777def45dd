"""Plans for tests: options by name on any model."""

from __future__ import annotations

from collections.abc import Sequence

from loopkv.artifacts import Fingerprint, Plan
from loopkv.geometry import Geometry
from loopkv.policy import DEFAULT_POLICY, Policy


def make_plan(
    geometry: Geometry, options: str | Sequence[str], *, tau: float | None = None, policy: Policy = DEFAULT_POLICY
) -> Plan:
    """A plan of one option for all cells, or of one per cell."""
    names = (options,) * len(geometry.cells) if isinstance(options, str) else tuple(options)
    fingerprint = Fingerprint(name="test", geometry=geometry)
    return Plan(name="test", fingerprint=fingerprint, policy=policy, options=names, tau=tau)
