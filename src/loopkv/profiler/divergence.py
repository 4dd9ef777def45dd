"""KL between the exact and a perturbed next-token distribution, accurate where it is tiny and never negative.

With ``d = logits_perturbed - logits_exact`` and p the exact distribution, ``KL(p || q) = log E_p[e^d] - E_p[d]``. The
difference of two log-softmaxes would lose it: at 1e-6 nats their fp32 rounding is as large as the result. Centring d
removes what cancels: with ``x = d - E_p[d]`` and ``E_p[x] = 0``

    KL = log1p(E_p[e^x - 1 - x])

where every term is >= 0. An error of p enters only in second order. Everything after the logits is fp64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from loopkv.errors import ModelFormatError
from loopkv.models.base import LoopedModel

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 25}  # fp64 temporaries that stay in a core's cache; device memory

_WILD_NATS = 60.0
"""Beyond this change of a centred logit, e^x outgrows what single-precision weights resolve; and nothing is tiny."""


@dataclass(frozen=True, slots=True)
class ExactPredictions:
    """Next-token distributions of the exact model at N positions.

    Args:
        logits: [N, V] in the model's dtype, at least fp32.
        weights: [N, V] probabilities, same dtype.
        top: [N] most likely tokens.
    """

    logits: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    top: Tensor = field(repr=False)


def _chunk_rows(model: LoopedModel) -> int:
    return max(1, _CHUNK_ELEMENTS.get(model.device.type, 1 << 17) // model.vocab_size)


def _row_logits(model: LoopedModel, rows: Tensor) -> Tensor:
    logits = model.logits(rows)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.inference_mode()
def exact_predictions(model: LoopedModel, hidden: Tensor) -> ExactPredictions:
    """Predictions of the exact run's final hidden states [N, E].

    Raises:
        ModelFormatError: logits that are not finite.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    shape = (hidden.shape[0], model.vocab_size)
    logits = torch.empty(shape, dtype=wide, device=hidden.device)
    weights = torch.empty_like(logits)
    rows = _chunk_rows(model)
    for start in range(0, hidden.shape[0], rows):
        part = _row_logits(model, hidden[start : start + rows])
        logits[start : start + rows] = part
        weights[start : start + rows] = torch.softmax(part.double(), dim=-1).to(wide)
    if not bool(torch.isfinite(logits).all()):
        raise ModelFormatError(
            f"logits of {model.name}",
            got="values that are not finite",
            hint="check the checkpoint, or use a wider dtype",
        )
    return ExactPredictions(logits, weights, logits.argmax(-1))


@torch.inference_mode()
def divergence(model: LoopedModel, exact: ExactPredictions, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """KL(exact || perturbed) in nats [N] fp64, and whether the most likely token changed [N] bool.

    Args:
        model: gives the logits.
        exact: predictions at the same N positions.
        hidden: perturbed final hidden states [N, E].
    """
    count = hidden.shape[0]
    kl = torch.empty(count, dtype=torch.float64, device=hidden.device)
    changed = torch.empty(count, dtype=torch.bool, device=hidden.device)
    rows = _chunk_rows(model)
    for start in range(0, count, rows):
        place = slice(start, start + rows)
        logits = _row_logits(model, hidden[place])
        changed[place] = logits.argmax(-1) != exact.top[place]
        kl[place] = centred_kl(exact.logits[place], exact.weights[place], logits)
    return kl, changed


def centred_kl(exact_logits: Tensor, weights: Tensor, logits: Tensor) -> Tensor:
    """``log1p(E_p[e^x - 1 - x])`` of [N, V] logits with p = ``weights``: [N] fp64, >= 0."""
    p = weights.double()
    x = logits.double().sub_(exact_logits)
    x -= torch.linalg.vecdot(p, x).unsqueeze(-1)
    wild = x.amax(-1) > _WILD_NATS
    excess = torch.expm1(x).sub_(x)
    kl = torch.log1p(torch.linalg.vecdot(p, excess).clamp_min_(0.0))
    if bool(wild.any()):
        a, b = (torch.log_softmax(rows[wild].double(), dim=-1) for rows in (exact_logits, logits))
        kl[wild] = (a.exp() * (a - b)).sum(-1).clamp_min_(0.0)
    return kl
