"""``loopkv bench decode``: decode throughput of several caches side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("decode")(decode_command)


def decode_command(
    arm: Annotated[
        list[str],
        typer.Option(metavar="[LABEL=]SPEC", help="stock, stock:fp8, a plan file or a plan name; repeat. Twice: A/A."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Records file; a run resumes from what it holds.")],
    geometry: Annotated[
        str | None, typer.Option(metavar="ouro-1.4b|ouro-2.6b|tiny", help="Dummy weights of this geometry.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the dummy model, instead of the geometry's.")] = None,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Ouro checkpoint instead of --geometry.")] = None,
    contexts: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of every request.")] = "8192,16384,32768",
    batches: Annotated[
        str, typer.Option(metavar="B,B,...", help="Rows: numbers, or shares of the resident peak.")
    ] = "1,peak/8,peak/4,peak/2,3peak/4,peak",
    steps: Annotated[int, typer.Option(help="Decode steps timed at the largest batch.")] = 128,
    arm_seconds: Annotated[float, typer.Option(metavar="S", help="Time budget of one arm.")] = 600.0,
    profile: Annotated[bool, typer.Option(help="Also GPU time by component and launches per step (CUDA).")] = False,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help="Options of vllm.LLM, e.g. '{\"gpu_memory_utilization\": 0.9}'.")
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    work: Annotated[Path, typer.Option(help="Folder for job files and logs.")] = Path("build/bench-decode"),
) -> None:
    """Measure decode steps of B resident requests, up to the resident peak, for every arm.

    Example: loopkv bench decode --geometry ouro-1.4b --arm bf16=stock --arm kivi4 --arm bf16=stock -o decode.jsonl
    """
    import json

    from loopkv.artifacts import Fingerprint
    from loopkv.bench.arms import parse_arms
    from loopkv.bench.decode import DecodeSettings, run_decode
    from loopkv.bench.dummy_model import dummy_shape, shape_size, write_dummy_model
    from loopkv.cli.capacity import _model_size
    from loopkv.cli.simulate import _numbers
    from loopkv.errors import LoopKVError
    from loopkv.models import fingerprint_model

    if (model is None) == (geometry is None):
        raise LoopKVError("bench decode", got="no or two models", wanted="--model FOLDER or --geometry NAME")
    try:
        options = json.loads(engine)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise LoopKVError("--engine", got=engine[:80], wanted="a JSON object")
    if geometry is not None:
        shape = dummy_shape(geometry, layers)
        size = shape_size(shape)
        folder = write_dummy_model(work / f"model-{geometry}-{size.geometry.layers}", shape)
        identity = Fingerprint(name=f"{geometry}, {size.geometry.layers} layers (dummy)", geometry=size.geometry)
    else:
        assert model is not None
        folder, size, identity = model, _model_size(model, None, None), fingerprint_model(model)
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
        profile=profile,
        seed=seed,
    )
    records = run_decode(settings, lambda line: typer.echo(line, err=True))
    for record in records:
        s = record.settings
        if record.what == "decode.tok_s":
            typer.echo(f"{s['arm']}: context {s['context_tokens']}, batch {s['batch']}: {record.value:,.1f} tok/s")
    typer.echo(f"{output}: {len(records)} records; loopkv report {output} -o report.html", err=True)
