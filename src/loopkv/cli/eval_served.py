"""``loopkv eval served``: the KL of what an engine serves, beside the fp32 reference policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.engine import EngineOption, engine_options
from loopkv.cli.model import ModelArgument
from loopkv.paths import check_output_file

if TYPE_CHECKING:
    from rich.table import Table

    from loopkv.eval.served import ServedKL


def add(group: typer.Typer) -> None:
    """Add the command."""

    @group.command()
    def served(
        model: ModelArgument,
        plans: Annotated[
            list[str], typer.Argument(help="Plan files, names such as kivi4, or 'stock' (no plan: the dtype's floor).")
        ],
        dtype: Annotated[str, typer.Option(metavar="float32|bfloat16", help="Of the engine.")] = "float32",
        documents: Annotated[
            Path | None,
            typer.Option(help="Texts: .jsonl or .jsonl.xz with a 'text' field, or .txt. Default: the held-out ones."),
        ] = None,
        limit: Annotated[int, typer.Option("--limit", min=1, help="Number of documents, served together.")] = 8,
        skip: Annotated[int, typer.Option("--skip", min=0, help="Pass over this many documents first.")] = 0,
        prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens prefilled; all later ones are decoded.")] = 319,
        max_tokens: Annotated[int, typer.Option(min=1, help="Cut documents to this many tokens.")] = 1024,
        pages: Annotated[int, typer.Option(min=0, help="History pages whose bytes are checked while serving.")] = 12,
        device: Annotated[
            str, typer.Option(help="Where the fp32 reference runs; the engine runs where vLLM was built for.")
        ] = "cpu",
        engine: EngineOption = "{}",
        seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and of the pages checked.")] = 0,
        records: Annotated[
            Path | None, typer.Option("--records", callback=check_output_file, help="Append Records to this file.")
        ] = None,
        accept_weights: Annotated[
            bool, typer.Option("--accept-weights", help="Allow plans made for a sibling checkpoint.")
        ] = False,
    ) -> None:
        """Force the tokens of documents through decode steps of a real engine and take the KL of what it predicts.

        In float32 the ratio to the reference policy says whether the engine serves what was profiled; in bfloat16
        compare with 'stock'. Pages are re-encoded while serving and compared byte for byte with what was stored.

        Example: [bold]loopkv eval served looped-tiny plan.json stock --dtype bfloat16 --records served.jsonl[/bold]
        """
        from loopkv import reference
        from loopkv.cli._render import console
        from loopkv.eval.served import STOCK, evaluate_served, served_records
        from loopkv.models import fingerprint_model, load_model, load_tokenizer, resolve_device
        from loopkv.planner.lookup import load_or_name
        from loopkv.policy import DEFAULT_POLICY
        from loopkv.profiler import load_documents
        from loopkv.records import append_records

        options = engine_options(engine)
        fingerprint = fingerprint_model(model)
        arms = [None if plan == STOCK else load_or_name(plan, fingerprint)[0] for plan in plans]
        looped = load_model(model, device=resolve_device(device))
        chosen = load_documents(
            documents or reference.heldout_path(),
            load_tokenizer(model),
            policy=next((plan.policy for plan in arms if plan is not None), DEFAULT_POLICY),
            vocab_size=looped.vocab_size,
            max_tokens=min(max_tokens, looped.max_positions),
            skip=skip,
            limit=limit,
        )
        results = evaluate_served(
            looped,
            model,
            fingerprint,
            arms,
            chosen.documents,
            prompt_tokens=prompt_tokens,
            dtype=dtype,
            engine=options,
            checked_pages=pages,
            accept_weights=accept_weights,
            seed=seed,
            say=lambda line: typer.echo(line, err=True),
            keep=None if records is None else lambda result: append_records(records, served_records([result])),
        )
        console().print(table(results))
        if any(r.byte_check is not None and r.byte_check.differing_bytes for r in results):
            raise typer.Exit(1)


def table(results: Sequence[ServedKL]) -> Table:
    """Served beside policy, one row an arm; a byte check that found a difference says where below."""
    from rich.table import Table

    caption = [
        f"{r.arm}: {r.byte_check.first_difference}"
        for r in results
        if r.byte_check is not None and r.byte_check.first_difference is not None
    ]
    grid = Table(
        title="KL against the exact fp32 model, nats per decoded token",
        caption="\n".join(caption) or None,
        box=None,
        padding=(0, 1, 0, 0),
    )
    grid.add_column("arm", overflow="fold", min_width=10)
    for name in ("dtype", "served", "policy", "ratio", "worst", "at", "top-1", "wrong bytes"):
        grid.add_column(name, justify="right", no_wrap=True)
    for r in results:
        check, policy = r.byte_check, r.policy_mean_nats
        grid.add_row(
            r.arm,
            r.dtype,
            f"{r.served_mean_nats:.3e}",
            "-" if policy is None else f"{policy:.3e}",
            "-" if r.ratio is None else f"{r.ratio:.4f}",
            f"{r.worst_nats:.1e}",
            f"{r.worst_document}:{r.worst_position}",
            f"{r.top1:.2%}",
            "-" if check is None else f"{check.differing_bytes} of {check.compared_bytes:,}",
        )
    return grid
