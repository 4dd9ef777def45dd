"""``loopkv bench decode``: decode throughput of several caches side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loopkv.records import Record

from loopkv.cli.engine import EngineOption, engine_options
from loopkv.cli.model import FOLDER_OR_NAME, parse_model
from loopkv.paths import check_output_file, check_output_folder

WIDTH = 120


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("decode")(decode_command)


def decode_command(
    arm: Annotated[
        list[str],
        typer.Option(metavar="[LABEL=]SPEC", help="stock, stock:fp8, a plan file or a plan name; repeat. Twice: A/A."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", callback=check_output_file, help="Records file; a run resumes from what it holds."
        ),
    ],
    geometry: Annotated[
        str | None, typer.Option(metavar="ouro-1.4b|ouro-2.6b|tiny", help="Dummy weights of this geometry.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the dummy model, instead of the geometry's.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(parser=parse_model, metavar=FOLDER_OR_NAME, help="Ouro checkpoint instead of --geometry."),
    ] = None,
    contexts: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of every request.")] = "8192,16384,32768",
    batches: Annotated[
        str, typer.Option(metavar="B,B,...", help="Rows: numbers, or fractions of the resident peak.")
    ] = "1,peak/8,peak/4,peak/2,3peak/4,peak",
    steps: Annotated[int, typer.Option(help="Decode steps timed at the largest batch.")] = 128,
    arm_seconds: Annotated[float, typer.Option(metavar="S", help="Time budget of one arm.")] = 600.0,
    components: Annotated[
        bool, typer.Option("--components", help="Also GPU time by component and launches per step (CUDA).")
    ] = False,
    ttft: Annotated[
        bool, typer.Option("--ttft", help="Also time to first token and prefill throughput (really prefills).")
    ] = False,
    ttft_prompts: Annotated[int, typer.Option(metavar="N", help="Prompts at once for the throughput.")] = 16,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Prefill the requests of decode rows instead of generating their caches.")
    ] = False,
    hot_share: Annotated[
        float, typer.Option(metavar="0..1", help="Fraction of generated history that is hot at 14 bits.")
    ] = 0.2,
    engine: EngineOption = "{}",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    work: Annotated[Path, typer.Option(callback=check_output_folder, help="Folder for job files and logs.")] = Path(
        "build/bench-decode"
    ),
) -> None:
    """Measure decode steps of B resident requests, up to the resident peak, for every arm.

    Dummy weights are drawn so that activations and scores are those of a healthy network, and the requests' caches are
    generated instead of prefilled: a row costs seconds. V precision finds --hot-share of the history hot.

    Example: loopkv bench decode --geometry ouro-1.4b --arm bf16=stock --arm kivi4 --arm bf16=stock -o decode.jsonl
    """
    from loopkv.artifacts import Fingerprint
    from loopkv.bench.arms import parse_arms
    from loopkv.bench.decode import DecodeSettings, run_decode
    from loopkv.bench.dummy_model import dummy_shape, shape_size, write_dummy_model
    from loopkv.bench.place import this_place
    from loopkv.cli.capacity import _model_size
    from loopkv.cli.simulate import _numbers
    from loopkv.errors import LoopKVError
    from loopkv.models import fingerprint_model

    if (model is None) == (geometry is None):
        raise LoopKVError("bench decode", got="no or two models", wanted="--model FOLDER or --geometry NAME")
    options = engine_options(engine)
    if geometry is not None:
        shape = dummy_shape(geometry, layers)
        size = shape_size(shape)
        folder = write_dummy_model(work / f"model-{geometry}-{size.geometry.layers}", shape)
        identity = Fingerprint(name=f"{geometry}, {size.geometry.layers} layers (dummy)", geometry=size.geometry)
    else:
        assert model is not None
        folder, size, identity = model, _model_size(model, None, None, "loopkv bench decode"), fingerprint_model(model)
    settings = DecodeSettings(
        model=folder,
        dummy=geometry is not None,
        identity=identity,
        step_parameters=size.step_parameters,
        arms=parse_arms(arm),
        contexts=tuple(int(value) for value in _numbers(contexts, "--contexts")),
        batches=tuple(part.strip() for part in batches.split(",") if part.strip()),
        output=output,
        work=work,
        engine=options,
        arm_seconds=arm_seconds,
        decode_steps=steps,
        components=components,
        ttft=ttft,
        ttft_prompts=ttft_prompts,
        prefill=prefill,
        hot_share=hot_share,
        seed=seed,
    )
    records = run_decode(settings, lambda line: typer.echo(line, err=True))
    hardware = this_place().hardware  # what other machines measured is in the report
    print_decode([record for record in records if record.hardware == hardware])
    typer.echo(f"{output}: {len(records)} records; loopkv report {output} -o report.html", err=True)


def print_decode(records: Sequence[Record]) -> None:
    """The report's tables of decode Records on a terminal: sweeps with ratios and matched time, the step-time model."""
    from rich.console import Console
    from rich.table import Table as Grid

    from loopkv.cli._render import console
    from loopkv.report.page import Table
    from loopkv.report.sections.decode import decode_section

    screen = console()
    if not screen.is_terminal and screen.width < WIDTH:
        screen = Console(highlight=False, markup=False, emoji=False, width=WIDTH)
    section = decode_section(records)
    for table in (block for block in section.blocks if isinstance(block, Table)) if section is not None else ():
        grid = Grid(title=table.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for index, column in enumerate(table.columns):
            numeric = index in table.numeric
            grid.add_column(column, justify="right" if numeric else "left", no_wrap=index == 0, overflow="fold")
        for row in table.rows:
            grid.add_row(*(str(cell) for cell in row))
        screen.print(grid)
