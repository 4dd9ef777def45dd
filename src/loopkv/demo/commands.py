"""The command lines behind a demo's figures, with the values this run used."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from loopkv.artifacts import Plan
from loopkv.reference import MODEL_NAME, model_folder

GROUPS = ("plan", "measure", "tasks", "capacity", "generate")
"""Groups of figures that no single verb draws: the demo itself does."""


def demo_command(
    output: Path,
    *,
    model: Path | None,
    documents: Path | None,
    limit: int,
    max_tokens: int,
    task_records: Path | None,
    serve: bool,
) -> str:
    """``loopkv demo`` with the options that were given."""
    words: list[object] = ["loopkv", "demo", "--output", output]
    for option, value in (("--model", model), ("--documents", documents)):
        words += [] if value is None else [option, value]
    words += ["--limit", limit, "--max-tokens", max_tokens]
    words += [] if task_records is None else ["--task-records", task_records]
    words += [] if serve else ["--no-serve"]
    return shlex.join(map(str, words))


def profile_command(folder: Path, documents: Path, limit: int, max_tokens: int, output: Path) -> str:
    """``loopkv profile`` of the same documents into ``output``."""
    model = MODEL_NAME if folder == model_folder() else _near(folder)
    words = ["loopkv", "profile", model, "-o", output, "--documents", _near(documents)]
    return shlex.join(map(str, [*words, "--limit", limit, "--max-tokens", max_tokens]))


def plan_command(profile: Path, plan: Plan) -> str:
    """``loopkv plan`` that makes ``plan`` again: its budgets to the last digit, or its name if made by hand."""
    words = ["loopkv", "plan", str(profile)]
    budget = plan.budget
    if budget is None:
        return shlex.join([*words, "--named", plan.name])
    words += ["--goal", budget.goal]
    if budget.max_damage_nats is not None:
        words += ["--max-damage", f"{budget.max_damage_nats!r}nats"]
    words += [] if budget.max_stored_bytes is None else ["--max-stored", f"{budget.max_stored_bytes}B"]
    words += [] if budget.max_read_bytes is None else ["--max-read", f"{budget.max_read_bytes}B"]
    return shlex.join(words)


def report_commands(demo: str, profiling: str, profile: Path, plans: Iterable[Plan]) -> dict[str, str]:
    """Command by group of figures, and by plan for the plans' own figures."""
    return {
        "profile": profiling,
        **dict.fromkeys(GROUPS, demo),
        **{plan.name: plan_command(profile, plan) for plan in plans},
    }


def _near(path: Path) -> Path:
    """``path`` from the current folder where it lies below it."""
    here = Path(os.path.relpath(path))
    return path if here.parts[:1] == ("..",) else here
