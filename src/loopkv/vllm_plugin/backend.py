"""The attention backend that vLLM sees: it names the cache's shape and the metadata builder, nothing else."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImplBase, MultipleOf

from loopkv.vllm_plugin.metadata import LoopKVMetadataBuilder


class LoopKVBackend(AttentionBackend):
    """Backend of the two virtual layers. The operators themselves are called by the model (see ``cells.py``)."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]  # type: ignore[assignment]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """Member of ``AttentionBackendEnum`` under which the plugin is registered."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        """Not used: the virtual layers compute nothing."""
        raise NotImplementedError("LoopKV's virtual layers own a cache; attention runs through loopkv_attend")

    @staticmethod
    def get_builder_cls() -> type[LoopKVMetadataBuilder]:
        """Builder of both groups' metadata."""
        return LoopKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Any block: history blocks are 32 to 256 tokens, window blocks whatever makes the bytes equal."""
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """[blocks, the rest]: a block's inside is the layout's business, and the pool divides evenly into blocks."""
        return (num_blocks, -1)
