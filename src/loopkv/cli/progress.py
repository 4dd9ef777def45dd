"""Progress of long commands: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_INTERVAL_S = 15.0

Report = Callable[[float, float, str], None]
"""``report(done, total, label)``."""


@contextlib.contextmanager
def progress(title: str) -> Iterator[Report]:
    """Show progress on standard error while inside."""
    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:
        yield _lines(title, console)
        return
    columns = (
        TextColumn("{task.fields[title]}", markup=False),
        BarColumn(bar_width=28),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", style="dim", markup=False),
    )
    with Progress(*columns, console=console, speed_estimate_period=120.0) as bar:
        task = bar.add_task("", title=title, total=None)

        def report(done: float, total: float, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        yield report


def _lines(title: str, console: Console) -> Report:
    started = last = time.monotonic()
    first_done: float | None = None

    def report(done: float, total: float, label: str) -> None:
        nonlocal last, first_done
        now = time.monotonic()
        first_done = done if first_done is None else first_done  # work of an earlier, interrupted run took no time
        if now - last < LINE_INTERVAL_S and done < total:
            return
        last = now
        work = done - first_done
        left = f", about {(now - started) * (total - done) / work:.0f} s left" if work > 0 and done < total else ""
        console.print(f"{title}: {100 * done / total:.0f}% after {now - started:.0f} s{left} ({label})", soft_wrap=True)

    return report
