"""The same tokens however the scheduler cuts, batches, evicts, resumes or shares the work (fp32, tau infinite)."""

from __future__ import annotations

import pytest
import torch
from harness import ServedEngine, same_tokens

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


def check(outputs, expected):
    assert len(outputs) == len(expected)
    for length, output, wanted in zip(LENGTHS, outputs, expected, strict=False):
        assert same_tokens(output, wanted), f"prompt of {length} tokens: {output.tokens} instead of {wanted.tokens}"


def test_a_batch_of_eight_and_every_chunk_size(engine, documents, alone):
    for chunk in (16, 64, 128, 256):
        engine.forget()
        engine.set_chunk(chunk)
        rows = slice(0, 3) if chunk == 16 else slice(None)
        check(engine.generate(prompts(documents)[rows], NEW_TOKENS), alone[rows])
        engine.check_idle()
    engine.set_chunk(256)


def test_prefix_hits_first_and_later_turns(engine, documents, alone):
    engine.forget()
    turns = [documents[0][:700], documents[3][:1100]]
    cold = engine.generate(turns, NEW_TOKENS)
    again = engine.generate(turns, NEW_TOKENS)
    assert all(output.cached_tokens >= 512 for output in again)
    check(again, [alone[0], alone[3]])
    check(cold, [alone[0], alone[3]])
    # a second turn: the first answer and 40 more tokens follow; then the same without any cache
    longer = [turn + list(output.tokens) + documents[5][:40] for turn, output in zip(turns, again, strict=True)]
    hit = engine.generate(longer, NEW_TOKENS)
    assert all(output.cached_tokens >= 512 for output in hit)
    engine.forget()
    for output, wanted in zip(hit, engine.generate(longer, NEW_TOKENS), strict=True):
        assert wanted.cached_tokens == 0 and same_tokens(output, wanted)
    engine.check_idle()


def test_two_samples_and_equal_prompts_in_one_step(engine, documents, alone):
    engine.forget()
    pair = engine.generate([documents[0][:700]], NEW_TOKENS, n=2, **ONE_CHOICE)
    check(pair, [alone[0], alone[0]])
    engine.forget()
    check(engine.generate([documents[2][:333]] * 4, NEW_TOKENS), [alone[2]] * 4)
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
    check(engine.generate([documents[3][:1100], documents[1][:90]], NEW_TOKENS), [alone[3], alone[1]])
    engine.set_chunk(256)
    engine.check_idle()


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
    outputs = []
    for chunk in (256, 2048, 600):
        engine.forget()
        engine.set_chunk(chunk)
        outputs.append(engine.generate(prompts(documents), NEW_TOKENS))
        engine.check_idle()
    engine.set_chunk(256)
    check(outputs[1], outputs[0])
    check(outputs[2], outputs[0])


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
def test_a_starved_pool_preempts_and_gives_the_same_tokens(engines, roomy, policy):
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
    print(policy, "preemptions", starved.preemptions)
    for output, wanted in zip(outputs, expected, strict=True):
        assert same_tokens(output, wanted)
    assert starved.preemptions >= 20
    starved.check_idle()


def test_a_model_length_that_can_never_fit_is_refused_with_the_one_that_would(engines):
    with pytest.raises(ValueError, match=r"estimated maximum model length is \d+"):
        engines.get("memory", num_gpu_blocks_override=40)


def test_unwritten_memory_is_never_read(alone):
    """The pool was full of NaN before every test of this module, block 0 included; nothing of it came out."""
    for output in alone:
        assert all(torch.isfinite(torch.tensor(list(entry.values()))).all() for entry in output.logprobs)
