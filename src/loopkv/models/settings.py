"""Settings of other transformers that an Ouro config may carry: each must be off, or the forward pass would be wrong.

A config is an open dictionary: a setting that changes the computation but not the shape of a weight would load without
a word and give another model's answers. What brings tensors of its own is caught by their names too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loopkv.errors import UnsupportedError

_OFF: tuple[object, ...] = (False, None, 0)
_ONE: tuple[object, ...] = (1, None)
_ABSENT: tuple[object, ...] = (None, {}, [])

NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu", None),
    # attention
    "use_sliding_window": _OFF,  # a window's size without it is not used
    "attention_chunk_size": _OFF,
    "dual_chunk_attention_config": _ABSENT,
    "sparse_attention_config": _ABSENT,
    "use_bidirectional_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "attention_bias": _OFF,
    "qkv_bias": _OFF,
    "use_bias": _OFF,
    "mlp_bias": _OFF,
    "lm_head_bias": _OFF,
    "use_qk_norm": _OFF,
    "qk_norm": _OFF,
    "qk_layernorm": _OFF,
    "clip_qkv": _OFF,
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "num_kv_shared_layers": _OFF,
    # logits
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "attn_logit_softcap": _OFF,
    "final_logit_softcap": _OFF,
    "logits_soft_cap": _OFF,
    "logit_softcapping": _OFF,
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "scale_emb": _ONE,
    # positions
    "partial_rotary_factor": _ONE,
    "rotary_pct": _ONE,
    "rotary_emb_fraction": _ONE,
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "rotary_interleaved": _OFF,
    "is_neox_style": (True, None),
    "alibi": _OFF,
    "use_alibi": _OFF,
    "no_rope_layers": _ABSENT,
    # experts and weights
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    "n_routed_experts": _OFF,
    "quantization_config": _ABSENT,
    "compression_config": _ABSENT,
}
"""Values under which a setting changes nothing, the one to name first; an absent key changes nothing either."""

_PLAIN_ROPE: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": _ONE,
    "factor": _ONE,
    "attention_factor": _ONE,
    "mscale": _ONE,
}


def check_settings(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config that asks for a computation which the forward pass does not do.

    Args:
        config: config.json of an Ouro.
        where: names the config in the error.

    Raises:
        UnsupportedError: names the setting, its value and those that are served.
    """
    for name, neutral in NEUTRAL.items():
        if name in config:
            _require(config[name], neutral, f"{where}: {name}")
    kinds = config.get("layer_types")
    others = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    if kinds is not None and others:
        raise UnsupportedError(
            f"{where}: layer_types",
            got=repr(others[0])[:80],
            wanted="'full_attention' in every layer",
            hint="Ouro's released models have no sliding layers; plans for such a model would be wrong",
        )
    _check_exit(config, where)
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(config.get(name), f"{where}: {name}")


def _check_exit(config: Mapping[str, Any], where: str) -> None:
    threshold = config.get("early_exit_threshold")
    if threshold is not None and not (isinstance(threshold, int | float) and threshold >= 1):
        raise UnsupportedError(
            f"{where}: early_exit_threshold",
            got=repr(threshold)[:80],
            wanted="1.0, which never exits early",
            hint="all loops always run here: set it to 1.0 to accept that",
        )
    step = config.get("early_exit_step")
    if step is not None and step != config.get("total_ut_steps"):
        raise UnsupportedError(
            f"{where}: early_exit_step", got=repr(step)[:80], wanted="null", hint="all loops always run here"
        )


def _check_rope(parameters: object, where: str) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise UnsupportedError(where, got=repr(parameters)[:80], wanted="an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"{where}: rotary embedding", got=repr(kind)[:80], wanted="'default'")
    for name, value in parameters.items():
        if name in ("rope_type", "type", "rope_theta") or value is None:
            continue
        _require(value, _PLAIN_ROPE.get(name, (None,)), f"{where}: {str(name)[:80]}")


def _require(value: object, neutral: tuple[object, ...], what: str) -> None:
    if any(value == one for one in neutral):
        return
    raise UnsupportedError(
        what,
        got=repr(value)[:80],
        wanted=f"{json.dumps(neutral[0])}, or no such key",
        hint="LoopKV's forward pass does not implement it, and would answer as another model",
    )
