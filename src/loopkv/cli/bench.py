"""``loopkv bench``: one sub-command per benchmark, each in its own module ``bench_<name>.py``."""

from __future__ import annotations

import importlib

import typer

COMMANDS: tuple[str, ...] = ("decode", "kernel", "slo", "workload")
"""Modules ``loopkv.cli.bench_<name>`` with a ``register(app)`` function, in the order of the help text."""


def register(app: typer.Typer) -> None:
    """Add the ``bench`` group and its sub-commands."""
    bench = typer.Typer(
        help="Measure speed: decode throughput, kernels, goodput under an SLO. Results are Records (JSON lines).",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )
    for name in COMMANDS:
        importlib.import_module(f"loopkv.cli.bench_{name}").register(bench)
    app.add_typer(bench, name="bench")
