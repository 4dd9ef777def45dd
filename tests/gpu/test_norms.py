"""Both norms of a sandwich in one launch, against the same roundings in PyTorch."""

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
        x = x.float()
        return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon)).to(dtype) * weight

    added = norm(x, inner, 1e-6)
    stream, size = residual + added, residual.float().abs() + added.float().abs()
    got = SandwichNorm(channels)(x, residual, inner, outer, 1e-6, 1e-5)
    wanted = norm(residual, outer, 1e-5)  # of the stream as it was stored
    for ours, theirs, scale in ((residual, stream, size), (got, wanted, wanted.float().abs())):
        assert bool(ours.isfinite().all())
        error = (ours.float() - theirs.float()).abs()
        assert bool((error <= 2 * torch.finfo(dtype).eps * scale).all())  # a rounding or two apart
        assert float((ours != theirs).float().mean()) < 0.01
