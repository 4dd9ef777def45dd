"""``predict_capacity``: resident requests by whole blocks, decode throughput by the step-time model (paper eq. 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loopkv.artifacts import Fingerprint, Plan
from loopkv.capacity.gpus import GIB, REFERENCE_CELLS, Gpu
from loopkv.capacity.sizes import ModelSize
from loopkv.errors import LoopKVError
from loopkv.planner.named import named_plan
from loopkv.step_time import StepTimeModel, request_read_bytes

DEFAULT_UTILIZATION = 0.92  # vLLM 0.26: CacheConfig.gpu_memory_utilization
# Activations, graphs and context outside the pool: the paper's RTX PRO 4500 run (appendix H) has 24.5 GiB for KV at
# utilization 0.90 of 31.4 GiB with 2.7 GiB of weights.
DEFAULT_RESERVE_BYTES = GIB
MAX_CONTEXT_TOKENS = 1 << 24
STOCK_BLOCK_TOKENS = 16  # vLLM's default KV block on CUDA
WEIGHT_ITEMSIZE = 2  # BF16


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to hold the cache, and what it is predicted to do.

    Args:
        name: for print.
        plan_sha256: of the plan; None for the stock cache.
        stored_bytes, read_bytes: per history token; ``read_bytes`` at the hot share.
        request_bytes: pool bytes that one request of the context holds, whole blocks.
        request_read_bytes: D_read, bytes that one request reads per step.
        requests: how many fit together.
        step_s: seconds of one decode step of all of them; ``nan`` if none fits.
        tokens_per_s: of all of them together.
        single_step_s: seconds of a step of one request alone.
    """

    name: str
    plan_sha256: str | None
    stored_bytes: int
    read_bytes: float
    request_bytes: int
    request_read_bytes: float
    requests: int
    step_s: float
    tokens_per_s: float
    single_step_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A prediction and every constant it rests on; ``arms[0]`` is the stock BF16 cache."""

    gpu: Gpu
    model: ModelSize
    context_tokens: int
    utilization: float
    weight_bytes: int
    pool_bytes: int
    step_time: StepTimeModel
    arms: tuple[Arm, ...]


def predict_capacity(
    plans: Sequence[Plan],
    model: ModelSize,
    gpu: Gpu,
    context_tokens: int,
    *,
    hot_share: float | None = None,
    utilization: float = DEFAULT_UTILIZATION,
    reserve_bytes: int = DEFAULT_RESERVE_BYTES,
    max_requests: int | None = None,
) -> Capacity:
    """Predict the stock BF16 cache, KIVI-4 and ``plans`` beside each other.

    ``t(B) = t_fix + (W_T + B * D_read) / BW`` at the largest B that fits, with W_T = T times the looped block plus the
    head in BF16 and ``t_fix`` scaled by the number of cells from the 96 it was fitted on (it is spent per layer call).

    Args:
        plans: shown after BF16 and KIVI-4 (a plan equal to KIVI-4 is shown once).
        model: whose weights are held and read; the plans must fit its geometry.
        gpu: memory and bandwidth.
        context_tokens: tokens of every request.
        hot_share: adds a row "+ V" for every arm with int4 values: this share of (token, kv head) pairs reads both V
            planes, the others the high plane. The rows without it read both planes, whatever a plan's tau.
        utilization: share of the GPU's memory that the engine may use.
        reserve_bytes: memory for activations and graphs.
        max_requests: cap of the batch, as the engine's ``max_num_seqs``.

    Raises:
        PlanMismatchError: a plan for another geometry.
        LoopKVError: weights that do not fit, or numbers out of range.
    """
    if not 1 <= context_tokens <= MAX_CONTEXT_TOKENS:
        raise LoopKVError("context", got=f"{context_tokens} tokens", wanted=f"1 to {MAX_CONTEXT_TOKENS}")
    if hot_share is not None and not 0 <= hot_share <= 1:
        raise LoopKVError("hot share", got=hot_share, wanted="a number from 0 to 1")
    if not 0 < utilization <= 1:
        raise LoopKVError("utilization", got=utilization, wanted="a number above 0, at most 1")
    if max_requests is not None and max_requests < 1:
        raise LoopKVError("max requests", got=max_requests, wanted="at least 1")
    weight_bytes = model.parameters * WEIGHT_ITEMSIZE
    pool_bytes = math.floor(gpu.memory_bytes * utilization) - weight_bytes - reserve_bytes
    if pool_bytes <= 0:
        raise LoopKVError(
            f"weights and activations on {gpu.name}",
            got=f"{(weight_bytes + reserve_bytes) / GIB:.1f} GiB",
            wanted=f"less than {gpu.memory_bytes * utilization / GIB:.1f} GiB ({utilization:.0%} of its memory)",
            hint="a larger GPU, or a higher utilization",
        )
    geometry = model.geometry
    step_time = StepTimeModel(
        gpu.t_fix_s * len(geometry.cells) / REFERENCE_CELLS,
        float(model.step_parameters * WEIGHT_ITEMSIZE),
        gpu.bandwidth_bytes_s,
    )
    identity = Fingerprint(name="this model", geometry=geometry)
    stock = named_plan("bf16", identity)

    def arm(name: str, plan: Plan, held: int, share: float, sha256: str | None) -> Arm:
        read = request_read_bytes(geometry, plan.policy, plan.footprint, context_tokens, hot_share=share)
        requests = pool_bytes // held
        requests = requests if max_requests is None else min(requests, max_requests)
        return Arm(
            name=name,
            plan_sha256=sha256,
            stored_bytes=plan.footprint.stored_bytes,
            read_bytes=plan.footprint.read_bytes_at(share),
            request_bytes=held,
            request_read_bytes=read,
            requests=requests,
            step_s=step_time.step_s(requests, read) if requests else math.nan,
            tokens_per_s=step_time.tokens_per_s(requests, read) if requests else 0.0,
            single_step_s=step_time.step_s(1, read),
        )

    blocks = math.ceil(context_tokens / STOCK_BLOCK_TOKENS)
    held = blocks * STOCK_BLOCK_TOKENS * stock.footprint.stored_bytes
    arms = [arm("BF16 (stock)", stock, held, 1.0, None)]
    shown: set[str] = set()
    for name, plan in [("KIVI-4", named_plan("kivi4", identity)), *((plan.name, plan) for plan in plans)]:
        plan.check_serves(identity)
        key = plan.with_tau(None).sha256
        if key in shown:
            continue
        shown.add(key)
        held = held_bytes(plan, context_tokens)
        arms.append(arm(name, plan, held, 1.0, plan.sha256))
        if hot_share is not None and plan.footprint.low_plane_bytes:
            arms.append(arm(f"{name} + V", plan, held, hot_share, plan.sha256))
    return Capacity(gpu, model, context_tokens, utilization, weight_bytes, pool_bytes, step_time, tuple(arms))


def held_bytes(plan: Plan, tokens: int) -> int:
    """Pool bytes of one request of ``tokens`` tokens under ``plan``: whole blocks of the layout."""
    from loopkv.layout import lay_out  # the codec behind it imports torch

    return lay_out(plan).request_bytes(tokens)
