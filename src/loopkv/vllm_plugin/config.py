"""The Ouro config class: transformers has no ``ouro`` type, and Ouro's remote code fails on transformers 5."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

MODEL_TYPE = "ouro"


class OuroConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Fields of an Ouro ``config.json``; no code of the checkpoint runs (no ``trust_remote_code``)."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers declares it as a plain attribute

    def __init__(
        self,
        vocab_size: int = 49152,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 65536,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1_000_000.0,
        total_ut_steps: int = 4,
        early_exit_threshold: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.total_ut_steps = total_ut_steps
        self.early_exit_threshold = early_exit_threshold
        # transformers 5 reads rotary settings from `rope_parameters`; older checkpoints carry `rope_theta` alone
        if not kwargs.get("rope_parameters"):
            kwargs["rope_parameters"] = {
                "rope_type": "default",
                **(kwargs.pop("rope_scaling", None) or {}),
                "rope_theta": rope_theta,
            }
        super().__init__(**kwargs)


def register_config() -> None:
    """Make ``AutoConfig`` know the ``ouro`` model type; safe to call again."""
    AutoConfig.register(MODEL_TYPE, OuroConfig, exist_ok=True)
