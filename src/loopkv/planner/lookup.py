"""A plan as users write it everywhere: the path of a plan file, or the name of a hand-made plan."""

from __future__ import annotations

from pathlib import Path

from loopkv.artifacts import Fingerprint, Plan
from loopkv.paths import exists
from loopkv.planner.named import is_plan_name, named_plan


def is_plan_file(text: str) -> bool:
    """Whether ``text`` is a path rather than a name: a known name wins over a file or folder that is called so."""
    if Path(text).suffix == ".json" or "/" in text:
        return True
    return not is_plan_name(text) and exists(text)


def load_or_name(text: str, fingerprint: Fingerprint) -> tuple[Plan, Path | None]:
    """The plan in a file, with its path, or the hand-made plan of that name for the model of ``fingerprint``.

    Raises:
        PlanFormatError, PlanVersionError: a broken or foreign file.
        UnsupportedError: an unknown name, or one that does not fit the geometry.
    """
    if is_plan_file(text):
        return Plan.load(text), Path(text)
    return named_plan(text, fingerprint), None
