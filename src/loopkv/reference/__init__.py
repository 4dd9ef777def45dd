"""The embedded reference model: a small trained looped checkpoint with its tokenizer, documents and task items."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent
MODEL_NAME = "looped-tiny"
"""What every command takes for the folder of the reference model."""


def model_place(text: str) -> str:
    """Where the model that a user means lies: the name of the reference model wins over a folder that is called so.

    Anything else (a path, a name on the Hugging Face hub) stays as it is.
    """
    return str(model_folder()) if text == MODEL_NAME else text


def model_folder() -> Path:
    """Hugging Face folder of the reference model."""
    return _ROOT / MODEL_NAME


def heldout_path() -> Path:
    """File of documents the model was not trained on (JSON lines with ``text``, xz)."""
    return _ROOT / "heldout.jsonl.xz"


def heldout_documents() -> list[str]:
    """Documents the model was not trained on, each of at least 3,000 tokens."""
    return [line["text"] for line in _lines("heldout.jsonl.xz")]


def task_items() -> list[dict[str, Any]]:
    """Task items: ``id, task, length, prompt, answer, score``; generation stops at the first newline.

    ``score`` is ``exact`` (stripped text equal), ``final`` (number after "Answer:" equal) or ``set`` (share of the
    comma-separated wanted items present).
    """
    return _lines("tasks.jsonl.xz")


def _lines(name: str) -> list[dict[str, Any]]:
    with lzma.open(_ROOT / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
