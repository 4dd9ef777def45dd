"""Options of the engine that a command starts, as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from loopkv.errors import LoopKVError

EngineOption = Annotated[
    str,
    typer.Option("--engine", metavar="JSON", help="Options of vllm.LLM, e.g. '{\"gpu_memory_utilization\": 0.9}'."),
]


def engine_options(text: str) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``.

    Raises:
        LoopKVError: ``text`` is no JSON object.
    """
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise LoopKVError("--engine", got=text[:80], wanted="a JSON object")
    return options
