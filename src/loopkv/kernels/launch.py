"""Launching: a Triton kernel 96 times a step without its argument analysis, and what may run beside the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Launcher:
    """One specialisation of a kernel: compiled by the first launch, called directly from then on.

    Every launch must pass arguments that the first one's specialisation holds for: tensors of the same dtypes whose
    addresses are multiples of 16 bytes, and integers that are multiples of 16 where the first were and the kernel does
    not except them.

    Args:
        kernel: a ``triton.jit`` function whose constexpr parameters are its last.
        constants: those, by name and in order.
    """

    def __init__(self, kernel: Any, **constants: int) -> None:
        self._kernel, self._constants = kernel, constants
        self._values = tuple(constants.values())
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        """Launch on the current stream."""
        if self._compiled is None:
            self._compiled = self._kernel[grid](*args, **self._constants)  # None under Triton's interpreter
        else:
            self._compiled[grid](*args, *self._values)


class Branch:
    """Work beside that of the current stream, while a CUDA graph is captured; elsewhere it runs in place.

    What is launched inside ``beside`` waits for all that was launched before it, and nothing waits for it until
    ``join``. A tensor that is made inside may be used outside after ``join``.

    Args:
        device: of the stream.
        priority: of its kernels over others that wait for multiprocessors (lower is sooner, 0 is usual).
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.priority = priority
        self.enabled = device.type == "cuda"
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._open = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the branch."""
        if not (self.enabled and torch.cuda.is_current_stream_capturing()):
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=self.priority)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._open = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream waits for the branch, if there is one."""
        if self._open:
            assert self._stream is not None
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._open = False
