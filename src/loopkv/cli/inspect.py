"""``loopkv inspect``: a profile or plan as a readable grid, with bytes, budgets and warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("inspect")(inspect_command)


def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan or a profile (JSON).", show_default=False)],
) -> None:
    """Show a profile or a plan: grid of cells, bytes, budgets, damages, warnings.

    Example: loopkv inspect plan.json
    """
    from loopkv.artifacts import Plan
    from loopkv.cli._render import console, print_plan, print_profile
    from loopkv.inspection import inspect_file

    found = inspect_file(file)
    out = console()
    if isinstance(found.artifact, Plan):
        print_plan(found.artifact, found.warnings, out)
    else:
        print_profile(found.artifact, found.warnings, out)
