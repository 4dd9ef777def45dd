"""The additivity study on a random model: which plans it takes, what it compares and what its Records say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.random_models import write_random_ouro

from loopkv import reference
from loopkv.errors import DocumentError
from loopkv.eval.additivity import MAX_KL_NATS, listed_plans, study_additivity, study_records
from loopkv.models import fingerprint_model, load_model
from loopkv.planner import named_options
from loopkv.profiler import Document, measure, profile
from loopkv.record_kinds import RECORD_KINDS


def _document(seed: int) -> Document:
    ids = torch.randint(0, 64, (340,), generator=torch.Generator().manual_seed(seed))
    return Document(f"random#{seed}", tuple(ids.tolist()))


DOCUMENTS = [_document(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    torch.set_num_threads(1)
    folder = write_random_ouro(tmp_path_factory.mktemp("ouro"))
    model, fingerprint = load_model(folder), fingerprint_model(folder)
    made = profile(model, fingerprint, DOCUMENTS[:2])
    journal = tmp_path_factory.mktemp("journal") / "j"
    budgets = [(1440, 1920), (1152, 1920)]  # 6 cells x 320 B is all int4; 2 sources stay
    found = study_additivity(model, fingerprint, made, DOCUMENTS[:2], DOCUMENTS[2:], budgets, journal=journal)
    return model, fingerprint, made, found, journal


def test_the_list_is_fixed_and_long_enough(study):
    _, _, made, _, _ = study
    plans = listed_plans(made)
    reference_geometry = fingerprint_model(reference.model_folder()).geometry
    assert len({named_options(plan.name, reference_geometry) for plan in plans}) >= 20
    assert [p.sha256 for p in plans] == [p.sha256 for p in listed_plans(made)]
    assert any(plan.shares for plan in plans) and not all(plan.shares for plan in plans)
    assert all(plan.tau is None for plan in plans)


def test_correlation_and_ratios_are_those_of_the_measured_plans(study):
    model, fingerprint, made, found, _ = study
    names = [one.documents for one in found.lists]
    assert names == ["profiled", "unseen"]
    for one, documents in zip(found.lists, (DOCUMENTS[:2], DOCUMENTS[2:]), strict=True):
        assert len(one.results) + len(one.left_out) == len({p.sha256 for p in listed_plans(made)})
        assert all(r.measured.kl_nats < MAX_KL_NATS for r in one.results)
        assert all(r.measured.kl_nats >= MAX_KL_NATS for r in one.left_out)
        pairs = [(r.plan.predicted.damage_nats, r.measured.kl_nats) for r in one.results]
        if len(pairs) > 2:
            expected = np.corrcoef(np.log(np.array(pairs)).T)[0, 1]
            assert one.correlation == pytest.approx(expected, nan_ok=True)
        (again,) = measure(model, fingerprint, [listed_plans(made)[0]], documents)
        (mine,) = [r for r in (*one.results, *one.left_out) if r.plan.sha256 == again.plan.sha256]
        assert mine.kl_nats == pytest.approx(again.kl_nats, rel=1e-6)


def test_every_budget_is_compared_with_every_plan_that_fits(study):
    _, _, _, found, _ = study
    chosen, every = found.tables
    assert (chosen.documents, chosen.family) == ("unseen", "per-loop")
    assert [(row.stored_bytes, row.read_bytes) for row in chosen.rows] == [(1440, 1920), (1152, 1920)]
    assert (every.documents, every.family) == ("profiled", "per-loop and per-layer")
    for table in found.tables:
        for row in table.rows:
            for result in (row.planner, row.best):
                footprint = result.plan.footprint
                assert footprint.stored_bytes <= row.stored_bytes and footprint.read_bytes <= row.read_bytes
            assert row.ratio == row.planner.measured.kl_nats / row.best.measured.kl_nats
            # The planner minimises what it predicts: it never predicts more than a hand-made plan that fits.
            assert row.planner.plan.predicted.damage_nats <= row.best.plan.predicted.damage_nats * (1 + 1e-12)
        assert table.worst_ratio == max(row.ratio for row in table.rows)
    # 9 per-loop and 9 per-layer plans of 4 free cells of 320 (int4), 192 (int2) or 0 (share) bytes, two of a kind each:
    # stored 640 + 2 * (a + b); the budgets are the distinct (stored, read) pairs of them.
    assert len(every.rows) == 6


def test_a_second_run_measures_nothing(study):
    model, fingerprint, made, found, journal = study
    size = journal.stat().st_size
    again = study_additivity(
        model, fingerprint, made, DOCUMENTS[:2], DOCUMENTS[2:], [(1440, 1920)], every_budget=False, journal=journal
    )
    assert journal.stat().st_size == size
    assert [one.correlation for one in again.lists] == [one.correlation for one in found.lists]


def test_records_name_every_plan_and_budget(study):
    _, _, _, found, _ = study
    records = study_records(found, seed=0)
    for record in records:
        assert not RECORD_KINDS[record.what].missing(record) and RECORD_KINDS[record.what].unit == record.unit
    counts = {what: sum(r.what == what for r in records) for what in RECORD_KINDS}
    assert counts["additivity.plan"] == sum(len(one.results) + len(one.left_out) for one in found.lists)
    assert counts["additivity.correlation"] == 2
    assert counts["additivity.budget"] == sum(len(table.rows) for table in found.tables)
    assert all(math.isfinite(r.value) for r in records if r.what == "additivity.budget")


def test_other_documents_than_the_profiles_are_refused(study):
    model, fingerprint, made, _, _ = study
    with pytest.raises(DocumentError, match="profiled documents"):
        study_additivity(model, fingerprint, made, DOCUMENTS[1:], DOCUMENTS[:1], [])
    with pytest.raises(DocumentError, match="unseen documents"):
        study_additivity(model, fingerprint, made, DOCUMENTS[:2], DOCUMENTS[1:], [])
    with pytest.raises(DocumentError, match="unseen documents, got none"):
        study_additivity(model, fingerprint, made, DOCUMENTS[:2], [], [])
