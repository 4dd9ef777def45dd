"""The structs of ``csrc/descriptor.h`` in Python, and how a layout fills them. A test compares both field by field.

A descriptor says which bytes a cell's reader reads (whose pages, at which offset, with how many bits): derived from a
layout, never edited, never saved.
"""

from __future__ import annotations

import ctypes
import enum

import torch

from loopkv.errors import UnsupportedError
from loopkv.layout import Layout
from loopkv.policy import MAX_SPLITS, MIN_SPLIT_PAGES, Policy

CHUNK_TOKENS = 64  # exact tokens of one task of the decode kernel
MIXED_COLUMNS = 16  # queries of a tile of a mixed step, times query heads per kv head
MAX_SPLIT_PAGES = 1024  # of a split whose sums of codes times weights are 32-bit integers (csrc/integers.cuh)
MAX_PARTS = 128  # partial results that one merge takes
MIXED_SPLITS = 8  # of a tile of a mixed step: its many tiles fill a GPU
EXACT_BITS = 16  # `bits` of a history kept in the engine's dtype
_PAGE_TOKENS = 32
_GROUP = 32


class SeedMode(enum.IntEnum):
    """Where V precision takes its first maximum from."""

    SINK = 0
    TIMED = 1
    NONE = 2


class ExactType(enum.IntEnum):
    """The engine's dtype."""

    BFLOAT16 = 0
    FLOAT16 = 1
    FLOAT32 = 2


EXACT_TYPES = {
    torch.bfloat16: ExactType.BFLOAT16,
    torch.float16: ExactType.FLOAT16,
    torch.float32: ExactType.FLOAT32,
}


class CellDescriptor(ctypes.Structure):
    """One cell as a reader sees it."""

    _fields_ = (
        ("history_offset_bytes", ctypes.c_int64),
        ("window_offset_bytes", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("owns_history", ctypes.c_int32),
    )


class CacheGeometry(ctypes.Structure):
    """Constants of a layout."""

    _fields_ = (
        ("block_bytes", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("pages_per_block", ctypes.c_int32),
        ("window_block_tokens", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("group_queries", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("exact_type", ctypes.c_int32),
        ("sink_tokens", ctypes.c_int32),
        ("window_tokens", ctypes.c_int32),
        ("min_split_pages", ctypes.c_int32),
        ("max_splits", ctypes.c_int32),
    )


class CacheView(ctypes.Structure):
    """The cache in one step."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("history_table", ctypes.c_void_p),
        ("window_table", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("history_table_stride", ctypes.c_int64),
        ("window_table_stride", ctypes.c_int64),
    )


class AttendWorkspace(ctypes.Structure):
    """Buffers that every launch leaves as it found them."""

    _fields_ = (
        ("partial_o", ctypes.c_void_p),
        ("partial_ml", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("control", ctypes.c_void_p),
        ("hot_values", ctypes.c_void_p),
        ("max_parts", ctypes.c_int64),
    )


class AttendArgs(ctypes.Structure):
    """Arguments of the attention kernels: one cell of a step."""

    _fields_ = (
        ("geometry", CacheGeometry),
        ("cell", CellDescriptor),
        ("cache", CacheView),
        ("workspace", AttendWorkspace),
        ("query_start", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("kv_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("scale_log2", ctypes.c_float),
        ("tau", ctypes.c_float),
        ("rows", ctypes.c_int32),
        ("seed_mode", ctypes.c_int32),
        ("first_tile", ctypes.c_int32),
        ("max_tiles", ctypes.c_int32),
        ("timed_cycles", ctypes.c_int64),
    )


class AppendArgs(ctypes.Structure):
    """Arguments of the kernel that writes new keys and values to the window."""

    _fields_ = (
        ("geometry", CacheGeometry),
        ("cell", CellDescriptor),
        ("cache", CacheView),
        ("query_start", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("kv_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
    )


class ExpandArgs(ctypes.Structure):
    """Arguments of the kernel that expands a cell's history."""

    _fields_ = (
        ("geometry", CacheGeometry),
        ("cell", CellDescriptor),
        ("cache", CacheView),
        ("tasks", ctypes.c_void_p),
        ("info", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("coded_k", ctypes.c_void_p),
        ("coded_v", ctypes.c_void_p),
        ("exact_k", ctypes.c_void_p),
        ("exact_v", ctypes.c_void_p),
        ("kv_stride", ctypes.c_int64),
        ("task_count", ctypes.c_int32),
    )

    @classmethod
    def of(
        cls,
        geometry: CacheGeometry,
        cell: CellDescriptor,
        cache: CacheView,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        tasks: torch.Tensor,
        info: torch.Tensor,
        coded: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> ExpandArgs:
        """Of tensors, which must outlive the launch: see ``prefill.Expansion``."""
        return cls(
            geometry=geometry,
            cell=cell,
            cache=cache,
            tasks=tasks.data_ptr(),
            info=info.data_ptr(),
            k_new=k.data_ptr(),
            v_new=v.data_ptr(),
            coded_k=coded[0].data_ptr(),
            coded_v=coded[1].data_ptr(),
            exact_k=exact[0].data_ptr(),
            exact_v=exact[1].data_ptr(),
            kv_stride=k.stride(0),
            task_count=len(tasks),
        )


class CodeArgs(ctypes.Structure):
    """Arguments of the codec kernel."""

    _fields_ = (
        ("geometry", CacheGeometry),
        ("cache", CacheView),
        ("cells", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("kv_stride", ctypes.c_int64),
        ("cell_count", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    )


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    CellDescriptor,
    CacheGeometry,
    CacheView,
    AttendWorkspace,
    AttendArgs,
    AppendArgs,
    ExpandArgs,
    CodeArgs,
)


def check_served(layout: Layout, dtype: torch.dtype) -> None:
    """Refuse a layout whose constants the kernels are not built for.

    Raises:
        UnsupportedError: says which constant, and what would do.
    """
    policy, geometry = layout.policy, layout.geometry
    if policy.page_tokens != _PAGE_TOKENS or policy.group != _GROUP:
        raise UnsupportedError(
            "CUDA kernels: page and group",
            got=f"{policy.page_tokens} tokens, {policy.group} channels",
            wanted=f"{_PAGE_TOKENS} tokens, {_GROUP} channels",
            hint="plan with the default policy",
        )
    if policy.sink_tokens > CHUNK_TOKENS:
        raise UnsupportedError("CUDA kernels: sink", got=f"{policy.sink_tokens} tokens", wanted=f"<= {CHUNK_TOKENS}")
    if max_parts(policy) > MAX_PARTS:
        raise UnsupportedError("CUDA kernels: window", got=f"{policy.window_tokens} tokens", wanted="<= 6000")
    if geometry.head_dim not in (64, 96, 128, 256):
        raise UnsupportedError("CUDA kernels: head size", got=geometry.head_dim, wanted="64, 96, 128 or 256")
    if geometry.group_queries > 16:
        raise UnsupportedError("CUDA kernels: query heads per kv head", got=geometry.group_queries, wanted="<= 16")
    if dtype not in EXACT_TYPES or dtype.itemsize != layout.exact_itemsize:
        raise UnsupportedError(
            "CUDA kernels: cache dtype", got=dtype, wanted=f"{layout.exact_itemsize}-byte bfloat16, float16 or float32"
        )


def cache_geometry(layout: Layout, dtype: torch.dtype) -> CacheGeometry:
    """The constants of ``layout`` with exact values of ``dtype``."""
    geometry, policy = layout.geometry, layout.policy
    return CacheGeometry(
        block_bytes=layout.block_bytes,
        page_bytes=layout.page_bytes,
        pages_per_block=layout.pages_per_block,
        window_block_tokens=layout.window_block_tokens,
        kv_heads=geometry.kv_heads,
        group_queries=geometry.group_queries,
        head_dim=geometry.head_dim,
        exact_type=int(EXACT_TYPES[dtype]),
        sink_tokens=policy.sink_tokens,
        window_tokens=policy.window_tokens,
        min_split_pages=MIN_SPLIT_PAGES,
        max_splits=MAX_SPLITS,
    )


def cell_descriptors(layout: Layout) -> tuple[CellDescriptor, ...]:
    """One descriptor per cell, in cell order."""
    descriptors = []
    for index, place in enumerate(layout.cells):
        bits = layout.read_option(index).bits
        descriptors.append(
            CellDescriptor(
                history_offset_bytes=place.history_offset,
                window_offset_bytes=place.window_offset,
                bits=EXACT_BITS if bits is None else bits,
                owns_history=int(place.holder == index),
            )
        )
    return tuple(descriptors)


def check_row(pages: int, policy: Policy) -> None:
    """Refuse tables for rows that the decode kernel's integer sums are too narrow for.

    Args:
        pages: most history pages of a row that the table has room for.

    Raises:
        UnsupportedError: a split could have more than ``MAX_SPLIT_PAGES`` pages.
    """
    most = MAX_SPLITS * MAX_SPLIT_PAGES
    if pages > most:
        raise UnsupportedError(
            "tokens of a row",
            got=f"room for {pages * policy.page_tokens}",
            wanted=f"<= {most * policy.page_tokens}",
            hint="lower --max-model-len",
        )


def max_parts(policy: Policy, tile_queries: int = 1, splits: int = MAX_SPLITS) -> int:
    """Most partial results of one tile and head: chunks of exact tokens and splits of the history."""
    exact = policy.sink_tokens + policy.window_tokens + policy.page_tokens - 1 + tile_queries - 1
    return -(-exact // CHUNK_TOKENS) + splits
