"""One engine lives at a time; tests that ask for the same one share it."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
import torch
from support.plans import make_plan

from loopkv.artifacts import Fingerprint, Plan
from loopkv.models import fingerprint_model, load_model, load_tokenizer
from loopkv.planner import named_plan
from loopkv.policy import Policy
from loopkv.reference import heldout_documents, model_folder

LOOPKV_M = Path(__file__).parents[2] / "results" / "reference" / "loopkv-m.json"
"""What the planner made of the reference model's profile: loop 1 mixed, loop 2 mostly int2, loop 3 shared."""
TAU = 10.0


@pytest.fixture(scope="session")
def fingerprint() -> Fingerprint:
    return fingerprint_model(model_folder())


@pytest.fixture(scope="session")
def plans(fingerprint) -> dict[str, Plan]:
    memory = Plan.load(LOOPKV_M)
    made = {
        "bf16": named_plan("bf16", fingerprint),
        "int4": named_plan("kivi4", fingerprint),
        "int2": named_plan("kivi2", fingerprint),
        "memory": memory,
        "memory-tau": memory.with_tau(TAU),
    }
    short = make_plan(fingerprint.geometry, memory.options, policy=Policy(window_tokens=64))
    made["short-window"] = short.model_copy(update={"fingerprint": fingerprint})
    return {name: plan.with_name(name) for name, plan in made.items()}


@pytest.fixture(scope="session")
def plan_files(plans, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    return {name: str(folder / f"{name}.json") for name in plans}


@pytest.fixture(scope="session")
def reference():
    """The reference model in plain PyTorch, fp32."""
    return load_model(model_folder(), torch.float32)


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    """Token ids of eight held-out documents."""
    tokenizer = load_tokenizer(model_folder())
    return [tokenizer(text)["input_ids"] for text in heldout_documents()[:8]]


class Engines:
    """Starts engines on demand and stops the last one when another is asked for."""

    def __init__(self, plan_files: dict[str, str]) -> None:
        self._plan_files, self._key, self._live = plan_files, None, None

    def get(self, plan: str | None, **options) -> harness.ServedEngine:
        key = (plan, tuple(sorted(options.items(), key=str)))
        if key != self._key:
            self.close()
            self._live = harness.ServedEngine(None if plan is None else self._plan_files[plan], **options)
            self._key = key
        return self._live

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
        self._live = self._key = None


@pytest.fixture(scope="session")
def engines(plan_files):
    manager = Engines(plan_files)
    yield manager
    manager.close()
