"""Model folders without weights, for speed measurements with ``load_format="dummy"``: any Ouro geometry."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from loopkv import reference
from loopkv.artifacts.storage import write_atomically
from loopkv.capacity.sizes import SHAPES, shape_size
from loopkv.errors import LoopKVError, UnsupportedError

__all__ = ["SHAPES", "dummy_shape", "shape_size", "write_dummy_model"]

MAX_POSITIONS = 65536


def dummy_shape(name: str, layers: int | None = None) -> dict[str, Any]:
    """The shape called ``name``, with ``layers`` layers instead of its own.

    Raises:
        UnsupportedError: an unknown name.
        LoopKVError: no layer.
    """
    if name not in SHAPES:
        raise UnsupportedError("geometry", got=repr(name)[:80], wanted=", ".join(SHAPES))
    if layers is not None and not 1 <= layers <= 4096:
        raise LoopKVError("layers", got=layers, wanted="1 to 4096")
    return {**SHAPES[name], **({} if layers is None else {"num_hidden_layers": layers})}


def write_dummy_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write config.json of an Ouro of ``shape`` and the reference model's tokenizer into ``folder``.

    There are no weights: start the engine with ``load_format="dummy"``. Token ids above the tokenizer's vocabulary
    decode to nothing, which does not matter for speed.
    """
    config = {
        **shape,
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "early_exit_threshold": 1.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(reference.model_folder() / name, folder / name)
    return folder
