"""Hand-made plans, built by name from a geometry alone; with a profile they also get a prediction.

===========================  ========================================================================================
name                         plan for T loops (prelude and coda cells follow the final loop; ``share`` reads that loop)
===========================  ========================================================================================
bf16, kivi4, kivi2           every cell exact, at int4, at int2
kivi4-share                  int4, and the last loop but one (T - 1) shares; likewise bf16-share, kivi2-share
kivi4-share3                 int4, and loop 3 shares (any loop before the final one; ``kivi4-share2,3`` for several)
int4-int2-share              first half of loops 1 to T - 2 int4, the rest int2, loop T - 1 shares, final loop int4
int2-share                   loops 1 to T - 2 int2, loop T - 1 shares, final loop int4
int2-loops                   loops 1 to T - 1 int2, final loop int4
uniform:OPTION               every cell alike (bf16, int4 or int2)
per-loop:O1,...              an option per loop: T - 1 entries leave the final loop at int4, T entries name it too
per-layer:O1,...,OL          an option per layer for all loops before the final one, which stays at int4
random:SEED                  int2 or int4 per cell; the share of int2 is drawn too; final loop int4
random-share:SEED            the same, and cells of loops 2 to T - 1 may share
layer-only                   the exact knapsack with one option per layer: needs a profile and a budget
===========================  ========================================================================================

``bf16-share`` is the policy whose KL is the unit KL_share; ``kivi4-share3``, ``int4-int2-share``, ``int2-share`` and
``int2-loops`` are the paper's hand-made plans (Tables 1 and 12) when T = 4.
"""

from __future__ import annotations

import difflib
import itertools
import random
import re
from collections.abc import Iterator, Sequence

from loopkv.artifacts import Budget, Fingerprint, Plan, Profile
from loopkv.artifacts.plan import MAX_NAME_LENGTH
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.footprint import plan_footprint
from loopkv.geometry import Geometry
from loopkv.options import get_option
from loopkv.planner.prediction import predict
from loopkv.planner.solve import plan as solve_plan
from loopkv.policy import DEFAULT_POLICY, Policy

FIXED_NAMES = ("bf16", "kivi4", "kivi2", "int4-int2-share", "int2-share", "int2-loops", "layer-only")
PAPER_PLANS = ("paper-loopkv-m", "paper-loopkv-r")
"""Names of ``paper_plans``, which are no hand-made plans: their layers are a guess, so they are not served."""
_UNIFORM = {"bf16": "bf16", "kivi4": "int4", "kivi2": "int2"}
_EXAMPLES = (
    *FIXED_NAMES,
    "bf16-share",
    "kivi4-share",
    "kivi2-share",
    "kivi4-share3",
    "uniform:int2",
    "per-loop:int4,int2,share",
    "per-layer:int4,int2",
    "random:0",
    "random-share:0",
)
_SHARE_NAME = re.compile(r"(bf16|kivi4|kivi2)-share(\d{1,4}(?:,\d{1,4})*)?", re.ASCII)
MENU = ("int4", "int2", "share")
MAX_ENUMERATED = 100_000


def named_plan(
    name: str,
    fingerprint: Fingerprint,
    *,
    profile: Profile | None = None,
    budget: Budget | None = None,
    policy: Policy = DEFAULT_POLICY,
    tau: float | None = None,
) -> Plan:
    """The hand-made plan called ``name`` (see this module's table) for the model of ``fingerprint``.

    Args:
        name: as in the table.
        fingerprint: of the model, or of the profile.
        profile: gives the prediction, and the constants instead of ``policy``.
        budget: for ``layer-only`` alone.
        policy: constants of the plan where there is no profile.
        tau: V-precision threshold in bits.

    Raises:
        UnsupportedError: an unknown name (the nearest is suggested), options that do not fit the geometry, or a head
            size the codec cannot code.
        PlanMismatchError: a profile of another model.
        BudgetInfeasibleError: ``layer-only`` with a budget that no plan meets.
    """
    if profile is not None:
        profile.fingerprint.check_serves(fingerprint, "the profile")
        policy = profile.policy
    if name == "layer-only":
        if profile is None or budget is None:
            raise UnsupportedError(
                "plan 'layer-only'",
                got="no profile" if profile is None else "no budget",
                wanted="a profile, and a goal with its budgets",
                hint="loopkv plan profile.json --named layer-only --goal read --max-damage 2.0KL_share",
            )
        return solve_plan(profile, budget, per_layer=True, name=name, tau=tau)
    if budget is not None:
        raise UnsupportedError(f"plan {name!r}", got="a budget", wanted="none: its options follow from its name")
    return assigned_plan(name, fingerprint, named_options(name, fingerprint.geometry), profile, policy, tau)


def assigned_plan(
    name: str,
    fingerprint: Fingerprint,
    options: Sequence[str],
    profile: Profile | None = None,
    policy: Policy = DEFAULT_POLICY,
    tau: float | None = None,
) -> Plan:
    """A plan with these options, one per cell in cell order, and the profile's prediction if there is one.

    Raises:
        PlanFormatError: a wrong number of options, or a shared cell without a source.
        UnsupportedError: an unknown option, or a head size the codec cannot code.
    """
    # Checked here although Plan checks it again: this raises our one-sentence errors, pydantic wraps them.
    plan_footprint(fingerprint.geometry, [get_option(option) for option in options], policy)
    bare = Plan(
        name="plan",
        fingerprint=fingerprint,
        policy=policy,
        options=tuple(options),
        predicted=None if profile is None else predict(profile, options),
    )
    return bare.with_name(name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 3] + "...").with_tau(tau)


def named_options(name: str, geometry: Geometry) -> tuple[str, ...]:
    """One option name per cell of the hand-made plan ``name`` (``layer-only``, which needs a budget, excepted)."""
    loops = geometry.loops
    if name in _UNIFORM:
        return (_UNIFORM[name],) * len(geometry.cells)
    if match := _SHARE_NAME.fullmatch(name):
        own = _UNIFORM[match[1]]
        _need_loops(name, geometry, 2)
        shared = [int(number) for number in match[2].split(",")] if match[2] else [loops - 1]
        for number in shared:
            if not 1 <= number < loops:
                raise UnsupportedError(
                    f"plan {name!r}: shared loop",
                    got=number,
                    wanted=f"1 to {loops - 1}",
                    hint=f"loop {loops} is the final one, which shared loops read" if number == loops else None,
                )
        return _by_loop(geometry, ["share" if t + 1 in shared else own for t in range(loops)])
    if name == "int4-int2-share":
        _need_loops(name, geometry, 3)
        half = (loops - 1) // 2
        return _by_loop(geometry, ["int4"] * half + ["int2"] * (loops - 2 - half) + ["share", "int4"])
    if name == "int2-share":
        _need_loops(name, geometry, 2)
        return _by_loop(geometry, ["int2"] * (loops - 2) + ["share", "int4"])
    if name == "int2-loops":
        _need_loops(name, geometry, 2)
        return _by_loop(geometry, ["int2"] * (loops - 1) + ["int4"])
    kind, colon, argument = name.partition(":")
    if colon and kind in _BUILDERS:
        return _BUILDERS[kind](name, geometry, argument)
    raise unknown_name(name)


def is_plan_name(name: str) -> bool:
    """Whether ``name`` is written like a hand-made plan's, whatever the model (``kivi4``, ``per-loop:...``)."""
    kind, colon, _ = name.partition(":")
    return name in FIXED_NAMES or bool(_SHARE_NAME.fullmatch(name)) or (bool(colon) and kind in _BUILDERS)


def unknown_name(name: str) -> UnsupportedError:
    """The error for a name that no hand-made plan has; the nearest is suggested."""
    if name in PAPER_PLANS:
        return UnsupportedError(
            "plan",
            got=repr(name),
            wanted="a plan file or a hand-made plan",
            hint="only `loopkv bench`, `simulate` and `capacity` take it: the paper's option counts in guessed layers, "
            "to compare speeds; `loopkv plan` makes one to serve",
        )
    kind = name.partition(":")[0]
    near = difflib.get_close_matches(name, _EXAMPLES, n=1, cutoff=0.5) or difflib.get_close_matches(
        kind, _BUILDERS, n=1, cutoff=0.5
    )
    return UnsupportedError(
        "unknown plan name",
        got=repr(name)[:80],
        wanted=", ".join((*FIXED_NAMES, "kivi4-shareN", *(f"{kind}:..." for kind in _BUILDERS))),
        hint=f"did you mean {near[0] + ':...' if near[0] in _BUILDERS else near[0]!r}?" if near else None,
    )


def per_loop_plans(fingerprint: Fingerprint, *, profile: Profile | None = None) -> Iterator[Plan]:
    """All plans with one of int4, int2, share per loop before the final one, which stays int4 (27 for four loops)."""
    loops = fingerprint.geometry.loops - 1
    yield from _enumerate("per-loop", loops, fingerprint, profile)


def per_layer_plans(fingerprint: Fingerprint, *, profile: Profile | None = None) -> Iterator[Plan]:
    """All plans with one of int4, int2, share per layer for the loops before the final one (81 for four layers)."""
    yield from _enumerate("per-layer", len(_looped_layers(fingerprint.geometry)), fingerprint, profile)


def _enumerate(kind: str, entries: int, fingerprint: Fingerprint, profile: Profile | None) -> Iterator[Plan]:
    _need_loops(kind, fingerprint.geometry, 2)
    if len(MENU) ** entries > MAX_ENUMERATED:
        raise UnsupportedError(
            f"all {kind} plans", got=f"{len(MENU)} ** {entries} plans", wanted=f"at most {MAX_ENUMERATED}"
        )
    for names in itertools.product(MENU, repeat=entries):
        yield named_plan(f"{kind}:{','.join(names)}", fingerprint, profile=profile)


def _per_loop(name: str, geometry: Geometry, argument: str) -> tuple[str, ...]:
    options = _options(name, argument)
    loops = geometry.loops
    if len(options) not in {loops, max(1, loops - 1)}:
        raise UnsupportedError(
            f"plan {name!r}"[:100],
            got=f"{len(options)} options",
            wanted=f"{loops - 1} (the final loop at int4) or {loops}" if loops > 1 else "1",
        )
    options += ["int4"] * (loops - len(options))
    if options[-1] == "share":
        raise UnsupportedError(
            f"plan {name!r}"[:100], got="share for the final loop", wanted="bf16, int4 or int2: shared loops read it"
        )
    return _by_loop(geometry, options)


def _per_layer(name: str, geometry: Geometry, argument: str) -> tuple[str, ...]:
    _need_loops(name, geometry, 2)
    options = _options(name, argument)
    layers = _looped_layers(geometry)
    if len(options) != len(layers):
        raise UnsupportedError(f"plan {name!r}"[:100], got=f"{len(options)} options", wanted=f"{len(layers)} layers")
    by_layer = dict(zip(layers, options, strict=True))
    return tuple(
        "int4" if geometry.source_of(index) is None else by_layer[cell.layer]
        for index, cell in enumerate(geometry.cells)
    )


def _uniform(name: str, geometry: Geometry, argument: str) -> tuple[str, ...]:
    (option, *more) = _options(name, argument)
    if more or option == "share":
        raise UnsupportedError(
            f"plan {name!r}"[:100], got=argument[:80], wanted="bf16, int4 or int2 (the final loop cannot share)"
        )
    return (option,) * len(geometry.cells)


def _random(name: str, geometry: Geometry, argument: str) -> tuple[str, ...]:
    if not re.fullmatch(r"\d{1,18}", argument, re.ASCII):
        raise UnsupportedError(f"plan {name!r}"[:100], got=repr(argument)[:80], wanted="a whole number as the seed")
    # random() is the one method of random.Random whose sequence Python promises to keep.
    numbers = random.Random(int(argument))
    share = numbers.random() / 2 if name.startswith("random-share:") else 0.0
    coarse = numbers.random()
    options = []
    for index, cell in enumerate(geometry.cells):
        if geometry.source_of(index) is None:
            options.append("int4")
            continue
        shares, is_coarse = numbers.random() < share, numbers.random() < coarse
        options.append("share" if shares and cell.loop > 0 else "int2" if is_coarse else "int4")
    return tuple(options)


_BUILDERS = {
    "uniform": _uniform,
    "per-loop": _per_loop,
    "per-layer": _per_layer,
    "random": _random,
    "random-share": _random,
}


def _options(name: str, argument: str) -> list[str]:
    options = [part.strip() for part in argument.split(",")]
    for option in options:
        try:
            get_option(option)
        except LoopKVError as error:
            raise UnsupportedError(
                f"plan {name!r}"[:100], got=f"option {option!r}"[:80], wanted=error.wanted, hint=error.hint
            ) from None
    return options


def _by_loop(geometry: Geometry, options: Sequence[str]) -> tuple[str, ...]:
    """Option of a cell by its loop; prelude and coda cells take the final loop's."""
    return tuple(options[cell.loop] if cell.section == "loop" else options[-1] for cell in geometry.cells)


def _looped_layers(geometry: Geometry) -> list[int]:
    return [layer for layer in range(geometry.layers) if layer not in geometry.sliding_looped]


def _need_loops(name: str, geometry: Geometry, loops: int) -> None:
    if geometry.loops < loops:
        raise UnsupportedError(
            f"plan {name!r}"[:100], got=f"a model of {geometry.loops} loop(s)", wanted=f"at least {loops} loops"
        )
