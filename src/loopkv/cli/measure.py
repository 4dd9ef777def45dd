"""``loopkv measure``: the fp32 KL of whole plans beside what their profile predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.documents import (
    DEFAULT_LIMIT,
    DEFAULT_TOKENS,
    BatchOption,
    DocumentsOption,
    LimitOption,
    PromptsOption,
    Request,
    SeedOption,
    SkipOption,
    TokensOption,
    check_documents_file,
)
from loopkv.cli.model import ModelArgument
from loopkv.paths import check_output_file

if TYPE_CHECKING:
    from rich.table import Table

    from loopkv.profiler import PlanMeasurement


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def measure(
        model: ModelArgument,
        plans: Annotated[list[str], typer.Argument(help="Plan files, or names such as kivi4.")],
        documents: DocumentsOption = None,
        prompts: PromptsOption = None,
        limit: LimitOption = DEFAULT_LIMIT,
        skip: SkipOption = 0,
        max_tokens: TokensOption = DEFAULT_TOKENS,
        seed: SeedOption = 0,
        batch: BatchOption = None,
        device: Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda.")] = "cpu",
        write: Annotated[bool, typer.Option("--write", help="Write the measurement into the plan files.")] = False,
        records: Annotated[
            Path | None, typer.Option("--records", callback=check_output_file, help="Append Records to this file.")
        ] = None,
        journal: Annotated[
            Path | None,
            typer.Option(
                "--journal", callback=check_output_file, help="Keep results here; a later run reads them back."
            ),
        ] = None,
        accept_weights: Annotated[
            bool, typer.Option("--accept-weights", help="Allow plans made for a sibling checkpoint.")
        ] = False,
    ) -> None:
        """Measure the KL of whole plans against the exact model in fp32, with intervals over documents.

        Example: [bold]loopkv measure Ouro-1.4B plan.json kivi4 --documents texts.jsonl --write[/bold]
        """
        from loopkv.cli._render import console
        from loopkv.cli.documents import collect
        from loopkv.cli.progress import progress
        from loopkv.errors import LoopKVError
        from loopkv.models import fingerprint_model, load_model, load_tokenizer, resolve_device
        from loopkv.planner.lookup import load_or_name
        from loopkv.profiler import measure as measure_plans
        from loopkv.profiler.journal import going_on
        from loopkv.profiler.measuring import measurement_records
        from loopkv.records import append_records

        check_documents_file(documents)
        fingerprint = fingerprint_model(model)
        loaded = [load_or_name(plan, fingerprint) for plan in plans]
        for plan, _ in loaded:
            plan.check_serves(fingerprint, accept_weights=accept_weights)
        for _, path in loaded if write else ():
            check_output_file(path)
        policies = {plan.policy for plan, _ in loaded}
        if len(policies) > 1:
            raise LoopKVError("plans", got=f"{len(policies)} sets of constants", wanted="plans of one policy")
        looped = load_model(model, device=resolve_device(device))
        request = Request(documents, prompts, skip, limit, max_tokens, seed)
        chosen = collect(request, looped, load_tokenizer(model), policies.pop())
        with going_on(journal, lambda line: typer.echo(line, err=True)), progress("measure") as report:
            results = measure_plans(
                looped,
                fingerprint,
                [plan for plan, _ in loaded],
                chosen,
                accept_weights=accept_weights,
                seed=seed,
                journal=journal,
                batch_documents=batch,
                on_progress=report,
            )
        if write:
            for result, (_, path) in zip(results, loaded, strict=True):
                if path is not None:
                    result.plan.save(path)
                    typer.echo(f"wrote {path}", err=True)
        if records is not None:
            append_records(records, measurement_records(results, seed))
        console().print(table(results))


def table(results: Sequence[PlanMeasurement]) -> Table:
    """Measured KL beside the prediction, one row a plan; bytes per history token; 80 columns are enough."""
    from rich.table import Table

    grid = Table(title="fp32 KL against the exact model, nats per token", box=None, padding=(0, 1, 0, 0))
    grid.add_column("plan", overflow="fold", min_width=12)
    for name in ("stored/read", "tau", "predicted", "measured", "95% interval", "ratio", "top-1"):
        grid.add_column(name, justify="right", no_wrap=True)
    for result in results:
        plan, measured, footprint = result.plan, result.measured, result.plan.footprint
        low, high = measured.kl_ci95_nats
        grid.add_row(
            plan.name,
            f"{footprint.stored_bytes}/{footprint.read_bytes}",
            "-" if plan.tau is None else f"{plan.tau:g}",
            "-" if plan.predicted is None else f"{plan.predicted.damage_nats:.2e}",
            f"{measured.kl_nats:.2e}",
            f"{low:.1e}-{high:.1e}" if len(result.kl_nats) > 1 else "1 document",
            "-" if result.ratio is None else f"{result.ratio:.2f}",
            f"{measured.top1_agreement:.2%}",
        )
    return grid
