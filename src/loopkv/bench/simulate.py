"""``simulate``: a trace replayed through the step-time model and true block counts, scheduled as vLLM 0.26 does.

First come, first served. A step serves every running request: one token each in decode, a chunk of the prompt in
prefill; then it admits waiting requests whose whole sequence fits and leaves the watermark free. A running request that
needs a block when none is free preempts the last of the running list, which drops its cache, returns to the head of the
queue and is recomputed.
A step takes ``t_fix + (W_T + bytes read by decode rows) / BW`` plus its prefill tokens over a prefill rate.

Runs of pure decode steps are advanced at once with arrays, so a trace of 660,000 tokens takes well under a second;
nothing is approximated: the result is that of stepping one by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loopkv.bench.cache_arms import CacheArm
from loopkv.bench.slo import Bounds, LadderCapacity, RequestTimes, Score, capacity, score
from loopkv.bench.workload import Request, with_arrivals
from loopkv.errors import LoopKVError
from loopkv.step_time import StepTimeModel

MAX_STEPS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What the simulator knows of the engine.

    Args:
        step_time: decode step time from bytes.
        pool_bytes: bytes of the block pool; one block of it is the null block and never handed out.
        prefill_tokens_per_s: prompt tokens computed per second beside decode.
        max_batched_tokens: token budget of a step (vLLM: ``max_num_batched_tokens``).
        max_running: most running requests (vLLM: ``max_num_seqs``).
        watermark: share of the pool that stays free when a request is admitted or resumed beside others (vLLM's option
            of this name); running requests may grow into it.
    """

    step_time: StepTimeModel
    pool_bytes: int
    prefill_tokens_per_s: float
    max_batched_tokens: int = 8192
    max_running: int = 256
    watermark: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pool_bytes", "prefill_tokens_per_s", "max_batched_tokens", "max_running"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise LoopKVError(f"simulator: {name}", got=value, wanted="a finite number > 0")
        if self.max_batched_tokens < self.max_running:
            raise LoopKVError(
                "simulator: max_batched_tokens",
                got=self.max_batched_tokens,
                wanted=f">= max_running {self.max_running}",
            )
        if not 0 <= self.watermark < 1:
            raise LoopKVError("simulator: watermark", got=self.watermark, wanted="a share from 0 to below 1")

    def pool_blocks(self, arm: CacheArm) -> int:
        """Blocks that requests can hold under ``arm``."""
        return self.pool_bytes // arm.block_bytes - 1

    def watermark_blocks(self, arm: CacheArm) -> int:
        """Blocks that an admission beside other requests leaves free; vLLM takes the null block into account."""
        return int(self.watermark * (self.pool_bytes // arm.block_bytes))


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay gave: times per request in the trace's order, and totals."""

    requests: tuple[RequestTimes, ...]
    preemptions: int
    steps: int
    duration_s: float
    decoded_tokens: int
    prefilled_tokens: int
    peak_blocks: int
    peak_running: int


@dataclass(slots=True, eq=False)
class _Row:
    """A request on its way. ``computed`` tokens are in the cache; ``tokens`` exist (prompt and generated)."""

    index: int
    prompt: int
    output: int
    arrival: float
    computed: int = 0
    generated: int = 0
    first: float | None = None
    finish: float | None = None
    blocks: int = 0
    error: str | None = field(default=None)

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    @property
    def decoding(self) -> bool:
        return self.computed == self.tokens - 1 and self.generated > 0


class _Simulation:
    def __init__(self, requests: Sequence[Request], arm: CacheArm, engine: EngineModel) -> None:
        self.arm, self.engine = arm, engine
        self.free = self.total = engine.pool_blocks(arm)
        self.watermark = engine.watermark_blocks(arm)
        if self.total < 1:
            raise LoopKVError(f"simulator: pool of {arm.name}", got=f"{self.total} blocks", wanted="at least one")
        self.rows = []
        for index, request in enumerate(requests):
            if request.arrival_s is None:
                raise LoopKVError("simulator", got="a request without arrival_s", wanted="a trace", hint="give a rate")
            self.rows.append(_Row(index, request.prompt_tokens, request.output_tokens, request.arrival_s))
        self.coming = deque(sorted(self.rows, key=lambda row: (row.arrival, row.index)))
        self.waiting: deque[_Row] = deque()
        self.running: list[_Row] = []
        self.now = 0.0
        self.preemptions = self.steps = self.decoded = self.prefilled = self.peak_blocks = self.peak_running = 0

    def run(self) -> Replay:
        while self.coming or self.waiting or self.running:
            self.take_arrivals()
            if not self.running and not self.waiting:
                if self.coming:
                    self.now = max(self.now, self.coming[0].arrival)
                continue
            if not self.decode_run():
                self.step()
        return Replay(
            requests=tuple(self.times(row) for row in self.rows),
            preemptions=self.preemptions,
            steps=self.steps,
            duration_s=self.now,
            decoded_tokens=self.decoded,
            prefilled_tokens=self.prefilled,
            peak_blocks=self.peak_blocks,
            peak_running=self.peak_running,
        )

    def times(self, row: _Row) -> RequestTimes:
        if row.error is not None or row.first is None or row.finish is None:
            return RequestTimes(row.arrival, None, None, row.generated, row.error or "unfinished")
        tpot = 0.0 if row.output == 1 else (row.finish - row.first) / (row.output - 1)
        return RequestTimes(row.arrival, row.first - row.arrival, tpot, row.generated)

    def take_arrivals(self) -> None:
        while self.coming and self.coming[0].arrival <= self.now:
            row = self.coming.popleft()
            length = row.prompt + row.output
            # The engine refuses what can never fit. The last token is never stored, hence length - 1.
            if length - 1 > self.arm.max_tokens or self.most_blocks(row) > self.total:
                row.error = f"{length} tokens can never fit the pool of {self.total} blocks"
                continue
            self.waiting.append(row)

    def most_blocks(self, row: _Row) -> int:
        """Most blocks the request can hold, recomputed after a preemption at any length."""
        return self.arm.most_blocks(row.prompt + row.output - 1, self.chunk_limit)

    @property
    def chunk_limit(self) -> int:
        return min(self.arm.chunk_tokens or self.engine.max_batched_tokens, self.engine.max_batched_tokens)

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of any kind: decode rows, prefill chunks, preemption, admission."""
        budget = self.engine.max_batched_tokens
        scheduled: list[tuple[_Row, int]] = []
        preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            row = self.running[position]
            new = min(row.tokens - row.computed, budget, self.chunk_limit)
            while not self.allocate(row, new):
                victim = self.running.pop()
                self.preempt(victim)
                preempted = True
                if victim is row:
                    break
            else:
                scheduled.append((row, new))
                budget -= new
                position += 1
                continue
            break
        if not preempted:
            while self.waiting and budget > 0 and len(self.running) < self.engine.max_running:
                row = self.waiting[0]
                new = min(row.tokens, budget, self.chunk_limit)
                keep = self.watermark if self.running else 0
                if self.admission_blocks(row) + keep > self.free or not self.allocate(row, new, keep):
                    break
                self.waiting.popleft()
                self.running.append(row)
                scheduled.append((row, new))
                budget -= new
        assert scheduled or preempted, "a step that does nothing would never end"
        self.finish_step(scheduled)

    def admission_blocks(self, row: _Row) -> int:
        """Blocks that must be free to admit a request: those of its whole sequence so far."""
        return self.arm.blocks_during(row.tokens, min(row.tokens, self.chunk_limit))

    def allocate(self, row: _Row, new: int, keep: int = 0) -> bool:
        """Give ``row`` the blocks of a step with ``new`` tokens if ``keep`` stay free, or leave it as it is."""
        wanted = self.arm.blocks_during(row.computed + new, new)
        if wanted - row.blocks + keep > self.free:
            return False
        self.free -= wanted - row.blocks
        row.blocks = wanted
        self.peak_blocks = max(self.peak_blocks, self.total - self.free)
        return True

    def preempt(self, row: _Row) -> None:
        self.free += row.blocks
        row.blocks = 0
        row.computed = 0
        self.preemptions += 1
        self.waiting.appendleft(row)

    def finish_step(self, scheduled: Sequence[tuple[_Row, int]]) -> None:
        read = 0.0
        prefill = 0
        for row, new in scheduled:
            if row.decoding and new == 1:
                read += float(self.arm.read_bytes[row.computed + 1])
                self.decoded += 1
            else:
                prefill += new
        self.prefilled += prefill
        self.steps += 1
        self.peak_running = max(self.peak_running, len(self.running))
        self.now += self.engine.step_time.step_s_of_bytes(read) + prefill / self.engine.prefill_tokens_per_s
        for row, new in scheduled:
            row.computed += new
            if row.computed == row.tokens:
                row.generated += 1
                row.first = self.now if row.first is None else row.first
                if row.generated == row.output:
                    self.finish(row)

    def finish(self, row: _Row) -> None:
        row.finish = self.now
        self.free += row.blocks
        row.blocks = 0
        self.running.remove(row)

    # -- many decode steps at once -------------------------------------------------------------------------------------

    def decode_run(self) -> bool:
        """Advance as many steps as are pure decode with the same rows; False where the next step is not."""
        rows = self.running
        if not rows or not all(row.decoding for row in rows):
            return False
        count = min(MAX_STEPS_AT_ONCE, min(row.output - row.generated for row in rows))
        lengths = np.array([row.tokens for row in rows])[:, None] + np.arange(count)
        blocks = np.concatenate(
            [np.array([row.blocks for row in rows])[:, None], self.arm.held_blocks[lengths]], axis=1
        )
        # Rows get and give back blocks one after the other: in between, more may be held than after the step.
        before = blocks[:, :-1].sum(axis=0)
        during = before + np.cumsum(np.diff(blocks, axis=1), axis=0)
        peak, held = during.max(axis=0), during[-1]
        can_admit = np.zeros(count, dtype=bool)
        if self.waiting and len(rows) < self.engine.max_running:
            can_admit = self.total - held >= self.admission_blocks(self.waiting[0]) + self.watermark
        stop = (peak > self.total) | can_admit
        if stop.any():
            count = int(np.argmax(stop))
        if count == 0:
            return False
        # Running sums, which add in the order of single steps: the same floats, whatever the number of steps at once.
        read = np.cumsum(self.arm.read_bytes[lengths[:, :count]], axis=0)[-1]
        model = self.engine.step_time
        steps = model.t_fix_s + (model.weight_bytes + read) / model.bandwidth_bytes_s
        ends = np.cumsum(np.concatenate([[self.now], steps]))[1:]
        if self.coming:  # a step that starts at or after an arrival sees it
            count = min(count, 1 + int(np.searchsorted(ends, self.coming[0].arrival, side="left")))
        self.now = float(ends[count - 1])
        self.steps += count
        self.decoded += count * len(rows)
        self.peak_running = max(self.peak_running, len(rows))
        self.peak_blocks = max(self.peak_blocks, int(peak[:count].max()))
        self.free = self.total
        for row in rows:
            row.computed += count
            row.generated += count
            row.blocks = int(self.arm.held_blocks[row.computed])
            self.free -= row.blocks
        for row in [row for row in rows if row.generated == row.output]:
            self.finish(row)
        return True


def replay(requests: Sequence[Request], arm: CacheArm, engine: EngineModel) -> Replay:
    """Replay a trace (requests with ``arrival_s``) through one cache.

    Raises:
        LoopKVError: a request without arrival time, or a pool without a block.
    """
    return _Simulation(requests, arm, engine).run()


@dataclass(frozen=True, slots=True)
class Rung:
    """One rate of a simulated ladder."""

    rate_per_s: float
    replay: Replay
    score: Score


def simulate_ladder(
    requests: Sequence[Request],
    arm: CacheArm,
    engine: EngineModel,
    rates_per_s: Sequence[float],
    bounds: Bounds,
    seed: int,
) -> tuple[tuple[Rung, ...], LadderCapacity]:
    """Replay the workload at every rate with the arrivals that ``seed`` draws, and score it.

    Raises:
        LoopKVError: no rate.
    """
    if not rates_per_s:
        raise LoopKVError("simulator", got="no rate", wanted="at least one arrival rate")
    rungs = []
    for rate in sorted(set(rates_per_s)):
        done = replay(with_arrivals(requests, rate, seed), arm, engine)
        rungs.append(Rung(rate, done, score(done.requests, bounds)))
    return tuple(rungs), capacity({rung.rate_per_s: rung.score.attainment for rung in rungs})
