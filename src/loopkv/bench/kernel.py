"""``loopkv bench kernel``: the decode kernel alone, as a share of what the memory can do.

A launch is timed inside a CUDA graph that goes round the cells of a generated case, so that no launch finds its data
in the L2 cache, and its result is checked against the fp32 reference before it is timed. Bytes are those the policy
makes a decode step read: the history's planes (the low plane only for hot tokens), the exact sink and window, queries
and output. The yardstick is a large device-to-device copy in the same process, bytes read plus bytes written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from loopkv.bench.kernel_reference import plain_bf16, reference_decode, relative_error
from loopkv.errors import LoopKVError
from loopkv.kernels.cases import Case, CaseSpec, make_case, page_nbytes
from loopkv.kernels.descriptor import SeedMode
from loopkv.kernels.operators import CudaOperators, StepView
from loopkv.records import Record, make_record

COPY_BYTES = 4 << 30
_COLD_BYTES = 256 << 20  # a round over the cells reads at least this much: several times an L2 cache


@dataclass(frozen=True, slots=True)
class KernelCell:
    """One measured cell.

    Args:
        option: of the history read ("int4", "int2", "bf16", or "share" for int4 pages of another cell).
        batch, context_tokens: rows, all of the same length.
        tau: V-precision threshold in bits, or None for the plain reader.
        hot_share: planted share of hot history tokens.
    """

    option: str
    batch: int
    context_tokens: int
    tau: float | None = None
    hot_share: float = 0.2
    kv_heads: int = 16
    group_queries: int = 1
    head_dim: int = 128
    seed_mode: SeedMode = SeedMode.SINK


@dataclass(frozen=True, slots=True)
class KernelResult:
    """Times of one cell in microseconds a launch, with what was read."""

    cell: KernelCell
    samples_us: tuple[float, ...]
    bytes_read: int
    hot_share: float | None
    error: float
    plain_error: float
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def us(self) -> float:
        """Median."""
        return statistics.median(self.samples_us)

    @property
    def bytes_s(self) -> float:
        """Bytes read per second at the median."""
        return self.bytes_read / self.us * 1e6


def copy_bandwidth(device: torch.device, nbytes: int = COPY_BYTES, repeats: int = 15) -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes both counted (median)."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = _event_times(lambda: target.copy_(source), repeats, device)
    return 2 * nbytes / (statistics.median(times) * 1e-3)


def _event_times(launch: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each of ``repeats`` calls, after three to warm up."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def cell_pairs(cell: KernelCell) -> int:
    """Pairs of cells a case needs so that a round over them is far larger than the L2 cache."""
    geometry = cell.kv_heads * cell.head_dim
    per_token = {"bf16": 4.0, "int4": 1.25, "share": 1.25, "int2": 0.75}[cell.option] * geometry
    one = max(1.0, per_token * cell.context_tokens * cell.batch)
    return max(1, min(24, round(_COLD_BYTES / one / 2 + 0.5)))


def build_case(cell: KernelCell, device: torch.device, seed: int = 0) -> Case:
    """The case of a cell: pairs of cells with the option, sources included."""
    pairs = cell_pairs(cell)
    second = "int4" if cell.option == "share" else cell.option
    spec = CaseSpec(
        tokens=(cell.context_tokens,) * cell.batch,
        kv_heads=cell.kv_heads,
        group_queries=cell.group_queries,
        head_dim=cell.head_dim,
        options=(cell.option,) * pairs + (second,) * pairs,
        tau=cell.tau,
        hot_share=cell.hot_share,
        seed=seed,
    )
    return make_case(spec, device)


def bytes_read(case: Case, cell: int, hot_share: float | None) -> int:
    """Bytes one launch has to read and write, under the policy."""
    layout, spec = case.layout, case.spec
    policy, heads, dim = layout.policy, spec.kv_heads, spec.head_dim
    total = 0
    for tokens in spec.tokens:
        pages = (policy.history_end(tokens) - policy.sink_tokens) // policy.page_tokens
        page = page_nbytes(layout, cell)
        if hot_share is not None:
            page -= round((1.0 - hot_share) * policy.page_tokens * heads * dim // 4)
        exact = tokens - pages * policy.page_tokens
        total += pages * page + exact * 2 * heads * dim * layout.exact_itemsize
        total += 2 * heads * spec.group_queries * dim * spec.dtype.itemsize
    return total


def step_view(case: Case) -> StepView:
    """The decode step of a case."""
    return StepView(case.pool, case.history_table, case.window_table, case.seq_lens, None, len(case.spec.tokens))


class DecodeBench:
    """One case on a device, ready to launch cell by cell."""

    def __init__(self, cell: KernelCell, device: torch.device, case: Case | None = None) -> None:
        self.cell, self.device = cell, device
        self.case = case if case is not None else build_case(cell, device)
        self.operators = CudaOperators(
            self.case.layout,
            self.case.spec.dtype,
            max_rows=cell.batch,
            device=device,
            seed=cell.seed_mode,
            count_hot=True,
        )
        self.out = torch.empty_like(self.case.q)
        self.step = step_view(self.case)
        pairs = len(self.case.layout.cells) // 2
        self.cells = range(pairs) if cell.option == "share" else range(2 * pairs)

    def launch(self, index: int) -> None:
        """One cell."""
        case, by_choice = self.case, self.cell.tau is not None
        tensors = (case.q[index], case.k_new[index], case.v_new[index], self.out[index])
        self.operators.attend(index, *tensors, self.step, precision=by_choice)

    def check(self, rows: Sequence[int] = (0,)) -> tuple[float, float]:
        """Largest relative error against fp32 over some rows of the first cell, and PyTorch's in BF16.

        Raises:
            LoopKVError: the kernel is wrong: nothing of it may be timed.
        """
        index = self.cells[0]
        self.out.fill_(float("nan"))
        self.launch(index)
        torch.cuda.synchronize(self.device)
        worst, plain = 0.0, 0.0
        for row in rows:
            precision = self.cell.tau is not None and self.case.layout.has_precision(index)
            wanted = reference_decode(self.case, index, row, precision=precision).o
            full = reference_decode(self.case, index, row, precision=False).o
            worst = max(worst, relative_error(self.out[index, row].float(), wanted))
            plain = max(plain, relative_error(plain_bf16(self.case, index, row), full))
        if not worst <= 2 * plain:
            raise LoopKVError(f"decode kernel on {self.cell}", got=f"error {worst:.2e}", wanted=f"<= {2 * plain:.2e}")
        return worst, plain

    def measure(self, replays: int = 20) -> KernelResult:
        """Check, then time graph replays of rounds over the cells."""
        error, plain = self.check()
        counter = self.operators.hot_values
        hot_share = None
        if self.cell.tau is not None:
            counter.zero_()
            self.launch(self.cells[0])
            pages = self.case.layout.policy
            history = sum(pages.history_end(n) - pages.sink_tokens for n in self.case.spec.tokens)
            hot_share = int(counter) / (history * self.cell.kv_heads)
        rounds = max(1, 24 // len(self.cells))
        order = list(self.cells) * rounds
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            for index in self.cells:
                self.launch(index)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for index in order:
                    self.launch(index)
            times = _event_times(graph.replay, replays, self.device)
        samples = tuple(1e3 * t / len(order) for t in times)
        return KernelResult(
            self.cell, samples, bytes_read(self.case, self.cells[0], hot_share), hot_share, error, plain
        )


def default_cells() -> Iterator[KernelCell]:
    """The grid of ``loopkv bench kernel``: Ouro's layer at several batches and contexts."""
    for batch, context in ((32, 16384), (16, 16384), (32, 8192), (8, 32768), (1, 8192), (1, 16384)):
        yield KernelCell("int4", batch, context)
        yield KernelCell("int4", batch, context, tau=14.0)
        yield KernelCell("int2", batch, context)
    yield KernelCell("bf16", 8, 16384)
    yield KernelCell("share", 32, 16384, tau=14.0)


def kernel_records(result: KernelResult, copy_bytes_s: float) -> list[Record]:
    """Records of one measured cell."""
    cell = result.cell
    settings = {
        "kernel": "decode+v" if cell.tau is not None else "decode",
        "batch": cell.batch,
        "context_tokens": cell.context_tokens,
        "option": cell.option,
        "head_dim": cell.head_dim,
        "kv_heads": cell.kv_heads,
        "group_queries": cell.group_queries,
        "hot_share": result.hot_share,
        "bytes": result.bytes_read,
        "error": result.error,
        "plain_bf16_error": result.plain_error,
        **result.settings,
    }
    share = result.bytes_s / copy_bytes_s
    return [
        make_record("kernel.us", result.us, "us", samples=result.samples_us, settings=settings),
        make_record("kernel.bandwidth_share", share, "share", settings={**settings, "copy_bytes_s": copy_bytes_s}),
    ]
