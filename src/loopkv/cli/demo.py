"""``loopkv demo``: the whole flow on the embedded reference model, or on a looped model of yours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.documents import check_documents_file
from loopkv.cli.model import FOLDER_OR_NAME, parse_model
from loopkv.paths import check_output_folder

if TYPE_CHECKING:
    from rich.table import Table

    from loopkv.demo import DemoResult


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def demo(
        output: Annotated[
            Path, typer.Option("--output", "-o", callback=check_output_folder, help="Folder for the report.")
        ] = Path("build/demo"),
        model: Annotated[
            Path | None,
            typer.Option(
                parser=parse_model,
                metavar=FOLDER_OR_NAME,
                help="A looped model; looped-tiny, the embedded one, by default.",
            ),
        ] = None,
        documents: Annotated[
            Path | None, typer.Option(help="Documents to profile on (.jsonl, .jsonl.xz, .txt).")
        ] = None,
        limit: Annotated[int, typer.Option(min=1, help="Documents to profile on.")] = 8,
        max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each document.")] = 1536,
        task_records: Annotated[
            Path | None, typer.Option(help="Records of `loopkv eval tasks` to show in the report.")
        ] = None,
        serve: Annotated[bool, typer.Option(help="End by serving with vLLM.")] = True,
    ) -> None:
        """Profile, plan, measure, generate and serve; then open report.html in the output folder.

        Example: [bold]loopkv demo --output build/demo[/bold]
        """
        from loopkv.cli._render import console
        from loopkv.cli.progress import progress
        from loopkv.demo import DemoSettings, run_demo

        check_documents_file(documents)
        settings = DemoSettings(output, model, documents, limit, max_tokens, task_records, serve)
        result = run_demo(settings, say=lambda line: typer.echo(line, err=True), progress=progress)
        out = console()
        out.print(plan_table(result))
        for line in result.report.budgets:
            out.print(line, soft_wrap=False)
        if result.asked:
            out.print(answer_table(result))
        typer.echo(f"report: {result.page}\nsummary: {result.page.with_name('summary.json')}")


def plan_table(result: DemoResult) -> Table:
    """Bytes, predicted and measured damage of the plans, one row each."""
    from rich.table import Table

    table = Table(title="plans: bytes per history token, fp32 KL in nats per token", box=None, padding=(0, 2, 0, 0))
    table.add_column("plan")
    for name in ("stored", "read", "predicted", "measured", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in result.report.plans:
        predicted, measured = plan.predicted, plan.measured
        table.add_row(
            plan.name,
            f"{plan.footprint.stored_bytes:,}",
            f"{plan.footprint.read_bytes:,}",
            "-" if predicted is None else f"{predicted.damage_nats:.2e}",
            "-" if measured is None else f"{measured.kl_nats:.2e}",
            "-" if measured is None else f"{measured.top1_agreement:.2%}",
        )
    return table


def answer_table(result: DemoResult) -> Table:
    """What the server answered beside the exact model and the truth, and the bytes the request held."""
    from rich.table import Table

    table = Table(title="answers of vllm serve", box=None, padding=(0, 2, 0, 0))
    for name in ("question", "wanted", "bf16", "served"):
        table.add_column(name, overflow="fold")
    table.add_column("held", justify="right", no_wrap=True)
    table.add_column("of bf16", justify="right", no_wrap=True)
    for item in result.asked:
        table.add_row(
            *(item.title, item.wanted, item.exact, item.served.text.strip()),
            f"{item.held_bytes / 2**20:.2f} MiB",
            f"{item.held_bytes / item.exact_bytes:.0%}",
        )
    return table
