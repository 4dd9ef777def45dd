"""A compiled set of kernels as a Python object: plain C functions through ctypes, no extension module."""

from __future__ import annotations

import ctypes
import functools

import torch

from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.kernels.build import Build, architecture_of, obtain, queries_class
from loopkv.kernels.descriptor import AppendArgs, AttendArgs, CodeArgs, ExpandArgs


class KernelLibrary:
    """Launchers for one head size and group size. Every launch goes to the given stream and returns at once."""

    def __init__(self, build: Build) -> None:
        self.build = build
        path = obtain(build)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise LoopKVError("loading CUDA kernels", got=str(error)[:200], hint=f"remove {path}") from None
        attend, code, append = ctypes.POINTER(AttendArgs), ctypes.POINTER(CodeArgs), ctypes.POINTER(AppendArgs)
        number, stream = ctypes.c_int, ctypes.c_void_p
        library.loopkv_attend_decode.argtypes = (attend, number, number, stream)
        library.loopkv_attend_mixed.argtypes = (attend, number, stream)
        library.loopkv_attend_scalar.argtypes = (attend, number, stream)
        library.loopkv_code_pages.argtypes = (code, number, stream)
        library.loopkv_append.argtypes = (append, number, stream)
        library.loopkv_expand.argtypes = (ctypes.POINTER(ExpandArgs), stream)
        library.loopkv_error_string.restype = ctypes.c_char_p
        self._library = library

    def attend_decode(self, args: AttendArgs, *, precision: bool, blocks: int, stream: int) -> None:
        """Launch fused attention of a decode step."""
        error = self._library.loopkv_attend_decode(ctypes.byref(args), int(precision), blocks, stream)
        self._check(error, "decode attention")

    def attend_mixed(self, args: AttendArgs, *, blocks: int, stream: int) -> None:
        """Launch fused attention of a mixed step's tiles ``first_tile .. first_tile + max_tiles - 1``."""
        self._check(self._library.loopkv_attend_mixed(ctypes.byref(args), blocks, stream), "mixed attention")

    def attend_scalar(self, args: AttendArgs, *, precision: bool, stream: int) -> None:
        """Launch unfused fp32 attention of the queries ``first_tile .. first_tile + max_tiles - 1``."""
        error = self._library.loopkv_attend_scalar(ctypes.byref(args), int(precision), stream)
        self._check(error, "scalar attention")

    def code_pages(self, args: CodeArgs, *, blocks: int, stream: int) -> None:
        """Launch the codec."""
        self._check(self._library.loopkv_code_pages(ctypes.byref(args), blocks, stream), "page coding")

    def append(self, args: AppendArgs, *, queries: int, stream: int) -> None:
        """Launch the copy of new keys and values to the window."""
        self._check(self._library.loopkv_append(ctypes.byref(args), queries, stream), "append")

    def expand(self, args: ExpandArgs, *, stream: int) -> None:
        """Launch the expansion of a history; head sizes that are multiples of 128."""
        self._check(self._library.loopkv_expand(ctypes.byref(args), stream), "expansion")

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
    return KernelLibrary(Build(head_dim, queries_class(group_queries), arch))
