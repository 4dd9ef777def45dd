"""Task accuracy by arm, with paired differences to bf16."""

from __future__ import annotations

from loopkv.report.demo.contents import DemoReport
from loopkv.report.page import Figure, Section, table_of
from loopkv.report.plots import intervals


def task_section(report: DemoReport) -> Section | None:
    """Figure and table of the task scores; None without any."""
    if not report.task_scores:
        return None
    arms = list(dict.fromkeys(score.arm for score in report.task_scores))
    tasks = list(dict.fromkeys(score.task for score in report.task_scores))
    at = {(score.arm, score.task): score for score in report.task_scores}
    rows = []
    for task in tasks:
        for arm in arms:
            score = at.get((arm, task))
            if score is not None:
                rows.append(
                    (
                        task,
                        arm,
                        str(score.items),
                        f"{score.accuracy:.1%}",
                        "1 item" if score.items == 1 else f"{score.ci95[0]:.1%} to {score.ci95[1]:.1%}",
                        "-" if score.difference is None else f"{100 * score.difference:+.1f}",
                        "-"
                        if score.difference_ci95 is None or score.items == 1
                        else f"{100 * score.difference_ci95[0]:+.1f} to {100 * score.difference_ci95[1]:+.1f}",
                    )
                )
    table = table_of(
        "Task accuracy",
        ("task", "arm", "items", "accuracy", "95% interval", "points\nto bf16", "95% interval\nof difference"),
        rows,
        "Differences are paired: the same items under both arms.",
    )
    figure = Figure(
        key="task-accuracy",
        title="Task accuracy by arm",
        explanation="Mean score with its 95% interval; the paired differences to bf16 are in the table.",
        alt="; ".join(
            f"{task}: " + ", ".join(f"{arm} {at[arm, task].accuracy:.0%}" for arm in arms if (arm, task) in at)
            for task in tasks
        )
        + ".",
        command=report.command("tasks"),
        drawing=intervals(
            tasks,
            [
                (
                    arm,
                    [
                        None
                        if (score := at.get((arm, task))) is None
                        else (100 * score.accuracy, 100 * score.ci95[0], 100 * score.ci95[1])
                        for task in tasks
                    ],
                )
                for arm in arms
            ],
            "accuracy (%)",
        ),
    )
    return Section("tasks", "Tasks", "Greedy answers, scored exactly.", (figure, table))
