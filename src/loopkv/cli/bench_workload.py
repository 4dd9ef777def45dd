"""``loopkv bench workload``: write a workload file of stated traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loopkv.cli.model import FOLDER_OR_NAME, parse_model
from loopkv.paths import check_output_file


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def workload(
        output: Annotated[
            Path, typer.Option("--output", "-o", callback=check_output_file, help="JSON-lines file to write.")
        ],
        traffic: Annotated[
            str, typer.Option(help="reasoning (mean output 11K, maximum length 16K) or small.")
        ] = "reasoning",
        requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 60,
        seed: Annotated[
            int, typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the lengths and the prompt text.")
        ] = 101,
        mean_output: Annotated[
            float | None, typer.Option(help="Mean output tokens, in place of the traffic's own.")
        ] = None,
        max_length: Annotated[
            int | None, typer.Option(help="Maximum total tokens, in place of the traffic's own.")
        ] = None,
        model: Annotated[
            Path | None,
            typer.Option(
                parser=parse_model,
                metavar=FOLDER_OR_NAME,
                help="Model whose tokenizer makes prompt text of each length.",
            ),
        ] = None,
        rate: Annotated[
            float | None, typer.Option(help="Also write Poisson arrival times at this many requests/s.")
        ] = None,
    ) -> None:
        """Write a workload of decode-heavy, reasoning-like requests.

        Example: [bold]loopkv bench workload -o work.jsonl --requests 60 --seed 101[/bold]
        """
        import dataclasses

        from loopkv.bench.prompts import FolderTokenizer, fill_prompts
        from loopkv.bench.workload import (
            TRAFFICS,
            decode_context_tokens,
            generate,
            with_arrivals,
            workload_sha256,
            write_workload,
        )
        from loopkv.errors import LoopKVError

        if traffic not in TRAFFICS:
            raise LoopKVError("traffic", got=repr(traffic), wanted=" or ".join(TRAFFICS))
        chosen = TRAFFICS[traffic]
        if mean_output is not None:
            chosen = dataclasses.replace(chosen, mean_output_tokens=mean_output)
        if max_length is not None:
            chosen = dataclasses.replace(chosen, max_length_tokens=max_length)
        drawn = generate(chosen, requests, seed)
        if model is not None:
            drawn = fill_prompts(drawn, FolderTokenizer(model), seed)
        if rate is not None:
            drawn = with_arrivals(drawn, rate, seed)
        write_workload(output, drawn)
        mean = sum(r.output_tokens for r in drawn) / len(drawn)
        typer.echo(chosen.describe())
        typer.echo(
            f"{output}: {len(drawn)} requests, mean output {mean:,.0f} tokens, mean context of a decode step "
            f"{decode_context_tokens(drawn):,.0f} tokens, sha256 {workload_sha256(drawn)[:12]}"
        )
