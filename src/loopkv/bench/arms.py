"""Arms of a benchmark as a user writes them: ``[LABEL=]stock[:DTYPE]`` or ``[LABEL=]PLAN``, then ``,KEY=VALUE``.

``stock`` is vLLM's own cache (``stock:fp8`` another ``--kv-cache-dtype``); anything else is a plan file, the name of a
hand-made plan or one of ``planner.paper_plans``. Keys of a plan: ``prefill``, ``seed_mode``, ``tau`` (replaces the
plan's threshold of V precision; ``none`` reads both planes); of a stock cache: ``skip_layers=72-95`` (layers by number
that keep the model's dtype). Examples: ``bf16=stock``, ``fp8=stock:fp8``, ``kivi4``, ``M=memory.json,seed_mode=timed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from loopkv.artifacts import Fingerprint, Plan
from loopkv.artifacts.plan import MAX_TAU
from loopkv.errors import LoopKVError
from loopkv.planner.lookup import is_plan_file, load_or_name
from loopkv.planner.named import PAPER_PLANS
from loopkv.planner.paper_plans import paper_plan
from loopkv.vllm_plugin.settings import ServeSettings

STOCK = "stock"
PLAN_KEYS = ("prefill", "seed_mode", "tau")
PLAN_CHOICES = {key: get_args(ServeSettings.model_fields[key].annotation) for key in ("prefill", "seed_mode")}
STOCK_KEYS = ("skip_layers",)
MAX_LAYER = 1 << 16


@dataclass(frozen=True, slots=True)
class EngineArm:
    """One way to run the engine.

    Args:
        label: in tables, plots and Records.
        spec: as the user wrote it, without the label.
        plan: plan file or name; None for vLLM's own cache.
        kv_cache_dtype: of vLLM's own cache.
        skip_layers: layers that keep the model's dtype in vLLM's own cache.
        settings: further settings of the plugin, as sorted pairs.
    """

    label: str
    spec: str
    plan: str | None
    kv_cache_dtype: str = "auto"
    skip_layers: tuple[int, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def stock(self) -> bool:
        """True for vLLM's own cache."""
        return self.plan is None

    def additional_config(self) -> dict[str, Any]:
        """What the engine gets as ``additional_config`` (empty for a stock cache)."""
        if self.plan is None:
            return {}
        plan = str(Path(self.plan).resolve()) if is_plan_file(self.plan) else self.plan
        settings = {key: value for key, value in self.settings if key != "tau"}
        return {"loopkv": {"plan": plan, **settings}}

    def with_plan_file(self, identity: Fingerprint, folder: Path) -> EngineArm:
        """The same arm with its plan, tau included, as a file in ``folder``: what an engine can be given.

        Raises:
            LoopKVError: see ``load_plan``.
        """
        plan = self.load_plan(identity)
        if plan is None:
            return self
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file_name(self.label)}.plan.json"
        plan.save(path)
        return replace(self, plan=str(path))

    def load_plan(self, identity: Fingerprint) -> Plan | None:
        """The plan, checked against the model's geometry; None for a stock cache.

        Raises:
            LoopKVError: an unreadable plan, an unknown name, or a plan for another geometry.
        """
        if self.plan is None:
            return None
        if self.plan in PAPER_PLANS:
            plan = paper_plan(self.plan, identity)
        else:
            plan, _ = load_or_name(self.plan, identity)
        plan.check_serves(identity)
        tau = dict(self.settings).get("tau")
        return plan if tau is None else plan.with_tau(None if tau == "none" else float(tau))


def file_name(label: str) -> str:
    """A label as a part of file names."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in label)


def parse_arm(text: str) -> EngineArm:
    """Read one arm.

    Raises:
        LoopKVError: an empty part, an unknown key or a value that the key does not have.
    """
    head, *pairs = text.split(",")
    if head.startswith(("per-loop:", "per-layer:")) or "=per-loop:" in head or "=per-layer:" in head:
        head, pairs = text, []  # their own lists use commas
    label, equals, spec = head.partition("=")
    spec = spec if equals else label
    if not label or not spec:
        raise LoopKVError("arm", got=repr(text)[:80], wanted="[LABEL=]stock[:DTYPE] or [LABEL=]PLAN")
    kind, colon, dtype = spec.partition(":")
    stock = kind == STOCK
    if stock and colon and not dtype:
        raise LoopKVError("arm", got=repr(text)[:80], wanted="a cache dtype after 'stock:'")
    if not equals:
        label = (dtype or STOCK) if stock else Path(spec).stem if spec.endswith(".json") else spec
    options: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        known = STOCK_KEYS if stock else PLAN_KEYS
        if key not in known or not sign or not value or key in options:
            raise LoopKVError(f"arm {label}", got=repr(pair)[:80], wanted=" or ".join(f"{k}=VALUE" for k in known))
        if key in PLAN_CHOICES and value not in PLAN_CHOICES[key]:
            raise LoopKVError(f"arm {label}: {key}", got=repr(value)[:80], wanted=" or ".join(PLAN_CHOICES[key]))
        options[key] = value
    if "tau" in options:
        _check_tau(options["tau"], label)
    layers = _layers(options.pop("skip_layers", ""), label)
    return EngineArm(
        label=label,
        spec=text.partition("=")[2] if equals else text,
        plan=None if stock else spec,
        kv_cache_dtype=dtype or "auto" if stock else "auto",
        skip_layers=layers,
        settings=tuple(sorted(options.items())),
    )


def _check_tau(text: str, label: str) -> None:
    try:
        good = text == "none" or 0 <= float(text) <= MAX_TAU
    except ValueError:
        good = False
    if not good:
        raise LoopKVError(f"arm {label}: tau", got=repr(text)[:40], wanted=f"none, or bits from 0 to {MAX_TAU}")


def _layers(text: str, label: str) -> tuple[int, ...]:
    if not text:
        return ()
    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()):
        raise LoopKVError(f"arm {label}: skip_layers", got=repr(text)[:80], wanted="FIRST-LAST, as in 72-95")
    first, last = int(low), int(high or low)
    if not first <= last < MAX_LAYER:
        raise LoopKVError(f"arm {label}: skip_layers", got=repr(text)[:80], wanted="FIRST <= LAST")
    return tuple(range(first, last + 1))


def parse_arms(texts: Sequence[str]) -> tuple[EngineArm, ...]:
    """Read several arms; a label that is used again gets `` (A/A)`` behind it, as a second run of the same arm.

    Raises:
        LoopKVError: no arm, a label used three times, two that differ under one label, labels that make one file name.
    """
    if not texts:
        raise LoopKVError("arms", got="none", wanted="at least one, e.g. stock or kivi4")
    arms: list[EngineArm] = []
    for text in texts:
        arm = parse_arm(text)
        same = [other for other in arms if other.label.removesuffix(" (A/A)") == arm.label]
        if same:
            if len(same) > 1 or same[0].spec != arm.spec:
                raise LoopKVError("arms", got=f"label {arm.label!r} again", wanted="labels that differ, or one A/A run")
            arm = EngineArm(f"{arm.label} (A/A)", arm.spec, arm.plan, arm.kv_cache_dtype, arm.skip_layers, arm.settings)
        arms.append(arm)
    names: dict[str, str] = {}
    for arm in arms:
        name = file_name(arm.label)
        if name in names:
            got = f"labels {names[name]!r} and {arm.label!r}"
            raise LoopKVError("arms", got=got[:120], wanted="labels whose letters, digits, '-', '_' and '.' differ")
        names[name] = arm.label
    return tuple(arms)
