"""``loopkv capacity``: requests that fit and tokens per second, predicted from bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.model import FOLDER_OR_NAME, model_name, parse_model
from loopkv.errors import UnsupportedError

if TYPE_CHECKING:
    from loopkv.artifacts import Plan
    from loopkv.capacity import Capacity, Gpu, ModelSize

GPU_NAMES = "H200 (default), RTX-PRO-6000, H100, A100-80, RTX-PRO-4500, L40S."
"""Help of ``--gpu``."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("capacity")(capacity_command)


def capacity_command(
    plan: Annotated[str, typer.Option(metavar="FILE|NAME", help="A plan file, or a plan by name.", show_default=False)],
    model: Annotated[
        Path | None,
        typer.Option(parser=parse_model, metavar=FOLDER_OR_NAME, help="Checkpoint whose weights are served."),
    ] = None,
    geometry: Annotated[
        str | None, typer.Option(metavar="ouro-1.4b|ouro-2.6b|tiny", help="A known model instead of --model.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=GPU_NAMES),
    ] = None,
    context: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of every request.")] = 8192,
    hot_share: Annotated[
        float | None,
        typer.Option(
            metavar="0..1", help="Adds rows with V precision, this fraction of tokens hot: both value planes read."
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="TB/S", help="Effective bandwidth of a decode step, instead of the GPU's.")
    ] = None,
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory, instead of the GPU's.")] = None,
    t_fix: Annotated[
        float | None, typer.Option(metavar="MS", help="Fixed time of a step of 96 cells, instead of the GPU's.")
    ] = None,
    utilization: Annotated[
        float | None, typer.Option(metavar="0..1", help="Fraction of the memory the engine may use (vLLM 0.26: 0.92).")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(metavar="N", help="Cap of the batch (max_num_seqs).")] = None,
) -> None:
    """Predict how many requests fit and how fast they decode: BF16, KIVI-4 and the plan beside each other.

    Example: loopkv capacity --plan plan.json --geometry ouro-1.4b --gpu H200 --context 8192
    """
    from loopkv.artifacts import Fingerprint, Plan
    from loopkv.capacity import predict_capacity
    from loopkv.capacity.prediction import DEFAULT_UTILIZATION
    from loopkv.paths import exists
    from loopkv.planner import named_plan
    from loopkv.planner.lookup import is_plan_file
    from loopkv.planner.named import PAPER_PLANS
    from loopkv.planner.paper_plans import paper_plan

    if model is not None and geometry is not None:
        raise UnsupportedError("loopkv capacity", got="--model and --geometry", wanted="one of the two")
    # A file wins over a name: "kivi4.json" is no name, and a file called kivi4 was meant.
    made = Plan.load(plan) if exists(plan) or is_plan_file(plan) else None
    size = _model_size(model, geometry, made, "loopkv capacity")
    if made is None:
        identity = Fingerprint(name=geometry or model_name(model), geometry=size.geometry)
        made = paper_plan(plan, identity) if plan in PAPER_PLANS else named_plan(plan, identity)
    prediction = predict_capacity(
        [made],
        size,
        _gpu(gpu, memory, bandwidth, t_fix),
        context,
        hot_share=hot_share,
        utilization=DEFAULT_UTILIZATION if utilization is None else utilization,
        max_requests=max_requests,
    )
    _print(prediction, made.tau if hot_share is None else None)


def _model_size(model: Path | None, geometry: str | None, plan: Plan | None, verb: str) -> ModelSize:
    """Weights of the model that ``verb`` was given, or of the known model that a plan's geometry belongs to."""
    from loopkv import reference
    from loopkv.capacity import KNOWN_MODELS, get_model_size

    if geometry is not None:
        return get_model_size(geometry)
    if model is not None:
        return _folder_size(model)
    if plan is not None:
        for size in KNOWN_MODELS.values():
            if size.geometry == plan.fingerprint.geometry:
                return size
        embedded = _folder_size(reference.model_folder())
        if embedded.geometry == plan.fingerprint.geometry:
            return embedded
    raise UnsupportedError(
        verb,
        got="no model" if plan is None else f"no model, and a plan of none that is known ({plan.fingerprint.name})",
        wanted="--model FOLDER or --geometry ouro-1.4b",
        hint="the weights decide how much memory is left and how much a step reads",
    )


def _folder_size(folder: Path) -> ModelSize:
    """Weights of the checkpoint in ``folder`` by its config.json."""
    from loopkv.capacity import ouro_size
    from loopkv.models.config import parse_ouro_config, read_config

    data = read_config(folder)
    if data["model_type"] != "ouro":
        raise UnsupportedError(f"model type of {folder}", got=repr(data["model_type"])[:80], wanted="ouro")
    config = parse_ouro_config(data, f"{folder}/config.json")
    return ouro_size(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        loops=config.total_ut_steps,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.attention_head_dim,
        tied=config.tie_word_embeddings,
    )


def _gpu(
    name: str | None,
    memory: float | None,
    bandwidth: float | None,
    t_fix: float | None,
    *,
    memory_used: bool = True,
) -> Gpu:
    from loopkv.capacity import custom_gpu, get_gpu

    given = (memory, bandwidth, t_fix)
    base = None if name is None and None not in given else get_gpu(name or "H200")
    if base is not None and given == (None, None, None):
        return base
    for option, value in (("--memory", memory), ("--bandwidth", bandwidth)):
        if value is not None and not 0 < value < 1e9:
            raise UnsupportedError(option, got=value, wanted="a number > 0")
    if t_fix is not None and not 0 <= t_fix < 1e6:
        raise UnsupportedError("--t-fix", got=t_fix, wanted="milliseconds >= 0")
    return custom_gpu(
        base,
        memory_bytes=None if memory is None else round(memory * (1 << 30)),
        bandwidth_bytes_s=None if bandwidth is None else bandwidth * 1e12,
        t_fix_s=None if t_fix is None else t_fix * 1e-3,
        memory_used=memory_used,
    )


def _print(prediction: Capacity, tau: float | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from loopkv.cli._render import console, facts

    gib = 1 << 30
    gpu, step = prediction.gpu, prediction.step_time
    out = console()
    out.print(Text("Prediction", "bold"), end="")
    out.print(f", not a measurement: {gpu.name}, requests of {prediction.context_tokens} tokens")
    table = Table(box=None, padding=(0, 1))
    for title in ("", "stored", "read", "request", "fit", "step", "tok/s", "x BF16", "alone"):
        table.add_column(title, justify="left" if not title else "right", overflow="fold" if not title else "ellipsis")
    table.add_row("", "KiB/tok", "KiB/tok", "MiB", "", "ms", "", "", "ms", style="dim")
    first = prediction.arms[0]
    for arm in prediction.arms:
        ratio = arm.tokens_per_s / first.tokens_per_s if first.tokens_per_s else None
        table.add_row(
            arm.name,
            f"{arm.stored_bytes / 1024:.4g}",
            f"{arm.read_bytes / 1024:.4g}",
            f"{arm.request_bytes / (1 << 20):.0f}",
            str(arm.requests),
            f"{arm.step_s * 1e3:.1f}" if arm.requests else "-",
            f"{arm.tokens_per_s:.0f}" if arm.requests else "-",
            f"{ratio:.2f}" if ratio and arm.requests else "-",
            f"{arm.single_step_s * 1e3:.1f}",
        )
    out.print(table)
    out.print()
    out.print(
        facts(
            [
                ("model", "t(B) = t_fix + (W_T + B x D_read) / BW (paper eq. 1), B = requests that fit, whole blocks"),
                (
                    "constants",
                    f"BW {step.bandwidth_bytes_s / 1e12:.3g} TB/s, t_fix {step.t_fix_s * 1e3:.3g} ms "
                    f"({gpu.t_fix_s * 1e3:.3g} ms at 96 cells, this model has {len(prediction.model.geometry.cells)})",
                ),
                ("source", gpu.source),
                (
                    "weights",
                    f"{prediction.weight_bytes / gib:.2f} GiB held, {step.weight_bytes / 1e9:.2f} GB a step (BF16)",
                ),
                (
                    "KV pool",
                    f"{prediction.pool_bytes / gib:.1f} GiB = {gpu.memory_bytes / gib:.1f} GiB x "
                    f"{prediction.utilization:g} - weights - 1 GiB for activations and graphs",
                ),
            ]
        )
    )
    if tau is not None:
        out.print(f"The plan sets tau {tau:g}; its reads are counted with both value planes: give --hot-share.")
