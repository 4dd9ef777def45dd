"""A compiled set of kernels as a Python object: plain C functions through ctypes, no extension module."""

from __future__ import annotations

import ctypes
import functools

import torch

from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.kernels.build import Build, architecture_of, obtain
from loopkv.kernels.descriptor import DecodeArgs

QUERY_TILE = 8


class KernelLibrary:
    """Launchers for one head size and query tile count. Every launch goes to the given stream and returns at once."""

    def __init__(self, build: Build) -> None:
        self.build = build
        path = obtain(build)
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise LoopKVError("loading CUDA kernels", got=str(error)[:200], hint=f"remove {path}") from None
        self._attend_decode = self._library.loopkv_attend_decode
        self._attend_decode.argtypes = (ctypes.POINTER(DecodeArgs), ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
        self._library.loopkv_error_string.restype = ctypes.c_char_p

    def attend_decode(self, args: DecodeArgs, *, precision: bool, blocks: int, stream: int) -> None:
        """Launch the fused decode kernel."""
        self._check(self._attend_decode(ctypes.byref(args), int(precision), blocks, stream), "decode attention")

    def shared_bytes(self, rows: int) -> int:
        """Shared memory the largest launch for ``rows`` rows needs."""
        return int(self._library.loopkv_decode_shared_bytes(rows))

    def _check(self, error: int, what: str) -> None:
        if error:
            text = self._library.loopkv_error_string(error).decode()
            raise LoopKVError(f"launching {what}", got=f"CUDA error {error} ({text})")


@functools.cache
def load_library(head_dim: int, group_queries: int, device_index: int) -> KernelLibrary:
    """The kernels for a head size and group on a device; compiled at first use where the package has no binary.

    Raises:
        UnsupportedError: no GPU, an architecture without kernels, or no way to compile.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("CUDA kernels", got="no CUDA device", wanted="an NVIDIA GPU", hint="serve on the CPU")
    arch = architecture_of(torch.cuda.get_device_capability(device_index))
    return KernelLibrary(Build(head_dim, -(-group_queries // QUERY_TILE), arch))
