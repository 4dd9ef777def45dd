"""Without a plan, with an exact plan, in fast prefill, with LoRA adapters: what changes and what must not."""

from __future__ import annotations

import json

import pytest
import torch
from harness import same_tokens
from safetensors.torch import load_file, save_file

from loopkv.engine.whole_sequence import sequence_logits
from loopkv.models import load_model, load_tokenizer
from loopkv.options import BF16
from loopkv.reference import model_folder, task_items

pytestmark = pytest.mark.engine

RANK, ALPHA = 4, 8


def test_fast_prefill_reads_a_chunks_own_pages_exact(engines, reference, documents, plans):
    """In one chunk from the start, a shared cell reads its own exact history; the others read their codes."""
    plan, ids = plans["memory"], documents[1][:900]
    engine = engines.get("memory", settings=(("prefill", "fast"),))
    engine.forget()
    output = engine.generate([ids], prompt_logprobs=20)[0]
    options = tuple(BF16 if option.shares else option for option in plan.cell_options)
    logits = sequence_logits(reference, torch.tensor([ids]), options, plan.policy)[0]
    expected = torch.log_softmax(logits.double(), dim=-1)
    found = torch.tensor(
        [
            abs(value - float(expected[position, token]))
            for position, entry in enumerate(output.prompt_logprobs[1:])
            for token, value in entry.items()
        ]
    )
    assert float(found.quantile(0.99)) < 1e-2 and float(found.mean()) < 1e-3
    # the engine's chunk cap is the user's: two chunks, then single tokens that read the shared pages
    engine.forget()
    engine.set_chunk(512)
    assert len(engine.generate([ids], 40)[0].tokens) == 40
    engine.check_idle()


def test_seed_modes_decide_which_values_are_read_whole(engines, documents):
    """Without the sink's scores the bar starts lower, so more tokens are hot; the answer hardly moves."""
    shares, outputs = [], []
    for seed in ("sink", "none"):
        engine = engines.get("memory-tau", settings=(("seed_mode", seed),))
        engine.forget()
        outputs += engine.generate([documents[3][:450]], 12)
        counters = engine.cache.counters.values
        assert counters["decode_values"] > 0
        shares.append(counters["hot_values"] / counters["decode_values"])
    assert shares[0] < shares[1] < 1
    assert same_tokens(*outputs)


def test_a_bf16_engine_answers(engines):
    tokenizer = load_tokenizer(model_folder())
    engine = engines.get("memory", dtype="bfloat16")
    engine.forget()
    items = [item for item in task_items() if item["task"].startswith("needle")][:4]
    outputs = engine.generate([tokenizer(item["prompt"])["input_ids"] for item in items], 16)
    answers = [tokenizer.decode(list(output.tokens)).split("\n")[0].strip() for output in outputs]
    assert answers == [item["answer"].strip() for item in items]
    layout = engine.cache.layout
    assert layout.exact_itemsize == 2 and engine.cache.pool.shape[1] == layout.block_bytes
    engine.check_idle()


def write_adapter(folder, seed=0):
    """A LoRA adapter on every projection, and the checkpoint with the adapter merged in."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model_folder() / "model.safetensors")
    merged, adapter = dict(weights), {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            continue
        down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.02
        up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2
        base = f"base_model.model.{name.removesuffix('.weight')}"
        adapter[f"{base}.lora_A.weight"], adapter[f"{base}.lora_B.weight"] = down, up
        merged[name] = weight.float() + ALPHA / RANK * up @ down
    (folder / "adapter").mkdir()
    (folder / "merged").mkdir()
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: weight.float() for name, weight in merged.items()}, folder / "merged" / "model.safetensors")
    (folder / "merged" / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    return folder / "adapter", folder / "merged"


def test_lora_adapters_act_in_every_loop_and_do_not_share_a_cache(engines, reference, documents, plans, tmp_path):
    from vllm.lora.request import LoRARequest

    (tmp_path / "other").mkdir()
    adapter, merged = write_adapter(tmp_path)
    other, _ = write_adapter(tmp_path / "other", seed=1)
    plan, ids = plans["memory"], documents[0][:500]
    engine = engines.get("memory", enable_lora=True, max_lora_rank=8, max_loras=2)
    engine.forget()
    plain = engine.generate([ids], 8)[0]
    adapted = engine.generate([ids], 8, lora=LoRARequest("adapter", 1, str(adapter)))[0]
    assert adapted.cached_tokens == 0 and adapted.tokens != plain.tokens
    again = engine.generate([ids], 8, lora=LoRARequest("adapter", 1, str(adapter)))[0]
    assert again.cached_tokens > 0 and same_tokens(again, adapted)
    second = engine.generate([ids], 8, lora=LoRARequest("other", 2, str(other)))[0]
    assert second.cached_tokens == 0 and second.tokens not in (plain.tokens, adapted.tokens)
    assert same_tokens(engine.generate([ids], 8)[0], plain)
    for output, model in ((plain, reference), (adapted, load_model(merged, torch.float32))):
        logits = sequence_logits(model, torch.tensor([ids]), plan.cell_options, plan.policy)[0, -1]
        expected = torch.log_softmax(logits.double(), dim=-1)
        assert max(abs(value - float(expected[token])) for token, value in output.logprobs[0].items()) < 2e-2
    engine.check_idle()


def test_the_bf16_plan_gives_the_tokens_of_vllms_own_ouro(engines, documents):
    prompts = [documents[i][:n] for i, n in enumerate((600, 40, 350, 900))]
    stock = engines.get(None)
    assert type(stock.runner.model).__module__ == "vllm.model_executor.models.ouro"
    expected = stock.generate(prompts, 24)
    served = engines.get("bf16")
    assert type(served.runner.model).__module__ == "loopkv.vllm_plugin.model_ouro"
    served.forget()
    for output, wanted in zip(served.generate(prompts, 24), expected, strict=True):
        assert same_tokens(output, wanted)
