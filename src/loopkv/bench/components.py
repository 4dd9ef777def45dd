"""GPU time and host launches of decode steps, from a profiler's events, by component."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

COMPONENTS: tuple[tuple[str, str], ...] = (
    ("LoopKV attention", r"attend_kernel|scalar_part_kernel|scalar_merge_kernel|loopkv.*attend"),
    ("LoopKV coding", r"code_kernel|loopkv.*code"),
    ("KV append", r"append_kernel|reshape_and_cache|concat_and_cache"),
    ("attention", r"flash|fmha|attention|paged|splitkv|unified_attn|turboquant|per_token_head"),
    ("matrix products", r"gemm|gemv|cutlass|nvjet|xmma|splitk|cublas|dot_kernel|matmul"),
    ("norms and activations", r"norm|silu|gelu|act_and_mul|rotary|rope"),
    ("sampling", r"sampl|softmax|argmax|topk|top_k|logit|multinomial"),
    ("memory", r"memcpy|memset|copy|fill|index|gather|scatter|embedding|elementwise|vectorized"),
)
"""Component and pattern (case does not matter), the first that matches a kernel's name."""
OTHER = "other"
LAUNCH_CALLS = re.compile(r"^(cudaLaunchKernel|cudaLaunchKernelExC|cuLaunchKernel|cuLaunchKernelEx|cudaGraphLaunch)$")
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in COMPONENTS)


def component_of(kernel: str) -> str:
    """Component of a GPU kernel by its name."""
    return next((name for name, pattern in _PATTERNS if pattern.search(kernel)), OTHER)


def component_times(kernels: Iterable[tuple[str, float]], steps: int) -> dict[str, float]:
    """Microseconds per step of each component, largest first.

    Args:
        kernels: (kernel name, microseconds over all steps).
        steps: how many steps the events cover.
    """
    totals: dict[str, float] = {}
    for name, microseconds in kernels:
        component = component_of(name)
        totals[component] = totals.get(component, 0.0) + microseconds / steps
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def launches_per_step(calls: Mapping[str, int], steps: int) -> float:
    """Host launches of one step from the runtime calls counted over ``steps`` steps; a graph counts once."""
    return sum(count for name, count in calls.items() if LAUNCH_CALLS.match(name)) / steps
