"""What cannot be served is refused before any weight is loaded, in one sentence that says what to do."""

from __future__ import annotations

import hashlib
import json
import shutil

import harness  # sets the environment before vLLM is imported
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.plans import make_plan
from vllm import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from loopkv.artifacts import hashing
from loopkv.errors import (
    LoopKVError,
    ModelFormatError,
    PlanFormatError,
    PlanMismatchError,
    PlanVersionError,
    UnsupportedError,
)
from loopkv.geometry import Geometry
from loopkv.models import fingerprint_model
from loopkv.reference import model_folder
from loopkv.vllm_plugin import compat
from loopkv.vllm_plugin.hook import check_engine_features
from loopkv.vllm_plugin.register import BACKEND_CLASS, register
from loopkv.vllm_plugin.served import get_served
from loopkv.vllm_plugin.settings import SettingsError

pytestmark = pytest.mark.engine


def configure(settings, **options):
    """vLLM's config for the reference model: everything that happens before weights load."""
    arguments = {"model": str(model_folder()), "dtype": "float32", "max_model_len": 1024, **options}
    if settings is not None:
        arguments["additional_config"] = {"loopkv": settings}
    return EngineArgs(**arguments).create_engine_config()


def refusal(settings, error=UnsupportedError, **options) -> str:
    with pytest.raises(error) as caught:
        configure(settings, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_exact_prefill_with_shared_cells_caps_chunks_at_the_window(plan_files):
    config = configure({"plan": plan_files["memory"]})
    assert config.scheduler_config.long_prefill_token_threshold == 256
    assert get_served(config).chunk_tokens == 256
    assert (
        configure(
            {"plan": plan_files["memory"]}, long_prefill_token_threshold=64
        ).scheduler_config.long_prefill_token_threshold
        == 64
    )
    assert (
        configure(
            {"plan": plan_files["memory"]}, long_prefill_token_threshold=512
        ).scheduler_config.long_prefill_token_threshold
        == 256
    )


def test_plans_without_shares_and_fast_prefill_take_any_chunk(plan_files):
    for settings in (
        {"plan": plan_files["int4"]},
        {"plan": "kivi4"},
        {"plan": plan_files["memory"], "prefill": "fast"},
    ):
        config = configure(settings, max_num_batched_tokens=4096)
        assert config.scheduler_config.long_prefill_token_threshold == 0
        assert get_served(config).chunk_tokens == 4096


def test_the_plan_enters_the_hash_of_the_config(plan_files):
    hashes = {configure({"plan": plan_files[name]}).compute_hash() for name in ("int4", "int2", "memory")}
    assert len(hashes) == 3


def test_without_settings_nothing_changes():
    config = configure(None)
    assert config.scheduler_config.long_prefill_token_threshold == 0
    assert get_served(config) is None and not config.additional_config


def test_a_setting_that_no_class_of_ours_reads_stops_the_start(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder() / name, tmp_path / name)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "vocab_size": 512}
    config |= {"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = {"model": str(tmp_path), "load_format": "dummy", "max_model_len": 512}
    assert "architecture, got LlamaForCausalLM, wanted OuroForCausalLM" in refusal({"plan": "kivi4"}, **other)
    assert "did you mean 'plan'?" in refusal({"plans": "kivi4"}, SettingsError, **other)
    with pytest.raises(SettingsError, match="got 'Loopkv', wanted 'loopkv'"):
        configure(None, additional_config={"Loopkv": {"plan": "kivi4"}}, **other)
    for config in (configure(None, **other), configure(None, additional_config={"other": 1}, **other)):
        assert get_served(config) is None


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e4, "original_max_position_embeddings": 8192}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
OFFLOAD = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
FEATURES = {
    "pipeline parallelism, got 2": {"pipeline_parallel_size": 2},
    "context parallelism, got 2": {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
    "KV connectors, got OffloadingConnector": {"kv_transfer_config": OFFLOAD},
    "KV offloading, got 1.0 GiB": {"kv_offloading_size": 1.0},
    "--kv-cache-dtype, got fp8, wanted auto": {"kv_cache_dtype": "fp8"},
    "--disable-hybrid-kv-cache-manager": {"disable_hybrid_kv_cache_manager": True},
    "speculative decoding, got ngram": {"speculative_config": NGRAM},
    "quantised weights, got fp8": {"quantization": "fp8"},
    "tensor parallel size, got 4, wanted a divisor of the 6 kv heads": {"tensor_parallel_size": 4},
    "--block-size, got 64, wanted none": {"block_size": 64},
    "--attention-backend, got TRITON_ATTN, wanted none": {"attention_backend": "TRITON_ATTN"},
    "--attention-config.flash_attn_version, got 2": {"attention_config": {"flash_attn_version": 2}},
    "--kv-cache-dtype-skip-layers, got 0, 1": {"kv_cache_dtype_skip_layers": ["0", "1"]},
    "--prefix-match-unit, got 16": {"prefix_match_unit": 16},
    "rotary embedding, got 'yarn'": {"hf_overrides": {"rope_parameters": YARN}},
}


@pytest.mark.parametrize("said", FEATURES)
def test_engine_features_that_are_not_served(plan_files, said):
    assert said in refusal({"plan": plan_files["memory"]}, **FEATURES[said])


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "sliding_window": 64},
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"final_logit_softcapping": 30.0},
        {"early_exit_threshold": 0.5},
    ],
    ids=str,
)
def test_settings_that_the_model_does_not_implement(change):
    name = next(iter(change))
    assert f"{name}, got" in refusal({"plan": "kivi4"}, hf_overrides=change)


def test_a_plan_file_is_for_the_function_of_the_checkpoint(plan_files):
    override = {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}
    said = refusal({"plan": plan_files["int4"]}, hf_overrides=override)
    assert "another rope_base than the checkpoint's, got 123.0, wanted " in said
    said = refusal({"plan": plan_files["int4"]}, hf_overrides={"rms_norm_eps": 0.01})
    assert "another rms_norm_eps than the checkpoint's, got 0.01, wanted " in said
    configure({"plan": "kivi4"}, hf_overrides=override)  # made by hand: nothing was measured
    configure({"plan": plan_files["int4"]}, hf_overrides={"max_position_embeddings": 2048})


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 4096, "content": "[PAD]"})
    path.write_text(json.dumps(data))
    model = {"model": str(folder)}
    said = "1 token beyond, the first '[PAD]' with id 4096, wanted ids below the model's vocab_size of 4096"
    assert said in refusal({"plan": "kivi4"}, ModelFormatError, **model)
    configure({"plan": "kivi4"}, skip_tokenizer_init=True, **model)
    configure({"plan": "kivi4"}, tokenizer=str(model_folder()), **model)
    configure({"plan": "kivi4"}, hf_overrides={"vocab_size": 4097}, load_format="dummy", **model)
    configure(None, **model)  # without a plan everything is vLLM's own


def test_tensors_that_would_be_left_out(plan_files, tmp_path):
    """vLLM's own loader passes over biases that a model has no place for."""
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(384)
    save_file(tensors, folder / "model.safetensors")
    said = "1 tensor that the forward pass leaves out, such as model.layers.0.self_attn.q_proj.bias"
    assert said in refusal({"plan": plan_files["memory"]}, ModelFormatError, model=str(folder))  # before any weight
    with pytest.raises(ModelFormatError) as caught:  # a plan by name does not look at weights: the loader refuses
        harness.ServedEngine(None, model=str(folder), settings={"plan": "kivi4"})
    assert said in str(caught.value)


def test_sleep_mode():
    """vLLM refuses it on a CPU by itself; on a GPU the hook does."""
    config = configure(None)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedError, match="sleep mode"):
        check_engine_features(config)


def test_breakable_graphs(monkeypatch):
    config = configure(None)
    monkeypatch.setattr("vllm.envs.VLLM_USE_BREAKABLE_CUDAGRAPH", True, raising=False)
    with pytest.raises(UnsupportedError, match="VLLM_USE_BREAKABLE_CUDAGRAPH"):
        check_engine_features(config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "plan, got nothing"),
        ([], "wanted an object"),
        ({"plan": "kivi4", "prefil": "fast"}, "did you mean 'prefill'?"),
        ({"plan": "kivi4", "prefill": "quick"}, "wanted Input should be 'exact' or 'fast'"),
        ({"plan": 7}, "plan, got 7"),
        ({"plan": "kivi4", "accept_weights": "yes"}, "accept_weights"),
    ],
)
def test_settings_that_make_no_sense(settings, said):
    assert said in refusal(settings, SettingsError)


def test_unknown_plan_names_suggest_a_near_one():
    assert "kivi4" in refusal({"plan": "kivi5"})


def test_a_timed_seed_has_no_meaning_on_a_cpu():
    assert "got timed" in refusal({"plan": "kivi4", "seed_mode": "timed"})


def test_plans_for_another_model(plans, tmp_path):
    plan = plans["int4"]
    other = plan.fingerprint.model_copy(update={"weights_sha256": "0" * 64})
    plan.model_copy(update={"fingerprint": other}).save(tmp_path / "weights.json")
    assert "other weights" in refusal({"plan": str(tmp_path / "weights.json")}, PlanMismatchError)
    configure({"plan": str(tmp_path / "weights.json"), "accept_weights": True})
    geometry = plan.fingerprint.geometry
    for change in ({"loops": 3}, {"layers": 5}, {"head_dim": 32}, {"kv_heads": 3}):
        wrong = make_plan(Geometry.model_validate({**geometry.model_dump(), **change}), "int4")
        wrong.save(tmp_path / "geometry.json")
        assert "another geometry" in refusal(
            {"plan": str(tmp_path / "geometry.json"), "accept_weights": True}, PlanMismatchError
        )


def test_the_weights_are_not_read_again(plan_files, monkeypatch):
    """What `loopkv serve` has hashed is handed on; a plan for any weights needs no hash at all."""
    read = []
    monkeypatch.setattr(hashing, "hash_file", lambda file: read.append(file) or hashlib.sha256(b"").digest())
    monkeypatch.setattr(hashing, "_kept", {})
    monkeypatch.setenv(hashing.HANDED_ON, hashing.handed_on().get(hashing.HANDED_ON, ""))
    configure({"plan": plan_files["int4"], "accept_weights": True})
    assert not read
    assert "other weights" in refusal({"plan": plan_files["int4"]}, PlanMismatchError)
    assert [file.name for file in read] == ["model.safetensors"]
    monkeypatch.undo()
    fingerprint_model(model_folder())
    monkeypatch.setenv(hashing.HANDED_ON, hashing.handed_on()[hashing.HANDED_ON])
    monkeypatch.setattr(hashing, "_kept", {})
    monkeypatch.setattr(hashing, "hash_file", lambda file: read.append(file))
    configure({"plan": plan_files["int4"]})
    assert len(read) == 1


def test_plan_files_that_are_broken(plans, tmp_path):
    assert "No such file" in refusal({"plan": str(tmp_path / "missing.json")}, PlanFormatError)
    assert "a directory" in refusal({"plan": str(tmp_path)}, PlanFormatError)
    path = tmp_path / "plan.json"
    plans["memory"].save(path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert "broken JSON" in refusal({"plan": str(path)}, PlanFormatError)
    data = json.loads(whole)
    path.write_text(json.dumps({**data, "schema_version": 99}))
    assert "upgrade loopkv" in refusal({"plan": str(path)}, PlanVersionError)
    path.write_text(json.dumps({**data, "options": data["options"][:-1]}))
    assert "15 cells" in refusal({"plan": str(path)}, PlanFormatError)
    path.write_text(json.dumps({**data, "options": ["int5", *data["options"][1:]]}))
    assert "did you mean 'int4'" in refusal({"plan": str(path)}, PlanFormatError)


def test_another_plugin_on_the_custom_backend():
    register_backend(AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    try:
        assert "taken by another plugin, got other.plugin.Backend" in refusal({"plan": "kivi4"})
    finally:
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND_CLASS)


def test_another_vllm_series(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.27.1")
    assert "got 0.27.1, wanted 0.26.x" in refusal({"plan": "kivi4"})
    configure(None)


def test_registering_twice_changes_nothing():
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from loopkv.vllm_plugin.cells import register_attend_op

    register()
    register()
    register_attend_op()
    once = VllmConfig.try_verify_and_update_config
    register()
    assert VllmConfig.try_verify_and_update_config is once
    assert CompilationConfig._attention_ops.count("vllm::loopkv_attend") == 1
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})


def test_every_error_survives_a_trip_between_processes():
    import pickle

    error = SettingsError("plan", got=1, wanted=2, hint="try")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, LoopKVError) and str(again) == str(error)
