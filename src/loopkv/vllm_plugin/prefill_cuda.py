"""Prefill on CUDA through vLLM's FlashAttention 3, where the GPU and the dtype have it."""

from __future__ import annotations

import torch
from torch import Tensor

from loopkv.kernels.prefill import Expansion, Prefill, VarlenAttention
from loopkv.layout import Layout

MAX_CODED_TOKENS = 131_072
"""Rows with a longer history take the kernel that needs no scratch."""
TOGETHER_CODED_TOKENS = 65_536
"""History tokens expanded at once where a step has room for several rows: each further group costs its launches."""


def flash_attention() -> VarlenAttention | None:
    """FlashAttention 3 as vLLM ships it, or None on a device that it does not run on."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    if not is_fa_version_supported(3):
        return None

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        window: int | None,
        splits: int,
        out: Tensor,
    ) -> Tensor:
        _, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=max_q,
            cu_seqlens_q=cu_q,
            max_seqlen_k=max_k,
            cu_seqlens_k=cu_k,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            return_softmax_lse=True,
            out=out,
            num_splits=splits,
            fa_version=3,
        )
        return lse

    return attend


def make_prefill(
    layout: Layout,
    dtype: torch.dtype,
    *,
    max_rows: int,
    max_tokens: int,
    max_model_tokens: int,
    device: torch.device,
    counters: Tensor,
    expansion: Expansion | None = None,
) -> Prefill | None:
    """Prefill for a worker, its buffers allocated; None where FlashAttention 3 does not serve.

    Args:
        layout: the worker's layout.
        dtype: of the engine.
        max_rows: most requests of a step.
        max_tokens: most new tokens of a step.
        max_model_tokens: most tokens of a request.
        device: of the worker.
        counters: [2] int64, see ``Prefill``.
        expansion: see ``Prefill``.
    """
    attention = flash_attention() if dtype == torch.bfloat16 else None
    if attention is None:
        return None
    page = layout.policy.page_tokens
    one = min(-(-max_model_tokens // page) * page + page, MAX_CODED_TOKENS)
    rows = min(max_rows, max(1, max_tokens // layout.policy.max_exact_chunk_tokens))
    coded = max(one, min(one * rows, TOGETHER_CODED_TOKENS))
    prefill = Prefill(
        layout,
        dtype,
        attention,
        max_tokens=max_tokens,
        coded_tokens=coded,
        device=device,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        counters=counters,
        expansion=expansion,
    )
    prefill.compile()
    return prefill
