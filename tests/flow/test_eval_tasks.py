"""Task evaluation: sharing work between plans changes no answer, and a killed run repeats none."""

import json

import pytest
import torch
from support.random_models import write_random_ouro
from typer.testing import CliRunner

from loopkv import reference
from loopkv.artifacts import Fingerprint
from loopkv.cli.app import app
from loopkv.engine.generation import generate
from loopkv.engine.paged_engine import PagedEngine
from loopkv.errors import LoopKVError, PlanMismatchError
from loopkv.eval.answers import AnswerBatch
from loopkv.eval.task_items import TaskItem, reference_items
from loopkv.eval.tasks import evaluate_tasks, task_records
from loopkv.models import fingerprint_model, load_model, load_tokenizer
from loopkv.planner.named import named_plan
from loopkv.record_kinds import RECORD_KINDS

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void. " * 20
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_random_ouro(tmp_path_factory.mktemp("model"), vocab=4096, heads=4, kv_heads=2, max_positions=600)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((reference.model_folder() / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, torch.float64)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def fingerprint(folder):
    return fingerprint_model(folder)


def plan_of(name, fingerprint, tau=None):
    return named_plan(name, fingerprint, tau=tau)


def alone(model, tokenizer, prompt, plan):
    options = {"max_tokens": MAX_TOKENS, "stop": ["\n"], "batch": 1}
    return generate(model, tokenizer, [prompt], plan, **options).completions[0].text


def items_of(answers):
    """Items of very different lengths, one below the first coded position, one of a single token."""
    prompts = [TEXT, TEXT[30:1100], "Chapter one", TEXT[:1500], "a"]
    tasks = ["needle_num", "vt_value", "copy", "multivalue", "arith"]
    return [
        TaskItem(f"item-{i}", task, 1000, prompt, answer, "set" if task == "multivalue" else "exact")
        for i, (task, prompt, answer) in enumerate(zip(tasks, prompts, answers, strict=True))
    ]


@pytest.mark.parametrize("name", ["bf16", "kivi4", "kivi2-share", "kivi4:tau"])
def test_shared_work_changes_no_answer(model, tokenizer, fingerprint, name):
    plan = plan_of(name.removesuffix(":tau"), fingerprint, 4.0 if name.endswith(":tau") else None)
    items = items_of([""] * 5)
    expected = {item.id: alone(model, tokenizer, item.prompt, plan) for item in items}
    exact = plan_of("bf16", fingerprint)
    right = {key: text + "\n" for key, text in expected.items()}
    for guesses in (
        right,
        {key: text[: len(text) // 2] for key, text in right.items()},
        {key: text[: len(text) // 2] + "xyz\n" for key, text in right.items()},
        {key: text + " and much more text that is wrong" for key, text in right.items()},
        dict.fromkeys(right, "wrong from the start\n"),
        dict.fromkeys(right, ""),
    ):
        prompts = {item.id: item.prompt for item in items}
        together = AnswerBatch(model, tokenizer, exact, prompts, guesses, MAX_TOKENS)
        assert together.answer(plan, tuple(prompts)) == expected
        some = ("item-3", "item-2")
        assert together.answer(plan, some) == {key: expected[key] for key in some}


def test_scores_pair_every_arm_with_bf16(model, tokenizer, fingerprint):
    exact, coarse = plan_of("bf16", fingerprint), plan_of("kivi2", fingerprint)
    drafts = items_of([""] * 5)
    mine = [alone(model, tokenizer, item.prompt, exact) for item in drafts]
    theirs = [alone(model, tokenizer, item.prompt, coarse) for item in drafts]
    assert mine[0] != theirs[0] and mine[2] == theirs[2]  # a short prompt has no history
    # right under bf16 only; under kivi2 only; under both; half right under bf16; under neither
    items = items_of(
        [mine[0] + "\n", theirs[1] + "\n", mine[2] + "\n", mine[3].strip() + ", other\n", "no such text\n"]
    )
    scores = evaluate_tasks(
        model, tokenizer, [coarse], items, fingerprint=fingerprint, max_answer_tokens=MAX_TOKENS, batch=2
    )
    assert [answer.text for answer in scores.answers["bf16"]] == mine
    assert [answer.text for answer in scores.answers["kivi2"]] == theirs
    by = {(score.task, score.is_group, score.arm): score for score in scores.scores}
    retrieval = by["retrieval", True, "kivi2"]
    assert by["retrieval", True, "bf16"].samples == (1.0, 0.5) and retrieval.samples == (0.0, 0.0)
    assert (retrieval.accuracy, retrieval.difference, retrieval.items) == (0.0, -0.75, 2)
    assert (retrieval.flips_down, retrieval.flips_up) == (2, 0)
    assert retrieval.difference_ci95 == (-1.0, -0.5) and not retrieval.non_inferior
    tracking = by["variable tracking", True, "kivi2"]
    assert tracking.samples == (1.0,) and tracking.non_inferior
    assert by["induction and copying", True, "kivi2"].difference_ci95 == (0.0, 0.0)
    assert by["arith", False, "kivi2"].samples == (0.0,)
    assert by["needle_num", False, "bf16"].ci95 == (1.0, 1.0)
    for record in task_records(scores):
        kind = RECORD_KINDS[record.what]
        assert kind.unit == record.unit and not kind.missing(record)
        assert record.plan_sha256 and record.weights_sha256 == fingerprint.weights_sha256


def test_a_killed_run_resumes_and_a_finished_one_runs_nothing(model, tokenizer, fingerprint, tmp_path, monkeypatch):
    items = items_of(["x\n"] * 5)
    plans = [plan_of("kivi4", fingerprint), plan_of("kivi2", fingerprint)]
    journal = tmp_path / "answers.jsonl"
    options = {"fingerprint": fingerprint, "max_answer_tokens": MAX_TOKENS, "batch": 2, "journal": journal}
    expected = evaluate_tasks(model, tokenizer, plans, items, **{**options, "journal": None})
    answer, calls = AnswerBatch.answer, []

    def counted(self, plan, keys):
        calls.extend((plan.name, key) for key in keys)
        if len(calls) > 8:
            raise KeyboardInterrupt
        return answer(self, plan, keys)

    monkeypatch.setattr(AnswerBatch, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate_tasks(model, tokenizer, plans, items, **options)
    done = len(journal.read_text().splitlines()) - 1
    assert 0 < done < 15
    with journal.open("ab") as file:
        file.write(b'{"name": "torn')  # what a kill leaves
    calls.clear()
    monkeypatch.setattr(AnswerBatch, "answer", answer)
    seen = []
    resumed = evaluate_tasks(model, tokenizer, plans, items, **options, on_progress=lambda *args: seen.append(args))
    assert resumed == expected
    assert seen[0][0] > 0 and seen[-1][0] == seen[-1][1]
    names = [json.loads(line)["name"] for line in journal.read_text().splitlines()[1:]]
    assert len(names) == len(set(names)) == 15

    def forbidden(*args, **kwargs):
        raise AssertionError("a finished run computes")

    monkeypatch.setattr(PagedEngine, "step", forbidden)
    assert evaluate_tasks(model, tokenizer, plans, items, **options) == expected
    with pytest.raises(LoopKVError, match="another run"):
        evaluate_tasks(model, tokenizer, plans, items, **{**options, "max_answer_tokens": 11})


def test_what_cannot_be_compared_is_refused(model, tokenizer, fingerprint):
    items = items_of(["x\n"] * 5)
    kivi4 = plan_of("kivi4", fingerprint)
    for plans, given, words in (
        ([kivi4], [], "none"),
        ([kivi4], [items[0], items[0]], "twice"),
        ([kivi4, kivi4.with_tau(3.0)], items, "two plans named 'kivi4'"),
        ([kivi4], [TaskItem("long", "copy", 1000, TEXT * 3, "x\n", "exact")], "600 positions"),
    ):
        with pytest.raises(LoopKVError, match=words):
            evaluate_tasks(model, tokenizer, plans, given, fingerprint=fingerprint, max_answer_tokens=MAX_TOKENS)
    sibling = Fingerprint(name="sibling", geometry=model.geometry, weights_sha256="0" * 64)
    with pytest.raises(PlanMismatchError, match="other weights"):
        evaluate_tasks(model, tokenizer, [plan_of("kivi4", sibling)], items, fingerprint=fingerprint)


def test_the_command_answers_reference_items_and_writes_records(tmp_path):
    arguments = ["eval", "tasks", "--task", "needle_num", "--items-per-task", "2", "--plan", "kivi4"]
    arguments += ["--journal", str(tmp_path / "answers"), "--records", str(tmp_path / "records.jsonl"), "--per-task"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [(row["settings"]["arm"], row["settings"]["task"], row["settings"]["items"]) for row in rows] == [
        ("bf16", "retrieval", 2), ("kivi4", "retrieval", 2), ("bf16", "needle_num", 2), ("kivi4", "needle_num", 2),
    ]  # fmt: skip
    assert "retrieval" in result.stdout and "needle_num" in result.stdout and "100% after" in result.stderr
    assert len((tmp_path / "answers").read_text().splitlines()) == 1 + 2 * 2
    assert {row["value"] for row in rows} == {1.0}, "the trained model finds these numbers"
    assert len(reference_items(["needle_num"], items_per_task=2)) == 2
