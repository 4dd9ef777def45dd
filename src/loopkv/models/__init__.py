"""Looped models in plain PyTorch, one adapter per architecture, loaded from a local Hugging Face folder."""

from loopkv.models.base import Attend, LoopedModel, Rotary
from loopkv.models.load import fingerprint_model, load_model, load_tokenizer, resolve_device

__all__ = ["Attend", "LoopedModel", "Rotary", "fingerprint_model", "load_model", "load_tokenizer", "resolve_device"]
