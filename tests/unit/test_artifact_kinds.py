"""A profile is not taken for a plan, nor written over by one: each says what the other file is."""

from __future__ import annotations

import pytest
from profiles import geometry, profile, random_damage

from loopkv.artifacts import Plan, Profile
from loopkv.artifacts.storage import check_replaces
from loopkv.errors import LoopKVError, PlanFormatError, ProfileFormatError
from loopkv.inspection import inspect_file
from loopkv.planner import named_plan
from loopkv.planner.named import is_plan_name

SHAPE = geometry(4, 4)


@pytest.fixture
def files(tmp_path):
    made = profile(random_damage(1, SHAPE), SHAPE)
    made.save(tmp_path / "profile.json")
    named_plan("kivi4", made.fingerprint).save(tmp_path / "plan.json")
    return tmp_path


def test_the_wrong_kind_is_named(files):
    with pytest.raises(PlanFormatError, match=r"got a profile, wanted a plan\. hint: `loopkv plan"):
        Plan.load(files / "profile.json")
    with pytest.raises(ProfileFormatError, match=r"got a plan, wanted a profile\. hint: `loopkv profile"):
        Profile.load(files / "plan.json")


def test_neither_is_written_over_the_other(files):
    made, plan = Profile.load(files / "profile.json"), Plan.load(files / "plan.json")
    for artifact, name, kind in ((plan, "profile.json", "profile"), (made, "plan.json", "plan")):
        before = (files / name).read_bytes()
        with pytest.raises(LoopKVError, match=f"got a {kind} there"):
            artifact.save(files / name)
        assert (files / name).read_bytes() == before
    plan.save(files / "plan.json")  # its own kind, and what is no artifact, may be replaced
    (files / "notes.json").write_text("notes")
    plan.save(files / "notes.json")
    check_replaces(None, "plan")


def test_the_name_of_a_plan_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoopKVError, match="loopkv plan --named kivi4 --model FOLDER"):
        inspect_file("kivi4")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kivi4", True), ("kivi4-share2,3", True), ("per-loop:int4", True), ("random", False), ("kivi5", False)],
)
def test_names_by_their_form(name, expected):
    assert is_plan_name(name) is expected
