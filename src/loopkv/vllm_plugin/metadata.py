"""What one step looks like to the operators: two block tables and, per row, how many tokens it has and gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from loopkv.vllm_plugin.step import Rows, Step

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadata(Rows, AttentionMetadata):
    """One cache group's view of a step: its rows, and [B, N] int32 block ids by position (0 is the null block)."""

    block_table: Tensor


class LoopKVMetadataBuilder(AttentionMetadataBuilder[GroupMetadata]):
    """Passes the runner's tensors on: all planning that the policy needs is a function of ``seq_lens`` alone."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1  # rows with one new token first: they are one part of a mixed step

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        # one of the two groups tells the cache that a step begins
        self._on_step: Callable[[Tensor | None, Tensor], None] | None = next(
            (layer.owner.on_step for layer in layers if layer.leads), None
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> GroupMetadata:
        """The group's metadata of a step (cascade attention is never asked for, so no common prefix)."""
        assert common_prefix_len == 0, "cascade attention is not supported"
        common = common_attn_metadata
        if self._on_step is not None:
            self._on_step(common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu)
        return GroupMetadata(
            block_table=common.block_table_tensor,
            seq_lens=common.seq_lens,
            query_start=common.query_start_loc,
            query_start_cpu=common.query_start_loc_cpu,
            max_query_tokens=common.max_query_len,
            max_seq_tokens=common.max_seq_len,
            tokens=common.num_actual_tokens,
            seq_lens_cpu=common.seq_lens_cpu_upper_bound,
        )


def make_step(pool: torch.Tensor, history: GroupMetadata, window: GroupMetadata) -> Step:
    """Join both groups' metadata; they describe the same rows."""
    rows = {field.name: getattr(history, field.name) for field in fields(Rows)}
    return Step(pool=pool, history_table=history.block_table, window_table=window.block_table, **rows)
