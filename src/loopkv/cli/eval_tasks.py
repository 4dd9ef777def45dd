"""``loopkv eval tasks``: accuracy of plans on questions with a known answer, paired with BF16."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.model import OptionalModelArgument
from loopkv.paths import check_output_file

if TYPE_CHECKING:
    from rich.table import Table

    from loopkv.eval.tasks import TaskScores


def add(group: typer.Typer) -> None:
    """Add the command."""

    @group.command()
    def tasks(
        model: OptionalModelArgument = None,
        plans: Annotated[
            list[str] | None, typer.Option("--plan", help="Plan file, or a name such as kivi4; may be repeated.")
        ] = None,
        task: Annotated[list[str] | None, typer.Option("--task", help="Only these tasks; may be repeated.")] = None,
        length: Annotated[
            list[int] | None, typer.Option("--length", help="Nominal prompt tokens, 1000 or 1900; may be repeated.")
        ] = None,
        items_per_task: Annotated[
            int | None, typer.Option("--items-per-task", min=1, help="First items of each task and length.")
        ] = None,
        batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts that run together.")] = 8,
        seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the bootstrap.")] = 0,
        records: Annotated[
            Path | None, typer.Option("--records", callback=check_output_file, help="Append Records to this file.")
        ] = None,
        journal: Annotated[
            Path | None,
            typer.Option(
                "--journal", callback=check_output_file, help="Keep answers here; a later run reads them back."
            ),
        ] = None,
        restart: Annotated[bool, typer.Option("--restart", help="Drop the answers in the journal.")] = False,
        per_task: Annotated[bool, typer.Option("--per-task", help="Also show every task of the groups.")] = False,
        device: Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda.")] = "cpu",
        accept_weights: Annotated[
            bool, typer.Option("--accept-weights", help="Allow plans made for a sibling checkpoint.")
        ] = False,
    ) -> None:
        """Answer retrieval, variable-tracking and induction questions under BF16 and each plan, in fp32.

        With --journal a run that was killed continues where it stopped when the same command is given again.

        Example: [bold]loopkv eval tasks --plan kivi4 --plan plan.json --journal answers.jsonl[/bold]
        """
        from loopkv import reference
        from loopkv.cli._render import console
        from loopkv.cli.progress import progress
        from loopkv.eval.task_items import reference_items
        from loopkv.eval.tasks import evaluate_tasks, task_records
        from loopkv.models import fingerprint_model, load_model, load_tokenizer, resolve_device
        from loopkv.planner.lookup import load_or_name
        from loopkv.profiler.journal import going_on
        from loopkv.records import append_records

        folder = model or reference.model_folder()
        items = reference_items(task, tuple(length or (1000,)), items_per_task)
        fingerprint = fingerprint_model(folder)
        chosen = [load_or_name(plan, fingerprint)[0] for plan in plans or []]
        with going_on(journal, lambda line: typer.echo(line, err=True)), progress("tasks") as report:
            scores = evaluate_tasks(
                load_model(folder, device=resolve_device(device)),
                load_tokenizer(folder),
                chosen,
                items,
                fingerprint=fingerprint,
                accept_weights=accept_weights,
                journal=journal,
                restart=restart,
                batch=batch,
                seed=seed,
                on_progress=report,
            )
        if records is not None:
            append_records(records, task_records(scores))
        console().print(table(scores, per_task=per_task))


def table(scores: TaskScores, *, per_task: bool) -> Table:
    """Accuracy of each group (and task) and arm with the paired difference to BF16."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title="right answers; points: difference to bf16 on the same items", box=None, padding=(0, 2, 0, 0))
    grid.add_column("task", overflow="fold")
    grid.add_column("items", justify="right", no_wrap=True)
    grid.add_column("arm", overflow="fold", min_width=8)
    for name in ("right", "points", "95% interval", "down", "up"):
        grid.add_column(name, justify="right", no_wrap=True)
    previous = None
    for score in scores.scores:
        if not (score.is_group or per_task):
            continue
        first = score.task != previous
        if first and previous is not None:
            grid.add_row()
        previous = score.task
        low, high = score.difference_ci95
        exact = score.arm == "bf16"
        grid.add_row(
            Text(score.task, "bold" if score.is_group else "") if first else "",
            str(score.items) if first else "",
            score.arm,
            f"{score.accuracy:.1%}",
            "" if exact else f"{100 * score.difference:+.1f}",
            "" if exact else "1 item" if score.items == 1 else f"{100 * low:+.1f} to {100 * high:+.1f}",
            "" if exact else str(score.flips_down),
            "" if exact else str(score.flips_up),
        )
    return grid
