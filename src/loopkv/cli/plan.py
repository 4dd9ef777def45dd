"""``loopkv plan``: one option per cell, by exact optimisation under budgets or by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.model import FOLDER_OR_NAME, parse_model
from loopkv.errors import UnsupportedError
from loopkv.paths import check_output_file

if TYPE_CHECKING:
    from loopkv.artifacts import Budget, Fingerprint, Profile


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan")(plan_command)


def plan_command(
    profile: Annotated[
        Path | None, typer.Argument(metavar="[PROFILE]", help="Profile of the model (JSON).", show_default=False)
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="read|memory|damage",
            help="read: fewest reads within --max-damage (LoopKV-R); memory: and within --max-stored (LoopKV-M); "
            "damage: least damage within --max-stored and/or --max-read. The final loop stays at int4.",
        ),
    ] = None,
    max_damage: Annotated[
        str | None,
        typer.Option(
            metavar="FLOAT[nats|KL_share]",
            help="Damage of the whole cache, e.g. 2.0KL_share (the damage of sharing one loop) or 5e-4nats; nats if "
            "left out.",
        ),
    ] = None,
    max_stored: Annotated[
        str | None, typer.Option(metavar="FLOAT[B|KiB]", help="Bytes stored per history token, e.g. 156KiB.")
    ] = None,
    max_read: Annotated[
        str | None, typer.Option(metavar="FLOAT[B|KiB]", help="Bytes read per history token, e.g. 6912.")
    ] = None,
    named: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A hand-made plan: bf16, kivi4, kivi2, kivi4-share3, int4-int2-share, int2-share, int2-loops, "
            "uniform:int2, per-loop:int4,int2,share, per-layer:..., random:SEED, random-share:SEED, layer-only.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(parser=parse_model, metavar=FOLDER_OR_NAME, help="Checkpoint, for --named without a profile."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=check_output_file, metavar="FILE", help="Write the plan.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Name of the plan (default: after its goal).")
    ] = None,
    no_share: Annotated[bool, typer.Option("--no-share", help="No cell may read the final loop's history.")] = False,
    plan_source_cells: Annotated[
        bool,
        typer.Option("--plan-source-cells", help="With --no-share: choose the final loop's options, too (else int4)."),
    ] = False,
    tau: Annotated[
        str, typer.Option(metavar="FLOAT|none", help="V precision threshold in bits; none reads both value planes.")
    ] = "none",
) -> None:
    """Choose one storage option per cell, exactly, under budgets per history token; or take a hand-made plan.

    The final loop's cells stay at int4 in every planned plan, as in the paper (section 3.1): shared cells read them.
    --no-share --plan-source-cells plans them, too.

    Examples: loopkv plan profile.json --goal memory --max-damage 2.0KL_share --max-stored 156KiB -o plan.json;
    loopkv plan --named kivi4 --model Ouro-1.4B -o kivi4.json
    """
    from loopkv.artifacts import Profile
    from loopkv.cli._render import console, print_plan
    from loopkv.inspection import plan_warnings
    from loopkv.planner import budget_warnings, named_plan
    from loopkv.planner import plan as solve

    if (named is None) == (goal is None) and named != "layer-only":
        raise UnsupportedError(
            "loopkv plan",
            got="neither --goal nor --named" if named is None else f"--goal {goal} and --named {named}",
            wanted="one of the two",
            hint="--goal read --max-damage 1.2KL_share, or --named kivi4",
        )
    if named is not None and (no_share or plan_source_cells):
        raise UnsupportedError("--named", got="--no-share or --plan-source-cells", wanted="them with --goal alone")
    if profile is None and (named is None or model is None):
        raise UnsupportedError(
            "loopkv plan",
            got="no profile",
            wanted="PROFILE" if named is None else "PROFILE or --model FOLDER",
            hint="`loopkv profile MODEL -o profile.json` makes one",
        )
    if profile is not None and model is not None:
        raise UnsupportedError("loopkv plan", got="a profile and --model", wanted="one of the two")
    bits = _tau(tau)
    data = None if profile is None else Profile.load(profile)
    budget = _budget(goal, max_damage, max_stored, max_read, data)
    if named is not None:
        made = named_plan(named, _fingerprint(data, model), profile=data, budget=budget, tau=bits)
        made = made if name is None else made.with_name(name)
    else:
        assert data is not None and budget is not None
        made = solve(data, budget, share=not no_share, plan_source_cells=plan_source_cells, name=name, tau=bits)
    if output is not None:
        made.save(output)
    for warning in budget_warnings(budget, data) if budget is not None and data is not None else ():
        typer.echo(f"warning: {warning}", err=True)
    out = console()
    print_plan(made, plan_warnings(made), out)
    out.print()
    out.print(f"written to {output}" if output is not None else "not written (give -o plan.json)", markup=False)


def _fingerprint(data: Profile | None, model: Path | None) -> Fingerprint:
    if data is not None:
        return data.fingerprint
    from loopkv.models import fingerprint_model

    assert model is not None
    return fingerprint_model(model)


def _budget(
    goal: str | None, max_damage: str | None, max_stored: str | None, max_read: str | None, data: Profile | None
) -> Budget | None:
    from loopkv.artifacts import Budget
    from loopkv.planner import check_budget, parse_bytes, parse_damage

    if goal is None:
        if max_damage is not None or max_stored is not None or max_read is not None:
            raise UnsupportedError("a budget without --goal", wanted="--goal read, memory or damage")
        return None
    budget = Budget(
        goal=goal[:64],
        max_damage_nats=None if max_damage is None else parse_damage(max_damage, data.kl_share if data else None),
        max_stored_bytes=None if max_stored is None else parse_bytes(max_stored),
        max_read_bytes=None if max_read is None else parse_bytes(max_read),
    )
    check_budget(budget, data)
    return budget


def _tau(text: str) -> float | None:
    if text.strip().lower() in ("none", "inf", "infinite"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1024:
        raise UnsupportedError("--tau", got=repr(text)[:40], wanted="bits from 0 to 1024, or none")
    return value
