"""``loopkv report``: Records to one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loopkv.paths import check_output_file, check_output_folder


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command()
    def report(
        results: Annotated[
            list[Path], typer.Argument(help="Record files (JSON lines), e.g. results/*.jsonl; .xz is read, too.")
        ],
        output: Annotated[
            Path, typer.Option("--output", "-o", callback=check_output_file, help="Page to write.")
        ] = Path("report.html"),
        png: Annotated[
            Path | None,
            typer.Option(callback=check_output_folder, help="Also write every figure as PNG into this folder."),
        ] = None,
        title: Annotated[str, typer.Option(help="Title of the page.")] = "LoopKV results",
    ) -> None:
        """Draw tables and plots from Records alone: no model, no GPU.

        Example: [bold]loopkv report results/*.jsonl -o report.html --png plots/[/bold]
        """
        from loopkv.report import write_records_report

        path = write_records_report(results, output, png_folder=png, title=title)
        typer.echo(f"{path} ({path.stat().st_size / 1024:.0f} KiB)" + ("" if png is None else f", PNG files in {png}/"))
