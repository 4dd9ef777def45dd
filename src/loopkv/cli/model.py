"""The model of a command: a folder, or the embedded reference model by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loopkv.reference import MODEL_NAME, model_place


def parse_model(text: str) -> Path:
    """The folder that ``text`` means: of the embedded model for its name, else the path itself."""
    return Path(model_place(text))


def model_name(folder: Path | None) -> str:
    """What a Record calls the model in ``folder``."""
    return "no model" if folder is None else folder.resolve().name


FOLDER_OR_NAME = f"FOLDER|{MODEL_NAME}"
"""Metavar of an option that takes a model."""

ModelArgument = Annotated[
    Path,
    typer.Argument(
        parser=parse_model,
        metavar="MODEL",
        help=f"Folder of the looped model (Hugging Face layout), or {MODEL_NAME}, the embedded one.",
    ),
]

OptionalModelArgument = Annotated[
    Path | None,
    typer.Argument(
        parser=parse_model,
        metavar="MODEL",
        help=f"Folder of the looped model (Hugging Face layout). Default: {MODEL_NAME}, the embedded one.",
    ),
]
