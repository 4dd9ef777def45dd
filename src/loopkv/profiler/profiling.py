"""``profile(model, fingerprint, documents) -> Profile``: the damage of every cell alone under every option.

Perturbing a cell changes nothing before it and nothing below position 319, so each variant resumes at its cell from the
hidden states of one exact run. A cell under ``share`` reads its source's history coded at int4 while the source itself
stays exact; the source's own damage is measured apart (semantics of paper section 3.2).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopkv.artifacts import Fingerprint, Profile
from loopkv.artifacts.storage import digest
from loopkv.engine.whole_sequence import HistoryRead, exact_reads
from loopkv.geometry import Geometry
from loopkv.models.base import LoopedModel
from loopkv.options import INT2, INT4, SHARE, check_codable
from loopkv.policy import DEFAULT_POLICY, Policy
from loopkv.profiler.documents import Document, documents_sha256
from loopkv.profiler.journal import Journal
from loopkv.profiler.probe import LOGITS_COST_CELLS, OnProgress, Probe, check_precision, document_batches
from loopkv.records import Record, git_commit, make_record, package_versions

PROFILED_OPTIONS = (INT4.name, INT2.name, SHARE.name)
MEASUREMENT_VERSION = 1
"""Raised whenever the same model, policy and documents would give other figures: old journals are then refused."""
KL_SHARE = "kl_share"


@dataclass(frozen=True, slots=True)
class Variant:
    """One perturbed run: an option's name (or ``kl_share``), its first perturbed cell, and what every cell reads."""

    option: str
    cell: int
    reads: tuple[HistoryRead, ...]


def variants(geometry: Geometry) -> tuple[Variant, ...]:
    """Every run of a profile, in cell order: each cell under each option that applies, and KL_share."""
    exact = exact_reads(geometry)
    runs = []
    for cell in range(len(geometry.cells)):
        source = geometry.source_of(cell)
        reads = {INT4.name: HistoryRead(cell, INT4.bits), INT2.name: HistoryRead(cell, INT2.bits)}
        if source is not None:
            reads[SHARE.name] = HistoryRead(source, INT4.bits)
        for option, read in reads.items():
            runs.append(Variant(option, cell, (*exact[:cell], read, *exact[cell + 1 :])))
    if geometry.loops > 1:
        shared = geometry.loop_cells(geometry.loops - 2)
        sources = {cell: geometry.source_of(cell) for cell in shared}
        reads_all = tuple(
            HistoryRead(source, None) if (source := sources.get(cell)) is not None else read
            for cell, read in enumerate(exact)
        )
        runs.append(Variant(KL_SHARE, shared[0], reads_all))
    return tuple(runs)


def profile_key(fingerprint: Fingerprint, documents: Sequence[Document], policy: Policy) -> str:
    """Identity of everything that decides a profile's figures: what a journal belongs to."""
    return digest(
        {
            "measurement": MEASUREMENT_VERSION,
            "geometry": fingerprint.geometry.model_dump(mode="json"),
            "weights": fingerprint.weights_sha256,
            "policy": policy.model_dump(mode="json"),
            "documents": documents_sha256(documents),
        }
    )


def is_profile_of(made: Profile, fingerprint: Fingerprint, documents: Sequence[Document], policy: Policy) -> bool:
    """Whether measuring this model on these documents would give ``made`` again (see ``profile_key``)."""
    return (
        made.fingerprint == fingerprint
        and made.policy == policy
        and [info.sha256 for info in made.documents] == [document.sha256 for document in documents]
        and set(made.damage_nats) == {run.option for run in variants(fingerprint.geometry)} - {KL_SHARE}
        and made.provenance.get("measurement", 1) == MEASUREMENT_VERSION
    )


def profile(
    model: LoopedModel,
    fingerprint: Fingerprint,
    documents: Sequence[Document],
    *,
    policy: Policy = DEFAULT_POLICY,
    journal: Path | str | None = None,
    restart: bool = False,
    batch_documents: int | None = None,
    provenance: dict[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> Profile:
    """Measure the damage of every cell alone under int4, int2 and share.

    Args:
        model: loaded in fp32 (or fp64).
        fingerprint: of the checkpoint the model was loaded from.
        documents: each of at least 320 tokens (``min_document_tokens``).
        policy: constants, which a plan made from this profile inherits.
        journal: file that results are written to as they come; an interrupted run continues from it. The caller
            removes it once the profile is saved (``loopkv profile`` does).
        restart: measure anew whatever the journal holds.
        batch_documents: documents that run together; as many as fit by default.
        provenance: added to what the profile says about itself.
        on_progress: told about progress.

    Raises:
        UnsupportedError: a model in BF16, or a head size the codec cannot code.
        LoopKVError: a journal of another run, predictions that are not finite.
    """
    geometry = model.geometry
    check_precision(model)
    check_codable(geometry.head_dim, policy)
    runs = variants(geometry)
    cells = len(geometry.cells)
    batches = document_batches(model, documents, policy, cells, batch_documents)
    total = sum((cells + LOGITS_COST_CELLS) + sum(_cost(run, cells) for run in runs) for _ in documents)
    started, done, resumed = time.perf_counter(), 0.0, 0
    found: dict[str, tuple[float, float]] = {}

    def advance(work: float, label: str) -> None:
        nonlocal done
        done += work
        if on_progress is not None:
            on_progress(done, total, label)

    key = profile_key(fingerprint, documents, policy)
    with Journal(journal, key, restart=restart) if journal is not None else nullcontext() as kept:
        for number, batch in enumerate(batches, start=1):
            todo = []
            for run in runs:
                names = [_name(run, document) for document in batch]
                if kept is not None and all(name in kept for name in names):
                    found |= {name: tuple(kept.get(name)) for name in names}
                    resumed += len(names)
                    advance(_cost(run, cells) * len(batch), "resumed")
                else:
                    todo.append(run)
            label = (
                f"batch {number}/{len(batches)}"
                if len(batches) > 1
                else f"{len(batch)} document{'s' * (len(batch) != 1)}"
            )
            if todo:
                probe = Probe(model, [documents[i] for i in batch], policy, {run.cell for run in todo})
            advance((cells + LOGITS_COST_CELLS) * len(batch), f"{label}: exact run")
            for run in todo:
                damages = probe.measure(run.reads)
                for document, damage in zip(batch, damages, strict=True):
                    found[_name(run, document)] = (damage.kl_nats, damage.changed)
                    if kept is not None:
                        kept.put(_name(run, document), [damage.kl_nats, damage.changed])
                advance(_cost(run, cells) * len(batch), f"{label}: {run.option} at {geometry.cells[run.cell].label}")

    def rows(option: str, part: int) -> tuple[tuple[float, ...] | None, ...]:
        measured = {run.cell: run for run in runs if run.option == option}
        return tuple(
            tuple(found[_name(measured[cell], i)][part] for i in range(len(documents))) if cell in measured else None
            for cell in range(cells)
        )

    options = [option for option in PROFILED_OPTIONS if any(run.option == option for run in runs)]
    share_run = next((run for run in runs if run.option == KL_SHARE), None)
    return Profile(
        fingerprint=fingerprint,
        policy=policy,
        documents=tuple(document.info(policy) for document in documents),
        damage_nats={option: rows(option, 0) for option in options},
        changed={option: rows(option, 1) for option in options},
        kl_share_nats=None
        if share_run is None
        else tuple(found[_name(share_run, i)][0] for i in range(len(documents))),
        provenance={
            "measurement": MEASUREMENT_VERSION,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "batch_documents": max(len(batch) for batch in batches),
            "seconds": round(time.perf_counter() - started, 3),
            "resumed_measurements": resumed,
            "versions": package_versions(),
            "commit": git_commit(),
            **(provenance or {}),
        },
    )


def profile_records(made: Profile) -> list[Record]:
    """KL_share, the unit of damage, as a Record (none for a model of one loop); samples are documents."""
    if made.kl_share is None or made.kl_share_nats is None:
        return []
    return [
        make_record(
            "quality.kl_share_nats",
            made.kl_share,
            "nats",
            samples=made.kl_share_nats,
            settings={"documents": len(made.documents), "profile_sha256": made.sha256},
            model=made.fingerprint.name,
            weights_sha256=made.fingerprint.weights_sha256,
        )
    ]


def _cost(run: Variant, cells: int) -> float:
    return cells - run.cell + LOGITS_COST_CELLS


def _name(run: Variant, document: int) -> str:
    return f"{run.option}:{run.cell}:{document}"
