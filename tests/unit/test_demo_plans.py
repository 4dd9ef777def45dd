"""What a demo says about its plans: the budgets it used, and commands that make the same plans again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from profiles import geometry, profile, random_damage
from support.report_data import make_report

from loopkv.artifacts import Profile
from loopkv.demo.commands import demo_command, plan_command, profile_command, report_commands
from loopkv.demo.pipeline import _finished
from loopkv.demo.plans import choose_plans, told_budgets
from loopkv.planner import parse_bytes, parse_damage
from loopkv.planner import plan as solve
from loopkv.policy import DEFAULT_POLICY
from loopkv.profiler.documents import Document
from loopkv.profiler.journal import Journal, count_kept, going_on
from loopkv.profiler.profiling import is_profile_of
from loopkv.report.demo import demo_page

SHAPE = geometry(4, 4)


def test_a_widened_budget_is_said():
    read, wide = told_budgets(1e-4, 4992, 3e-4)
    assert read == "loopkv-r: fewest bytes read within a damage of 0.000119 nats (1.19 KL_share)."
    assert "4,992 B stored and a damage of 0.00036 nats (3.6 KL_share): widened to 1.2 x the least" in wide
    assert "the paper's 2 KL_share (0.0002 nats), which no plan meets" in wide
    assert "which is too near it" in told_budgets(1e-4, 4992, 1.9e-4)[1]
    assert told_budgets(1e-4, 4992, 1e-4)[1].endswith("a damage of 0.0002 nats (2 KL_share).")


def test_the_commands_make_the_same_plans(tmp_path):
    made = profile(random_damage(3, SHAPE), SHAPE)
    plans = choose_plans(made)
    for plan in (plans.read, plans.memory):
        words = shlex.split(plan_command(Path("out dir/profile.json"), plan))
        given = dict(zip(words[3::2], words[4::2], strict=True))
        assert words[:3] == ["loopkv", "plan", "out dir/profile.json"] and given["--goal"] == plan.budget.goal
        assert parse_damage(given["--max-damage"]) == plan.budget.max_damage_nats
        assert parse_bytes(given.get("--max-stored", "0")) == (plan.budget.max_stored_bytes or 0)
        assert solve(made, plan.budget).sha256 == plan.sha256
    assert plan_command(Path("p.json"), plans.hand_made[1]) == "loopkv plan p.json --named kivi4"


def test_the_commands_of_a_run_hold_its_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"model": Path("M"), "documents": None, "limit": 2, "max_tokens": 640, "task_records": None}
    again = demo_command(Path("out"), **options, serve=False)
    assert again == "loopkv demo --output out --model M --limit 2 --max-tokens 640 --no-serve"
    profiling = profile_command(tmp_path / "M", Path("d.txt"), 2, 640, Path("out/profile.json"))
    assert profiling == "loopkv profile M -o out/profile.json --documents d.txt --limit 2 --max-tokens 640"
    commands = report_commands(again, profiling, Path("out/profile.json"), make_report().plans)
    assert commands["profile"] == profiling and commands["capacity"] == commands["measure"] == again


def test_budgets_are_in_the_report():
    from dataclasses import replace

    page = demo_page(replace(make_report(), budgets=("loopkv-m: widened.",)))
    assert next(s for s in page.sections if s.key == "plans").lead.endswith("loopkv-m: widened.")


def test_one_document_has_no_interval_in_the_report():
    from loopkv.artifacts import Measured
    from loopkv.report.demo.plans import _interval

    data = {"top1_agreement": 1.0, "documents_sha256": "0" * 64}
    assert _interval(Measured(**data, kl_nats=4e-4, kl_ci95_nats=(4e-4, 4e-4))) == "1 document"
    assert _interval(Measured(**data, kl_nats=0.0, kl_ci95_nats=(0.0, 0.0))) == "0 to 0"  # bf16 on any documents
    assert _interval(None) == "-"


def test_a_finished_profile_is_used_for_the_same_work_alone(tmp_path):
    made = profile(random_damage(1, SHAPE), SHAPE)
    document = Document("d", tuple(range(400)))
    made = made.model_copy(update={"documents": (document.info(DEFAULT_POLICY),)})
    assert is_profile_of(made, made.fingerprint, [document], DEFAULT_POLICY)
    assert not is_profile_of(made, made.fingerprint, [Document("d", tuple(range(401)))], DEFAULT_POLICY)
    other = made.fingerprint.model_copy(update={"weights_sha256": "0" * 64})
    assert not is_profile_of(made, other, [document], DEFAULT_POLICY)
    later = made.model_copy(update={"provenance": {"measurement": 99}})
    assert not is_profile_of(later, made.fingerprint, [document], DEFAULT_POLICY)
    path = tmp_path / "profile.json"
    assert _finished(path) is None
    path.write_text("{")
    assert _finished(path) is None
    made.save(path)
    assert _finished(path) == Profile.load(path) == made


def test_what_a_journal_holds_is_said(tmp_path):
    path = tmp_path / "j"
    said: list[str] = []
    assert count_kept(path, "a") == 0
    with pytest.raises(KeyboardInterrupt), going_on(path, said.append):
        raise KeyboardInterrupt
    assert said == []  # nothing is kept
    with Journal(path, "a") as journal:
        journal.put("x", 1)
        journal.put("y", 2)
    with path.open("a") as file:
        file.write('{"name": "z')  # torn
    assert count_kept(path, "a") == 2 and count_kept(path, "b") == 0
    with pytest.raises(KeyboardInterrupt), going_on(path, said.append):
        raise KeyboardInterrupt
    assert said == [f"measurements so far are kept in {path}: the same command goes on from there"]
