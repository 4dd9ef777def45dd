"""The looped transformer as the trainer sees it: Ouro's block in plain PyTorch, parameters under Ouro's names.

One block of L layers is applied T times; loop t of token x is, for each layer,

    h = h + norm(attn(norm(h)))        input_layernorm, input_layernorm_2
    h = h + norm(mlp(norm(h)))         post_attention_layernorm, post_attention_layernorm_2

and ``h = model.norm(h)`` after every loop; that output feeds the next loop and gives the loop's logits through the tied
embedding. Attention is causal over a row; RoPE rotates the two halves of a head (NeoX); the MLP is SwiGLU.

Activations are flat, [tokens, hidden], except inside attention: row length then appears in one eager call only, and
the compiled pieces keep one shape for every row length. Shapes: N tokens, D hidden, H heads, K head size.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the model; the defaults are the reference model's."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 896
    num_hidden_layers: int = 4
    total_ut_steps: int = 4
    num_attention_heads: int = 6
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def hf_config(self) -> dict:
        """``config.json`` of a Hugging Face folder, Ouro's keys."""
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            **asdict(self),
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "early_exit_threshold": 1.0,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    @classmethod
    def from_hf(cls, folder: Path) -> "Geometry":
        config = json.loads((folder / "config.json").read_text())
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


class LoopedLM(nn.Module):
    """Parameters only, named as in the checkpoint; the functions below compute with them."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        d, f = g.hidden_size, g.intermediate_size

        def matrix(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        layers = nn.ModuleList()
        for _ in range(g.num_hidden_layers):
            layer = nn.Module()
            layer.self_attn = nn.Module()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, matrix(d, d))
            layer.mlp = nn.Module()
            layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj = matrix(f, d), matrix(f, d), matrix(d, f)
            for name in NORMS:
                setattr(layer, name, nn.RMSNorm(d, eps=g.rms_norm_eps))
            layers.append(layer)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(g.vocab_size, d)
        self.model.layers = layers
        self.model.norm = nn.RMSNorm(d, eps=g.rms_norm_eps)
        self.model.early_exit_gate = nn.Linear(d, 1)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Normal: 0.05 for embeddings, 1 / (2 sqrt(fan-in)) for matrices. Norms 1, those that end a branch 0.2; gate 0.

        A branch of size 0.2 keeps a token's embedding visible through the first loop; trained values lie between
        0.1 and 0.35.
        """
        for name, p in self.named_parameters():
            if "early_exit_gate" in name:
                p.zero_()
            elif name.endswith("layernorm_2.weight"):
                p.fill_(0.2)
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                p.normal_(0.0, 0.05 if "embed_tokens" in name else 0.5 * p.shape[1] ** -0.5)


@dataclass(slots=True)
class LayerWeights:
    """One layer's weights in the compute dtype, with the projections that share an input joined."""

    qkv: Tensor  # [3D, D]
    o: Tensor  # [D, D]
    gate_up: Tensor  # [2F, D]
    down: Tensor  # [D, F]
    norms: tuple[Tensor, Tensor, Tensor, Tensor]  # in NORMS' order, [D] each


def layer_weights(layer: nn.Module, dtype: torch.dtype) -> LayerWeights:
    """Differentiable view of one layer's parameters; cast once a step, not once a loop."""
    a, m = layer.self_attn, layer.mlp
    return LayerWeights(
        qkv=torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).to(dtype),
        o=a.o_proj.weight.to(dtype),
        gate_up=torch.cat([m.gate_proj.weight, m.up_proj.weight]).to(dtype),
        down=m.down_proj.weight.to(dtype),
        norms=tuple(getattr(layer, name).weight for name in NORMS),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32, returned in x's dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope_table(geometry: Geometry, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [N, 1, K/2] fp32: angle position * theta^(-2i/K)."""
    half = torch.arange(0, geometry.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * geometry.rope_theta ** (-half / geometry.head_dim)
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotation of x [N, H, K] by cos, sin [N, 1, K/2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attention_input(x: Tensor, norm: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float):
    """[N, D] -> q, k, v [N, H, K], q and k rotated."""
    n, d = x.shape
    q, k, v = functional.linear(rms_norm(x, norm, eps), qkv).view(n, 3, heads, d // heads).unbind(1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def attention_output(x: Tensor, a: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, n2: Tensor, n3: Tensor, n4: Tensor,
                     eps: float) -> Tensor:  # fmt: skip
    """Adds attention's branch and the MLP's branch to the residual x [N, D]; a is attention's output [N, D]."""
    x = x + rms_norm(functional.linear(a, o), n2, eps)
    gate, up = functional.linear(rms_norm(x, n3, eps), gate_up).chunk(2, -1)
    return x + rms_norm(functional.linear(functional.silu(gate) * up, down), n4, eps)


def gate_logit(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Exit gate of each token, [N] fp32, from a loop's output h [N, D]."""
    return (h.float() * weight.float()).sum(-1) + bias.float()


def loop_loss(h: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each token, [N] fp32 nats, from a loop's output h [N, D]."""
    return functional.cross_entropy(functional.linear(h, embedding).float(), labels, reduction="none")


def causal_attention(q: Tensor, k: Tensor, v: Tensor, row: int) -> Tensor:
    """Causal attention inside rows of ``row`` tokens. q, k, v [N, H, K] -> [N, H * K]."""
    n, h, d = q.shape
    q, k, v = (t.view(n // row, row, h, d).transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, h * d)


@dataclass(slots=True)
class Pieces:
    """The functions a forward pass is made of; the trainer swaps in compiled ones."""

    attention_input: Callable = attention_input
    attention_output: Callable = attention_output
    loop_loss: Callable = loop_loss
    rms_norm: Callable = rms_norm
    gate_logit: Callable = gate_logit
    attend: Callable = causal_attention


def loop_outputs(model: LoopedLM, tokens: Tensor, row: int, dtype: torch.dtype, pieces: Pieces) -> list[Tensor]:
    """Normed output of every loop, T tensors [N, D], for flat tokens [N] made of rows of ``row`` tokens."""
    g = model.geometry
    heads, eps = g.num_attention_heads, g.rms_norm_eps
    layers = [layer_weights(layer, dtype) for layer in model.model.layers]
    cos, sin = rope_table(g, torch.arange(row, device=tokens.device).repeat(tokens.numel() // row))
    h = functional.embedding(tokens, model.model.embed_tokens.weight).to(dtype)
    outputs = []
    for _ in range(g.total_ut_steps):
        for w in layers:
            n1, n2, n3, n4 = w.norms
            q, k, v = pieces.attention_input(h, n1, w.qkv, cos, sin, heads, eps)
            a = pieces.attend(q, k, v, row)
            h = pieces.attention_output(h, a, w.o, w.gate_up, w.down, n2, n3, n4, eps)
        h = pieces.rms_norm(h, model.model.norm.weight, eps)
        outputs.append(h)
    return outputs


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
