"""LoopKV: loop-aware KV cache compression for serving looped transformers.

``model --profile--> Profile --plan--> Plan --lay_out--> Layout --serve--> tokens``: each arrow is one function with one
immutable record in and one out. Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Budget": "loopkv.artifacts",
    "Plan": "loopkv.artifacts",
    "Profile": "loopkv.artifacts",
    "frontier": "loopkv.planner",
    "inspect_file": "loopkv.inspection",
    "named_plan": "loopkv.planner",
    "plan": "loopkv.planner",
    "predict_capacity": "loopkv.capacity",
}
"""Public names and their modules, imported on first use (torch only where a name needs it)."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
