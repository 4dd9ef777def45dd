"""The cache side of the vLLM plugin: two specs, their managers, and their registration."""

from loopkv.vllm_plugin.cache.managers import HistoryManager, WindowManager
from loopkv.vllm_plugin.cache.registration import register_cache_specs
from loopkv.vllm_plugin.cache.specs import (
    HistorySpec,
    WindowSpec,
    history_spec,
    request_in_flight_tokens,
    window_spec,
)

__all__ = [
    "HistoryManager",
    "HistorySpec",
    "WindowManager",
    "WindowSpec",
    "history_spec",
    "register_cache_specs",
    "request_in_flight_tokens",
    "window_spec",
]
