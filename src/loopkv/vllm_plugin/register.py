"""The entry point ``vllm.general_plugins``: called once or more in every process of an engine."""

from __future__ import annotations

ARCHITECTURE = "OuroForCausalLM"
MODEL_CLASS = "loopkv.vllm_plugin.model_ouro:OuroForCausalLM"
BACKEND_CLASS = "loopkv.vllm_plugin.backend.LoopKVBackend"


def register() -> None:
    """Tell vLLM about the Ouro config, model class, config hook, cache specs and backend. Idempotent.

    Nothing here changes an engine that is started without a ``loopkv`` setting: the model class then builds vLLM's own
    Ouro, and the hook and the check of every config return at once.
    """
    from vllm.model_executor.models import ModelRegistry

    from loopkv.vllm_plugin.cache import register_cache_specs
    from loopkv.vllm_plugin.compat import check_every_config, set_model_hook
    from loopkv.vllm_plugin.config import register_config
    from loopkv.vllm_plugin.hook import LoopKVConfigHook, check_setting_was_taken

    register_config()
    register_cache_specs()
    ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
    set_model_hook(ARCHITECTURE, LoopKVConfigHook)
    check_every_config(check_setting_was_taken)
