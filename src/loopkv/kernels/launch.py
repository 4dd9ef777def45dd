"""Launching a Triton kernel 96 times a step without paying for its argument analysis each time."""

from __future__ import annotations

from typing import Any


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
