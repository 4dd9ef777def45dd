"""The Ouro adapter against an independent forward written from the paper's equations and the checkpoint's tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.random_models import write_random_ouro

from loopkv import reference
from loopkv.engine.attention import KV, exact_attention
from loopkv.models import load_model, load_tokenizer
from loopkv.models.base import run_cells


def plain_forward(weights, ids, *, loops, layers, heads, kv_heads, head_dim, theta, eps=1e-6):
    """Logits [T, V] of one sequence: one token matrix, one head at a time, complex rotary numbers."""

    def norm(x, name):
        return weights[name] * (x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps))

    def rotate(x):  # [T, D]: channel i and i + D/2 are one complex number, turned by position * theta^(-2i/D)
        half = head_dim // 2
        angle = torch.outer(torch.arange(len(x)).double(), theta ** (-torch.arange(half).double() * 2 / head_dim))
        turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    def attention(x, p):
        q, k, v = (x @ weights[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        outputs = []
        for head in range(heads):
            own = slice(head * head_dim, (head + 1) * head_dim)
            kv = head // (heads // kv_heads)
            shared = slice(kv * head_dim, (kv + 1) * head_dim)
            scores = rotate(q[:, own]) @ rotate(k[:, shared]).T / head_dim**0.5
            scores = scores + torch.full_like(scores, float("-inf")).triu(1)
            outputs.append(torch.softmax(scores, dim=-1) @ v[:, shared])
        return torch.cat(outputs, dim=-1) @ weights[f"{p}self_attn.o_proj.weight"].T

    def mlp(x, p):
        gate, up = (x @ weights[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return (gate * torch.sigmoid(gate) * up) @ weights[f"{p}mlp.down_proj.weight"].T

    x = weights["model.embed_tokens.weight"][ids]
    for _ in range(loops):
        for i in range(layers):
            p = f"model.layers.{i}."
            x = x + norm(attention(norm(x, f"{p}input_layernorm.weight"), p), f"{p}input_layernorm_2.weight")
            inner = mlp(norm(x, f"{p}post_attention_layernorm.weight"), p)
            x = x + norm(inner, f"{p}post_attention_layernorm_2.weight")
        x = norm(x, "model.norm.weight")
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def adapter_logits(model, ids):
    def attend(cell, q, k, v):
        return exact_attention(q, KV(k, v))

    with torch.inference_mode():
        hidden = run_cells(model, model.embed(ids[None]), model.rotary(torch.arange(len(ids))), attend)
        return model.logits(hidden)[0]


def tame(folder):
    """Halve queries and logits: the fixture's attention is sharp enough to multiply fp32 rounding by ten."""
    file = folder / "model.safetensors"
    halved = ("q_proj", "lm_head", "embed_tokens")
    tensors = load_file(file)
    save_file({n: t * (0.5 if any(part in n for part in halved) else 1.0) for n, t in tensors.items()}, file)


@pytest.mark.parametrize(
    "shape",
    [
        {"loops": 4, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 64, "hidden": 96},
        {"loops": 3, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 96, "hidden": 64, "tied": True},
        {"loops": 1, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 128, "hidden": 48},
        {"loops": 2, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 256, "hidden": 64},
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_random_checkpoints(tmp_path, shape, dtype, tolerance):
    folder = write_random_ouro(tmp_path / "m", seed=3, **shape)
    tame(folder)
    ids = torch.randint(0, 64, (300,), generator=torch.Generator().manual_seed(0))
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    sizes = {key: shape[key] for key in ("loops", "layers", "heads", "kv_heads", "head_dim")}
    expected = plain_forward(weights, ids, theta=10000.0, **sizes)
    found = adapter_logits(load_model(folder, dtype), ids)
    assert expected.std() > 0.5  # logits of a size at which the tolerance means something
    assert torch.allclose(found, expected, rtol=0, atol=tolerance)


def test_the_reference_checkpoint():
    folder = reference.model_folder()
    model = load_model(folder)
    text = load_tokenizer(folder)(reference.heldout_documents()[0]).input_ids[:400]
    ids = torch.tensor(text)
    (file,) = folder.glob("*.safetensors")
    weights = {name: tensor.float() for name, tensor in load_file(file).items()}
    geometry = model.geometry
    expected = plain_forward(
        weights,
        ids,
        loops=geometry.loops,
        layers=geometry.layers,
        heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        theta=model.config.rope_base,
        eps=model.config.rms_norm_eps,
    )
    found = adapter_logits(model, ids)
    assert torch.allclose(found, expected, rtol=0, atol=1e-3)
    loss = torch.nn.functional.cross_entropy(found[:-1], ids[1:])
    assert loss < 3.5  # trained: a uniform guess over 4,096 tokens costs 8.3 nats
