"""The paged engine reads exactly what the whole-sequence policy reads, however the tokens arrive."""

import itertools

import pytest
import torch
from support.plans import make_plan
from support.random_models import write_random_ouro

from loopkv.engine.paged_engine import NewTokens, PagedEngine, pool_blocks
from loopkv.engine.whole_sequence import sequence_logits
from loopkv.errors import LoopKVError, PlanMismatchError, UnsupportedError
from loopkv.layout import lay_out
from loopkv.models import load_model
from loopkv.policy import Policy

TOKENS = 700
NAN_BYTE = 0xFF  # fp16, BF16, fp32 and fp64 of all ones are NaN
MIXED = ("bf16", "int2", "share", "int4", "int4", "int2")  # 3 loops x 2 layers: cell 2 reads int4, cell 5 is int2
SHARED = ("share", "share", "share", "int2", "int4", "bf16")  # a shared cell's source may also be exact
PLANS = {"bf16": "bf16", "int4": "int4", "int2": "int2", "mixed": MIXED, "shared": SHARED}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """``build(dtype, **shape)``: a random model, each shape written once."""
    models = {}

    def build(dtype=torch.float64, **shape):
        key = (dtype, *sorted(shape.items()))
        if key not in models:
            models[key] = load_model(write_random_ouro(tmp_path_factory.mktemp("model"), **shape), dtype)
        return models[key]

    return build


def random_ids(count, seed=0, vocab=64):
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_engine(model, plan, lengths=(TOKENS,), chunk=256, fill_byte=NAN_BYTE, **options):
    layout = options.pop("layout", None) or lay_out(plan, exact_itemsize=model.dtype.itemsize)
    blocks = pool_blocks(layout, lengths, chunk)
    return PagedEngine(model, plan, blocks=blocks, layout=layout, fill_byte=fill_byte, **options)


def run_chunks(engine, request, ids, chunks):
    """Logits at every position of ``ids``, fed in ``chunks`` tokens at a time (an int or a sequence of sizes)."""
    sizes = itertools.repeat(chunks) if isinstance(chunks, int) else iter(chunks)
    logits, at = [], 0
    while at < len(ids):
        size = next(sizes)
        logits += engine.step([NewTokens(request, ids[at : at + size])], every_position=True)
        at += size
    return torch.cat(logits)


def reference(model, plan, ids, tau=None):
    return sequence_logits(model, torch.tensor([ids]), plan.cell_options, plan.policy, tau=tau)[0]


def largest_difference(a, b):
    assert a.shape == b.shape and bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())
    return float((a - b).abs().max())


@pytest.mark.parametrize("chunk", [1, 16, 64, 256])
@pytest.mark.parametrize("name", PLANS)
def test_every_length_to_700_equals_the_whole_sequence_in_fp64(build, name, chunk):
    model = build(heads=4)
    plan = make_plan(model.geometry, PLANS[name])
    ids = random_ids(TOKENS)
    engine = make_engine(model, plan)
    logits = run_chunks(engine, engine.new_request(), ids, chunk)
    assert largest_difference(logits, reference(model, plan, ids)) < 1e-9


def test_every_length_to_700_as_a_prompt_with_a_ragged_last_chunk(build):
    model = build(layers=1, hidden=16)
    plan = make_plan(model.geometry, ("int2", "share", "int4"))
    ids = random_ids(TOKENS)
    expected = reference(model, plan, ids)
    engine = make_engine(model, plan, (TOKENS,) * 2)
    request = engine.new_request()
    for start in range(0, TOKENS, 256):
        for stop in range(start + 1, min(start + 256, TOKENS) + 1):
            branch = engine.fork(request)
            (logits,) = engine.step([NewTokens(branch, ids[start:stop])])
            assert largest_difference(logits, expected[stop - 1]) < 1e-9, f"prompt of {stop} tokens"
            engine.release(branch)
        engine.step([NewTokens(request, ids[start : start + 256])])


@pytest.mark.parametrize("chunk", [257, 500, 700])
def test_a_plan_without_shares_takes_any_chunk(build, chunk):
    model = build(heads=4)
    plan = make_plan(model.geometry, ("bf16", "int2", "int4", "int4", "int4", "int2"))
    ids = random_ids(TOKENS)
    engine = make_engine(model, plan, chunk=chunk)
    logits = run_chunks(engine, engine.new_request(), ids, chunk)
    assert largest_difference(logits, reference(model, plan, ids)) < 1e-9


def test_irregular_chunks_and_block_sizes_change_nothing(build):
    model = build(heads=4)
    plan = make_plan(model.geometry, MIXED)
    ids = random_ids(TOKENS)
    expected = reference(model, plan, ids)
    for history, window, sizes in ((64, 7, (255, 1, 2, 33, 100)), (256, 48, (31, 256, 1)), (32, 1, (128, 3, 200))):
        layout = lay_out(plan, exact_itemsize=8, history_block_tokens=history, window_block_tokens=window)
        engine = make_engine(model, plan, layout=layout)
        logits = run_chunks(engine, engine.new_request(), ids, itertools.cycle(sizes))
        assert largest_difference(logits, expected) < 1e-9


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(group, 1) for group in (1, 2, 3, 4, 5, 6, 7, 8, 16)] + [(24, 8), (6, 6), (6, 3)]
)
def test_grouped_and_multi_query_heads(build, heads, kv_heads):
    model = build(loops=2, layers=1, heads=heads, kv_heads=kv_heads)
    plan = make_plan(model.geometry, ("share", "int4"))
    ids = random_ids(360)
    engine = make_engine(model, plan)
    logits = run_chunks(engine, engine.new_request(), ids, (256, 80) + (1,) * 24)
    assert largest_difference(logits, reference(model, plan, ids)) < 1e-9


@pytest.mark.parametrize("batch", range(1, 14))
def test_each_row_of_a_ragged_batch_equals_the_row_alone(build, batch):
    """Rows of very different lengths share steps: some prefill while others decode, some never leave the window."""
    model = build(heads=4)
    plan = make_plan(model.geometry, MIXED)
    rows = [random_ids(7 + (97 * row + 311 * batch) % 420, seed=row) for row in range(batch)]
    engine = make_engine(model, plan, [len(ids) for ids in rows])
    requests, logits = [engine.new_request() for _ in rows], [[] for _ in rows]
    while any(requests[r].tokens < len(ids) for r, ids in enumerate(rows)):
        steps = []
        for r, ids in enumerate(rows):
            at, prompt = requests[r].tokens, len(ids) - 6
            if at < len(ids):
                steps.append((r, ids[at : min(at + 120 + 30 * r, at + 256, prompt)] if at < prompt else [ids[at]]))
        out = engine.step([NewTokens(requests[r], ids) for r, ids in steps], every_position=True)
        for (r, _), part in zip(steps, out, strict=True):
            logits[r].append(part)
    for r, ids in enumerate(rows):
        assert largest_difference(torch.cat(logits[r]), reference(model, plan, ids)) < 1e-9


def test_v_precision_of_a_row_does_not_depend_on_its_batch(build):
    model = build(heads=4)
    plan = make_plan(model.geometry, MIXED, tau=3.0)
    rows = [random_ids(330 + 50 * row, seed=row) for row in range(5)]
    together = make_engine(model, plan, [len(ids) for ids in rows])
    requests = [together.new_request() for _ in rows]
    for request, ids in zip(requests, rows, strict=True):
        run_chunks(together, request, ids[:-8], 100)
    out = [
        together.step([NewTokens(request, [ids[k]]) for request, ids in zip(requests, rows, strict=True)])
        for k in range(-8, 0)
    ]
    for r, ids in enumerate(rows):
        alone = make_engine(model, plan)
        request = alone.new_request()
        run_chunks(alone, request, ids[:-8], 100)
        expected = run_chunks(alone, request, ids[-8:], 1)
        assert largest_difference(torch.stack([step[r] for step in out]), expected) < 1e-9


def test_v_precision_on_decode_rows_follows_the_reference_rule(build):
    model = build(heads=4)
    ids = random_ids(TOKENS)
    for options in ("int4", MIXED):
        plan = make_plan(model.geometry, options, tau=3.0)
        engine = make_engine(model, plan)
        logits = run_chunks(engine, engine.new_request(), ids, (256, 63) + (1,) * (TOKENS - 319))
        assert largest_difference(logits[319:], reference(model, plan, ids, tau=3.0)[319:]) < 1e-9
        assert 0 < engine.hot.hot < engine.hot.total
        plain = reference(model, plan, ids)
        assert largest_difference(logits[:319], plain[:319]) < 1e-9
        assert largest_difference(logits, plain) > 1e-6  # the rule did something


def test_a_tau_that_no_token_reaches_reads_both_planes(build):
    model = build(heads=4)
    ids = random_ids(400)
    plan = make_plan(model.geometry, "int4", tau=1000.0)
    engine = make_engine(model, plan)
    logits = run_chunks(engine, engine.new_request(), ids, (256, 63) + (1,) * 81)
    assert largest_difference(logits, reference(model, plan, ids)) < 1e-9
    assert engine.hot.hot == engine.hot.total > 0


def test_chunks_with_more_than_one_token_read_both_planes(build):
    model = build(heads=4)
    ids = random_ids(400)
    plan = make_plan(model.geometry, "int4", tau=1.0)
    engine = make_engine(model, plan)
    logits = run_chunks(engine, engine.new_request(), ids, 25)
    assert largest_difference(logits, reference(model, plan, ids)) < 1e-9
    assert engine.hot.total == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_unwritten_is_read_whatever_fills_the_pool(build, dtype):
    """Stale NaN in unused slots, the null block or a freed block would survive any mask (0 * NaN)."""
    model = build(dtype, heads=4)
    plan = make_plan(model.geometry, MIXED, tau=4.0)
    ids = random_ids(450)
    results = []
    for fill in (NAN_BYTE, 0x00, 0x7F):
        engine = make_engine(model, plan, fill_byte=fill)
        first = engine.new_request()  # its freed blocks are handed out again
        engine.step([NewTokens(first, ids[:200])])
        engine.release(first)
        results.append(run_chunks(engine, engine.new_request(), ids, (256, 130) + (1,) * 64))
        assert bool((engine.cache.pool.data[0] == fill).all()), "the null block was written"
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert bool(torch.isfinite(results[0]).all())


def test_bf16_follows_the_whole_sequence_within_its_rounding(build):
    model = build(torch.bfloat16, heads=4)
    plan = make_plan(model.geometry, MIXED)
    ids = random_ids(450)
    engine = make_engine(model, plan)
    logits = run_chunks(engine, engine.new_request(), ids, 256)
    assert engine.layout.exact_itemsize == 2
    difference = (logits.float().log_softmax(-1) - reference(model, plan, ids).float().log_softmax(-1)).abs()
    assert float(difference.mean()) < 0.05  # same chunks: rounding of the batched products only


def test_saved_requests_carry_codes_scales_sink_and_window(build):
    model = build(heads=4)
    plan = make_plan(model.geometry, MIXED)
    ids = random_ids(TOKENS)
    for length in (5, 256, 330, 601):
        engine = make_engine(model, plan, (TOKENS,) * 2)
        request = engine.new_request()
        run_chunks(engine, request, ids[:length], 256)
        saved = engine.save(request)
        engine.release(request)  # poisons what it held
        restored = engine.restore(saved)
        again = run_chunks(engine, restored, ids[length:], 64)
        unbroken = make_engine(model, plan)
        whole = unbroken.new_request()
        run_chunks(unbroken, whole, ids[:length], 256)
        assert torch.equal(again, run_chunks(unbroken, whole, ids[length:], 64))
        other = make_engine(model, make_plan(model.geometry, "int4"))
        with pytest.raises(PlanMismatchError, match="another layout"):
            other.restore(saved)


def test_a_fork_is_independent_of_its_origin(build):
    model = build(heads=4)
    plan = make_plan(model.geometry, MIXED)
    ids = random_ids(TOKENS)
    engine = make_engine(model, plan, (TOKENS,) * 2)
    request = engine.new_request()
    run_chunks(engine, request, ids[:500], 256)
    fork = engine.fork(request)
    run_chunks(engine, fork, random_ids(150, seed=9), 50)
    assert set(fork.blocks).isdisjoint(request.blocks)
    engine.release(fork)
    logits = run_chunks(engine, request, ids[500:], 100)
    assert largest_difference(logits, reference(model, plan, ids)[500:]) < 1e-9


def test_a_prompt_without_history_can_move_to_another_plan(build):
    model = build(heads=4)
    exact, coded = make_plan(model.geometry, "bf16"), make_plan(model.geometry, MIXED)
    ids = random_ids(450)
    origin = make_engine(model, exact)
    request = origin.new_request()
    origin.step([NewTokens(request, ids[:256])])
    origin.step([NewTokens(request, ids[256:319])])
    engine = make_engine(model, coded)
    moved = engine.adopt(origin, request)
    logits = run_chunks(engine, moved, ids[319:], 64)
    assert largest_difference(logits, reference(model, coded, ids)[319:]) < 1e-9
    origin.step([NewTokens(request, ids[319:320])])
    with pytest.raises(PlanMismatchError, match=r"320 tokens.*319"):
        engine.adopt(origin, request)


def test_an_interrupted_step_can_be_repeated(build):
    model = build(heads=4)
    plan = make_plan(model.geometry, MIXED)
    ids = random_ids(500)
    engine = make_engine(model, plan)
    request = engine.new_request()
    run_chunks(engine, request, ids[:400], 200)
    write, calls = engine.cache.write_exact, itertools.count()

    def fail_late(*args):
        if next(calls) == 4:
            raise KeyboardInterrupt
        write(*args)

    engine.cache.write_exact = fail_late
    with pytest.raises(KeyboardInterrupt):
        engine.step([NewTokens(request, ids[400:500])])
    engine.cache.write_exact = write
    (logits,) = engine.step([NewTokens(request, ids[400:500])], every_position=True)
    assert largest_difference(logits, reference(model, plan, ids)[400:]) < 1e-9


def test_steps_that_cannot_run_are_refused_and_change_nothing(build):
    model = build(heads=4, max_positions=600)
    plan = make_plan(model.geometry, MIXED)
    engine = make_engine(model, plan, (300,))
    request = engine.new_request()
    engine.step([NewTokens(request, [1, 2, 3])])
    before = (request.tokens, list(request.window), engine.cache.pool.free_blocks)
    for ids, error, words in (
        ([1] * 257, UnsupportedError, "shared cells.*257.*256"),
        ([], LoopKVError, "without new tokens"),
        ([64], LoopKVError, "got 64.*0 to 63"),
        ([-1], LoopKVError, "got -1"),
    ):
        with pytest.raises(error, match=words):
            engine.step([NewTokens(request, ids)])
    with pytest.raises(LoopKVError, match="twice"):
        engine.step([NewTokens(request, [1]), NewTokens(request, [2])])
    with pytest.raises(LoopKVError, match="free blocks"):
        engine.step([NewTokens(engine.new_request(), [1] * 256) for _ in range(9)])
    assert before == (request.tokens, list(request.window), engine.cache.pool.free_blocks)
    own = PagedEngine(model, make_plan(model.geometry, "int4"), blocks=2000)
    with pytest.raises(UnsupportedError, match=r"601 tokens.*600"):
        own.step([NewTokens(own.new_request(), [1] * 601)])


def test_a_plan_of_another_geometry_is_refused(build):
    plan = make_plan(build(heads=4).geometry, "int4")
    with pytest.raises(PlanMismatchError, match=r"query heads.*got 4.*wanted 8"):
        PagedEngine(build(heads=8), plan, blocks=10)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(sink_tokens=0, window_tokens=64, page_tokens=32),
        Policy(sink_tokens=64, window_tokens=96, page_tokens=16),
        Policy(sink_tokens=32, window_tokens=33, page_tokens=8, group=16),
        Policy(sink_tokens=8, window_tokens=1, page_tokens=8, group=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("tau", [None, 3.0])
def test_other_constants(build, policy, tau):
    model = build(heads=4)
    plan = make_plan(model.geometry, MIXED, policy=policy, tau=tau)
    ids = random_ids(230)
    layout = lay_out(plan, exact_itemsize=8)
    for chunk in (1,) if tau else (policy.max_exact_chunk_tokens, 7, 1):
        chunk = min(chunk, policy.max_exact_chunk_tokens)
        blocks = pool_blocks(layout, [230], chunk)
        engine = PagedEngine(model, plan, blocks=blocks, layout=layout, fill_byte=NAN_BYTE)
        request = engine.new_request()
        logits = run_chunks(engine, request, ids, chunk)
        assert largest_difference(logits, reference(model, plan, ids, tau=tau)) < 1e-9
        history = policy.history_end(230) - policy.sink_tokens
        footprint = plan.footprint_at(8)
        assert engine.cache.stored_bytes(request) == (
            history * footprint.stored_bytes + (230 - history) * layout.window_token_bytes
        )
