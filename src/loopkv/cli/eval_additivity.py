"""``loopkv eval additivity``: predicted against measured KL, and the planner against hand-made plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.documents import DEFAULT_TOKENS, SeedOption, TokensOption, check_documents_file
from loopkv.cli.model import ModelArgument
from loopkv.paths import check_output_file

if TYPE_CHECKING:
    from rich.table import Table

    from loopkv.eval.additivity import AdditivityStudy


def add(group: typer.Typer) -> None:
    """Add the subcommand."""

    @group.command()
    def additivity(
        model: ModelArgument,
        profile: Annotated[Path, typer.Argument(help="Profile made on the first documents of the file.")],
        documents: Annotated[Path, typer.Option("--documents", help="The file of texts the profile was made on.")],
        unseen: Annotated[int, typer.Option(min=1, help="Number of documents after the profile's.")] = 8,
        max_tokens: TokensOption = DEFAULT_TOKENS,
        budgets: Annotated[
            str, typer.Option(help="stored/read bytes per history token, compared with per-loop plans.")
        ] = "6912/6912,6144/6144,4992/6912,3840/7680",
        every_budget: Annotated[
            bool, typer.Option(help="Also compare at the bytes of every per-loop and per-layer plan (long).")
        ] = True,
        records: Annotated[
            Path | None, typer.Option("--records", callback=check_output_file, help="Append Records to this file.")
        ] = None,
        journal: Annotated[
            Path | None,
            typer.Option(
                "--journal",
                callback=check_output_file,
                help="Measurements so far; a later run continues from them. Default: FILE.journal of the --records "
                "file, or PROFILE.additivity.journal.",
            ),
        ] = None,
        seed: SeedOption = 0,
        device: Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda.")] = "cpu",
    ) -> None:
        """Compare predicted and measured KL over a fixed list of plans, and the planner with hand-made plans.

        Example: [bold]loopkv eval additivity Ouro-1.4B profile.json --documents texts.jsonl --records out.jsonl[/bold]
        """
        from loopkv.artifacts import Profile
        from loopkv.cli._render import console
        from loopkv.cli.progress import progress
        from loopkv.eval.additivity import study_additivity, study_records
        from loopkv.models import fingerprint_model, load_model, load_tokenizer, resolve_device
        from loopkv.profiler import load_documents
        from loopkv.profiler.journal import going_on
        from loopkv.records import append_records

        limits = _budgets(budgets)
        check_documents_file(documents)
        kept = journal or check_output_file(journal_beside(profile, records))
        made = Profile.load(profile)
        fingerprint = fingerprint_model(model)
        made.fingerprint.check_serves(fingerprint, f"profile {profile}")
        looped = load_model(model, device=resolve_device(device))
        count = len(made.documents)
        chosen = load_documents(
            documents,
            load_tokenizer(model),
            policy=made.policy,
            vocab_size=looped.vocab_size,
            max_tokens=min(max_tokens, looped.max_positions),
            limit=count + unseen,
        ).documents
        with going_on(kept, lambda line: typer.echo(line, err=True)), progress("additivity") as report:
            study = study_additivity(
                looped,
                fingerprint,
                made,
                chosen[:count],
                chosen[count:],
                limits,
                every_budget=every_budget,
                journal=kept,
                seed=seed,
                on_progress=report,
            )
        if records is not None:
            append_records(records, study_records(study, seed))
        out = console()
        for grid in tables(study):
            out.print(grid)


def journal_beside(profile: Path, records: Path | None) -> Path:
    """Where the measurements so far are kept unless the user says: beside the records, or else the profile."""
    if records is not None:
        return records.with_name(records.name + ".journal")
    return profile.with_name(profile.name + ".additivity.journal")


def _budgets(text: str) -> list[tuple[int, int]]:
    from loopkv.errors import LoopKVError

    try:
        pairs = [part.split("/") for part in text.split(",") if part.strip()]
        return [(int(stored), int(read)) for stored, read in pairs]
    except ValueError:
        raise LoopKVError("--budgets", got=repr(text)[:80], wanted="pairs such as 6912/6912,4992/6912") from None


def tables(study: AdditivityStudy) -> Iterator[Table]:
    """The study as tables of 80 columns."""
    from rich.table import Table

    for one in study.lists:
        low, high = one.ratios
        title = (
            f"{one.documents} documents: {len(one.results)} plans, log-log correlation {one.correlation:.4f}, "
            f"measured / predicted {low:.2f} to {high:.2f}"
        )
        grid = Table(title=title, box=None, padding=(0, 2, 0, 0))
        for name in ("plan", "predicted nats", "measured nats", "ratio"):
            grid.add_column(name, justify="left" if name == "plan" else "right")
        for result in (*one.results, *one.left_out):
            predicted = result.plan.predicted
            grid.add_row(
                result.plan.name + (" (left out)" if result in one.left_out else ""),
                "-" if predicted is None else f"{predicted.damage_nats:.3e}",
                f"{result.measured.kl_nats:.3e}",
                "-" if result.ratio is None else f"{result.ratio:.2f}",
            )
        yield grid
    for table in study.tables:
        title = (
            f"planner against the best {table.family} plan, {table.documents} documents: worst {table.worst_ratio:.3f}"
        )
        grid = Table(title=title, box=None, padding=(0, 2, 0, 0))
        for name in ("stored/read B", "planner nats", "best nats", "ratio", "best hand-made plan"):
            grid.add_column(name, justify="left" if name.startswith("best h") else "right")
        for row in table.rows:
            grid.add_row(
                f"{row.stored_bytes}/{row.read_bytes}",
                f"{row.planner.measured.kl_nats:.3e}",
                f"{row.best.measured.kl_nats:.3e}",
                f"{row.ratio:.3f}",
                row.best.plan.name,
            )
        yield grid
