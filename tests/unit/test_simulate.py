"""The simulator: tiny traces by hand, equality with stepping one by one, conservation laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkv.artifacts import Fingerprint
from loopkv.bench.cache_arms import CacheArm, plan_arm, stock_arm
from loopkv.bench.simulate import EngineModel, Replay, _Simulation, replay, simulate_ladder
from loopkv.bench.simulate_study import ShortTrace, SimulationStudy, short_trace, simulate_study, study_records
from loopkv.bench.slo import Bounds
from loopkv.bench.workload import REASONING, Request, generate, with_arrivals
from loopkv.errors import LoopKVError
from loopkv.geometry import Geometry
from loopkv.planner import named_plan
from loopkv.step_time import StepTimeModel, request_read_bytes

TINY = Geometry(architecture="ouro", loops=4, layers=4, query_heads=6, kv_heads=6, head_dim=64)
OURO = Geometry(architecture="ouro", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
# t = 1 s + bytes / (1 B/s) without weights: with one byte read per token, a step of rows n1, n2 takes 1 + n1 + n2 s.
PER_TOKEN = CacheArm("toy", 1, np.arange(1001), np.arange(1001).astype(float))


def engine(pool_blocks: int, *, prefill: float = 1.0, **fields: float) -> EngineModel:
    return EngineModel(StepTimeModel(1.0, 0.0, 1.0), pool_blocks + 1, prefill, **fields)  # type: ignore[arg-type]


def request(arrival: float, prompt: int, output: int) -> Request:
    return Request(prompt, output, arrival_s=arrival)


def test_one_request_by_hand() -> None:
    # Arrives at 5. Prefill of 3 tokens: 1 + 3 / 1 = 4 s, first token at 9 (TTFT 4).
    # Decode steps end at 4 and 5 tokens: 1 + 4 and 1 + 5 s, tokens at 14 and 20. TPOT (20 - 9) / 2 = 5.5.
    done = replay([request(5, 3, 3)], PER_TOKEN, engine(100))
    (times,) = done.requests
    assert (times.arrival_s, times.ttft_s, times.tpot_s, times.output_tokens) == (5, 4, 5.5, 3)
    assert (done.steps, done.decoded_tokens, done.prefilled_tokens, done.duration_s) == (3, 2, 3, 20)
    assert done.peak_blocks == 5 and done.preemptions == 0


def test_a_second_request_joins_the_next_step() -> None:
    # A (prompt 2, output 3) arrives at 0: prefill 1 + 2 = 3 s, first token at 3.
    # B (prompt 2, output 1) arrives at 4, during A's decode step [3, 7] (3 tokens: 1 + 3 s).
    # Step at 7: A reads 4, B prefills 2: 1 + 4 + 2 = 7 s, both get a token at 14; B ends, A ends (third token).
    done = replay([request(0, 2, 3), request(4, 2, 1)], PER_TOKEN, engine(100))
    a, b = done.requests
    assert a.ttft_s == 3 and a.tpot_s == (14 - 3) / 2
    assert b.ttft_s == 10 and b.tpot_s == 0.0
    assert done.peak_running == 2 and done.duration_s == 14


def test_admission_waits_for_blocks_of_the_whole_prompt() -> None:
    # Pool of 6. A holds 3 to 5 (prompt 2, output 4). B (prompt 3) needs 3 free: only when A has ended.
    # A: prefill ends at 3; decode to 3, 4, 5 tokens: 4 + 5 + 6 s, ends at 18. B: prefill 1 + 3 = 4 s, at 22.
    done = replay([request(0, 2, 4), request(1, 4, 1)], PER_TOKEN, engine(6))
    a, b = done.requests
    assert a.ttft_s == 3 and a.tpot_s == 5.0
    assert b.ttft_s == 22 + 1 - 1  # 18 + 1 + 4 = 23, less the arrival at 1
    assert done.peak_blocks <= 6 and done.preemptions == 0


def test_the_last_arrival_is_preempted_and_recomputed() -> None:
    # Pool of 6, A and B: prompt 2, output 3 each, both at 0. One prefill step: 1 + 4 = 5 s, first tokens at 5.
    # Step at 5 (3 tokens each, 6 blocks): 1 + 6 = 7 s, second tokens at 12. Step at 12: A needs 4, B is preempted
    # (frees 3): 1 + 4 = 5 s, A's third token at 17, A ends. B is recomputed (2 + 2 tokens): 5 s, third at 22.
    done = replay([request(0, 2, 3), request(0, 2, 3)], PER_TOKEN, engine(6))
    a, b = done.requests
    assert (a.ttft_s, a.tpot_s) == (5, 6.0)
    assert (b.ttft_s, b.tpot_s) == (5, (22 - 5) / 2)
    assert done.preemptions == 1 and done.prefilled_tokens == 4 + 4 and done.decoded_tokens == 2 + 1


def test_a_watermark_keeps_the_second_request_out() -> None:
    # As above with B at 1, in a pool of 7 (8 with the null block): 0.3 of 8 are 2 blocks that stay free beside A. A's
    # prefill ends at 3 with 2 blocks held, 5 free: B (2 blocks) is admitted, for 2 + 2 <= 5. At 0.5 it needs 2 + 4.
    trace = [request(0, 2, 3), request(1, 2, 3)]
    assert replay(trace, PER_TOKEN, engine(7, watermark=0.3)).peak_running == 2
    # A alone: 3 s, then 1 + 3 and 1 + 4 s: it ends at 12. B is alone by then and may take every block: 12 + 3 = 15.
    done = replay(trace, PER_TOKEN, engine(7, watermark=0.5))
    assert done.peak_running == 1 and done.preemptions == 0
    assert [one.ttft_s for one in done.requests] == [3, 14]
    # Who runs may grow into the blocks that were kept free.
    assert replay([request(0, 2, 6)], PER_TOKEN, engine(7, watermark=0.9)).peak_blocks == 7


def test_chunked_prefill_shares_the_budget() -> None:
    # Budget 4 tokens a step. A: prompt 6: chunks 4 and 2, B: prompt 3 gets the other 2, then 1.
    # Steps: 1 + 4 = 5; then A 2 + B 2: 1 + 4 = 5, A's token at 10. Then A decodes (reads 7), B's last: 1 + 7 + 1.
    done = replay([request(0, 6, 2), request(0, 3, 1)], PER_TOKEN, engine(50, max_batched_tokens=4, max_running=4))
    a, b = done.requests
    assert a.ttft_s == 10 and a.tpot_s == 9 and b.ttft_s == 19


def test_chunk_cap_of_a_plan_that_shares() -> None:
    capped = CacheArm("toy", 1, np.arange(1001), np.arange(1001).astype(float), chunk_tokens=2)
    # 5 prompt tokens in chunks of 2, 2, 1: 3 + 3 + 2 = 8 s
    assert replay([request(0, 5, 1)], capped, engine(50)).requests[0].ttft_s == 8


def test_what_can_never_fit_fails_and_is_counted() -> None:
    done = replay([request(0, 5, 10), request(0, 2, 2), request(1, 900, 200)], PER_TOKEN, engine(8))
    assert [r.failed for r in done.requests] == [True, False, True]
    assert "never fit" in (done.requests[0].error or "")


def test_at_most_max_running_requests() -> None:
    done = replay([request(0, 2, 5) for _ in range(5)], PER_TOKEN, engine(500, max_running=2, max_batched_tokens=64))
    assert done.peak_running == 2 and not any(r.failed for r in done.requests)


class Stepper(_Simulation):
    """The same scheduler, one step at a time."""

    def decode_run(self) -> bool:
        return False


TRACE = st.lists(st.tuples(st.floats(0, 200), st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)


@given(
    trace=TRACE,
    pool=st.integers(20, 400),
    budget=st.integers(8, 64),
    chunk=st.sampled_from([None, 4, 16]),
    watermark=st.sampled_from([0.0, 0.05, 0.3]),
)
@settings(max_examples=150, deadline=None)
def test_many_steps_at_once_equal_single_steps(
    trace: list[tuple[float, int, int]], pool: int, budget: int, chunk: int | None, watermark: float
) -> None:
    requests = [request(*row) for row in trace]
    arm = CacheArm("toy", 1, np.arange(1001), np.arange(1001).astype(float), chunk_tokens=chunk)
    model = engine(pool, max_batched_tokens=budget, max_running=8, watermark=watermark)
    fast = replay(requests, arm, model)
    assert fast == Stepper(requests, arm, model).run()
    check_conservation(requests, arm, model, fast)


def check_conservation(requests: list[Request], arm: CacheArm, model: EngineModel, done: Replay) -> None:
    """Every token is made once, no block is held twice, nobody is served before arriving."""
    total = model.pool_blocks(arm)
    assert 0 <= done.peak_blocks <= total
    made = 0
    for asked, got in zip(requests, done.requests, strict=True):
        if got.failed:
            assert got.output_tokens == 0
            continue
        assert got.output_tokens == asked.output_tokens
        assert got.ttft_s is not None and got.ttft_s > 0 and got.tpot_s is not None and got.tpot_s >= 0
        made += asked.output_tokens
    served = sum(not r.failed for r in done.requests)
    # Tokens come from decode rows and from the last chunk of each prefill (once, and once more per recompute).
    assert made - served - done.preemptions <= done.decoded_tokens <= made - served
    prompts = sum(a.prompt_tokens for a, r in zip(requests, done.requests, strict=True) if not r.failed)
    assert done.prefilled_tokens >= prompts
    assert (done.prefilled_tokens == prompts) or done.preemptions > 0


PLAN_TRACE = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 700), st.integers(1, 900)), min_size=1, max_size=8)


@given(trace=PLAN_TRACE, pool=st.integers(25, 260), name=st.sampled_from(["kivi4", "kivi4-share3", "int2-share"]))
@settings(max_examples=80, deadline=None)
def test_plan_layouts_obey_the_same_laws(trace: list[tuple[float, int, int]], pool: int, name: str) -> None:
    requests = [request(*row) for row in trace]
    arm = PLAN_ARMS[name]
    model = EngineModel(StepTimeModel(1e-3, 1e6, 1e9), (pool + 1) * arm.block_bytes, 1e4)
    fast = replay(requests, arm, model)
    assert fast == Stepper(requests, arm, model).run()
    check_conservation(requests, arm, model, fast)


def test_a_row_that_needs_a_block_before_a_later_row_frees_one_preempts() -> None:
    # A plan's window may give back blocks: held by a request of n tokens, 4 up to 7 tokens, 5 at 8, 2 from 9 on.
    held = np.array([4] * 8 + [5] + [2] * 92)
    arm = CacheArm("toy", 1, held, np.zeros(101))
    # Pool 9. A (prompt 6) and B (prompt 7) hold 4 each and prefill together; step 2: A to 7 (4), B to 8 (5): 9 held.
    # Step 3: A to 8 needs its fifth block while B still holds 5 (10 > 9), though B goes down to 2 in the same step.
    requests = [request(0, 6, 4), request(0, 7, 4)]
    for kind in (_Simulation, Stepper):
        done = kind(requests, arm, engine(9)).run()
        assert (done.preemptions, done.peak_blocks) == (1, 9)
    # With one block more nobody is preempted, and the peak is that of the moment between the two.
    for kind in (_Simulation, Stepper):
        done = kind(requests, arm, engine(10)).run()
        assert (done.preemptions, done.peak_blocks) == (0, 10)


PLAN_ARMS = {
    name: plan_arm(named_plan(name, Fingerprint(name="tiny", geometry=TINY)), 2000)
    for name in ("kivi4", "kivi4-share3", "int2-share")
}
TINY_ARM = PLAN_ARMS["kivi4-share3"]


def test_arms_take_their_numbers_from_the_layout_and_the_step_time_module() -> None:
    plan = named_plan("kivi4-share3", Fingerprint(name="tiny", geometry=TINY))
    assert TINY_ARM.layout is not None and TINY_ARM.chunk_tokens == 256 and TINY_ARM.plan_sha256 == plan.sha256
    for tokens in (0, 1, 32, 319, 320, 1000, 1999):
        read = request_read_bytes(TINY, plan.policy, plan.footprint, tokens)
        assert TINY_ARM.read_bytes[tokens] == pytest.approx(read)
    assert plan_arm(named_plan("kivi4", plan.fingerprint), 100).chunk_tokens is None
    stock = stock_arm(TINY, 100)
    # 16 cells x 2 x 6 heads x 64 x 2 B = 24,576 B a token, 16 tokens a block
    assert stock.block_bytes == 16 * 24_576 and stock.read_bytes[10] == 245_760
    assert list(stock.held_blocks[[0, 1, 16, 17, 100]]) == [0, 1, 1, 2, 7]
    assert stock_arm(TINY, 10, element_bytes=1.0).block_bytes == 8 * 24_576


def test_a_reasoning_trace_on_ouro_is_quick_and_orders_the_arms() -> None:
    import time

    identity = Fingerprint(name="ouro", geometry=OURO)
    model = EngineModel(StepTimeModel(6.84e-3, 10.07e9, 1.29e12), 80 << 30, 20_000.0)
    requests = with_arrivals(generate(REASONING, 60, 101), 0.07, 101)
    arms = [stock_arm(OURO, 16_384), plan_arm(named_plan("kivi4", identity), 16_384)]
    start = time.process_time()
    stock, kivi = (replay(requests, arm, model) for arm in arms)
    assert time.process_time() - start < 20  # two traces; a wide bound against a step-by-step regression
    assert sum(r.output_tokens for r in kivi.requests) == sum(r.output_tokens for r in requests)
    assert stock.preemptions >= kivi.preemptions and stock.duration_s > kivi.duration_s


def test_ladder_and_its_capacity() -> None:
    identity = Fingerprint(name="tiny", geometry=TINY)
    arm = plan_arm(named_plan("kivi4", identity), 2000)
    model = EngineModel(StepTimeModel(1e-3, 1e7, 1e10), 60 * arm.block_bytes, 1e5)
    requests = [Request(100, 300) for _ in range(30)]
    rungs, found = simulate_ladder(requests, arm, model, [0.5, 50.0, 0.5, 5.0], Bounds(1.0, 3.0, 2.2e-3), 1)
    assert [rung.rate_per_s for rung in rungs] == [0.5, 5.0, 50.0]
    assert rungs[0].score.attainment == 1.0
    assert found.lowest_rate == 0.5 and found.highest_rate == 50.0
    attained = [rung.score.attainment for rung in rungs]
    assert attained == sorted(attained, reverse=True)
    with pytest.raises(LoopKVError):
        simulate_ladder(requests, arm, model, [], Bounds(1.0, 3.0, 1e-3), 1)


def test_bad_engines_and_traces_are_refused() -> None:
    with pytest.raises(LoopKVError, match="pool_bytes"):
        EngineModel(StepTimeModel(1.0, 0.0, 1.0), 0, 1.0)
    with pytest.raises(LoopKVError, match="max_batched_tokens"):
        engine(10, max_batched_tokens=4, max_running=8)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(LoopKVError, match="watermark"):
            engine(10, watermark=share)
    with pytest.raises(LoopKVError, match="arrival_s"):
        replay([Request(1, 1)], PER_TOKEN, engine(10))
    with pytest.raises(LoopKVError, match="blocks"):
        replay([request(0, 1, 1)], PER_TOKEN, EngineModel(StepTimeModel(1.0, 0.0, 1.0), 1, 1.0))
    with pytest.raises(LoopKVError, match="hot share"):
        plan_arm(named_plan("kivi4", Fingerprint(name="tiny", geometry=TINY)), 10, hot_share=1.5)


def study(requests: list[Request], bounds: tuple[Bounds, ...] = (Bounds(100.0, 1.0, 1.0),)) -> SimulationStudy:
    return simulate_study(requests, [(PER_TOKEN, engine(100))], bounds, gpu="x", constants="toy")


def test_a_trace_too_short_for_a_steady_state_is_told_with_the_requests_that_would_do() -> None:
    # A request of 2 tokens and one answer takes 1 + 2 = 3 s; one every 4 s, each alone. 10 stays are 30 s: 11 requests
    # arrive in 40 s, 5 in 16 s at 5 / 16 = 0.3125 a second, where 30 s take 9.4 arrivals: 1 + 10 requests.
    def every_4_s(count: int) -> list[Request]:
        return [request(4.0 * i, 2, 1) for i in range(count)]

    assert study(every_4_s(11)).warnings() == []
    short = study(every_4_s(5))
    assert short_trace(short.ladders[0]) == ShortTrace(0.3125, 16.0, 3.0, 5, False, 11)
    (said,) = short.warnings()
    assert said.startswith("toy: at 0.312 requests/s arrivals last 16 s and a request stays 3 s on average: no steady")
    assert "about 11 requests would do, the workload has 5" in said
    # Three together: 1 + 6 = 7 s, all at once, whatever the rate that is told: 10 x 7 s x 3 in 7 s, and one.
    together = [request(0.0, 2, 1) for _ in range(3)]
    found = short_trace(study(together).ladders[0])
    assert found == ShortTrace(3.0, 0.0, 7.0, 3, True, 31)
    assert "all 3 requests running at once" in found.describe()
    assert short_trace(study(together, (Bounds(1.0, 1.0, 1.0),)).ladders[0]) is None, "no rate meets the bound"


def test_every_bound_asked_for_has_its_attainment_in_records() -> None:
    bounds = tuple(Bounds(t, k, 1.0) for t in (5.0, 10.0) for k in (2.0, 3.0, 5.0))
    records = study_records(study([request(4.0 * i, 2, 1) for i in range(3)], bounds), tau0_rule="short")
    for what in ("simulate.attainment", "simulate.capacity"):
        found = [(r.settings["ttft_s"], r.settings["k"]) for r in records if r.what == what]
        assert found == [(one.ttft_s, one.k) for one in bounds]
