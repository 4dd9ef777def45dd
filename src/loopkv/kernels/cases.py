"""Generated cases for kernels: one generator for tests and benchmarks, so that they cannot drift apart.

Random scores would make every token hot. Cases therefore *plant* scores: a share of the history tokens of every row
and kv head scores within the V-precision threshold of the best sink token, the others well below it, as attention of
real models does (paper section 2.4: about one history token in six). Hot tokens are drawn independently, which is the
hardest pattern for skipping memory; real ones cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loopkv.artifacts import Fingerprint, Plan
from loopkv.codec import decode_keys, decode_values, encode_keys, encode_values
from loopkv.codec.pages import pack_page, page_struct, unpack_page
from loopkv.geometry import Geometry
from loopkv.layout import Layout, lay_out
from loopkv.policy import DEFAULT_POLICY, Policy

_PLANTED_TAU_BITS = 14.0
_COLD_DEPTH_BITS = 12.0


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """What to generate.

    Args:
        tokens: of each row after the step, the newest included; 0 is a padded row.
        options: per cell, loop-major over two loops of equally many layers (a shared cell needs its source in loop 2).
        tau: V-precision threshold of the plan in bits, or None.
        hot_share: share of history tokens planted above the threshold (of ``tau``, or 14 bits).
        keep_exact: keep the exact KV of the history in the window blocks too, as a step before coding has it.
        history_block_tokens, window_block_tokens: fix the block sizes.
    """

    tokens: tuple[int, ...]
    kv_heads: int = 2
    group_queries: int = 1
    head_dim: int = 128
    options: tuple[str, ...] = ("int4", "int4")
    tau: float | None = None
    hot_share: float = 0.2
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    keep_exact: bool = False
    history_block_tokens: int | None = None
    window_block_tokens: int | None = None
    policy: Policy = field(default_factory=lambda: DEFAULT_POLICY)


@dataclass(frozen=True, slots=True)
class Case:
    """A cache in the middle of serving, and one decode step's inputs for every cell.

    Args:
        layout: where things lie.
        pool: [blocks, block_bytes] uint8; whatever no row owns is 0xFF (NaN in every float type).
        history_table, window_table: [B, N] int32.
        seq_lens: [B] int32.
        q: [C, B, Hq, D]; k_new, v_new: [C, B, H, D] of the newest token (not yet in the pool).
    """

    spec: CaseSpec
    layout: Layout
    pool: Tensor
    history_table: Tensor
    window_table: Tensor
    seq_lens: Tensor
    q: Tensor
    k_new: Tensor
    v_new: Tensor

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.spec.head_dim**-0.5)

    def window_view(self) -> Tensor:
        """Window blocks [blocks, C, 2, bw, H, D] in the exact dtype."""
        spec, layout = self.spec, self.layout
        shape = (len(layout.cells), 2, layout.window_block_tokens, spec.kv_heads, spec.head_dim)
        return self.pool.view(spec.dtype)[:, : math.prod(shape)].unflatten(1, shape)

    def history_view(self) -> Tensor:
        """History blocks [blocks, pages, bytes of a page of all cells] uint8."""
        pages, nbytes = self.layout.pages_per_block, self.layout.page_bytes
        return self.pool[:, : pages * nbytes].unflatten(1, (pages, nbytes))

    def exact_kv(self, cell: int, row: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Exact keys and values [N, H, D] of tokens of a row, the newest from the step's inputs."""
        newest = int(self.seq_lens[row]) - 1
        where = torch.as_tensor(list(tokens), dtype=torch.int64, device=self.pool.device)
        size = self.layout.window_block_tokens
        blocks = self.window_table[row].long()[where // size]
        view = self.window_view()
        keys, values = (view[blocks, cell, part, where % size].clone() for part in (0, 1))
        keys[where == newest], values[where == newest] = self.k_new[cell, row], self.v_new[cell, row]
        return keys, values

    def history_pages(self, cell: int, row: int) -> Tensor:
        """Bytes of the history pages a cell reads: [N, bytes]."""
        policy = self.layout.policy
        first, last = policy.sink_tokens, policy.history_end(int(self.seq_lens[row]))
        page = torch.arange(first // policy.page_tokens, last // policy.page_tokens, device=self.pool.device)
        per_block = self.layout.pages_per_block
        blocks = self.history_table[row].long()[page // per_block]
        offset = self.layout.cells[cell].history_offset
        return self.history_view()[blocks, page % per_block, offset : offset + page_nbytes(self.layout, cell)]

    def history_kv(self, cell: int, row: int, *, cold: bool = False) -> tuple[Tensor, Tensor]:
        """Decoded history [N, H, D] that a cell reads; with ``cold``, values of the high plane alone."""
        data = self.history_pages(cell, row)
        spec, policy = self.spec, self.layout.policy
        option = self.layout.read_option(cell)
        if not option.coded:
            shape = (2, policy.page_tokens, spec.kv_heads, spec.head_dim)
            exact = data.contiguous().view(spec.dtype).unflatten(1, shape)
            return exact[:, 0].flatten(0, 1), exact[:, 1].flatten(0, 1)
        keys, values = unpack_page(page_struct(option, spec.kv_heads, spec.head_dim, policy), data)
        everything = torch.ones(values.q.shape[:-1], dtype=torch.bool, device=data.device) if cold else None
        return decode_keys(keys).flatten(0, 1), decode_values(values, cold=everything).flatten(0, 1)


def page_nbytes(layout: Layout, cell: int) -> int:
    """Bytes of the page a cell reads."""
    option = layout.read_option(cell)
    geometry, policy = layout.geometry, layout.policy
    if option.coded:
        return page_struct(option, geometry.kv_heads, geometry.head_dim, policy).nbytes
    return 2 * policy.page_tokens * geometry.kv_heads * geometry.head_dim * layout.exact_itemsize


def case_plan(spec: CaseSpec) -> Plan:
    """A plan with the options of the case."""
    if len(spec.options) % 2:
        raise ValueError(f"two loops of equally many layers need an even number of options, got {len(spec.options)}")
    geometry = Geometry(
        architecture="case",
        loops=2,
        layers=len(spec.options) // 2,
        query_heads=spec.kv_heads * spec.group_queries,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
    )
    return Plan(
        name="case",
        fingerprint=Fingerprint(name="case", geometry=geometry),
        policy=spec.policy,
        options=spec.options,
        tau=spec.tau,
    )


def make_case(spec: CaseSpec, device: torch.device | str = "cpu") -> Case:
    """Generate a case on ``device`` (the same spec and device type give the same bytes)."""
    device = torch.device(device)
    layout = lay_out(
        case_plan(spec),
        exact_itemsize=spec.dtype.itemsize,
        history_block_tokens=spec.history_block_tokens,
        window_block_tokens=spec.window_block_tokens,
    )
    generator = torch.Generator(device=device).manual_seed(spec.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    policy, rows = spec.policy, len(spec.tokens)
    history_table, window_table, blocks = _allocate(spec, layout, generator, device)
    pool = torch.full((blocks, layout.block_bytes), 0xFF, dtype=torch.uint8, device=device)
    cells, query_heads = len(layout.cells), spec.kv_heads * spec.group_queries
    q = torch.zeros(cells, rows, query_heads, spec.head_dim, dtype=spec.dtype, device=device)
    k_new = torch.zeros(cells, rows, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
    case = Case(
        spec=spec,
        layout=layout,
        pool=pool,
        history_table=history_table,
        window_table=window_table,
        seq_lens=torch.tensor(spec.tokens, dtype=torch.int32, device=device),
        q=q,
        k_new=k_new,
        v_new=torch.zeros_like(k_new),
    )
    order = sorted(range(cells), key=lambda cell: layout.cells[cell].option.shares)  # holders first
    for row, tokens in enumerate(spec.tokens):
        if tokens == 0:
            continue
        shared_q: dict[int, Tensor] = {}
        for cell in order:
            holder = layout.cells[cell].holder
            queries = normal(spec.kv_heads, spec.group_queries, spec.head_dim)
            queries = queries[:, :1] + 0.15 * queries  # queries of a group resemble each other
            if holder != cell:  # looks for the same tokens as its source, a little differently
                queries = shared_q[holder] + 0.1 * queries
            shared_q[cell] = queries
            exact_q = queries.flatten(0, 1).to(spec.dtype)
            keys, values = _keys_and_values(spec, policy, tokens, exact_q.float(), normal, generator)
            q[cell, row] = exact_q
            k_new[cell, row], case.v_new[cell, row] = keys[-1], values[-1]
            _store_row(case, cell, row, tokens, keys, values, own=holder == cell)
    return case


def _allocate(
    spec: CaseSpec, layout: Layout, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Random, disjoint blocks for every row; entries that the policy leaves null stay 0."""
    policy, bh, bw = spec.policy, layout.history_block_tokens, layout.window_block_tokens
    longest = max(spec.tokens)
    history = torch.zeros(len(spec.tokens), max(1, -(-policy.history_end(max(longest, 1)) // bh)), dtype=torch.int32)
    window = torch.zeros(len(spec.tokens), max(1, -(-longest // bw)), dtype=torch.int32)
    wanted: list[tuple[Tensor, int, int]] = []
    for row, tokens in enumerate(spec.tokens):
        end = policy.history_end(tokens) if tokens else 0
        if end > policy.sink_tokens:
            wanted += [(history, row, i) for i in range(policy.sink_tokens // bh, -(-end // bh))]
        for i in range(-(-tokens // bw)):
            sink, recent = i * bw < policy.sink_tokens, (i + 1) * bw > end
            if sink or recent or spec.keep_exact:
                wanted.append((window, row, i))
    blocks = len(wanted) + 1
    ids = (torch.randperm(len(wanted), generator=generator, device=device) + 1).tolist()
    for (table, row, i), block in zip(wanted, ids, strict=True):
        table[row, i] = block
    return history.to(device), window.to(device), blocks


def _keys_and_values(
    spec: CaseSpec,
    policy: Policy,
    tokens: int,
    q: Tensor,
    normal: Callable[..., Tensor],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Keys and values [N, H, D] whose scores against q [Hq, D] are planted."""
    heads, dim = spec.kv_heads, spec.head_dim
    keys = normal(tokens, heads, dim) * (0.3 + normal(1, heads, dim).abs()) + 2.0 * normal(1, heads, dim)
    values = normal(tokens, heads, dim) * (0.2 + 0.5 * normal(1, heads, dim).abs())
    mean = q.unflatten(0, (heads, -1)).mean(1)  # [H, D]
    threshold = (spec.tau if spec.tau is not None else _PLANTED_TAU_BITS) * math.log(2.0)
    uniform = torch.rand(tokens, heads, generator=generator, device=q.device)
    hot = torch.rand(tokens, heads, generator=generator, device=q.device) < spec.hot_share
    depth = _COLD_DEPTH_BITS * math.log(2.0)
    wanted = torch.where(hot, -threshold * 0.9 * uniform, -threshold * 1.08 - depth * uniform)
    sink = min(policy.sink_tokens, tokens)
    wanted[:sink] = -threshold * 0.5 * uniform[:sink]
    wanted[0] = 0.0  # the first token is the strongest, as in attention sinks
    end = policy.history_end(tokens)
    wanted[end:] = -threshold * uniform[end:]
    scale = dim**-0.5
    scores = torch.einsum("nhd,hd->nh", keys, mean) * scale
    keys += ((wanted - scores) / (scale * mean.square().sum(-1))).unsqueeze(-1) * mean
    return keys.to(spec.dtype), values.to(spec.dtype)


def _store_row(case: Case, cell: int, row: int, tokens: int, keys: Tensor, values: Tensor, *, own: bool) -> None:
    spec, layout, policy = case.spec, case.layout, case.spec.policy
    end = policy.history_end(tokens)
    position = torch.arange(tokens - 1, device=keys.device)  # the newest token is written by the step itself
    if not spec.keep_exact:
        position = position[(position < policy.sink_tokens) | (position >= end)]
    size = layout.window_block_tokens
    blocks = case.window_table[row].long()[position // size]
    view = case.window_view()
    view[blocks, cell, 0, position % size], view[blocks, cell, 1, position % size] = keys[position], values[position]
    if not own or end <= policy.sink_tokens:
        return
    data = coded_pages(layout, cell, keys[policy.sink_tokens : end], values[policy.sink_tokens : end])
    page = torch.arange(policy.sink_tokens // policy.page_tokens, end // policy.page_tokens, device=keys.device)
    per_block, offset = layout.pages_per_block, layout.cells[cell].history_offset
    blocks = case.history_table[row].long()[page // per_block]
    case.history_view()[blocks, page % per_block, offset : offset + data.shape[1]] = data


def coded_pages(layout: Layout, cell: int, keys: Tensor, values: Tensor) -> Tensor:
    """Bytes [N, bytes] of whole pages of a cell that owns its history, from exact keys and values [N * 32, H, D]."""
    option, geometry, policy = layout.cells[cell].option, layout.geometry, layout.policy
    keys, values = (x.unflatten(0, (-1, policy.page_tokens)) for x in (keys, values))
    if not option.coded:
        return torch.stack([keys, values], dim=1).flatten(1).contiguous().view(torch.uint8)
    struct = page_struct(option, geometry.kv_heads, geometry.head_dim, policy)
    return pack_page(struct, encode_keys(keys, struct.bits), encode_values(values, struct.bits, struct.group))
