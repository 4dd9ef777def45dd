"""Requests of ``loopkv bench decode`` that are resident together: admitted, brought to decode, dropped."""

from __future__ import annotations

import itertools

import numpy as np

from loopkv.bench.decode import Job
from loopkv.bench.decode_engine import DecodeEngine
from loopkv.bench.generated_cache import (
    GENERATED_DTYPES,
    fill_blocks,
    fill_stock,
    key_std,
    no_forward,
    score_bits_for,
)
from loopkv.errors import LoopKVError

SETTLING_STEPS = 3


class ResidentRequests:
    """The live requests of an engine.

    Args:
        job: its arm, how contents come about, and the seed.
        engine: of the arm.
        growth_tokens: that a request may grow by beyond its context.

    Attributes:
        live: names, in the order in which they were added.
        generates: whether contents are generated instead of prefilled.
        score_bits: spread of the scores of the contents generated last, in bits.
    """

    def __init__(self, job: Job, engine: DecodeEngine, growth_tokens: int) -> None:
        self.job, self.engine, self.scheduler = job, engine, engine.scheduler
        self.growth_tokens = growth_tokens
        self.live: list[str] = []
        self.generates = not job.prefill and (not job.arm.stock or job.arm.kv_cache_dtype in GENERATED_DTYPES)
        self.score_bits: float | None = None
        self._names = (f"row-{i}" for i in itertools.count())
        self._rng = np.random.default_rng(job.seed)

    def add(self, count: int, context: int, max_tokens: int | None = None) -> None:
        """Add requests that reach ``context`` tokens in their first decode step."""
        from vllm import SamplingParams

        most = max_tokens or self.growth_tokens
        params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0, detokenize=False)
        vocabulary = self.engine.vocabulary
        for _ in range(count):
            name = next(self._names)
            ids = self._rng.integers(0, vocabulary, max(1, context - 1)).tolist()
            self.engine.llm.add_request(name, {"prompt_token_ids": ids}, params)
            self.live.append(name)

    def drop(self, count: int) -> None:
        """Abort the ``count`` requests that were added last."""
        gone = [self.live.pop() for _ in range(count)]
        if gone:
            self.engine.llm.abort_request(gone)
            self.settle()

    def settle(self) -> None:
        """A few steps, so that what was aborted or admitted is out of the pipeline."""
        for _ in range(SETTLING_STEPS):
            if self.scheduler.running or self.scheduler.waiting:
                self.engine.llm.step()

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
            self.engine.llm.step()
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
        with no_forward(self.engine.model):
            self.make_resident()
        self.generate(context)
        self.settle()

    def generate(self, context: int) -> None:
        """Write generated contents into the blocks of the live requests."""
        import torch

        if self.engine.cuda:
            torch.cuda.synchronize()
        self.score_bits = score_bits_for(self.job.hot_share, context)
        std = key_std(self.score_bits)
        if self.job.arm.stock:
            fill_stock(self.engine.worker.model_runner.kv_caches, self.job.arm.kv_cache_dtype, std, self.job.seed)
            return
        from loopkv.vllm_plugin.cache.specs import HistorySpec

        cache = self.engine.model.cache
        blocks: dict[bool, list[int]] = {True: [], False: []}
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            mine = blocks[isinstance(manager.kv_cache_spec, HistorySpec)]
            for request in self.scheduler.running:
                table = manager.req_to_blocks[request.request_id]
                mine += [block.block_id for block in table if not block.is_null]
        fill_blocks(cache.layout, cache.pool, blocks[True], blocks[False], cache.dtype, std, self.job.seed)

    def peak(self, context: int, steps: int) -> int:
        """Requests of ``context`` tokens whose blocks fit together at every one of the ``steps`` of the largest row.

        They all have the same length, so they all hold the most blocks at the same step: a plan's window takes a block
        more at some lengths than at others.
        """
        pool = self.engine.pool
        free = pool.get_num_free_blocks()
        longest = context + steps + 4 * SETTLING_STEPS
        self.add(1, longest)
        if self.generates:
            with no_forward(self.engine.model):
                self.make_resident()
        else:
            self.make_resident()
        used = free - pool.get_num_free_blocks()
        self.drop(1)
        if not self.job.arm.stock:
            residency = self.engine.model.cache.layout.residency
            lengths = range(context, longest + 1)
            used = max(used, *(residency.history_blocks(n) + residency.window_blocks(n) for n in lengths))
        return max(1, min(free // max(1, used), self.scheduler.max_num_running_reqs))
