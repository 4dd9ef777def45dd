"""What an arm's cache stores and reads per history token, and how much of the history its decode steps read hot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopkv.artifacts import Fingerprint, Plan
from loopkv.layout import Layout
from loopkv.options import INT4
from loopkv.step_time import request_read_bytes

if TYPE_CHECKING:
    from loopkv.bench.decode import Job
    from loopkv.bench.decode_engine import DecodeEngine


@dataclass(frozen=True, slots=True)
class ArmBytes:
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


def arm_bytes(job: Job, engine: DecodeEngine) -> ArmBytes:
    """Bytes of a job's arm: its plan's, or what a stock engine has allocated for a token."""
    itemsize = engine.itemsize
    plan = job.arm.load_plan(job.fingerprint)
    if plan is not None:
        held = plan.footprint_at(itemsize)
        return ArmBytes(held.stored_bytes, held.read_bytes, plan, itemsize)
    cache = engine.scheduler.kv_cache_config
    total = sum(tensor.size for tensor in cache.kv_cache_tensors)
    block_tokens = cache.kv_cache_groups[0].kv_cache_spec.block_size
    token = total / cache.num_blocks / block_tokens
    return ArmBytes(token, token, None, itemsize)


def hot_pairs(engine: DecodeEngine, plan: Plan | None) -> int | None:
    """(token, kv head) pairs that decode steps have read hot so far; None where the plan sets no tau."""
    if plan is None or plan.tau is None:
        return None
    cache = engine.model.cache
    if engine.cuda:
        return int(cache.operators.kernels.hot_values)
    return int(cache.counters.values["hot_values"])


def pairs_read(layout: Layout, lengths: Sequence[int]) -> int:
    """Such pairs in one decode step of rows that see ``lengths`` tokens."""
    policy = layout.policy
    cells = sum(layout.read_option(cell) == INT4 for cell in range(len(layout.cells)))
    history = sum(policy.history_end(tokens) - policy.sink_tokens for tokens in lengths)
    return int(history) * layout.geometry.kv_heads * cells
