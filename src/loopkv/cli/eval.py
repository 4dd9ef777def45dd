"""``loopkv eval``: what a plan does to answers and how well damages add up. One module per subcommand."""

from __future__ import annotations

import importlib

import typer

SUBCOMMANDS: tuple[str, ...] = ("eval_tasks", "eval_served", "eval_additivity")
"""Modules of this package with an ``add(group)`` function, in the order of the help text."""


def register(app: typer.Typer) -> None:
    """Add ``loopkv eval`` with all its subcommands."""
    group = typer.Typer(no_args_is_help=True, help="Measure answers and assumptions of plans; results are Records.")
    for name in SUBCOMMANDS:
        importlib.import_module(f"loopkv.cli.{name}").add(group)
    app.add_typer(group, name="eval")
