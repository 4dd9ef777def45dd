"""``loopkv simulate``: what a plan would sustain on a GPU, replayed from a workload."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.capacity import GPU_NAMES
from loopkv.cli.model import FOLDER_OR_NAME, model_name, parse_model
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.paths import check_input_file, check_output_file

if TYPE_CHECKING:
    from loopkv.bench.simulate_study import SimulationStudy
    from loopkv.bench.slo import LadderCapacity


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("simulate")(simulate_command)


def simulate_command(
    workload: Annotated[Path, typer.Argument(help="Workload file (loopkv bench workload), or a trace with arrival_s.")],
    arm: Annotated[
        list[str], typer.Option(metavar="[LABEL=]SPEC", help="stock, stock:fp8, a plan file or a plan name; repeat.")
    ],
    geometry: Annotated[str | None, typer.Option(metavar="ouro-1.4b|ouro-2.6b|tiny", help="A known model.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, instead of the geometry's (as for bench slo).")] = None,
    model: Annotated[
        Path | None,
        typer.Option(parser=parse_model, metavar=FOLDER_OR_NAME, help="Checkpoint instead of --geometry."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help=GPU_NAMES)] = None,
    bandwidth: Annotated[float | None, typer.Option(metavar="TB/S", help="Effective bandwidth of a step.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory.")] = None,
    t_fix: Annotated[float | None, typer.Option(metavar="MS", help="Fixed time of a step of 96 cells.")] = None,
    fit: Annotated[
        Path | None,
        typer.Option(metavar="RECORDS", help="Fit each arm to its decode.step_ms Records, or to its slo.cell Records."),
    ] = None,
    pool: Annotated[float | None, typer.Option(metavar="GIB", help="KV pool, instead of the GPU's.")] = None,
    utilization: Annotated[float | None, typer.Option(metavar="0..1", help="Fraction of GPU memory in use.")] = None,
    prefill_rate: Annotated[
        float, typer.Option(metavar="TOK/S", help="Prompt tokens computed per second (an assumption; printed).")
    ] = 20_000.0,
    hot_share: Annotated[
        float, typer.Option(metavar="0..1", help="Fraction of hot tokens (both planes read) where a plan sets tau.")
    ] = 1.0,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="Arrival rates; found by itself if left out.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N,N,...", help="Seeds of the arrivals.")] = "101",
    tau0: Annotated[float | None, typer.Option(metavar="MS", help="tau0; by default stock's predicted step.")] = None,
    tau0_rule: Annotated[str, typer.Option(help="Context that tau0 is taken at: short or own (see docs).")] = "short",
    k: Annotated[str, typer.Option(metavar="K,K,...", help="TPOT bounds in tau0.")] = "2,3,5",
    ttft: Annotated[str, typer.Option(metavar="S,S,...", help="TTFT bounds in seconds.")] = "10",
    max_running: Annotated[int, typer.Option(help="Most running requests (max_num_seqs).")] = 256,
    max_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 8192,
    watermark: Annotated[
        str, typer.Option(metavar="0..1", help="Share of the pool that admissions leave free (vLLM's --watermark).")
    ] = "0",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=check_output_file, help="Append Records to this file.")
    ] = None,
) -> None:
    """Replay a workload through the step-time model and true block counts: attainment by rate, and capacity.

    Example: loopkv simulate work.jsonl --geometry ouro-1.4b --gpu H200 --arm stock --arm kivi4 --arm memory.json
    """
    check_input_file(workload, "workload", LoopKVError, "a readable JSON-lines file")
    if fit is not None:
        check_input_file(fit, "records", LoopKVError, "a readable JSON-lines file")

    from loopkv.artifacts import Fingerprint
    from loopkv.bench.arms import parse_arms
    from loopkv.bench.cache_arms import cache_arm
    from loopkv.bench.dummy_model import dummy_shape, shape_size
    from loopkv.bench.simulate import EngineModel
    from loopkv.bench.simulate_study import simulate_study, study_records
    from loopkv.bench.slo import Bounds, tau0_context_tokens
    from loopkv.bench.step_fit import fit_cache_arm
    from loopkv.bench.workload import read_workload
    from loopkv.capacity import predict_capacity
    from loopkv.capacity.prediction import DEFAULT_UTILIZATION
    from loopkv.cli.capacity import _gpu, _model_size
    from loopkv.records import append_records, read_records

    if model is not None and geometry is not None:
        raise UnsupportedError("loopkv simulate", got="--model and --geometry", wanted="one of the two")
    for option, value in (("--pool", pool), ("--tau0", tau0)):
        if value is not None and not 0 < value < 1e9:
            raise UnsupportedError(option, got=value, wanted="a number > 0")
    if not 0 <= hot_share <= 1:
        raise UnsupportedError("--hot-share", got=hot_share, wanted="a share from 0 to 1")
    free_share = _watermark(watermark)
    starts = _seeds(seeds)
    requests = read_workload(workload)
    name = geometry or model_name(model)
    if layers is not None:
        if geometry is None:
            raise UnsupportedError("--layers", got="no --geometry", wanted="a known geometry to cut")
        size = shape_size(dummy_shape(geometry, layers))
        name = f"{geometry}, {layers} layers (dummy)"
    else:
        size = _model_size(model, geometry, None, "loopkv simulate")
    identity = Fingerprint(name=name, geometry=size.geometry)
    context = tau0_context_tokens(requests, tau0_rule)
    prediction = predict_capacity(
        [],
        size,
        _gpu(gpu, memory, bandwidth, t_fix, memory_used=pool is None),
        round(context),
        utilization=DEFAULT_UTILIZATION if utilization is None else utilization,
    )
    longest = max(request.length_tokens for request in requests)
    measured = list(read_records([fit])) if fit is not None else []
    names = {name, Path(name).name}
    if geometry is not None:
        names.add(f"{geometry}, {size.geometry.layers} layers (dummy)")
    pairs, fits, warnings = [], [], []
    stock_time = prediction.step_time
    for spec in parse_arms(arm):
        cache = cache_arm(spec, identity, longest, hot_share=hot_share)
        step_time = prediction.step_time
        if fit is not None:
            found = fit_cache_arm(measured, cache, step_time.weight_bytes, names, str(fit))
            step_time = found.model
            fits.append(f"{spec.label}: {found.describe()}")
            warnings += [f"{spec.label}: {text}" for text in found.warnings()]
            stock_time = step_time if spec.stock and spec.kv_cache_dtype == "auto" else stock_time
        pool_bytes = prediction.pool_bytes if pool is None else round(pool * (1 << 30))
        engine = EngineModel(step_time, pool_bytes, prefill_rate, max_batched_tokens, max_running, free_share)
        pairs.append((cache, engine))
    if tau0 is None:
        exact = len(size.geometry.cells) * 4 * size.geometry.kv_heads * size.geometry.head_dim
        tau0 = stock_time.step_s(1, context * exact) * 1e3
    bounds = [Bounds(t, one, tau0 / 1e3) for t in _numbers(ttft, "--ttft") for one in _numbers(k, "--k")]
    constants = f"fitted to {fit.name}" if fit is not None else prediction.gpu.source
    told = f"; watermark {free_share:g}" if free_share else ""
    study = simulate_study(
        requests,
        pairs,
        bounds,
        rates_per_s=None if rates is None else _numbers(rates, "--rates"),
        seeds=starts,
        gpu=prediction.gpu.name,
        constants=f"{constants}; prefill {prefill_rate:g} tok/s assumed{told}",
    )
    _print(study, context, tau0)
    for line in fits:
        typer.echo(line)
    for line in [*warnings, *study.warnings()]:
        typer.echo(f"Warning: {line}.")
    if output is not None:
        study = dataclasses.replace(study, constants="; ".join([study.constants, *fits]))
        append_records(output, study_records(study, tau0_rule=tau0_rule, model=identity.name))


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[0-9]{1,10}", part) and int(part) < 1 << 32 for part in parts):
        raise UnsupportedError("--seeds", got=repr(text)[:80], wanted="whole numbers from 0 to 2^32 - 1")
    return [int(part) for part in parts]


def _watermark(text: str) -> float:
    """A share from 0 to below 1, as vLLM takes it; one in percent is refused with the share that it means."""
    share = re.fullmatch(r"([0-9.eE+-]{1,20})(\s*%)?", text.strip())
    try:
        value = float(share[1]) if share else math.nan
    except ValueError:
        value = math.nan
    if share and not share[2] and 0 <= value < 1:
        return value
    percent = 0 <= value < 100 and share is not None and (value >= 1 or share[2])
    raise LoopKVError(
        "--watermark",
        got=repr(text)[:80],
        wanted="a share from 0 to below 1",
        hint=f"{value / 100:g} for {value:g}%" if percent else None,
    )


def _numbers(text: str, option: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0 < value < 1e12 for value in values):
        raise LoopKVError(option, got=repr(text)[:80], wanted="numbers above 0, separated by commas")
    return values


def _print(study: SimulationStudy, context: float, tau0: float) -> None:
    from rich.table import Table
    from rich.text import Text

    from loopkv.cli._render import console

    out = console()
    bounds = study.ladders[0].bounds
    out.print(Text("Simulation", "bold"), end="")
    out.print(f", not a measurement: {study.gpu}; {study.constants}")
    out.print(f"tau0 {tau0:.2f} ms (stock step of one request at {context:,.0f} tokens); capacities in requests/s")
    table = Table(box=None, padding=(0, 1))
    table.add_column("arm", no_wrap=True)
    for title in ("seed", "pool GiB", *(f"{b.k:g} tau0 {b.ttft_s:g} s" for b in bounds), "preempt", "run"):
        table.add_column(title, justify="right")
    for ladder in study.ladders:
        found = ladder.capacities()
        best = [f.rate_per_s for f in found if f.rate_per_s is not None]
        at = ladder.replays[max(best)] if best else None
        table.add_row(
            ladder.arm.name,
            "-" if ladder.seed is None else str(ladder.seed),
            f"{ladder.engine.pool_bytes / (1 << 30):.1f}",
            *map(_capacity_text, found),
            "-" if at is None else str(at.preemptions),
            "-" if at is None else str(at.peak_running),
        )
    out.print(table)
    out.print("preempt, run: preemptions and most running requests at the highest capacity of the row.")
    if any(one.no_rung_failed for ladder in study.ladders for one in ladder.capacities()):
        out.print(">=: no rung failed; with all requests resident at once, give a workload of more requests.")


def _capacity_text(found: LadderCapacity) -> str:
    if found.rate_per_s is None:
        return f"<{found.lowest_rate:.3g}"
    return f"{'>=' if found.no_rung_failed else ''}{found.rate_per_s:.3g}"
