"""The ``vllm serve`` command that a plan needs. Imports no vLLM: a broken setting is reported in a second."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopkv.artifacts import Fingerprint, Plan
from loopkv.errors import UnsupportedError
from loopkv.geometry import Geometry
from loopkv.paths import check_input_file
from loopkv.reference import MODEL_NAME, model_place
from loopkv.vllm_plugin.settings import SETTINGS_KEY, ServeSettings, SettingsError

PLUGIN_NAME = "loopkv"
_OPTION = "--additional-config"
_SERVED_NAME = "--served-model-name"
OWN_OPTIONS = (
    "--plan",
    "--prefill",
    "--seed-mode",
    "--accept-weights",
    "--no-accept-weights",
    "--prefill-graphs",
    "--no-prefill-graphs",
    "--dry-run",
)
"""Every option of ``loopkv serve``: what is nearly one of them is not handed to vLLM."""
MEANINGLESS_OPTIONS = ("--attention-backend", "--attention-config", "--block-size", "--prefix-match-unit")
"""Options of vLLM for a cache of its own, which the config hook refuses half a minute later."""
NEAR = 0.8  # of difflib; no option of vLLM 0.26 comes so near to one of ours


def serve_command(model: str, settings: ServeSettings, vllm_arguments: Sequence[str] = ()) -> list[str]:
    """The command line ``vllm serve MODEL --additional-config {...} ...``: exactly what a user could type.

    Args:
        model: a local folder, a Hugging Face name, or the name of the embedded model.
        settings: the plan and how to run it.
        vllm_arguments: further arguments of ``vllm serve``; an ``--additional-config`` among them is merged.

    Raises:
        UnsupportedError: vLLM is not installed, or would not load this plugin.
        PlanFormatError, PlanVersionError: an unreadable plan file.
        UnsupportedError: an unknown plan name, or one that this model cannot take; the nearest is suggested.
        ModelFormatError: a local model folder that is missing or has no config.json.
        PlanMismatchError: a plan of another geometry or other weights than the local model's.
        SettingsError: an argument that is nearly one of ``loopkv serve``'s own;
            an ``--additional-config`` that is no JSON object or has ``loopkv`` settings of its own.
        UnsupportedError: an option of vLLM that has no meaning for a LoopKV cache.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError(
            "serving", got="no vLLM in this environment", wanted="vLLM 0.26", hint="pip install 'vllm==0.26.*'"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        names = [name.strip() for name in allowed.split(",")]
        spaced = " (vLLM takes a space for part of a name)" if PLUGIN_NAME in names else ""
        wanted = ",".join(dict.fromkeys(filter(None, [*names, PLUGIN_NAME])))
        raise UnsupportedError(
            f"serving: VLLM_PLUGINS leaves the plugin out{spaced}",
            got=repr(allowed),
            wanted=PLUGIN_NAME,
            hint=f"export VLLM_PLUGINS={shlex.quote(wanted)}",
        )
    if model.startswith("-"):
        raise SettingsError("loopkv serve: MODEL", got=repr(model)[:80], wanted="the model before any option of vLLM")
    embedded = model == MODEL_NAME
    model = model_place(model)
    _check_arguments(vllm_arguments)
    _check_plan(model, settings, vllm_arguments)
    if settings.names_file:
        settings = settings.model_copy(update={"plan": str(Path(settings.plan).resolve())})
    config, rest = _split_additional_config(vllm_arguments)
    if SETTINGS_KEY in config:
        raise SettingsError(
            f"{_OPTION}: {SETTINGS_KEY!r}", got="given twice", wanted="the options of `loopkv serve` alone"
        )
    config[SETTINGS_KEY] = settings.model_dump(exclude_defaults=True)
    name = [_SERVED_NAME, MODEL_NAME] if embedded and not _names_model(rest) else []
    return [*vllm_executable(), "serve", model, *name, _OPTION, json.dumps(config), *rest]


def _names_model(arguments: Sequence[str]) -> bool:
    """Whether the user says what clients call the model, on the command line or in vLLM's config file."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name.startswith("--se") and _SERVED_NAME.startswith(name):  # abbreviated, as argparse allows
            return True
        if name == "--config" and _config_file_sets(
            value if equals else next(iter(arguments[index + 1 : index + 2]), ""), "served[-_]model[-_]name"
        ):
            return True
    return False


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuse a misspelt option of ours, which vLLM would refuse after half a minute, or take for another.

    An option of vLLM's that would be ignored is refused here too.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.replace("_", "-").partition(".")[0] in MEANINGLESS_OPTIONS:
            raise UnsupportedError(
                "a LoopKV plan cannot be served with an attention backend or block size of vLLM's",
                got=argument[:80],
                wanted="no such option",
                hint="drop it: the plan decides how blocks are laid out, and LoopKV's own operators read them",
            )
        near = difflib.get_close_matches(name, OWN_OPTIONS, n=1, cutoff=NEAR) if name.startswith("--") else []
        if near:
            raise SettingsError(
                "loopkv serve: unknown option", got=name[:80], wanted=near[0], hint=f"did you mean {near[0]}?"
            )


def _check_plan(model: str, settings: ServeSettings, arguments: Sequence[str]) -> None:
    """Refuse a plan that does not exist, and one that a local model cannot take; a remote model is left to vLLM."""
    from loopkv.planner.named import is_plan_name, named_plan, unknown_name

    plan = Plan.load(settings.plan) if settings.names_file else None
    if plan is None and not is_plan_name(settings.plan):
        raise unknown_name(settings.plan)
    folder = Path(model).expanduser()
    if not (folder.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1):
        return
    geometry = _local_geometry(folder)
    if geometry is None or any(argument.replace("_", "-").startswith("--hf-overrides") for argument in arguments):
        return
    identity = Fingerprint(name=folder.resolve().name, geometry=geometry)
    if plan is None:
        named_plan(settings.plan, identity)
        return
    plan.check_serves(identity)
    if plan.fingerprint.weights_sha256 and not settings.accept_weights and any(folder.glob("*.safetensors")):
        from loopkv.models import fingerprint_model

        plan.check_serves(fingerprint_model(folder))


def _local_geometry(folder: Path) -> Geometry | None:
    """Geometry in a folder's config.json; None for an architecture that only vLLM may know (ModelFormatError)."""
    from loopkv.models.config import parse_ouro_config, read_config
    from loopkv.models.ouro import ouro_geometry

    data = read_config(folder)
    if data["model_type"] != "ouro":
        return None
    return ouro_geometry(parse_ouro_config(data, f"{folder}/config.json"))


def vllm_executable() -> list[str]:
    """The `vllm` command of this environment."""
    beside = Path(sys.executable).with_name("vllm")
    if beside.is_file():
        return [str(beside)]
    found = shutil.which("vllm")
    return [found] if found else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _split_additional_config(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The user's own ``--additional-config`` and the arguments without it.

    vLLM takes the option in other forms too (parts, abbreviations, repetitions, a file), of which the last one given
    wins: served like that, the plan would be dropped without a word.
    """
    rest, values = list(arguments), []
    index = 0
    while index < len(rest):
        name, equals, value = rest[index].partition("=")
        name = name.replace("_", "-")
        if name == "--config":
            _check_config_file(value if equals else next(iter(rest[index + 1 : index + 2]), ""))
        if name == _OPTION:
            if not equals:
                if index + 1 >= len(rest):
                    raise SettingsError(_OPTION, got="no value", wanted="a JSON object")
                value = rest[index + 1]
            values.append(value)
            del rest[index : index + (1 if equals else 2)]
            continue
        if name.startswith(f"{_OPTION}.") or (name.startswith("--ad") and _OPTION.startswith(name)):
            raise SettingsError("loopkv serve", got=name[:80], wanted=f"{_OPTION} JSON, once")
        index += 1
    if len(values) > 1:
        raise SettingsError(_OPTION, got=f"given {len(values)} times", wanted="one JSON object")
    if not values:
        return {}, rest
    try:
        config = json.loads(values[0])
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise SettingsError(_OPTION, got=values[0][:80], wanted="a JSON object")
    return config, rest


def _check_config_file(path: str) -> None:
    """Refuse a vLLM config file that is missing, and one with an ``additional-config``: ours would replace it."""
    check_input_file(Path(path), "--config", SettingsError, "a YAML file")
    if _config_file_sets(path, "additional[-_]config"):
        raise SettingsError(
            f"--config {path}", got="an additional-config in it", wanted=f"{_OPTION} JSON on the command line"
        )


def _config_file_sets(path: str, option: str) -> bool:
    """Whether a vLLM config file has ``option``, a regular expression; False for what cannot be read."""
    try:
        text = Path(path).read_text(errors="replace") if Path(path).is_file() else ""
    except OSError:
        return False  # vLLM says what is wrong with it
    return re.search(rf"^\s*[\"']?{option}\b", text, re.MULTILINE) is not None
