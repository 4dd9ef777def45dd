"""Task items with a known answer: which there are, how an answer is scored, how tasks are grouped."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loopkv import reference
from loopkv.errors import LoopKVError

TASK_GROUPS: dict[str, tuple[str, ...]] = {
    "retrieval": ("needle_num", "needle_word", "multivalue", "multiquery", "kv_dict"),
    "variable tracking": ("vt_list", "vt_value"),
    "induction and copying": ("induction", "copy"),
}
SCORE_KINDS = ("exact", "final", "set")
_FINAL = re.compile(r"Answer:\s*(-?\d+)")


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One question.

    Args:
        id: unique name.
        task: what is asked.
        length: nominal tokens of the prompt.
        prompt: text; the answer follows it directly.
        answer: the right one, up to and with its newline.
        score: how answers are scored (``score_answer``).
    """

    id: str
    task: str
    length: int
    prompt: str
    answer: str
    score: str

    @property
    def sha256(self) -> str:
        """Identity of the question."""
        return hashlib.sha256(f"{self.id}\n{self.prompt}".encode()).hexdigest()


def score_answer(item: TaskItem, text: str) -> float:
    """Score in [0, 1] of a text, which counts up to its first newline.

    ``exact``: stripped texts equal. ``final``: the number after "Answer:" equal. ``set``: share of the wanted items,
    separated by commas, that are present.
    """
    got, wanted = text.split("\n", 1)[0].strip(), item.answer.strip()
    if item.score == "exact":
        return float(got == wanted)
    if item.score == "final":
        numbers = [found.group(1) if (found := _FINAL.search(each)) else None for each in (got, wanted)]
        return float(numbers[0] is not None and numbers[0] == numbers[1])
    assert item.score == "set", item.score
    wanted_items = {part.strip() for part in wanted.split(",")}
    return len(wanted_items & {part.strip() for part in got.split(",")}) / len(wanted_items)


def reference_items(
    tasks: Iterable[str] | None = None, lengths: Sequence[int] = (1000,), items_per_task: int | None = None
) -> tuple[TaskItem, ...]:
    """Items shipped with the reference model.

    Args:
        tasks: names; by default those of ``TASK_GROUPS``.
        lengths: nominal prompt lengths.
        items_per_task: first items of each task and length; all by default.

    Raises:
        LoopKVError: an unknown task or length, or nothing left.
    """
    items = [TaskItem(**row) for row in reference.task_items()]
    for item in items:
        assert item.score in SCORE_KINDS, item
    wanted = list(tasks) if tasks is not None else [task for group in TASK_GROUPS.values() for task in group]
    for what, given, known in (
        ("task", wanted, sorted({item.task for item in items})),
        ("task length", lengths, sorted({item.length for item in items})),
    ):
        unknown = [value for value in given if value not in known]
        if unknown:
            raise LoopKVError(what, got=repr(unknown[0])[:80], wanted=", ".join(map(str, known)))
    seen: Counter[tuple[str, int]] = Counter()
    chosen = []
    for item in items:
        seen[item.task, item.length] += 1
        few = items_per_task is None or seen[item.task, item.length] <= items_per_task
        if item.task in wanted and item.length in lengths and few:
            chosen.append(item)
    if not chosen:
        raise LoopKVError("task items", got="none", wanted="at least one", hint="raise --items-per-task")
    return tuple(chosen)
