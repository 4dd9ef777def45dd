"""Arms as a user writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopkv.artifacts import Fingerprint
from loopkv.bench.arms import EngineArm, parse_arm, parse_arms
from loopkv.bench.cache_arms import cache_arm
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.geometry import Geometry
from loopkv.planner import named_plan

TINY = Geometry(architecture="ouro", loops=4, layers=4, query_heads=6, kv_heads=6, head_dim=64)
IDENTITY = Fingerprint(name="tiny", geometry=TINY)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("stock", EngineArm("stock", "stock", None)),
        ("bf16=stock", EngineArm("bf16", "stock", None)),
        ("stock:fp8", EngineArm("fp8", "stock:fp8", None, "fp8")),
        ("kivi4", EngineArm("kivi4", "kivi4", "kivi4")),
        ("plans/memory.json", EngineArm("memory", "plans/memory.json", "plans/memory.json")),
        (
            "LoopKV-M=m.json,seed_mode=timed,prefill=fast",
            EngineArm(
                "LoopKV-M",
                "m.json,seed_mode=timed,prefill=fast",
                "m.json",
                settings=(("prefill", "fast"), ("seed_mode", "timed")),
            ),
        ),
        (
            "per-loop:int4,int2,share",
            EngineArm("per-loop:int4,int2,share", "per-loop:int4,int2,share", "per-loop:int4,int2,share"),
        ),
        (
            "tq=stock:turboquant_4bit_nc,skip_layers=2-4",
            EngineArm("tq", "stock:turboquant_4bit_nc,skip_layers=2-4", None, "turboquant_4bit_nc", (2, 3, 4)),
        ),
    ],
)
def test_what_is_written_is_what_is_run(text: str, arm: EngineArm) -> None:
    assert parse_arm(text) == arm


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=stock",
        "a=",
        "stock:",
        "kivi4,depth=3",
        "kivi4,seed_mode",
        "stock,seed_mode=sink",
        "kivi4,seed=sink",
        "kivi4,prefill=zzz",
        "kivi4,seed_mode=zzz",
        "stock,skip_layers=5-2",
        "stock,skip_layers=x",
    ],
)
def test_bad_arms_are_one_sentence(text: str) -> None:
    with pytest.raises(LoopKVError):
        parse_arm(text)


def test_a_second_run_of_an_arm_is_the_noise_floor() -> None:
    assert [arm.label for arm in parse_arms(["bf16=stock", "kivi4", "bf16=stock"])] == ["bf16", "kivi4", "bf16 (A/A)"]
    with pytest.raises(LoopKVError, match="label"):
        parse_arms(["a=stock", "a=kivi4"])
    with pytest.raises(LoopKVError, match="label"):
        parse_arms(["stock", "stock", "stock"])
    with pytest.raises(LoopKVError, match="none"):
        parse_arms([])


@pytest.mark.parametrize(
    "arms",
    [("m v=kivi4", "m_v=kivi2"), ("stock", "stock", "stock (A/A)=kivi4"), ("stock (A/A)=kivi4", "stock", "stock")],
)
def test_labels_that_make_one_file_name_are_refused(arms: tuple[str, ...]) -> None:
    with pytest.raises(LoopKVError, match="label"):
        parse_arms(arms)


def test_plans_are_checked_against_the_model(tmp_path: Path) -> None:
    other = Geometry(architecture="ouro", loops=3, layers=4, query_heads=6, kv_heads=6, head_dim=64)
    named_plan("kivi4", Fingerprint(name="other", geometry=other)).save(tmp_path / "p.json")
    arm = parse_arm(str(tmp_path / "p.json"))
    assert arm.additional_config() == {"loopkv": {"plan": str(tmp_path / "p.json")}}
    with pytest.raises(LoopKVError, match="another geometry"):
        arm.load_plan(IDENTITY)
    assert parse_arm("stock").additional_config() == {}
    assert parse_arm("kivi4,seed_mode=none").additional_config() == {"loopkv": {"plan": "kivi4", "seed_mode": "none"}}
    with pytest.raises(LoopKVError):
        parse_arm("kivi5").load_plan(IDENTITY)


def test_simulated_caches_of_arms() -> None:
    assert cache_arm(parse_arm("stock"), IDENTITY, 100).name == "stock"
    assert cache_arm(parse_arm("stock:fp8"), IDENTITY, 100).read_bytes[1] == 12_288
    assert cache_arm(parse_arm("kivi4-share3"), IDENTITY, 100).chunk_tokens == 256
    assert cache_arm(parse_arm("kivi4-share3,prefill=fast"), IDENTITY, 100).chunk_tokens is None
    with pytest.raises(UnsupportedError, match="turboquant"):
        cache_arm(parse_arm("stock:turboquant_4bit_nc"), IDENTITY, 100)


def test_a_threshold_in_the_arm_and_a_plan_file_for_the_engine(tmp_path: Path) -> None:
    geometry = Geometry(architecture="ouro", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
    identity = Fingerprint(name="ouro", geometry=geometry)
    arm = parse_arm("m=paper-loopkv-m,tau=14,seed_mode=timed")
    plan = arm.load_plan(identity)
    assert plan is not None and plan.tau == 14.0 and plan.footprint.stored_bytes == 155 * 1024
    given = arm.with_plan_file(identity, tmp_path / "work")
    config = given.additional_config()["loopkv"]
    assert config == {"plan": str(tmp_path / "work" / "m.plan.json"), "seed_mode": "timed"}
    assert given.load_plan(identity) == plan and (given.label, given.spec) == (arm.label, arm.spec)
    reset = parse_arm(f"{config['plan']},tau=none").load_plan(identity)
    assert reset is not None and reset.tau is None
    assert parse_arm("stock").with_plan_file(identity, tmp_path) == parse_arm("stock")
    for text in ("kivi4,tau=nan", "kivi4,tau=-1", "kivi4,tau=much", "stock,tau=14"):
        with pytest.raises(LoopKVError):
            parse_arm(text)


def test_a_folder_called_like_a_plan_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kivi4").mkdir()
    monkeypatch.chdir(tmp_path)
    arm = parse_arm("kivi4")
    assert arm.additional_config() == {"loopkv": {"plan": "kivi4"}}
    plan = arm.load_plan(IDENTITY)
    assert plan is not None and set(plan.options) == {"int4"}
