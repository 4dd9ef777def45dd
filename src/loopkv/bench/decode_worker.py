"""One arm of ``loopkv bench decode``: an engine in this process, rows of requests that decode together.

``python -m loopkv.bench.decode_worker JOB.json``; started by ``loopkv.bench.decode``.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loopkv.bench.arm_bytes import ArmBytes, arm_bytes, hot_pairs, pairs_read
from loopkv.bench.components import component_times, launches_per_step
from loopkv.bench.decode import ALL_SLOTS, HINT, OTHER_STEPS, START_FAILED, TTFT_SLOT, Job, batch_of
from loopkv.bench.decode_engine import DecodeEngine, start_engine
from loopkv.bench.resident_requests import SETTLING_STEPS, ResidentRequests
from loopkv.errors import LoopKVError
from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import append_records, make_record

PROFILED_STEPS = 8
MARGIN_TOKENS = 16
TRIES = 4
"""Of a row whose requests are preempted, each with a smaller batch."""
TTFT_REPEATS = 3


class Sweep:
    """The rows of an arm.

    Args:
        job: the arm and its rows.
        engine: of the arm.
        requests: of the engine.
        held: bytes of the arm.
    """

    def __init__(self, job: Job, engine: DecodeEngine, requests: ResidentRequests, held: ArmBytes) -> None:
        self.job, self.engine, self.requests, self.bytes = job, engine, requests, held
        self.identity = job.fingerprint

    def run_context(self, context: int, slots: list[str]) -> None:
        """All rows of one context: the largest batch first, then fewer and fewer of the same requests.

        What cannot run leaves a ``decode.refused`` Record; the other rows still run.
        """
        try:
            peak = self.requests.peak(context, self.job.decode_steps + PROFILED_STEPS)
        except LoopKVError as problem:
            self.refuse(context, ALL_SLOTS, problem)
            self.requests.drop(len(self.requests.live))
            return
        if TTFT_SLOT in slots:
            try:
                self.first_tokens(context, min(self.job.ttft_prompts, peak))
            except LoopKVError as problem:
                self.refuse(context, TTFT_SLOT, problem)
                self.requests.drop(len(self.requests.live))
        # A smaller row reuses requests that have grown by the steps timed before: its own mean context is recorded.
        by_batch: dict[int, str] = {}
        for slot in slots:
            if slot != TTFT_SLOT:
                by_batch.setdefault(batch_of(slot, peak), slot)
        first = True
        for batch, slot in sorted(by_batch.items(), reverse=True):
            try:
                if first:
                    self.requests.fill(batch, context)
                self.requests.drop(max(0, len(self.requests.live) - batch))
                self.row(context, slot, peak, first=first)
                first = False
            except LoopKVError as problem:
                self.refuse(context, slot, problem)
                self.requests.drop(len(self.requests.live))
                first = True  # the next smaller batch starts afresh
        self.requests.drop(len(self.requests.live))

    def refuse(self, context: int, slot: str, problem: LoopKVError) -> None:
        """Keep the reason why a row could not run."""
        place = {**self.job.settings, "context_tokens": context, "slot": slot, "reason": str(problem)[:300]}
        self.keep("decode.refused", None, place, ())
        print(f"{self.job.arm.label}: context {context}, {slot}: {problem}", flush=True)

    def first_tokens(self, context: int, prompts: int) -> None:
        """Time to the first token of one request alone, and prompt tokens per second of several at once."""
        place = {**self.job.settings, "context_tokens": context, "slot": TTFT_SLOT}
        self.until_first_token(1, context)  # compiles what is left to compile
        alone = [self.until_first_token(1, context) for _ in range(TTFT_REPEATS)]
        together = self.until_first_token(prompts, context)
        samples = tuple(1e3 * seconds for seconds in alone)
        self.keep("decode.ttft_ms", float(np.median(samples)), {**place, "batch": 1}, samples)
        rate = prompts * context / together
        self.keep("decode.prefill_tok_s", rate, {**place, "batch": prompts}, (rate,))
        print(
            f"{self.job.arm.label}: context {context}: first token after {np.median(samples):.1f} ms, "
            f"{prompts} prompts at {rate:,.0f} tok/s",
            flush=True,
        )

    def until_first_token(self, count: int, context: int) -> float:
        """Seconds from submitting ``count`` prompts of ``context`` tokens until each has its one token."""
        start = time.perf_counter()
        self.requests.add(count, context + 1, max_tokens=1)
        waiting = set(self.requests.live[-count:])
        while waiting:
            if not self.engine.llm.has_unfinished_requests():
                raise LoopKVError(f"arm {self.job.arm.label}", got="a prompt that ended without a token")
            waiting -= {output.request_id for output in self.engine.llm.step() if output.finished}
        taken = time.perf_counter() - start
        self.requests.live.clear()
        return taken

    def row(self, context: int, slot: str, peak: int, *, first: bool) -> None:
        """Time decode steps of the live requests and keep the Records."""
        count = self.job.decode_steps if first else min(OTHER_STEPS, self.job.decode_steps)
        for _ in range(TRIES):
            batch = len(self.requests.live)
            steps, lengths, hot_share = self.timed_steps(count)
            if self.requests.decoding() and len(self.requests.live) == batch:
                break
            self.requests.make_resident()  # a request was preempted: the batch shrinks to what stays resident
            self.requests.drop(max(0, len(self.requests.live) - max(1, batch - 1)))
        else:
            raise LoopKVError(f"arm {self.job.arm.label}, context {context}", got="preemptions in every try")
        mean_context = float(np.mean(lengths))
        place = {
            **self.job.settings,
            "context_tokens": context,
            "batch": batch,
            "slot": slot,
            "peak_batch": peak,
            "resident": True,
            "mean_context_tokens": round(mean_context, 2),
            "stored_bytes": self.bytes.stored,
            "read_bytes": self.bytes.read,
            "read_bytes_per_request": round(self.bytes.request_read(self.identity, mean_context, hot_share)),
            "weight_bytes": float(self.job.step_parameters * self.bytes.itemsize),
            "hot_share": None if hot_share is None else round(hot_share, 6),
            "score_bits": bits if (bits := self.requests.score_bits) is None else round(bits, 4),
            "generated": self.requests.generates,
        }
        median = float(np.median(steps))
        self.keep("decode.step_ms", median * 1e3, place, tuple(s * 1e3 for s in steps))
        told = "" if hot_share is None else f", {hot_share:.1%} hot"
        print(f"{self.job.arm.label}: context {context}, batch {batch}: {median * 1e3:.3f} ms{told}", flush=True)
        if self.job.components and first and self.engine.cuda:
            self.time_components({key: place[key] for key in (*self.job.settings, "context_tokens", "batch", "slot")})

    def timed_steps(self, count: int) -> tuple[list[float], list[int], float | None]:
        """Seconds of ``count`` steps, the requests' tokens half way, and the share of the history read hot."""
        steps = []
        lengths: list[int] = []
        before, pairs = hot_pairs(self.engine, self.bytes.plan), 0
        for i in range(count):
            seen = [r.num_computed_tokens + 1 for r in self.engine.scheduler.running]
            if i == count // 2:
                lengths = seen
            pairs += 0 if before is None else pairs_read(self.engine.model.cache.layout, seen)
            start = time.perf_counter()
            self.engine.llm.step()
            steps.append(time.perf_counter() - start)
        after = hot_pairs(self.engine, self.bytes.plan)
        share = (after - before) / pairs if before is not None and after is not None and pairs else None
        return steps, lengths, share

    def time_components(self, place: dict[str, Any]) -> None:
        """GPU time by component and host launches of a few steps."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED_STEPS):
                self.engine.llm.step()
        kernels, calls = [], {}
        for event in profiler.key_averages():
            if event.device_type.name == "CUDA":
                kernels.append((event.key, float(event.self_device_time_total)))
            else:
                calls[event.key] = int(event.count)
        for component, microseconds in component_times(kernels, PROFILED_STEPS).items():
            self.keep("decode.component_us", microseconds, {**place, "component": component}, ())
        self.keep("decode.launches", launches_per_step(calls, PROFILED_STEPS), place, ())

    def keep(self, what: str, value: float | None, settings: dict[str, Any], samples: tuple[float, ...]) -> None:
        plan = self.bytes.plan
        record = make_record(
            what,
            value,
            RECORD_KINDS[what].unit,
            samples=samples,
            settings=settings,
            plan_sha256=None if plan is None else plan.sha256,
            model=self.identity.name,
            weights_sha256=self.identity.weights_sha256,
            seed=self.job.seed,
            command=self.job.command,
        )
        append_records(self.job.output, [record])


def growth_tokens(job: Job) -> int:
    """Tokens a request may grow by beyond its context over all rows of a context."""
    rows = max(sum(1 for c, _ in job.rows if c == context) for context, _ in job.rows)
    each = OTHER_STEPS + PROFILED_STEPS + 8 * SETTLING_STEPS
    return TRIES * job.decode_steps + (rows + 2) * each + MARGIN_TOKENS


def start_hint(engine: Mapping[str, Any]) -> str | None:
    """What to try where an engine with these options does not start on a CPU with a pool of vLLM's choice."""
    import torch

    if torch.cuda.is_available() or os.environ.get("VLLM_CPU_KVCACHE_SPACE") or "kv_cache_memory_bytes" in engine:
        return None
    return "on a CPU, set VLLM_CPU_KVCACHE_SPACE=GIB, or vLLM asks for most of the memory"


def main(path: str) -> None:
    """Run one job; exits with ``START_FAILED`` where its engine does not start."""
    job = Job.load(Path(path))
    growth = growth_tokens(job)
    try:
        engine = start_engine(job, max(context for context, _ in job.rows) + growth)
    except Exception:  # whatever vLLM raises: the parent reads it from the log
        traceback.print_exc()
        if (hint := start_hint(job.engine)) is not None:
            print(HINT + hint, flush=True)
        sys.exit(START_FAILED)
    sweep = Sweep(job, engine, ResidentRequests(job, engine, growth), arm_bytes(job, engine))
    for context in dict.fromkeys(context for context, _ in job.rows):
        sweep.run_context(context, [slot for c, slot in job.rows if c == context])


if __name__ == "__main__":
    main(sys.argv[1])
