"""The ``loopkv`` command: collects the verbs; how it ends is in ``process``."""

from __future__ import annotations

import importlib
import io
import sys

import typer

import loopkv
from loopkv.cli import process

VERBS: tuple[str, ...] = (
    "profile",
    "plan",
    "tau",
    "inspect",
    "measure",
    "generate",
    "eval",
    "capacity",
    "serve",
    "bench",
    "simulate",
    "report",
    "demo",
)
"""Modules of this package with a ``register(app)`` function, in the order of the help text."""

app = typer.Typer(
    name="loopkv",
    help="Profile, plan and serve looped transformers with a compressed KV cache.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"loopkv {loopkv.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Profile, plan and serve looped transformers with a compressed KV cache."""


for _verb in VERBS:
    importlib.import_module(f"loopkv.cli.{_verb}").register(app)


def main() -> None:
    """Entry point of the ``loopkv`` command."""
    for stream in (sys.stdout, sys.stderr):
        # Names and texts may hold what the terminal's encoding lacks: shown as escapes, never a traceback.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    with process.ends_like_other_tools():
        app()
