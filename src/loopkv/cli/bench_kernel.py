"""``loopkv bench kernel``: the decode kernel alone, as a share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from loopkv.paths import check_output_file

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from loopkv.bench.kernel import KernelCell, KernelResult

_Value = TypeVar("_Value")
OPTIONS = ("bf16", "int4", "int2", "share")
MAX_CONTEXT_TOKENS = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("kernel")(kernel_command)


def kernel_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=check_output_file, help="Append Records to this file.")
    ],
    options: Annotated[str, typer.Option(metavar="O,O,...", help="Of bf16, int4, int2, share.")] = "int4,int2",
    batches: Annotated[str, typer.Option(metavar="B,B,...", help="Rows of a launch.")] = "32",
    contexts: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of every row.")] = "16384",
    tau: Annotated[
        str, typer.Option(metavar="T,T,...", help="V precision thresholds in bits; 'none' reads both planes.")
    ] = "none",
    hot_share: Annotated[float, typer.Option(help="Fraction of history tokens planted as hot.")] = 0.2,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 16,
    group_queries: Annotated[int, typer.Option(help="Query heads per KV head.")] = 1,
    seed_mode: Annotated[str, typer.Option(metavar="sink|timed|none", help="First maximum of V precision.")] = "sink",
    replays: Annotated[int, typer.Option(help="Graph replays timed.")] = 20,
) -> None:
    """Time the decode kernel on generated caches, each launch checked against the fp32 reference before.

    Every combination of options, batches, contexts and thresholds is one row; V precision is measured for int4 and
    share alone. Needs a CUDA device.

    Example: loopkv bench kernel --options int4,int2 --batches 1,32 --contexts 8192,16384 --tau none,14 -o kernel.jsonl
    """
    from loopkv.bench.kernel import DecodeBench, copy_bandwidth, kernel_records
    from loopkv.errors import LoopKVError
    from loopkv.kernels.descriptor import SeedMode
    from loopkv.records import append_records

    modes = {mode.name.lower(): mode for mode in SeedMode}
    if seed_mode not in modes:
        raise LoopKVError("--seed-mode", got=repr(seed_mode)[:40], wanted=" or ".join(modes))
    if not 0 <= hot_share <= 1:
        raise LoopKVError("--hot-share", got=hot_share, wanted="a share from 0 to 1")
    for name, value, most in (
        ("--head-dim", head_dim, 256),
        ("--kv-heads", kv_heads, 256),
        ("--group-queries", group_queries, 16),
        ("--replays", replays, 100_000),
    ):
        if not 1 <= value <= most:
            raise LoopKVError(name, got=value, wanted=f"1 to {most}")
    cells = grid(
        _values(options, "--options", _option),
        _values(batches, "--batches", lambda part: _whole(part, 1024)),
        _values(contexts, "--contexts", lambda part: _whole(part, MAX_CONTEXT_TOKENS)),
        _values(tau, "--tau", _tau),
        hot_share=hot_share,
        head_dim=head_dim,
        kv_heads=kv_heads,
        group_queries=group_queries,
        seed_mode=modes[seed_mode],
    )
    device = cuda_device()  # after the arguments, so that a wrong one is told anywhere
    copied = copy_bandwidth(device)
    typer.echo(f"copy bandwidth {copied / 1e12:.3f} TB/s; {len(cells)} rows", err=True)
    results = []
    for cell in cells:
        measured = DecodeBench(cell, device).measure(replays)
        result = replace(measured, settings={"tau": cell.tau, "seed_mode": seed_mode, "planted_hot_share": hot_share})
        append_records(output, kernel_records(result, copied))
        share = result.bytes_s / copied
        typer.echo(f"{_name(cell)}: {result.us:,.1f} us, {share:.1%} of the copy bandwidth", err=True)
        results.append(result)
    from loopkv.cli._render import console

    console().print(table(results, copied))


def grid(
    options: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    taus: Sequence[float | None],
    **fields: object,
) -> list[KernelCell]:
    """One cell per combination; a threshold applies to int4 histories alone."""
    from loopkv.bench.kernel import KernelCell

    return [
        KernelCell(option, batch, context, tau=tau, **fields)  # type: ignore[arg-type]
        for batch in batches
        for context in contexts
        for option in options
        for tau in taus
        if tau is None or option in ("int4", "share")
    ]


def cuda_device() -> torch.device:
    """The CUDA device.

    Raises:
        UnsupportedError: there is none.
    """
    import torch

    from loopkv.errors import UnsupportedError

    if not torch.cuda.is_available():
        raise UnsupportedError("bench kernel", got="no CUDA device", wanted="a GPU: the kernels are CUDA code")
    return torch.device("cuda")


def table(results: Sequence[KernelResult], copy_bytes_s: float) -> Table:
    """One row a cell."""
    from rich.table import Table

    grid_ = Table(title="decode kernel, one launch (one cell)", box=None, padding=(0, 1, 0, 0))
    for name in ("option", "tau", "hot", "batch", "context", "us", "MB", "of copy", "error", "PyTorch's"):
        grid_.add_column(name, justify="left" if name == "option" else "right", no_wrap=True)
    for r in results:
        cell = r.cell
        grid_.add_row(
            cell.option,
            "-" if cell.tau is None else f"{cell.tau:g}",
            "-" if r.hot_share is None else f"{r.hot_share:.1%}",
            str(cell.batch),
            str(cell.context_tokens),
            f"{r.us:,.1f}",
            f"{r.bytes_read / 1e6:,.1f}",
            f"{r.bytes_s / copy_bytes_s:.1%}",
            f"{r.error:.1e}",
            f"{r.plain_error:.1e}",
        )
    return grid_


def _name(cell: KernelCell) -> str:
    tau = "" if cell.tau is None else f", tau {cell.tau:g}"
    return f"{cell.option}, batch {cell.batch}, context {cell.context_tokens}{tau}"


def _values(text: str, name: str, read: Callable[[str], _Value]) -> list[_Value]:
    """The parts of a comma-separated list, each once."""
    from loopkv.errors import LoopKVError

    values: list[_Value] = []
    for part in text.split(","):
        try:
            value = read(part.strip())
        except ValueError as problem:
            raise LoopKVError(name, got=repr(part)[:40], wanted=str(problem)) from None
        if value not in values:
            values.append(value)
    return values


def _option(part: str) -> str:
    if part not in OPTIONS:
        raise ValueError(" or ".join(OPTIONS))
    return part


def _whole(part: str, most: int) -> int:
    wanted = f"a whole number from 1 to {most}"
    if not (part.isascii() and part.isdecimal() and len(part) < 10 and 1 <= int(part) <= most):
        raise ValueError(wanted)
    return int(part)


def _tau(part: str) -> float | None:
    if part == "none":
        return None
    try:
        tau = float(part)
    except ValueError:
        tau = -1.0
    if not 0 <= tau <= 1024:
        raise ValueError("'none' or a number of bits from 0 to 1024")
    return tau
