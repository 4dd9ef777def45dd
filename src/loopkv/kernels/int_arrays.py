"""Integer arrays that travel to the device together: one copy a step, each array at a multiple of 16 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]

_ALIGN = 4  # integers: 16 bytes


def _room(size: int) -> int:
    """Integers that an array of ``size`` takes up among packed ones."""
    return size + -size % _ALIGN


def _packed(arrays: Sequence[Ints]) -> Tensor:
    """The arrays one after the other on the host."""
    padded = [np.pad(array.ravel(), (0, _room(array.size) - array.size)) for array in arrays]
    return torch.from_numpy(np.concatenate(padded))


def _views(data: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The arrays inside packed ones."""
    views, begin = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        views.append(data[begin : begin + size].view(shape))
        begin += _room(size)
    return views


def send(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in one copy that nobody waits for."""
    data = _packed(arrays)
    if device.type == "cuda":
        data = data.pin_memory().to(device, non_blocking=True)
    return _views(data, [array.shape for array in arrays])


class FixedArrays:
    """Arrays whose places on the device never change, so that a CUDA graph can hold them.

    Args:
        shapes: of the arrays.
        device: where they lie.

    Attributes:
        views: the arrays.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        size = sum(_room(int(np.prod(shape))) for shape in shapes)
        self._data = torch.zeros(size, dtype=torch.int32, device=device)
        self.views = _views(self._data, self._shapes)

    def fill(self, arrays: Sequence[Ints]) -> None:
        """Write all arrays, on the current stream; nobody waits for the copy.

        Raises:
            ValueError: arrays of other shapes.
        """
        shapes = tuple(array.shape for array in arrays)
        if shapes != self._shapes:
            raise ValueError(f"arrays of shapes {shapes}, not {self._shapes}")
        data = _packed(arrays)
        if self._data.device.type == "cuda":
            data = data.pin_memory()  # the allocator keeps it until the copy is done
        self._data.copy_(data, non_blocking=True)
