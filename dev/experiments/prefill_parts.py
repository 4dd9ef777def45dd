"""Microseconds of the kernels that expand and code a cell's history, on a GPU: CUDA's, and Triton's for several numbers
of heads and warps a program.

Launches go round 24 cells inside a CUDA graph, so that none finds its pages in the L2 cache; every variant of expand is
compared with the first, bit for bit. Beside them the time that the bytes take at the bandwidth given.

    python dev/experiments/prefill_parts.py [TB/s]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopkv.artifacts import Fingerprint
from loopkv.geometry import Geometry
from loopkv.kernels import prefill_plan
from loopkv.kernels.descriptor import cell_descriptors
from loopkv.kernels.encode import encode_kernel
from loopkv.kernels.expand import expand_kernel
from loopkv.kernels.operators import CudaOperators, StepView
from loopkv.layout import lay_out
from loopkv.planner.named import named_plan

CELLS, HEADS, DIM = 24, 16, 128
COPIES, NEW_BLOCKS = 16, 64
VARIANTS = [(1, 4), (2, 4), (4, 4), (2, 8), (4, 8)]  # heads and warps of a program
STEPS = [
    ("kivi4", 1, 1792, 256),
    ("kivi4", 1, 3840, 256),
    ("kivi4", 1, 7936, 256),
    ("kivi4", 1, 30720, 256),
    ("kivi2", 1, 3840, 256),
    ("kivi4", 16, 4096, 256),
    ("kivi4", 1, 0, 8192),
    ("kivi2", 1, 0, 8192),
]  # plan, rows, tokens before, new tokens
DEVICE = torch.device("cuda")


def timed(launch: Callable[[int], object]) -> float:
    """Median microseconds of a launch; it gets the cell."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(COPIES):
            launch(i * 7 % CELLS)
    samples = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / COPIES * 1e3)
    return statistics.median(samples[1:])


def measure(plan: str, rows: int, computed: int, new: int, variants: Sequence[tuple[int, int]], tb_s: float) -> None:
    """Print one step."""
    geometry = Geometry(architecture="ouro", loops=1, layers=CELLS, query_heads=HEADS, kv_heads=HEADS, head_dim=DIM)
    layout = lay_out(named_plan(plan, Fingerprint(name="random", geometry=geometry)))
    policy, tokens = layout.policy, computed + new
    blocks = -(-tokens // layout.history_block_tokens)
    # random bytes below 63: scales and values are finite numbers
    pool = torch.randint(0, 63, (rows * blocks + NEW_BLOCKS + 1, layout.block_bytes), dtype=torch.uint8, device=DEVICE)
    history = (1 + torch.arange(rows * blocks, dtype=torch.int32, device=DEVICE)).view(rows, blocks)
    window = torch.arange(-(-tokens // layout.window_block_tokens), dtype=torch.int32, device=DEVICE)
    window = (rows * blocks + 1 + window % NEW_BLOCKS).repeat(rows, 1).contiguous()
    lens, starts = np.full(rows, tokens, np.int32), np.arange(rows + 1, dtype=np.int32) * new
    every = np.ones(rows, bool)
    (group,) = prefill_plan.batches(policy, lens, starts, every, exact_tokens=1 << 30, coded_tokens=1 << 30)
    arrays = prefill_plan.group_arrays(policy, group, copies=group.copies)

    def sent(array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(DEVICE)

    def buffer(count: int) -> Tensor:
        return torch.zeros(count, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)

    info, expand, encode = sent(arrays.info), sent(arrays.expand_tasks), sent(arrays.encode_tasks)
    k, v = torch.randn(rows * new, 2 * HEADS, DIM, device=DEVICE).bfloat16().split(HEADS, 1)
    coded = buffer(rows * (tokens + 64)), buffer(rows * (tokens + 64))
    exact = buffer(rows * (new + 300)), buffer(rows * (new + 300))
    counters = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    cells = cell_descriptors(layout)
    places = {
        "BLOCK_BYTES": layout.block_bytes,
        "PAGE_BYTES": layout.page_bytes,
        "PAGES": layout.pages_per_block,
        "WINDOW": layout.window_block_tokens,
    }

    def numbers(cell: int) -> tuple[int, ...]:
        offsets = cells[cell].history_offset_bytes, cells[cell].window_offset_bytes
        return k.stride(0), *offsets, history.stride(0), window.stride(0)

    operators = CudaOperators(layout, torch.bfloat16, max_rows=rows, device=DEVICE)
    view = StepView(pool, history, window, sent(lens), None, rows)

    def by_cuda(cell: int) -> None:
        operators.expand(cells[cell], k, v, view, expand, info, coded, exact)

    by_cuda(0)
    first = [x.clone() for x in (*coded, *exact)]
    line = [f"CUDA {timed(by_cuda):.1f}"]
    for heads, warps in variants:

        def expanded(cell: int, heads: int = heads, warps: int = warps) -> None:
            tables, shape = (pool, history, window, expand, info), {"H": HEADS, "D": DIM, "SINK": policy.sink_tokens}
            expand_kernel[(HEADS // heads, len(expand), 1)](
                *tables, k, v, *coded, *exact, *numbers(cell), BITS=cells[cell].bits, **shape, **places, HEADS=heads,
                num_warps=warps,
            )  # fmt: skip

        expanded(0)
        result = [x.clone() for x in (*coded, *exact)]
        assert all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(first, result, strict=True))
        line.append(f"{heads} heads {warps} warps {timed(expanded):.1f}")
    if len(encode):

        def encoded(cell: int) -> None:
            tables = pool, history, window, encode, info
            encode_kernel[(HEADS, len(encode), 1)](
                *tables, k, v, *coded, counters, *numbers(cell), BITS=cells[cell].bits, H=HEADS, D=DIM, **places
            )

        line.append(f"encode {timed(encoded):.1f}")
    pages = int((expand[:, 1] > 0).sum())  # the sink's is exact
    token_bytes = HEADS * DIM * 4 + 2 * HEADS * DIM * cells[0].bits // 8 * 5 // 4
    moved = pages * 32 * token_bytes + (len(expand) - pages) * 32 * HEADS * DIM * 8
    print(f"{plan} {rows} x {new} after {computed}: bytes of expand {moved / tb_s / 1e6:.1f};", "; ".join(line))


if __name__ == "__main__":
    for step in STEPS:
        measure(*step, VARIANTS, float(sys.argv[1]) if len(sys.argv) > 1 else 4.28)
