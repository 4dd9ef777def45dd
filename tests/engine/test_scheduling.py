"""The same tokens however the scheduler cuts, batches, evicts, resumes or shares the work (fp32, tau infinite)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import Output, ServedEngine, same_tokens

from loopkv.vllm_plugin.cache import WindowManager

pytestmark = pytest.mark.engine

LENGTHS = (700, 90, 333, 1100, 320, 513, 287, 640)
NEW_TOKENS = 12
ONE_CHOICE = {"temperature": 0.7, "top_k": 1}
"""Sampling with a certain outcome (vLLM's CPU build cannot seed a request)."""


def prompts(documents):
    return [documents[i][: LENGTHS[i]] for i in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def engine(engines) -> ServedEngine:
    """A plan with shared cells, the harder case."""
    return engines.get("memory")


@pytest.fixture(scope="module")
def alone(engine, documents):
    """Every prompt by itself, cold, in chunks of 256."""
    engine.set_chunk(256)
    outputs = []
    for prompt in prompts(documents):
        engine.forget()
        outputs += engine.generate([prompt], NEW_TOKENS)
    return outputs


def check(outputs, expected, what):
    """The same tokens but for ties; prints how many were compared and how many requests parted at a tie."""
    assert len(outputs) == len(expected)
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert same_tokens(output, wanted), f"{what}, request {i}: {output.tokens} instead of {wanted.tokens}"
    ties = sum(output.tokens != wanted.tokens for output, wanted in zip(outputs, expected, strict=True))
    tokens = sum(len(output.tokens) for output in outputs)
    print(f"{what}: {len(outputs)} requests, {tokens} tokens, parted at a tie: {ties}")


def test_a_batch_of_eight_and_every_chunk_size(engine, documents, alone):
    for chunk in (16, 64, 128, 256):
        engine.forget()
        engine.set_chunk(chunk)
        rows = slice(0, 3) if chunk == 16 else slice(None)
        check(engine.generate(prompts(documents)[rows], NEW_TOKENS), alone[rows], f"chunks of {chunk} in a batch")
        engine.check_idle()
    engine.set_chunk(256)


def test_prefix_hits_first_and_later_turns(engine, documents, alone):
    engine.forget()
    turns = [documents[0][:700], documents[3][:1100]]
    cold = engine.generate(turns, NEW_TOKENS)
    again = engine.generate(turns, NEW_TOKENS)
    hits = [output.cached_tokens for output in again]
    assert all(hit >= 512 for hit in hits)
    check(again, [alone[0], alone[3]], f"first turn again, hits of {hits}")
    check(cold, [alone[0], alone[3]], "first turn cold, two at once")
    # a second turn: the first answer and 40 more tokens follow; then the same without any cache
    longer = [turn + list(output.tokens) + documents[5][:40] for turn, output in zip(turns, again, strict=True)]
    hit = engine.generate(longer, NEW_TOKENS)
    hits = [output.cached_tokens for output in hit]
    assert all(hit >= 512 for hit in hits)
    engine.forget()
    wanted = engine.generate(longer, NEW_TOKENS)
    assert all(output.cached_tokens == 0 for output in wanted)
    check(hit, wanted, f"second turn, hits of {hits}")
    engine.check_idle()


def test_two_samples_and_equal_prompts_in_one_step(engine, documents, alone):
    engine.forget()
    samples = engine.generate([documents[0][:700]], NEW_TOKENS, n=4, **ONE_CHOICE)
    check(samples[:2], [alone[0]] * 2, "n = 4 in one step")
    check(samples[2:], [alone[0]] * 2, "n = 4 in one step")
    engine.forget()
    check(engine.generate([documents[2][:333]] * 4, NEW_TOKENS), [alone[2]] * 4, "one prompt four times in one step")
    engine.check_idle()


def test_beams_are_worth_what_their_tokens_are_worth(engine, documents):
    """Beams branch off shared blocks across a page's edge; each one's score is that of its tokens served cold."""
    from vllm.sampling_params import BeamSearchParams

    prompt = documents[4][:315]  # position 319 is the first to read a page, the answer's fifth token
    engine.forget()
    parameters = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    (found,) = engine.llm.beam_search([{"prompt_token_ids": prompt}], parameters)
    beams = [(list(beam.tokens), beam.cum_logprob) for beam in found.sequences]
    assert len({tuple(tokens) for tokens, _ in beams}) == 3
    for tokens, score in beams:
        engine.forget()
        (cold,) = engine.generate([tokens], 1, prompt_logprobs=1)
        worth = sum(cold.prompt_logprobs[i][tokens[i]] for i in range(len(prompt), len(tokens)))
        assert score == pytest.approx(worth, abs=8 * 1e-2)
    engine.check_idle()


def test_abort_in_the_middle_of_a_prefill_and_of_a_decode(engine, documents, alone):
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    engine.forget()
    engine.set_chunk(64)
    parameters = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, detokenize=False)
    llm.add_request("prefill", {"prompt_token_ids": documents[3][:1100]}, parameters)
    llm.add_request("decode", {"prompt_token_ids": documents[1][:90]}, parameters)
    for _ in range(6):
        llm.step()
    ids = [request.request_id for request in engine.scheduler.running]
    assert len(ids) == 2
    llm.abort_request(["prefill", "decode"])
    while llm.has_unfinished_requests():
        llm.step()
    llm.step()
    engine.check_idle()
    # the same prefixes again, hitting whatever the aborted requests left behind
    outputs = engine.generate([documents[3][:1100], documents[1][:90]], NEW_TOKENS)
    check(outputs, [alone[3], alone[1]], f"after an abort, hits of {[o.cached_tokens for o in outputs]}")
    engine.set_chunk(256)
    engine.check_idle()


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_fault_of_one_step_is_not_handed_on(engine, documents, alone, monkeypatch, when):
    """One call of attention gives NaN: that answer is lost, but no later request hits what was computed from it."""
    attend, calls = engine.cache.operators.attend, 0
    # 16 calls a step: cell 5 of the second of three chunks, or of the step after the first new token
    faulty = {"prefill": 16 + 5, "decode": 3 * 16 + 5}[when]

    def spoil(cell, q, k, v, out, step):
        nonlocal calls
        attend(cell, q, k, v, out, step)
        calls += 1
        if calls == faulty:
            out.fill_(float("nan"))

    engine.forget()
    monkeypatch.setattr(engine.cache.operators, "attend", spoil)
    (lost,) = engine.generate([documents[0][:700]], NEW_TOKENS, logprobs=None)
    monkeypatch.undo()
    assert lost.tokens != alone[0].tokens
    outputs = engine.generate([documents[0][:700]], NEW_TOKENS) + engine.generate([documents[0][:700]], NEW_TOKENS)
    hits = [output.cached_tokens for output in outputs]
    assert hits[1] >= 512 and (when == "decode" or hits[0] <= 256)
    check(outputs, [alone[0]] * 2, f"after a fault in {when}, hits of {hits}")
    engine.check_idle()


def test_two_tensor_parallel_workers_hold_a_half_of_each_page(plan_files, documents, alone):
    rows = {0: documents[0][:700], 2: documents[2][:333]}
    asked = {"plan": plan_files["memory"], "prompts": list(rows.values()), "max_tokens": NEW_TOKENS}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("tensor_parallel_worker.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # on two cores more threads would wait for each other, busily
    )
    answers = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0 and answers, done.stderr[-3000:]
    answer = json.loads(answers[0])
    outputs = [
        Output(tuple(tokens), tuple(dict(entry) for entry in logprobs), None, 0)
        for tokens, logprobs in zip(answer["tokens"], answer["logprobs"], strict=True)
    ]
    check(outputs, [alone[i] for i in rows], "two tensor-parallel workers")
    # E(711) = 448 and E(344) = 64 tokens, less the sink's page: 13 + 1 pages, coded by both workers
    assert [counters["pages_coded"] for counters in answer["counters"]] == [14, 14]


def test_sampling_parameters_do_not_depend_on_batch_mates(engine, documents):
    """Penalties, bans and biases act on the same logits alone and in a batch."""
    engine.forget()
    rows = [documents[0][:400], documents[1][:350]]
    sampling = {
        **ONE_CHOICE,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "logit_bias": {10: 1.5},
        "min_tokens": 3,
    }
    together = engine.generate(rows, NEW_TOKENS, **sampling)
    engine.forget()
    single = [engine.generate([row], NEW_TOKENS, **sampling)[0] for row in rows]
    assert all(same_tokens(a, b) for a, b in zip(together, single, strict=True))
    engine.check_idle()


def test_chunks_longer_than_the_window_where_nothing_is_shared(engines, documents):
    """Pages that leave inside their own chunk are coded from the activations and take no exact block."""
    engine = engines.get("int4")
    rows = [documents[6][:2100], documents[2][:333], documents[4][:320]]
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    (window,) = [manager for manager in managers if isinstance(manager, WindowManager)]
    remove, most = window.remove_skipped_blocks, 0

    def watched(request_id, *arguments):
        nonlocal most
        table = window.req_to_blocks[request_id]
        most = max(most, sum(not block.is_null for block in table))
        remove(request_id, *arguments)

    window.remove_skipped_blocks = watched
    outputs, held = [], []
    for chunk in (256, 2048, 600):
        engine.forget()
        engine.set_chunk(chunk)
        most = 0
        outputs.append(engine.generate(rows, 6))
        engine.check_idle()
        held.append(most)
        check(outputs[-1], outputs[0], f"chunks of {chunk} without shared cells")
    del window.remove_skipped_blocks
    engine.set_chunk(256)
    rule = engine.cache.layout.residency
    print(f"window blocks of a request of 2,100 tokens in chunks of 256, 2048 and 600: at most {held}")
    # A chunk of 2,048 holds its sink, window and tail, about what one of 256 does; its tokens would take 4 times that.
    assert max(held) <= rule.max_window_blocks_with_nulls(2, 2304) and held[1] < rule.window_entries(2048) / 4


GROWING = [8 + 3 * i for i in range(16)]
GROWTH = 110


@pytest.fixture(scope="module")
def roomy(engines, documents):
    """Sixteen short prompts that grow, with room for all; and the layout they grow in.

    A plan with a window of 64 tokens: pages leave early, so short requests do what long ones do.
    """
    engine = engines.get("short-window", max_num_seqs=16)
    rows = [documents[i % 8][i : i + n] for i, n in enumerate(GROWING)]
    return rows, engine.generate(rows, GROWTH), engine.cache.layout


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_starved_pool_preempts_and_gives_the_same_tokens(engines, roomy, documents, policy):
    """Requests that outgrow the pool together: at least 20 preemptions, by arrival or by priority."""
    rows, expected, layout = roomy
    starved = engines.get(
        "short-window",
        max_num_seqs=16,
        num_gpu_blocks_override=4 * layout.request_bytes(140) // layout.block_bytes,
        scheduling_policy=policy,
        max_model_len=200,
    )
    starved.count_preemptions()
    options = {} if policy == "fcfs" else {"priority": [16 - i for i in range(16)]}
    outputs = starved.generate(rows, GROWTH, **options)
    check(outputs, expected, f"{policy}, {starved.preemptions} preemptions")
    assert starved.preemptions >= 20
    starved.check_idle()
    with pytest.raises(ValueError, match="200"):  # what would fit
        starved.generate([documents[0][:201]])


def test_a_model_length_that_can_never_fit_is_refused_with_the_one_that_would(engines, documents):
    """The length that vLLM names does run, on that very pool; one token more is rejected with the number that fits."""
    with pytest.raises(ValueError, match=r"estimated maximum model length is \d+") as refused:  # 2,304 is asked for
        engines.get("memory", num_gpu_blocks_override=220)
    fits = int(re.search(r"maximum model length is (\d+)", str(refused.value)).group(1))
    engine = engines.get("memory", num_gpu_blocks_override=220, max_model_len=fits)
    with pytest.raises(ValueError, match=str(fits)):
        engine.generate([documents[3][: fits + 1]])
    (output,) = engine.generate([documents[3][: fits - 3]], 3)
    print(f"220 blocks: {fits} tokens fit and run")
    assert len(output.tokens) == 3
    engine.check_idle()


def test_unwritten_memory_is_never_read(alone):
    """The pool was full of NaN before every test of this module, block 0 included; nothing of it came out."""
    for output in alone:
        assert all(torch.isfinite(torch.tensor(list(entry.values()))).all() for entry in output.logprobs)
