"""Muon for the block's matrices, AdamW for embeddings, norms and the gate.

Muon (Jordan et al., 2024): the momentum of a matrix's gradient is replaced by the nearest matrix with all singular
values near one, found by five Newton-Schulz steps, so every direction of a matrix moves equally far.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic x -> a x + b x^3 + c x^5 that drives singular values into about [0.7, 1.2]."""


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal factor of each matrix of a stack. g [n, rows, columns], any dtype -> same shape, bf16 work."""
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; update scaled by sqrt(max(1, rows / columns)); decoupled weight decay."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._stacks: dict[torch.Size, Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                grads = torch.stack([p.grad for p in params])
                momentum = self._stacks.setdefault(shape, torch.zeros_like(grads))
                momentum.lerp_(grads, 1 - group["momentum"])
                update = orthogonalise(grads.lerp(momentum, group["momentum"]))
                rows, columns = shape
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                scale = -group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_add_(params, list(update.unbind()), alpha=scale)


def build_optimisers(
    model: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float, fused: bool
) -> list[torch.optim.Optimizer]:
    """One Muon and one AdamW; each parameter is in exactly one. Norms, embeddings and the gate do not decay."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, lr=muon_lr, weight_decay=weight_decay),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused),
    ]
