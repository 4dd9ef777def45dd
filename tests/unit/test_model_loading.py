"""Checkpoint folders are hostile input: each fault is one sentence that names it."""

import hashlib
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from loopkv import reference
from loopkv.errors import LoopKVError, ModelFormatError, UnsupportedError
from loopkv.models import fingerprint_model, load_model, load_tokenizer
from loopkv.models.settings import NEUTRAL


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


def test_the_fingerprint_follows_the_tokens_of_a_tokenizer_and_not_the_spaces_of_its_file(folder):
    """The digest is that of the file as Hugging Face's ``tokenizers`` writes it, which older plans hold."""
    file = folder / "tokenizer.json"
    written_by_library = Tokenizer.from_file(str(file)).to_str(pretty=True)
    expected = hashlib.sha256(written_by_library.encode()).hexdigest()
    assert fingerprint_model(reference.model_folder()).tokenizer_sha256 == expected
    assert expected == "31bece53cf47adce80386e735c511079b2fdb8d656e1fcd4b32886732791dc49"  # of results/reference/*.json
    data = json.loads(file.read_text())
    for text in (written_by_library, json.dumps(data), json.dumps(data, indent="\t") + "\r\n"):
        file.write_text(text, newline="")
        assert fingerprint_model(folder).tokenizer_sha256 == expected
    data["model"]["merges"].reverse()
    file.write_text(json.dumps(data))
    assert fingerprint_model(folder).tokenizer_sha256 != expected
    # Numbers as the library writes them, and Python does not.
    scores = '{\n  "model": {\n    "scores": [-1e-7, -0.00001]\n  }\n}'
    nested = "[" * 900 + ",".join(["[]"] * 20_000) + "]" * 900  # 1,800 times as large when indented
    for raw in (scores, nested):
        file.write_text(raw)
        assert fingerprint_model(folder).tokenizer_sha256 == hashlib.sha256(raw.encode()).hexdigest()
    file.write_bytes(b"\xff no JSON")
    assert fingerprint_model(folder).tokenizer_sha256 == hashlib.sha256(b"\xff no JSON").hexdigest()


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
        ({"rope_theta": float("inf"), "rope_parameters": None}, ModelFormatError, "rope_theta"),
        ({"rope_theta": ..., "rope_parameters": ...}, ModelFormatError, "rope_theta"),
        ({"num_hidden_layers": 3}, ModelFormatError, r"11 tensors .* such as model\.layers\.3\.input_layernorm"),
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


FULL = ["full_attention"] * 4
NOT_OURS = [
    {"use_sliding_window": True, "sliding_window": 1024},
    {"layer_types": [*FULL[1:], "sliding_attention"]},
    {"layer_types": "sliding_attention"},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"qkv_bias": True},
    {"use_qk_norm": True},
    {"clip_qkv": 8.0},
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.25},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": {"rope_theta": 5e4}, "sliding_attention": {"rope_theta": 1e4}}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": "yarn"},
    {"hidden_act": "gelu_pytorch_tanh"},
    {"hidden_act": None},
    {"final_logit_softcapping": 30.0},
    {"attn_logit_softcapping": 50.0},
    {"logit_scale": 0.0625},
    {"embedding_multiplier": 12},
    {"query_pre_attn_scalar": 256},
    {"num_experts": 8},
    {"early_exit_threshold": 0.9},
    {"early_exit_threshold": float("nan")},
    {"early_exit_step": 2},
    {"is_encoder_decoder": True},
    {"quantization_config": {"quant_method": "awq", "bits": 4}},
]


@pytest.mark.parametrize("change", NOT_OURS, ids=str)
def test_settings_that_the_forward_pass_does_not_implement_are_refused(folder, change):
    """Each loads without a missing tensor, and would answer as another model."""
    edit_config(folder, **change)
    name = next(iter(change))
    for load in (load_model, fingerprint_model):
        with pytest.raises(UnsupportedError, match=rf"config\.json: {name}.* got .*wanted ") as caught:
            load(folder)
        assert "\n" not in str(caught.value)


def test_settings_that_are_off_stay_accepted(folder):
    """Those of a released Ouro, and the neutral value of everything that is checked."""
    edit_config(
        folder,
        sliding_window=4096,
        max_window_layers=4,
        layer_types=FULL,
        early_exit_threshold=1.0,
        early_exit_step=4,
        rope_scaling={"rope_type": "default", "partial_rotary_factor": 1.0, "factor": None},
    )
    load_model(folder)
    for choose in (min, max):  # the first neutral value of each setting, then the last
        edit_config(folder, **{name: values[choose(0, len(values) - 1)] for name, values in NEUTRAL.items()})
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.bias",
        "model.layers.2.self_attn.q_norm.weight",
        "lm_head.bias",
        "model.layers.4.input_layernorm.weight",
        "model.adapter.weight",
        "unheard_of",
    ],
)
def test_tensors_that_would_be_left_out_are_refused(folder, name):
    edit_weights(folder, lambda t: t.update({name: torch.zeros(3), f"{name}.second": torch.zeros(1)}))
    for load in (load_model, fingerprint_model):
        with pytest.raises(ModelFormatError, match=rf"2 tensors .* such as {re.escape(name)}"):
            load(folder)


def test_tensors_known_to_be_unused_are_accepted(folder):
    def add(tensors):
        tensors["model.early_exit_gate.weight"] = torch.ones(1, 384)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # of a tied checkpoint

    edit_weights(folder, add)
    load_model(folder)
    edit_weights(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ModelFormatError, match=r"lm_head\.weight, got other values than model\.embed_tokens"):
        load_model(folder)


def test_shards(folder):
    """Shards by their index; shards that are missing, empty of a tensor or repeated are named."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, its in halves.items():
        save_file({name: tensors[name] for name in its}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, its in halves.items() for name in its}}))
    reference_logits, ids = [load_model(f) for f in (reference.model_folder(), folder)], torch.arange(5)[None]
    assert torch.equal(*(model.embed(ids) for model in reference_logits))

    (folder / "b.safetensors").rename(folder / "c.safetensors")
    with pytest.raises(ModelFormatError, match=r"no b\.safetensors, wanted every shard"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    with pytest.raises(ModelFormatError, match="no tensor model"):
        load_model(folder)
    for broken in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        index.write_text(broken)
        with pytest.raises(ModelFormatError, match="index"):
            load_model(folder)
    index.write_text('{"weight_map": {}}')
    with pytest.raises(ModelFormatError, match=r"no \*\.safetensors"):
        load_model(folder)
    index.unlink()
    save_file({names[0]: tensors[names[0]]}, folder / "twice.safetensors")
    with pytest.raises(ModelFormatError, match=r"a\.safetensors and twice\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", "", '{"model_type": "ouro"}', "[" * 100_000])
def test_a_config_that_is_none_is_one_sentence(folder, content):
    (folder / "config.json").write_text(content)
    for load in (load_model, fingerprint_model):
        with pytest.raises(ModelFormatError, match=r"config\.json") as caught:
            load(folder)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_pipes_in_a_model_folder_do_not_block(folder):
    for name, words in (("config.json", "a named pipe"), ("model.safetensors", r"no model\.safetensors")):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(ModelFormatError, match=words):
            load_model(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    load_model(folder)


def add_tokens(folder, *added):
    """Tokens with ids of their own in tokenizer.json, as ``add_tokens`` and ``save_pretrained`` leave them."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] += [{"id": number, "content": content, **flags} for number, content in added]
    path.write_text(json.dumps(data))


def test_a_vocabulary_padded_beyond_the_tokenizer_is_right(folder):
    size = len(load_tokenizer(folder))
    assert size == json.loads((folder / "config.json").read_text())["vocab_size"] == 4096
    for padded in (4096, 4097, 4608, 1 << 20):
        edit_config(folder, vocab_size=padded)
        assert len(load_tokenizer(folder)) == size
    edit_config(folder, vocab_size=4224)
    add_tokens(folder, (4096, "<think>"), (4097, "</think>"))  # within the padding
    assert load_tokenizer(folder)("<think>").input_ids == [4096]


@pytest.mark.parametrize(
    ("vocabulary", "added", "said"),
    [
        (4096, [(4096, "[PAD]")], r"got 1 token beyond, the first '\[PAD\]' with id 4096, wanted ids below .* of 4096"),
        (4097, [(4096, "<a>"), (4097, "<b>"), (4098, "<c>")], "got 2 tokens beyond, the first '<b>' with id 4097"),
        (4000, [], "got 96 tokens beyond, the first .* with id 4000, wanted ids below the model's vocab_size of 4000"),
        (1, [], "got 4095 tokens beyond"),
    ],
)
def test_a_tokenizer_larger_than_the_vocabulary_is_refused_when_it_is_loaded(folder, vocabulary, added, said):
    edit_config(folder, vocab_size=vocabulary)
    add_tokens(folder, *added)
    with pytest.raises(ModelFormatError, match=said) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_an_id_that_a_template_puts_around_every_text_counts(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<x>": {"id": "<x>", "ids": [9999], "tokens": ["<x>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelFormatError, match="got id 9999 put around every text, wanted ids below"):
        load_tokenizer(folder)
