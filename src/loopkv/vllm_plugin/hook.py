"""What happens between the command line and the weights: the plan is checked, the engine's settings too.

vLLM calls ``verify_and_update_config`` while it builds its config, in the user's own process: whatever is refused here
costs no weight loading and is reported where the user typed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.config import AttentionConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from loopkv.artifacts import Fingerprint, Plan
from loopkv.errors import UnsupportedError
from loopkv.planner.lookup import load_or_name
from loopkv.vllm_plugin.compat import check_vllm_version
from loopkv.vllm_plugin.operators import check_device
from loopkv.vllm_plugin.register import ARCHITECTURE, BACKEND_CLASS
from loopkv.vllm_plugin.served import ServedPlan, get_served, lay_out_for_worker, put_served
from loopkv.vllm_plugin.settings import ServeSettings, read_settings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.loopkv")

_SAME_FUNCTION = (  # how far, when to stop; the others' meaning is in rope_base and attention_head_dim
    "max_position_embeddings",
    "eos_token_id",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "head_dim",
)


class LoopKVConfigHook(VerifyAndUpdateConfig):
    """Refuses a plan or an engine feature that would not give what the plan promises; caps chunks where it must."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Check everything that is known before weights load; does nothing without ``loopkv`` settings."""
        settings = read_settings(vllm_config.additional_config)
        if settings is None:
            return
        check_vllm_version()
        check_backend_claim()
        check_engine_features(vllm_config)
        fingerprint = model_fingerprint(vllm_config.model_config)
        check_served_tokenizer(vllm_config.model_config)
        plan, file = load_or_name(settings.plan, fingerprint)
        if file is not None:
            check_same_function(vllm_config.model_config)
        if plan.fingerprint.weights_sha256 is not None and not settings.accept_weights:
            fingerprint = with_weights(fingerprint, vllm_config)
        plan.check_serves(fingerprint, accept_weights=settings.accept_weights)
        _check_tensor_parallel(vllm_config, fingerprint)
        check_served_on_device(vllm_config, plan, settings)
        cap = limit_chunks(vllm_config, plan.policy.max_exact_chunk_tokens, plan.shares, settings)
        served = ServedPlan(
            plan=plan,
            prefill=settings.prefill,
            seed=settings.seed_mode,
            chunk_tokens=cap,
            prefill_graphs=settings.prefill_graphs,
        )
        put_served(vllm_config, served)


def check_setting_was_taken(vllm_config: VllmConfig) -> None:
    """Refuse a ``loopkv`` setting that no hook has read: vLLM calls ours for one architecture alone.

    Raises:
        UnsupportedError: a model that no class of this package serves.
        SettingsError: a misspelt ``loopkv``.
    """
    model = vllm_config.model_config
    if model is None or read_settings(vllm_config.additional_config) is None:
        return
    if get_served(vllm_config) is None:
        raise UnsupportedError(
            f"a LoopKV plan for {model.model}: architecture",
            got=model.architecture,
            wanted=ARCHITECTURE,
            hint="drop the loopkv setting to serve this model with vLLM's own cache",
        )


def limit_chunks(vllm_config: VllmConfig, exact_tokens: int, shares: bool, settings: ServeSettings) -> int:
    """Cap the new tokens of one request and step where the plan needs it; returns the cap that holds.

    A shared cell reads pages that the final loop codes later in the same step, unless a chunk is no longer than the
    window: then every page that leaves was computed in an earlier step.
    """
    scheduler = vllm_config.scheduler_config
    if settings.prefill == "exact" and shares:
        user = scheduler.long_prefill_token_threshold
        if not 0 < user <= exact_tokens:
            scheduler.long_prefill_token_threshold = exact_tokens
            if user:
                logger.info("LoopKV: long_prefill_token_threshold %d lowered to %d (prefill exact)", user, exact_tokens)
    threshold = scheduler.long_prefill_token_threshold
    most = scheduler.max_num_batched_tokens
    return min(threshold, most) if threshold > 0 else most


def check_backend_claim() -> None:
    """Refuse to start beside another plugin that took the CUSTOM attention backend."""
    from vllm.v1.attention.backends.registry import register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND_CLASS)
    claimed = AttentionBackendEnum.CUSTOM.get_path()
    if claimed != BACKEND_CLASS:
        raise UnsupportedError(
            "vLLM's CUSTOM attention backend is taken by another plugin",
            got=claimed,
            wanted=BACKEND_CLASS,
            hint="set VLLM_PLUGINS=loopkv to load this plugin alone",
        )


def check_engine_features(vllm_config: VllmConfig) -> None:
    """Refuse what has not been shown to work with a coded cache, one sentence each.

    Raises:
        UnsupportedError: names the option, what it was and what to do.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    cache, model = vllm_config.cache_config, vllm_config.model_config
    context_parallel = max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size)
    connector = vllm_config.kv_transfer_config
    speculative = vllm_config.speculative_config
    checks: tuple[tuple[bool, str, object, object, str], ...] = (
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism",
            parallel.pipeline_parallel_size,
            1,
            "every loop runs all layers, so a looped model cannot be cut into stages",
        ),
        (context_parallel > 1, "context parallelism", context_parallel, 1, "drop the context-parallel options"),
        (parallel.enable_dbo, "dual batch overlap", True, False, "drop --enable-dbo"),
        (
            connector is not None and connector.kv_connector is not None,
            "KV connectors",
            None if connector is None else connector.kv_connector,
            "none",
            "drop --kv-transfer-config: coded pages of another process are not checked against this plan",
        ),
        (
            cache.kv_offloading_size is not None,
            "KV offloading",
            f"{cache.kv_offloading_size} GiB",
            "none",
            "drop --kv-offloading-size",
        ),
        (
            cache.cache_dtype != "auto",
            "--kv-cache-dtype",
            cache.cache_dtype,
            "auto",
            "the plan decides how the cache is stored",
        ),
        (
            bool(scheduler.disable_hybrid_kv_cache_manager),
            "--disable-hybrid-kv-cache-manager",
            True,
            False,
            "history and window are two cache groups of one pool",
        ),
        (
            speculative is not None,
            "speculative decoding",
            None if speculative is None else speculative.method,
            "none",
            "drop --speculative-config: rejected tokens could already have pushed a page out of the window",
        ),
        (model.enable_sleep_mode, "sleep mode", True, False, "drop --enable-sleep-mode; stop the server instead"),
        (
            model.quantization is not None,
            "quantised weights",
            model.quantization,
            "none",
            "the plan's damage was measured on unquantised weights",
        ),
        (model.runner_type != "generate", "pooling", model.runner_type, "generate", "serve without a plan"),
        (
            bool(envs.VLLM_USE_BREAKABLE_CUDAGRAPH),
            "VLLM_USE_BREAKABLE_CUDAGRAPH",
            1,
            0,
            "prefill steps would be captured with one step's metadata",
        ),
        (cache.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill", True, False, "drop the option"),
        (
            cache.user_specified_block_size,
            "--block-size",
            cache.block_size,
            "none",
            "drop it: the plan decides how many tokens a block holds",
        ),
        (
            bool(cache.kv_cache_dtype_skip_layers),
            "--kv-cache-dtype-skip-layers",
            ", ".join(cache.kv_cache_dtype_skip_layers)[:80],
            "none",
            "drop it: the plan decides how each cell is stored",
        ),
        (
            cache.prefix_match_unit is not None,
            "--prefix-match-unit",
            cache.prefix_match_unit,
            "none",
            "drop it: prefix hits end where blocks of coded and of exact tokens both begin",
        ),
        *_attention_checks(vllm_config),
    )
    for refused, what, got, wanted, hint in checks:
        if refused:
            raise UnsupportedError(f"a LoopKV plan cannot be served with {what}", got=got, wanted=wanted, hint=hint)


def _attention_checks(vllm_config: VllmConfig) -> Iterator[tuple[bool, str, object, object, str]]:
    """Rows for every attention option: LoopKV's cells have one reader, so that any of them would be ignored."""
    given, default = vllm_config.attention_config, AttentionConfig()
    for field in dataclasses.fields(AttentionConfig):
        value = getattr(given, field.name)
        name = "--attention-backend" if field.name == "backend" else f"--attention-config.{field.name}"
        told = value.name if isinstance(value, AttentionBackendEnum) else str(value)[:80]
        yield (
            value not in (getattr(default, field.name), AttentionBackendEnum.CUSTOM),
            name,
            told,
            "none",
            "drop it: LoopKV's own operators read the coded cache",
        )


def model_fingerprint(model_config: ModelConfig) -> Fingerprint:
    """Geometry of the model that vLLM is about to load, from its parsed config (overrides included)."""
    from loopkv.models.config import parse_ouro_config
    from loopkv.models.ouro import ouro_geometry

    config = parse_ouro_config(model_config.hf_config.to_dict(), f"config of {model_config.model}")
    return Fingerprint(name=str(model_config.model)[:512], geometry=ouro_geometry(config))


def check_same_function(model_config: ModelConfig) -> None:
    """Refuse overrides under which the checkpoint computes something else than what a plan file was measured on.

    Weights and geometry can match while the positions or the norms differ, and with them the keys that are coded.

    Raises:
        UnsupportedError: a setting that differs from the checkpoint's own config.json, where that lies on this machine.
    """
    from loopkv.models.config import OuroConfig, parse_ouro_config, read_config

    folder = _local_folder(model_config)
    if folder is None:
        return
    own = parse_ouro_config(read_config(folder), f"{folder}/config.json")
    served = parse_ouro_config(model_config.hf_config.to_dict(), f"config of {model_config.model}")
    names = [name for name in OuroConfig.model_fields if name not in _SAME_FUNCTION]
    for name in ("rope_base", "attention_head_dim", *names):
        wanted, got = getattr(own, name), getattr(served, name)
        if got != wanted:
            raise UnsupportedError(
                f"a plan file served with another {name} than the checkpoint's",
                got=got,
                wanted=wanted,
                hint="drop the override: the plan's damage was measured without it",
            )


def check_served_tokenizer(model_config: ModelConfig) -> None:
    """Refuse a tokenizer on this machine that makes ids which the model has no embedding for: text would be misread.

    Raises:
        ModelFormatError: names the first such token.
    """
    folder = Path(model_config.tokenizer)
    if model_config.skip_tokenizer_init or not (folder / "tokenizer.json").is_file():
        return  # another kind of tokenizer, or one that is not here yet: vLLM refuses single ids
    from loopkv.models.load import check_tokenizer, read_tokenizer

    check_tokenizer(read_tokenizer(folder), model_config.get_vocab_size(), f"tokenizer of {folder}")


def with_weights(fingerprint: Fingerprint, vllm_config: VllmConfig) -> Fingerprint:
    """The fingerprint with the checkpoint's weights hash, where the checkpoint lies on this machine already."""
    from loopkv.models import fingerprint_model

    if vllm_config.load_config.load_format == "dummy":
        return fingerprint
    folder = _local_folder(vllm_config.model_config)
    if folder is None:
        logger.warning("LoopKV: the weights are not on this machine yet, so they are not checked against the plan")
        return fingerprint
    return fingerprint.model_copy(update={"weights_sha256": fingerprint_model(folder).weights_sha256})


def _local_folder(model_config: ModelConfig) -> Path | None:
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except Exception:  # huggingface_hub raises many kinds; all mean: not here
        return None


def check_served_on_device(vllm_config: VllmConfig, plan: Plan, settings: ServeSettings) -> None:
    """Refuse a plan, or a way to run it, that the device's operators do not serve.

    Raises:
        UnsupportedError: says what, and what would do.
    """
    device, dtype = vllm_config.device_config.device_type, vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # vLLM has resolved "auto"
    layout = lay_out_for_worker(plan, vllm_config.parallel_config.tensor_parallel_size, dtype)
    check_device(layout, dtype, device)
    if settings.seed_mode == "timed" and device == "cpu":
        raise UnsupportedError(
            "seed mode on a CPU", got="timed", wanted="sink or none", hint="a CPU step has no race to wait for"
        )
    if settings.prefill == "fast" and plan.shares and device != "cpu":
        raise UnsupportedError(
            "prefill mode for a plan with shared cells on a GPU",
            got="fast",
            wanted="exact",
            hint="the kernels do not yet read a chunk's own exact pages; plans without shared cells need no mode",
        )


def _check_tensor_parallel(vllm_config: VllmConfig, fingerprint: Fingerprint) -> None:
    size, heads = vllm_config.parallel_config.tensor_parallel_size, fingerprint.geometry.kv_heads
    if heads % size:
        raise UnsupportedError(
            "tensor parallel size", got=size, wanted=f"a divisor of the {heads} kv heads", hint="use fewer devices"
        )
