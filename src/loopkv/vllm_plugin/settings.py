"""What a user says under ``additional_config["loopkv"]``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loopkv.errors import LoopKVError
from loopkv.planner.lookup import is_plan_file

SETTINGS_KEY = "loopkv"
SERVED_KEY = "loopkv_served"  # what the settings became, for the processes of the engine


class SettingsError(LoopKVError):
    """Serving settings that cannot be understood."""


class ServeSettings(BaseModel):
    """How a plan is served. How it is run is no part of the plan itself.

    Args:
        plan: path of a plan file, or the name of a hand-made plan (``kivi4``, ``kivi2``, ``kivi4-share3``, ``bf16``).
        prefill: ``exact`` reads the same whatever the chunking (plans with shared cells: at most 256 tokens of one
            request a step); ``fast`` takes any chunk, and a shared cell reads its own exact KV for pages of the chunk.
        seed_mode: where a decode row's V-precision maximum starts: ``sink`` waits for the exact sink scores, ``timed``
            waits at most 4 microseconds (CUDA only), ``none`` starts from nothing.
        accept_weights: serve a plan that was profiled on a sibling checkpoint.
        prefill_graphs: replay prefill steps of few tokens as CUDA graphs where engine and GPU allow it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    plan: str = Field(min_length=1, max_length=4096)
    prefill: Literal["exact", "fast"] = "exact"
    seed_mode: Literal["sink", "timed", "none"] = "sink"
    accept_weights: bool = False
    prefill_graphs: bool = True

    @property
    def names_file(self) -> bool:
        """Whether ``plan`` is a path rather than the name of a hand-made plan."""
        return is_plan_file(self.plan)


def read_settings(additional_config: object) -> ServeSettings | None:
    """The LoopKV settings in vLLM's ``additional_config``, or None where there are none.

    Raises:
        SettingsError: anything but a well-formed settings object; a near name is suggested.
    """
    if not isinstance(additional_config, Mapping):
        return None
    for key in additional_config:
        if key not in (SETTINGS_KEY, SERVED_KEY) and _is_near(str(key)):
            raise SettingsError(
                "additional_config: unknown key", got=repr(key)[:80], wanted=repr(SETTINGS_KEY), hint="rename the key"
            )
    if SETTINGS_KEY not in additional_config:
        return None
    data: Any = additional_config[SETTINGS_KEY]
    where = f"additional_config[{SETTINGS_KEY!r}]"
    example = '{"loopkv": {"plan": "plan.json"}}'
    if not isinstance(data, Mapping):
        raise SettingsError(where, got=repr(data)[:80], wanted="an object", hint=f"write {example}")
    for key in data:
        if key not in ServeSettings.model_fields:
            near = difflib.get_close_matches(str(key), ServeSettings.model_fields, n=1, cutoff=0.5)
            raise SettingsError(
                f"{where}: unknown setting",
                got=repr(key)[:80],
                wanted=", ".join(ServeSettings.model_fields),
                hint=f"did you mean {near[0]!r}?" if near else f"write {example}",
            )
    if "plan" not in data:
        raise SettingsError(f"{where}: plan", got="nothing", wanted="a plan file or name", hint=f"write {example}")
    try:
        return ServeSettings.model_validate(dict(data))
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{where}: {field}", got=repr(first["input"])[:80], wanted=first["msg"]) from None


def _is_near(key: str) -> bool:
    """Whether a key of ``additional_config`` can only be a misspelt ``loopkv``."""
    letters = re.sub("[^a-z]", "", key[:80].lower())
    return difflib.SequenceMatcher(None, letters, SETTINGS_KEY).ratio() > 0.82
