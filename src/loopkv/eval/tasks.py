"""``evaluate_tasks(model, tokenizer, plans, items) -> TaskScores``: what plans do to answers, paired with BF16."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loopkv.artifacts import Fingerprint, Plan
from loopkv.artifacts.storage import digest
from loopkv.engine.generation import encode_prompt
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.eval.answers import ANSWER_END, AnswerBatch
from loopkv.eval.task_items import TASK_GROUPS, TaskItem, score_answer
from loopkv.models.base import LoopedModel
from loopkv.planner.named import named_plan
from loopkv.policy import DEFAULT_POLICY
from loopkv.profiler.journal import Journal
from loopkv.profiler.measuring import bootstrap_interval
from loopkv.records import Record, make_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERS_VERSION = 1
"""Counts changes of what an answer is; a journal of another version is refused."""
MAX_ANSWER_TOKENS = 96
NON_INFERIORITY_MARGIN = 0.03

OnProgress = Callable[[float, float, str], None]
"""``on_progress(done, total, label)``: prompt tokens done and in all, over all plans."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one plan answered to one item."""

    item: TaskItem
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Mean score of one arm on one task or group of tasks, beside BF16 on the same items.

    Args:
        arm: name of the plan.
        plan: the plan.
        task: name of the task, or of the group.
        is_group: True for a group of tasks.
        samples: score of every item, in the order of the items.
        accuracy, ci95: mean and its bootstrap interval over items.
        difference, difference_ci95: mean of the paired differences to bf16, and its interval.
        flips_down, flips_up: items that score lower, higher than under bf16.
    """

    arm: str
    plan: Plan
    task: str
    is_group: bool
    samples: tuple[float, ...]
    accuracy: float
    ci95: tuple[float, float]
    difference: float
    difference_ci95: tuple[float, float]
    flips_down: int
    flips_up: int

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.samples)

    @property
    def non_inferior(self) -> bool:
        """True where the interval excludes a loss of three points or more."""
        return self.difference_ci95[0] > -NON_INFERIORITY_MARGIN


@dataclass(frozen=True, slots=True)
class TaskScores:
    """Scores of all arms, bf16 first.

    Args:
        scores: groups first, then single tasks; within each, one score per arm.
        answers: answers of every arm, in the order of the items.
        weights_sha256: of the model, if known.
        seed: of the bootstrap.
    """

    scores: tuple[TaskScore, ...]
    answers: Mapping[str, tuple[Answer, ...]]
    weights_sha256: str | None
    seed: int


def evaluate_tasks(
    model: LoopedModel,
    tokenizer: PreTrainedTokenizerBase,
    plans: Sequence[Plan],
    items: Sequence[TaskItem],
    *,
    fingerprint: Fingerprint | None = None,
    accept_weights: bool = False,
    journal: Path | str | None = None,
    restart: bool = False,
    batch: int = 8,
    max_answer_tokens: int = MAX_ANSWER_TOKENS,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> TaskScores:
    """Answer every item greedily under bf16 and under each plan, and compare.

    Args:
        model, tokenizer: the model (fp32 for figures that are to be compared) and its tokenizer.
        plans: to compare with bf16, which is added; names tell them apart.
        items: questions.
        fingerprint: of the checkpoint; plans for another are refused. Without it only the geometry is checked.
        accept_weights: allow plans of a sibling checkpoint.
        journal: file of answers by plan and item, read before and written while answering; it stays.
        restart: answer anew whatever the journal holds.
        batch: prompts that run together.
        max_answer_tokens: longest answer.
        seed: of the bootstrap.
        on_progress: told about progress.

    Raises:
        PlanMismatchError: a plan of another model.
        UnsupportedError: an item beyond the model's positions.
        LoopKVError: no items, two plans of one name, plans of several policies, another run's journal.
    """
    fingerprint = fingerprint or Fingerprint(name=model.name, geometry=model.geometry)
    for plan in plans:
        plan.check_serves(fingerprint, accept_weights=accept_weights)
    arms = _arms(plans, fingerprint)
    if not items or len({item.id for item in items}) != len(items):
        raise LoopKVError("task items", got="none" if not items else "an id twice", wanted="items of different ids")
    if batch < 1 or max_answer_tokens < 1:
        raise UnsupportedError("task evaluation", got=f"batch {batch}, {max_answer_tokens} tokens", wanted="at least 1")
    key = _journal_key(fingerprint, model, max_answer_tokens)
    with Journal(journal, key, restart=restart) if journal is not None else nullcontext() as kept:
        texts = _answer_all(model, tokenizer, arms, items, batch, max_answer_tokens, kept, on_progress)
    answers = {
        arm: tuple(Answer(item, text, score_answer(item, text)) for item in items for text in [texts[arm, item.id]])
        for arm in arms
    }
    return TaskScores(tuple(_scores(arms, answers, seed)), answers, fingerprint.weights_sha256, seed)


def _arms(plans: Sequence[Plan], fingerprint: Fingerprint) -> dict[str, Plan]:
    """Plans by name, the exact one first."""
    if len({plan.policy for plan in plans}) > 1:
        raise LoopKVError("plans", got="several sets of constants", wanted="plans of one policy")
    policy = plans[0].policy if plans else DEFAULT_POLICY
    arms = {"bf16": named_plan("bf16", fingerprint, policy=policy)}
    for plan in plans:
        if plan.name in arms and plan.sha256 != arms[plan.name].sha256:
            raise LoopKVError(
                "plans", got=f"two plans named {plan.name!r}", wanted="different names", hint="rename one in its file"
            )
        arms[plan.name] = plan
    return arms


def _answer_all(
    model: LoopedModel,
    tokenizer: PreTrainedTokenizerBase,
    arms: Mapping[str, Plan],
    items: Sequence[TaskItem],
    batch: int,
    max_tokens: int,
    kept: Journal | None,
    on_progress: OnProgress | None,
) -> dict[tuple[str, str], str]:
    """Text of every (arm, item id)."""
    lengths = {item.id: len(encode_prompt(model, tokenizer, item.prompt, max_tokens)) for item in items}
    texts: dict[tuple[str, str], str] = {}
    if kept is not None:
        for arm, plan in arms.items():
            for item in items:
                if (name := _name(plan, item)) in kept:
                    texts[arm, item.id] = str(kept.get(name))
    total = sum(lengths.values()) * len(arms)
    done = sum(lengths[item_id] for _, item_id in texts)
    ordered = sorted(items, key=lambda item: (lengths[item.id], item.id))
    if on_progress is not None:
        on_progress(done, total, "answers")
    for start in range(0, len(ordered), batch):
        todo = [item for item in ordered[start : start + batch] if any((arm, item.id) not in texts for arm in arms)]
        if not todo:
            continue
        together = AnswerBatch(
            model,
            tokenizer,
            arms["bf16"],
            {item.id: item.prompt for item in todo},
            {item.id: _guess(texts.get(("bf16", item.id)), item) for item in todo},
            max_tokens,
        )
        for arm, plan in arms.items():
            missing = {item.id: item for item in todo if (arm, item.id) not in texts}
            if not missing:
                continue
            for item_id, text in together.answer(plan, tuple(missing)).items():
                texts[arm, item_id] = text
                if kept is not None:
                    kept.put(_name(plan, missing[item_id]), text)
                done += lengths[item_id]
            if arm == "bf16":
                together.guess({item.id: _guess(texts["bf16", item.id], item) for item in todo})
            if on_progress is not None:
                on_progress(done, total, arm)
    return texts


def _guess(bf16_text: str | None, item: TaskItem) -> str:
    """A likely answer: that of bf16, or the right one while it is not known."""
    return item.answer if bf16_text is None else bf16_text + ANSWER_END


def _name(plan: Plan, item: TaskItem) -> str:
    return f"{plan.sha256}:{item.sha256}"


def _journal_key(fingerprint: Fingerprint, model: LoopedModel, max_tokens: int) -> str:
    return digest(
        {
            "kind": "task answers",
            "version": ANSWERS_VERSION,
            "geometry": fingerprint.geometry.model_dump(mode="json"),
            "weights": fingerprint.weights_sha256,
            "tokenizer": fingerprint.tokenizer_sha256,
            "dtype": str(model.dtype),
            "max_tokens": max_tokens,
        }
    )


def _scores(arms: Mapping[str, Plan], answers: Mapping[str, Sequence[Answer]], seed: int) -> list[TaskScore]:
    tasks = list(dict.fromkeys(answer.item.task for answer in answers["bf16"]))
    sets = [(group, True, members) for group, members in TASK_GROUPS.items() if set(members) & set(tasks)]
    sets += [(task, False, (task,)) for task in tasks]
    scores = []
    for name, is_group, members in sets:
        base = [answer.score for answer in answers["bf16"] if answer.item.task in members]
        for arm, plan in arms.items():
            samples = [answer.score for answer in answers[arm] if answer.item.task in members]
            differences = [mine - exact for mine, exact in zip(samples, base, strict=True)]
            scores.append(
                TaskScore(
                    arm=arm,
                    plan=plan,
                    task=name,
                    is_group=is_group,
                    samples=tuple(samples),
                    accuracy=math.fsum(samples) / len(samples),
                    ci95=bootstrap_interval(samples, seed),
                    difference=math.fsum(differences) / len(differences),
                    difference_ci95=bootstrap_interval(differences, seed),
                    flips_down=sum(difference < 0 for difference in differences),
                    flips_up=sum(difference > 0 for difference in differences),
                )
            )
    return scores


def task_records(scores: TaskScores) -> list[Record]:
    """One Record ``tasks.accuracy`` per arm and task (or group); samples are items."""
    return [
        make_record(
            "tasks.accuracy",
            score.accuracy,
            "share",
            samples=score.samples,
            settings={
                "arm": score.arm,
                "suite": "reference groups" if score.is_group else "reference tasks",
                "task": score.task,
                "items": score.items,
                "ci95": list(score.ci95),
                "difference": score.difference,
                "difference_ci95": list(score.difference_ci95),
                "flips_down": score.flips_down,
                "flips_up": score.flips_up,
                "tau": score.plan.tau,
            },
            plan_sha256=score.plan.sha256,
            model=score.plan.fingerprint.name,
            weights_sha256=scores.weights_sha256,
            seed=scores.seed,
        )
        for score in scores.scores
    ]
