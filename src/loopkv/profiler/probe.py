"""One exact run of a batch of documents, against which perturbed runs are compared position by position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopkv.engine.whole_sequence import HistoryRead, run_exact, run_perturbed
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.models.base import LoopedModel
from loopkv.policy import Policy
from loopkv.profiler.divergence import divergence, exact_predictions
from loopkv.profiler.documents import Document

OnProgress = Callable[[float, float, str], None]
"""``on_progress(done, total, label)``: work done and in all, in cells run over one document's tokens."""

MAX_BATCH_DOCUMENTS = 8
CPU_BATCH_BYTES = 2 << 30
CUDA_BATCH_SHARE = 0.4  # of the free device memory; the rest is for activations
LOGITS_COST_CELLS = 1.0
"""What comparing the predictions of a run costs beside its cells, for progress alone."""


@dataclass(frozen=True, slots=True)
class DocumentDamage:
    """Means over a document's scored positions.

    Args:
        kl_nats: KL(exact || perturbed) in nats.
        changed: share of positions whose most likely token changed.
        hot: with tau, (hot, all) (query, kv head, history token) triples of every cell that reads an int4 history.
    """

    kl_nats: float
    changed: float
    hot: dict[int, tuple[int, int]]


class Probe:
    """The exact run of documents, padded on the right to one length (padding is neither read nor scored).

    Args:
        model: fp32 or fp64.
        documents: each longer than ``policy.first_coded_position``.
        policy: constants.
        resume_cells: the first perturbed cells of the runs to come, where hidden states are kept.
    """

    def __init__(
        self, model: LoopedModel, documents: Sequence[Document], policy: Policy, resume_cells: Iterable[int]
    ) -> None:
        self._model, self._policy = model, policy
        lengths = [len(document.ids) for document in documents]
        longest = max(lengths)
        ids = torch.zeros(len(documents), longest, dtype=torch.int64)
        for row, document in enumerate(documents):
            ids[row, : lengths[row]] = torch.tensor(document.ids)
        self._lengths = lengths
        self._scored = [length - policy.first_coded_position for length in lengths]
        with full_precision(model):
            self._exact = run_exact(model, ids.to(model.device), policy, resume_cells)
            self._predictions = exact_predictions(model, self._rows(self._exact.final))

    def _rows(self, hidden: Tensor) -> Tensor:
        """The scored rows [N, E] of hidden states [B, T, E], document after document."""
        return torch.cat([hidden[row, :count] for row, count in enumerate(self._scored)])

    def measure(self, reads: Sequence[HistoryRead], tau: float | None = None) -> list[DocumentDamage]:
        """Damage of every document when cells read ``reads``, with V precision where ``tau`` is given.

        Raises:
            LoopKVError: predictions that are not finite.
        """
        with full_precision(self._model):
            hidden, hot = run_perturbed(self._model, self._exact, reads, self._policy, tau=tau, lengths=self._lengths)
            kl, changed = divergence(self._model, self._predictions, self._rows(hidden))
        if not bool(torch.isfinite(kl).all()):
            raise LoopKVError(f"predictions of {self._model.name} under a plan", got="values that are not finite")
        counts = {cell: (count.hot.tolist(), count.total.tolist()) for cell, count in hot.items()}
        parts = zip(kl.split(self._scored), changed.split(self._scored), strict=True)
        return [
            DocumentDamage(
                float(part.mean()),
                float(top.double().mean()),
                {cell: (its[row], everything[row]) for cell, (its, everything) in counts.items()},
            )
            for row, (part, top) in enumerate(parts)
        ]


def check_precision(model: LoopedModel) -> None:
    """Refuse a model whose rounding hides the damage (UnsupportedError)."""
    if model.dtype not in {torch.float32, torch.float64}:
        raise UnsupportedError(
            f"damage of {model.name}",
            got=f"activations in {str(model.dtype).removeprefix('torch.')}",
            wanted="float32: two exact BF16 runs differ by more than KIVI-4's damage",
            hint="load the model with dtype=torch.float32",
        )


def document_batches(
    model: LoopedModel, documents: Sequence[Document], policy: Policy, resume_cells: int, limit: int | None = None
) -> list[list[int]]:
    """Positions of the documents that run together: neighbours in length, as many as the memory holds.

    Args:
        model, documents, policy: as for ``Probe``.
        resume_cells: how many cells' hidden states a probe keeps.
        limit: most documents of a batch; by memory, and at most ``MAX_BATCH_DOCUMENTS``, when None.
    """
    longest = max(len(document.ids) for document in documents)
    size = limit or min(MAX_BATCH_DOCUMENTS, _batch_for_memory(model, longest, policy, resume_cells))
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i].ids), i))
    return [sorted(order[i : i + size]) for i in range(0, len(order), size)]


def _batch_for_memory(model: LoopedModel, tokens: int, policy: Policy, resume_cells: int) -> int:
    geometry, cells = model.geometry, len(model.geometry.cells)
    embedding = model.embed(torch.zeros(1, 1, dtype=torch.int64, device=model.device)).shape[-1]
    scored = tokens - policy.first_coded_position
    cell_token = 2 * geometry.kv_heads * geometry.head_dim
    elements = cells * (policy.first_coded_position + tokens) * cell_token  # prefix, and exact KV of the run
    elements += cells * tokens * cell_token * 3 // 2  # decoded histories, with the cold values
    elements += scored * (2 * model.vocab_size + (resume_cells + 2) * embedding)
    budget = float(CPU_BATCH_BYTES)
    if model.device.type == "cuda":
        budget = torch.cuda.mem_get_info(model.device)[0] * CUDA_BATCH_SHARE
    return max(1, int(budget // (elements * model.dtype.itemsize)))


@contextlib.contextmanager
def full_precision(model: LoopedModel) -> Iterator[None]:
    """fp32 products in fp32 (TF32 off) while inside."""
    if model.device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
