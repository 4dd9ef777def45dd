"""Ouro (Zhu et al. 2025): L sandwich-norm layers applied T times, the final norm after every loop.

::

    x = x + input_layernorm_2(attention(input_layernorm(x)))
    x = x + post_attention_layernorm_2(mlp(post_attention_layernorm(x)))
    after layer L of each loop: x = norm(x), which feeds the next loop and, after the last, lm_head

All loops always run; the exit gate (``model.early_exit_gate``) is not used in serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from loopkv.geometry import Geometry
from loopkv.models.base import Attend, Rotary
from loopkv.models.config import OuroConfig

EMBEDDING_TENSOR = "model.embed_tokens.weight"
HEAD_TENSOR = "lm_head.weight"
NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")

TakeTensor = Callable[[str, tuple[int, ...]], Tensor]
"""``take(name, shape)``: the checkpoint's tensor, shape and finiteness checked."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    input_norm_2: Tensor
    post_norm: Tensor
    post_norm_2: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class OuroModel:
    """Ouro in plain PyTorch; see ``loopkv.models.base.LoopedModel`` for the contract."""

    def __init__(self, config: OuroConfig, take: TakeTensor, name: str, dtype: torch.dtype, device: torch.device):
        self.config, self.name, self.dtype, self.device = config, name, dtype, device
        self.vocab_size, self.max_positions = config.vocab_size, config.max_position_embeddings
        eos = config.eos_token_id
        self.eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        self.geometry = ouro_geometry(config)
        dim = config.attention_head_dim
        self._q_size, self._kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
        frequencies = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self._inverse_frequency = (config.rope_base**-frequencies).to(device)

        shapes = ouro_tensors(config)

        def get(key: str) -> Tensor:
            return take(key, shapes[key]).to(device=device, dtype=dtype)

        self._embedding = get(EMBEDDING_TENSOR)
        self._norm = get("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else get(HEAD_TENSOR)
        self._layers = []
        for i in range(config.num_hidden_layers):
            p = f"model.layers.{i}."
            self._layers.append(
                _Layer(
                    input_norm=get(f"{p}input_layernorm.weight"),
                    input_norm_2=get(f"{p}input_layernorm_2.weight"),
                    post_norm=get(f"{p}post_attention_layernorm.weight"),
                    post_norm_2=get(f"{p}post_attention_layernorm_2.weight"),
                    qkv=torch.cat([get(f"{p}self_attn.{x}_proj.weight") for x in "qkv"]),
                    out=get(f"{p}self_attn.o_proj.weight"),
                    gate_up=torch.cat([get(f"{p}mlp.{x}_proj.weight") for x in ("gate", "up")]),
                    down=get(f"{p}mlp.down_proj.weight"),
                )
            )

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, E] of ids [B, T]."""
        return F.embedding(ids, self._embedding)

    def rotary(self, positions: Tensor) -> Rotary:
        """Rotary factors of positions [T], computed in fp64 and kept at least in fp32."""
        angles = positions.to(torch.float64)[:, None, None] * self._inverse_frequency
        dtype = torch.promote_types(self.dtype, torch.float32)
        return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))

    def run_cell(self, index: int, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Apply the layer of cell ``index``; after the last layer of a loop also the final norm."""
        number = self.geometry.cells[index].layer
        layer, config = self._layers[number], self.config
        qkv = F.linear(self._rms(hidden, layer.input_norm), layer.qkv)
        q, k, v = qkv.split([self._q_size, self._kv_size, self._kv_size], dim=-1)
        dim = config.attention_head_dim
        q = _rotate(q.unflatten(-1, (-1, dim)), rotary)
        k = _rotate(k.unflatten(-1, (-1, dim)), rotary)
        attended = attend(index, q, k, v.unflatten(-1, (-1, dim))).flatten(-2)
        hidden = hidden + self._rms(F.linear(attended, layer.out), layer.input_norm_2)
        gate, up = F.linear(self._rms(hidden, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        hidden = hidden + self._rms(F.linear(F.silu(gate) * up, layer.down), layer.post_norm_2)
        return self._rms(hidden, self._norm) if number == config.num_hidden_layers - 1 else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V]."""
        return F.linear(hidden, self._head)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(work)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled.to(x.dtype) * weight


def ouro_tensors(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the forward pass reads, by its name in the checkpoint."""
    hidden, dim, wide = config.hidden_size, config.attention_head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING_TENSOR: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD_TENSOR] = (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}."
        shapes |= {f"{p}self_attn.{x}_proj.weight": (rows, hidden) for x, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes[f"{p}self_attn.o_proj.weight"] = (hidden, q)
        shapes |= {f"{p}mlp.{x}_proj.weight": (wide, hidden) for x in ("gate", "up")}
        shapes[f"{p}mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{p}{norm}.weight": (hidden,) for norm in NORMS}
    return shapes


def is_unused_tensor(name: str, tied: bool) -> bool:
    """Whether a checkpoint may hold ``name`` though the forward pass does not read it.

    Those are the exit gate (all loops always run), rotary tables (computed anew) and the head of a tied checkpoint.
    """
    if name.startswith("model.early_exit_gate.") or name.endswith(".rotary_emb.inv_freq"):
        return True
    return tied and name == HEAD_TENSOR


def ouro_geometry(config: OuroConfig) -> Geometry:
    """Geometry of an Ouro config; KV slot = loop * L + layer, which is the order of the cells."""
    return Geometry(
        architecture="ouro",
        loops=config.total_ut_steps,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.attention_head_dim,
    )


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Neox-style rotation of x [B, T, H, D]: the two halves of a head are the pairs."""
    first, second = x.to(rotary.cos.dtype).chunk(2, dim=-1)
    cos, sin = rotary
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
