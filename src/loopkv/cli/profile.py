"""``loopkv profile``: measure the damage of every cell alone under every option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def profile(
        model: ModelArgument,
        output: Annotated[Path, typer.Option("--output", "-o", callback=check_output_file, help="Profile to write.")],
        documents: DocumentsOption = None,
        prompts: PromptsOption = None,
        limit: LimitOption = DEFAULT_LIMIT,
        skip: SkipOption = 0,
        max_tokens: TokensOption = DEFAULT_TOKENS,
        seed: SeedOption = 0,
        batch: BatchOption = None,
        device: Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda.")] = "cpu",
        records: Annotated[
            Path | None,
            typer.Option("--records", callback=check_output_file, help="Append a Record of KL_share to this file."),
        ] = None,
        restart: Annotated[bool, typer.Option("--restart", help="Drop what an interrupted run left.")] = False,
    ) -> None:
        """Measure the damage of every cell alone under int4, int2 and share, in fp32.

        A run that was killed continues where it stopped when the same command is given again.

        Example: [bold]loopkv profile Ouro-1.4B -o profile.json --documents texts.jsonl --limit 16[/bold]
        """
        from loopkv.artifacts.storage import check_replaces
        from loopkv.cli._render import console, print_profile
        from loopkv.cli.documents import collect
        from loopkv.cli.progress import progress
        from loopkv.inspection import profile_warnings
        from loopkv.models import fingerprint_model, load_model, load_tokenizer, resolve_device
        from loopkv.policy import DEFAULT_POLICY
        from loopkv.profiler import profile as measure_profile
        from loopkv.profiler.journal import count_kept, going_on
        from loopkv.profiler.profiling import profile_key, profile_records
        from loopkv.records import append_records

        check_documents_file(documents)
        check_replaces(output, "profile")
        looped = load_model(model, device=resolve_device(device))
        tokenizer = load_tokenizer(model)
        request = Request(documents, prompts, skip, limit, max_tokens, seed)
        chosen = collect(request, looped, tokenizer, DEFAULT_POLICY)
        journal = output.with_name(output.name + ".journal")
        fingerprint = fingerprint_model(model)
        kept = 0 if restart else count_kept(journal, profile_key(fingerprint, chosen, DEFAULT_POLICY))
        if kept:
            typer.echo(f"resuming: {kept:,} measurements found in {journal}", err=True)
        with going_on(journal, lambda line: typer.echo(line, err=True)), progress("profile") as report:
            made = measure_profile(
                looped,
                fingerprint,
                chosen,
                journal=journal,
                restart=restart,
                batch_documents=batch,
                provenance={"seed": seed} if documents is None else {},
                on_progress=report,
            )
        made.save(output)
        journal.unlink(missing_ok=True)
        if records is not None:
            append_records(records, profile_records(made))
        print_profile(made, profile_warnings(made), console())
        typer.echo(f"wrote {output} ({made.provenance['seconds']:.0f} s)")
