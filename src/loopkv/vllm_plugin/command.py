"""The ``vllm serve`` command that a plan needs. Imports no vLLM: a broken setting is reported in a second."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopkv.artifacts import Plan
from loopkv.errors import UnsupportedError
from loopkv.vllm_plugin.settings import SETTINGS_KEY, ServeSettings, SettingsError

PLUGIN_NAME = "loopkv"
_OPTION = "--additional-config"


def serve_command(model: str, settings: ServeSettings, vllm_arguments: Sequence[str] = ()) -> list[str]:
    """The command line ``vllm serve MODEL --additional-config {...} ...``: exactly what a user could type.

    Args:
        model: a local folder or a Hugging Face name.
        settings: the plan and how to run it.
        vllm_arguments: further arguments of ``vllm serve``; an ``--additional-config`` among them is merged.

    Raises:
        UnsupportedError: vLLM is not installed, or would not load this plugin.
        PlanFormatError, PlanVersionError: an unreadable plan file.
        SettingsError: an ``--additional-config`` that is no JSON object or has ``loopkv`` settings of its own.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError(
            "serving", got="no vLLM in this environment", wanted="vLLM 0.26", hint="pip install 'vllm==0.26.*'"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise UnsupportedError(
            "serving: VLLM_PLUGINS leaves the plugin out",
            got=repr(allowed),
            wanted=PLUGIN_NAME,
            hint=f"export VLLM_PLUGINS={','.join(filter(None, [allowed, PLUGIN_NAME]))}",
        )
    if settings.names_file:
        settings = settings.model_copy(update={"plan": str(Path(settings.plan).resolve())})
        Plan.load(settings.plan)
    config, rest = _split_additional_config(vllm_arguments)
    if SETTINGS_KEY in config:
        raise SettingsError(
            f"{_OPTION}: {SETTINGS_KEY!r}", got="given twice", wanted="the options of `loopkv serve` alone"
        )
    config[SETTINGS_KEY] = settings.model_dump(exclude_defaults=True)
    return [*vllm_executable(), "serve", model, _OPTION, json.dumps(config), *rest]


def vllm_executable() -> list[str]:
    """The `vllm` command of this environment."""
    beside = Path(sys.executable).with_name("vllm")
    if beside.is_file():
        return [str(beside)]
    found = shutil.which("vllm")
    return [found] if found else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _split_additional_config(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The user's own ``--additional-config`` and the arguments without it."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") != _OPTION:
            continue
        if not equals:
            if index + 1 >= len(rest):
                raise SettingsError(_OPTION, got="no value", wanted="a JSON object")
            value = rest[index + 1]
        del rest[index : index + (1 if equals else 2)]
        try:
            config = json.loads(value)
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise SettingsError(_OPTION, got=value[:80], wanted="a JSON object")
        return config, rest
    return {}, rest
