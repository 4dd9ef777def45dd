"""``loopkv tau``: choose the V-precision threshold of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.documents import (
    DEFAULT_LIMIT,
    DEFAULT_TOKENS,
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

    from loopkv.profiler import TauSweep


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def tau(
        model: ModelArgument,
        plan: Annotated[str, typer.Argument(help="Plan file, or a name such as kivi4 (then give --output).")],
        output: Annotated[
            Path | None,
            typer.Option(
                "--output", "-o", callback=check_output_file, help="Plan to write. Default: the plan file itself."
            ),
        ] = None,
        candidates: Annotated[str, typer.Option(help="Thresholds to try, in bits.")] = "10,12,14,16",
        tolerance: Annotated[float, typer.Option(help="Fraction by which the KL may grow.")] = 0.02,
        documents: DocumentsOption = None,
        prompts: PromptsOption = None,
        limit: LimitOption = DEFAULT_LIMIT,
        skip: SkipOption = 0,
        max_tokens: TokensOption = DEFAULT_TOKENS,
        seed: SeedOption = 0,
        device: Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda.")] = "cpu",
        accept_weights: Annotated[
            bool, typer.Option("--accept-weights", help="Allow a plan made for a sibling checkpoint.")
        ] = False,
    ) -> None:
        """Write into a plan the smallest threshold whose KL is within the tolerance of reading both value planes.

        Example: [bold]loopkv tau Ouro-1.4B plan.json --documents texts.jsonl[/bold]
        """
        from loopkv.artifacts.storage import check_replaces
        from loopkv.cli._render import console
        from loopkv.cli.documents import collect
        from loopkv.cli.progress import progress
        from loopkv.errors import LoopKVError
        from loopkv.models import fingerprint_model, load_model, load_tokenizer, resolve_device
        from loopkv.planner.lookup import load_or_name
        from loopkv.profiler import tau as sweep_tau
        from loopkv.profiler.thresholds import check_sweep

        check_documents_file(documents)
        thresholds = _thresholds(candidates)
        fingerprint = fingerprint_model(model)
        loaded, path = load_or_name(plan, fingerprint)
        target = output or path
        if target is None:
            raise LoopKVError(f"plan {plan!r}", got="a name", wanted="--output", hint="name the plan file to write")
        check_output_file(target)
        check_replaces(target, "plan")
        check_sweep(loaded, thresholds, tolerance)
        loaded.check_serves(fingerprint, accept_weights=accept_weights)
        looped = load_model(model, device=resolve_device(device))
        request = Request(documents, prompts, skip, limit, max_tokens, seed)
        chosen = collect(request, looped, load_tokenizer(model), loaded.policy)
        with progress("tau") as report:
            sweep = sweep_tau(
                looped,
                fingerprint,
                loaded,
                chosen,
                candidates=thresholds,
                tolerance=tolerance,
                accept_weights=accept_weights,
                seed=seed,
                on_progress=report,
            )
        sweep.plan.save(target)
        console().print(table(sweep))
        if sweep.plan.tau is None:
            typer.echo(f"no threshold keeps the KL within {tolerance:.0%} of full reads: both planes are always read")
        else:
            typer.echo(f"tau {sweep.plan.tau:g}")
        typer.echo(f"wrote {target}")


def _thresholds(text: str) -> list[float]:
    from loopkv.errors import LoopKVError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise LoopKVError("--candidates", got=repr(text)[:80], wanted="numbers such as 10,12,14,16") from None


def table(sweep: TauSweep) -> Table:
    """KL and hot share per loop at every threshold."""
    from rich import box
    from rich.table import Table

    loops = sweep.plan.fingerprint.geometry.loops
    grid = Table(title=f"V precision of {sweep.plan.name}: KL and share of history tokens read in full", box=box.SIMPLE)
    for name in ("tau", "KL nats", "growth", *(f"hot L{loop + 1}" for loop in range(loops))):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_row("none", f"{sweep.full.measured.kl_nats:.4e}", "1.000", *("100%",) * loops)
    for point in sweep.points:
        shares = ("-" if share is None else f"{share:.1%}" for share in point.loop_hot_share())
        grid.add_row(f"{point.plan.tau:g}", f"{point.measured.kl_nats:.4e}", f"{sweep.growth(point):.3f}", *shares)
    return grid
