"""Checkpoint folders are hostile input: each fault is one sentence that names it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopkv import reference
from loopkv.errors import LoopKVError, ModelFormatError, UnsupportedError
from loopkv.models import fingerprint_model, load_model, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(reference.model_folder(), tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_the_reference_model_loads_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = load_model(reference.model_folder(), dtype)
        assert model.embed(torch.zeros(1, 2, dtype=torch.int64)).dtype == dtype
    assert len(model.geometry.cells) == 16


def test_the_fingerprint_follows_the_weights(folder):
    before = fingerprint_model(folder)
    assert before.weights_sha256 == fingerprint_model(reference.model_folder()).weights_sha256
    edit_weights(folder, lambda t: t["model.norm.weight"].add_(1))
    assert fingerprint_model(folder).weights_sha256 != before.weights_sha256
    assert fingerprint_model(folder).geometry == before.geometry


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "llama"}, UnsupportedError, "llama.*ouro"),
        ({"model_type": ...}, ModelFormatError, "model_type"),
        ({"total_ut_steps": ...}, ModelFormatError, "total_ut_steps"),
        ({"total_ut_steps": 0}, ModelFormatError, "total_ut_steps"),
        ({"hidden_size": "wide"}, ModelFormatError, "hidden_size"),
        ({"hidden_size": 256}, ModelFormatError, r"384.*256"),
        ({"num_hidden_layers": 5}, ModelFormatError, r"no tensor model\.layers\.4"),
        ({"num_key_value_heads": 4}, ModelFormatError, "multiple"),
        ({"hidden_act": "gelu"}, UnsupportedError, "gelu"),
        ({"total_ut_steps": 1024, "num_hidden_layers": 4096}, ModelFormatError, "4194304 cells"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, UnsupportedError, "yarn"),
        ({"tie_word_embeddings": False}, ModelFormatError, r"no tensor lm_head\.weight"),
    ],
)
def test_a_broken_config_is_named(folder, change, error, words):
    edit_config(folder, **change)
    with pytest.raises(error, match=words):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, value):
    edit_weights(folder, lambda t: t["model.layers.2.mlp.up_proj.weight"].view(-1).__setitem__(7, value))
    with pytest.raises(ModelFormatError, match=r"layers\.2\.mlp\.up_proj.*not finite"):
        load_model(folder)


def test_missing_and_broken_files_are_named(folder, tmp_path):
    with pytest.raises(ModelFormatError, match="no such folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelFormatError, match="a file"):
        load_model(folder / "config.json")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFormatError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelFormatError, match="safetensors"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ModelFormatError, match=r"no \*\.safetensors"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match="broken JSON"):
        load_model(folder)


def test_an_index_cannot_reach_outside_the_folder(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(LoopKVError, match="outside the model folder"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32])
def test_weights_of_other_kinds_are_refused(folder, dtype):
    edit_weights(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(dtype)}))
    with pytest.raises(ModelFormatError, match=str(dtype).removeprefix("torch.")):
        load_model(folder)
