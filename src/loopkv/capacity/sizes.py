"""Weights of a looped model: how many there are and how many a decode step reads."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def shape_size(shape: Mapping[str, Any]) -> ModelSize:
    """Weights of an Ouro of ``shape``, by the names of its config.json."""
    return ouro_size(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        layers=shape["num_hidden_layers"],
        loops=shape["total_ut_steps"],
        query_heads=shape["num_attention_heads"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        tied=bool(shape.get("tie_word_embeddings", False)),
    )


_OURO_SHAPE: dict[str, Any] = {  # config.json of ByteDance/Ouro-1.4B
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "total_ut_steps": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "ouro-1.4b": _OURO_SHAPE,
    "ouro-2.6b": {**_OURO_SHAPE, "num_hidden_layers": 48},  # by its config; the card's table gives it 24 layers
    "tiny": {
        **_OURO_SHAPE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "total_ut_steps": 3,
    },
}
"""Geometries by name, for every command that takes ``--geometry``; ``tiny`` is for tests on a CPU. The vocabulary stays
Ouro's: it must hold the tokenizer's ids."""

KNOWN_MODELS: dict[str, ModelSize] = {name: shape_size(shape) for name, shape in SHAPES.items()}


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
