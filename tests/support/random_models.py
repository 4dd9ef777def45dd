"""Random-weight Ouro checkpoints as Hugging Face folders: small enough for a test, of any shape."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_random_ouro(
    folder: Path,
    *,
    loops: int = 3,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 32,
    intermediate: int = 48,
    vocab: int = 64,
    max_positions: int = 2048,
    tied: bool = False,
    eos: int | None = None,
    seed: int = 0,
) -> Path:
    """Write config.json and model.safetensors (fp32) of a random Ouro into ``folder`` and return it.

    The weights are large enough that attention is far from uniform, so a wrong read changes the logits.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": norm(),
    }
    if not tied:
        tensors["lm_head.weight"] = matrix(vocab, hidden, 2.0)
    for i in range(layers):
        p = f"model.layers.{i}."
        tensors |= {
            f"{p}self_attn.q_proj.weight": matrix(heads * head_dim, hidden, 2.0),
            f"{p}self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden, 2.0),
            f"{p}self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{p}self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{p}mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{p}mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{p}mlp.down_proj.weight": matrix(hidden, intermediate),
            f"{p}input_layernorm.weight": norm(),
            f"{p}input_layernorm_2.weight": norm(),
            f"{p}post_attention_layernorm.weight": norm(),
            f"{p}post_attention_layernorm_2.weight": norm(),
        }
    config = {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "total_ut_steps": loops,
        "tie_word_embeddings": tied,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors")
    return folder
