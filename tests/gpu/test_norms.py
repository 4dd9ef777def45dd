"""Both norms of a sandwich in one launch, against fp32 rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopkv.kernels.norms import SandwichNorm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 2048), (300, 384), (4096, 2048)])
def test_norms_differ_by_the_order_of_a_sum_alone(tokens: int, channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    x, residual, inner, outer = draw(tokens, channels), draw(tokens, channels), draw(channels), draw(channels)

    def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight.float()

    stream = residual.float() + norm(x.float(), inner, 1e-6)
    wanted = norm(stream, outer, 1e-5)
    got = SandwichNorm(channels)(x, residual, inner, outer, 1e-6, 1e-5)
    for ours, theirs in ((residual, stream), (got, wanted)):
        assert bool(ours.isfinite().all())
        error = (ours.float() - theirs).abs()
        assert bool((error <= torch.finfo(dtype).eps * theirs.abs() + 1e-6).all())
        assert float((ours != theirs.to(dtype)).float().mean()) < 0.01  # at ties that the order of a sum decides
