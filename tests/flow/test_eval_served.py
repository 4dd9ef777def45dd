"""Served KL without an engine: what is compared with what, for logits whose KL is known, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.plans import make_plan
from support.random_models import write_random_ouro

from loopkv.engine.whole_sequence import sequence_logits
from loopkv.errors import LoopKVError, PlanMismatchError, UnsupportedError
from loopkv.eval import served
from loopkv.eval.served import ServedJob, evaluate_served, read_run, run_in_child, served_records
from loopkv.models import fingerprint_model, load_model
from loopkv.profiler import Document
from loopkv.record_kinds import RECORD_KINDS

PROMPT, TOKENS = 319, 400
GAP = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_ouro(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path):
    return load_model(folder, torch.float32)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(f"random#{i}", tuple(rng.integers(0, 64, TOKENS).tolist())) for i in range(2)]


def engine_that_serves(model, options, tau=None, spoil=False):
    """Gives the logits of a policy, as an engine would; ``spoil`` adds GAP to token 0 at position 350 of document 1."""

    def run(job: ServedJob):
        place = Path(job.output)
        for number, ids in enumerate(job.documents):
            logits = sequence_logits(model, torch.tensor([ids]), options, tau=tau)[0, job.prompt_tokens :]
            if spoil and number == 1:
                logits[350 - job.prompt_tokens, 0] += GAP
            np.save(place / f"{number}.npy", logits.numpy())
        check = {"pages": 3, "compared_bytes": 99, "differing_bytes": 0, "first_difference": None}
        told = {"byte_check": check if job.plan else None, "reported_nats": 0.0, "runner": "none", "hardware": "none"}
        (place / "run.json").write_text(json.dumps(told))
        return read_run(place)

    return run


@pytest.mark.parametrize("tau", [None, 8.0])
def test_an_engine_that_serves_the_policy_has_ratio_one(model, folder, documents, tau) -> None:
    plan = make_plan(model.geometry, "int4", tau=tau)
    (result,) = evaluate_served(
        model,
        folder,
        fingerprint_model(folder),
        [plan],
        documents,
        prompt_tokens=PROMPT,
        run=engine_that_serves(model, plan.cell_options, tau),
    )
    assert result.ratio == 1.0 and result.served_nats == result.policy_nats and result.served_mean_nats > 0
    assert result.positions == 2 * (TOKENS - PROMPT)
    records = served_records([result])
    assert [r.what for r in records] == ["quality.served_kl_nats", "quality.policy_kl_nats", "quality.byte_check"]
    assert all(not RECORD_KINDS[r.what].missing(r) for r in records)


def test_a_longer_prompt_decodes_the_policy_token_by_token(model, folder, documents) -> None:
    """Prefill reads both planes, which a whole sequence under tau cannot say: the two ways agree where both apply."""
    plan = make_plan(model.geometry, "int4", tau=8.0)
    whole = served._policy_logits(model, plan, documents[0].ids, PROMPT)
    stepped = served._policy_logits(model, plan, documents[0].ids, PROMPT + 1)
    assert stepped.shape[0] == whole.shape[0] - 1
    assert float((stepped - whole[1:]).abs().max()) < 2e-2


def test_the_worst_position_of_an_engine_without_a_plan(model, folder, documents) -> None:
    exact = (served.BF16,) * len(model.geometry.cells)
    (result,) = evaluate_served(
        model,
        folder,
        fingerprint_model(folder),
        [None],
        documents,
        prompt_tokens=PROMPT,
        run=engine_that_serves(model, exact, spoil=True),
    )
    logits = sequence_logits(model, torch.tensor([documents[1].ids]), exact)[0, 350].double()
    p = float(torch.softmax(logits, dim=-1)[0])
    # adding g to one logit of probability p: log(1 + p (e^g - 1)) - p g nats
    wanted = np.log1p(p * np.expm1(GAP)) - p * GAP
    assert (result.worst_document, result.worst_position) == (1, 350)
    assert result.worst_nats == pytest.approx(wanted, rel=1e-4)
    assert result.served_nats == pytest.approx((0.0, wanted / (TOKENS - PROMPT)), rel=1e-4, abs=1e-12)
    assert result.ratio is None and result.policy_nats == () and result.byte_check is None and result.arm == "stock"
    (record,) = served_records([result])
    assert record.what == "quality.served_kl_nats" and record.plan_sha256 is None


def test_what_cannot_be_compared_is_refused(model, folder, documents) -> None:
    fingerprint = fingerprint_model(folder)
    plan = make_plan(model.geometry, "int4")
    other = make_plan(model.geometry.model_copy(update={"loops": 4}), "int4")

    def refused(error, match, arms=(plan,), docs=documents, prompt=PROMPT, **options):
        with pytest.raises(error, match=match):
            evaluate_served(model, folder, fingerprint, arms, docs, prompt_tokens=prompt, run=None, **options)

    refused(PlanMismatchError, "loops", arms=(other,))
    refused(UnsupportedError, "dtype", dtype="float16")
    refused(UnsupportedError, "'additional_config', got {}", engine={"additional_config": {}, "max_num_seqs": 3})
    refused(UnsupportedError, "'dtype', got \"half\"", engine={"dtype": "half"})
    refused(LoopKVError, "at least 319", prompt=100)
    refused(LoopKVError, "random#0", prompt=TOKENS)
    refused(LoopKVError, "no document", docs=())
    refused(LoopKVError, "no arm", arms=())


def test_an_engine_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no such model ' + 'x' * 1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(served, "WORKER", "broken")
    job = ServedJob("m", None, "float32", ((1, 2),), 1, 1, {}, 0, 0, str(tmp_path))
    assert ServedJob.load(_saved(job, tmp_path / "copy.json")) == job
    with pytest.raises(LoopKVError, match="got ValueError: no such model x"):
        run_in_child(job)


def _saved(job: ServedJob, path: Path) -> Path:
    job.save(path)
    return path
