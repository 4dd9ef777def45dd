"""One arm of ``loopkv bench decode``: an engine in this process, rows of requests that decode together.

``python -m loopkv.bench.decode_worker JOB.json``; started by ``loopkv.bench.decode``.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopkv.artifacts import Fingerprint, Plan
from loopkv.bench.components import component_times, launches_per_step
from loopkv.bench.decode import ALL_SLOTS, OTHER_STEPS, TTFT_SLOT, Job, batch_of
from loopkv.bench.generated_cache import (
    GENERATED_DTYPES,
    draw_weights,
    fill_blocks,
    fill_stock,
    key_std,
    no_forward,
    score_bits_for,
)
from loopkv.errors import LoopKVError
from loopkv.geometry import Geometry
from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import append_records, make_record
from loopkv.step_time import request_read_bytes

PROFILED_STEPS = 8
SETTLING_STEPS = 3
MAX_RUNNING = 256
MARGIN_TOKENS = 16
TRIES = 4
"""Of a row whose requests are preempted, each with a smaller batch."""
TTFT_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of the arm per history token; ``plan`` is None for a stock cache."""

    stored: float
    read: float
    plan: Plan | None
    itemsize: int

    def request_read(self, identity: Fingerprint, tokens: float, hot_share: float | None) -> float:
        """D_read of a request of ``tokens`` tokens; a measured hot share counts where the plan sets tau."""
        if self.plan is None:
            return tokens * self.read
        return request_read_bytes(
            identity.geometry,
            self.plan.policy,
            self.plan.footprint_at(self.itemsize),
            round(tokens),
            exact_itemsize=self.itemsize,
            hot_share=1.0 if hot_share is None else hot_share,
        )


class Sweep:
    """An engine with requests that decode together."""

    def __init__(self, job: Job) -> None:
        import torch
        from vllm import LLM

        self.job = job
        self.identity = Fingerprint.model_validate_json(json.dumps(job.identity))
        self.cuda = torch.cuda.is_available()
        longest = max(context for context, _ in job.rows) + self.extra_tokens()
        options: dict[str, Any] = {
            "model": job.model,
            "max_model_len": longest,
            "max_num_seqs": MAX_RUNNING,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": job.seed,
        }
        if job.dummy:
            draw_dummy_weights(self.identity.geometry, job.seed)
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        if self.cuda:
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        else:
            options["enforce_eager"] = True
        if job.arm.kv_cache_dtype != "auto":
            options["kv_cache_dtype"] = job.arm.kv_cache_dtype
        if job.arm.skip_layers:
            options["kv_cache_dtype_skip_layers"] = [str(layer) for layer in job.arm.skip_layers]
        if not job.arm.stock:
            options["additional_config"] = job.arm.additional_config()
        self.engine = LLM(**{**options, **job.engine}).llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.worker: Any = self.engine.engine_core.engine_core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
        self.model: Any = self.worker.model_runner.get_model()
        self.vocabulary = int(self.engine.model_config.get_vocab_size())
        self.names = (f"row-{i}" for i in itertools.count())
        self.rng = np.random.default_rng(job.seed)
        self.live: list[str] = []
        self.bytes = self.arm_bytes()
        self.generates = not job.prefill and (not job.arm.stock or job.arm.kv_cache_dtype in GENERATED_DTYPES)
        self.score_bits: float | None = None

    def extra_tokens(self) -> int:
        """Tokens a request may grow by beyond its context over all rows of a context."""
        rows = max(sum(1 for c, _ in self.job.rows if c == context) for context, _ in self.job.rows)
        each = OTHER_STEPS + PROFILED_STEPS + 8 * SETTLING_STEPS
        return TRIES * self.job.decode_steps + (rows + 2) * each + MARGIN_TOKENS

    def arm_bytes(self) -> Bytes:
        import torch

        dtype = self.engine.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        itemsize = dtype.itemsize
        plan = self.job.arm.load_plan(self.identity)
        if plan is not None:
            held = plan.footprint_at(itemsize)
            return Bytes(held.stored_bytes, held.read_bytes, plan, itemsize)
        layout = self.scheduler.kv_cache_config
        total = sum(tensor.size for tensor in layout.kv_cache_tensors)
        block_tokens = layout.kv_cache_groups[0].kv_cache_spec.block_size
        token = total / layout.num_blocks / block_tokens
        return Bytes(token, token, None, itemsize)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, count: int, context: int, max_tokens: int | None = None) -> None:
        """Add requests that reach ``context`` tokens in their first decode step."""
        from vllm import SamplingParams

        most = max_tokens or self.extra_tokens()
        params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0, detokenize=False)
        for _ in range(count):
            name = next(self.names)
            ids = self.rng.integers(0, self.vocabulary, max(1, context - 1)).tolist()
            self.engine.add_request(name, {"prompt_token_ids": ids}, params)
            self.live.append(name)

    def drop(self, count: int) -> None:
        """Abort the ``count`` requests that were added last."""
        gone = [self.live.pop() for _ in range(count)]
        if gone:
            self.engine.abort_request(gone)
            self.settle()

    def settle(self) -> None:
        """A few steps, so that what was aborted or admitted is out of the pipeline."""
        for _ in range(SETTLING_STEPS):
            if self.scheduler.running or self.scheduler.waiting:
                self.engine.step()

    def decoding(self) -> bool:
        """Whether every live request is resident and past its prompt."""
        running = self.scheduler.running
        if len(running) != len(self.live) or self.scheduler.waiting:
            return False
        return all(r.num_computed_tokens >= r.num_prompt_tokens for r in running)

    def make_resident(self) -> None:
        """Step until every live request decodes; those that find no room are dropped.

        Raises:
            LoopKVError: not even one request fits.
        """
        still, before = 0, -1
        while not self.decoding():
            if len(self.scheduler.running) + len(self.scheduler.waiting) < len(self.live):
                raise LoopKVError(f"arm {self.job.arm.label}", got="requests that ended early", wanted="resident ones")
            self.engine.step()
            progress = sum(
                r.num_computed_tokens for r in self.scheduler.running if r.num_computed_tokens < r.num_prompt_tokens
            )
            waiting = len(self.scheduler.waiting)
            only_decode = all(r.num_computed_tokens >= r.num_prompt_tokens for r in self.scheduler.running)
            still = still + 1 if only_decode and waiting and progress == before else 0
            before = progress
            if still > 2 * SETTLING_STEPS:  # the rest waits for blocks that only an end would free
                self.drop(waiting)
                still = 0
            if not self.live:
                raise LoopKVError(f"arm {self.job.arm.label}", got="no request fits the pool", wanted="at least one")
        self.settle()

    def fill(self, count: int, context: int) -> None:
        """Bring ``count`` requests of ``context`` tokens to their first decode step, or as many as find room."""
        self.add(count, context)
        if not self.generates:
            self.make_resident()
            return
        with no_forward(self.model):
            self.make_resident()
        self.generate(context)
        self.settle()

    def generate(self, context: int) -> None:
        """Write generated contents into the blocks of the live requests."""
        import torch

        if self.cuda:
            torch.cuda.synchronize()
        self.score_bits = score_bits_for(self.job.hot_share, context)
        std = key_std(self.score_bits)
        if self.job.arm.stock:
            fill_stock(self.worker.model_runner.kv_caches, self.job.arm.kv_cache_dtype, std, self.job.seed)
            return
        from loopkv.vllm_plugin.cache.specs import HistorySpec

        cache = self.model.cache
        blocks: dict[bool, list[int]] = {True: [], False: []}
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            mine = blocks[isinstance(manager.kv_cache_spec, HistorySpec)]
            for request in self.scheduler.running:
                table = manager.req_to_blocks[request.request_id]
                mine += [block.block_id for block in table if not block.is_null]
        fill_blocks(cache.layout, cache.pool, blocks[True], blocks[False], cache.dtype, std, self.job.seed)

    def hot_pairs(self) -> int | None:
        """(token, kv head) pairs that decode steps have read hot so far; None where the plan sets no tau."""
        if self.bytes.plan is None or self.bytes.plan.tau is None:
            return None
        operators = self.model.cache.operators
        if self.cuda:
            return int(operators.kernels.hot_values)
        return int(self.model.cache.counters.values["hot_values"])

    def pairs_read(self, lengths: list[int]) -> int:
        """Such pairs in one decode step of rows that see ``lengths`` tokens."""
        layout = self.model.cache.layout
        policy = layout.policy
        cells = sum(layout.cells[place.holder].option.name == "int4" for place in layout.cells)
        history = sum(policy.history_end(tokens) - policy.sink_tokens for tokens in lengths)
        return int(history) * layout.geometry.kv_heads * cells

    # -- rows ----------------------------------------------------------------------------------------------------------

    def peak(self, context: int) -> int:
        """Requests of ``context`` tokens whose blocks fit together at every step of the largest row.

        They all have the same length, so they all hold the most blocks at the same step: a plan's window takes a block
        more at some lengths than at others.
        """
        free = self.pool.get_num_free_blocks()
        longest = context + self.job.decode_steps + PROFILED_STEPS + 4 * SETTLING_STEPS
        self.add(1, longest)
        if self.generates:
            with no_forward(self.model):
                self.make_resident()
        else:
            self.make_resident()
        used = free - self.pool.get_num_free_blocks()
        self.drop(1)
        if not self.job.arm.stock:
            residency = self.model.cache.layout.residency
            lengths = range(context, longest + 1)
            used = max(used, *(residency.history_blocks(n) + residency.window_blocks(n) for n in lengths))
        return max(1, min(free // max(1, used), self.scheduler.max_num_running_reqs))

    def run_context(self, context: int, slots: list[str]) -> None:
        """All rows of one context: the largest batch first, then fewer and fewer of the same requests.

        What cannot run leaves a ``decode.refused`` Record; the other rows still run.
        """
        try:
            peak = self.peak(context)
        except LoopKVError as problem:
            self.refuse(context, ALL_SLOTS, problem)
            self.drop(len(self.live))
            return
        if TTFT_SLOT in slots:
            try:
                self.first_tokens(context, min(self.job.ttft_prompts, peak))
            except LoopKVError as problem:
                self.refuse(context, TTFT_SLOT, problem)
                self.drop(len(self.live))
        # A smaller row reuses requests that have grown by the steps timed before: its own mean context is recorded.
        by_batch: dict[int, str] = {}
        for slot in slots:
            if slot != TTFT_SLOT:
                by_batch.setdefault(batch_of(slot, peak), slot)
        first = True
        for batch, slot in sorted(by_batch.items(), reverse=True):
            try:
                if first:
                    self.fill(batch, context)
                self.drop(max(0, len(self.live) - batch))
                self.row(context, slot, peak, first=first)
                first = False
            except LoopKVError as problem:
                self.refuse(context, slot, problem)
                self.drop(len(self.live))
                first = True  # the next smaller batch starts afresh
        self.drop(len(self.live))

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
        self.add(count, context + 1, max_tokens=1)
        waiting = set(self.live[-count:])
        while waiting:
            if not self.engine.has_unfinished_requests():
                raise LoopKVError(f"arm {self.job.arm.label}", got="a prompt that ended without a token")
            waiting -= {output.request_id for output in self.engine.step() if output.finished}
        taken = time.perf_counter() - start
        self.live.clear()
        return taken

    def row(self, context: int, slot: str, peak: int, *, first: bool) -> None:
        """Time decode steps of the live requests and keep the Records."""
        count = self.job.decode_steps if first else min(OTHER_STEPS, self.job.decode_steps)
        for _ in range(TRIES):
            batch = len(self.live)
            steps, lengths, hot_share = self.timed_steps(count)
            if self.decoding() and len(self.live) == batch:
                break
            self.make_resident()  # a request was preempted: the batch shrinks to what stays resident
            self.drop(max(0, len(self.live) - max(1, batch - 1)))
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
            "mean_context_tokens": mean_context,
            "stored_bytes": self.bytes.stored,
            "read_bytes": self.bytes.read,
            "read_bytes_per_request": self.bytes.request_read(self.identity, mean_context, hot_share),
            "weight_bytes": float(self.job.step_parameters * self.bytes.itemsize),
            "hot_share": hot_share,
            "score_bits": self.score_bits,
            "generated": self.generates,
        }
        median = float(np.median(steps))
        self.keep("decode.step_ms", median * 1e3, place, tuple(s * 1e3 for s in steps))
        self.keep("decode.tok_s", batch / median, place, ())
        told = "" if hot_share is None else f", {hot_share:.1%} hot"
        print(f"{self.job.arm.label}: context {context}, batch {batch}: {median * 1e3:.3f} ms{told}", flush=True)
        if self.job.profile and first and self.cuda:
            self.profiled(place)

    def timed_steps(self, count: int) -> tuple[list[float], list[int], float | None]:
        """Seconds of ``count`` steps, the requests' tokens half way, and the share of the history read hot."""
        steps = []
        lengths: list[int] = []
        before, pairs = self.hot_pairs(), 0
        for i in range(count):
            seen = [r.num_computed_tokens + 1 for r in self.scheduler.running]
            if i == count // 2:
                lengths = seen
            pairs += 0 if before is None else self.pairs_read(seen)
            start = time.perf_counter()
            self.engine.step()
            steps.append(time.perf_counter() - start)
        after = self.hot_pairs()
        share = (after - before) / pairs if before is not None and after is not None and pairs else None
        return steps, lengths, share

    def profiled(self, place: dict[str, Any]) -> None:
        """GPU time by component and host launches of a few steps."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED_STEPS):
                self.engine.step()
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


def draw_dummy_weights(geometry: Geometry, seed: int) -> None:
    """From now on ``load_format="dummy"`` loads weights of ``draw_weights`` in this process.

    They must be there before the engine prepares weights for its matrix products, so this is a loader of its own.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class DrawnWeightsLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw_weights(model, geometry.query_heads, geometry.kv_heads, seed)

    register_model_loader("dummy")(DrawnWeightsLoader)


def main(path: str) -> None:
    """Run one job."""
    job = Job.load(Path(path))
    sweep = Sweep(job)
    for context in dict.fromkeys(context for context, _ in job.rows):
        sweep.run_context(context, [slot for c, slot in job.rows if c == context])


if __name__ == "__main__":
    main(sys.argv[1])
