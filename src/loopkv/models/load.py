"""Load a looped checkpoint from a local Hugging Face folder; no code of the checkpoint ever runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopkv.artifacts import Fingerprint
from loopkv.errors import ModelFormatError, UnsupportedError
from loopkv.geometry import Geometry
from loopkv.models.base import LoopedModel
from loopkv.models.config import parse_ouro_config, read_config
from loopkv.models.ouro import OuroModel, ouro_geometry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_TYPES = ("ouro",)
WEIGHT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelFormatError(f"{index}", got="no weight_map", wanted="a safetensors index") from None
        files = [folder / str(name) for name in names]
        if any(file.parent != folder for file in files):
            raise ModelFormatError(f"{index}", got="a shard outside the model folder")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFormatError(f"model {folder}", got="no *.safetensors file", wanted="safetensors weights")
    for file in files:
        if not file.is_file():
            raise ModelFormatError(f"model {folder}", got=f"no {file.name}", wanted="every shard of the index")
    return files


def _read_geometry(folder: Path) -> Geometry:
    config = read_config(folder)
    if config["model_type"] != "ouro":
        raise UnsupportedError(
            f"model type of {folder}",
            got=repr(config["model_type"])[:80],
            wanted=", ".join(MODEL_TYPES),
            hint="LoopKV compresses looped transformers; a model without loops has no cells to choose for",
        )
    return ouro_geometry(parse_ouro_config(config, f"{folder}/config.json"))


def fingerprint_model(folder: Path | str) -> Fingerprint:
    """Identity of the checkpoint in ``folder``: geometry, and SHA-256 of weights and tokenizer files."""
    folder = Path(folder)
    geometry = _read_geometry(folder)
    weights = hashlib.sha256()
    for file in _weight_files(folder):
        with file.open("rb") as handle:
            weights.update(hashlib.file_digest(handle, "sha256").digest())
    tokenizer = folder / "tokenizer.json"
    return Fingerprint(
        name=folder.resolve().name,
        geometry=geometry,
        weights_sha256=weights.hexdigest(),
        tokenizer_sha256=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None,
    )


def load_model(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LoopedModel:
    """Load the looped model in ``folder``.

    Args:
        folder: config.json and safetensors as Hugging Face writes them.
        dtype: of weights and activations (fp64, fp32 or BF16).
        device: where it runs.

    Raises:
        ModelFormatError: missing files, wrong shapes, weights that are not finite.
        UnsupportedError: another architecture.
    """
    folder = Path(folder)
    _read_geometry(folder)
    config = parse_ouro_config(read_config(folder), f"{folder}/config.json")
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as handle:
                for key in handle.keys():  # noqa: SIM118 - not a dict
                    tensors[key] = handle.get_tensor(key)
        except (SafetensorError, OSError) as problem:
            raise ModelFormatError(f"weights {file}", got=str(problem)[:120], wanted="a safetensors file") from None
    return OuroModel(
        config,
        lambda name, shape: _take(tensors, name, shape, folder),
        folder.resolve().name,
        dtype,
        torch.device(device),
    )


def resolve_device(name: str) -> torch.device:
    """The device called ``name`` (cpu, cuda, cuda:1), if this machine has it.

    Raises:
        UnsupportedError: no such device.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise UnsupportedError(
            "device", got=f"{name!r} ({str(problem).splitlines()[0][:80]})", wanted="cpu, or cuda where there is one"
        ) from None
    if device.type not in {"cpu", "cuda"}:
        raise UnsupportedError("device", got=repr(name), wanted="cpu or cuda")
    return device


def _take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], folder: Path) -> Tensor:
    if name not in tensors:
        raise ModelFormatError(f"weights of {folder}", got=f"no tensor {name}", wanted=f"shape {list(shape)}")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise ModelFormatError(f"weights of {folder}: {name}", got=list(tensor.shape), wanted=list(shape))
    if tensor.dtype not in WEIGHT_DTYPES:  # 8-bit floats come with scales, without which they are other weights
        got = str(tensor.dtype).removeprefix("torch.")
        raise ModelFormatError(f"weights of {folder}: {name}", got=got, wanted="floats of 16, 32 or 64 bits")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelFormatError(f"weights of {folder}: {name}", got="values that are not finite", wanted="floats")
    return tensor


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer (transformers; no remote code)."""
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelFormatError(f"model {folder}", got="no tokenizer.json", wanted="a fast tokenizer")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as problem:
        raise ModelFormatError(f"tokenizer of {folder}", got=str(problem)[:120]) from None
