"""Telling vLLM which manager serves which spec, in every process that loads the plugin."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from loopkv.vllm_plugin.cache.managers import HistoryManager, WindowManager
from loopkv.vllm_plugin.cache.specs import HistorySpec, WindowSpec


def register_cache_specs() -> None:
    """Register both specs. May be called any number of times."""
    # The registry fills itself with the built-in specs only while it is empty: a lookup makes it do so first, else the
    # built-in specs would be missing in this process.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(HistorySpec, HistoryManager, uniform_type_base_spec=FullAttentionSpec)
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, uniform_type_base_spec=SlidingWindowSpec)
