"""The two RMS norms around a residual of sandwich-norm layers in one launch: ``outer(residual + inner(x))``."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from loopkv.kernels.launch import Launcher

logger = logging.getLogger("vllm.loopkv")


@triton.jit
def scaled(x, weight, epsilon, E: tl.constexpr):
    """RMS norm of a row [BLOCK] fp32, zeros behind E."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / E + epsilon) * weight.to(tl.float32)


@triton.jit
def sandwich_kernel(x, residual, out, inner, outer, inner_epsilon, outer_epsilon, E: tl.constexpr, BLOCK: tl.constexpr):
    """One token a program, in fp32 from its loads to its stores: compilers drop roundings in between as they like.

    Args:
        x, residual, out: [T, E]; the residual is updated in place.
        inner, outer: [E], weights of the norms.
    """
    row = tl.program_id(0).to(tl.int64) * E
    channel = tl.arange(0, BLOCK)
    inside = channel < E
    values = tl.load(x + row + channel, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(residual + row + channel, mask=inside, other=0.0).to(tl.float32)
    stream += scaled(values, tl.load(inner + channel, mask=inside, other=0.0), inner_epsilon, E)
    tl.store(residual + row + channel, stream, mask=inside)
    result = scaled(stream, tl.load(outer + channel, mask=inside, other=0.0), outer_epsilon, E)
    tl.store(out + row + channel, result, mask=inside)


class SandwichNorm:
    """Both norms around one residual.

    Args:
        channels: E.
    """

    def __init__(self, channels: int) -> None:
        self._channels = channels
        self._launch = Launcher(sandwich_kernel, E=channels, BLOCK=triton.next_power_of_2(channels))

    def __call__(
        self, x: Tensor, residual: Tensor, inner: Tensor, outer: Tensor, inner_epsilon: float, outer_epsilon: float
    ) -> Tensor:
        """``residual += norm(x) * inner`` in place; returns ``norm(residual) * outer``. Each result is rounded once.

        Args:
            x, residual: [T, E], contiguous.
            inner, outer: [E].
            inner_epsilon, outer_epsilon: of the norms.
        """
        assert x.is_contiguous() and residual.is_contiguous()
        out = torch.empty_like(x)
        if x.shape[0]:
            self._launch((x.shape[0], 1, 1), x, residual, out, inner, outer, inner_epsilon, outer_epsilon)
        return out

    def works(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Compile it, so that no step waits for that, and see that it does what it should; where not, say why."""
        x = torch.linspace(-1, 1, self._channels, device=device).to(dtype)[None]
        residual, one = x.flip(1).contiguous(), torch.ones(self._channels, dtype=dtype, device=device)
        added = x.float() * torch.rsqrt(x.float().square().mean() + 1) + residual.float()
        wanted = added * torch.rsqrt(added.square().mean() + 1)
        try:
            got = self(x, residual, one, one, 1.0, 1.0).float()
            error = max(float((got - wanted).abs().max()), float((residual.float() - added).abs().max()))
        except Exception as problem:
            logger.warning("LoopKV: two norms in one launch are not served here: %s", problem)
            return False
        if not error < 0.05:
            logger.warning("LoopKV: two norms in one launch are not served here: off by %g", error)
            return False
        return True
