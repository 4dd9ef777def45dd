"""The two KV-cache specs: one virtual layer of coded pages, one of exact tokens, blocks of equal byte size.

vLLM 0.26 sees a model with two attention layers, each owning one KV-cache group. Both blocks have
``Layout.block_bytes`` bytes, so the engine makes one tensor, one block pool and two block tables of them.
Specs are made in the workers, pickled to the engine's scheduler and compared there: plain frozen data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from loopkv.layout import Layout
from loopkv.residency import Residency

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_STEPS_IN_FLIGHT = 2  # of one request, with async scheduling (more only with pipeline parallelism, which is refused)


def _same(specs: Sequence[Any]) -> Any:
    """The one spec of a group; an AssertionError is how vLLM learns that layers do not belong together."""
    assert all(spec == specs[0] for spec in specs[1:]), "layers of one LoopKV cache group must have the same spec"
    return specs[0]


def _check_block(spec: AttentionSpec, block_tokens: int, block_bytes: int) -> None:
    if spec.block_size != block_tokens:
        raise ValueError(f"a LoopKV block holds {block_tokens} tokens and cannot be resized to {spec.block_size}")
    if block_bytes < 1 or spec.page_size_padded is not None:
        raise ValueError("a LoopKV block has its own byte size and cannot be padded")


@dataclass(frozen=True, kw_only=True)
class HistorySpec(FullAttentionSpec):
    """Coded pages of all cells; one block holds ``residency.history_block_tokens`` tokens."""

    residency: Residency
    block_bytes: int

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        _check_block(self, self.residency.history_block_tokens, self.block_bytes)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_bytes

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request's history, and of the null block.

        vLLM compares the sum over groups with the whole pool, block 0 included, although block 0 is never handed out:
        without it a request of ``max_model_len`` tokens could pass the check at start-up and wait for ever.
        """
        blocks = self.residency.history_blocks(vllm_config.model_config.max_model_len)
        return (blocks + 1) * self.block_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The common spec of a group."""
        merged: Self = _same(specs)
        return merged


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Exact keys and values of all cells; one block holds ``residency.window_block_tokens`` tokens.

    Args:
        residency: block arithmetic.
        block_bytes: bytes of a block, the same as the history's.
        in_flight_tokens: most tokens of one request that are scheduled but not processed (steps in flight times the
            longest chunk).
        null_leaving: tokens that leave the window within their own chunk get the null block: the model must read
            them from its activations. Only for plans without shared cells.
    """

    residency: Residency
    block_bytes: int
    in_flight_tokens: int
    null_leaving: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        _check_block(self, self.residency.window_block_tokens, self.block_bytes)
        if self.in_flight_tokens < 1:
            raise ValueError(f"in_flight_tokens must be at least 1, got {self.in_flight_tokens}")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_bytes

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most blocks of one request at any moment: what admission reserves and what start-up checks."""
        in_flight = min(self.in_flight_tokens, max_in_flight_tokens)
        most = self.residency.max_window_blocks(in_flight, max_model_len)
        if self.null_leaving:
            most = min(most, self.residency.max_window_blocks_with_nulls(MAX_STEPS_IN_FLIGHT, max_model_len))
        return most

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request's sink and window while it prefills."""
        blocks = self.max_admission_blocks_per_request(
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
        )
        return blocks * self.block_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The common spec of a group."""
        merged: Self = _same(specs)
        return merged


def request_in_flight_tokens(vllm_config: VllmConfig) -> int:
    """Most tokens of one request that vLLM may have scheduled but not processed."""
    scheduler = vllm_config.scheduler_config
    chunk = scheduler.max_num_batched_tokens
    if scheduler.long_prefill_token_threshold > 0:
        chunk = min(chunk, scheduler.long_prefill_token_threshold)
    return int(vllm_config.max_concurrent_batches * chunk)


def history_spec(layout: Layout, dtype: torch.dtype) -> HistorySpec:
    """The spec of the history layer under ``layout``; ``dtype`` is the engine's exact cache dtype."""
    return HistorySpec(
        block_size=layout.history_block_tokens,
        num_kv_heads=layout.geometry.kv_heads,
        head_size=layout.geometry.head_dim,
        dtype=dtype,
        residency=layout.residency,
        block_bytes=layout.block_bytes,
    )


def window_spec(layout: Layout, dtype: torch.dtype, *, in_flight_tokens: int, null_leaving: bool = False) -> WindowSpec:
    """The spec of the window layer under ``layout`` (see ``WindowSpec`` and ``request_in_flight_tokens``)."""
    policy = layout.policy
    return WindowSpec(
        block_size=layout.window_block_tokens,
        num_kv_heads=layout.geometry.kv_heads,
        head_size=layout.geometry.head_dim,
        dtype=dtype,
        # Only reported (KV events, metrics): the managers of this package decide by ``residency``.
        sliding_window=policy.window_tokens + policy.page_tokens - 1,
        residency=layout.residency,
        block_bytes=layout.block_bytes,
        in_flight_tokens=in_flight_tokens,
        null_leaving=null_leaving,
    )
