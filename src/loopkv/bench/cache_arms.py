"""What one request holds and reads by its length, for the caches that the simulator compares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loopkv.artifacts import Fingerprint, Plan
from loopkv.bench.arms import EngineArm
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.footprint import plan_footprint
from loopkv.geometry import Geometry
from loopkv.layout import Layout, lay_out
from loopkv.options import BF16
from loopkv.policy import DEFAULT_POLICY

STOCK_BLOCK_TOKENS = 16  # vLLM's default KV block on CUDA
MAX_TOKENS = 1 << 20

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class CacheArm:
    """Blocks and bytes of one request under one way of holding the cache.

    Args:
        name: for print.
        block_bytes: bytes of one block of the pool.
        held_blocks: [N + 1] blocks held during a decode step that ends at n tokens.
        read_bytes: [N + 1] bytes a decode step of a request of n tokens reads.
        chunk_tokens: most prompt tokens of one request in a step, None where the engine's budget alone bounds them.
        plan_sha256: of the plan, None for a stock cache.
        layout: blocks of a plan, None for a stock cache.
    """

    name: str
    block_bytes: int
    held_blocks: IntArray
    read_bytes: FloatArray
    chunk_tokens: int | None = None
    plan_sha256: str | None = None
    layout: Layout | None = None

    @property
    def max_tokens(self) -> int:
        """Longest request that the tables cover."""
        return len(self.held_blocks) - 1

    def blocks_during(self, tokens: int, new: int) -> int:
        """Blocks held during a step that computes ``new`` tokens and ends at ``tokens`` tokens."""
        if new <= 1 or self.layout is None:
            return int(self.held_blocks[tokens])
        residency = self.layout.residency
        return residency.history_blocks(tokens) + residency.window_blocks(tokens, unprocessed=new)

    def most_blocks(self, tokens: int, chunk_tokens: int) -> int:
        """Most blocks that a request of ``tokens`` tokens holds at any moment, computed in chunks."""
        if self.layout is None:
            return int(self.held_blocks[tokens])
        residency = self.layout.residency
        window = residency.max_window_blocks(min(chunk_tokens, tokens), tokens)
        return residency.history_blocks(tokens) + window


def stock_arm(geometry: Geometry, max_tokens: int, *, name: str = "stock", element_bytes: float = 2.0) -> CacheArm:
    """vLLM's own cache: every token of every cell in ``element_bytes`` bytes an element (2 for BF16, 1 for FP8)."""
    _check_tokens(max_tokens)
    exact = plan_footprint(geometry, [BF16] * len(geometry.cells), DEFAULT_POLICY).stored_bytes
    token_bytes = exact * element_bytes / 2
    tokens = np.arange(max_tokens + 1)
    held = -(-tokens // STOCK_BLOCK_TOKENS)
    return CacheArm(name, math.ceil(token_bytes * STOCK_BLOCK_TOKENS), held, tokens * np.float64(token_bytes))


def plan_arm(
    plan: Plan, max_tokens: int, *, name: str | None = None, hot_share: float = 1.0, exact_prefill: bool = True
) -> CacheArm:
    """A plan in its layout's blocks.

    Args:
        hot_share: share of (token, kv head) pairs that read both V planes in decode.
        exact_prefill: the engine caps prompts at the window per request and step, as plans that share need.
    """
    _check_tokens(max_tokens)
    if not 0 <= hot_share <= 1:
        raise LoopKVError("hot share", got=hot_share, wanted="a number from 0 to 1")
    layout = lay_out(plan)
    residency = layout.residency
    lengths = range(max_tokens + 1)
    held = np.fromiter((residency.history_blocks(n) + residency.window_blocks(n) for n in lengths), np.int64)
    tokens = np.arange(max_tokens + 1)
    policy = plan.policy
    pages = (tokens - policy.window_tokens) // policy.page_tokens
    end = np.maximum(policy.sink_tokens, policy.page_tokens * pages)
    history = np.minimum(tokens, end) - np.minimum(tokens, policy.sink_tokens)
    read: FloatArray = history * plan.footprint.read_bytes_at(hot_share) + (tokens - history) * np.float64(
        layout.window_token_bytes
    )
    return CacheArm(
        name=name or plan.name,
        block_bytes=layout.block_bytes,
        held_blocks=held,
        read_bytes=read,
        chunk_tokens=policy.max_exact_chunk_tokens if exact_prefill and plan.shares else None,
        plan_sha256=plan.sha256,
        layout=layout,
    )


_STOCK_ELEMENT_BYTES = {"auto": 2.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}


def cache_arm(arm: EngineArm, identity: Fingerprint, max_tokens: int, *, hot_share: float = 1.0) -> CacheArm:
    """The cache of a benchmark arm; ``hot_share`` applies to plans that set tau.

    Raises:
        LoopKVError: an unreadable plan or one for another geometry.
        UnsupportedError: a stock cache whose bytes are not known here.
    """
    plan = arm.load_plan(identity)
    if plan is not None:
        share = hot_share if plan.tau is not None else 1.0
        exact = dict(arm.settings).get("prefill", "exact") == "exact"
        return plan_arm(plan, max_tokens, name=arm.label, hot_share=share, exact_prefill=exact)
    if arm.kv_cache_dtype not in _STOCK_ELEMENT_BYTES or arm.skip_layers:
        raise UnsupportedError(
            f"simulating arm {arm.label}",
            got=arm.spec,
            wanted=", ".join(f"stock:{name}" for name in _STOCK_ELEMENT_BYTES),
        )
    bytes_each = _STOCK_ELEMENT_BYTES[arm.kv_cache_dtype]
    return stock_arm(identity.geometry, max_tokens, name=arm.label, element_bytes=bytes_each)


def _check_tokens(max_tokens: int) -> None:
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise LoopKVError("maximum length", got=f"{max_tokens} tokens", wanted=f"1 to {MAX_TOKENS}")
