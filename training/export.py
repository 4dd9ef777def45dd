"""Writes the trained parameters as a Hugging Face folder and reads such a folder back."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import Geometry, LoopedLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def export(model: LoopedLM, folder: Path, tokenizer_folder: Path | None = None) -> Path:
    """BF16 ``model.safetensors`` (lm_head is tied, hence absent), ``config.json`` and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    partial = folder / "model.safetensors.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.geometry.hf_config(), indent=1) + "\n")
    if tokenizer_folder is not None:
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer_folder / name, folder / name)
    return folder


def load(folder: Path, device: str = "cpu") -> LoopedLM:
    """The model of a folder in fp32 (values are those of the BF16 file). Refuses missing and unknown tensors."""
    model = LoopedLM(Geometry.from_hf(folder))
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({n: t.float() for n, t in state.items()}, strict=True)
    return model.to(device).eval()
