"""Weights of a looped model: how many there are and how many a decode step reads."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from loopkv.errors import UnsupportedError
from loopkv.geometry import Geometry


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Geometry and weights of a model.

    Args:
        geometry: its cells.
        parameters: all weights, which the GPU holds once.
        step_parameters: weights that a decode step reads: T times the looped block, and the head once (of the embedding
            a token reads one row, which is left out).
    """

    geometry: Geometry
    parameters: int
    step_parameters: int


def ouro_size(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    loops: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    tied: bool,
) -> ModelSize:
    """Size of an Ouro model: per layer q, k, v, o, a gated MLP and four norms; one norm and one exit gate for all."""
    attention = hidden_size * head_dim * (2 * query_heads + 2 * kv_heads)
    layer = attention + 3 * hidden_size * intermediate_size + 4 * hidden_size
    head = vocab_size * hidden_size
    exit_gate = hidden_size + 1
    return ModelSize(
        geometry=Geometry(
            architecture="ouro",
            loops=loops,
            layers=layers,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
        ),
        parameters=layers * layer + hidden_size + exit_gate + head * (1 if tied else 2),
        step_parameters=loops * (layers * layer + hidden_size) + head,
    )


def _ouro(layers: int) -> ModelSize:
    return ouro_size(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        layers=layers,
        loops=4,
        query_heads=16,
        kv_heads=16,
        head_dim=128,
        tied=False,
    )


# config.json of ByteDance/Ouro-1.4B and Ouro-2.6B (the card's table gives 24 layers for 2.6B, its config 48).
KNOWN_MODELS: dict[str, ModelSize] = {"ouro-1.4b": _ouro(24), "ouro-2.6b": _ouro(48)}


def get_model_size(name: str) -> ModelSize:
    """The size of a known model.

    Raises:
        UnsupportedError: not in the table; the nearest name is suggested.
    """
    key = name.strip().lower()
    if key in KNOWN_MODELS:
        return KNOWN_MODELS[key]
    near = difflib.get_close_matches(key, KNOWN_MODELS, n=1, cutoff=0.5)
    raise UnsupportedError(
        "model geometry",
        got=repr(name)[:80],
        wanted=", ".join(KNOWN_MODELS),
        hint=f"did you mean {near[0]}?" if near else "give --model FOLDER for a checkpoint of your own",
    )
