"""config.json of a looped checkpoint, read as hostile input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loopkv.artifacts.storage import read_json
from loopkv.errors import ModelFormatError
from loopkv.geometry import MAX_CELLS
from loopkv.models.settings import check_settings
from loopkv.reference import MODEL_NAME


class OuroConfig(BaseModel):
    """The fields of an Ouro config that our forward pass reads; ``check_settings`` refuses what it would leave out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size: int = Field(ge=1, le=1 << 17)
    intermediate_size: int = Field(ge=1, le=1 << 20)
    num_hidden_layers: int = Field(ge=1, le=4096)
    num_attention_heads: int = Field(ge=1, le=4096)
    num_key_value_heads: int = Field(ge=1, le=4096)
    total_ut_steps: int = Field(ge=1, le=1024)
    head_dim: int | None = Field(default=None, ge=1, le=4096)
    max_position_embeddings: int = Field(default=4096, ge=1, le=1 << 30)
    rms_norm_eps: float = Field(default=1e-6, gt=0, lt=1)
    rope_theta: float | None = Field(default=None, gt=0)
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.attention_head_dim % 2:
            raise ValueError(f"head size {self.attention_head_dim} must be even for rotary embedding")
        cells = self.num_hidden_layers * self.total_ut_steps
        if cells > MAX_CELLS:
            raise ValueError(f"{cells} cells, at most {MAX_CELLS} are supported")
        return self

    @property
    def attention_head_dim(self) -> int:
        """Head size D."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope_base(self) -> float:
        """Rotary base; plain RoPE over the whole head only."""
        parameters = self.rope_parameters or self.rope_scaling or {}
        theta = parameters.get("rope_theta", self.rope_theta)
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ModelFormatError("config.json: rope_theta", got=theta, wanted="a number > 0")
        return float(theta)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder, with clear errors for what is not a local looped checkpoint."""
    if not folder.is_dir():
        raise ModelFormatError(
            f"model {folder}",
            got="no such folder" if not folder.exists() else "a file",
            wanted="a local Hugging Face folder (config.json, *.safetensors, tokenizer.json)",
            hint="download the checkpoint first, e.g. `hf download ByteDance/Ouro-1.4B --local-dir Ouro-1.4B`; "
            f"{MODEL_NAME} is the embedded one",
        )
    config = read_json(folder / "config.json", ModelFormatError, "model config")
    if not isinstance(config.get("model_type"), str):
        raise ModelFormatError(f"{folder}/config.json: model_type", got=repr(config.get("model_type"))[:80])
    return config


def parse_ouro_config(data: dict[str, Any], where: str) -> OuroConfig:
    """Validate an Ouro config.

    Raises:
        ModelFormatError: a field that is missing or makes no sense.
        UnsupportedError: a setting that the forward pass does not implement.
    """
    if "total_ut_steps" not in data:
        raise ModelFormatError(f"{where}: total_ut_steps", got="nothing", wanted="the number of loops")
    check_settings(data, where)
    try:
        config = OuroConfig.model_validate(data)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        wanted = first["msg"].removeprefix("Value error, ")
        if not field:
            raise ModelFormatError(f"{where}: {wanted}") from None
        raise ModelFormatError(f"{where}: {field}", got=repr(first["input"])[:80], wanted=wanted) from None
    _ = config.rope_base  # a config without a usable one is refused here, not at the first token
    return config
