"""What a device has to do for the cache, as narrow as it can be: code the leaving pages, then attend cell by cell.

Both calls get everything from the step (block tables and row lengths): no per-request state is kept between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from loopkv.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from loopkv.layout import Layout
    from loopkv.vllm_plugin.metrics import Counters
    from loopkv.vllm_plugin.served import ServedPlan
    from loopkv.vllm_plugin.step import HistoryPages, Step


class Operators(Protocol):
    """Operators of one worker over its own heads. Workspaces are allocated at construction (before profiling)."""

    def code_leaving_pages(self, step: Step) -> None:
        """Code, for all cells and rows, every page that this step's tokens push out of the window.

        Runs before anything of the step is appended: it codes pages whose tokens all lie below the row's computed
        tokens (with at most W new tokens of a row that is every page). A page of longer chunks is coded by ``attend``.
        """
        ...

    def attend(self, cell: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, step: Step) -> None:
        """Append the cell's new keys and values to the window blocks, then attend under the policy.

        Args:
            cell: index of the cell.
            q: [T, Hq, D] after RoPE.
            k, v: [T, H, D] after RoPE.
            out: [T, Hq, D], written in place; rows of padding are left alone.
            step: the step, the same object for all cells.
        """
        ...

    def publish(self, pages: HistoryPages | None) -> None:
        """Make counts visible to other processes; called on the host once a step, graphs included. Never waits.

        Args:
            pages: of the step's rows; None if unknown.
        """
        ...


def make_operators(
    layout: Layout,
    served: ServedPlan,
    dtype: torch.dtype,
    *,
    max_rows: int,
    max_tokens: int,
    max_model_tokens: int,
    device: torch.device,
    counters: Counters,
) -> Operators:
    """The operators for a device; a step has at most ``max_rows`` requests and ``max_tokens`` new tokens, a request at
    most ``max_model_tokens`` in all.

    Raises:
        UnsupportedError: no implementation for the device, or for this layout on it.
    """
    if device.type == "cpu":
        from loopkv.vllm_plugin.operators_cpu import CpuOperators

        return CpuOperators(layout, dtype, seed=served.seed, counters=counters)
    if device.type == "cuda":
        from loopkv.vllm_plugin.operators_cuda import CudaStepOperators

        return CudaStepOperators(
            layout,
            dtype,
            seed=served.seed,
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_model_tokens=max_model_tokens,
            device=device,
            counters=counters,
        )
    raise UnsupportedError("serving a LoopKV plan", got=f"device {device.type}", wanted="cpu or cuda")


def check_device(layout: Layout, dtype: torch.dtype, device_type: str) -> None:
    """Refuse what ``make_operators`` would, without touching the device.

    Raises:
        UnsupportedError: says which constant or device, and what would do.
    """
    if device_type == "cuda":
        from loopkv.kernels.descriptor import check_served

        check_served(layout, dtype)
    elif device_type != "cpu":
        raise UnsupportedError("serving a LoopKV plan", got=f"device {device_type}", wanted="cpu or cuda")
