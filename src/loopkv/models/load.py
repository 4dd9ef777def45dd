"""Load a looped checkpoint from a local Hugging Face folder; no code of the checkpoint ever runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loopkv.artifacts import Fingerprint
from loopkv.artifacts.hashing import hash_file, hash_files
from loopkv.errors import ModelFormatError, UnsupportedError
from loopkv.models.base import LoopedModel
from loopkv.models.checkpoint import Checkpoint, weight_files
from loopkv.models.config import OuroConfig, parse_ouro_config, read_config
from loopkv.models.ouro import (
    EMBEDDING_TENSOR,
    HEAD_TENSOR,
    OuroModel,
    is_unused_tensor,
    ouro_geometry,
    ouro_tensors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_TYPES = ("ouro",)


def _read_config(folder: Path) -> OuroConfig:
    config = read_config(folder)
    if config["model_type"] != "ouro":
        raise UnsupportedError(
            f"model type of {folder}",
            got=repr(config["model_type"])[:80],
            wanted=", ".join(MODEL_TYPES),
            hint="LoopKV compresses looped transformers; a model without loops has no cells to choose for",
        )
    return parse_ouro_config(config, f"{folder}/config.json")


def _open_checkpoint(folder: Path, config: OuroConfig) -> Checkpoint:
    """The weights of ``folder``; a tensor too many or too few is refused before any is read."""
    checkpoint = Checkpoint(folder)
    try:
        checkpoint.check_names(ouro_tensors(config), lambda name: is_unused_tensor(name, config.tie_word_embeddings))
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def fingerprint_model(folder: Path | str) -> Fingerprint:
    """Identity of the checkpoint in ``folder``: geometry, and SHA-256 of its weight files and its tokenizer.

    Raises:
        ModelFormatError: missing or broken files, tensors missing or unknown.
        UnsupportedError: another architecture, or a setting that the forward pass does not implement.
    """
    folder = Path(folder)
    config = _read_config(folder)
    _open_checkpoint(folder, config).close()
    tokenizer = folder / "tokenizer.json"
    return Fingerprint(
        name=folder.resolve().name,
        geometry=ouro_geometry(config),
        weights_sha256=hash_files(weight_files(folder)),
        tokenizer_sha256=_hash_tokenizer(tokenizer) if tokenizer.is_file() else None,
    )


_MOST_INDENTED = 8  # times a file's size; honest ones grow 1.6-fold


def _hash_tokenizer(file: Path) -> str:
    """SHA-256 of a tokenizer: of the file where it is indented, as ``tokenizers`` writes it, or no JSON (whoever needs
    the tokenizer refuses it); else of its content indented by two: a compact copy has the digest of the original.
    """
    raw = hash_file(file).hex()
    try:
        text = file.read_text(encoding="utf-8")
        if text.startswith("{\n  "):
            return raw
        digest, left = hashlib.sha256(), _MOST_INDENTED * len(text)
        for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(json.loads(text)):
            digest.update(piece.encode())
            left -= len(piece)
            if left < 0:  # nested so deeply that indenting is not worth its time
                return raw
        return digest.hexdigest()
    except (OSError, ValueError, RecursionError, MemoryError):
        return raw


def load_model(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LoopedModel:
    """Load the looped model in ``folder``.

    Args:
        folder: config.json and safetensors as Hugging Face writes them.
        dtype: of weights and activations (fp64, fp32 or BF16).
        device: where it runs.

    Raises:
        ModelFormatError: missing files, wrong shapes, tensors missing or unknown, weights that are not finite.
        UnsupportedError: another architecture, or a setting that the forward pass does not implement.
    """
    folder = Path(folder)
    config = _read_config(folder)
    with _open_checkpoint(folder, config) as checkpoint:
        _check_tied_head(checkpoint, config)
        return OuroModel(config, checkpoint.take, folder.resolve().name, dtype, torch.device(device))


def _check_tied_head(checkpoint: Checkpoint, config: OuroConfig) -> None:
    """A tied checkpoint may carry the head too; two different ones leave open which was trained."""
    if not config.tie_word_embeddings or HEAD_TENSOR not in checkpoint:
        return
    shape = (config.vocab_size, config.hidden_size)
    if not torch.equal(checkpoint.take(HEAD_TENSOR, shape), checkpoint.take(EMBEDDING_TENSOR, shape)):
        raise ModelFormatError(
            f"weights of {checkpoint.folder}: {HEAD_TENSOR}",
            got=f"other values than {EMBEDDING_TENSOR}, although tie_word_embeddings is true",
            wanted="equal ones, or tie_word_embeddings false",
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


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer (transformers; no remote code), whose every token the model knows.

    Raises:
        ModelFormatError: no fast tokenizer, a broken one, or one with ids outside the model's vocabulary.
        UnsupportedError: another architecture.
    """
    folder = Path(folder)
    tokenizer = read_tokenizer(folder)
    check_tokenizer(tokenizer, _read_config(folder).vocab_size, f"tokenizer of {folder}")
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, what: str) -> None:
    """Refuse a tokenizer that can make an id without a row of the embedding, be it of an added token.

    A vocabulary may be larger than the tokenizer: most are padded to a round number.

    Raises:
        ModelFormatError: names the first such token and how many there are.
    """
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= vocab_size}
    # What a template puts around every text need not be in the vocabulary.
    around = [number for number in tokenizer("").input_ids if number >= vocab_size]
    if not beyond and not around:
        return
    if beyond:
        token = min(beyond, key=beyond.__getitem__)
        count = f"{len(beyond)} token{'s' * (len(beyond) > 1)} beyond, the first {token[:40]!r} with id {beyond[token]}"
    else:
        count = f"id {around[0]} put around every text"
    raise ModelFormatError(
        f"{what}: vocabulary",
        got=count,
        wanted=f"ids below the model's vocab_size of {vocab_size}",
        hint="use the tokenizer that the checkpoint was trained with; tokens added since have no embedding",
    )


def read_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The fast tokenizer in ``folder``, whatever model it belongs to.

    Raises:
        ModelFormatError: there is none, or files that transformers cannot read.
    """
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelFormatError(f"model {folder}", got="no tokenizer.json", wanted="a fast tokenizer")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as problem:
        got = f"files that transformers cannot read ({type(problem).__name__}: {' '.join(str(problem).split())[:100]})"
        raise ModelFormatError(
            f"tokenizer of {folder}",
            got=got,
            wanted="a fast tokenizer",
            hint="copy the checkpoint's tokenizer files anew",
        ) from None
