"""``inspect_file(path) -> Inspection``: what a profile or plan says, and what its reader should be warned about."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loopkv.artifacts import Plan, Profile
from loopkv.artifacts.storage import artifact_kind, read_json
from loopkv.errors import LoopKVError
from loopkv.options import OPTIONS
from loopkv.planner.named import is_plan_name

FEW_DOCUMENTS = 8  # the paper's intervals with 8 documents are wide and overlap; it profiles with 16
LOW_RANK_CORRELATION = 0.9  # the paper's halves rank the cells with 0.985
PAPER_RATIO = (0.65, 1.37)  # measured KL / predicted sum over the paper's 40 random plans (appendix D)


class HeavyCell(NamedTuple):
    """One of the largest damages of a profile."""

    label: str
    option: str
    damage_nats: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """A file that was read and checked, with warnings for its reader."""

    path: Path
    artifact: Plan | Profile
    warnings: tuple[str, ...]


def inspect_file(path: Path | str) -> Inspection:
    """Read the plan or profile in ``path``.

    Raises:
        ProfileFormatError, PlanFormatError, PlanVersionError: a broken one.
        LoopKVError: unreadable, or neither of the two.
    """
    path = Path(path)
    if not path.exists() and is_plan_name(str(path)):
        raise LoopKVError(
            f"{path}",
            got="the name of a hand-made plan",
            wanted="a file",
            hint=f"`loopkv plan --named {path} --model FOLDER` shows it",
        )
    data = read_json(path, LoopKVError, "plan or profile")
    kind = artifact_kind(data)
    if kind == "profile":
        profile = Profile.load(path)
        return Inspection(path, profile, profile_warnings(profile))
    if kind == "plan":
        plan = Plan.load(path)
        return Inspection(path, plan, plan_warnings(plan))
    raise LoopKVError(
        f"{path}",
        got=f"a JSON object with {', '.join(sorted(data)[:5]) or 'no keys'}"[:120],
        wanted="a plan (options) or a profile (damage_nats)",
    )


def half_split_correlation(profile: Profile) -> float | None:
    """Spearman correlation of the cells' damages between two halves of the documents (even and odd positions).

    Mean over the options, each ranking its own cells; None for fewer than two documents, or where no option's damages
    differ between cells.
    """
    if len(profile.documents) < 2:
        return None
    from scipy.stats import rankdata  # half a second to import

    values = []
    for rows in profile.damage_nats.values():
        table = np.array([row for row in rows if row is not None], dtype=np.float64)
        if len(table) < 3:
            continue
        ranks = [rankdata(table[:, start::2].mean(axis=1)) for start in (0, 1)]
        if all(np.ptp(rank) > 0 for rank in ranks):
            values.append(float(np.corrcoef(*ranks)[0, 1]))
    return math.fsum(values) / len(values) if values else None


def heaviest_cells(profile: Profile, count: int = 5) -> tuple[HeavyCell, ...]:
    """The largest mean damages, over all cells and options but bf16."""
    cells = profile.fingerprint.geometry.cells
    found = [
        HeavyCell(cells[index].label, option, damage)
        for option in profile.damage_nats
        for index, damage in enumerate(profile.damage(option))
        if damage is not None
    ]
    return tuple(sorted(found, key=lambda cell: -cell.damage_nats)[:count])


def profile_warnings(profile: Profile) -> tuple[str, ...]:
    """What limits the use of a profile."""
    warnings = []
    documents = len(profile.documents)
    if documents < FEW_DOCUMENTS:
        warnings.append(f"{documents} document{'s' * (documents != 1)}: the damages are noisy; 16 or more are better")
    correlation = half_split_correlation(profile)
    if correlation is not None and correlation < LOW_RANK_CORRELATION:
        warnings.append(
            f"two halves of the documents rank the cells differently (correlation {correlation:.2f}): profile with more"
        )
    if profile.fingerprint.weights_sha256 is None:
        warnings.append("the weights are not known: plans made from it are accepted for any checkpoint of this shape")
    if profile.kl_share is None and profile.fingerprint.geometry.loops > 1:
        warnings.append("KL_share was not measured: budgets cannot be written in share")
    missing = [name for name in OPTIONS if name != "bf16" and name not in profile.damage_nats]
    if missing and not (missing == ["share"] and profile.fingerprint.geometry.loops == 1):
        warnings.append(f"no damages of {', '.join(missing)}: plans cannot use what was not measured")
    if {"int4", "int2"} <= profile.damage_nats.keys():
        finer = zip(profile.damage("int4"), profile.damage("int2"), strict=True)
        inverted = sum(a is not None and b is not None and a > b for a, b in finer)
        if inverted:
            warnings.append(f"{inverted} cell{'s' * (inverted != 1)} cost more at int4 than at int2: within the noise")
    return tuple(warnings)


def plan_warnings(plan: Plan) -> tuple[str, ...]:
    """What limits the use of a plan."""
    warnings = []
    limit = None if plan.budget is None else plan.budget.max_damage_nats
    measured, predicted = plan.measured, plan.predicted
    if measured is not None:
        if limit is not None and measured.kl_nats > limit:
            warnings.append(f"the measured KL {measured.kl_nats:.3g} exceeds the budget of {limit:.3g} nats")
        if measured.tau != plan.tau:
            warnings.append(f"the KL was measured at tau {_tau(measured.tau)}, the plan reads at tau {_tau(plan.tau)}")
        if predicted is not None and predicted.damage_nats > 0:
            ratio = measured.kl_nats / predicted.damage_nats
            if not PAPER_RATIO[0] <= ratio <= PAPER_RATIO[1]:
                warnings.append(
                    f"measured / predicted is {ratio:.2f}, outside {PAPER_RATIO[0]} to {PAPER_RATIO[1]}, "
                    "the range of the paper's random plans"
                )
    elif predicted is None:
        warnings.append("its damage is neither predicted nor measured: `loopkv measure` tells")
    if predicted is not None and limit is not None and predicted.damage_nats > limit:
        warnings.append(f"the predicted damage {predicted.damage_nats:.3g} exceeds the budget of {limit:.3g} nats")
    if plan.tau is not None:
        warnings.append(f"tau {plan.tau:g} is set: damages are predicted for reads of both value planes")
    if plan.fingerprint.weights_sha256 is None:
        warnings.append("the weights are not known: the plan is accepted for any checkpoint of this shape")
    if plan.shares:
        warnings.append(
            f"some cells share: exact prefill takes at most {plan.policy.max_exact_chunk_tokens} tokens of a request "
            "per step"
        )
    return tuple(warnings)


def _tau(tau: float | None) -> str:
    return "infinite" if tau is None else f"{tau:g}"
