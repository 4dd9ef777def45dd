"""Profiles and measurements of random models: equal to the definition, whatever the batches, kills and resumes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.oracle import oracle_logits
from support.plans import make_plan
from support.random_models import write_random_ouro

from loopkv import reference
from loopkv.artifacts import Profile
from loopkv.engine.whole_sequence import HistoryRead, exact_reads, plan_reads
from loopkv.errors import DocumentError, LoopKVError, PlanMismatchError, UnsupportedError
from loopkv.models import fingerprint_model, load_model, load_tokenizer
from loopkv.options import get_option
from loopkv.policy import Policy
from loopkv.profiler import Document, measure, own_documents, profile, tau
from loopkv.profiler.measuring import bootstrap_interval, measurement_records
from loopkv.profiler.probe import Probe
from loopkv.profiler.profiling import profile_records
from loopkv.record_kinds import RECORD_KINDS

SMALL = Policy(sink_tokens=8, window_tokens=16, page_tokens=8)
FIRST = SMALL.first_coded_position  # 31


def _document(tokens: int, seed: int) -> Document:
    ids = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Document(f"random#{seed}", tuple(ids.tolist()))


DOCUMENTS = [_document(60, 0), _document(75, 1), _document(48, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_ouro(tmp_path_factory.mktemp("ouro"), heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, torch.float64)


@pytest.fixture(scope="module")
def fingerprint(folder):
    return fingerprint_model(folder)


@pytest.fixture(scope="module")
def made(model, fingerprint):
    return profile(model, fingerprint, DOCUMENTS, policy=SMALL)


def _damage(model, reads, document, tau=None):
    """Mean KL and share of changed predictions by the definition, from the token-by-token oracle."""
    exact = oracle_logits(model, document.ids, exact_reads(model.geometry), SMALL)[FIRST:]
    other = oracle_logits(model, document.ids, reads, SMALL, tau)[FIRST:]
    a, b = torch.log_softmax(exact, -1), torch.log_softmax(other, -1)
    kl = (a.exp() * (a - b)).sum(-1).mean()
    return float(kl), float((exact.argmax(-1) != other.argmax(-1)).double().mean())


def test_every_cell_alone_is_measured_as_defined(model, made):
    geometry = model.geometry
    for option, (place, document) in itertools.product(("int4", "int2", "share"), enumerate(DOCUMENTS)):
        for cell in range(6):
            source = geometry.source_of(cell)
            row = made.damage_nats[option][cell]
            if option == "share" and source is None:
                assert row is None
                continue
            reads = list(exact_reads(geometry))
            reads[cell] = HistoryRead(source, 4) if option == "share" else HistoryRead(cell, get_option(option).bits)
            kl, changed = _damage(model, reads, document)
            assert row[place] == pytest.approx(kl, rel=1e-6, abs=1e-12)
            assert made.changed[option][cell][place] == pytest.approx(changed, abs=1e-12)


def test_kl_share_is_the_last_but_one_loop_on_the_final_loops_exact_history(model, made):
    reads = [*exact_reads(model.geometry)[:2], HistoryRead(4, None), HistoryRead(5, None), (4, None), (5, None)]
    for place, document in enumerate(DOCUMENTS):
        assert made.kl_share_nats[place] == pytest.approx(_damage(model, reads, document)[0], rel=1e-6)


def test_what_a_profile_says_about_itself(made, fingerprint):
    assert made.fingerprint == fingerprint and made.policy == SMALL
    assert [d.scored_positions for d in made.documents] == [60 - 31, 75 - 31, 48 - 31]
    assert [d.sha256 for d in made.documents] == [d.sha256 for d in DOCUMENTS]
    assert made.damage("bf16") == (0.0,) * 6
    assert made.provenance["dtype"] == "float64" and made.provenance["resumed_measurements"] == 0


def test_kl_share_is_a_record(made):
    (record,) = profile_records(made)
    kind = RECORD_KINDS[record.what]
    assert record.what == "quality.kl_share_nats" and record.unit == kind.unit and not kind.missing(record)
    assert record.value == made.kl_share
    assert record.samples == tuple(float(f"{nats:.6g}") for nats in made.kl_share_nats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_reads_damage_exactly_nothing(folder, dtype):
    probe = Probe(load_model(folder, dtype), DOCUMENTS, SMALL, range(6))
    assert [(d.kl_nats, d.changed) for d in probe.measure(exact_reads(probe._model.geometry))] == [(0.0, 0.0)] * 3


@pytest.mark.parametrize("batch", [1, 2])
def test_batches_change_nothing(model, fingerprint, made, batch):
    other = profile(model, fingerprint, DOCUMENTS, policy=SMALL, batch_documents=batch)
    for option, rows in made.damage_nats.items():
        for mine, its in zip(rows, other.damage_nats[option], strict=True):
            assert (mine is None and its is None) or its == pytest.approx(mine, rel=1e-9)


def test_single_precision_measures_the_same(folder, fingerprint, made):
    """fp32 rounding flips a few codes; damages of the heavy options stay."""
    other = profile(load_model(folder, torch.float32), fingerprint, DOCUMENTS, policy=SMALL)
    for option in ("int2", "share"):
        for mine, its in zip(made.damage(option), other.damage(option), strict=True):
            assert (mine is None and its is None) or its == pytest.approx(mine, rel=0.05)


def test_a_model_of_one_loop_has_nothing_to_share(tmp_path):
    folder = write_random_ouro(tmp_path / "m", loops=1)
    made = profile(load_model(folder), fingerprint_model(folder), DOCUMENTS[:1], policy=SMALL)
    assert set(made.damage_nats) == {"int4", "int2"} and made.kl_share_nats is None


def test_bf16_activations_are_refused(folder, fingerprint):
    with pytest.raises(UnsupportedError, match="bfloat16"):
        profile(load_model(folder, torch.bfloat16), fingerprint, DOCUMENTS, policy=SMALL)


def test_a_head_size_that_cannot_be_coded_is_refused(tmp_path):
    folder = write_random_ouro(tmp_path / "m", head_dim=48)
    with pytest.raises(UnsupportedError, match="head size, got 48"):
        profile(load_model(folder), fingerprint_model(folder), DOCUMENTS, policy=SMALL)


def test_an_interrupted_run_continues_without_repeating_work(model, fingerprint, made, tmp_path):
    class StoppedError(Exception):
        pass

    seen: list[str] = []

    def stop_halfway(done: float, total: float, label: str) -> None:
        seen.append(label)
        if done > total / 2:
            raise StoppedError

    journal = tmp_path / "p.journal"
    with pytest.raises(StoppedError):
        profile(model, fingerprint, DOCUMENTS, policy=SMALL, journal=journal, on_progress=stop_halfway)
    lines = journal.read_text().splitlines()
    measured = [label for label in seen if " at " in label]
    seen.clear()
    resumed = profile(
        model, fingerprint, DOCUMENTS, policy=SMALL, journal=journal, on_progress=lambda d, t, label: seen.append(label)
    )
    assert resumed.sha256 == made.sha256
    assert resumed.provenance["resumed_measurements"] == len(lines) - 1
    assert journal.read_text().splitlines()[: len(lines)] == lines
    assert not {label for label in seen if " at " in label} & set(measured[:-1])
    # Everything is known now: nothing runs.
    seen.clear()
    profile(model, fingerprint, DOCUMENTS, policy=SMALL, journal=journal, on_progress=lambda d, t, s: seen.append(s))
    assert not [label for label in seen if " at " in label]


@pytest.mark.parametrize("change", ["documents", "policy", "weights"])
def test_the_journal_of_other_inputs_is_refused(model, fingerprint, tmp_path, change):
    journal = tmp_path / "p.journal"
    profile(model, fingerprint, DOCUMENTS[:1], policy=SMALL, journal=journal)
    inputs = {"fingerprint": fingerprint, "documents": DOCUMENTS[:1], "policy": SMALL}
    if change == "documents":
        inputs["documents"] = DOCUMENTS[1:2]
    elif change == "policy":
        inputs["policy"] = Policy(sink_tokens=8, window_tokens=8, page_tokens=8)
    else:
        inputs["fingerprint"] = fingerprint.model_copy(update={"weights_sha256": "0" * 64})
    with pytest.raises(LoopKVError, match="another run"):
        profile(model, **inputs, journal=journal)
    profile(model, **inputs, journal=journal, restart=True)


def test_progress_ends_at_its_total(model, fingerprint):
    calls: list[tuple[float, float]] = []
    profile(model, fingerprint, DOCUMENTS, policy=SMALL, on_progress=lambda d, t, _: calls.append((d, t)))
    assert [d for d, _ in calls] == sorted(d for d, _ in calls)
    assert calls[-1][0] == pytest.approx(calls[-1][1])


# --- whole plans ---------------------------------------------------------------------------------------------------


def _plan(fingerprint, options, tau=None):
    plan = make_plan(fingerprint.geometry, options, tau=tau, policy=SMALL)
    return plan.model_copy(update={"fingerprint": fingerprint})


MIXED = ("int4", "bf16", "share", "int2", "int4", "int4")


@pytest.mark.parametrize("threshold", [None, 1.0])
def test_a_plan_is_measured_as_defined(model, fingerprint, threshold):
    plan = _plan(fingerprint, MIXED, threshold)
    (result,) = measure(model, fingerprint, [plan], DOCUMENTS)
    reads = plan_reads(model.geometry, plan.cell_options)
    expected = [_damage(model, reads, document, threshold) for document in DOCUMENTS]
    assert result.kl_nats == pytest.approx([kl for kl, _ in expected], rel=1e-6)
    assert result.agreement == pytest.approx([1 - changed for _, changed in expected], abs=1e-12)
    assert result.measured.kl_nats == pytest.approx(math.fsum(result.kl_nats) / 3)
    assert result.measured.tau == threshold and result.plan.measured == result.measured
    low, high = result.measured.kl_ci95_nats
    tiny = 1e-12
    assert min(result.kl_nats) - tiny <= low <= result.measured.kl_nats <= high <= max(result.kl_nats) + tiny
    known = [share is not None for share in result.hot_share]
    assert known == ([False] * 6 if threshold is None else [True, False, True, False, True, True])


def test_the_exact_plan_damages_exactly_nothing(model, fingerprint):
    (result,) = measure(model, fingerprint, [_plan(fingerprint, "bf16")], DOCUMENTS)
    assert result.kl_nats == (0.0,) * 3 and result.measured.top1_agreement == 1.0


def test_equal_plans_run_once_and_keep_their_names(model, fingerprint):
    plan = _plan(fingerprint, "int2")
    twin = plan.model_copy(update={"name": "twin"})
    labels: list[str] = []
    results = measure(model, fingerprint, [plan, twin], DOCUMENTS, on_progress=lambda d, t, label: labels.append(label))
    assert [r.plan.name for r in results] == ["test", "twin"]
    assert results[0].kl_nats == results[1].kl_nats
    assert len([label for label in labels if label != "exact run"]) == 1


def test_measurements_are_read_back_from_the_journal(model, fingerprint, tmp_path):
    plans = [_plan(fingerprint, MIXED, 1.0), _plan(fingerprint, "int2")]
    journal = tmp_path / "m.journal"
    first = measure(model, fingerprint, plans, DOCUMENTS, journal=journal)
    size = journal.stat().st_size
    again = measure(model, fingerprint, plans, DOCUMENTS[:2], journal=journal)
    assert journal.stat().st_size == size
    assert [r.kl_nats for r in again] == [r.kl_nats[:2] for r in first]
    both = measure(model, fingerprint, [*plans, _plan(fingerprint, "int4")], DOCUMENTS, journal=journal)
    assert [r.hot_share for r in both[:2]] == [r.hot_share for r in first]
    assert journal.stat().st_size > size


def test_plans_of_another_model_are_refused(model, fingerprint):
    plan = _plan(fingerprint, "int2")
    other = plan.model_copy(update={"fingerprint": fingerprint.model_copy(update={"weights_sha256": "0" * 64})})
    with pytest.raises(PlanMismatchError, match="other weights"):
        measure(model, fingerprint, [other], DOCUMENTS)
    assert measure(model, fingerprint, [other], DOCUMENTS, accept_weights=True)


def test_records_hold_every_document(model, fingerprint):
    results = measure(model, fingerprint, [_plan(fingerprint, MIXED, 1.0)], DOCUMENTS)
    (record,) = measurement_records(results, seed=0)
    assert record.what == "quality.kl_nats"
    assert record.samples == tuple(float(f"{nats:.6g}") for nats in results[0].kl_nats)
    assert record.settings["documents"] == 3 and record.settings["tau"] == 1.0
    assert record.plan_sha256 == results[0].plan.sha256


def test_the_bootstrap_interval():
    assert bootstrap_interval([2.0]) == (2.0, 2.0)
    assert bootstrap_interval([1.0, 1.0, 1.0]) == (1.0, 1.0)
    low, high = bootstrap_interval([0.0, 1.0], seed=1)
    assert (low, high) == (0.0, 1.0)  # both documents alike happens in half of the resamples
    values = [float(v) for v in range(20)]
    low, high = bootstrap_interval(values)
    # Standard error of the mean: sqrt((20^2 - 1) / 12 / 20) = 1.289; 1.96 of them around 9.5.
    assert low == pytest.approx(9.5 - 1.96 * 1.289, abs=0.1) and high == pytest.approx(9.5 + 1.96 * 1.289, abs=0.1)
    assert bootstrap_interval(values) == (low, high)


# --- tau -----------------------------------------------------------------------------------------------------------


def test_the_smallest_tau_within_tolerance_is_chosen(model, fingerprint):
    plan = _plan(fingerprint, "int4")
    sweep = tau(model, fingerprint, plan, DOCUMENTS, candidates=(8.0, 0.0, 2.0, 30.0))
    assert [point.plan.tau for point in sweep.points] == [0.0, 2.0, 8.0, 30.0]
    full = sweep.full.measured.kl_nats
    fitting = [p.plan.tau for p in sweep.points if p.measured.kl_nats <= 1.02 * full]
    assert sweep.plan.tau == min(fitting) and sweep.plan.options == plan.options
    assert sweep.plan.measured.tau == sweep.plan.tau
    assert sweep.growth(sweep.points[-1]) == pytest.approx(1.0, abs=1e-6)
    hot = [math.fsum(s for s in p.loop_hot_share() if s is not None) for p in sweep.points]
    assert hot == sorted(hot) and hot[-1] == pytest.approx(3.0)  # three loops, everything hot at 30 bits


def test_no_tau_is_chosen_where_none_is_good_enough(model, fingerprint):
    sweep = tau(model, fingerprint, _plan(fingerprint, "int4"), DOCUMENTS, candidates=(0.0,), tolerance=0.0)
    assert sweep.growth(sweep.points[0]) > 1
    assert sweep.plan.tau is None and sweep.plan.measured == sweep.full.measured


def test_a_plan_without_int4_has_no_tau(model, fingerprint):
    with pytest.raises(UnsupportedError, match="no cell that reads an int4 history"):
        tau(model, fingerprint, _plan(fingerprint, "int2"), DOCUMENTS)


@pytest.mark.parametrize("bad", [(), (-1.0,), (float("nan"),), (2000.0,)])
def test_impossible_thresholds_are_refused(model, fingerprint, bad):
    with pytest.raises(LoopKVError, match="thresholds"):
        tau(model, fingerprint, _plan(fingerprint, "int4"), DOCUMENTS, candidates=bad)


# --- the model's own documents -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(reference.model_folder())


def test_own_documents_are_sampled_from_the_model_and_seeded(model, tokenizer):
    found = own_documents(model, tokenizer, count=3, tokens=50, policy=SMALL, seed=7)
    assert [len(d.ids) for d in found.documents] == [50] * 3 and found.too_short == 0
    assert {d.ids[0] for d in found.documents} == {tokenizer.bos_token_id}
    assert len({d.ids for d in found.documents}) == 3
    assert own_documents(model, tokenizer, count=3, tokens=50, policy=SMALL, seed=7) == found
    assert own_documents(model, tokenizer, count=3, tokens=50, policy=SMALL, seed=8) != found


def test_a_cold_sample_is_the_greedy_continuation(model, tokenizer):
    """At a temperature of almost 0 every token is the most likely one of the exact model: the cache is right."""
    (document,) = own_documents(model, tokenizer, count=1, tokens=40, policy=SMALL, temperature=1e-6).documents
    logits = oracle_logits(model, document.ids, exact_reads(model.geometry), SMALL)
    assert document.ids[1:] == tuple(logits[:-1].argmax(-1).tolist())


def test_prompts_of_different_lengths_are_continued_together(tmp_path, tokenizer):
    model = load_model(write_random_ouro(tmp_path / "m", vocab=4096), torch.float64)
    prompts = ["A", "The cat sat on the mat and"]
    found = own_documents(model, tokenizer, count=2, tokens=40, prompts=prompts, temperature=1e-6, policy=SMALL)
    for document, prompt in zip(found.documents, prompts, strict=True):
        ids = tuple(tokenizer(prompt).input_ids)
        assert document.ids[: len(ids)] == ids and len(document.ids) == 40
        logits = oracle_logits(model, document.ids, exact_reads(model.geometry), SMALL)
        assert document.ids[len(ids) :] == tuple(logits[len(ids) - 1 : -1].argmax(-1).tolist())
    with pytest.raises(DocumentError, match="fewer than 32"):
        own_documents(model, tokenizer, count=1, tokens=32, prompts=["word " * 40], policy=SMALL)


def test_generations_that_end_too_early_are_tried_again_then_refused(tmp_path, tokenizer):
    # 3 of 64 tokens end a text: (61/64)^31 = 23% of the generations reach 32 tokens.
    some = load_model(write_random_ouro(tmp_path / "some", eos=[5, 6, 7]), torch.float64)
    found = own_documents(some, tokenizer, count=8, tokens=48, policy=SMALL, attempts=20)
    assert found.documents and found.too_short
    assert all(len(d.ids) >= 32 and not {5, 6, 7} & set(d.ids[1:]) for d in found.documents)
    always = load_model(write_random_ouro(tmp_path / "all", eos=list(range(64))), torch.float64)
    with pytest.raises(DocumentError, match=r"too short to leave the window, got at most 1 tokens in 4 generations"):
        own_documents(always, tokenizer, count=2, tokens=48, policy=SMALL, attempts=2)


# --- the command, killed -------------------------------------------------------------------------------------------


def _command(output: Path, *more: str) -> list[str]:
    texts = Path(reference.__file__).parent / "heldout.jsonl.xz"
    options = ["--documents", str(texts), "--limit", "2", "--max-tokens", "352", "--batch", "1", *more]
    return [sys.executable, "-m", "loopkv", "profile", str(reference.model_folder()), "-o", str(output), *options]


def test_a_killed_command_resumes_with_the_same_result(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output, journal = tmp_path / "killed.json", tmp_path / "killed.json.journal"
    process = subprocess.Popen(_command(output), env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and len(journal.read_bytes().splitlines()) > 20:
            break
        time.sleep(0.02)
    assert process.poll() is None, "the command ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    kept = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")][1:]
    assert 20 <= len(kept) < 90
    # A file of other options is not continued, and stays.
    other = subprocess.run(_command(output, "--skip", "1"), env=environment, capture_output=True, text=True)
    assert other.returncode == 1 and "belongs to another run" in other.stderr and "Traceback" not in other.stderr
    subprocess.run(_command(output), env=environment, check=True, capture_output=True)
    assert not journal.exists()
    resumed = Profile.load(output)
    assert resumed.provenance["resumed_measurements"] == len(kept)
    for row in kept:
        option, cell, document = row["name"].split(":")
        if option != "kl_share":
            assert resumed.damage_nats[option][int(cell)][int(document)] == row["value"][0]
    whole = tmp_path / "whole.json"
    subprocess.run(_command(whole), env=environment, check=True, capture_output=True)
    assert Profile.load(whole).sha256 == resumed.sha256


def test_document_infos_survive_the_file(made, tmp_path):
    made.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == made
    assert dataclasses.asdict(DOCUMENTS[0])["source"] == made.documents[0].source
