"""``loopkv bench slo``: goodput under a latency objective against a real server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.model import FOLDER_OR_NAME, parse_model
from loopkv.paths import check_output_file, check_output_folder

if TYPE_CHECKING:
    from loopkv.bench.slo_run import SloResult, SloSettings

MAX_POOL_GIB = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("slo")(slo_command)


def slo_command(
    workload: Annotated[Path, typer.Argument(help="Workload file (loopkv bench workload).")],
    arm: Annotated[
        list[str], typer.Option(metavar="[LABEL=]SPEC", help="stock, stock:fp8, a plan file or a plan name; repeat.")
    ],
    rates: Annotated[
        list[str],
        typer.Option(metavar="[LABEL=]R,R,...", help="Rungs: arrival rates in requests/s, of all arms or of one."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", callback=check_output_file, help="Records file; a run resumes from what it holds."
        ),
    ],
    model: Annotated[
        Path | None, typer.Option(parser=parse_model, metavar=FOLDER_OR_NAME, help="Checkpoint to serve.")
    ] = None,
    geometry: Annotated[
        str | None, typer.Option(metavar="ouro-1.4b|ouro-2.6b|tiny", help="Dummy weights instead of --model.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the dummy model, instead of the geometry's.")] = None,
    seeds: Annotated[str, typer.Option(metavar="N,N,...", help="Seeds of the arrivals.")] = "101,102,103",
    k: Annotated[str, typer.Option(metavar="K,K,...", help="TPOT bounds in tau0.")] = "2,3,5",
    ttft: Annotated[
        str,
        typer.Option(
            metavar="S,S,...", help="TTFT bounds in seconds; the first at every k, others at 3 tau0 or --find."
        ),
    ] = "10,5,20",
    tau0: Annotated[float | None, typer.Option(metavar="MS", help="tau0, instead of measuring stock vLLM.")] = None,
    pool: Annotated[
        float | None, typer.Option(metavar="GIB", help="KV pool of every arm (--kv-cache-memory-bytes).")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Start no cell that would end later; 0: only score.")
    ] = None,
    natural_end: Annotated[bool, typer.Option(help="Let answers end by themselves (output_tokens caps them).")] = False,
    all_rungs: Annotated[bool, typer.Option(help="Also run rungs above one that fails every bound.")] = False,
    find: Annotated[
        float | None,
        typer.Option(
            metavar="K", help="Bisect --rates: only the rungs that find the capacity at K tau0 (scored besides --k)."
        ),
    ] = None,
    together: Annotated[
        bool, typer.Option(help="Start all servers at once (they must fit the GPU together); rungs take turns.")
    ] = False,
    work: Annotated[Path, typer.Option(callback=check_output_folder, help="Folder for logs and scratch files.")] = Path(
        "build/bench-slo"
    ),
    server_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="ARG", help="Further argument of vllm serve, e.g. --server-arg=--enforce-eager."),
    ] = None,
) -> None:
    """Measure capacity under a latency objective: calibrate tau0, climb the ladder of every arm, score.

    Example: loopkv bench slo work.jsonl --model ./Ouro-1.4B --arm stock --arm kivi4 --rates 0.04,0.06,0.08 -o slo.jsonl
    """
    from loopkv.artifacts import Fingerprint
    from loopkv.bench.arms import parse_arms
    from loopkv.bench.dummy_model import dummy_shape, shape_size, write_dummy_model
    from loopkv.bench.prompts import FolderTokenizer
    from loopkv.bench.slo_run import SloSettings, run_slo
    from loopkv.bench.workload import read_workload
    from loopkv.cli.simulate import _numbers
    from loopkv.errors import LoopKVError
    from loopkv.models import fingerprint_model

    if (model is None) == (geometry is None):
        raise LoopKVError("bench slo", got="no or two models", wanted="--model FOLDER or --geometry NAME")
    arguments = list(server_arg or [])
    if geometry is not None:
        shape = dummy_shape(geometry, layers)
        size = shape_size(shape)
        model = write_dummy_model(work / f"model-{geometry}-{size.geometry.layers}", shape)
        identity = Fingerprint(name=f"{geometry}, {size.geometry.layers} layers (dummy)", geometry=size.geometry)
        arguments += ["--load-format", "dummy"]
    else:
        assert model is not None
        identity = fingerprint_model(model)
    if pool is not None and not 0 < pool < MAX_POOL_GIB:
        raise LoopKVError("--pool", got=f"{pool:g} GiB", wanted=f"above 0 and below {MAX_POOL_GIB} GiB")
    if pool is not None and _gives(arguments, "--kv-cache-memory-bytes"):
        raise LoopKVError("--pool", got="--server-arg=--kv-cache-memory-bytes besides", wanted="one of the two")
    shared, single = _rates(rates)
    ks = tuple(_numbers(k, "--k"))
    tokenizer = FolderTokenizer(model)
    requests = read_workload(workload, tokenizer.count)
    longest = max(request.length_tokens for request in requests)
    arguments += ["--max-model-len", str(longest)] if not _gives(arguments, "--max-model-len") else []
    arguments += ["--kv-cache-memory-bytes", str(round(pool * (1 << 30)))] if pool is not None else []
    settings = SloSettings(
        model=model,
        identity=identity,
        requests=requests,
        tokenizer=tokenizer,
        arms=parse_arms(arm),
        rates_per_s=shared,
        arm_rates=single,
        seeds=_seeds(seeds),
        output=output,
        work=work,
        ks=ks if find is None or find in ks else (*ks, find),
        ttfts_s=tuple(_numbers(ttft, "--ttft")),
        tau0_ms=tau0,
        server_arguments=tuple(arguments),
        ignore_eos=not natural_end,
        climb_past_failure=all_rungs,
        find_k=find,
        together=together,
        max_seconds=max_seconds,
    )
    result = run_slo(settings, lambda line: typer.echo(line, err=True), lambda ended: _end(ended, settings))
    _end(result, settings)
    typer.echo(f"{output}: {len(result.records)} records; loopkv report {output} -o report.html", err=True)
    if result.failures:
        labels = ", ".join(result.failures)
        raise LoopKVError(
            "bench slo",
            got=f"arms that did not come to their end: {labels}"[:300],
            hint="see above; run again to go on",
        )


def _gives(arguments: Sequence[str], option: str) -> bool:
    """Whether arguments of ``vllm serve`` give an option, in any of the ways that it takes."""
    return any(one.partition("=")[0].replace("_", "-") == option for one in arguments)


def _rates(texts: Sequence[str]) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Rungs of all arms, and those of single arms by label."""
    from loopkv.cli.simulate import _numbers
    from loopkv.errors import LoopKVError

    shared: list[float] = []
    single: dict[str, tuple[float, ...]] = {}
    for text in texts:
        label, equals, numbers = text.rpartition("=")
        if not equals:
            shared += _numbers(text, "--rates")
        elif label in single:
            raise LoopKVError(f"--rates of {label}"[:120], got="two lists", wanted="one list of all its rungs")
        else:
            single[label] = tuple(_numbers(numbers, "--rates"))
    return tuple(shared), single


def _seeds(text: str) -> tuple[int, ...]:
    from loopkv.errors import LoopKVError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 10 for part in parts):
        raise LoopKVError(
            "--seeds", got=repr(text)[:80], wanted="whole numbers from 0 to 2^32 - 1, separated by commas"
        )
    return tuple(map(int, parts))


def _end(result: SloResult, settings: SloSettings) -> None:
    """What a run has come to, and by name what it has left."""
    if result.scores:
        _print(result, settings)
    if result.left:
        which = "left" if settings.find_k is None else "left (of a bisection, its next rung)"
        typer.echo(f"{which}: {', '.join(result.left)}; run the same command again to go on", err=True)


def _print(result: SloResult, settings: SloSettings) -> None:
    """Capacities at the first TTFT bound; the others are in the Records."""
    from rich.table import Table

    from loopkv.bench.slo import AT_LEAST
    from loopkv.cli._render import console

    ttft = settings.ttfts_s[0]
    table = Table(box=None, padding=(0, 1), title=f"capacity in requests/s, TTFT <= {ttft:g} s", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for title in ("seed", "tau0 ms", *(f"{k:g} tau0" for k in settings.ks)):
        table.add_column(title, justify="right")
    rows: dict[tuple[str, int | None, str], dict[float, str]] = {}
    for record in result.scores:
        s = record.settings
        if record.what != "slo.capacity" or s["ttft_s"] != ttft:
            continue
        text = f"<{s['lowest_rate']:g}" if record.value is None else f"{record.value:g}"
        text = f">={text}" if s["bound"] == AT_LEAST else text
        place = (s["arm"], record.seed, f"{s['tau0_ms']:.2f} {s['tau0_rule']}")
        rows.setdefault(place, {})[s["k"]] = text
    for (arm, seed, tau0), found in rows.items():
        table.add_row(arm, str(seed), tau0, *(found.get(k, "-") for k in settings.ks))
    console().print(table)
